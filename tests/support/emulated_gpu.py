"""A GPU emulated on the CPU. Its functions replace those of `multisample.backends.kernels.cuda.intrinsics`.

Numba's simulator runs Python, not compiled functions. Here the kernel is compiled unchanged, and shim/fibers.h runs it
as it runs kernels in C++. Every memory access is checked, and the first wrong access ends the launch.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import llvmlite.binding
import numpy as np
import pytest
from cuda_cpp import SHIM, compile_cpp
from launches import address_of, extent
from llvmlite import ir
from numba import cfunc, config, types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from multisample.backends.kernels.compilation import _Callee
from multisample.backends.kernels.cuda.geometry import MOST_THREADS
from multisample.backends.kernels.cuda.parameters import GEOMETRY, LAUNCH
from multisample.backends.kernels.stream import rounding

Array = np.ndarray[Any, Any]

requires_emulator = pytest.mark.skipif(
    sys.platform != "linux" or sys.maxsize < 2**32 or shutil.which("g++") is None,
    reason="the emulation needs the fibers of Linux, and g++",
)

_WARP, _MOST_INPUTS = 32, 4
# The parameters of a launch. Compiled kernels contain the address of this array.
_packed = np.zeros(4096 // 8, np.uint64)
_WORD, _NOTHING = ir.IntType(64), ir.VoidType()


class BrokenKernelError(Exception):
    """A kernel has undefined behaviour on a GPU."""


@functools.cache
def _library() -> Any:
    """The functions of shim/emulator.cpp; kernels find them by name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "emulator.so"
        compile_cpp("-O1", "-Wno-clobbered", "-shared", "-fPIC", SHIM / "emulator.cpp", "-o", path)
        llvmlite.binding.load_library_permanently(str(path))
        library = ctypes.CDLL(str(path))
    library.emulated_launch.restype = ctypes.c_char_p
    return library


# --- Kernels --------------------------------------------------------------------------------------


def _at(context: Any, builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, context.get_value_type(kind).as_pointer())


@intrinsic
def _parameters(typingctx: Any) -> Any:
    """Read the parameters from their packed bytes: Numba's tuples have the layout of structs."""
    both = types.Tuple((LAUNCH, GEOMETRY))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values, at = [], _packed.ctypes.data
        for kind in both:
            values.append(builder.load(_at(context, builder, ir.Constant(_WORD, at), kind)))
            at += context.get_abi_sizeof(context.get_value_type(kind))
        return context.make_tuple(builder, both, values)

    return both(), codegen


_compiled_once: dict[Any, Any] = {}


def _callee(function: Callable[..., Any]) -> Any:
    """`function`, compiled to LLVM IR. Machine code is generated once, for the whole kernel."""
    return _Callee(function, targetoptions={"nopython": True, "error_model": "numpy"})


def once(function: Callable[..., Any]) -> Any:
    """Decorator, in place of `multisample.backends.kernels.compilation.inline`.

    Without inlining, functions that several kernels share are compiled once. Inlining takes ten times as long.
    """
    closure = (cell.cell_contents for cell in function.__closure__ or ())
    key = function.__code__, id(function.__globals__), tuple((type(x), x) for x in closure)
    if key not in _compiled_once:
        _compiled_once[key] = _callee(function)
    return _compiled_once[key]


