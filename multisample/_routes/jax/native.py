"""The compiled handlers, which XLA calls. They run without the interpreter, except calls that Python has to resolve.

When XLA makes an executable, each of its calls gets a state, which Python makes from the call's options. To run,
the handler copies the state's `Launch`, fills in addresses and lengths, and passes it to a C function of the backend. A
backend that launches through the CUDA driver has no C function. Python makes its first launch, and stores the launch's
bytes in the state as a record. Later calls repeat the record with their own addresses. Calls without a C function or
record enter Python. So do calls that fail: Python repeats them and reports the error.
"""

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import llvmlite.binding
import numpy as np
from numba import types

from multisample.backends.driver import CONFIGURATION_SIZE, PLACES
from multisample.backends.kernels.compilation import inline
from multisample.backends.kernels.cpu.addresses import c_address, call_c, numbers_at, symbol, word_at
from multisample.backends.kernels.cpu.fields import HALF, LAUNCH_WORDS, LOW, WORD, half, set_half
from multisample.backends.kernels.cpu.intrinsics import stack_array
from multisample.backends.launch import OPERANDS, ElementType, Launch, Operation, Span
from multisample.backends.memory.host import LARGE
from multisample.backends.system import cuda_driver, xla_ffi

from .python_entry import digest, enter_python

# Process-wide words that compiled code finds by symbol: XLA's type ids of states on the host and on CUDA, then three
# functions of CUDA.
_TYPES, _LAUNCH, _GET_DEVICE, _EXCHANGE_MODE, _PROCESS = 0, 2, 3, 4, 5
_process = np.zeros(_PROCESS, np.int64)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_process))  # XLA may call when the module's variables are gone.
llvmlite.binding.add_symbol("multisample_xla_process", _process.ctypes.data)

# Words of a state: see `new_state`. `_RECORDS` is the address of the newest record, or 0.
_RUN, _RECORDS, _TEMPLATE = range(3)
# Words of a sample's record. _NEXT is an address, _PATCHES a count, _LAUNCH_SIZE in bytes. Patches and launch follow at
# _HEAD. A patch is three words: the index of an address in the launch, the source of the address, and an addend in
# bytes. For records of perturb, see `begins`.
_NEXT, _DEVICE, _MISALIGNMENT, _KERNEL, _PATCHES, _LAUNCH_SIZE, _HEAD = range(7)
# The sources of patches: the operands, the matrix and the stream.
_SOURCES = ("mu", "sigma", "seed", "offsets", "matrix", "stream")
_FROM_MATRIX = _SOURCES.index("matrix")
_RECORD_WORDS = 64  # The longest recorded launch, in words of 8 bytes.
_ALIGNMENT = 31  # The kernel depends on the address of the matrix modulo 32.
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

_PAGE, _HUGE = mmap.PAGESIZE, getattr(mmap, "MADV_HUGEPAGE", None)
_MOST_ROW, _MOST_COLUMN = 1 << 32, 1 << 34
_SPAN_WORDS = len(Span._fields)
_SOURCE, _TARGET, _FIRST, _ROWS, _WIDTH = range(5)  # Of a `Span`.
_TARGET_STEP, _NUMBER = Span._fields.index("target_step"), int(ElementType.number)

_calloc = types.ExternalFunction("PyMem_RawCalloc", types.int64(types.int64, types.int64))
_free = types.ExternalFunction("PyMem_RawFree", types.void(types.int64))
if _HUGE is not None:
    _advise = types.ExternalFunction("madvise", types.intc(types.int64, types.int64, types.intc))
else:
    _advise = inline(lambda address, size, advice: 0)


@inline
def _buffer(list_at, k):
    """The address of buffer `k` of a list of operands or results."""
    return word_at(word_at(list_at) + 8 * k)


@inline
def _ask(frame, function, request, size):
    """Call a function of XLA's interface with the first words of `request` set; returns XLA's error or 0."""
    request[0], request[1], request[2] = size, 0, word_at(frame + xla_ffi.CONTEXT_AT)
    return call_c(word_at(word_at(frame + xla_ffi.CALL_API_AT) + function), request.ctypes.data)


@inline
def _find_state(frame, request, place):
    """Let XLA write the address of the call's state to ``request[5]``; returns XLA's error or 0."""
    request[3], request[4], request[5] = 0, symbol("multisample_xla_process") + 8 * place, 0
    return _ask(frame, xla_ffi.STATE_GET, request, 48)  # XLA_FFI_State_Get_Args


