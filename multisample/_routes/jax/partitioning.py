"""Lowering of the primitives: one custom call for each device, which draws the window of that device.

XLA would gather the operands of a custom call that it cannot partition. Here each device moves the first row and column
of its window by its place in the mesh, and draws that window from its own part of mu and sigma, without communication.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multisample.backends.element_types import MATRIX_TYPES
from multisample.backends.launch import Operation

from ..._backends import choose
from . import handlers

__all__ = ["PLATFORMS", "Static", "check_type", "computing_type", "gradient", "sample"]

PLATFORMS = {"cpu": "cpu", "cuda": "cuda"}
"""JAX's platforms, and the kinds of devices that they are to a backend."""


class Static(NamedTuple):
    """All of a call that a compiled program is made for."""

    n: int
    dtype: str
    layout: str
    shared_noise: bool
    antithetic: bool
    fast_math: bool
    backend: str
    """The name as the caller gives it, which may be "auto"."""
    aligned: bool = False
    """Whether the first column is known to be a multiple of 8, which allows aligned stores on CUDA."""


def computing_type(dtype: str) -> Any:
    """The type in which elements of type `dtype` are computed."""
    return np.dtype(MATRIX_TYPES[dtype].computing)


def _options(static: Static, backend: str, *operands: Any) -> handlers.Options:
    """For operands mu, sigma, seed, and offsets unless these are 0."""
    batched = [x.shape[0] != 1 for x in operands] + [False] * (4 - len(operands))
    return handlers.Options(
        backend, static.dtype, static.layout, static.shared_noise, static.antithetic, static.fast_math, static.aligned,
        len(operands) == 4, *batched,
    )  # fmt: skip


def _axes(layout: str) -> tuple[int, int]:
    """The axes of a batch of matrices that count dimensions and samples."""
    return (1, 2) if layout == "dn" else (2, 1)


# --- Custom calls ---------------------------------------------------------------------------------


def check_type(x: Any, dtype: Any) -> None:
    """TypeError if an operand lost the type that it was traced with: a handler would read past its end."""
    if x.dtype != dtype:
        raise TypeError(
            f"jax_enable_x64: expected the setting with which the program was traced, got one that turns {dtype}"
            f" operands into {x.dtype}"
        )


def _draw(static: Static, platform: str, backend: str, n: int, *operands: Any) -> Any:
    """A batch of windows of `n` columns, for operands mu, sigma, seed, and offsets unless these are 0."""
    batch = next((x.shape[0] for x in operands if x.shape[0] != 1), 1)
    d = operands[0].shape[1]
    for vector in operands[:2]:
        check_type(vector, computing_type(static.dtype))
    shape = (batch, d, n) if static.layout == "dn" else (batch, n, d)
    options = _options(static, backend, *operands)
    if platform == "cpu":
        handlers.prepare_on_host(options, Operation.sample)
    result = jax.ShapeDtypeStruct(shape, jnp.dtype(static.dtype))
    return jax.ffi.ffi_call(handlers.TARGETS[Operation.sample], result)(*operands, options=options.encoded())


def _sums(static: Static, platform: str, backend: str, g: Any, *words: Any) -> list[Any]:
    """The sums over columns of a batch of matrices, and of their products with the noise."""
    check_type(g, jnp.dtype(static.dtype))
    real = computing_type(static.dtype)
    rows, columns = _axes(static.layout)
    vector = jax.ShapeDtypeStruct((g.shape[0], g.shape[rows]), real)
    options, results = _options(static, backend, g, g, *words), [vector, vector]
    if platform == "cuda":
        if not handlers.can_take_gradients(backend):  # Then XLA sums, and keeps the noise while it does.
            zeros = jnp.zeros((1, g.shape[rows]), real)
            noise_static = static._replace(dtype=real.name)
            z = _draw(noise_static, platform, backend, g.shape[columns], zeros, zeros + 1, *words)
            g = g.astype(real)
            return [g.sum(columns), (g * z).sum(columns)]
        shape = g.shape[0], g.shape[rows], g.shape[columns]
        size = handlers.scratch_size(options, Operation.gradient, *shape, 2)
        results.append(jax.ShapeDtypeStruct((8 * size,), np.uint8))
    call = jax.ffi.ffi_call(handlers.TARGETS[Operation.gradient], results)
    return list(call(g, *words, options=options.encoded())[:2])


