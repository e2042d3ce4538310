"""Plans: the part of a call that does not depend on values, addresses, seed or offset, resolved once.

`sample` makes a key of the types, shapes, strides, devices and options of its arguments, finds the plan in `PLANS` and
runs it: read the addresses, allocate, take seed and offset, launch. For a new key, every check runs and a plan is made.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import os
import threading
from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, NoReturn, TypeAlias, TypeVar

import numpy as np

from multisample.backends.contract import Backend, HostArray, Launcher
from multisample.backends.draw import HOST, Draw, ElementType, Operation, Vector, Word
from multisample.backends.launch import generic_launcher
from multisample.backends.system.cuda_driver import is_capturing

from ._arguments import checked_integer
from ._checks.operands import Inputs, check_alignment, check_out, extent, inspect_inputs, item_size
from ._checks.values import check_values
from ._libraries import Library, Operand, check_memory, is_number
from ._randomness.counter import DeviceCounter
from ._randomness.generator import WORD_64
from ._randomness.source import captured_offset, check_generator, checked_key, counter_on, source_of
from ._reading import Reader
from ._streams import order_after, order_before

__all__ = [
    "COLUMNS", "PLANS", "ROWS", "Call", "Drawn", "Plan", "PlanCache", "Record", "check_rows", "checked_window",
    "draw_planned", "make_plan", "vector_of",
]  # fmt: skip

ROWS = 2**32
COLUMNS = 2**34


def checked_window(n: Any, dim_offset: Any, sample_offset: Any) -> tuple[int, int, int]:
    """`n`, `dim_offset` and `sample_offset` as ints in their ranges; TypeError or ValueError otherwise."""
    n = checked_integer("n", n, 0, COLUMNS + 1)
    dim_offset = checked_integer("dim_offset", dim_offset, 0, ROWS + 1)
    sample_offset = checked_integer("sample_offset", sample_offset, 0, COLUMNS + 1)
    if sample_offset + n > COLUMNS:
        raise ValueError(f"n: expected sample_offset + n <= 2**34, got {sample_offset} + {n}")
    return n, dim_offset, sample_offset


def check_rows(dim_offset: Any, d: Any) -> None:
    """ValueError if rows of a window are beyond the last."""
    if dim_offset + d > ROWS:
        raise ValueError(f"dim_offset: expected dim_offset + d <= 2**32, got {dim_offset} + {d}")


class Call(NamedTuple):
    """The arguments of a call of `sample`."""

    mu: Any
    sigma: Any
    n: Any
    backend: str
    seed: Any
    generator: Any
    noise: str
    dtype: Any
    out: Any
    fast_math: bool
    dim_offset: Any
    sample_offset: Any
    validate: bool
    layout: str
    antithetic: bool


Drawn: TypeAlias = tuple[Any, int, int, Any]
"""The result, its seed, its offset, and None or an offset in device memory that replaces the offset."""

Record = Callable[["Plan", Any, Any, Any, Any, int, int], Any]


class Plan(abc.ABC):
    """A call resolved except for values, addresses, seed, offset and window; immutable.

    Attributes
    ----------
    backend : Backend
    library : Library
        Library of the arrays and of the result.
    device : Device
    dtype : str
        Type of the result.
    shape : tuple of int
        Shape of the result.
    template : Draw
        The launch, without addresses, seed, offset and window.
    is_transposed : bool
        Whether the result is (n, d).
    operands : tuple of Operand or None
        `mu` and `sigma`; None for a number.
    record : callable or None
        Runs the plan and records gradients; None if there are none to record.
    """

    __slots__ = (
        "_address", "_allocate", "_check_generator", "_is_valid", "_last_column", "_last_row", "_launch", "_mu",
        "_out_extent", "_put_back", "_reads_plainly", "_ready", "_sigma", "_take", "_takes_own", "_written", "backend",
        "device", "dtype", "is_empty", "is_transposed", "library", "operands", "record", "shape", "template",
    )  # fmt: skip

    def __init__(
        self, call: Call, backend: Backend, library: Library, inputs: Inputs, out: Operand | None, record: Record | None
    ) -> None:
        d, n, dtype = inputs.d, call.n, inputs.dtype
        self.backend, self.library, self.device, self.dtype = backend, library, inputs.device, dtype
        self.record, self.is_transposed = record, call.layout == "nd"
        self.shape = (n, d) if self.is_transposed else (d, n)
        self.is_empty = d == 0 or n == 0
        self._last_row, self._last_column = ROWS - d, COLUMNS - n
        self._allocate, self._written = library.allocator(self.shape, dtype, inputs.device), library.written()
        source = source_of(call.generator, library, inputs.device)
        self._take, self._put_back, self._check_generator, self._takes_own = source
        self.operands = inputs.operands.get("mu"), inputs.operands.get("sigma")
        self._out_extent = (0, 0) if out is None else extent(out)
        self.template = _template(call, inputs, self.shape, out)
        launcher_of = getattr(backend, "launcher", None)
        launcher: Launcher = launcher_of(self.template) if launcher_of else generic_launcher(backend, self.template)
        self._launch, self._ready, self._is_valid = launcher.run, launcher.ready, launcher.is_valid
        self._mu, self._sigma = (
            Reader(name, x, inputs, library, launcher.takes_arrays)
            for name, x in (("mu", call.mu), ("sigma", call.sigma))
        )
        self._reads_plainly = self._mu.is_plain and self._sigma.is_plain
        self._address: Callable[[Any], int] = library.address

    def __repr__(self) -> str:
        noise = "common" if self.template.common_noise else "independent"
        recorded = ", gradients recorded" if self.record else ""
        return (
            f"<Plan: {self.library.name} {self.dtype} {self.shape} on {self.device}, by {self.backend.name},"
            f" {noise} noise{recorded}>"
        )

    def run(self, mu: Any, sigma: Any, seed: Any, generator: Any, out: Any, dim_offset: Any, sample_offset: Any) -> Any:
        """Draw, and record gradients if the plan has `record`; returns the result."""
        if self.record is not None:
            return self.record(self, mu, sigma, seed, generator, dim_offset, sample_offset)
        return self.draw(mu, sigma, seed, generator, out, dim_offset, sample_offset)[0]

    @abc.abstractmethod
    def draw(
        self, mu: Any, sigma: Any, seed: Any, generator: Any, out: Any, dim_offset: int, sample_offset: int
    ) -> Drawn:
        """Draw without recording gradients.

        Every step that can fail, except the launch, precedes the taking of seed and offset.
        """

    def _raise_window(self, seed: Any, generator: Any, dim_offset: int, sample_offset: int) -> None:
        """Raise the error that a call without a plan raises."""
        d, n = self.shape[::-1] if self.is_transposed else self.shape
        checked_window(n, dim_offset, sample_offset)
        if seed is not None:
            checked_key(seed)
        check_generator(generator, self.library, self.device)
        check_rows(dim_offset, d)

    def _check_memory(self, mu_at: int, sigma_at: int) -> None:
        if self.shape[self.is_transposed]:
            check_memory(mu_at)
            check_memory(sigma_at)

    def _is_near(self, out_at: int, reader: Reader, at: int) -> bool:
        """Whether the address ranges of `out` and of a vector intersect."""
        low, high = self._out_extent
        return out_at + low < at + reader.extent[1] and at + reader.extent[0] < out_at + high

    def _raise_overlap(self, name: str) -> NoReturn:
        raise ValueError(f"out: expected memory of its own, got memory that {name} also uses")


def vector_of(operand: Operand | None) -> Vector:
    """A vector of a launch, without its address."""
    if operand is None:
        return Vector(0, 0, 0.0, ElementType.number)
    return Vector(0, operand.strides[0] if operand.strides else 0, 0.0, ElementType[operand.dtype])


def _template(call: Call, inputs: Inputs, shape: tuple[int, int], out: Operand | None) -> Draw:
    mu, sigma = (vector_of(inputs.operands.get(name)) for name in ("mu", "sigma"))
    size = item_size(inputs.dtype)
    strides = (shape[1] * size, size) if out is None else out.strides
    row_stride, column_stride = strides[::-1] if call.layout == "nd" else strides
    return Draw(
        mu, sigma, 0, row_stride, column_stride, max(inputs.d, 1), max(call.n, 1), Word(0), Word(0), Word(0), Word(0),
        0, 0, ElementType[inputs.dtype], Operation.sample, call.noise == "shared", bool(call.antithetic),
        bool(call.fast_math), HOST if inputs.device.kind == "cpu" else inputs.device.ordinal,
    )  # fmt: skip


class _HostPlan(Plan):
    """A plan for host memory. Compiled code checks the values."""

    __slots__ = ("_read_out", "_takes_arrays", "_values_are_valid")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        library = self.library
        self._takes_arrays = self._mu.makes_arrays
        is_valid = self._is_valid or generic_launcher(self.backend, self.template).is_valid
        self._values_are_valid = _always if is_valid is None or self.shape[self.is_transposed] == 0 else is_valid
        self._read_out: Callable[[Any], Any] = library.address
        if self._takes_arrays:
            self._read_out = self._transposed_array if self.is_transposed else library.host_array

    def _transposed_array(self, out: Any) -> HostArray:
        array: HostArray = self.library.host_array(out).T
        return array

    def draw(
        self, mu: Any, sigma: Any, seed: Any, generator: Any, out: Any, dim_offset: int, sample_offset: int
    ) -> Drawn:
        if not (0 <= dim_offset <= self._last_row and 0 <= sample_offset <= self._last_column):
            self._raise_window(seed, generator, dim_offset, sample_offset)
        offset = 0
        if seed is None:
            if self._check_generator is not None:
                self._check_generator(generator)
        elif not (type(seed) is int and 0 <= seed < WORD_64):
            seed, offset = checked_key(seed)
        if self._reads_plainly:
            mu_at, sigma_at = mu, sigma
            if not self._takes_arrays:
                mu_at, sigma_at = self._address(mu), self._address(sigma)
                if not (mu_at and sigma_at):
                    self._check_memory(mu_at, sigma_at)
        else:  # `_mu` and `_sigma` keep arrays alive until the launch.
            _mu, mu_at = self._mu.read(mu)
            _sigma, sigma_at = self._sigma.read(sigma)
        if not self._values_are_valid(mu_at, sigma_at):
            check_values(self.library, {"mu": mu, "sigma": sigma}, self.dtype)
        if out is None:
            result = self._allocate(mu)
        else:
            result = out
            self._check_overlap(out, mu, sigma, mu_at, sigma_at)
        matrix = self._read_out(result)
        if not (self._takes_arrays or matrix or self.is_empty):
            check_memory(matrix)
        ready = None if self._ready is None else self._ready(matrix, sample_offset)
        taken = False
        if seed is None:
            if self._takes_own and generator.graph_safe:
                counter_on(generator, self.library, self.device, 0)  # Raises.
            seed, offset = self._take(generator)
            taken = True
        if not self.is_empty:
            try:
                self._launch(ready, mu_at, sigma_at, matrix, seed, offset, 0, dim_offset, sample_offset, 0)
            except BaseException:
                if taken and self._put_back is not None:
                    self._put_back(generator, seed, offset)
                raise
        if out is not None and self._written is not None:
            self._written(out)
        return result, seed, offset, None

    def _check_overlap(self, out: Any, mu: Any, sigma: Any, mu_at: Any, sigma_at: Any) -> None:
        if self.is_empty:
            return
        for name, x, reader, at in (("mu", mu, self._mu, mu_at), ("sigma", sigma, self._sigma, sigma_at)):
            if reader.is_array and (
                (self._takes_arrays or not reader.is_plain or self._is_near(self._address(out), reader, at))
                and self.library.share_memory(out, x)
            ):
                self._raise_overlap(name)


class _SubclassPlan(_HostPlan):
    """A plan for an `out` of a subclass of `numpy.ndarray`, whose `T`, `flags` and the like may be its own."""

    __slots__ = ()

    def draw(
        self, mu: Any, sigma: Any, seed: Any, generator: Any, out: Any, dim_offset: int, sample_offset: int
    ) -> Drawn:
        _, *drawn = super().draw(mu, sigma, seed, generator, np.asarray(out), dim_offset, sample_offset)
        return out, *drawn


def _always(mu: Any, sigma: Any) -> bool:
    return True


class _DevicePlan(Plan):
    """A plan for CUDA memory. Values are checked on request only, since the check waits for the device."""

    __slots__ = ("_is_capturing", "_is_ordered", "_like_sigma", "_stream", "_validates")

    def __init__(self, call: Call, *arguments: Any) -> None:
        super().__init__(call, *arguments)
        self._stream, self._is_capturing = self.library.stream(self.device), self.library.is_capturing(self.device)
        self._validates, self._like_sigma = call.validate, not self._mu.is_array
        self._is_ordered = self.library.names_streams

    def draw(
        self, mu: Any, sigma: Any, seed: Any, generator: Any, out: Any, dim_offset: int, sample_offset: int
    ) -> Drawn:
        if not (0 <= dim_offset <= self._last_row and 0 <= sample_offset <= self._last_column):
            self._raise_window(seed, generator, dim_offset, sample_offset)
        offset = 0
        if seed is None:
            if self._check_generator is not None:
                self._check_generator(generator)
        elif not (type(seed) is int and 0 <= seed < WORD_64):
            seed, offset = checked_key(seed)
        like = sigma if self._like_sigma else mu
        stream = self._stream(like)
        other_streams = self._order_before(mu, sigma, out, stream) if self._is_ordered else ()
        address = self._address
        if self._reads_plainly:
            mu_at, sigma_at = address(mu), address(sigma)
            if not (mu_at and sigma_at):
                self._check_memory(mu_at, sigma_at)
            is_aligned = not (mu_at & self._mu.mask or sigma_at & self._sigma.mask)
        else:  # `_mu` and `_sigma` keep arrays alive until the launch.
            _mu, mu_at = self._mu.read(mu)
            _sigma, sigma_at = self._sigma.read(sigma)
            is_aligned = False
        if not is_aligned:
            self._mu.check(mu_at)
            self._sigma.check(sigma_at)
        if self._validates:
            check_values(self.library, {"mu": mu, "sigma": sigma}, self.dtype)
        if out is None:
            result = self._allocate(like)
            matrix = address(result)
        else:
            result = out
            matrix = address(out)
            self._check_out(out, matrix, mu_at, sigma_at)
        tensor, taken, counter = None, False, None
        ready = None if self._ready is None else self._ready(matrix, sample_offset)
        if seed is None:
            if self._takes_own and generator.graph_safe:
                counter = counter_on(generator, self.library, self.device, stream)
                advance = self.backend.advancer(self.device.ordinal)
                seed = generator.seed
            elif self._is_capturing(stream):
                seed, tensor = captured_offset(generator, self.library, self.device)
            else:
                seed, offset = self._take(generator)
                taken = True
        if counter is not None:
            tensor = self._run_counted(
                counter, advance, ready, mu_at, sigma_at, matrix, seed, dim_offset, sample_offset, stream
            )
        elif not self.is_empty:
            offset_at = 0 if tensor is None else address(tensor)
            try:
                self._launch(ready, mu_at, sigma_at, matrix, seed, offset, offset_at, dim_offset, sample_offset, stream)
            except BaseException:
                if taken and self._put_back is not None:
                    self._put_back(generator, seed, offset)
                raise
        if other_streams:
            order_after(other_streams, self.device, stream)
        if out is not None and self._written is not None:
            self._written(out)
        return result, seed, offset, tensor

    def _check_out(self, out: Any, matrix: int, mu_at: int, sigma_at: int) -> None:
        if not (matrix or self.is_empty):
            check_memory(matrix)
        if matrix & (item_size(self.dtype) - 1):
            check_alignment("out", self.library.describe("out", out), matrix)
        for name, reader, at in (("mu", self._mu, mu_at), ("sigma", self._sigma, sigma_at)):
            if reader.is_array and self._is_near(matrix, reader, at):
                self._raise_overlap(name)

    def _run_counted(
        self, counter: DeviceCounter, advance: Callable[[int, int], None], ready: Any, mu_at: Any, sigma_at: Any,
        matrix: int, seed: int, dim_offset: int, sample_offset: int, stream: int,
    ) -> Any:  # fmt: skip
        """Launch with the offset of a graph-safe generator; returns a copy of the offset if gradients are recorded."""
        if is_capturing(stream):
            counter.keep_for_graph()
        with counter.lock:
            # The backward pass needs this call's offset, and `advance` changes the counter.
            copy = self.library.copied(counter.array) if self.record else None
            offset_at = counter.address if copy is None else self._address(copy)
            if not self.is_empty:
                self._launch(ready, mu_at, sigma_at, matrix, seed, 0, offset_at, dim_offset, sample_offset, stream)
            advance(counter.address, stream)
        return copy

    def _order_before(self, mu: Any, sigma: Any, out: Any, stream: int) -> set[int]:
        arrays = [x for x in (mu, sigma, out) if not (x is None or is_number(x))]
        return order_before(map(self.library.named_stream, arrays), self.device, stream)


def make_plan(call: Call, backend: Backend, library: Library, record: Record | None = None) -> Plan:
    """Make the plan of a call, with all checks of its arrays except values and addresses.

    Raises
    ------
    TypeError, ValueError
        If the arrays do not match each other, or a kernel cannot read or write them.
    BackendUnavailableError
        If the kernel cannot be compiled.
    """
    inputs = inspect_inputs(library, call.mu, call.sigma, call.dtype)
    check_rows(call.dim_offset, inputs.d)
    shape = (inputs.d, call.n) if call.layout == "dn" else (call.n, inputs.d)
    kind: type[Plan] = _HostPlan if inputs.device.kind == "cpu" else _DevicePlan
    out = None
    if library.name == "numpy" and not (call.out is None or type(call.out) is np.ndarray):
        kind, call = _SubclassPlan, call._replace(out=np.asarray(call.out))
    if call.out is not None:
        if inputs.device.kind == "cpu":
            vectors = {"mu": call.mu, "sigma": call.sigma}
            # Check numbers before arrays, in the order in which plans read them.
            check_values(library, dict(sorted(vectors.items(), key=lambda item: not is_number(item[1]))), inputs.dtype)
        out = library.describe("out", call.out)
        check_alignment("out", out, 0)
        check_out(out, inputs, shape)
    return kind(call, backend, library, inputs, out, record)


P = TypeVar("P")


class PlanCache(Generic[P]):
    """Plans by key. A full cache drops its oldest plan."""

    def __init__(self, capacity: int) -> None:
        self._plans: collections.OrderedDict[Hashable, P] = collections.OrderedDict()
        self._capacity = capacity
        self._lock = threading.Lock()
        self.get = self._plans.get
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.clear)

    def __len__(self) -> int:
        return len(self._plans)

    def put(self, key: Hashable, plan: P) -> None:
        """Store `plan` under `key`, unless another `put` is running.

        Waiting could deadlock: a signal handler or destructor may call `put` while it interrupts another `put`.
        """
        lock = self._lock
        if lock.acquire(blocking=False):
            try:
                while len(self._plans) >= self._capacity:
                    with contextlib.suppress(KeyError):  # `clear` has just emptied the cache.
                        self._plans.popitem(last=False)
                self._plans[key] = plan
            finally:
                lock.release()

    def clear(self) -> None:
        """Drop all plans: after a fork, which invalidates device handles, and when a backend is registered."""
        self._lock = threading.Lock()
        self._plans.clear()


PLANS: PlanCache[Plan] = PlanCache(1024)


def draw_planned(call: Call, backend: Backend, library: Library) -> Any:
    """Draw a checked call with arrays of `library`, by a cached or a new plan of `backend`."""
    key = (
        backend.name, library.name, *(None if is_number(x) else library.signature(x) for x in call[:2]),
        None if call.out is None else library.target_signature(call.out), call.n, call.noise, call.dtype,
        call.fast_math, call.validate, call.layout, call.antithetic, type(call.mu), type(call.sigma),
        type(call.generator),
    )  # fmt: skip
    plan = PLANS.get(key)
    if plan is None:
        plan = make_plan(call, backend, library)
        PLANS.put(key, plan)
    return plan.run(call.mu, call.sigma, call.seed, call.generator, call.out, call.dim_offset, call.sample_offset)