@inline
def _use_huge_pages(begin, size):
    """Let Linux use huge pages for large memory: fresh memory is then written in half of the time."""
    if size >= LARGE:  # XLA too gets memory of this size fresh from the system.
        start = (begin + _PAGE - 1) // _PAGE * _PAGE
        _advise(start, (begin + size - start) // _PAGE * _PAGE, _HUGE or 0)


@inline
def _data(list_at, k):
    """The address of the elements of buffer `k`."""
    return word_at(_buffer(list_at, k) + xla_ffi.BUFFER_DATA)


@inline
def _fill_words(frame, launch, place):
    """Write the addresses of the seed, which is operand `place`, and of the offsets, if there are any."""
    operands = frame + xla_ffi.ARGUMENTS_AT
    launch[WORD.seed_at] = _data(operands, place)
    if word_at(frame + xla_ffi.ARGUMENT_COUNT_AT) > place + 1:
        offsets = _data(operands, place + 1)
        launch[WORD.offset_at], launch[WORD.first_row_at] = offsets, offsets + 8
        launch[WORD.first_column_at] = offsets + 16


@inline
def _fill_perturb(frame, state, launch, on_device):
    operands, results = frame + xla_ffi.ARGUMENTS_AT, frame + xla_ffi.RESULTS_AT
    weights, spans = word_at(frame + xla_ffi.RESULT_COUNT_AT), launch[WORD.spans]
    launch[WORD.weights], dims = _data(operands, weights), word_at(_buffer(operands, weights) + xla_ffi.BUFFER_DIMS)
    if launch[WORD.weights_step] != 0:
        dims += 8
    launch[WORD.rows] = word_at(dims)
    launch[WORD.weights_step] *= word_at(dims)  # That of the template is for one row.
    if half(launch, HALF.batch) != 0:
        set_half(launch, HALF.batch, word_at(word_at(_buffer(results, 0) + xla_ffi.BUFFER_DIMS)))
    seed = weights + 1
    if half(launch, HALF.sigma_type) != _NUMBER:
        launch[WORD.sigma] = _data(operands, seed)
        seed += 1
    _fill_words(frame, launch, seed)
    begins = _data(operands, seed + 2) if word_at(frame + xla_ffi.ARGUMENT_COUNT_AT) > seed + 2 else 0
    if on_device:  # Python reads `begins` in device memory.
        launch[WORD.first], begins = begins, 0
    launch[WORD.matrix] = _calloc(spans, 8 * _SPAN_WORDS)
    if launch[WORD.matrix] == 0:
        return
    for k in range(spans):
        span = numbers_at(launch[WORD.matrix] + 8 * _SPAN_WORDS * k, _SPAN_WORDS, np.int64)
        template = state + 8 * (_TEMPLATE + LAUNCH_WORDS + (_SPAN_WORDS + 1) * k)
        for word in range(_SPAN_WORDS):
            span[word] = word_at(template + 8 * word)
        parameter = word_at(template + 8 * _SPAN_WORDS)
        span[_SOURCE] += _data(operands, parameter)
        span[_TARGET] += _data(results, parameter)
        if not on_device and span[_TARGET] != span[_SOURCE]:
            others = max(half(launch, HALF.batch), 1) - 1
            length = span[_ROWS] * span[_WIDTH] * launch[WORD.matrix_step] + others * span[_TARGET_STEP]
            _use_huge_pages(span[_TARGET], length)
        if begins != 0:
            span[_FIRST] += word_at(begins + 8 * parameter)


def _filling(operation: Operation) -> Callable[..., Any]:
    """``fill(frame, state, launch, on_device)`` completes the launch, a copy of the state's template.

    For perturb, `fill` allocates the spans, at the address in `matrix`, and the caller frees them. The address is 0 if
    the allocation failed. On a device, `first` is the address of `begins`, which Python adds to the spans.
    """
    if operation == Operation.perturb:
        return _fill_perturb
    reads, writes = OPERANDS[operation]
    is_moments, is_sample = operation == Operation.moments, operation == Operation.sample
    reads_at = tuple(getattr(WORD, name) for name in reads)
    writes_at = tuple(getattr(WORD, name) for name in writes)
    count, has_scratch = len(reads), not is_sample
    matrix_list = xla_ffi.ARGUMENTS_AT if "matrix" in reads else xla_ffi.RESULTS_AT

    @inline
    def fill(frame, state, launch, on_device):
        operands, results = frame + xla_ffi.ARGUMENTS_AT, frame + xla_ffi.RESULTS_AT
        for k in range(count):
            launch[reads_at[k]] = _data(operands, k)
        _fill_words(frame, launch, count)
        written = word_at(frame + xla_ffi.RESULT_COUNT_AT)
        if has_scratch and on_device:  # The last result is scratch memory.
            written -= 1
            launch[WORD.scratch] = _data(results, written)
        for k in range(written):
            launch[writes_at[k]] = _data(results, k)
        if is_moments:
            set_half(launch, HALF.results, written)
            launch[WORD.columns] = word_at(word_at(_buffer(operands, 0) + xla_ffi.BUFFER_DIMS))
            launch[WORD.rows] = word_at(word_at(_buffer(results, 0) + xla_ffi.BUFFER_DIMS))
            return
        # The template's matrix has one element, of `matrix_step` bytes. With layout "nd", its `column_stride` is 0.
        shape, size = word_at(_buffer(frame + matrix_list, 0) + xla_ffi.BUFFER_DIMS), launch[WORD.matrix_step]
        set_half(launch, HALF.batch, word_at(shape))
        if launch[WORD.column_stride] == 0:
            columns, rows = word_at(shape + 8), word_at(shape + 16)
            launch[WORD.row_stride], launch[WORD.column_stride] = size, size * rows
        else:
            rows, columns = word_at(shape + 8), word_at(shape + 16)
            launch[WORD.row_stride], launch[WORD.column_stride] = size * columns, size
        launch[WORD.rows], launch[WORD.columns] = rows, columns
        # The template's steps are for one row, so multiply them.
        launch[WORD.mu_step], launch[WORD.sigma_step] = rows * launch[WORD.mu_step], rows * launch[WORD.sigma_step]
        launch[WORD.result_step], launch[WORD.matrix_step] = rows * launch[WORD.result_step], rows * columns * size
        if is_sample and not on_device:
            _use_huge_pages(launch[WORD.matrix], word_at(shape) * launch[WORD.matrix_step])

    return fill


@inline
def _are_lengths_valid(launch):
    """Whether the stream has as many rows and columns. JAX may trace a call before the lengths are known."""
    return launch[WORD.rows] <= _MOST_ROW and launch[WORD.columns] <= _MOST_COLUMN


@inline
def _are_windows_valid(launch):
    """Whether all windows lie within the rows and columns of the stream; the words are in host memory."""
    valid = _are_lengths_valid(launch)
    if launch[WORD.first_row_at] != 0:
        count = max(half(launch, HALF.batch), 1) if launch[WORD.origin_step] != 0 else 1
        for b in range(count):
            row = word_at(launch[WORD.first_row_at] + b * launch[WORD.origin_step])
            column = word_at(launch[WORD.first_column_at] + b * launch[WORD.origin_step])
            # Words are signed, so rows and columns from 2**63 on are negative.
            valid = valid and 0 <= row <= _MOST_ROW - launch[WORD.rows]
            valid = valid and 0 <= column <= _MOST_COLUMN - launch[WORD.columns]
    return valid


@inline
def _find_place(frame, request):
    """Write the device and the stream of a call to ``request[4]`` and ``request[5]``; returns XLA's error or 0."""
    request[3] = 0
    error = _ask(frame, xla_ffi.ORDINAL_GET, request, 28)
    request[4] = request[3] & LOW
    request[3] = 0
    if error == 0:
        error = _ask(frame, xla_ffi.STREAM_GET, request, 32)
    request[5] = request[3]
    return error


@inline
def _call_on_device(run, launch):
    # Relax the thread's capture mode: the first launch may load the kernel while XLA records a command buffer.
    exchange, mode = word_at(symbol("multisample_xla_process") + 8 * _EXCHANGE_MODE), stack_array(1, np.int64)
    mode[0] = _RELAXED
    if exchange != 0:
        call_c(exchange, mode.ctypes.data)
    failed = call_c(run, launch.ctypes.data) & LOW != 0
    if exchange != 0:
        call_c(exchange, mode.ctypes.data)
    return failed


def _executing(operation: Operation, target: int, on_device: bool) -> Callable[..., Any]:
    """The handler of a target. To execute, it repeats a record, calls the C function, or enters Python with the launch.

    In the other stages, it enters Python without a launch.
    """
    fill, is_sample, is_perturb = _filling(operation), operation == Operation.sample, operation == Operation.perturb

    def execute(frame):
        if word_at(frame + xla_ffi.EXTENSION_AT) != 0 or word_at(frame + xla_ffi.STAGE_AT) & LOW != xla_ffi.EXECUTE:
            return enter_python(frame, target, 0)
        request = stack_array(6, np.int64)
        error = _find_state(frame, request, _TYPES + on_device)
        if error != 0:
            return error
        state = request[5]
        run = word_at(state + 8 * _RUN)
        if on_device:
            error = _find_place(frame, request)
            if error != 0:
                return error
            has_record = is_sample and run == 0 and word_at(state + 8 * _RECORDS) != 0
            if has_record and _repeat(frame, state, request[4], request[5]):
                return 0
        launch = stack_array(LAUNCH_WORDS, np.int64)
        for k in range(LAUNCH_WORDS):
            launch[k] = word_at(state + 8 * (_TEMPLATE + k))
        fill(frame, state, launch, on_device)
        spans = launch[WORD.matrix] if is_perturb else 0
        if is_perturb and (spans == 0 or launch[WORD.first] != 0):
            run = 0
        if on_device:
            launch[WORD.stream] = request[5]
            set_half(launch, HALF.device, request[4])
            is_done = run != 0 and _are_lengths_valid(launch) and not _call_on_device(run, launch)
        else:
            is_done = run != 0 and _are_windows_valid(launch) and call_c(run, launch.ctypes.data) & LOW == 0
        error = 0 if is_done else enter_python(frame, target, np.int64(launch.ctypes.data))
        if is_perturb:
            _free(spans)
        return error

    return execute


@inline
def _repeat(frame, state, device, stream):
    """Repeat the recorded launch of a sample with the addresses of this call; whether that succeeded."""
    process = symbol("multisample_xla_process")
    current = stack_array(1, np.int32)
    if call_c(word_at(process + 8 * _GET_DEVICE), current.ctypes.data) & LOW != 0 or current[0] != device:
        return False  # Python makes the device current.
    matrix = _data(frame + xla_ffi.RESULTS_AT, 0)
    record = word_at(state + 8 * _RECORDS)
    while record != 0 and (
        word_at(record + 8 * _DEVICE) != device or word_at(record + 8 * _MISALIGNMENT) != matrix & _ALIGNMENT
    ):
        record = word_at(record + 8 * _NEXT)
    if record == 0:
        return False
    patches, count = record + 8 * _HEAD, word_at(record + 8 * _PATCHES)
    launch, launch_size = stack_array(_RECORD_WORDS, np.int64), word_at(record + 8 * _LAUNCH_SIZE)
    for k in range((launch_size + 7) // 8):
        launch[k] = word_at(patches + 24 * count + 8 * k)
    for k in range(patches, patches + 24 * count, 24):
        source = word_at(k + 8)
        if source < _FROM_MATRIX:
            address = _data(frame + xla_ffi.ARGUMENTS_AT, source)
        elif source == _FROM_MATRIX:
            address = matrix
        else:
            address = stream
        launch[word_at(k)] = address + word_at(k + 16)
    # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE and CU_LAUNCH_PARAM_END of cuda.h.
    extra, length = stack_array(5, np.int64), stack_array(1, np.int64)
    length[0] = launch_size - CONFIGURATION_SIZE
    extra[0], extra[1], extra[2] = 1, launch.ctypes.data + CONFIGURATION_SIZE, 2
    extra[3], extra[4] = length.ctypes.data, 0
    kernel, launch_kernel = word_at(record + 8 * _KERNEL), word_at(process + 8 * _LAUNCH)
    return call_c(launch_kernel, launch.ctypes.data, kernel, 0, extra.ctypes.data) & LOW == 0


def _delete(state):
    """Free a state and its records. XLA calls this on any thread."""
    record = word_at(state + 8 * _RECORDS)
    while record != 0:
        following = word_at(record + 8 * _NEXT)
        _free(record)
        record = following
    _free(state)
    return 0


# --- Python's side --------------------------------------------------------------------------------


def number(operation: Operation, on_device: bool, of_blocks: bool = False) -> int:
    """The number of a target in `python_entry.targets`."""
    return 2 * (len(Operation) if of_blocks else operation) + on_device


def handler(operation: Operation, on_device: bool, target: int) -> int:
    """Compile the handler of target number `target`, and return its address."""
    if on_device and (cuda := cuda_driver.driver()):
        functions = cuda.cuLaunchKernelEx, cuda.cuCtxGetDevice, cuda.cuThreadExchangeStreamCaptureMode
        for place, function in enumerate(functions, _LAUNCH):
            _process[place] = ctypes.cast(function, ctypes.c_void_p).value or 0
    return _handler_address(_executing(operation, target, on_device), f"xla-execute_{target}")


def _handler_address(handler: Callable[..., Any], name: str) -> int:
    """The address of a compiled handler. It is the same after the package has been purged and imported again.

    XLA keeps the first handlers of a target until the process ends. RuntimeError if another version registered them.
    """
    symbol = f"multisample-{name}"
    address: int | None = llvmlite.binding.address_of_symbol(f"{symbol}-{digest()}")
    if address is None:
        if llvmlite.binding.address_of_symbol(symbol):
            raise RuntimeError(
                "jax: XLA keeps the handlers of another version of multisample, which this process imported before:"
                " restart the process"
            )
        address = c_address(handler, name, digest())
        for known_as in (symbol, f"{symbol}-{digest()}"):
            llvmlite.binding.add_symbol(known_as, address)
    return address


def deleter(on_device: bool) -> int:
    """The address of the C function that frees states. For states on the CPU, `PyMem_RawFree` suffices."""
    if on_device:
        return c_address(_delete, "xla-delete", digest())
    return ctypes.cast(ctypes.pythonapi.PyMem_RawFree, ctypes.c_void_p).value or 0


def type_id(on_device: bool) -> int:
    """The address where XLA stores its type number of states."""
    address: int = _process.ctypes.data + 8 * (_TYPES + on_device)
    return address


def new_state(run: int, template: bytes) -> int:
    """Allocate a state, and return its address. All runs of a custom-call instruction share it; `deleter` frees it.

    `run` is the address of a C function ``int run(const Launch*)``, or 0 if Python launches. `template` is the packed
    `Launch`, without addresses and lengths; for perturb, each `Span` follows with the index of its parameter.
    """
    return _allocated([run, 0], template)


_allocate = ctypes.pythonapi.PyMem_RawMalloc
_allocate.restype, _allocate.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)


def _allocated(words: list[int], data: bytes) -> int:
    content = np.array(words, np.int64).tobytes() + data
    address = _allocate(len(content))
    if not address:
        raise MemoryError
    ctypes.memmove(address, content, len(content))
    return int(address)


_LOCK = threading.Lock()


def add_record(state: int, launch: Launch, kernels: list[tuple[int, bytes]]) -> None:
    """Record the launch of a sample in the call's state, for `_repeat`; `kernels` are the backend's `parameters`."""
    if len(kernels) != 1 or len(kernels[0][1]) > 8 * _RECORD_WORDS:  # A long batch does not fit.
        return
    kernel, parameters = kernels[0]
    device, misalignment = launch.device, launch.matrix & _ALIGNMENT
    patches = [
        word
        for source, name in enumerate(_SOURCES)
        if name != "offsets" or launch.offset_at
        for place, added in PLACES[name]
        for word in (place // 8, source, added)
    ]
    with _LOCK:
        if not any(kind == [device, misalignment] for _, *kind in records(state)):
            words = [device, misalignment, kernel, len(patches) // 3, len(parameters), *patches]
            _add(state, words, parameters + bytes(-len(parameters) % 8))


def begins(state: int, launch: Launch, size: int) -> bytes:
    """The `size` bytes of `begins` at `launch.first` on the device, which only an instruction's first call reads."""
    for record, device, _ in records(state):
        if device == launch.device:
            return ctypes.string_at(record + 16, size)
    data: bytes = cuda_driver.read(launch.first, size, launch.stream, launch.device)
    with _LOCK:
        _add(state, [launch.device], data)
    return data


def records(state: int) -> Iterator[tuple[int, int, int]]:
    """Address, device and misalignment of each record of a state, also of one that could not be repeated."""
    record = ctypes.c_int64.from_address(state + 8 * _RECORDS).value
    while record:
        following, device, misalignment = (ctypes.c_int64 * 3).from_address(record)
        yield record, device, misalignment
        record = following


def _add(state: int, words: list[int], data: bytes) -> None:
    newest = ctypes.c_int64.from_address(state + 8 * _RECORDS)
    newest.value = _allocated([newest.value, *words], data)