# --- Windows --------------------------------------------------------------------------------------

_FIRST_ROW, _FIRST_COLUMN = 2, 4


def _moved(words: tuple[Any, ...], place: int, axes: Any, size: int) -> tuple[Any, ...]:
    """Seed and offsets, the number at `place` moved by `size` for each device before this one along mesh `axes`."""
    if axes is None or axes == ():
        return words
    seed, offsets = words if len(words) == 2 else (*words, jnp.zeros((1, 6), jnp.uint32))
    index = jax.lax.axis_index(axes).astype(jnp.uint32)
    low, high = offsets[:, place], offsets[:, place + 1]
    # The product has more than 32 bits: from pieces of 16 bits of the size, as there are fewer than 2**16 devices.
    for shift in range(0, 48, 16):
        piece = index * np.uint32(size >> shift & 0xFFFF)
        below = piece << np.uint32(shift) if shift < 32 else jnp.zeros_like(piece)
        above = piece >> np.uint32(32 - shift) if 0 < shift <= 32 else jnp.zeros_like(piece)
        low = low + below
        high = high + above + (low < below).astype(jnp.uint32)
        if shift == 32:
            high = high + piece - above
    return seed, offsets.at[:, place].set(low).at[:, place + 1].set(high)


def _on_one_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose arrays are not sharded over the mesh of the context: they are those of one device."""

    def traced(*operands: Any) -> Any:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return function(*operands)

    return traced


def _placed(sharding: Any, rank: int) -> tuple[Any, tuple[Any, ...]]:
    """A mesh, and the axes of it over which each axis of an array is sharded."""
    if isinstance(sharding, NamedSharding):
        spec = tuple(sharding.spec)
        return sharding.mesh, spec + (None,) * (rank - len(spec))
    # Without a mesh in the arguments or in the context, XLA's sharding is all there is: each axis is cut into tiles.
    devices = np.array(sharding._device_assignment)
    tiles = sharding._to_xla_hlo_sharding(rank)
    lengths, order = tiles.tile_assignment_dimensions(), tiles.tile_assignment_devices()
    if tiles.is_replicated() or list(order) != list(range(len(devices))):  # Each device draws all, and keeps its part.
        return Mesh(devices, ("device",)), (None,) * rank
    names = tuple(f"axis{i}" for i in range(len(lengths)))
    spec = tuple(name if length > 1 else None for name, length in zip(names[:rank], lengths[:rank], strict=True))
    return Mesh(devices.reshape(lengths), names), spec


def _size(mesh: Any, axes: Any) -> int:
    size = 1
    for axis in () if axes is None else (axes,) if isinstance(axes, str) else axes:
        size *= mesh.shape[axis]
    return size


def _part(length: int, mesh: Any, axes: Any) -> int:
    """The length of each device's part of an axis; the last one's is padded."""
    return -(-length // _size(mesh, axes))


def _without_padding(g: Any, columns: int, axes: Any, length: int) -> Any:
    """A device's part of a matrix of `length` columns, with zeros for those past the last."""
    size = g.shape[columns]
    if axes is None or axes == () or length % size == 0:
        return g
    index, whole = jax.lax.axis_index(axes), length // size
    left = jnp.where(index < whole, size, jnp.where(index == whole, length % size, 0))
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, g.shape, columns) < left, g, jnp.zeros_like(g))


def _label(x: Any, lone: str) -> str:
    """The name of the leading axis of an operand in a sharding rule."""
    return lone if x.shape[0] == 1 else "b"


def _words_rule(*words: Any) -> str:
    """The part of a sharding rule for the seed, and for offsets unless these are 0."""
    return ", ".join(f"{_label(x, lone)} {axis}" for x, lone, axis in zip(words, "rs", "kl", strict=False))


def _replicated_factors(rule: str) -> tuple[str, ...]:
    return tuple(name for name in "pqrksl" if name in rule.replace(",", " ").split())


