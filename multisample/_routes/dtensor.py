"""DTensors: each rank draws or perturbs its part without communication, so no device needs to hold all of it.

An element is a function of the seed, the call's offset and its position in the matrix. So a part is a window, and each
rank computes where its window begins. Only the generator's state must be the same on every rank.
"""

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import TensorMeta

from multisample.backends.launch import Operation

from .._arguments import check_choice, check_flag, describe
from .._checks.operands import check_arrays, common_length
from .._checks.window_and_options import check_rows, checked_window
from .._libraries import is_number, library_of
from .._libraries.library import Guard
from .._libraries.torch import TORCH, check_tensor
from .._model_parameters.perturb_plan import check_leaves, perturbed
from .._model_parameters.populations import decays_of
from .._model_parameters.spans import Block, steps_of
from .._model_parameters.structures import Structure
from .._operations import Call, vectors_of
from .._plan import guarded_plans, put_guarded
from .._randomness.generator import WORD_64, Generator
from .._randomness.generator_argument import check_generator
from .._randomness.seed_argument import batch_of, checked_key
from .._randomness.torch_offsets import taker, torch_generator
from .torch_perturb import factors_like
from .torch_transforms import as_int64

Cut: TypeAlias = tuple[int, int]
"""A mesh dimension that shards an axis, and the placement's split factor.

The split factor is the number of pieces to cut the axis into; the mesh dimension then shards each piece. The factor
exceeds 1 if a mesh dimension further right shards the axis first (PyTorch's `_StridedShard`), as in FSDP after tensor
parallelism.
"""


def draw_dtensor(call: Call, draw: Callable[..., Any]) -> Any:
    """Draw a call in which `mu`, `sigma` or `out` is a DTensor. The result has the placements of `mu` and `sigma`."""
    if call.operation == Operation.moments:
        found = next(name for name, x in vectors_of(call).items() if isinstance(x, DTensor))
        raise TypeError(
            f"{found}: expected an array of one device, got a DTensor: call weighted_moments with each rank's own part,"
            " at its dim_offset or sample_offset"
        )
    vectors = {name: x for name, x in (("mu", call.mu), ("sigma", call.sigma)) if not is_number(x)}
    for name, x in vectors.items():
        if not isinstance(x, DTensor):
            raise TypeError(
                f"{name}: expected a DTensor or a number where other arguments are DTensors,"
                f" got {describe(x)} of type {type(x).__name__}"
            )
    check_arrays(call)
    return draw_shard(call, _model(vectors).device_mesh, None, draw)


def _model(vectors: dict[str, Any]) -> Any:
    """The DTensor whose placements the result gets: the one with more cuts."""
    first, last = next(iter(vectors.values())), vectors[max(vectors)]
    if first.placements == last.placements:
        return first
    return max(vectors.values(), key=lambda x: len(_cuts_of(x.placements, 0)))


def draw_shard(call: Call, mesh: Any, placements: Any, draw: Callable[..., Any]) -> Any:
    """Draw this rank's window by `draw`, in a DTensor. `placements` of None stands for those of `mu` and `sigma`."""
    n, dim_offset, sample_offset = checked_window(call.n, call.dim_offset, call.sample_offset)
    check_choice("layout", call.layout, ("dn", "nd"))
    check_flag("validate", call.validate)
    batch = batch_of(call.seed)
    if batch is not None:
        raise TypeError(f"seed: expected one seed for a sharded result, got a vector of {batch}")
    vectors = {name: x for name, x in (("mu", call.mu), ("sigma", call.sigma)) if not is_number(x)}
    for name, x in vectors.items():
        check_tensor(name, x)
    mu, sigma = _signature(vectors.get("mu"), mesh), _signature(vectors.get("sigma"), mesh)
    hashable_placements = tuple(placements) if type(placements) is list else placements
    # The mesh by identity: equal meshes may have different process groups.
    key = "shard", id(mesh), hashable_placements, n, call.layout, mu, sigma
    for known_mesh, draw_part in guarded_plans(key):
        if known_mesh() is mesh:
            return draw_part(call, mesh, dim_offset, sample_offset, draw)
    draw_part = _shard_plan(vectors, n, call.layout, mesh, placements)
    # The reference is weak because a mesh keeps its process group alive. If a forked child freed a process group, the
    # child would wait for threads that only its parent has.
    put_guarded(key, weakref.ref(mesh), draw_part)
    return draw_part(call, mesh, dim_offset, sample_offset, draw)


def _signature(x: Any, mesh: Any) -> Any:
    """The properties of `mu` or `sigma` that a plan depends on."""
    if x is None:
        return None
    return type(x), x.shape, x.layout, *((x.device_mesh == mesh, x.placements) if isinstance(x, DTensor) else ())


