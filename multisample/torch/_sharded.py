"""A matrix that no device need hold whole: each rank draws its part of it, and asks no other.

An element is a function of the seed, the call's offset and its place in the matrix, so that a part is a window, and
where the windows begin is arithmetic. What has to be the same on every rank is the generator's state alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .._arguments import check_choice, check_flag, checked_integer, describe
from .._generator import WORD_64, Generator, take_from_torch, torch_generator
from .._libraries import library_of
from .._operands import common_length, is_number
from .._sample import ROWS, check_generator, checked_window, sample

__all__ = ["sample_dtensor", "sample_sharded"]

Cut: TypeAlias = tuple[int, int]
"""A mesh dimension whose ranks share an axis out, and into how many pieces that is cut first, each to be shared out.

One piece, unless several mesh dimensions share an axis out in another order than their own, as where FSDP comes after
tensor parallelism.
"""


def sample_sharded(
    mu: Any,
    sigma: Any,
    n: int,
    *,
    mesh: Any,
    placements: Sequence[Any],
    backend: str = "auto",
    seed: int | None = None,
    generator: Any = None,
    noise: Literal["independent", "shared"] = "independent",
    dtype: Any = None,
    out: Any = None,
    fast_math: bool = False,
    dim_offset: int = 0,
    sample_offset: int = 0,
    validate: bool = False,
    layout: Literal["dn", "nd"] = "dn",
    antithetic: bool = False,
) -> Any:
    """Draw one matrix of samples on the ranks of a device mesh, each its part.

    The DTensor's full matrix is that of `multisample.sample` on a single device, bit for bit, however it is placed:
    over samples, over dimensions, over both on a mesh of two dimensions, or whole on every rank. No rank communicates.

    Parameters
    ----------
    mu, sigma : torch.Tensor, DTensor or number, shape (d,) or (d, 1)
        Means, and standard deviations of at least 0: tensors that are whole and equal on every rank, or DTensors on
        `mesh`, replicated or sharded over dimensions as the result is. One of the two may be a number.
    n : int
        Number of samples in the whole matrix, at least 0; ``sample_offset + n <= 2**34``.
    mesh : torch.distributed.device_mesh.DeviceMesh
        The ranks, and the type of device that they draw on. Ranks that are not part of it may call too.
    placements : sequence of torch.distributed.tensor.Placement
        For each dimension of `mesh`, ``Shard(axis)`` of the result or ``Replicate()``. Shards are cut as by
        `torch.chunk`: they may be uneven, and the last ones empty.
    backend : str, default "auto"
        As for `multisample.sample`, here and below.
    seed : int, optional
        ``0 <= seed < 2**64``.
    generator : Generator or torch.Generator, optional
        Where to take a seed and an offset from: one in the same state on every rank. Each call advances it once on
        every rank that calls, whatever its part, so that it stays so. With neither `seed` nor `generator`, PyTorch's
        default generator of the rank's device: call ``torch.manual_seed`` with the same number on every rank.
    noise : {"independent", "shared"}, default "independent"
        Whether every component has noise of its own, or all dimensions use one row of noise.
    dtype : {"float16", "bfloat16", "float32", "float64"}, optional
        Type of the result.
    out : DTensor, shape (d, n), or (n, d) with layout "nd", optional
        Where to put the result: on `mesh`, placed as `placements` say.
    fast_math : bool, default False
        Take a faster, less exact transform on CUDA devices: the same bits on all GPUs of one kind.
    dim_offset, sample_offset : int, default 0
        Draw the window of the endless sample matrix that starts at this row and column; shards are parts of that.
    validate : bool, default False
        Look at the values in device memory, and make sure that all ranks draw the same matrix: with one collective
        for each dimension of `mesh`, so on every rank of it or on none.
    layout : {"dn", "nd"}, default "dn"
        One row for each dimension, or the transpose, one row for each sample.
    antithetic : bool, default False
        Draw the samples in pairs; a shard may cut a pair.

    Returns
    -------
    DTensor, shape (d, n), or (n, d) with layout "nd"
        On `mesh`, placed as `placements` say; its local tensor is C-contiguous unless it is that of `out`, and empty
        on ranks that are not part of `mesh`.

    Raises
    ------
    TypeError
        If `mesh` is no DeviceMesh, `mu` or `sigma` no tensor of PyTorch and no number, `out` no DTensor, and as by
        `multisample.sample`.
    ValueError
        If `placements` are not as above, or not as many as `mesh` has dimensions; if a tensor is on another type of
        device than `mesh`; if a DTensor is on another mesh, of partial sums, or sharded otherwise than the result; if
        `validate` finds ranks that differ; and as by `multisample.sample`.
    RuntimeError
        As by `multisample.sample`.

        An error on one rank alone leaves its generator behind the others'.

    Notes
    -----
    Gradients are those of DTensors: that of a replicated `mu` or `sigma` is of partial sums over the mesh dimensions
    which the result is sharded over, to be reduced where it is used. A plain tensor gets the gradient of this rank's
    part, and whoever passes one adds those of all ranks up.

    See Also
    --------
    multisample.sample : given DTensors, draws a result that is sharded over dimensions as they are.

    Examples
    --------
    On each of four ranks this would draw a quarter of the samples; here there is one.

    >>> import torch
    >>> from torch import distributed
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.tensor import Shard
    >>> import multisample.torch
    >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    >>> mesh = init_device_mesh("cpu", (1,))
    >>> mu = torch.zeros(3)
    >>> x = multisample.torch.sample_sharded(mu, 1.0, 1000, mesh=mesh, placements=[Shard(1)], seed=7)
    >>> x.shape, x.placements
    (torch.Size([3, 1000]), (Shard(dim=1),))
    >>> torch.equal(x.to_local(), multisample.sample(mu, 1.0, 1000, seed=7))
    True
    >>> distributed.destroy_process_group()
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh, got {describe(mesh)} of type {type(mesh).__name__}")
    for name, x in (("mu", mu), ("sigma", sigma)):
        if not (is_number(x) or isinstance(x, torch.Tensor)):
            raise TypeError(f"{name}: expected a tensor or a number, got {describe(x)} of type {type(x).__name__}")
        if isinstance(x, torch.Tensor) and not isinstance(x, DTensor) and x.device.type != mesh.device_type:
            raise ValueError(f"{name}: expected it on the mesh's type of device, {mesh.device_type}, got {x.device}")
    check_choice("layout", layout, ("dn", "nd"))
    return _draw(
        mu, sigma, n, mesh, _checked_placements(placements, mesh), out, layout, dim_offset, sample_offset, seed,
        generator, validate,
        backend=backend, noise=noise, dtype=dtype, fast_math=fast_math, antithetic=antithetic,
    )  # fmt: skip