def sample(platform: str) -> Callable[..., Any]:
    """The function that a sample becomes on `platform`."""

    def lowered(mu: Any, sigma: Any, *words: Any, static: Static) -> Any:
        handlers.register()
        backend = choose(static.backend, "jax", PLATFORMS[platform]).name
        rows, columns = _axes(static.layout)
        # JAX keeps these functions. They must not keep tracers.
        is_lone = [x.shape[0] == 1 for x in (mu, sigma, *words)]

        def shardings(mesh: Any, group: Any, row_axes: Any, column_axes: Any) -> tuple[Any, tuple[Any, ...]]:
            """Of the result and of the operands."""
            spec = [group, None, None]
            spec[rows], spec[columns] = row_axes, column_axes
            axes = [row_axes, row_axes, *[None] * len(is_lone[2:])]
            return NamedSharding(mesh, PartitionSpec(*spec)), tuple(
                NamedSharding(mesh, PartitionSpec(None if lone else group, own))
                for lone, own in zip(is_lone, axes, strict=True)
            )

        def partition(mesh: Any, operands: Any, result: Any) -> Any:
            mesh, spec = _placed(result.sharding, 3)
            row_axes, column_axes = spec[rows], spec[columns]
            out, into = shardings(mesh, spec[0], row_axes, column_axes)

            @_on_one_device
            def draw_window(mu: Any, sigma: Any, *words: Any) -> Any:
                n = _part(static.n, mesh, column_axes)
                words = _moved(words, _FIRST_ROW, row_axes, mu.shape[1])
                words = _moved(words, _FIRST_COLUMN, column_axes, n)
                part = static._replace(aligned=static.aligned and (_size(mesh, column_axes) == 1 or n % 8 == 0))
                return _draw(part, platform, backend, n, mu, sigma, *words)

            return mesh, draw_window, out, into

        def infer(mesh: Any, operands: Any, result: Any) -> Any:
            mesh, specs = _placed(operands[0].sharding, 2)[0], [_placed(x.sharding, 2)[1] for x in operands]
            group = next((s[0] for s in specs if s[0] is not None), None)
            row_axes = next((s[1] for s in specs[:2] if s[1] is not None), None)
            return shardings(mesh, group, row_axes, None)[0]

        call = custom_partitioning(functools.partial(_draw, static, platform, backend, static.n))
        rule = f"{_label(mu, 'p')} i, {_label(sigma, 'q')} i, {_words_rule(*words)} -> "
        rule += "b i j" if static.layout == "dn" else "b j i"
        call.def_partition(partition, infer, sharding_rule=rule, need_replication_factors=_replicated_factors(rule))
        return call(mu, sigma, *words)

    return lowered


def gradient(platform: str) -> Callable[..., Any]:
    """The function that a gradient becomes on `platform`."""

    def lowered(g: Any, *words: Any, static: Static) -> Any:
        handlers.register()
        backend = choose(static.backend, "jax", PLATFORMS[platform]).name
        sums = functools.partial(_sums, static, platform, backend)
        rows, columns = _axes(static.layout)
        length, is_lone = g.shape[columns], [x.shape[0] == 1 for x in words]

        def partition(mesh: Any, operands: Any, results: Any) -> Any:
            mesh, spec = _placed(operands[0].sharding, 3)
            row_axes, column_axes = spec[rows], spec[columns]
            vector = NamedSharding(mesh, PartitionSpec(spec[0], row_axes))
            leads = (None if lone else spec[0] for lone in is_lone)
            into = (
                NamedSharding(mesh, PartitionSpec(*spec)),
                *(NamedSharding(mesh, PartitionSpec(lead, None)) for lead in leads),
            )

            @_on_one_device
            def sum_window(g: Any, *words: Any) -> Any:
                words = _moved(words, _FIRST_ROW, row_axes, g.shape[rows])
                words = _moved(words, _FIRST_COLUMN, column_axes, g.shape[columns])
                totals = sums(_without_padding(g, columns, column_axes, length), *words)
                return totals if _size(mesh, column_axes) == 1 else [jax.lax.psum(x, column_axes) for x in totals]

            return mesh, sum_window, [vector, vector], into

        def infer(mesh: Any, operands: Any, results: Any) -> Any:
            mesh, spec = _placed(operands[0].sharding, 3)
            vector = NamedSharding(mesh, PartitionSpec(spec[0], spec[rows]))
            return [vector, vector]

        call = custom_partitioning(lambda g, *words: sums(g, *words))
        rule = ("b i j, " if static.layout == "dn" else "b j i, ") + f"{_words_rule(*words)} -> b i, b i"
        call.def_partition(
            partition, infer, sharding_rule=rule, reduction_factors=("j",),
            need_replication_factors=_replicated_factors(rule),
        )  # fmt: skip
        return call(g, *words)

    return lowered
