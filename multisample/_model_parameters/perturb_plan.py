"""The plan of `perturb`: everything that does not depend on addresses, values of coefficients, seed or member.

`run_seen` runs a call by the plan of a similar earlier call. Without such a plan, `run_perturb` runs every check and
makes one.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import struct
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from multisample.backends import generic
from multisample.backends.contract import HostArray
from multisample.backends.element_types import MATRIX_TYPES
from multisample.backends.kernels.cpu.floating_point import with_default_floats
from multisample.backends.launch import HOST as ON_HOST
from multisample.backends.launch import SPAN, ElementType, Launch, Operation, Span
from multisample.backends.memory.host import quiet

from .._arguments import check_flag, checked_integer, describe
from .._backends import choose
from .._checks.operands import item_size
from .._libraries import BY_TYPE, CPU, HOST, Device, Library, Operand, as_base_class, described, is_number, library_of
from .._libraries.library import NOUNS
from .._libraries.numpy import cached_dtype
from .._operations import ROWS
from .._plan import PlanCache
from .._randomness.generator import WORD_64, Generator, Key
from .._randomness.seed_argument import Keys, batch_of, checked_key, host_words, is_in_array, keys_in, signature_of
from .._stream_order import order_after, order_before
from .request import Coefficients, Request, Structure, check_members, ids_of, label, read_coefficients
from .spans import Block, spans_of, whole
from .ties import Memory, Ties, check_unwritten, memory_of, ranges_of, ties_of

TRANSFORMED = (
    "parameters: expected plain arrays outside PyTorch's transformations (torch.func, torch.autograd.forward_ad, a"
    " dispatch mode), in which perturb cannot be"
)
_MOST_OFFSETS = 2**32
_WORDS = len(Span._fields)
# The least number that a computing type rounds to infinity.
_LIMITS = {"f": 2.0**128 - 2.0**103, "d": math.inf}
# The most plans of a key, and the most tables of a plan.
_MOST_PLANS, _MOST_TABLES = 4, 4


# --- Plans --------------------------------------------------------------------------------------------------------


class _Group(NamedTuple):
    """The arrays of one device and one type: one launch."""

    launch: Callable[..., None]
    geometry: Callable[[Any, int], Any] | None
    """`Launcher.geometry`; no backend uses its arguments for perturb."""
    device: Device
    arrays: tuple[int, ...]
    table: HostArray
    """The spans; addresses are relative to those of the arrays."""
    array_of_span: HostArray
    """For each span, the index of its array."""
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
    """A call resolved except for addresses, values of coefficients, seed and member.

    `is_like` comes from `Library.guard`. Coefficients must be smaller than `limit`. `changed` are the indices of the
    arrays that are written, or None for all. `tables` caches the groups' spans by the addresses of arrays whose memory
    was checked. Without `out`, a table is an array whose target addresses are still missing. With `out`, and in place,
    it is packed bytes.
    """

    def __init__(
        self, request: Request, coefficients: Coefficients, library: Library, memory: Memory, ties: Ties
    ) -> None:  # fmt: skip
        self.library, self.memory, self.ties = library, memory, ties
        sources, (owners, written) = memory.sources, ties
        parameters, out, vector = request.parameters, request.out, coefficients.on_device
        self.is_fresh, self.in_place = out is None, out is parameters
        self.is_like = library.guard(() if self.in_place else parameters.arrays, () if out is None else out.arrays)
        # A plan keeps no arrays alive.
        self.parameters, self.out = parameters._replace(arrays=()), None if out is None else out._replace(arrays=())
        self.last_member, self.vector = ROWS - coefficients.length, vector
        self.is_number = isinstance(coefficients.on_host, float)
        self.read_vector = None if vector is None else vector.read
        self.converts = any(x.read is not None for x in sources)
        self.tables: dict[bytes, list[Any]] = {}
        ids = ids_of(parameters, request.ids, owners)
        self.allocators = [library.allocator(x.shape, x.dtype, x.device) for x in sources]
        self.notify = library.written()
        self.changed = written if len(written) < len(sources) else None
        self.keys = _keys_of(request.seed, library, sources)
        members: dict[tuple[Device, str], list[int]] = collections.defaultdict(list)
        for k in written:
            members[sources[k].device, sources[k].dtype].append(k)
        devices = {device for device, _ in members}
        for name, found in (
            ("coefficients", None if vector is None else vector.device),
            ("seed", None if self.keys is None else library.device("seed", request.seed)),
        ):
            if found is not None and devices - {found}:
                accepted = "the host" if len(devices) > 1 else f"the host or on {next(iter(devices))}"
                raise ValueError(f"{name}: expected values on {accepted}, got them on {found}")
        # Arrays that kernels read while they write. Those on the host are copied first.
        self.read_on_device = [] if vector is None else [("coefficients", 0, vector)]
        if self.keys is not None:
            self.read_on_device.append(("seed", 1, library.describe("seed", request.seed)))
        self.ranges = ranges_of(memory.targets)
        blocks = [(whole(x.shape),) for x in sources] if request.blocks is None else request.blocks
        groups = [
            self._group(request, coefficients, device, dtype, arrays, [ids[owners[k]] for k in arrays], blocks)
            for (device, dtype), arrays in members.items()
        ]
        self.groups = [group for group in groups if len(group.table)]  # A rank may hold no element.
        self.limit = min((_LIMITS[group.real.char] for group in groups), default=math.inf)
        self._run: Callable[..., Any] = self._for_one_array() or self._run_any

    def _group(
        self, request: Request, coefficients: Coefficients, device: Device, dtype: str, arrays: list[int],
        ids: list[int], blocks: Sequence[tuple[Block, ...]],
    ) -> _Group:  # fmt: skip
        library, vector, on_device = self.library, self.vector, device.kind == "cuda"
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
        if vector is not None:
            fields = {"weights_type": ElementType[vector.dtype], "weights_stride": (*vector.strides, 0)[0]}
        elif not self.is_number:
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
            launcher.run, launcher.geometry, device, tuple(arrays), np.array(spans, np.int64).reshape(-1, _WORDS),
            np.array(array_of_span, np.intp), launcher.takes_arrays, real, struct.Struct(real.char).pack,
            library.stream(device) if on_device else None, library.is_capturing(device) if on_device else None,
        )  # fmt: skip

    def run(
        self, arrays: Sequence[Any], written: Sequence[Any] | None, values: Any, given: Any, seed: Any, word: int,
        offset: int, member: int,
    ) -> Any:  # fmt: skip
        """The results of a call like that of the plan; None if it needs all checks.

        `written` has the arrays of `out`. `given` is the `coefficients` argument as passed. `values` are the
        coefficients on the host, or None.
        """
        if not 0 <= member <= self.last_member:
            return None
        if written is not None:
            for name, place, operand in self.read_on_device:
                address = self.library.address((given, seed)[place])
                check_unwritten(name, operand, address, self.library.addresses(written), self.ranges)
        if self.is_number:
            if not -self.limit < values < self.limit:
                return None
        elif self.vector is None:
            with quiet():
                # A small sum of squares proves all coefficients small, and is faster than a maximum.
                are_small = values.dot(values) < self.limit * self.limit
                if not (are_small or (np.abs(values) < self.limit).all()):
                    return None
                return self._run(arrays, written, values, given, seed, word, offset, member)
        elif self.library.address(given) % item_size(self.vector.dtype):
            return None
        return self._run(arrays, written, values, given, seed, word, offset, member)

    def _run_any(
        self, arrays: Sequence[Any], written: Sequence[Any] | None, values: Any, given: Any, seed: Any, word: int,
        offset: int, member: int,
    ) -> Any:  # fmt: skip
        """`run` after its checks. A vector of `values` is rounded, inside `quiet`."""
        tables, _owners = self._tables(arrays, written)
        if tables is None:
            return None
        results: Any = written
        if self.is_fresh:
            results = self.allocate(arrays)
            tables = self._completed(tables, self.library.addresses(results))
        self._launch(arrays, written, results, tables, values, given, word, offset, member, seed)
        return results

    def _tables(self, arrays: Sequence[Any], written: Sequence[Any] | None) -> tuple[list[Any] | None, Any]:
        """The tables of the groups, or None if the arrays have other ties; and the arrays that keep memory alive."""
        sources = targets = self.library.addresses(arrays)
        if not (self.is_fresh or self.in_place):
            targets = self.library.addresses(written or ())
        known = sources.tobytes() if targets is sources else sources.tobytes() + targets.tobytes()
        tables = self.tables.get(known)
        if tables is not None:
            return tables, arrays
        to = [] if self.is_fresh else targets.tolist()
        if ties_of(self.parameters, self.out, self.memory, sources.tolist(), to) != self.ties:
            return None, None
        read = arrays
        if self.converts:
            reads = zip(arrays, self.memory.sources, strict=True)
            read = [x if operand.read is None else operand.read(x) for x, operand in reads]
            sources = self.library.addresses(read)
        tables = [group.add_addresses(group.table, 0, sources) for group in self.groups]
        if not self.is_fresh:
            tables = self._completed(tables, targets)
        if not self.converts:
            if len(self.tables) >= _MOST_TABLES:
                self.tables.clear()
            self.tables[known] = tables
        return tables, read

    def _for_one_array(self) -> Callable[..., Any] | None:
        """A faster `_run_any` for a single array that is one span; None for other calls."""
        has_one_span = len(self.memory.sources) == 1 and [len(group.table) for group in self.groups] == [1]
        is_plain = not (self.converts or self.library.names_streams) and self.keys is None
        if not (has_one_span and is_plain and (self.is_fresh or self.in_place)):
            return None
        (group,), (allocate,), is_fresh, notify = self.groups, self.allocators, self.is_fresh, self.notify
        address, weights_of, stream_of = self.library.address, self.weights, group.stream
        launch, geometry_of = group.launch, group.geometry
        none, tail = None if group.takes_arrays else 0, tuple(group.table[0, 2:].tolist())
        pack = functools.lru_cache(8)(lambda source, target: SPAN.pack(source, target, *tail))
        passes_number = self.is_number and not group.takes_arrays
        mask = item_size(self.memory.sources[0].dtype) - 1 if group.device.kind == "cuda" else 0

        def run(
            arrays: Sequence[Any], written: Any, values: Any, given: Any, seed: Any, word: int, offset: int, member: int
        ) -> Any:
            (x,) = arrays
            at = address(x)
            if not at or at & mask:
                return None
            result = allocate(x) if is_fresh else x
            stream = 0 if stream_of is None else stream_of(x)
            weights = (values,) if passes_number else weights_of(group, values, given, stream)
            span = pack(at, address(result) if is_fresh else at)
            geometry = None if geometry_of is None else geometry_of(None, 0)
            launch(geometry, none, none, weights[0], span, none, none, word, offset, 0, 0, member, 0, stream, 0)
            if notify is not None and not is_fresh:
                notify(result)
            return (result,)

        return run

    def allocate(self, arrays: Sequence[Any]) -> list[Any]:
        """New arrays for the results. Tied parameters share one."""
        if len(arrays) == 1:
            return [self.allocators[0](arrays[0])]
        results: dict[int, Any] = {}
        for k in self.ties.owners:
            if k not in results:
                results[k] = self.allocators[k](arrays[k])
        return [results[k] for k in self.ties.owners]

    def _completed(self, tables: list[HostArray], targets: HostArray) -> list[bytes]:
        """Tables of spans with the addresses of targets too."""
        return [x.add_addresses(table, 1, targets).tobytes() for x, table in zip(self.groups, tables, strict=True)]

    def _launch(
        self, arrays: Sequence[Any], written: Sequence[Any] | None, results: Sequence[Any], tables: list[bytes],
        values: Any, given: Any, word: int, offset: int, member: int, seed: Any,
    ) -> None:  # fmt: skip
        """Run one launch for each table of spans. All checks but those of a stream precede this call.

        `written` is None for new results. `seed` is the `seed` argument, read only if the key is in device memory.
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
            geometry = None if group.geometry is None else group.geometry(None, 0)
            launches.append((group, geometry, table, stream, self.weights(group, values, given, stream), others))
        for group, geometry, table, stream, (weights, _owner), others in launches:
            none = None if group.takes_arrays else 0
            group.launch(
                geometry, none, none, weights, table, none, none, word, offset, seed_at, offset_at, member, 0, stream, 0
            )
            if others:
                order_after(others, group.device, stream)
        if written is not None and self.notify is not None:
            self.notify(written if self.changed is None else [written[k] for k in self.changed])

    def weights(self, group: _Group, values: Any, given: Any, stream: int) -> tuple[Any, Any]:
        """The launcher's argument for the coefficients, and the array that keeps its memory alive, or None.

        `given` is the `coefficients` argument as passed. `values` are the coefficients on the host: a float, or an
        array of float64; None if they are on a device.
        """
        if values is None:
            vector = given if self.read_vector is None else self.read_vector(given)
            return self.library.address(vector), vector
        if isinstance(values, float):
            # The address of a writable array is found faster.
            return (np.frombuffer(bytearray(group.pack(values)), group.real) if group.takes_arrays else values), None
        # `values` may be the caller's memory, to which the call may write.
        if group.takes_arrays:
            return values.astype(group.real), None
        if group.stream is None:
            copy = values.copy()
            return HOST.address(copy), copy
        if group.is_capturing is not None and group.is_capturing(stream):
            raise RuntimeError(
                "coefficients: expected a number, or a vector in device memory while a CUDA graph is captured, for"
                f" replays to read, got {describe(given)} on the host"
            )
        # The caller's array may be in pinned memory, which the driver reads after this call has returned.
        copy = self.library.to_device(values.copy().view(np.int64), group.device)
        return self.library.address(copy), copy