def compile_kernel(function: Callable[..., None]) -> Any:
    """Compile ``function(call, geometry)``, whose intrinsics are those of this module, for `launch`."""
    _library()
    kernel = _callee(function)

    def thread():
        call, geometry = _parameters()
        kernel(call, geometry)

    # Most of LLVM's optimizations take longer than they save.
    with mock.patch.object(config, "OPT", config._OptLevel(1)):
        return cfunc(types.void())(thread)


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
    """Run a grid of `blocks` x `batch` blocks of `threads` threads, in ascending or, if `backwards`, descending order.

    `kernel` is from `compile_kernel`, and `parameters` are the call and the geometry, packed. A second write to an
    element is an error, but not a write into a gap of a strided `out`. The kernel may read up to four `inputs`, such as
    mu, sigma and the words in memory. A wrong access and divergence raise BrokenKernelError.
    """
    if blocks < 1 or threads % _WARP != 0 or not 0 < threads <= MOST_THREADS:
        raise BrokenKernelError(f"invalid grid: {blocks} blocks of {threads} threads")
    _packed.view(np.uint8)[...] = np.frombuffer(parameters.ljust(_packed.nbytes), np.uint8)
    regions = np.zeros((1 + _MOST_INPUTS, 2), np.int64)
    for region, memory in enumerate((out, *inputs)):
        if isinstance(memory, np.ndarray):
            regions[region] = _bounds(memory)
    written = np.zeros((regions[0, 1] - regions[0, 0]) // out.itemsize, np.uint8)
    error = _library().emulated_launch(
        ctypes.c_void_p(kernel.address), blocks, batch, threads, ctypes.c_bool(backwards),
        ctypes.c_void_p(regions.ctypes.data), ctypes.c_uint64(out.itemsize), ctypes.c_void_p(written.ctypes.data),
    )  # fmt: skip
    if error:
        raise BrokenKernelError(error.decode())


def _bounds(array: Array) -> tuple[int, int]:
    (below, above), first = extent(array.shape, array.strides), address_of(array)
    return first - below, first + above + array.itemsize


# --- Intrinsics -----------------------------------------------------------------------------------


def _call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Call ``emulated_name`` of the library."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(get_or_insert_function(builder.module, kind, f"emulated_{name}"), arguments)


def _function(name: str, result: Any = types.void) -> Any:
    """An intrinsic without arguments."""

    @intrinsic
    def function(typingctx: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = _call(builder, name, _NOTHING if result == types.void else context.get_value_type(result))
            return context.get_dummy_value() if result == types.void else value

        return result(), codegen

    return function


thread_index, block_index, batch_index = (_function(name, types.uint32) for name in ("thread", "block", "matrix"))
synchronize_block, synchronize_warp = _function("block_barrier"), _function("warp_barrier")


def _loading(name: str, count: int, own_kind: Any = None) -> Any:
    """``load(address, dtype)``: a number, or a tuple of `count` adjacent numbers; no dtype if `own_kind` is given."""

    def of(kind: Any, *rest: Any) -> Any:
        size = kind.bitwidth // 8
        result = kind if count == 1 else types.UniTuple(kind, count)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _call(builder, name, _NOTHING, args[0], ir.Constant(_WORD, count * size))
            pointer = _at(context, builder, args[0], kind)
            values = [builder.load(builder.gep(pointer, [ir.Constant(_WORD, k)])) for k in range(count)]
            return values[0] if count == 1 else context.make_tuple(builder, result, values)

        return result(types.int64, *rest), codegen

    @intrinsic
    def load_own(typingctx: Any, address: Any) -> Any:
        return of(own_kind)

    @intrinsic
    def load_kind(typingctx: Any, address: Any, dtype: Any) -> Any:
        return of(dtype.dtype, dtype)

    return load_own if own_kind else load_kind


def _storing(name: str) -> Any:
    """``store(address, x)`` for a number or a tuple of numbers of one type."""

    @intrinsic
    def store(typingctx: Any, address: Any, x: Any) -> Any:
        kinds = list(x) if isinstance(x, types.BaseTuple) else [x]

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            size = kinds[0].bitwidth // 8
            _call(builder, name, _NOTHING, args[0], ir.Constant(_WORD, len(kinds) * size))
            for k, kind in enumerate(kinds):
                value = builder.extract_value(args[1], k) if isinstance(x, types.BaseTuple) else args[1]
                at = builder.add(args[0], ir.Constant(_WORD, k * size))
                builder.store(value, _at(context, builder, at, kind))
            return context.get_dummy_value()

        return types.void(types.int64, x), codegen

    return store


load = _loading("load", 1)
store = store_vector = _storing("store")
load_shared, load_shared_quad = _loading("load_shared", 1), _loading("load_shared", 4, types.uint32)
store_shared = store_shared_vector = _storing("store_shared")


def _exchange(context: Any, builder: Any, name: str, x: Any, *arguments: Any) -> Any:
    """The bits of `x` from another thread."""
    bits = x
    if not isinstance(x.type, ir.IntType):
        bits = builder.bitcast(x, ir.IntType(32 if isinstance(x.type, ir.FloatType) else 64))
    word = bits if bits.type == _WORD else builder.zext(bits, _WORD)
    received = _call(builder, name, _WORD, word, *arguments)
    received = received if bits.type == _WORD else builder.trunc(received, bits.type)
    return received if bits is x else builder.bitcast(received, x.type)


@intrinsic
def from_lane(typingctx: Any, x: Any, lane: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _exchange(context, builder, "shuffle", *args)

    return x(x, types.uint32), codegen


@intrinsic
def shuffle_up(typingctx: Any, x: Any) -> Any:
    return x(x), lambda context, builder, signature, args: _exchange(context, builder, "shuffle_up", *args)


@intrinsic
def all_of_warp(typingctx: Any, flag: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.trunc(_call(builder, "vote", _WORD, builder.zext(args[0], _WORD)), ir.IntType(1))

    return types.boolean(types.boolean), codegen


@intrinsic
def shared_memory(typingctx: Any, size: Any) -> Any:
    """The address of an array in shared memory: call k of every thread of a block returns the same array."""
    return types.int64(types.int64), lambda context, builder, signature, args: _call(
        builder, "shared_memory", _WORD, args[0]
    )


@intrinsic
def opaque(typingctx: Any, x: Any) -> Any:
    return (x(x), lambda context, builder, signature, args: args[0]) if x == types.uint32 else None


@_callee
def log2(x):
    return np.log2(x)


@_callee
def square_root(x):
    return np.sqrt(x)


@_callee
def cosine(x):
    return np.cos(x)


@_callee
def sine(x):
    return np.sin(x)


LARGE_SHARED_MEMORY = True
NARROWING, WIDENING = rounding.NARROWING, rounding.WIDENING