def _shard_plan(vectors: dict[str, Any], n: int, layout: str, mesh: Any, requested: Any) -> Callable[..., Any]:
    """``draw_part(call, mesh, dim_offset, sample_offset, draw)`` for calls of one kind; it refers to no mesh."""
    axis = int(layout == "nd")  # The axis of the result that counts dimensions.
    if requested is None:
        placements = tuple([_on_axis(p, axis) if _is_shard(p) else p for p in _model(vectors).placements])
    else:
        placements = _checked_placements(requested, mesh)
    d = common_length({name: tuple(x.shape) for name, x in vectors.items()})
    shape = torch.Size((n, d) if axis else (d, n))
    cuts = _cuts_of(placements, axis)
    rows, columns = _part(d, cuts, mesh), _part(n, _cuts_of(placements, 1 - axis), mesh)
    readers: dict[str, Callable[[Any], Any]] = {"mu": _itself, "sigma": _itself}
    for name, x in vectors.items():
        if isinstance(x, DTensor):
            readers[name] = _reader(name, x, d, rows, mesh, placements, cuts)
        else:
            readers[name] = _cutter(range(x.shape[0]) if x.ndim else rows, rows)
    wrap = _wrapper(placements, shape)

    def draw_part(call: Call, mesh: Any, dim_offset: int, sample_offset: int, draw: Callable[..., Any]) -> Any:
        check_rows(dim_offset, d)
        mu, sigma = readers["mu"](call.mu), readers["sigma"](call.sigma)
        if call.validate:
            numbers = {"d": d, "n": n, "dim_offset": dim_offset, "sample_offset": sample_offset}
            _check_agreement(mesh, sigma if is_number(mu) else mu, call.seed, call.generator, numbers)
        out = None if call.out is None else _local_target(call.out, tuple(shape), mesh, placements)
        part = call._replace(
            mu=mu, sigma=sigma, n=len(columns), out=out, dim_offset=dim_offset + rows.start,
            sample_offset=sample_offset + columns.start,
        ).repeated(draw)  # fmt: skip
        return wrap(part, mesh) if call.out is None else call.out

    return draw_part


def _itself(x: Any) -> Any:
    return x


def _cutter(held: range, rows: range) -> Callable[[Any], Any]:
    """A function that selects `rows` of tensors that have the rows `held`."""
    start, stop = rows.start - held.start, rows.stop - held.start
    return _itself if held == rows else lambda x: x[start:stop]


def _wrapper(placements: tuple[Any, ...], shape: torch.Size) -> Callable[[Any, Any], Any]:
    specs: dict[Any, tuple[type, dict[str, Any]]] = {}

    def wrap(part: Any, mesh: Any) -> Any:
        found = specs.get(part.dtype)
        if found is not None and not part.requires_grad:
            # `from_local` also records gradients, and takes several times as long as the draw.
            kind, fields = found
            spec: Any = object.__new__(kind)
            vars(spec).update(fields, mesh=mesh)
            return DTensor(part, spec, requires_grad=False)
        made = DTensor.from_local(part, mesh, placements, shape=shape, stride=(max(shape[1], 1), 1))
        # On a rank outside the mesh, every call needs `from_local`, which replaces `part` by an empty tensor.
        if mesh.get_coordinate() is not None:
            fields = {name: value for name, value in vars(made._spec).items() if name != "mesh"}
            specs[part.dtype] = type(made._spec), fields
        return made

    return wrap


# --- Placements -----------------------------------------------------------------------------------


def _is_shard(placement: Any) -> bool:
    return isinstance(placement, Shard) or hasattr(placement, "split_factor")


def _on_axis(placement: Any, axis: int) -> Any:
    """A shard of the same kind as `placement`, along `axis`."""
    if hasattr(placement, "split_factor"):
        return type(placement)(axis, split_factor=placement.split_factor)
    return type(placement)(axis)


def _cuts_of(placements: Sequence[Any], axis: int) -> list[Cut]:
    """The cuts of an axis, in the order in which they apply."""
    return [
        (mesh_dim, getattr(placement, "split_factor", 1))
        for mesh_dim, placement in enumerate(placements)
        if _is_shard(placement) and placement.dim == axis
    ]


