"""Lowering of the primitives: one custom call for each device, which draws the window of that device.

XLA would gather the operands of a custom call that it cannot partition. From its place in the mesh, each device finds
where its window begins. It draws the window from its own part of mu and sigma, without communication.
For each model parameter, a device computes the index of its block's first element.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multisample.backends.launch import Operation

from ..._backends import choose
from ..._tracing import is_symbol
from . import handlers
from .keys import halves_of
from .static import Static

PLATFORMS = ("cpu", "cuda")
"""JAX's platform names. Backends use the same names for device kinds."""


def batch_of(*operands: Any) -> int:
    """The length of the batch. An operand's first axis has this length, or 1 if the whole batch shares the operand."""
    return next((x.shape[0] for x in operands if x.shape[0] != 1), 1)


def _custom_call(platform: str, static: Static, *operands: Any) -> list[Any]:
    """The results on one device. `static` has the lengths of that device."""
    for name, x in zip(static.reads, operands, strict=False):
        dtype = static.type_of(name)
        if x.dtype != dtype:  # A handler would read past the end of the operand.
            raise TypeError(
                f"jax_enable_x64: expected the setting with which the program was traced, got one that turns {dtype}"
                f" operands into {x.dtype}"
            )
    # Scratch memory of a size that is unknown cannot be a result.
    on_device = platform == "cuda"
    needs_size = on_device and static.has_scratch and any(map(is_symbol, (static.d, static.n)))
    if static.operation == Operation.gradient and (needs_size or not handlers.can_take_gradients(static, on_device)):
        return _sums_of_stored_noise(platform, static, *operands)
    if needs_size:
        raise TypeError(f"mu, sigma: expected lengths that are known while JAX traces on CUDA, got {static.d}")
    results = [jax.ShapeDtypeStruct(static.batch + static.shape(name), static.type_of(name)) for name in static.writes]
    aliases = {k: k for k, x in enumerate(results) if static.in_place and x.shape == operands[k].shape}
    if not on_device:
        handlers.prepare_on_host(static)
    elif static.has_scratch:
        results.append(jax.ShapeDtypeStruct((8 * handlers.scratch_size(static),), np.uint8))
    of_blocks = on_device and len(operands) > len(static.reads) + 2
    name = handlers.register(static.operation, on_device, of_blocks)
    target = jax.ffi.ffi_call(name, results, input_output_aliases=aliases)
    return list(target(*operands, options=static.encoded()))[: len(static.writes)]


def _sums_of_stored_noise(platform: str, static: Static, g: Any, *words: Any) -> list[Any]:
    """The gradient with a backend that sums no gradients: XLA stores the noise, then adds it up."""
    real, columns = static.computing_type, 1 + static.axes("matrix").index("j")
    zeros = jnp.zeros(static.d, real)
    batched = tuple(name for name in static.batched if name != "matrix")
    noise = static._replace(operation=Operation.sample, dtype=real.name, batched=batched)
    (z,) = _custom_call(platform, noise, zeros, zeros + 1, *words)
    g = g.astype(real)
    return [g.sum(columns), (g * z).sum(columns)]


def _one_by_one(call: Callable[..., list[Any]], *operands: Any) -> list[Any]:
    """The results of a batch, whose elements `call` runs one after another."""
    if batch_of(*operands) == 1:
        return [x[None] for x in call(*(x[0] for x in operands))]

    def run(elements: list[Any]) -> list[Any]:
        own = iter(elements)
        return call(*(x[0] if x.shape[0] == 1 else next(own) for x in operands))

    results: list[Any] = jax.lax.map(run, [x for x in operands if x.shape[0] != 1])
    return results


_FIRST_ROW, _FIRST_COLUMN = 2, 4


