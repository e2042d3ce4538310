"""The plan of `perturb`: everything that does not depend on addresses, coefficients, seed or member."""

from __future__ import annotations

import collections
import struct
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from multisample.backends import generic
from multisample.backends.contract import HostArray
from multisample.backends.element_types import MATRIX_TYPES
from multisample.backends.launch import HOST as ON_HOST
from multisample.backends.launch import SPAN, ElementType, Launch, Operation, Span

from .._arguments import check_flag, checked_integer, describe
from .._backends import choose
from .._call import ROWS
from .._libraries import BY_TYPE, HOST, Device, Library, Operand, described, is_number, library_of
from .._libraries.library import NOUNS
from .._libraries.numpy import cached_dtype
from .._plan import PlanCache
from .._randomness.generator import WORD_64, Key
from .._randomness.keys import Keys, batch_of, host_words, is_in_array, keys_in, signature_of
from .._randomness.source import checked_key
from .._streams import order_after, order_before
from .request import Coefficients, Memory, Request, Ties, check_members, memory_of, read_coefficients, ties_of
from .spans import Block, spans_of, whole
from .structure import Structure, ids_of, label

__all__ = ["QUICK_PLANS", "quick_coefficients", "read", "run_perturb"]

_MOST_OFFSETS = 2**32
_WORDS = len(Span._fields)


# --- Plans --------------------------------------------------------------------------------------------------------


class _Group(NamedTuple):
    """The arrays of one device and one type: one launch."""

    launch: Callable[..., None]
    device: Device
    arrays: tuple[int, ...]
    table: HostArray
    """The spans; addresses are relative to those of the arrays."""
    array_of_span: HostArray
    """For each span the place of its array in `arrays`."""
    takes_arrays: bool
    real: np.dtype[Any]
    """The computing type."""
    stream: Callable[[Any], int] | None
    is_capturing: Callable[[int], bool] | None


