"""A GPU emulated on the CPU for the Python kernel: the names of `multisample.backends.kernels.cuda.intrinsics`.

Numba's simulator runs Python, not compiled functions. Here the kernel is compiled unchanged, and every CUDA thread of a
block is a fiber. A fiber runs until it must wait for other threads: at a barrier, or in an exchange within its warp.
Blocks, the warps of a block and the threads of a warp run one after the other, in ascending or descending order, and
each runs as far as it can. So a missing barrier makes a thread read values that are not written yet, or overwritten.
Every memory access is checked, and the first wrong access ends the launch. (For the kernel in C++: shim/cuda_shim.h.)
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic
from numba.np.numpy_support import from_dtype

from multisample.backends.kernels.cuda.geometry import MOST_THREADS
from multisample.backends.kernels.cuda.parameters import GEOMETRY, LAUNCH, MOMENT_GEOMETRY, spans_type
from multisample.backends.kernels.stream import rounding

Array = np.ndarray[Any, Any]

AVAILABLE = sys.platform == "linux" and sys.maxsize > 2**32 and hasattr(ctypes.CDLL(None), "makecontext")
"""Whether the C library has fibers (ucontext), with the memory layout described below."""

_i32, _i64 = types.int32, types.int64

_WARP = 32
_MOST_PARAMETERS = 4096
# The static shared memory of a block, and the gap between its arrays in the emulation.
_MOST_SHARED, _GAP = 48 << 10, 64
# A kernel with more accesses counts as endless.
_MOST_ACCESSES = 10**8

# Indices of memory regions in the state: the output, the inputs, then the arrays in shared memory.
_OUT, _INPUTS, _SHARED, _REGIONS = 0, 1, 5, 10
_NAMES = ("the output",) + ("the inputs",) * (_SHARED - _INPUTS) + ("shared memory",) * (_REGIONS - _SHARED)

# States of a thread, most of which name the event that it waits for.
_READY, _BLOCK, _WARP_BARRIER, _SHUFFLE, _VOTE, _DONE, _FOR_EVER = range(7)

_OUTSIDE, _NOT_ALIGNED, _AGAIN, _NOT_WRITTEN, _OF_OTHERS, _ENDLESS, _TOO_MUCH, _LEFT_WARP, _LEFT_BLOCK = range(1, 10)
_FAILURES = {
    _OUTSIDE: "accesses memory outside of",
    _NOT_ALIGNED: "makes a misaligned access to",
    _AGAIN: "writes an element twice in",
    _NOT_WRITTEN: "reads uninitialized",
    _OF_OTHERS: "overwrites another warp's element too early in",
    _ENDLESS: "never ends, in",
    _TOO_MUCH: "allocates too much",
    _LEFT_WARP: "diverges from its warp",
    _LEFT_BLOCK: "diverges from its block",
}

_STATE = np.zeros(
    (),
    np.dtype(
        [
            ("parameters", np.uint64, _MOST_PARAMETERS // 8),
            ("begins", np.int64, _REGIONS),
            ("ends", np.int64, _REGIONS),
            ("written", np.int64),  # address of a byte for each element of the output's memory
            ("element_size", np.int64),
            ("accesses", np.int64),
            ("block", np.uint32),
            ("matrix", np.uint32),  # of a batch
            ("thread", np.uint32),
            ("failure", np.int64),
            ("address", np.int64),
            ("region", np.int64),
            ("waits_for", np.uint32, MOST_THREADS),
            ("values", np.uint64, MOST_THREADS),  # a lane's value before a shuffle, then the received value
            ("lanes", np.uint32, MOST_THREADS),  # source lane of a shuffle
            ("pieces", np.uint32, MOST_THREADS),  # number of shared arrays that the thread has allocated
        ],
        align=True,
    ),
)
_VALUES = _STATE["values"].ctypes.data

# Contexts of the fibers and of the scheduler, to which they return. The C library's context begins with fields of 8
# bytes: flags, the next context, and the address, flags and size of its stack. `_CONTEXT` is its maximum size.
_CONTEXT, _STACK = 8 << 10, 256 << 10
_contexts = np.zeros((MOST_THREADS + 1) * _CONTEXT + 64, np.uint8)
_stacks = np.empty(MOST_THREADS * _STACK, np.uint8)
_shared = np.empty(_MOST_SHARED + 64, np.uint8)
# For each byte of shared memory: 0 if unwritten, 1 + the warp that wrote it since the last barrier, else `_BY_ANY`.
_shared_written = np.zeros(_MOST_SHARED, np.uint8)
_BY_ANY = 255
_CONTEXTS, _STACKS, _SHARED_BEGIN = (-(-memory.ctypes.data // 64) * 64 for memory in (_contexts, _stacks, _shared))
_SHARED_WRITTEN = _shared_written.ctypes.data
_SCHEDULER = _CONTEXTS + MOST_THREADS * _CONTEXT

_getcontext = types.ExternalFunction("getcontext", _i32(_i64))
_makecontext = types.ExternalFunction("makecontext", types.void(_i64, _i64, _i32))
_swapcontext = types.ExternalFunction("swapcontext", _i32(_i64, _i64))
_memset = types.ExternalFunction("memset", _i64(_i64, _i32, _i64))


class BrokenKernelError(Exception):
    """A kernel has undefined behaviour on a GPU."""


# --- Unchecked memory accesses --------------------------------------------------------------------


def _at(context: Any, builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, context.get_value_type(kind).as_pointer())


def _number_type(kind: Any) -> Any:
    return kind.dtype if isinstance(kind, types.NumberClass) else kind


@intrinsic
def _size(typingctx: Any, kind: Any) -> Any:
    """Bytes of a type, or of the type of a number."""
    size = _number_type(kind).bitwidth // 8
    return types.int64(kind), lambda context, builder, signature, args: ir.Constant(ir.IntType(64), size)


@intrinsic
def _read(typingctx: Any, address: Any, kind: Any) -> Any:
    result = _number_type(kind)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_at(context, builder, args[0], result))

    return result(address, kind), codegen


@intrinsic
def _write(typingctx: Any, address: Any, x: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], _at(context, builder, args[0], x))
        return context.get_dummy_value()

    return types.void(address, x), codegen


@intrinsic
def _state(typingctx: Any) -> Any:
    """`_STATE` by address, since Numba copies global arrays into the code."""
    record = from_dtype(_STATE.dtype)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(ir.Constant(ir.IntType(64), _STATE.ctypes.data), context.get_value_type(record))

    return record(), codegen


def _parameters(*kinds: Any) -> Any:
    """A function that reads the parameters from their packed bytes: Numba's tuples have the layout of structs."""
    both = types.Tuple(kinds)

    @intrinsic
    def parameters(typingctx: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values, at = [], _STATE["parameters"].ctypes.data
            for kind in kinds:
                values.append(builder.load(_at(context, builder, ir.Constant(ir.IntType(64), at), kind)))
                at += context.get_abi_sizeof(context.get_value_type(kind))
            return context.make_tuple(builder, both, values)

        return both(), codegen

    return parameters


_PARAMETERS = {
    "sample": _parameters(LAUNCH, GEOMETRY), "moments": _parameters(LAUNCH, MOMENT_GEOMETRY),
    "runs": _parameters(LAUNCH, spans_type(False)), "strided spans": _parameters(LAUNCH, spans_type(True)),
}  # fmt: skip


# --- A grid ---------------------------------------------------------------------------------------


@njit
def _wait(event):
    gpu = _state()
    gpu.waits_for[gpu.thread] = event
    _swapcontext(_CONTEXTS + np.int64(gpu.thread) * _CONTEXT, _SCHEDULER)


@njit
def _resume(thread):
    _state().thread = thread
    _swapcontext(_SCHEDULER, _CONTEXTS + np.int64(thread) * _CONTEXT)


@njit
def _fail(failure, address, region):
    gpu = _state()
    gpu.failure, gpu.address, gpu.region = failure, address, region
    _wait(_FOR_EVER)


@njit
def _run_warp(first, backwards):
    """Run a warp until all its threads wait for the block or are done; returns whether they get there."""
    gpu = _state()
    values_of_lanes = np.empty(_WARP, np.uint64)
    while True:
        for k in range(_WARP):
            thread = first + (_WARP - 1 - k if backwards else k)
            if gpu.waits_for[thread] == _READY:
                _resume(thread)
                if gpu.failure:
                    return False
        what, all_true = gpu.waits_for[first], True
        for lane in range(_WARP):
            if gpu.waits_for[first + lane] != what:
                gpu.failure, gpu.thread = _LEFT_WARP, first + lane
                return False
            values_of_lanes[lane] = gpu.values[first + lane]
            all_true = all_true and values_of_lanes[lane] != 0
        if what in (_BLOCK, _DONE):
            return True
        for lane in range(_WARP):
            thread = first + lane
            gpu.waits_for[thread] = _READY
            if what == _SHUFFLE:
                gpu.values[thread] = values_of_lanes[gpu.lanes[thread]]
            elif what == _VOTE:
                gpu.values[thread] = all_true


@njit
def _run_block(threads, backwards):
    """Run a block; returns whether all its threads reach their end."""
    gpu = _state()
    _memset(_SHARED_WRITTEN, 0, _MOST_SHARED)
    gpu.begins[_SHARED:], gpu.ends[_SHARED:] = 0, 0
    gpu.waits_for[:], gpu.pieces[:] = _READY, 0
    while True:
        for k in range(0, threads, _WARP):
            if not _run_warp(threads - _WARP - k if backwards else k, backwards):
                return False
        what = gpu.waits_for[0]
        for thread in range(threads):
            if gpu.waits_for[thread] != what:
                gpu.failure, gpu.thread = _LEFT_BLOCK, thread
                return False
            gpu.waits_for[thread] = _READY
        if what == _DONE:
            return True
        for byte in range(_SHARED_WRITTEN, _SHARED_WRITTEN + _MOST_SHARED):
            if _read(byte, np.uint8) != 0:
                _write(byte, np.uint8(_BY_ANY))


@njit
def _run_grid(entry, blocks, batch, threads, backwards):
    gpu = _state()
    for thread in range(threads):
        context = _CONTEXTS + thread * _CONTEXT
        _getcontext(context)
        _write(context + 8, np.int64(0))
        _write(context + 16, np.int64(_STACKS + thread * _STACK))
        _write(context + 32, np.int64(_STACK - 64))
        _makecontext(context, entry, 0)
    for k in range(blocks * batch):
        place = blocks * batch - 1 - k if backwards else k
        gpu.block, gpu.matrix = place % blocks, place // blocks
        if not _run_block(threads, backwards):
            break


# Without wrappers for calls from Python.
_jit = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)
_compiled_once: dict[Any, Any] = {}


