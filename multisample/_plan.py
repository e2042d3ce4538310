"""Plans: the part of a call that does not depend on values, addresses, seed or offset, resolved once.

The function of an operation makes a key of the types, shapes, strides, devices and options of its arguments, finds the
plan in `PLANS` and runs it: read the operands, allocate, take seed and offset, launch. For a new key, every check runs
and a plan is made.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from multisample.backends import generic
from multisample.backends.contract import Backend
from multisample.backends.element_types import MATRIX_TYPES
from multisample.backends.kernels.cpu.floating_point import default_floats, has_default_floats
from multisample.backends.launch import HOST, INPUTS, OPERANDS, ElementType, Launch, Operation
from multisample.backends.system.cuda_driver import is_capturing

from ._arguments import UNCHECKED, describe
from ._checks.operands import (
    ITEM_SIZES,
    Inputs,
    check_alignment,
    checked_out,
    inspect_inputs,
    matrix_shape,
    target_checker,
)  # fmt: skip
from ._checks.values import check_values
from ._checks.window_and_options import check_rows, checked_window
from ._libraries import Library, Operand, is_number
from ._operations import COLUMNS, ROWS, Call, vectors_of
from ._randomness.generator import DEFAULT_GENERATOR, WORD_64, DeviceCounter
from ._randomness.generator_argument import captured_offset, counter_on, source_of
from ._randomness.seed_argument import Keys, checked_key, is_in_array, keys_in, only_words, signature_of
from ._reading import reader_of, vector_reader
from ._stream_order import order_after, order_before, scratch_allocator


class Planned(Protocol):
    """A value in `PLANS`, for a key of `sample` or `weighted_moments`."""

    def run(self, mu: Any, sigma: Any, weights: Any, matrix: Any, seed: Any, generator: Any, *window: Any) -> Any:
        """Run a call with this key; `window` is `dim_offset` and `sample_offset`. Returns a tuple, the result first."""


class Plan:
    """A call of an operation resolved except for values, addresses, seed, offset and window; immutable.

    `shape` and `dtype` are those of each result. `operands` are the arrays that the call reads, by name. `template` is
    the launch without addresses, seed, offset and window. A vector is aligned if ``address & mask`` is 0.
    `has_device_seeds` says that the seeds are in device memory, without offsets.
    """

    __slots__ = (
        "_address", "_allocate", "_check_generator", "_check_target", "_d", "_geometry", "_has_host_vector",
        "_has_plain_pair", "_is_capturing", "_is_ordered", "_is_valid", "_keeps_offset", "_keys", "_last_column",
        "_last_row", "_launch", "_like", "_n", "_nothing", "_put_back", "_read", "_read_matrix",
        "_read_vector", "_read_words", "_readers", "_results", "_scratch", "_scratch_size", "_stream",
        "_take", "_written", "backend", "device", "dtype", "has_device_seeds", "is_empty",
        "library", "mask", "operands", "shape", "template",
    )  # fmt: skip

    def __init__(
        self, call: Call, backend: Backend, library: Library, inputs: Inputs, out: Operand | None = None,
        keeps_offset: bool = False,
    ) -> None:  # fmt: skip
        d, n, device, writes_matrix = inputs.d, inputs.n, inputs.device, "matrix" in OPERANDS[call.operation].writes
        on_device = device.kind == "cuda"
        self.backend, self.library, self.device, self.operands = backend, library, device, inputs.operands
        self._d, self._n, self._last_row, self._last_column = d, n, ROWS - d, COLUMNS - n
        self._keys = keys_in(call.seed, library, device) if is_in_array(call.seed) else None
        self._read_words: Callable[[Any], Any] | None = None if inputs.batch is None else only_words
        if call.grad is not None and call.seed is None:  # The backward pass passes what the sample returned.
            self._read_words = lambda words: words
        reads_memory = self._keys is not None and self._keys.is_on_device
        self.has_device_seeds = self._keys is not None and reads_memory and not self._keys.offset_at
        self._has_host_vector = on_device and inputs.batch is not None and not reads_memory
        self.is_empty, self._keeps_offset = 0 in (d, n, inputs.batch), keeps_offset

        self._take, self._put_back, self._check_generator = source_of(call.generator, library, device)

        matrix = inputs.operands.get("matrix", out)
        self.template = _template(call, inputs, matrix, self._keys)
        launcher = generic.launcher(backend, self.template)
        takes_arrays = launcher.takes_arrays
        self._launch, self._geometry = launcher.run, launcher.geometry

        self._readers = {name: reader_of(name, inputs, library, takes_arrays) for name in vectors_of(call)}
        self._read = vector_reader(self._readers, takes_arrays)
        plain = [reader for reader in self._readers.values() if reader.is_plain]
        self._has_plain_pair = not takes_arrays and len(plain) == len(self._readers) == 2
        self.mask = max((reader.mask for reader in plain), default=0)
        self._address: Callable[[Any], int] = library.address
        read: Callable[[Any], Any] = library.host_array if takes_arrays else library.address
        if takes_arrays and inputs.batch == 1:
            host_array = library.host_array
            read = lambda x: host_array(x)[0]  # noqa: E731
        read_matrix, lengths = read, matrix_shape(inputs, call.layout)
        if takes_arrays and writes_matrix and inputs.shape != lengths:
            flat = lengths[-2:] if inputs.batch == 1 else lengths
            read_matrix = lambda x: read(x).reshape(flat)  # noqa: E731
        self._read_vector, self._read_matrix, self._nothing = read, read_matrix, None if takes_arrays else 0
        if takes_arrays and call.layout == "nd":
            self._read_matrix = lambda x: read_matrix(x).swapaxes(-1, -2)
        self._is_valid: Any = None
        if on_device and call.validate:  # Only on request, since the check waits for the device.
            self._is_valid = lambda mu, sigma, weights: False
        elif call.validate is UNCHECKED:
            if takes_arrays:  # `_read` has converted them.
                self._is_valid = lambda mu, sigma, weights: has_default_floats()
        elif not on_device and self._readers and d and inputs.batch != 0:
            self._is_valid = launcher.is_valid or (lambda mu, sigma, weights: False)

        # Results: a matrix, or `_results` vectors.
        self._results = 0 if writes_matrix else self.template.results
        self.dtype = MATRIX_TYPES[inputs.dtype].computing if call.grad is not None else inputs.dtype
        self.shape: tuple[int, ...] = inputs.shape if writes_matrix else (d,)
        if inputs.batch is not None and not writes_matrix:
            self.shape = (inputs.batch, d)
        self._allocate = library.allocator(self.shape, self.dtype, device)
        self._written = library.written if writes_matrix else None
        self._check_target: Any = None
        if out is not None:
            words = library.describe("seed", call.seed) if reads_memory else None
            self._check_target = target_checker(
                out, inputs, vectors_of(call), library, takes_arrays, self.is_empty, words
            )

        self._stream = library.stream(device) if on_device else None
        self._is_capturing: Any = library.is_capturing(device) if on_device else None
        self._is_ordered = on_device and library.names_streams
        self._like = next(k for k, name in enumerate((*INPUTS, "matrix")) if name in inputs.operands)
        self._scratch_size, self._scratch = launcher.scratch_size, scratch_allocator(library, device)

    def run(
        self, mu: Any, sigma: Any, weights: Any, matrix: Any, seed: Any, generator: Any, dim_offset: int,
        sample_offset: int,
    ) -> tuple[Any, int, int, Any]:  # fmt: skip
        """Launch. For samples, `matrix` is `out` or None; for gradients, the matrix that is read.

        Returns four values: the result or a tuple of results, the seed, the offset, and an array of one element on the
        device. The element is the offset; if the host knows the offset, the array is None. For gradients, `seed` is an
        array of seeds, or the last three values that the sample returned. Every step that can fail, except the launch,
        precedes the taking of seed and offset.
        """
        if not (0 <= dim_offset <= self._last_row and 0 <= sample_offset <= self._last_column):
            checked_window(self._n, dim_offset, sample_offset)
            check_rows(dim_offset, self._d)
        keys, offset, offset_array, stream, like = self._keys, 0, None, 0, None
        if seed is None:
            if self._check_generator is not None:
                self._check_generator(generator)
        elif not (keys is not None or (type(seed) is int and 0 <= seed < WORD_64)):
            if self._read_words is None:
                seed, offset = checked_key(seed)
            else:
                seed, offset, offset_array = self._read_words(seed)
        other_streams: Any = ()
        if self._stream is not None:
            like = (mu, sigma, weights, matrix)[self._like]
            stream = self._stream(like)
            if self._has_host_vector and self._is_capturing(stream):
                raise RuntimeError(
                    "seed: expected seeds in device memory while a CUDA graph is captured, for replays to read, got"
                    f" {describe(seed)} on the host"
                )
            if self._is_ordered:
                other_streams = self._order_before((mu, sigma, weights, matrix, seed), stream)
        if self._read is None:
            mu_at, sigma_at, weights_at = mu, sigma, weights
        elif self._has_plain_pair:  # `_read`, inlined.
            mu_at, sigma_at, weights_at = self._address(mu), self._address(sigma), 0
            if not (mu_at and sigma_at) or (mu_at | sigma_at) & self.mask:
                self._read(mu, sigma, weights)
        else:  # `_kept` keeps arrays alive until the launch.
            mu_at, sigma_at, weights_at, _kept = self._read(mu, sigma, weights)
        if self._is_valid is not None and not self._is_valid(mu_at, sigma_at, weights_at):
            if not has_default_floats():  # Read the inputs again.
                with default_floats():
                    return self.run(mu, sigma, weights, matrix, seed, generator, dim_offset, sample_offset)
            vectors = zip(self._readers, (mu, sigma, weights), strict=False)
            check_values(self.library, dict(vectors), self.dtype)
        if self._results:
            result: Any = (self._allocate(like),)
            first, second = self._read_vector(result[0]), self._nothing
            if self._results == 2:
                result += (self._allocate(like),)
                second = self._read_vector(result[1])
            matrix_at = self._nothing if matrix is None else self._read_matrix(matrix)
        else:
            first = second = self._nothing
            result = self._allocate(like) if matrix is None else matrix
            matrix_at = self._read_matrix(result)
            if matrix is not None:
                seed_at = self._address(seed) if keys is not None and keys.is_on_device else 0
                addresses = mu_at, sigma_at, weights_at, seed_at
                self._check_target(matrix, matrix_at, (mu, sigma, weights, seed), addresses)
        geometry = None if self._geometry is None else self._geometry(matrix_at, sample_offset)
        scratch = 0
        if self._scratch_size is not None:
            memory = self._scratch(self._scratch_size(sample_offset), like, stream)
            scratch = 0 if memory is None else self._address(memory)
        seed_at, offset_at, counter, taken = 0, 0, None, False
        if keys is not None:
            seed_at, _owner = keys.read(seed)
            seed, offset_at = 0, seed_at + keys.offset_at if keys.offset_at else 0
        elif seed is None:
            if self._put_back is not None and generator is not None and generator.graph_safe:
                counter = counter_on(generator, self.library, self.device, stream)
                seed = generator.seed
            elif self._is_capturing is not None and self._is_capturing(stream):
                seed, offset_array = captured_offset(generator, self.library, self.device)
            else:
                seed, offset, taken = *self._take(generator), True
        if counter is not None:
            operands = geometry, mu_at, sigma_at, weights_at, matrix_at, first, second, seed, 0, 0
            offset_array = self._run_counted(counter, stream, operands, (dim_offset, sample_offset, stream, scratch))
        elif not self.is_empty:
            if offset_array is not None:
                offset_at = self._address(offset_array)
            try:
                self._launch(
                    geometry, mu_at, sigma_at, weights_at, matrix_at, first, second, seed, offset, seed_at, offset_at,
                    dim_offset, sample_offset, stream, scratch,
                )  # fmt: skip
            except BaseException:
                if taken and self._put_back is not None:
                    self._put_back(generator, seed, offset)
                raise
        if other_streams:
            order_after(other_streams, self.device, stream)
        if matrix is not None and self._written is not None:
            self._written(matrix)
        return result, seed, offset, offset_array

    def functions(self, run_in_python: Callable[..., Any] | None) -> tuple[Any, ...]:
        """The Python functions that a compiled plan calls: see `TorchExtBackend.compiled_plan`."""
        size, allocate = self._scratch_size, self._scratch
        return (
            self._allocate, self._take, self._check_generator, run_in_python, self._stream, self._is_capturing,
            None if size is None else lambda sample_offset: allocate(size(sample_offset), None, 0),
        )  # fmt: skip

    def _run_counted(self, counter: DeviceCounter, stream: int, before: tuple[Any, ...], after: tuple[Any, ...]) -> Any:
        """Launch with a graph-safe generator's offset between `before` and `after`; returns a copy for gradients."""
        advance = self.backend.advancer(self.device.ordinal)
        if is_capturing(stream):
            counter.keep_for_graph()
        with counter.lock:
            # The backward pass needs this call's offset, and `advance` changes the counter.
            copy = counter.array.clone() if self._keeps_offset else None  # Only plans of tensors keep it.
            offset_at = counter.address if copy is None else self._address(copy)
            if not self.is_empty:
                self._launch(*before, offset_at, *after)
            advance(counter.address, stream)
        return copy

    # Not in `run`, where a comprehension would make `self` a variable of a closure, which each access looks up longer.
    def _order_before(self, arrays: tuple[Any, ...], stream: int) -> set[int]:
        if self._keys is None or not self._keys.is_on_device:
            arrays = arrays[:-1]
        named = [self.library.named_stream(x) for x in arrays if not (x is None or is_number(x))]
        return order_before(named, self.device, stream)


