"""Memory by address, and PTX instructions that Numba lacks.

Addresses are int64. Memory is aligned to the type that is read or written.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from multisample.backends.kernels.stream import rounding

__all__ = ["cosine", "from_float16", "load", "log2", "narrowing", "sine", "square_root", "store", "store_vector"]


def _at(builder: Any, address: Any, pointee: Any) -> Any:
    # Address space 1 is global memory: a generic access must first find out which memory the address is in.
    return builder.inttoptr(address, ir.PointerType(pointee, 1))


@intrinsic
def load(typingctx: Any, address: Any, dtype: Any) -> Any:
    """The number of type `dtype` at an address."""
    result = dtype.dtype

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_at(builder, args[0], context.get_value_type(result)), align=result.bitwidth // 8)

    return result(address, dtype), codegen


@intrinsic
def store(typingctx: Any, address: Any, x: Any) -> Any:
    """Store the number `x` at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], _at(builder, args[0], args[1].type), align=x.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(address, x), codegen


@intrinsic(prefer_literal=True)
def store_vector(typingctx: Any, address: Any, x: Any, count: Any) -> Any:
    """Store the first `count` elements of an array in vectors of at most four elements and 16 bytes.

    The address is divisible by the size of a vector. `count` is a literal.
    """
    if not isinstance(count, types.IntegerLiteral):
        return None
    size = x.dtype.bitwidth // 8
    at_once = min(count.literal_value, 16 // size, 4)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(x)(context, builder, args[1])
        kind = ir.VectorType(context.get_value_type(x.dtype), at_once)
        for k in range(0, count.literal_value, at_once):
            vector = kind(ir.Undefined)
            for lane in range(at_once):
                element = builder.load(builder.gep(array.data, [ir.IntType(64)(k + lane)]))
                vector = builder.insert_element(vector, element, ir.IntType(32)(lane))
            at = builder.add(args[0], args[0].type(k * size))
            builder.store(vector, _at(builder, at, kind), align=at_once * size)
        return context.get_dummy_value()

    return types.void(address, x, count), codegen


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

_to_float16 = _instruction("cvt.rn.f16.f32", types.uint16, types.float32)
_to_bfloat16 = _instruction("cvt.rn.bf16.f32", types.uint16, types.float32)

from_float16 = _instruction("cvt.f32.f16", types.float32, types.uint16)


def narrowing(dtype: str, capability: tuple[int, int]) -> Any:
    """The function from the computing type to an element of type `dtype`: an instruction where there is one."""
    if dtype == "float16":
        return _to_float16
    if dtype == "bfloat16" and capability >= (8, 0):
        return _to_bfloat16
    return rounding.NARROWING[dtype]