def once(function: Callable[..., Any]) -> Any:
    """Decorator, in place of `multisample.backends.kernels.compilation.inline`.

    Without inlining, functions that several kernels share are compiled once. Inlining takes ten times as long.
    """
    closure = (cell.cell_contents for cell in function.__closure__ or ())
    key = function.__code__, id(function.__globals__), tuple((type(x), x) for x in closure)
    if key not in _compiled_once:
        _compiled_once[key] = _jit(function)
    return _compiled_once[key]


@contextlib.contextmanager
def sharing_functions(*modules: Any) -> Iterator[None]:
    """Use `once` in place of `inline` in these modules."""
    cached = [x for module in modules for x in vars(module).values() if hasattr(x, "cache_clear")]
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "inline", once))
        for function in cached:
            stack.callback(function.cache_clear)
            function.cache_clear()
        yield


def compile_kernel(function: Callable[..., None], kind: str = "sample") -> Any:
    """Compile ``function(call, geometry)``, whose intrinsics are those of this module, for `launch`.

    `kind`: a key of `_PARAMETERS`, the types of the parameters.
    """
    kernel, parameters = _jit(function), _PARAMETERS[kind]

    @cfunc(types.void())
    def thread_of_all_blocks():
        while True:
            call, geometry = parameters()
            kernel(call, geometry)
            _wait(_DONE)

    return thread_of_all_blocks