def _template(call: Call, inputs: Inputs, matrix: Operand | None, keys: Keys | None) -> Launch:
    """The launch of a call, without addresses, seed, offset and window."""
    d, n, size = inputs.d, inputs.n, ITEM_SIZES[inputs.dtype]
    contiguous = (d if call.layout == "nd" else n) * size, size
    strides = contiguous if matrix is None else matrix.strides[-2:]
    row_stride, column_stride = strides[::-1] if call.layout == "nd" else strides
    fields: dict[str, Any] = {}
    for name in vectors_of(call):
        operand = inputs.operands.get(name)
        if operand is not None:
            fields[f"{name}_type"] = ElementType[operand.dtype]
            *steps, stride = operand.strides or (0,)
            fields[f"{name}_stride"] = stride if inputs.batch is not None or not steps else steps[0]
            if keys is not None and inputs.batch is not None and steps:
                fields[f"{name}_step"] = steps[0]
    if keys is not None:
        real = inputs.dtype if call.operation == Operation.moments else MATRIX_TYPES[inputs.dtype].computing
        fields |= keys.fields | {"batch": max(keys.batch, 1), "origin_in_memory": True}
        fields["matrix_step"] = d * n * size if matrix is None else matrix.strides[0]
        fields["result_step"] = d * ITEM_SIZES[real]
    return Launch(
        **fields, row_stride=row_stride, column_stride=column_stride, rows=max(d, 1), columns=max(n, 1),
        type=ElementType[inputs.dtype], operation=call.operation, results=call.order,
        shared_noise=call.noise == "shared", fast_math=bool(call.fast_math), antithetic=bool(call.antithetic),
        device=HOST if inputs.device.kind == "cpu" else inputs.device.ordinal,
    )  # fmt: skip