class _Plan:
    """A call resolved except for addresses, values of coefficients, seed and member; immutable.

    Attributes
    ----------
    library : Library
        The library of all arrays.
    memory : Memory
    ties : Ties
    seen : tuple
        The addresses of a call whose memory has been checked.
    """

    def __init__(
        self, request: Request, coefficients: Coefficients, library: Library, memory: Memory, ties: Ties
    ) -> None:  # fmt: skip
        self.library, self.memory, self.ties = library, memory, ties
        sources, (owners, written) = memory.sources, ties
        self.seen: Any = None
        ids = ids_of(request.parameters, request.ids, owners)
        self._allocate = [library.allocator(x.shape, x.dtype, x.device) for x in sources]
        self.notify = library.written()
        self.keys = _keys_of(request.seed, library, sources)
        members: dict[tuple[Device, str], list[int]] = collections.defaultdict(list)
        for k in written:
            members[sources[k].device, sources[k].dtype].append(k)
        if coefficients.on_device is not None or self.keys is not None:
            devices = {device for device, _ in members}
            for name, found in (
                ("coefficients", None if coefficients.on_device is None else coefficients.on_device.device),
                ("seed", None if self.keys is None else library.device("seed", request.seed)),
            ):
                if found is not None and devices - {found}:
                    accepted = "the host" if len(devices) > 1 else f"the host or on {next(iter(devices))}"
                    raise ValueError(f"{name}: expected values on {accepted}, got them on {found}")
        blocks = [(whole(x.shape),) for x in sources] if request.blocks is None else request.blocks
        groups = [
            self._group(request, coefficients, device, dtype, arrays, [ids[owners[k]] for k in arrays], blocks)
            for (device, dtype), arrays in members.items()
        ]
        self.groups = [group for group in groups if len(group.table)]  # A rank may hold no element.

    def _group(
        self, request: Request, coefficients: Coefficients, device: Device, dtype: str, arrays: list[int],
        ids: list[int], blocks: Sequence[tuple[Block, ...]],
    ) -> _Group:  # fmt: skip
        library, on_device = self.library, device.kind == "cuda"
        backend = choose(request.backend, library.name, device.kind)
        library.compile_key(backend)
        if device.kind not in backend.device_kinds:
            raise ValueError(
                f"backend: {backend.name!r} serves {' and '.join(backend.device_kinds)} memory, got parameters in"
                f" {device.kind} memory"
            )
        spans: list[Span] = []
        array_of_span: list[int] = []
        for place, (k, number) in enumerate(zip(arrays, ids, strict=True)):
            source, target = self.memory.sources[k], self.memory.targets[k]
            of_array = [span for block in blocks[k] for span in spans_of(source, target, block, number)]
            spans += of_array
            array_of_span += [place] * len(of_array)
        fields: dict[str, Any] = {}
        if coefficients.on_device is not None:
            strides = coefficients.on_device.strides
            fields = {
                "weights_type": ElementType[coefficients.on_device.dtype],
                "weights_stride": strides[0] if strides else 0,
            }  # fmt: skip
        elif not isinstance(coefficients.on_host, float):
            fields = {"weights_type": ElementType.float64, "weights_stride": 8}
        if self.keys is not None:
            fields |= self.keys.fields | {"origin_in_memory": True}
        launcher = generic.launcher(
            backend,
            Launch(
                **fields, rows=coefficients.length, columns=sum(x.rows * x.width for x in spans), spans=len(spans),
                type=ElementType[dtype], operation=Operation.perturb, fast_math=bool(request.fast_math),
                device=device.ordinal if on_device else ON_HOST,
            ),
        )  # fmt: skip
        return _Group(
            launcher.run, device, tuple(arrays), np.array(spans, np.int64).reshape(-1, _WORDS),
            np.array(array_of_span, np.intp), launcher.takes_arrays, cached_dtype(MATRIX_TYPES[dtype].computing),
            library.stream(device) if on_device else None, library.is_capturing(device) if on_device else None,
        )  # fmt: skip

    def allocate(self, arrays: Sequence[Any]) -> list[Any]:
        """New arrays for the results. Tied parameters share one."""
        if len(arrays) == 1:
            return [self._allocate[0](arrays[0])]
        results: dict[int, Any] = {}
        for k in self.ties.owners:
            if k not in results:
                results[k] = self._allocate[k](arrays[k])
        return [results[k] for k in self.ties.owners]

    def launch(
        self, request: Request, coefficients: Coefficients, key: tuple[int, int], member: int,
        addresses: list[int], results: list[Any], targets: list[int],
    ) -> None:  # fmt: skip
        """Run the launches. Every check precedes them, except those of a stream."""
        library, prepared = self.library, []
        for group in self.groups:
            like = request.parameters.arrays[group.arrays[0]]
            stream = 0 if group.stream is None else group.stream(like)
            weights, owner = self.weights(group, coefficients, request.coefficients, stream)
            seed_at, keys_owner = (0, None) if self.keys is None else self.keys.read(request.seed)
            others: set[int] = set()
            if group.stream is not None and library.names_streams:
                named = [x[k] for k in group.arrays for x in (request.parameters.arrays, results)]
                others = order_before(map(library.named_stream, named), group.device, stream)
            prepared.append((group, stream, weights, seed_at, others, (owner, keys_owner)))
        for group, stream, weights, seed_at, others, _kept in prepared:
            table = group.table.copy()
            table[:, 0] += np.array([addresses[k] for k in group.arrays], np.int64)[group.array_of_span]
            table[:, 1] += np.array([targets[k] for k in group.arrays], np.int64)[group.array_of_span]
            none = None if group.takes_arrays else 0
            offset_at = seed_at + self.keys.offset_at if self.keys is not None and self.keys.offset_at else 0
            group.launch(
                None, none, none, weights, table.tobytes(), none, none, *key,
                seed_at, offset_at, member, 0, stream, 0,
            )  # fmt: skip
            if others:
                order_after(others, group.device, stream)
        if request.out is not None and self.notify is not None:
            self.notify([results[k] for k in self.ties.written])

    def weights(self, group: _Group, coefficients: Coefficients, given: Any, stream: int) -> tuple[Any, Any]:
        """What the launcher takes for the coefficients, and the owner of its memory."""
        values = coefficients.on_host
        if values is None:
            return self.library.address(given), given
        if group.takes_arrays:
            return (np.full(1, values, group.real) if isinstance(values, float) else values.astype(group.real)), None
        if isinstance(values, float):
            return values, None
        if group.stream is None:
            return values.ctypes.data, values
        if group.is_capturing is not None and group.is_capturing(stream):
            raise RuntimeError(
                "coefficients: expected a number, or a vector in device memory while a CUDA graph is captured, for"
                f" replays to read, got {describe(given)} on the host"
            )
        copy = self.library.to_device(values.view(np.int64), group.device)
        return self.library.address(copy), copy


def _keys_of(seed: Any, library: Library, sources: list[Operand]) -> Keys | None:
    """The key, if it is in memory of a device, where the kernel reads it."""
    if not is_in_array(seed):
        return None
    device = next((x.device for x in sources), HOST.device("seed", None))
    keys = keys_in(seed, library, device)
    return keys if keys is not None and keys.is_on_device else None


# --- Calls --------------------------------------------------------------------------------------------------------

_PLANS: PlanCache[_Plan] = PlanCache(256)


