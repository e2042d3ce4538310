"""The handlers of the custom calls: Python functions that run a backend on the memory that XLA passes.

One string attribute holds the static part of a call, `Static`, so that a saved program runs in every process.
"""

import contextlib
import ctypes
import functools
import math
import threading
from typing import Any

import jax
import numpy as np
from jaxlib.xla_client import CustomCallTargetTraits

from multisample.backends import generic, registry
from multisample.backends.contract import HostArray
from multisample.backends.element_types import MATRIX_TYPES, ElementType
from multisample.backends.launch import HOST, PACKED_LAUNCH, SPAN, Launch, Operation, Span, WordFormat, pack, unpack
from multisample.backends.memory.host import address_of, array_at
from multisample.backends.system import cuda_driver, xla_ffi

from ..._checks.window_and_options import check_members, check_rows
from ..._libraries import Operand
from ..._libraries.library import CPU
from ..._model_parameters.spans import Block, spans_of, steps_of
from ..._operations import COLUMNS
from . import native, python_entry
from .static import Static, decoded

TARGETS = {operation: f"multisample_{operation.name}" for operation in Operation}
"""The names of the targets.

sample : (mu, sigma, seed, offsets) -> x, shapes (d,), (d,), (2,), (6,) and (b, d, n).
gradient : (g, seed, offsets) -> (sum of g, sum of g times noise), shapes (b, d, n), (2,), (6,) and (b, d).
moments : (weights, mu, sigma, seed, offsets) -> m1, or m1 and m2, shapes (n,), (d,), (d,) and (d,).
perturb : (p0, ..., weights, factors, seed, offsets, begins) -> p0 and on, with the parameters' shapes; weights (m,),
    seed (2,), offsets (6,). Calls with decay have factors (t,). Calls with blocks have begins (t, 2): the index of each
    block's first element, low half first. With a key for each weight, seed is (m, 2), and offsets (m, 6). In a
    population, results have one more axis (b,) in front.

Operands in `Static.batched` have the axis (b,) in front. On CUDA, the last result of a gradient and of moments is
scratch memory. Seed and offsets are those of `keys.operands_of`; calls without offsets have one operand less.
"""

BLOCKS = "multisample_perturb_blocks"
"""The target of perturb on CUDA with `begins`. The host reads `begins`, so XLA must not record its calls."""


# The fields of `Launch` that have these operands.
_FIELDS = {"mu": "mu", "sigma": "sigma", "weights": "weights", "factors": "sigma"}
_SEED_BYTES, _OFFSETS_BYTES = 8, 24  # Each matrix has a seed, and an offset, a first row and a first column.


def _launch(static: Static, device: int, batch: int = 0) -> Launch:
    """A launch without addresses."""
    d, n, size, real = static.d, static.n, MATRIX_TYPES[static.dtype].size, static.computing_type
    row_stride, column_stride = (n * size, size) if static.layout == "dn" else (size, d * size)
    batched = static.batched + (("seed", "offsets") if static.has_row_keys else ())
    of_offsets = _OFFSETS_BYTES * ("offsets" in batched)
    inputs: dict[str, Any] = {}
    for name, field in _FIELDS.items():
        if name in static.reads:
            length = 1 if name == "weights" else d
            inputs |= {f"{field}_type": ElementType[real.name], f"{field}_stride": real.itemsize}
            inputs[f"{field}_step"] = length * real.itemsize * (name in batched)
    return Launch(
        **inputs, operation=static.operation, shared_noise=static.shared_noise, antithetic=static.antithetic,
        fast_math=static.fast_math, rows=d, columns=n, row_stride=row_stride, column_stride=column_stride,
        type=ElementType[static.dtype], results=static.order, device=device, batch=batch, matrix_step=d * n * size,
        result_step=d * real.itemsize, seed_step=_SEED_BYTES * ("seed" in batched), offset_step=of_offsets,
        origin_step=of_offsets, origin_in_memory=True, word_formats=WordFormat.high_first,
        column_phase=int(static.aligned),
    )  # fmt: skip


@functools.lru_cache(256)
def _spans(string: bytes) -> HostArray:
    """An array with a row for each span: the fields of the `Span`, then the index of its parameter.

    Addresses are relative to the address of the parameter.
    """
    static, spans = decoded(string, Operation.perturb), []
    size = MATRIX_TYPES[static.dtype].size
    for k, (number, shape, steps) in enumerate(static.parameters):
        strides = tuple(size * step for step in steps_of(shape))
        operand = Operand(shape, strides, static.dtype, static.dtype, CPU)
        step = math.prod(shape) * size
        pair = (operand, step * (f"p{k}" in static.batched)), (operand, step * bool(static.batched))
        found = spans_of(pair, Block((0,) * len(shape), shape, 0, steps), number)
        spans += [(*(span._replace(factor=k) if static.has_factors else span), k) for span in found]
    return np.array(spans, np.int64)


def _moved_spans(static: Static, launch: Launch, frame: xla_ffi.Frame) -> bytes:
    """The packed spans of a call on a device with `begins`."""
    owners, size = _spans(frame.string())[:, -1], 8 * len(static.parameters)
    begins = native.begins(frame.state(), launch, size)
    spans = ctypes.string_at(launch.matrix, launch.spans * SPAN.size)
    table: HostArray = np.frombuffer(spans, np.int64).reshape(launch.spans, -1).copy()
    table[:, Span._fields.index("first")] += np.frombuffer(begins, np.int64)[owners]
    return table.tobytes()