def make_plan(call: Call, backend: Backend, library: Library, keeps_offset: bool = False) -> Plan:
    """Make the plan of a call, with all checks of its arrays except values and addresses.

    With `keeps_offset`, calls return a copy of an offset that is in device memory. BackendUnavailableError if the
    kernel cannot be compiled.
    """
    return Plan(call, backend, library, *_inspected(call, library), keeps_offset)


def _inspected(call: Call, library: Library) -> tuple[Inputs, Operand | None]:
    """The operands of a call and `out`, after all checks except those of values and addresses."""
    inputs, out = inspect_inputs(library, call), None
    if call.out is not None:
        if inputs.device.kind == "cpu":
            # Check numbers before arrays, in the order in which plans read them.
            vectors = sorted(vectors_of(call).items(), key=lambda item: not is_number(item[1]))
            check_values(library, dict(vectors), inputs.dtype)
        out = library.describe("out", np.asarray(call.out) if library.name == "numpy" else call.out)
        check_alignment("out", out, 0)
        out = checked_out(out, inputs, call.layout)
    return inputs, out


def check_call(call: Call, library: Library) -> Inputs:
    """Check the arrays of a call that has no plan as the call of a plan does, with values and addresses."""
    inputs, out = _inspected(call, library)
    vectors = vectors_of(call)
    if call.validate or (inputs.device.kind == "cpu" and call.validate is not UNCHECKED):
        check_values(library, vectors, inputs.dtype)
    if out is not None:
        at, *addresses = (0 if is_number(x) else library.address(x) for x in (call.out, *vectors.values()))
        is_empty = 0 in (inputs.d, inputs.n, inputs.batch)
        check = target_checker(out, inputs, vectors, library, takes_arrays=False, is_empty=is_empty)
        check(call.out, at, tuple(vectors.values()), tuple(addresses))
    return inputs