def run_perturb(request: Request, quick_key: Hashable) -> Any:
    """Run a call whose arrays are of one library, neither traced nor transformed.

    `quick_key` is the key of `QUICK_PLANS` for the next call like this one, or None.
    """
    check_flag("fast_math", request.fast_math)
    coefficients = read_coefficients(request.coefficients)
    member = checked_integer("member", request.member, 0, ROWS + 1)
    check_members(member, coefficients.length)
    key = _key_of(request.seed)
    parameters, out = request.parameters, request.out
    if not parameters.arrays:
        return parameters.rebuild(()) if out is None else request.given_out
    library = _common_library(request)
    if library is HOST and not all(type(x) in BY_TYPE for x in parameters.arrays):
        parameters = parameters._replace(arrays=[HOST.normalized("parameters", x) for x in parameters.arrays])
        request = request._replace(parameters=parameters)
    if library.state() is None or any(map(library.is_opaque, parameters.arrays)):
        raise ValueError(
            "parameters: expected plain arrays outside PyTorch's transformations (torch.func,"
            " torch.autograd.forward_ad, a dispatch mode), in which perturb cannot be"
        )
    plan_key = _plan_key(request, coefficients, library)
    plan = _PLANS.get(plan_key)
    memory = memory_of(request, library) if plan is None else plan.memory
    sources = list(map(library.address, parameters.arrays))
    targets = [] if out is None else list(map(library.address, out.arrays))
    seen = sources if targets == sources or out is None else (sources, targets)
    if plan is None or plan.seen != seen:
        ties = ties_of(request, memory, sources, targets)
        if plan is None or ties != plan.ties:
            plan = _Plan(request, coefficients, library, memory, ties)
            if plan_key is not None:
                _PLANS.put(plan_key, plan)
        plan.seen = seen
    if out is not None and library.name == "torch":
        _check_leaves(out)
    results: Any = None if out is None else out.arrays
    if out is None:
        results = plan.allocate(parameters.arrays)
        targets = list(map(library.address, results))
    converted = [
        x if operand.read is None else operand.read(x)
        for x, operand in zip(parameters.arrays, memory.sources, strict=True)
    ]
    plan.launch(request, coefficients, key, member, list(map(library.address, converted)), results, targets)
    if quick_key is not None and (quick := _quick_plan(request, coefficients, plan)) is not None:
        QUICK_PLANS.put(quick_key, quick)
    return parameters.rebuild(results) if out is None else request.given_out


# --- Calls seen before --------------------------------------------------------------------------------------------
#
# A call with one key on the host, and no other result than new arrays or its own parameters needs few checks.

QUICK_PLANS: PlanCache[Callable[..., Any]] = PlanCache(256)
"""Functions ``run(arrays, addresses, coefficients, given, key, member)``, where `given` is the argument `coefficients`.

They return None for calls that need all checks.
"""


def quick_coefficients(given: Any) -> tuple[Hashable, float | Coefficients]:
    """What a plan depends on, and what it takes."""
    if type(given) is float:
        return None, given
    coefficients = read_coefficients(given)
    values = coefficients.on_host
    if isinstance(values, float):
        return None, values
    return (coefficients.length, values is None, coefficients.on_device), coefficients


def read(arrays: Sequence[Any], is_fresh: bool) -> tuple[Hashable, list[int]] | None:
    """The properties of arrays that a plan depends on, and their addresses; None if they need every check.

    With `is_fresh`, the results are new arrays; without, `arrays` are written.
    """
    library = BY_TYPE.get(type(arrays[0])) if arrays else None
    if library is None or library.state() is None:
        return None
    try:
        if len(arrays) == 1:
            (array,) = arrays
            return (is_fresh, library.signature(array)), [library.address(array)]
        found = library.read(arrays)
        if found is None and all(BY_TYPE.get(type(x)) is library for x in arrays):
            found = (*map(type, arrays), *map(library.signature, arrays)), list(map(library.address, arrays))
    except Exception:  # Arrays without memory, such as DTensors, raise. `run_perturb` reports other errors.
        return None
    return None if found is None else ((is_fresh, found[0]), found[1])