def _keys_of(seed: Any, library: Library, sources: list[Operand]) -> Keys | None:
    """The key, if the kernel reads it in device memory; otherwise None."""
    if not is_in_array(seed):
        return None
    device = next((x.device for x in sources), HOST.device("seed", None))
    keys = keys_in(seed, library, device)
    return keys if keys is not None and keys.is_on_device else None


# --- Calls --------------------------------------------------------------------------------------------------------

_PLANS: PlanCache[tuple[_Plan, ...]] = PlanCache(256)


def run_seen(
    names: tuple[str, ...] | None, arrays: Sequence[Any], written: Sequence[Any] | None, coefficients: Any, seed: Any,
    member: Any, fast_math: Any, ids: Any, backend: Any, blocks: Any = None,
) -> tuple[Hashable, Sequence[Any] | None]:  # fmt: skip
    """Run a call by the plan of a similar earlier call.

    `written` has the arrays of `out`; a call in place passes `arrays` itself. Returns a pair: the key for
    `run_perturb`, None if the call can have no plan; and the results, None if the call needs all checks.
    """
    if not (type(fast_math) is bool and type(backend) is str):
        return None, None
    if ids is not None:
        numbers = tuple(ids.values()) if isinstance(ids, dict) else ids
        if not isinstance(numbers, (list, tuple)) or set(map(type, numbers)) != {int}:
            return None, None
        ids = tuple(ids), tuple(numbers)
    form = None
    try:
        if type(seed) is Key and type(seed.seed) is type(seed.offset) is int:
            word, offset = seed
        elif type(seed) is int:
            word, offset = seed, 0
        else:
            form = signature_of(seed) if is_in_array(seed) else None
            word, offset = _key_of(seed)
        if type(member) is not int:
            member = checked_integer("member", member, 0, ROWS + 1)
        kind, values = _quick_coefficients(coefficients)
        # Calls with one array come in many shapes, so the key has its shape; for more arrays, their number.
        shape = arrays[0].shape if len(arrays) == 1 else len(arrays)
        key = names, shape, written is None, written is arrays, kind, form, fast_math, ids, backend, blocks
        plans = _PLANS.get(key, ())
    except Exception:  # A wrong argument may raise anything here; `run_perturb` reports the error.
        return None, None
    if 0 <= word < WORD_64 and 0 <= offset < _MOST_OFFSETS:
        for plan in plans:
            if plan.library.state() is not None and plan.is_like(() if plan.in_place else arrays, written or ()):
                results = plan.run(arrays, written, values, coefficients, seed, word, offset, member)
                if results is not None:
                    return key, results
    return key, None