def _checked_placements(placements: Any, mesh: Any) -> tuple[Any, ...]:
    """The placements of a matrix, checked, with negative axes converted to 0 and 1."""
    if not isinstance(placements, (list, tuple)) or len(placements) != mesh.ndim:
        raise ValueError(
            f"placements: expected {mesh.ndim}, one for each dimension of the mesh, got {describe(placements)}"
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


def _runs_of(length: int, cuts: list[Cut], mesh: Any) -> list[range]:
    """The parts of an axis that this rank holds, one after another; none if the rank is not in the mesh."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    runs = [range(length)]
    for mesh_dim, pieces in cuts:
        runs = [
            run
            for piece in range(pieces)
            for run in _chunk(_chunk(runs, pieces, piece), mesh.size(mesh_dim), coordinate[mesh_dim])
        ]
    return runs


def _part(length: int, cuts: list[Cut], mesh: Any) -> range:
    """The part of an axis that this rank draws; empty if the rank is not in the mesh."""
    runs = _runs_of(length, cuts, mesh)
    if not runs:
        return range(0)
    if any(before.stop != after.start for before, after in itertools.pairwise(runs)):
        raise ValueError(
            "placements: expected contiguous shards, got pieces that begin at"
            f" {describe([run.start for run in runs])} on this rank; redistribute to Shard()"
        )
    return range(runs[0].start, runs[-1].stop)


def _chunk(runs: list[range], chunks: int, index: int) -> list[range]:
    """The runs of chunk `index`, if the elements of all `runs` are split into `chunks`."""
    size, start = Shard.local_shard_size_and_offset(sum(map(len, runs)), chunks, index)
    chunk = []
    for run in runs:
        chunk.append(run[max(start, 0) : max(start + size, 0)])
        start -= len(run)
    return [run for run in chunk if run]


def _reader(
    name: str, x: Any, d: int, rows: range, mesh: Any, placements: tuple[Any, ...], cuts: list[Cut]
) -> Callable[[Any], Any]:
    """A function that reads `rows` of DTensors like `x`; ValueError if this rank does not hold them."""
    if x.device_mesh != mesh:
        raise ValueError(f"{name}: expected a DTensor on the same mesh as the result, {mesh}, got {x.device_mesh}")
    for placement in x.placements:
        if not (isinstance(placement, Replicate) or (_is_shard(placement) and placement.dim == 0)):
            raise ValueError(f"{name}: expected placements Shard(0) or Replicate(), got {placement}; redistribute it")
    vector_cuts = _cuts_of(x.placements, 0)
    # If the result's cuts begin with the vector's cuts, each rank holds the rows that it draws.
    if vector_cuts != cuts[: len(vector_cuts)]:
        raise ValueError(
            f"{name}: expected it replicated, or sharded over dimensions as the result is, got placements"
            f" {x.placements} for a result with {placements}; redistribute it"
        )
    # If the vector is replicated and the result is sharded, each rank computes one term of the gradient.
    gradients = [
        Partial() if isinstance(own, Replicate) and not isinstance(placement, Replicate) else own
        for own, placement in zip(x.placements, placements, strict=True)
    ]
    cut = _cutter(_part(d, vector_cuts, mesh) if x.ndim else rows, rows)

    def read(x: Any) -> Any:
        local = x.to_local(grad_placements=gradients) if x.requires_grad else x._local_tensor
        # A collective may still write an AsyncCollectiveTensor. Every operation except a view waits for it.
        if type(local) is not torch.Tensor and hasattr(local, "trigger_wait"):
            local = local.clone()
        return cut(local)

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
    """Gather seeds, offsets and sizes from all ranks; ValueError on every rank if they differ."""
    if mesh.get_coordinate() is None:
        return
    if seed is not None:
        key = dict(zip(("seed", "seed's offset"), checked_key(seed), strict=True))
    else:
        key = dict(zip(("generator's seed", "generator's offset"), _next_key(generator, array), strict=True))
    numbers = key | numbers
    row = torch.tensor([[as_int64(number) for number in numbers.values()]], device=array.device)
    table = DTensor.from_local(row, mesh, [Shard(0)] * mesh.ndim, run_check=False).full_tensor().tolist()
    ranks = mesh.mesh.flatten().tolist()
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
    """The seed and offset that the next call will take; takes neither."""
    library = library_of("mu", array)
    device = library.device("mu", array)
    check_generator(generator, library, device)
    if isinstance(generator, Generator):
        state = generator.state
        return state["seed"], state["offset"]
    return taker(str(device))(torch_generator(generator, str(device)).clone_state())


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


# --- Parameters -----------------------------------------------------------------------------------


def perturb_dtensors(
    parameters: Structure, out: Structure | None, given_out: Any, coefficients: Any, seed: Any, member: Any,
    decay: Any, fast_math: bool, ids: Any, backend: str,
) -> Any:  # fmt: skip
    """`perturbed` with DTensors: each rank perturbs the elements that it holds."""
    if out is not None:
        check_leaves(out)
    targets = () if out is None or out is parameters else out.arrays
    key = "shards", len(parameters.arrays), len(targets)
    for guard, known in guarded_plans(key):
        if guard(parameters.arrays, targets) is not None:
            shards = known
            break
    else:
        blocks = [_blocks_of(parameters.label("parameters", k), x) for k, x in enumerate(parameters.arrays)]
        shards = functools.partial(_itself, blocks)
        if out is not None:
            for k, (x, target) in enumerate(zip(parameters.arrays, out.arrays, strict=True)):
                _check_parameter_target(out.label("out", k), target, x)
        put_guarded(key, _spec_guard([*parameters.arrays, *targets]), shards)
    part = parameters._replace(arrays=_locals_of(parameters.arrays), rebuild=list)
    held = None if out is None else part if out is parameters else out._replace(arrays=_locals_of(targets))
    with torch.no_grad():
        results = perturbed(part, held, given_out, coefficients, seed, member, decay, fast_math, ids, backend, shards)
    if out is not None:
        torch.autograd.graph.increment_version([x for x in out.arrays if isinstance(x, DTensor)])
        return given_out
    arrays = parameters.arrays
    # `from_local` would make an equal spec, in several times the time.
    made = [
        DTensor(result, _spec_like(x, result), requires_grad=False) if isinstance(x, DTensor) else result
        for x, result in zip(arrays, results, strict=True)
    ]
    record = TORCH.recorder(arrays) if torch.is_grad_enabled() else None
    if record is not None:
        factors = factors_like(decays_of(decay, parameters), arrays)
        is_larger = any(result.dim() > x.dim() for x, result in zip(arrays, results, strict=True))
        made = list(record(made, arrays, factors, results[0].shape[0] if is_larger else None))
    return parameters.rebuild(made)


def _spec_like(x: Any, result: Any) -> Any:
    """The spec of the whole tensor of which `result` is a part. In a population, it has one more axis than `x`."""
    spec = x._spec
    if result.dim() == x.dim():
        return spec
    shape = (result.shape[0], *x.shape)
    meta = TensorMeta(torch.Size(shape), steps_of(shape), x.dtype)
    placements = tuple([_on_axis(p, p.dim + 1) if _is_shard(p) else p for p in x.placements])
    return type(spec)(spec.mesh, placements, tensor_meta=meta)


def _spec_guard(every: list[Any]) -> Guard:
    """The guard of arrays that have the specs of `every`: mesh, placements and shape. It keeps no mesh alive."""
    known = [weakref.ref(x._spec) if isinstance(x, DTensor) else lambda: None for x in every]

    def guard(read: Sequence[Any], written: Sequence[Any]) -> bytes | None:
        specs = [getattr(x, "_spec", None) for x in (*read, *written)]
        return b"" if all(a is b() or a == b() for a, b in zip(specs, known, strict=True)) else None

    return guard


def _locals_of(arrays: Sequence[Any]) -> list[Any]:
    """The tensors that this rank holds."""
    held = [getattr(x, "_local_tensor", x) for x in arrays]
    if any(hasattr(kind, "trigger_wait") for kind in set(map(type, held))):
        held = [x.wait() if hasattr(x, "trigger_wait") else x for x in held]
    return held


def _blocks_of(name: str, x: Any) -> tuple[Block, ...] | None:
    """The blocks of a parameter that this rank holds; None for a tensor that is not sharded."""
    if not isinstance(x, DTensor):
        return None
    for placement in x.placements:
        if not (isinstance(placement, Replicate) or _is_shard(placement)):
            raise ValueError(f"{name}: expected placements Shard or Replicate(), got {placement}; redistribute it")
    shape = tuple(x.shape)
    runs = [_runs_of(length, _cuts_of(x.placements, axis), x.device_mesh) for axis, length in enumerate(shape)]
    if x.device_mesh.get_coordinate() is None:
        return ()
    steps = steps_of(shape)
    begins = [[sum(map(len, of_axis[:k])) for k in range(len(of_axis))] for of_axis in runs]
    blocks = []
    for index in itertools.product(*(range(len(of_axis)) for of_axis in runs)):
        held = [of_axis[k] for of_axis, k in zip(runs, index, strict=True)]
        blocks.append(
            Block(
                tuple(of_axis[k] for of_axis, k in zip(begins, index, strict=True)), tuple(map(len, held)),
                sum(run.start * step for run, step in zip(held, steps, strict=True)), steps,
            )
        )  # fmt: skip
    return tuple(blocks)


def _check_parameter_target(name: str, target: Any, x: Any) -> None:
    if isinstance(target, DTensor) != isinstance(x, DTensor):
        raise TypeError(f"{name}: expected {type(x).__name__}, as the parameter is, got {type(target).__name__}")
    if isinstance(x, DTensor) and (target.device_mesh != x.device_mesh or target.placements != x.placements):
        raise ValueError(
            f"{name}: expected it on {x.device_mesh} with placements {x.placements}, got {target.device_mesh} with"
            f" {target.placements}"
        )