def _moved(words: tuple[Any, ...], place: int, axes: Any, size: int) -> tuple[Any, ...]:
    """Seed and offsets. The number at `place` grows by `size` for each device before this one along the mesh `axes`."""
    if axes is None or axes == ():
        return words
    seed, offsets = with_offsets(words)
    low, high = _added(offsets[..., place], offsets[..., place + 1], axes, size)
    return seed, offsets.at[..., place].set(low).at[..., place + 1].set(high)


def with_offsets(words: tuple[Any, ...]) -> tuple[Any, Any]:
    """Seed and offsets. Offsets are zeros if the program has no operand for them."""
    (seed, *offsets) = words
    return seed, offsets[0] if offsets else jnp.zeros((*seed.shape[:-1], 6), jnp.uint32)


def _added(low: Any, high: Any, axes: Any, size: int) -> tuple[Any, Any]:
    """A number, as two words, plus `size` for each device before this one along mesh `axes`."""
    # The sum may exceed 32 bits, and JAX may lack integers of 64 bits: look the product up.
    products = np.arange(jax.lax.axis_size(axes), dtype=np.uint64) * np.uint64(size)
    high_half, low_half = jnp.asarray(halves_of(products))[jax.lax.axis_index(axes)]
    low = low + low_half
    return low, high + high_half + (low < low_half).astype(jnp.uint32)


def _places(arrays: Any, axes: list[tuple[str, ...]]) -> tuple[Any, dict[str, Any]]:
    """A mesh, and for each axis of these arrays the mesh axes that shard it."""
    mesh: Any = None
    places: dict[str, Any] = {}
    for x, names in zip(arrays, axes, strict=True):
        mesh = getattr(x.sharding, "mesh", None)
        if mesh is None:  # In a partly manual `jax.shard_map`, each device draws all, and keeps its part.
            return Mesh(np.array(x.sharding._device_assignment), ("device",)), {}
        places |= dict(zip(names, x.sharding.spec, strict=False))
    return mesh, places


def _size(mesh: Any, axes: Any) -> int:
    axes = () if axes is None else (axes,) if isinstance(axes, str) else axes
    return math.prod(mesh.shape[axis] for axis in axes)


def _part(length: int, mesh: Any, axes: Any) -> int:
    """The length of each device's part of an axis; the last one's is padded."""
    return -(-length // _size(mesh, axes))


def _without_padding(g: Any, columns: int, axes: Any, length: int) -> Any:
    """The device's part of a matrix with `length` columns. Padding columns are set to zero."""
    size = g.shape[columns]
    if axes is None or axes == () or length % size == 0:
        return g
    index, whole = jax.lax.axis_index(axes), length // size
    left = jnp.where(index < whole, size, jnp.where(index == whole, length % size, 0))
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, g.shape, columns) < left, g, jnp.zeros_like(g))