@with_default_floats
def perturbed(request: Request) -> Any:
    """Run a call whose arrays are of one library, by the plan of a call like it, or with all checks."""
    parameters, out = request.parameters, request.out
    key, results = run_seen(
        parameters.names, parameters.arrays, None if out is None else out.arrays, request.coefficients, request.seed,
        request.member, request.fast_math, request.ids, request.backend, request.blocks,
    )  # fmt: skip
    if results is None:
        return run_perturb(request, key)
    return parameters.rebuild(results) if out is None else request.given_out


def _quick_coefficients(given: Any) -> tuple[Hashable, Any]:
    """The coefficients' part of a plan's key, and their values on the host: a float, an array of float64, or None."""
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
        return kind if coefficients.on_host is None else coefficients.length, coefficients.on_host
    return len(values), values


def run_perturb(request: Request, key: Hashable) -> Any:
    """Run a call whose arrays are of one library, neither traced nor transformed, with all checks.

    `key` is from `run_seen`. The plan is stored under `key`, unless `key` is None.
    """
    check_flag("fast_math", request.fast_math)
    library = _common_library(request) if request.parameters.arrays else HOST
    arrays = *request.parameters.arrays, *(() if request.out is None else request.out.arrays)
    if library.state() is None or any(map(library.is_opaque, arrays)):
        raise ValueError(TRANSFORMED)
    plain = _in_base_classes(request, library)
    if plain is not None:  # A plan may exist.
        return perturbed(plain)
    coefficients = read_coefficients(request.coefficients)
    member = checked_integer("member", request.member, 0, ROWS + 1)
    check_members(member, coefficients.length)
    words = _key_of(request.seed)
    parameters, out = request.parameters, request.out
    if not parameters.arrays:
        return parameters.rebuild(()) if out is None else request.given_out
    memory = memory_of(parameters, out, library)
    to = () if out is None else map(library.address, out.arrays)
    ties = ties_of(parameters, out, memory, list(map(library.address, parameters.arrays)), list(to))
    plan = _Plan(request, coefficients, library, memory, ties)
    if coefficients.on_host is not None and not (np.abs(coefficients.on_host) < plan.limit).all():
        raise ValueError(
            f"coefficients: expected finite numbers of the computing type, got {describe(request.coefficients)} for"
            " float32"
        )
    written = None if out is None else out.arrays
    results = plan.run(
        parameters.arrays, written, coefficients.on_host, request.coefficients, request.seed, *words, member
    )
    assert results is not None
    if key is not None:
        _PLANS.put(key, (plan, *_PLANS.get(key, ())[: _MOST_PLANS - 1]))
    return parameters.rebuild(results) if out is None else request.given_out