def sample_dtensor(mu: Any, sigma: Any, n: Any, out: Any, layout: Any, *call: Any, **choices: Any) -> Any:
    """`multisample.sample` where any of `mu`, `sigma` and `out` is a DTensor: a result placed as `mu` and `sigma`."""
    check_choice("layout", layout, ("dn", "nd"))
    vectors = {name: x for name, x in (("mu", mu), ("sigma", sigma)) if not is_number(x)}
    for name, x in vectors.items():
        if not isinstance(x, DTensor):
            raise TypeError(
                f"{name}: expected a DTensor or a number where others are DTensors,"
                f" got {describe(x)} of type {type(x).__name__}"
            )
    if not vectors:
        raise TypeError(f"mu, sigma: expected at least one DTensor, as out is one, got the numbers {mu} and {sigma}")
    model = max(vectors.values(), key=lambda x: len(_cuts(x.placements, 0)))
    placements = tuple([_on_axis(p, _ROWS[layout]) if _is_shard(p) else p for p in model.placements])
    return _draw(mu, sigma, n, model.device_mesh, placements, out, layout, *call, **choices)


_ROWS = {"dn": 0, "nd": 1}
"""Which axis of the result counts dimensions."""


def _draw(
    mu: Any,
    sigma: Any,
    n: Any,
    mesh: Any,
    placements: tuple[Any, ...],
    out: Any,
    layout: Any,
    dim_offset: Any,
    sample_offset: Any,
    seed: Any,
    generator: Any,
    validate: Any,
    **choices: Any,
) -> Any:
    """What both calls come down to: this rank's window, and a DTensor around it."""
    n, dim_offset, sample_offset = checked_window(n, dim_offset, sample_offset)
    check_flag("validate", validate)
    vectors = {name: x for name, x in (("mu", mu), ("sigma", sigma)) if not is_number(x)}
    d = common_length({name: tuple(x.shape) for name, x in vectors.items()})
    if dim_offset + d > ROWS:
        raise ValueError(f"dim_offset: expected dim_offset + d <= 2**32, got {dim_offset} + {d}")
    axis = _ROWS[layout]
    shape = (n, d) if axis else (d, n)
    cuts = _cuts(placements, axis)
    rows = _part(d, cuts, mesh)
    columns = _part(n, _cuts(placements, 1 - axis), mesh)
    local = {"mu": mu, "sigma": sigma, "out": None}
    for name, x in vectors.items():
        if isinstance(x, DTensor):
            local[name] = _rows_of(name, x, d, rows, mesh, placements, cuts)
        else:
            local[name] = x[rows.start : rows.stop] if x.ndim else x
    if out is not None:
        local["out"] = _local_target(out, shape, mesh, placements)
    if validate:
        _check_agreement(
            mesh, next(local[name] for name in vectors), seed, generator,
            {"d": d, "n": n, "dim_offset": dim_offset, "sample_offset": sample_offset},
        )  # fmt: skip
    part = sample(
        n=len(columns), dim_offset=dim_offset + rows.start, sample_offset=sample_offset + columns.start,
        seed=seed, generator=generator, validate=validate, layout=layout, **local, **choices,
    )  # fmt: skip
    if out is not None:
        return out
    return DTensor.from_local(part, mesh, placements, shape=torch.Size(shape), stride=(max(shape[1], 1), 1))


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


def _rows_of(name: str, x: Any, d: int, rows: range, mesh: Any, placements: tuple[Any, ...], cuts: list[Cut]) -> Any:
    """The elements of DTensor `x` for `rows`, which have to be among those that this rank has."""
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
    local = x.to_local(grad_placements=gradients)
    if hasattr(local, "trigger_wait"):  # What a collective is still writing; any operation but a view waits for it.
        local = local.clone()
    if not x.ndim:
        return local
    start = _part(d, own, mesh).start
    return local[rows.start - start : rows.stop - start]


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
        key = {"seed": checked_integer("seed", seed, 0, WORD_64)}
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
    return take_from_torch(torch_generator(generator, str(device)).clone_state(), str(device))


def _signed(number: int) -> int:
    """As a tensor of int64 holds 64 bits."""
    return number - WORD_64 if number >= WORD_64 // 2 else number


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
