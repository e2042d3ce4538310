"""The plan of `perturb`: everything that does not depend on addresses, coefficients, seed or member."""

from __future__ import annotations

import collections
import functools
import math
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
from .._checks.operands import item_size
from .._libraries import BY_TYPE, CPU, HOST, Device, Library, Operand, described, is_number, library_of
from .._libraries.library import NOUNS
from .._libraries.numpy import cached_dtype
from .._plan import PlanCache
from .._randomness.generator import WORD_64, Generator, Key
from .._randomness.keys import Keys, batch_of, checked_key, host_words, is_in_array, keys_in, signature_of
from .._streams import order_after, order_before
from .request import Coefficients, Memory, Request, Ties, check_members, memory_of, read_coefficients, ties_of
from .spans import Block, spans_of, whole
from .structure import Structure, ids_of, label

TRANSFORMED = (
    "parameters: expected plain arrays outside PyTorch's transformations (torch.func, torch.autograd.forward_ad, a"
    " dispatch mode), in which perturb cannot be"
)
_MOST_OFFSETS = 2**32
_WORDS = len(Span._fields)
# The least number that a computing type rounds to infinity.
_LIMITS = {"f": 2.0**128 - 2.0**103, "d": math.inf}


# --- Plans --------------------------------------------------------------------------------------------------------


class _Group(NamedTuple):
    """The arrays of one device and one type: one launch."""

    launch: Callable[..., None]
    device: Device
    arrays: tuple[int, ...]
    table: HostArray
    """The spans; addresses are relative to those of the arrays."""
    array_of_span: HostArray
    """For each span its array."""
    takes_arrays: bool
    real: np.dtype[Any]
    """The computing type."""
    pack: Callable[[float], bytes]
    """``pack(number)``: the bytes of a number of this type."""
    stream: Callable[[Any], int] | None
    is_capturing: Callable[[int], bool] | None

    def add_addresses(self, table: HostArray, column: int, addresses: HostArray) -> HostArray:
        """A copy of a table of spans, with the addresses of arrays added to `column`: 0 has sources, 1 targets."""
        table = table.copy()
        table[:, column] += addresses[self.array_of_span]
        return table