P = TypeVar("P")


class PlanCache(dict[Hashable, P]):
    """Plans by key. A full cache drops its oldest plan.

    There is no lock: a signal handler or a destructor would wait for the call that it interrupts, and a forked child
    for a thread that it does not have. The methods of a dict are atomic.
    """

    every: ClassVar[list[PlanCache[Any]]] = []
    """All caches, which registering a backend clears."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.get = super().get  # type: ignore[method-assign]  # Looked up 0.04 us faster than a method of the class.
        self.every.append(self)
        os.register_at_fork(after_in_child=self._after_fork)

    def put(self, key: Hashable, plan: P) -> None:
        while len(self) >= self._capacity:
            with contextlib.suppress(RuntimeError, StopIteration):  # Another call has changed or emptied the cache.
                self.pop(next(iter(self)), None)
        self[key] = plan

    def _after_fork(self) -> None:
        """In the child, device handles are invalid."""
        self.clear()


PLANS: PlanCache[Any] = PlanCache(1024)
"""The plans of calls, by key.

- `sample`, `weighted_moments` and gradients store a `Planned`.
- `perturb` stores several plans, each with a guard, because its arrays are too many for a key. Calls with DTensors do
  the same, because a key should keep no mesh alive.
- `perturb` with JAX stores the groups of arrays that share devices. Its key has all arrays.
"""

_MOST_GUARDED = 4


def guarded_plans(key: Hashable) -> Sequence[tuple[Callable[..., Any], Callable[..., Any]]]:
    """The guards and functions of the plans under `key`."""
    try:
        found: Sequence[tuple[Callable[..., Any], Callable[..., Any]]] = PLANS.get(key, ())
    except TypeError:  # An argument that cannot be hashed is wrong; the checks report it.
        return ()
    return found


def put_guarded(key: Hashable, guard: Callable[..., Any], run: Callable[..., Any]) -> None:
    """Store the plan `run` for the calls that `guard` accepts. `run` may return None: then check the call in full."""
    PLANS.put(key, ((guard, run), *PLANS.get(key, ())[: _MOST_GUARDED - 1]))


def run_planned(call: Call, backend: Backend, library: Library) -> Any:
    """Run a checked call, whose arrays are of `library`, by a plan of `backend` that is in the cache or new."""
    if call.generator is None and call.seed is None:  # Else PyTorch's generator would advance for adopted tensors.
        call = call._replace(generator=DEFAULT_GENERATOR)
    vectors = [call.mu, call.sigma, call.weights]
    key: Any = (
        backend.name, library.name, *(None if x is None or is_number(x) else library.signature(x) for x in vectors),
        None if call.out is None else library.target_signature(call.out), *map(type, vectors), type(call.generator),
        signature_of(call.seed) if is_in_array(call.seed) else None,
        call._replace(
            mu=None, sigma=None, weights=None, out=None, seed=None, generator=None, dim_offset=0, sample_offset=0
        ),
    )  # fmt: skip
    plan = PLANS.get(key)
    if plan is None:
        plan = make_plan(call, backend, library)
        PLANS.put(key, plan)
    return run(plan, call)


def run(plan: Planned, call: Call) -> Any:
    return plan.run(
        call.mu, call.sigma, call.weights, call.out, call.seed, call.generator, call.dim_offset, call.sample_offset
    )[0]