def launch(
    kernel: Any,
    blocks: int,
    threads: int,
    parameters: bytes,
    out: Array,
    inputs: Sequence[Array | float],
    *,
    batch: int = 1,
    backwards: bool = False,
) -> None:
    """Run the grid.

    Parameters
    ----------
    kernel
        From `compile_kernel`.
    blocks, threads : int
        Number of blocks, and of threads in each block.
    parameters : bytes
        The call and the geometry, packed.
    out : array
        The memory that the kernel may write, each element once. Gaps between elements are included.
    inputs : up to four arrays or numbers
        The memory that the kernel may read, such as mu, sigma and the words in memory.
    batch : int
        The length of the grid's y axis.
    backwards : bool
        Whether blocks, warps and threads run in descending order.

    Raises
    ------
    BrokenKernelError
        If a thread makes a wrong access or diverges.
    """
    if blocks < 1 or threads % _WARP != 0 or not 0 < threads <= MOST_THREADS:
        raise BrokenKernelError(f"invalid grid: {blocks} blocks of {threads} threads")
    _STATE["parameters"].view(np.uint8)[...] = np.frombuffer(parameters.ljust(_STATE["parameters"].nbytes), np.uint8)
    _STATE["begins"], _STATE["ends"] = 0, 0
    for region, memory in enumerate((out, *inputs)):
        if isinstance(memory, np.ndarray):
            _STATE["begins"][region], _STATE["ends"][region] = _bounds(memory)
    begin, end = _bounds(out)
    written = np.zeros((end - begin) // out.itemsize, np.uint8)
    _STATE["written"], _STATE["element_size"] = written.ctypes.data, out.itemsize
    _STATE["accesses"], _STATE["failure"], _STATE["region"] = 0, 0, -1
    _run_grid(kernel.address, blocks, batch, threads, backwards)
    if _STATE["failure"]:
        failure, region = int(_STATE["failure"]), int(_STATE["region"])
        what = f"block {_STATE['block']}, thread {_STATE['thread']}: {_FAILURES[failure]}"
        if region >= 0:
            what += f" {_NAMES[region]}, {_STATE['address'] - _STATE['begins'][region]} bytes from its begin"
        raise BrokenKernelError(what)


def _bounds(array: Array) -> tuple[int, int]:
    reach = [stride * (length - 1) for stride, length in zip(array.strides, array.shape, strict=True)]
    first = int(array.__array_interface__["data"][0])
    return first + sum(r for r in reach if r < 0), first + sum(r for r in reach if r > 0) + array.itemsize


# --- Intrinsics -----------------------------------------------------------------------------------


@njit
def thread_index():
    return _state().thread


@njit
def block_index():
    return _state().block


@njit
def batch_index():
    return _state().matrix


@njit
def synchronize_block():
    _wait(_BLOCK)


@njit
def synchronize_warp():
    _wait(_WARP_BARRIER)


@njit
def from_lane(x, lane):
    gpu = _state()
    mine = _VALUES + np.int64(gpu.thread) * 8
    gpu.lanes[gpu.thread] = lane
    _write(mine, x)
    _wait(_SHUFFLE)
    return _read(mine, x)


@njit
def shuffle_up(x):
    lane = thread_index() % _WARP
    return from_lane(x, max(lane, 1) - 1)


@njit
def all_of_warp(flag):
    gpu = _state()
    gpu.values[gpu.thread] = flag
    _wait(_VOTE)
    return gpu.values[gpu.thread] != 0


@njit
def _allowed(address, size, region, regions):
    """`address`, if `size` bytes lie within one of the regions and are aligned to their size (to 16 at most)."""
    gpu = _state()
    gpu.accesses += 1
    if gpu.accesses > _MOST_ACCESSES:
        _fail(_ENDLESS, address, region)
    if address % min(size, 16) != 0:
        _fail(_NOT_ALIGNED, address, region)
    for k in range(region, region + regions):
        if gpu.begins[k] <= address and address + size <= gpu.ends[k]:
            return address
    _fail(_OUTSIDE, address, region)
    return address


@njit
def _allowed_of_inputs(address, size):
    return _allowed(address, size, _INPUTS, _SHARED - _INPUTS)


@njit
def _allowed_of_shared(address, size, reads):
    _allowed(address, size, _SHARED, _REGIONS - _SHARED)
    warp = np.uint8(1 + _state().thread // _WARP)
    for byte in range(_SHARED_WRITTEN + address - _SHARED_BEGIN, _SHARED_WRITTEN + address - _SHARED_BEGIN + size):
        by = _read(byte, np.uint8)
        if reads and by == 0:
            _fail(_NOT_WRITTEN, address, _SHARED)
        if not reads:
            if by != 0 and by != _BY_ANY and by != warp:
                _fail(_OF_OTHERS, address, _SHARED)
            _write(byte, warp)
    return address


@njit
def _allowed_once(address, size):
    gpu = _state()
    _allowed(address, size, _OUT, 1)
    for k in range(size // gpu.element_size):
        byte = gpu.written + (address - gpu.begins[_OUT]) // gpu.element_size + k
        if _read(byte, np.uint8) != 0:
            _fail(_AGAIN, address, _OUT)
        _write(byte, np.uint8(1))
    return address


@njit
def load(address, dtype):
    return _read(_allowed_of_inputs(address, _size(dtype)), dtype)


@njit
def load_quad(address, dtype):
    at, size = _allowed_of_inputs(address, 4 * _size(dtype)), _size(dtype)
    return _read(at, dtype), _read(at + size, dtype), _read(at + 2 * size, dtype), _read(at + 3 * size, dtype)


@njit
def store(address, x):
    _write(_allowed_once(address, _size(x)), x)


@njit
def store_quad(address, quad):
    size = _size(quad[0])
    at = _allowed_once(address, 4 * size)
    for k in range(4):
        _write(at + k * size, quad[k])


@njit
def store_vector(address, elements):
    size = _size(elements[0])
    at = _allowed_once(address, len(elements) * size)
    for k in range(len(elements)):
        _write(at + k * size, elements[k])


@njit
def load_shared(address, dtype):
    return _read(_allowed_of_shared(address, _size(dtype), True), dtype)


@njit
def store_shared(address, x):
    _write(_allowed_of_shared(address, _size(x), False), x)


@njit
def load_shared_quad(address):
    at = _allowed_of_shared(address, 16, True)
    return _read(at, np.uint32), _read(at + 4, np.uint32), _read(at + 8, np.uint32), _read(at + 12, np.uint32)


@njit
def store_shared_quad(address, quad):
    at = _allowed_of_shared(address, 16, False)
    for k in range(4):
        _write(at + 4 * k, quad[k])


@njit
def store_shared_vector(address, elements):
    size = _size(elements[0])
    at = _allowed_of_shared(address, len(elements) * size, False)
    for k in range(len(elements)):
        _write(at + k * size, elements[k])


@njit
def shared_memory(size):
    """The address of an array in shared memory: call k of every thread of a block returns the same array."""
    gpu = _state()
    piece = _SHARED + np.int64(gpu.pieces[gpu.thread])
    gpu.pieces[gpu.thread] += 1
    begin = _SHARED_BEGIN if piece == _SHARED else gpu.ends[piece - 1] + _GAP
    begin += -begin % 16
    if piece == _REGIONS or begin + size > _SHARED_BEGIN + _MOST_SHARED:
        _fail(_TOO_MUCH, begin, _SHARED)
    gpu.begins[piece], gpu.ends[piece] = begin, begin + size
    return begin


@intrinsic
def opaque(typingctx: Any, x: Any) -> Any:
    return (x(x), lambda context, builder, signature, args: args[0]) if x == types.uint32 else None


@njit
def log2(x):
    return np.log2(x)


@njit
def square_root(x):
    return np.sqrt(x)


@njit
def cosine(x):
    return np.cos(x)


@njit
def sine(x):
    return np.sin(x)


LARGE_SHARED_MEMORY = True
NARROWING, WIDENING = rounding.NARROWING, rounding.WIDENING