class _Plan:
    """A call resolved except for addresses, values of coefficients, seed and member; immutable.

    `seen` are the addresses of the last call that passed the checks of memory. Coefficients are smaller than `limit`.
    `changed` are the indices of the arrays that are written, or None for all.
    `read_vector` is `Operand.read` of a vector of coefficients on a device.
    """

    def __init__(
        self, request: Request, coefficients: Coefficients, library: Library, memory: Memory, ties: Ties
    ) -> None:  # fmt: skip
        self.library, self.memory, self.ties = library, memory, ties
        sources, (owners, written) = memory.sources, ties
        self.seen: Any = None
        self.read_vector = None if coefficients.on_device is None else coefficients.on_device.read
        ids = ids_of(request.parameters, request.ids, owners)
        self.allocators = [library.allocator(x.shape, x.dtype, x.device) for x in sources]
        self.notify = library.written()
        self.changed = written if len(written) < len(sources) else None
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
        self.limit = min((_LIMITS[group.real.char] for group in groups), default=math.inf)

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
        for k, number in zip(arrays, ids, strict=True):
            source, target = self.memory.sources[k], self.memory.targets[k]
            of_array = [span for block in blocks[k] for span in spans_of(source, target, block, number)]
            spans += of_array
            array_of_span += [k] * len(of_array)
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
        real = cached_dtype(MATRIX_TYPES[dtype].computing)
        return _Group(
            launcher.run, device, tuple(arrays), np.array(spans, np.int64).reshape(-1, _WORDS),
            np.array(array_of_span, np.intp), launcher.takes_arrays, real, struct.Struct(real.char).pack,
            library.stream(device) if on_device else None, library.is_capturing(device) if on_device else None,
        )  # fmt: skip

    def allocate(self, arrays: Sequence[Any]) -> list[Any]:
        """New arrays for the results. Tied parameters share one."""
        if len(arrays) == 1:
            return [self.allocators[0](arrays[0])]
        results: dict[int, Any] = {}
        for k in self.ties.owners:
            if k not in results:
                results[k] = self.allocators[k](arrays[k])
        return [results[k] for k in self.ties.owners]

    def completed(self, tables: list[HostArray], targets: HostArray) -> list[bytes]:
        """Tables of spans with the addresses of targets too."""
        return [x.add_addresses(table, 1, targets).tobytes() for x, table in zip(self.groups, tables, strict=True)]

    def launch(
        self, arrays: Sequence[Any], written: Sequence[Any] | None, results: Sequence[Any], tables: list[bytes],
        values: Any, given: Any, word: int, offset: int, member: int, seed: Any = None,
    ) -> None:  # fmt: skip
        """Run the launches, of one table of spans each. All checks but those of a stream precede this call.

        `written` is None for new results. `seed` is the argument, if the key is in memory of a device.
        """
        seed_at = offset_at = 0
        if self.keys is not None:
            seed_at, _owner_of_seed = self.keys.read(seed)
            offset_at = seed_at + self.keys.offset_at if self.keys.offset_at else 0
        launches = []
        for group, table in zip(self.groups, tables, strict=True):
            stream, others = 0, None
            if group.stream is not None:
                stream = group.stream(arrays[group.arrays[0]])
                if self.library.names_streams:
                    named = [x[k] for k in group.arrays for x in (arrays, results)]
                    others = order_before(map(self.library.named_stream, named), group.device, stream)
            launches.append((group, table, stream, self.weights(group, values, given, stream), others))
        for group, table, stream, (weights, _owner), others in launches:
            none = None if group.takes_arrays else 0
            group.launch(
                None, none, none, weights, table, none, none, word, offset, seed_at, offset_at, member, 0, stream, 0
            )
            if others:
                order_after(others, group.device, stream)
        if written is not None and self.notify is not None:
            self.notify(written if self.changed is None else [written[k] for k in self.changed])

    def weights(self, group: _Group, values: Any, given: Any, stream: int) -> tuple[Any, Any]:
        """What the launcher takes for the coefficients `given`, and the owner of its memory.

        `values` are those on the host: a float, or an array of float64.
        """
        if values is None:
            vector = given if self.read_vector is None else self.read_vector(given)
            return self.library.address(vector), vector
        if isinstance(values, float):
            # The address of a writable array is found faster.
            return (np.frombuffer(bytearray(group.pack(values)), group.real) if group.takes_arrays else values), None
        if group.takes_arrays:
            return values.astype(group.real), None
        if group.stream is None:
            return HOST.address(values), values
        if group.is_capturing is not None and group.is_capturing(stream):
            raise RuntimeError(
                "coefficients: expected a number, or a vector in device memory while a CUDA graph is captured, for"
                f" replays to read, got {describe(given)} on the host"
            )
        # The caller's array may be in pinned memory, which the driver reads after this call has returned.
        copy = self.library.to_device(values.copy().view(np.int64), group.device)
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

    `quick_key` is from `run_seen`, for the next call like this one; None if there is none.
    """
    check_flag("fast_math", request.fast_math)
    library = _common_library(request) if request.parameters.arrays else HOST
    if library.state() is None or any(map(library.is_opaque, request.parameters.arrays)):
        raise ValueError(TRANSFORMED)
    coefficients = read_coefficients(request.coefficients)
    member = checked_integer("member", request.member, 0, ROWS + 1)
    check_members(member, coefficients.length)
    key = _key_of(request.seed)
    parameters, out = request.parameters, request.out
    if not parameters.arrays:
        return parameters.rebuild(()) if out is None else request.given_out
    if library is HOST and not all(type(x) in BY_TYPE for x in parameters.arrays):
        parameters = parameters._replace(arrays=[HOST.normalized("parameters", x) for x in parameters.arrays])
        request = request._replace(parameters=parameters)
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
    if coefficients.on_host is not None and not (np.abs(coefficients.on_host) < plan.limit).all():
        raise ValueError(
            f"coefficients: expected finite numbers of the computing type, got {describe(request.coefficients)} for"
            " float32"
        )
    if out is not None and library.name == "torch":
        check_leaves(out)
    results: Any = None if out is None else out.arrays
    if out is None:
        results = plan.allocate(parameters.arrays)
        targets = list(map(library.address, results))
    converted = [
        x if operand.read is None else operand.read(x)
        for x, operand in zip(parameters.arrays, memory.sources, strict=True)
    ]
    at, targets_at = np.array(list(map(library.address, converted)), np.int64), np.array(targets, np.int64)
    tables: list[Any] = [group.add_addresses(group.table, 0, at) for group in plan.groups]
    complete = plan.completed(tables, targets_at)
    written = None if out is None else results
    given = request.coefficients
    plan.launch(
        parameters.arrays, written, results, complete, coefficients.on_host, given, *key, member, request.seed
    )  # fmt: skip
    if quick_key is not None:
        known = at.tobytes() if out is None or out is parameters else at.tobytes() + targets_at.tobytes()
        _keep_quick_plan(quick_key, request, coefficients, plan, known, tables if out is None else complete)
    return parameters.rebuild(results) if out is None else request.given_out


# --- Calls seen before --------------------------------------------------------------------------------------------
#
# A call with one key on the host, and arrays that need no conversion, needs few checks.


class _QuickPlan(NamedTuple):
    plan: _Plan
    is_like: Callable[..., bool]
    """``is_like(read, written)``: `Library.guard`."""
    run: Callable[..., Any]
    """``run(arrays, written, values, coefficients, seed, offset, member)``: the results, or None for calls that need
    all checks. `values` are from `_quick_coefficients`."""
    tables: dict[bytes, list[Any]]
    """The spans of each group, by the addresses of arrays that passed the checks of memory. For new results, they are
    tables without targets; for results in `out`, the bytes of complete tables."""


_QUICK_PLANS: PlanCache[tuple[_QuickPlan, ...]] = PlanCache(256)

# The most plans of a key, and the most tables of a plan.
_MOST_PLANS, _MOST_TABLES = 4, 4


def run_seen(
    names: tuple[str, ...] | None, arrays: Sequence[Any], written: Sequence[Any] | None, coefficients: Any, seed: Any,
    member: Any, fast_math: Any, ids: Any, backend: Any,
) -> tuple[Hashable, Sequence[Any] | None]:  # fmt: skip
    """Run a call like one before.

    `written` has the arrays of `out`; a call in place passes `arrays` itself. Returns the argument `quick_key` of
    `run_perturb`, and the results: None for calls that need all checks.
    """
    if type(seed) is int:
        word, offset = seed, 0
    elif type(seed) is Key and type(seed.seed) is type(seed.offset) is int:
        word, offset = seed
    else:
        return None, None
    if not (type(member) is int and type(fast_math) is bool and type(backend) is str):
        return None, None
    if ids is not None:
        numbers = tuple(ids.values()) if isinstance(ids, dict) else ids
        if not isinstance(numbers, (list, tuple)) or set(map(type, numbers)) != {int}:
            return None, None
        ids = tuple(ids), tuple(numbers)
    kind, values = _quick_coefficients(coefficients)
    key = names, len(arrays), written is None, written is arrays, kind, fast_math, ids, backend
    for quick in _QUICK_PLANS.get(key, ()):
        results = quick.run(arrays, written, values, coefficients, word, offset, member)
        if results is not None:
            return key, results
    return key, None


def _quick_coefficients(given: Any) -> tuple[Hashable, Any]:
    """What a plan depends on, and the coefficients on the host: a float, or an array of float64."""
    kind: Any = type(given)
    if kind is float:
        return None, given
    library = BY_TYPE.get(kind)
    listed = given
    if library is not None and library is not HOST:
        if library.state() is None:
            return kind, None
        if library.device("coefficients", given) != CPU:
            return (kind, library.signature(given)), None
        try:
            listed = given.tolist()
        except (RuntimeError, TypeError):  # `read_coefficients` raises the error.
            listed = None
        if type(listed) is float:
            return _quick_coefficients(listed)
    if library is HOST and given.dtype.char in "fd" and given.ndim == 1:
        values = np.ascontiguousarray(given, np.float64)
    elif type(listed) in (list, tuple) and set(map(type, listed)) == {float}:
        values = np.array(listed, np.float64)
    else:
        coefficients = read_coefficients(given)
        if isinstance(coefficients.on_host, float):
            return None, coefficients.on_host
        return coefficients.length, coefficients.on_host
    return len(values), values


def _keep_quick_plan(
    key: Hashable, request: Request, coefficients: Coefficients, plan: _Plan, known: bytes, tables: list[Any]
) -> None:  # fmt: skip
    """Keep a plan for the next call with this key, and the tables for addresses that passed the checks, `known`."""
    if plan.library.names_streams or plan.keys is not None or any(x.read is not None for x in plan.memory.sources):
        return
    kept = _QUICK_PLANS.get(key, ())
    written = () if request.out is None else request.out.arrays
    arrays = () if request.out is request.parameters else request.parameters.arrays, written
    # PyTorch's guards depend on global state such as inference mode, so one plan may have several entries.
    quick = next((quick for quick in kept if quick.plan is plan and quick.is_like(*arrays)), None)
    if quick is None:
        quick = _quick_plan(request, coefficients, plan, plan.library.guard(*arrays))
        _QUICK_PLANS.put(key, (quick, *kept[: _MOST_PLANS - 1]))
    if len(quick.tables) >= _MOST_TABLES:
        quick.tables.clear()
    quick.tables[known] = tables


def _quick_plan(
    request: Request, coefficients: Coefficients, plan: _Plan, is_like: Callable[..., bool]
) -> _QuickPlan:  # fmt: skip
    library, notify, vector, groups = plan.library, plan.notify, coefficients.on_device, plan.groups
    is_fresh, in_place = request.out is None, request.out is request.parameters
    state, address, addresses, run_all = library.state, library.address, library.addresses, plan.launch
    is_number, limit, last_member = isinstance(coefficients.on_host, float), plan.limit, ROWS - coefficients.length
    tables: dict[bytes, list[Any]] = {}

    def run(arrays: Any, written: Any, values: Any, given: Any, seed: int, offset: int, member: int) -> Any:
        if not (0 <= seed < WORD_64 and 0 <= offset < _MOST_OFFSETS and 0 <= member <= last_member):
            return None
        if state() is None or not is_like(() if in_place else arrays, written or ()):
            return None
        if is_number:
            if not -limit < values < limit:
                return None
        elif vector is not None:
            if address(given) % item_size(vector.dtype):
                return None
        else:
            with np.errstate(over="ignore"):
                if not values.dot(values) < limit * limit:
                    return None
        if is_one:
            return run_one(arrays[0], values, given, seed, offset, member)
        known = addresses(arrays).tobytes()
        spans = tables.get(known if is_fresh or in_place else known + addresses(written).tobytes())
        if spans is None:
            return None
        results = written
        if is_fresh:
            results = plan.allocate(arrays)
            spans = plan.completed(spans, addresses(results))
        run_all(arrays, written, results, spans, values, given, seed, offset, member)
        return results

    # A single array shares no memory with others.
    is_one = (is_fresh or in_place) and len(plan.memory.sources) == 1 and [len(group.table) for group in groups] == [1]
    if is_one:
        (first,), (allocate,) = groups, plan.allocators
        launch, stream_of, none = first.launch, first.stream, None if first.takes_arrays else 0
        tail = tuple(first.table[0, 2:].tolist())
        pack = functools.lru_cache(8)(lambda source, target: SPAN.pack(source, target, *tail))
        mask = item_size(plan.memory.sources[0].dtype) - 1 if first.device.kind == "cuda" else 0

    def run_one(x: Any, values: Any, given: Any, seed: int, offset: int, member: int) -> Any:
        at = address(x)
        if not at or at & mask:
            return None
        result = allocate(x) if is_fresh else x
        stream = 0 if stream_of is None else stream_of(x)
        if is_number:
            weights, _owner = np.frombuffer(first.pack(values), first.real) if none is None else values, None
        else:
            weights, _owner = plan.weights(first, values, given, stream)
        span = pack(at, address(result) if is_fresh else at)
        launch(None, none, none, weights, span, none, none, seed, offset, 0, 0, member, 0, stream, 0)
        if notify is not None and not is_fresh:
            notify(result)
        return (result,)

    return _QuickPlan(plan, is_like, run, tables)


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
    if isinstance(seed, Generator):
        raise TypeError(
            f"seed: expected an integer, a Key or key data, got {seed}; pass its next Key, generator.take()"
        )
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
            name = label(argument, structure, k)
            if is_number(array):
                raise TypeError(f"{name}: expected an array, got the number {describe(array)}")
            found = library_of(name, array)
            found.check(name, array)
            if found.foreign:
                raise TypeError(f"{name}: expected an array of NumPy, PyTorch, CuPy or Numba, got {described(array)}")
            library = found if library is None else library
            if found is not library:
                raise TypeError(
                    f"{name}: expected {NOUNS[library.name]}, as {label('parameters', request.parameters, 0)} is, got"
                    f" {described(array)}"
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


def check_leaves(out: Structure) -> None:
    """ValueError if autograd would have to record the result of a tensor that is no leaf."""
    for k, x in enumerate(out.arrays):
        if x.requires_grad and not x.is_leaf:
            raise ValueError(
                f"{label('out', out, k)}: expected a leaf, or a tensor that does not require grad, got the result of an"
                " operation that autograd recorded"
            )