def _in_base_classes(request: Request, library: Library) -> Request | None:
    """`request` with arrays of `Library.types` only, in place of lists and subclasses; None if it has no others."""
    parameters, out, coefficients = request.parameters, request.out, request.coefficients
    if out is not None:
        for array in out.arrays:
            library.check_target(array)
        if library.name == "torch":
            check_leaves(out)
    plain: dict[str, Any] = {}
    for name, x in (("seed", request.seed), ("coefficients", coefficients)):
        if not isinstance(x, (list, tuple)) and (name != "seed" or is_in_array(x)):
            plain[name] = as_base_class(name, x)
    # Autograd records no view of an array that is written.
    no_grad = sys.modules["torch"].no_grad if library.name == "torch" else contextlib.nullcontext
    with contextlib.nullcontext() if out is None else no_grad():
        for name, structure in (("parameters", parameters), ("out", out)):
            if structure is not None and not all(type(x) in BY_TYPE for x in structure.arrays):
                arrays = [as_base_class(label(name, structure, k), x) for k, x in enumerate(structure.arrays)]
                plain[name] = structure._replace(arrays=arrays)
    if out is parameters and "out" in plain:
        plain["parameters"] = plain["out"]
    changed = any(x is not getattr(request, name) for name, x in plain.items())
    return request._replace(**plain) if changed else None


def _key_of(seed: Any) -> tuple[int, int]:
    """Seed and offset of one key in host memory; zeros for a key in device memory."""
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


def check_leaves(out: Structure) -> None:
    """ValueError if autograd would have to record the result of a tensor that is no leaf."""
    for k, x in enumerate(out.arrays):
        if x.requires_grad and not x.is_leaf:
            raise ValueError(
                f"{label('out', out, k)}: expected a leaf, or a tensor that does not require grad, got the result of an"
                " operation that autograd recorded"
            )