def lowered(platform: str, *operands: Any, static: Static) -> Any:
    """The function that a primitive becomes on `platform`."""
    if not jax.config.jax_use_shardy_partitioner and jax.device_count() > 1:
        raise ValueError("sharding: expected Shardy, JAX's default partitioner, got jax_use_shardy_partitioner=False")
    static = static._replace(backend=choose(static.backend, "jax", platform).name)
    names, size = static.names(len(operands)), batch_of(*operands)
    is_lone = [name != "matrix" and x.shape[0] == 1 for name, x in zip(names, operands, strict=True)]
    batched = tuple(name for name, lone in zip(names, is_lone, strict=True) if not lone)
    lengths = (size,) if static.parameters else (size, static.d, static.n)
    if 0 in lengths:  # There is nothing to draw or to sum.
        return [jnp.zeros((size, *static.shape(name)), static.type_of(name)) for name in static.writes]
    # A launch of perturb has one factor for each parameter, and no batch if each coefficient has a key.
    if static.operation == Operation.moments or "factors" in batched or (static.has_row_keys and batched):
        return _one_by_one(functools.partial(_custom_call, platform, static), *operands)
    static = static._replace(batched=batched, size=size)
    call = functools.partial(_custom_call, platform, static)
    axes = [("b",) * (name in batched) + static.axes(name) for name in names]
    writes_axes = [("b",) * len(static.batch) + static.axes(name) for name in static.writes]

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        # JAX keeps this function, so it must not keep tracers.
        if "matrix" in static.reads:
            mesh, places = _places(operands[:1], axes[:1])
        else:
            mesh, places = _places(results, writes_axes)
        part = static._replace(size=_part(static.size, mesh, places.get("b")))
        window = (_blocks if static.parameters else _window)(platform, part, mesh, places)

        def run(*operands: Any) -> list[Any]:
            # The operands are one device's parts, so the mesh of the context does not apply.
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                return window(*operands)

        of_results, of_operands = (
            [NamedSharding(mesh, PartitionSpec(*map(places.get, own))) for own in every]
            for every in (writes_axes, axes)
        )
        return mesh, run, of_results, tuple(of_operands)

    shared = custom_partitioning(call)
    rule = " -> ".join(", ".join(map(" ".join, names)) for names in (axes, writes_axes))
    read = list(dict.fromkeys(axis for own in axes for axis in own))
    shared.def_partition(
        partition, sharding_rule=rule, reduction_factors=("j",) if "j" in read else (),
        need_replication_factors=tuple(axis for axis in read if axis in "klmt"),
    )  # fmt: skip
    results = shared(*(jax.lax.squeeze(x, (0,)) if lone else x for x, lone in zip(operands, is_lone, strict=True)))
    return results if static.batch else [x[None] for x in results]


def _window(platform: str, static: Static, mesh: Any, places: dict[str, Any]) -> Callable[..., list[Any]]:
    """The function that draws or sums the window of a device; `places` are the mesh axes of each axis."""
    rows, columns = places.get("i"), places.get("j")
    d, n = _part(static.d, mesh, rows), _part(static.n, mesh, columns)
    is_whole = _size(mesh, columns) == 1
    part = static._replace(d=d, n=n, aligned=static.aligned and (is_whole or n % 8 == 0))
    count, axis = len(static.reads), 1 + static.axes("matrix").index("j")

    def run(*operands: Any) -> list[Any]:
        reads, words = operands[:count], operands[count:]
        words = _moved(words, _FIRST_ROW, rows, d)
        words = _moved(words, _FIRST_COLUMN, columns, n)
        if static.reads != ("matrix",):
            return _custom_call(platform, part, *reads, *words)
        totals = _custom_call(platform, part, _without_padding(reads[0], axis, columns, static.n), *words)
        return totals if is_whole else [jax.lax.psum(x, columns) for x in totals]

    return run


def _blocks(platform: str, static: Static, mesh: Any, places: dict[str, Any]) -> Callable[..., list[Any]]:
    """The function that perturbs a device's blocks of model parameters."""
    moves: list[list[tuple[Any, int]]] = []
    parts = []
    for name, whole in zip(static.writes, static.parameters, strict=True):
        axes = [places.get(axis) for axis in static.axes(name)]
        shape = tuple(_part(length, mesh, axis) for length, axis in zip(whole.shape, axes, strict=True))
        moves.append(
            [(axis, n * step) for axis, n, step in zip(axes, shape, whole.steps, strict=True) if _size(mesh, axis) > 1]
        )
        parts.append(whole._replace(shape=shape))
    part, count = static._replace(parameters=tuple(parts)), len(static.reads)

    def run(*operands: Any) -> list[Any]:
        if not any(moves):
            return _custom_call(platform, part, *operands)
        begins = []
        for of_parameter in moves:
            begin = jnp.zeros((), jnp.uint32), jnp.zeros((), jnp.uint32)
            for axes, size in of_parameter:
                begin = _added(*begin, axes, size)
            begins.append(jnp.stack(begin))
        return _custom_call(platform, part, *operands[:count], *with_offsets(operands[count:]), jnp.stack(begins))

    return run