def _run(static: Static, launch: Launch, frame: xla_ffi.Frame) -> None:
    backend, on_device, is_perturb = registry.find(static.backend), launch.device != HOST, bool(launch.spans)
    generic.check_operation(backend, launch.operation)
    if is_perturb and not launch.matrix:
        raise MemoryError
    if is_perturb and launch.first:
        spans = _moved_spans(static, launch, frame)
        launch = launch._replace(matrix=address_of(spans), first=0)
    _check_windows(launch)
    # `launch` may load the kernel, which only a relaxed capture allows.
    with cuda_driver.relaxed_capture() if on_device else contextlib.nullcontext():
        backend.launch(launch)
    if on_device and launch.operation == Operation.sample and hasattr(backend, "parameters"):
        native.add_record(frame.state(), launch, backend.parameters(launch))


def _check_windows(launch: Launch) -> None:
    """ValueError if a window exceeds the stream. The offsets of a window in device memory are not read."""
    row = column = 0
    if launch.device == HOST and launch.offset_at:
        count = max(launch.batch, 1) if launch.origin_step else 1
        _, row, column = array_at(launch.offset_at, (count, 3), (_OFFSETS_BYTES, 8), "uint64").max(0).tolist()
    if launch.operation == Operation.perturb:
        check_members(row, 1 if launch.shared_noise else launch.rows)
        return
    check_rows(row, launch.rows)
    if column + launch.columns > COLUMNS:
        raise ValueError(f"sample_offset: expected sample_offset + n <= 2**34, got {column} + {launch.columns}")


def scratch_size(static: Static) -> int:
    """How many float64 numbers of scratch memory a call on CUDA needs."""
    size = generic.launcher(registry.find(static.backend), _launch(static, 0, *static.batch)).scratch_size
    # The kernel reads the first column in device memory. A window that begins at column 7 of 8 needs most.
    return 1 if size is None else max(1, size(0), size(7))


def _state(static: Static, device: int) -> tuple[int, bytes]:
    """The arguments of `native.new_state` for calls with this static part."""
    c_function = getattr(registry.find(static.backend), "c_function", None)
    launch, template = _launch(static._replace(d=1, n=1), device, len(static.batch)), b""
    if static.operation == Operation.perturb:
        spans = _spans(static.encoded().encode())
        template = spans.tobytes()
        elements = spans[:, Span._fields.index("rows")] * spans[:, Span._fields.index("width")]
        launch = launch._replace(spans=len(spans), columns=int(elements.sum()))
    size, has_adjacent_rows = MATRIX_TYPES[static.dtype].size, static.layout == "nd" or static.n == 1
    # Lengths may be unknown. Kernels for the CPU depend on the direction in which elements are adjacent.
    like = launch._replace(rows=1 if static.d == 1 else 2, row_stride=size if has_adjacent_rows else 2 * size)
    run = 0 if c_function is None else c_function(like)
    # For layout "nd", a column stride of 0.
    return run, pack(launch._replace(column_stride=size * (static.layout == "dn"))) + template


def can_take_gradients(static: Static, on_device: bool) -> bool:
    """Whether the backend sums gradients, by one of its `operations` or by a C function."""
    operations = registry.find(static.backend).operations
    return Operation.gradient in operations or bool(_state(static, 0 if on_device else HOST)[0])


def prepare_on_host(static: Static) -> None:
    """Compile what a call in host memory needs, so that its errors come before the program runs."""
    if not _state(static, HOST)[0]:
        backend = registry.find(static.backend)
        generic.check_operation(backend, static.operation)
        backend.prepare("cpu")


def _target(operation: Operation, on_device: bool, of_blocks: bool = False) -> xla_ffi.Target:
    def call(frame: xla_ffi.Frame, launch_at: int) -> None:
        static = decoded(frame.string(), operation)
        if launch_at:
            _run(static, unpack(ctypes.string_at(launch_at, PACKED_LAUNCH)), frame)
        else:
            frame.set_state(native.new_state(*_state(static, 0 if on_device else HOST)))

    platform, records = "CUDA" if on_device else "cpu", on_device and not of_blocks
    return xla_ffi.Target(call, platform, native.type_id(on_device), native.deleter(on_device), records)


_LOCK = threading.Lock()


def register_all() -> None:
    """Register every target that can run here."""
    for on_device in (False, True) if cuda_driver.driver() else (False,):
        for operation in Operation:
            register(operation, on_device)
        if on_device:
            register(Operation.perturb, on_device, of_blocks=True)


def register(operation: Operation, on_device: bool, of_blocks: bool = False) -> str:
    """Register a target with XLA, once in a process, and return its name. Its handler takes a second to compile."""
    with _LOCK:
        return _registered(operation, on_device, of_blocks)


@functools.cache
def _registered(operation: Operation, on_device: bool, of_blocks: bool) -> str:
    name, number = BLOCKS if of_blocks else TARGETS[operation], native.number(operation, on_device, of_blocks)
    handler = jax.ffi.pycapsule(native.handler(operation, on_device, number))
    target = python_entry.targets[number] = _target(operation, on_device, of_blocks)
    # Registration and metadata both declare that XLA may record calls, since a plugin may read only one.
    traits = {"traits": CustomCallTargetTraits.COMMAND_BUFFER_COMPATIBLE} if target.records else {}
    stages = dict.fromkeys(("instantiate", "execute"), handler)
    jax.ffi.register_ffi_target(name, stages, platform=target.platform, **traits)
    return name
