"""DTensors: each rank draws its part of a matrix that no device need hold whole, and asks no other.

An element is a function of the seed, the call's offset and its place in the matrix, so that a part is a window, and
where the windows begin is arithmetic. Only the generator's state has to be the same on every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .._arguments import check_choice, check_flag, describe
from .._checks.operands import common_length
from .._libraries import is_number, library_of
from .._libraries.torch import check_tensor
from .._plan import ROWS, Call, PlanCache, checked_window
from .._randomness.generator import WORD_64, Generator
from .._randomness.source import check_generator, checked_key
from .._randomness.torch import taker, torch_generator

__all__ = ["draw_dtensor", "draw_shard"]

Cut: TypeAlias = tuple[int, int]
"""A mesh dimension whose ranks share an axis out, and into how many pieces that is cut first, each to be shared out.

One piece, unless several mesh dimensions share an axis out in another order than their own, as where FSDP comes after
tensor parallelism.
"""


def draw_dtensor(call: Call, draw: Callable[..., Any]) -> Any:
    """A call of which any of `mu`, `sigma` and `out` is a DTensor: the result is placed as `mu` and `sigma`."""
    check_choice("layout", call.layout, ("dn", "nd"))
    vectors = {name: x for name, x in (("mu", call.mu), ("sigma", call.sigma)) if not is_number(x)}
    for name, x in vectors.items():
        if not isinstance(x, DTensor):
            raise TypeError(
                f"{name}: expected a DTensor or a number where others are DTensors,"
                f" got {describe(x)} of type {type(x).__name__}"
            )
    if not vectors:
        raise TypeError(
            f"mu, sigma: expected at least one DTensor, as out is one, got the numbers {call.mu} and {call.sigma}"
        )
    return draw_shard(call, _model(vectors).device_mesh, None, draw)


def _model(vectors: dict[str, Any]) -> Any:
    """The DTensor that the result is placed like: the one that is cut further."""
    first, last = next(iter(vectors.values())), vectors[max(vectors)]
    if first.placements == last.placements:
        return first
    return max(vectors.values(), key=lambda x: len(_cuts(x.placements, 0)))


_ROWS = {"dn": 0, "nd": 1}
"""Which axis of the result counts dimensions."""


class _ShardPlan(NamedTuple):
    """All of a sharded call that depends on neither values nor windows: which part this rank draws, and from what.

    It keeps no mesh alive, and so no process group: to destroy one in a forked child would wait for threads that the
    child does not have.
    """

    mesh: weakref.ref[Any]
    placements: tuple[Any, ...]
    """Of the result."""
    d: int
    n: int
    rows: range
    columns: range
    shape: torch.Size
    readers: dict[str, Callable[[Any], Any]]
    """How to get this rank's part of `mu` and `sigma`."""
    wrap: Callable[[Any, Any], Any]
    """``wrap(part, mesh)``: a DTensor around a part of the result."""


_SHARD_PLANS: PlanCache[_ShardPlan] = PlanCache(256)


def draw_shard(call: Call, mesh: Any, placements: Any, draw: Callable[..., Any]) -> Any:
    """A DTensor around this rank's window, with `placements`, or placed as `mu` and `sigma` if that is None.

    `draw` is `multisample.sample`.
    """
    n, dim_offset, sample_offset = checked_window(call.n, call.dim_offset, call.sample_offset)
    check_flag("validate", call.validate)
    vectors = {name: x for name, x in (("mu", call.mu), ("sigma", call.sigma)) if not is_number(x)}
    for name, x in vectors.items():
        check_tensor(name, x)
    # Equal meshes may have other process groups.
    mu, sigma = (_signature(vectors.get(name), mesh) for name in ("mu", "sigma"))
    given = tuple(placements) if type(placements) is list else placements
    key = id(mesh), given, n, call.layout, mu, sigma
    try:
        plan = _SHARD_PLANS.get(key)
    except TypeError:  # Placements that have no hash are none.
        plan = None
    if plan is None or plan.mesh() is not mesh:
        plan = _shard_plan(vectors, n, call.layout, mesh, placements)
        _SHARD_PLANS.put(key, plan)
    if dim_offset + plan.d > ROWS:
        raise ValueError(f"dim_offset: expected dim_offset + d <= 2**32, got {dim_offset} + {plan.d}")
    local_mu, local_sigma = (plan.readers[name](x) for name, x in (("mu", call.mu), ("sigma", call.sigma)))
    if call.validate:
        _check_agreement(
            mesh, local_sigma if is_number(local_mu) else local_mu, call.seed, call.generator,
            {"d": plan.d, "n": n, "dim_offset": dim_offset, "sample_offset": sample_offset},
        )  # fmt: skip
    out = None if call.out is None else _local_target(call.out, tuple(plan.shape), mesh, plan.placements)
    rows, columns = plan.rows, plan.columns
    part = draw(
        local_mu, local_sigma, len(columns), backend=call.backend, seed=call.seed, generator=call.generator,
        noise=call.noise, dtype=call.dtype, out=out, fast_math=call.fast_math, dim_offset=dim_offset + rows.start,
        sample_offset=sample_offset + columns.start, validate=call.validate, layout=call.layout,
        antithetic=call.antithetic,
    )  # fmt: skip
    return plan.wrap(part, mesh) if call.out is None else call.out


