"""IEEE 754 operations that Numba lacks, as LLVM operations.

The bits are the same everywhere only if each fused multiply-add is fused everywhere. Neither Python nor Numba can
express that. The operations of this module mean the same on a CPU and in PTX.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing import Context
from numba.extending import intrinsic

__all__ = ["float_bits", "fma", "from_float_bits", "horner", "like", "native_word", "product", "sqrt", "wide_product"]

_INTEGER_OF = {types.float32: types.int32, types.float64: types.int64}
_FLOAT_OF = {integer: real for real, integer in _INTEGER_OF.items()}


def _emit_fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    name = "llvm.fma.f32" if x.type == ir.FloatType() else "llvm.fma.f64"
    function_type = ir.FunctionType(x.type, [x.type] * 3)
    function = cgutils.get_or_insert_function(builder.module, function_type, name)
    return builder.call(function, (x, y, z))


@intrinsic
def fma(typingctx: Any, x: Any, y: Any, z: Any) -> Any:
    """``x * y + z`` with one rounding; all three float32 or all three float64."""
    if x not in _INTEGER_OF or y != x or z != x:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _emit_fma(builder, *args)

    return x(x, x, x), codegen


@intrinsic
def product(typingctx: Any, x: Any, y: Any) -> Any:
    """``x * y``, which no addition that follows is contracted with. libNVVM contracts other products."""
    if x not in _INTEGER_OF or y != x:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not _is_gpu(builder):
            return builder.fmul(*args)
        name = "llvm.nvvm.mul.rn.f" if x == types.float32 else "llvm.nvvm.mul.rn.d"
        real = args[0].type
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(real, [real, real]), name)
        return builder.call(function, args)

    return x(x, x), codegen


@intrinsic
def horner(typingctx: Any, coefficients: Any, x: Any) -> Any:
    """The polynomial of `coefficients`, a tuple with the highest power first, at `x`: one fma for each power."""
    if not isinstance(coefficients, types.UniTuple) or x not in _INTEGER_OF:
        return None

    # An intrinsic, because LLVM unrolls a loop over a tuple too late to vectorise it.
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first, *rest = cgutils.unpack_tuple(builder, args[0])
        value = first
        for coefficient in rest:
            value = _emit_fma(builder, value, args[1], coefficient)
        return value

    return x(coefficients, x), codegen


def _bitcast(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.bitcast(args[0], context.get_value_type(signature.return_type))


@intrinsic
def float_bits(typingctx: Any, x: Any) -> Any:
    """The bit pattern of a float32 as an int32, or of a float64 as an int64."""
    return (_INTEGER_OF[x](x), _bitcast) if x in _INTEGER_OF else None


@intrinsic
def from_float_bits(typingctx: Any, bits: Any) -> Any:
    """The float32 of an int32 bit pattern, or the float64 of an int64 one."""
    return (_FLOAT_OF[bits](bits), _bitcast) if bits in _FLOAT_OF else None


@intrinsic
def like(typingctx: Any, x: Any, word: Any) -> Any:
    """The lower bits of an unsigned integer `x`, in the type of `word`."""
    if not (isinstance(x, types.Integer) and isinstance(word, types.Integer)):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to = context.get_value_type(word)
        return builder.trunc(args[0], to) if x.bitwidth > word.bitwidth else builder.zext(args[0], to)

    return word(x, word), codegen


@intrinsic
def native_word(typingctx: Any, x: Any) -> Any:
    """The lower 32 bits of a uint64, in the type that words have where the caller runs: see words.py."""
    if x != types.uint64:
        return None
    word = types.uint64 if isinstance(typingctx, Context) else types.uint32

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lower = builder.trunc(args[0], ir.IntType(32))
        return lower if word == types.uint32 else builder.zext(lower, args[0].type)

    return word(x), codegen


@intrinsic(prefer_literal=True)
def wide_product(typingctx: Any, x: Any, multiplier: Any) -> Any:
    """Upper and lower word of the product of the word `x` and a literal `multiplier`.

    A uint32 gives two uint32. A uint64, whose upper half is ignored, gives two uint64.
    """
    if x not in (types.uint32, types.uint64) or not isinstance(multiplier, types.IntegerLiteral):
        return None
    lane = ir.IntType(64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        constant = lane(multiplier.literal_value)
        if x == types.uint64:
            low = builder.mul(builder.and_(args[0], lane(0xFFFFFFFF)), constant)
            high = builder.lshr(low, lane(32))
        else:
            product = builder.mul(builder.zext(args[0], lane), constant)
            low = builder.trunc(product, args[0].type)
            high = builder.trunc(builder.lshr(product, lane(32)), args[0].type)
        return context.make_tuple(builder, signature.return_type, (high, low))

    return types.UniTuple(x, 2)(x, multiplier), codegen


@intrinsic
def sqrt(typingctx: Any, x: Any) -> Any:
    """The square root of a positive float32 or float64, correctly rounded.

    On a GPU it omits the slow path for subnormal float32: it is correctly rounded for the square of every radius that
    a word gives.
    """
    if x not in _INTEGER_OF:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (square,) = args
        if x == types.float64 or not _is_gpu(builder):
            name = "llvm.sqrt.f32" if x == types.float32 else "llvm.sqrt.f64"
            function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(square.type, [square.type]), name)
            return builder.call(function, args)
        real = square.type
        y = builder.asm(ir.FunctionType(real, [real]), "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", args, False)
        g = builder.fmul(square, y)
        h = builder.fmul(y, real(0.5))
        return _emit_fma(builder, h, _emit_fma(builder, builder.fsub(real(-0.0), g), g, square), g)

    return x(x), codegen


def _is_gpu(builder: Any) -> bool:
    return str(builder.module.triple).startswith("nvptx")
