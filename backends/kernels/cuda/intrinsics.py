"""GPU intrinsics: indices, barriers, shuffles, memory by address, and PTX instructions.

The kernel takes this module as a parameter, so that it also runs on an emulator with the same names. Addresses are
int64. Memory is aligned to the type that is read or written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import cuda, types
from numba.core import cgutils
from numba.extending import intrinsic

from multisample.backends.kernels.compilation import jit
from multisample.backends.kernels.stream import rounding

__all__ = [
    "LARGE_SHARED_MEMORY", "NARROWING", "WIDENING", "all_of_warp", "batch_index", "block_index", "cosine", "from_lane",
    "load", "load_shared", "load_shared_quad", "log2", "opaque", "shared_memory", "shuffle_up", "sine",
    "square_root", "store", "store_shared", "store_shared_vector", "store_vector", "synchronize_block",
    "synchronize_warp", "thread_index",
]  # fmt: skip

LARGE_SHARED_MEMORY = True
"""Whether a multiprocessor has 164 KB of shared memory or more; in C++, ``kLargeSharedMemory``."""

_WARP = 0xFFFFFFFF
_GLOBAL, _SHARED = 1, 3


@jit()
def thread_index():
    """The thread's index in its block."""
    return np.uint32(cuda.threadIdx.x)


@jit()
def block_index():
    """The block's index in the grid."""
    return np.uint32(cuda.blockIdx.x)


@jit()
def batch_index():
    """The index of the block's matrix in a batch."""
    return np.uint32(cuda.blockIdx.y)


@jit()
def synchronize_block():
    """Wait for all threads of the block."""
    cuda.syncthreads()


@jit()
def synchronize_warp():
    """Wait for all threads of the warp."""
    cuda.syncwarp()


@jit()
def shuffle_up(x):
    """`x` of the previous lane; lane 0 gets its own."""
    return cuda.shfl_up_sync(_WARP, x, 1)


@jit()
def from_lane(x, lane):
    """`x` of lane `lane`. All lanes of the warp take part."""
    return cuda.shfl_sync(_WARP, x, lane)


@jit()
def all_of_warp(flag):
    """Whether `flag` is true in all lanes of the warp."""
    return cuda.all_sync(_WARP, flag)


def _at(builder: Any, address: Any, pointee: Any, space: int) -> Any:
    # With an address space: a generic access must first find out which memory the address is in.
    return builder.inttoptr(address, ir.PointerType(pointee, space))


def _loader(space: int) -> Any:
    def load(typingctx: Any, address: Any, dtype: Any) -> Any:
        result = dtype.dtype

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            element = context.get_value_type(result)
            return builder.load(_at(builder, args[0], element, space), align=result.bitwidth // 8)

        return result(address, dtype), codegen

    return load


def _storer(space: int) -> Any:
    def store(typingctx: Any, address: Any, x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.store(args[1], _at(builder, args[0], args[1].type, space), align=x.bitwidth // 8)
            return context.get_dummy_value()

        return types.void(address, x), codegen

    return store


load = intrinsic(_loader(_GLOBAL))
store = intrinsic(_storer(_GLOBAL))
load_shared = intrinsic(_loader(_SHARED))
store_shared = intrinsic(_storer(_SHARED))


def _store_vector(builder: Any, address: Any, elements: list[Any], space: int, align: int) -> None:
    if len(elements) > 4:  # A vector store has at most four elements: join pairs of 16 bits to words of 32.
        word = ir.IntType(32)
        halves = [builder.zext(element, word) for element in elements]
        elements = [builder.or_(a, builder.shl(b, word(16))) for a, b in zip(halves[::2], halves[1::2], strict=True)]
    kind = ir.VectorType(elements[0].type, len(elements))
    vector: Any = ir.Constant(kind, ir.Undefined)
    for k, element in enumerate(elements):
        vector = builder.insert_element(vector, element, ir.Constant(ir.IntType(32), k))
    builder.store(vector, _at(builder, address, kind, space), align=align)


def _vector_storer(space: int) -> Any:
    def store_vector(typingctx: Any, address: Any, elements: Any) -> Any:
        """Store adjacent elements at an address divisible by their total size, or by 16 if that is less."""
        size = elements.dtype.bitwidth // 8
        at_once = min(elements.count, 16 // size)  # The widest store has 16 bytes.

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values = cgutils.unpack_tuple(builder, args[1])
            for k in range(0, len(values), at_once):
                at = builder.add(args[0], args[0].type(k * size))
                _store_vector(builder, at, values[k : k + at_once], space, at_once * size)
            return context.get_dummy_value()

        return types.void(address, elements), codegen

    return store_vector


store_vector = intrinsic(_vector_storer(_GLOBAL))
store_shared_vector = intrinsic(_vector_storer(_SHARED))


@intrinsic
def load_shared_quad(typingctx: Any, address: Any) -> Any:
    """Load four adjacent uint32 at an address of shared memory divisible by 16."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        vector = builder.load(_at(builder, args[0], ir.VectorType(word, 4), _SHARED), align=16)
        words = [builder.extract_element(vector, ir.Constant(word, k)) for k in range(4)]
        return context.make_tuple(builder, signature.return_type, words)

    return types.UniTuple(types.uint32, 4)(address), codegen


@intrinsic(prefer_literal=True)
def shared_memory(typingctx: Any, size: Any) -> Any:
    """The address of `size` bytes, a literal, of the block's shared memory. Each call in the source has its own."""
    if not isinstance(size, types.IntegerLiteral):
        return None
    length = size.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.ArrayType(ir.IntType(8), length)
        memory = cgutils.add_global_variable(builder.module, kind, builder.module.get_unique_name("shared"), _SHARED)
        memory.linkage = "internal"
        memory.initializer = ir.Constant(kind, ir.Undefined)
        memory.align = 16
        return builder.ptrtoint(memory, ir.IntType(64))

    return types.int64(size), codegen


@intrinsic
def opaque(typingctx: Any, x: Any) -> Any:
    """Hide the uint32 `x` from the optimizer, which then recomputes values from it and keeps no register."""
    if x != types.uint32:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(args[0].type, [args[0].type])
        return builder.asm(kind, "mov.b32 $0, $1;", "=r,r", args, True)

    return x(x), codegen


def _instruction(ptx: str, result: Any, argument: Any) -> Any:
    constraints = {types.float32: "f", types.uint16: "h"}

    def emit(typingctx: Any, x: Any) -> Any:
        if x != argument:
            return None

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.FunctionType(context.get_value_type(result), [args[0].type])
            return builder.asm(kind, f"{ptx} $0, $1;", f"={constraints[result]},{constraints[argument]}", args, False)

        return result(argument), codegen

    return intrinsic(emit)


log2 = _instruction("lg2.approx.ftz.f32", types.float32, types.float32)
square_root = _instruction("sqrt.approx.ftz.f32", types.float32, types.float32)
cosine = _instruction("cos.approx.ftz.f32", types.float32, types.float32)
sine = _instruction("sin.approx.ftz.f32", types.float32, types.float32)

# The conversions of `rounding`, by an instruction where there is one.
WIDENING = rounding.WIDENING | {"float16": _instruction("cvt.f32.f16", types.float32, types.uint16)}
NARROWING_BEFORE_8_0 = rounding.NARROWING | {"float16": _instruction("cvt.rn.f16.f32", types.uint16, types.float32)}
NARROWING = NARROWING_BEFORE_8_0 | {"bfloat16": _instruction("cvt.rn.bf16.f32", types.uint16, types.float32)}