def _quick_plan(request: Request, coefficients: Coefficients, plan: _Plan) -> Callable[..., Any] | None:
    library, sources = plan.library, plan.memory.sources
    if (
        len(plan.groups) != 1 or library.names_streams or any(x.read is not None for x in sources)
        or plan.keys is not None or (request.out is not None and request.out is not request.parameters)
    ):  # fmt: skip
        return None
    (group,), in_place, limit, notify = plan.groups, request.out is not None, float("inf"), plan.notify
    launch, stream_of, address = group.launch, group.stream, library.address
    none = None if group.takes_arrays else 0
    one = len(sources) == 1 and len(group.table) == 1
    tail = tuple(group.table[0, 2:].tolist()) if one else ()
    places, array_of_span = list(group.arrays), group.array_of_span
    shape, pack_number, last_member = (1,), struct.Struct(group.real.char).pack, ROWS - coefficients.length
    is_number = isinstance(coefficients.on_host, float)

    def run(
        arrays: Sequence[Any], addresses: Sequence[int], values: Any, given: Any, key: tuple[int, int], member: int
    ) -> Any:  # fmt: skip
        seed, offset = key
        if not (0 <= seed < WORD_64 and 0 <= offset < _MOST_OFFSETS and 0 <= member <= last_member):
            return None
        if plan.seen != addresses or (is_number and not -limit < values < limit):
            return None
        if in_place:
            if not library.can_write(arrays):  # What a key lacks.
                return None
            results, targets = arrays, addresses
        else:
            results = plan.allocate(arrays)
            targets = list(map(address, results))
        if one:
            spans = SPAN.pack(addresses[0], targets[0], *tail)
        else:
            table = group.table.copy()
            table[:, 0] += np.array(addresses, np.int64)[places][array_of_span]
            table[:, 1] += np.array(targets, np.int64)[places][array_of_span]
            spans = table.tobytes()
        stream = 0 if stream_of is None else stream_of(arrays[0])
        if is_number:
            weights = np.ndarray(shape, group.real, pack_number(values)) if none is None else values
        else:
            weights, _owner = plan.weights(group, values, given, stream)
        launch(None, none, none, weights, spans, none, none, seed, offset, 0, 0, member, 0, stream, 0)
        if in_place and notify is not None:
            notify(arrays)
        return results

    return run


def _key_of(seed: Any) -> tuple[int, int]:
    """Seed and offset of one key in host memory; zeros if it is in memory of a device."""
    if is_in_array(seed):
        batch = batch_of(seed)
        if batch not in (None, 1):
            raise ValueError(f"seed: expected one seed, got a vector of {batch}")
        owner = HOST if isinstance(seed, (list, tuple)) else library_of("seed", seed)
        if owner.device("seed", seed).kind != "cpu":
            return 0, 0
        words = host_words(seed if owner is HOST else owner.host_array(seed)).reshape(-1).tolist()
        seed = Key(words[0], (*words, 0)[1])
    seed, offset = checked_key(seed)
    if offset >= _MOST_OFFSETS:
        raise ValueError(f"seed: expected a Key with an offset below 2**32, as Generator.take gives, got {offset}")
    return seed, offset


def _common_library(request: Request) -> Library:
    """The library of all arrays of a call; TypeError if there are several."""
    structures = [("parameters", request.parameters)]
    if request.out is not None:
        structures.append(("out", request.out))
    library = None
    for argument, structure in structures:
        for k, array in enumerate(structure.arrays):
            if is_number(array):
                raise TypeError(f"{label(argument, structure, k)}: expected an array, got the number {describe(array)}")
            found = library_of(label(argument, structure, k), array)
            if found.foreign or found.name == "jax":
                raise TypeError(
                    f"{label(argument, structure, k)}: expected an array of NumPy, PyTorch, CuPy or Numba, got"
                    f" {described(array)}"
                )
            if library is None:
                library = found
            elif found is not library:
                raise TypeError(
                    f"{label(argument, structure, k)}: expected {NOUNS[library.name]}, as"
                    f" {label('parameters', request.parameters, 0)} is, got {described(array)}"
                )
    assert library is not None
    return library


def _plan_key(request: Request, coefficients: Coefficients, library: Library) -> Hashable:
    """What a plan depends on; None if it cannot be a key."""
    parameters, out, ids, values = request.parameters, request.out, request.ids, coefficients.on_host
    key = (
        library.name, parameters.names, *map(type, parameters.arrays), *map(library.signature, parameters.arrays),
        None if out is None else (out.names, *map(library.target_signature, out.arrays)),
        coefficients.length, type(values), coefficients.on_device, request.blocks,
        signature_of(request.seed) if is_in_array(request.seed) else None, bool(request.fast_math), request.backend,
        tuple(ids.items()) if isinstance(ids, Mapping) else tuple(ids) if isinstance(ids, Sequence) else ids,
    )  # fmt: skip
    try:
        hash(key)
    except TypeError:  # A wrong argument is not hashable. The checks report it.
        return None
    return key


def _check_leaves(out: Structure) -> None:
    """ValueError if autograd would have to record the result of a tensor that is no leaf."""
    for k, x in enumerate(out.arrays):
        if x.requires_grad and not x.is_leaf:
            raise ValueError(
                f"{label('out', out, k)}: expected a leaf, or a tensor that does not require grad, got the result of an"
                " operation that autograd recorded"
            )