def _signature(x: Any, mesh: Any) -> Any:
    """What a `_ShardPlan` depends on, of `mu` or `sigma`."""
    if x is None:
        return None
    return type(x), x.shape, x.layout, *((x.device_mesh == mesh, x.placements) if isinstance(x, DTensor) else ())


def _shard_plan(vectors: dict[str, Any], n: int, layout: str, mesh: Any, given: Any) -> _ShardPlan:
    if given is None:
        rows_axis, model = _ROWS[layout], _model(vectors)
        placements = tuple([_on_axis(p, rows_axis) if _is_shard(p) else p for p in model.placements])
    else:
        placements = _checked_placements(given, mesh)
    d = common_length({name: tuple(x.shape) for name, x in vectors.items()})
    axis = _ROWS[layout]
    shape = torch.Size((n, d) if axis else (d, n))
    cuts = _cuts(placements, axis)
    rows, columns = _part(d, cuts, mesh), _part(n, _cuts(placements, 1 - axis), mesh)
    readers: dict[str, Callable[[Any], Any]] = {"mu": _itself, "sigma": _itself}
    for name, x in vectors.items():
        if isinstance(x, DTensor):
            readers[name] = _reader(name, x, d, rows, mesh, placements, cuts)
        else:
            readers[name] = _cutter(x, rows)
    return _ShardPlan(weakref.ref(mesh), placements, d, n, rows, columns, shape, readers, _wrapper(placements, shape))


def _itself(x: Any) -> Any:
    return x


def _cutter(model: Any, rows: range) -> Callable[[Any], Any]:
    """A function that cuts `rows` out of tensors like `model`; a tensor with no dimension serves all rows."""
    start, stop = rows.start, rows.stop
    if not model.ndim or (start == 0 and stop == model.shape[0]):
        return _itself
    return lambda x: x[start:stop]


def _wrapper(placements: tuple[Any, ...], shape: torch.Size) -> Callable[[Any, Any], Any]:
    """A function that wraps local tensors as DTensors."""
    specs: dict[Any, tuple[type, dict[str, Any]]] = {}

    def wrap(part: Any, mesh: Any) -> Any:
        found = specs.get(part.dtype)
        if found is not None and not part.requires_grad:
            # `from_local`, which also records gradients, takes several times as long as the draw.
            kind, fields = found
            spec: Any = object.__new__(kind)
            vars(spec).update(fields, mesh=mesh)
            return DTensor(part, spec, requires_grad=False)
        made = DTensor.from_local(part, mesh, placements, shape=shape, stride=(max(shape[1], 1), 1))
        if mesh.get_coordinate() is not None:  # For ranks outside of the mesh, `from_local` changes the part.
            fields = {name: value for name, value in vars(made._spec).items() if name != "mesh"}
            specs[part.dtype] = type(made._spec), fields
        return made

    return wrap


# --- Placements -----------------------------------------------------------------------------------


def _is_shard(placement: Any) -> bool:
    return isinstance(placement, Shard) or hasattr(placement, "split_factor")


def _on_axis(placement: Any, axis: int) -> Any:
    """The same cut, of another axis."""
    if hasattr(placement, "split_factor"):
        return type(placement)(axis, split_factor=placement.split_factor)
    return type(placement)(axis)


def _cuts(placements: Sequence[Any], axis: int) -> list[Cut]:
    """How an axis is cut, in order."""
    return [
        (mesh_dim, getattr(placement, "split_factor", 1))
        for mesh_dim, placement in enumerate(placements)
        if _is_shard(placement) and placement.dim == axis
    ]


def _checked_placements(placements: Any, mesh: Any) -> tuple[Any, ...]:
    """Placements of a matrix, their axes counted from the front."""
    if not isinstance(placements, (list, tuple)) or len(placements) != mesh.ndim:
        raise ValueError(
            f"placements: expected one for each of the mesh's dimensions, {mesh.ndim}, got {describe(placements)}"
        )
    checked = []
    for placement in placements:
        if _is_shard(placement) and -2 <= placement.dim < 2:
            checked.append(_on_axis(placement, placement.dim % 2))
        elif isinstance(placement, Replicate):
            checked.append(placement)
        else:
            raise ValueError(f"placements: expected Shard(0), Shard(1) or Replicate(), got {placement}")
    return tuple(checked)


# --- Parts ----------------------------------------------------------------------------------------


def _part(length: int, cuts: list[Cut], mesh: Any) -> range:
    """The part of an axis that this rank has; none if it is not part of the mesh."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return range(0)
    runs = [range(length)]
    for mesh_dim, pieces in cuts:
        runs = [
            run
            for piece in range(pieces)
            for run in _chunk(_chunk(runs, pieces, piece), mesh.size(mesh_dim), coordinate[mesh_dim])
        ]
    if not runs:
        return range(0)
    if any(before.stop != after.start for before, after in pairwise(runs)):
        raise ValueError(
            "placements: expected shards that are in one piece each, got pieces that begin at"
            f" {describe([run.start for run in runs])} on this rank; redistribute to Shard()"
        )
    return range(runs[0].start, runs[-1].stop)


def _chunk(runs: list[range], chunks: int, index: int) -> list[range]:
    """One of the chunks of what the runs have together."""
    size, start = Shard.local_shard_size_and_offset(sum(map(len, runs)), chunks, index)
    chunk = []
    for run in runs:
        chunk.append(run[max(start, 0) : max(start + size, 0)])
        start -= len(run)
    return [run for run in chunk if run]


def _reader(
    name: str, x: Any, d: int, rows: range, mesh: Any, placements: tuple[Any, ...], cuts: list[Cut]
) -> Callable[[Any], Any]:
    """A function that reads the elements for `rows` of DTensors like `x`; this rank must have them."""
    if x.device_mesh != mesh:
        raise ValueError(f"{name}: expected a DTensor on the same mesh as the result, {mesh}, got {x.device_mesh}")
    for placement in x.placements:
        if not (isinstance(placement, Replicate) or (_is_shard(placement) and placement.dim == 0)):
            raise ValueError(f"{name}: expected placements Shard(0) or Replicate(), got {placement}; redistribute it")
    own = _cuts(x.placements, 0)
    # Cut in the same order and no further, every rank has what it needs.
    if own != cuts[: len(own)]:
        raise ValueError(
            f"{name}: expected it replicated, or sharded over dimensions as the result is, got placements"
            f" {x.placements} for a result with {placements}; redistribute it"
        )
    # Of what is replicated, ranks that draw different parts have different terms of the gradient.
    gradients = [
        Partial() if isinstance(given, Replicate) and not isinstance(placement, Replicate) else given
        for given, placement in zip(x.placements, placements, strict=True)
    ]
    has = _part(d, own, mesh) if x.ndim else rows
    start, stop = rows.start - has.start, rows.stop - has.start
    is_cut = has != rows

    def read(x: Any) -> Any:
        local = x.to_local(grad_placements=gradients) if x.requires_grad else x._local_tensor
        # What a collective is still writing; any operation but a view waits for it.
        if type(local) is not torch.Tensor and hasattr(local, "trigger_wait"):
            local = local.clone()
        return local[start:stop] if is_cut else local

    return read


def _local_target(out: Any, shape: tuple[int, int], mesh: Any, placements: tuple[Any, ...]) -> Any:
    if not isinstance(out, DTensor):
        raise TypeError(f"out: expected a DTensor, got {describe(out)} of type {type(out).__name__}")
    if tuple(out.shape) != shape:
        raise ValueError(f"out: expected shape {shape}, got {tuple(out.shape)}")
    if out.device_mesh != mesh or out.placements != placements:
        raise ValueError(
            f"out: expected it on {mesh} with placements {placements}, got {out.device_mesh} with {out.placements}"
        )
    return None if mesh.get_coordinate() is None else out.to_local()


# --- Agreement ------------------------------------------------------------------------------------


def _check_agreement(mesh: Any, array: Any, seed: Any, generator: Any, numbers: dict[str, int]) -> None:
    """ValueError on every rank of the mesh, unless all are about to draw the same matrix."""
    if mesh.get_coordinate() is None:
        return
    if seed is not None:
        key = dict(zip(("seed", "seed's offset"), checked_key(seed), strict=True))
    else:
        key = dict(zip(("generator's seed", "generator's offset"), _next_key(generator, array), strict=True))
    numbers = key | numbers
    gathered = torch.tensor([_signed(number) for number in numbers.values()], device=array.device)
    for mesh_dim in reversed(range(mesh.ndim)):
        group = mesh.get_group(mesh_dim)
        others = [torch.empty_like(gathered) for _ in range(mesh.size(mesh_dim))]
        torch.distributed.all_gather(others, gathered, group=group)
        gathered = torch.stack(others)
    ranks = mesh.mesh.flatten().tolist()
    table = gathered.view(len(ranks), len(numbers)).tolist()
    for name, column in zip(numbers, zip(*table, strict=True), strict=True):
        found: dict[int, list[int]] = {}
        for rank, number in zip(ranks, column, strict=True):
            found.setdefault(number % WORD_64, []).append(rank)
        if len(found) > 1:
            raise ValueError(
                f"{name}: expected the same on every rank, got "
                + ", ".join(f"{number} on {_named(ranks)}" for number, ranks in found.items())
            )


def _next_key(generator: Any, array: Any) -> tuple[int, int]:
    """Seed and offset that a call would take, and does not."""
    library = library_of("mu", array)
    device = library.device("mu", array)
    check_generator(generator, library, device)
    if isinstance(generator, Generator):
        state = generator.state
        return state["seed"], state["offset"]
    return taker(str(device))(torch_generator(generator, str(device)).clone_state())


def _signed(number: int) -> int:
    """As a tensor of int64 holds 64 bits."""
    return number - WORD_64 if number >= WORD_64 // 2 else number


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
