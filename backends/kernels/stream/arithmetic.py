"""IEEE 754 operations that Numba lacks, as LLVM operations.

The bits are the same everywhere only if each fused multiply-add is fused everywhere. Neither Python nor Numba can
express that. The operations of this module mean the same on a CPU and in PTX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing import Context
from numba.extending import intrinsic

_INTEGER_OF = {types.float32: types.int32, types.float64: types.int64}
_FLOAT_OF = {integer: real for real, integer in _INTEGER_OF.items()}


# --- Bits ---------------------------------------------------------------------------------------------------------


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


# --- Fused multiply-adds ------------------------------------------------------------------------------------------


def emit_fma(context: Any, builder: Any, x: Any, y: Any, z: Any) -> Any:
    """``x * y + z`` with one rounding, of LLVM values: floats, doubles or vectors of them."""
    if _has_fma(context, builder):
        scalar = x.type.element if isinstance(x.type, ir.VectorType) else x.type
        lanes = f"v{x.type.count}" if isinstance(x.type, ir.VectorType) else ""
        return _call(builder, f"llvm.fma.{lanes}{'f32' if scalar == ir.FloatType() else 'f64'}", x, y, z)
    if isinstance(x.type, ir.VectorType):
        result = x.type(ir.Undefined)
        for k in map(ir.IntType(32), range(x.type.count)):
            lane = emit_fma(context, builder, *(builder.extract_element(vector, k) for vector in (x, y, z)))
            result = builder.insert_element(result, lane, k)
        return result
    single = x.type == ir.FloatType()
    real = types.float32 if single else types.float64
    function = _fma_in_float64 if single else _fma_in_parts
    return context.compile_internal(builder, function, real(real, real, real), (x, y, z))


def _has_fma(context: Any, builder: Any) -> bool:
    """Whether the processor has the instruction. Otherwise, LLVM calls the C library, which takes 60 to 170 ns."""
    if not str(builder.module.triple).startswith(("x86", "i386", "i686")):
        return True
    _, _, features = context.codegen().magic_tuple()
    return "+fma" in features.split(",")


def _call(builder: Any, name: str, *args: Any) -> Any:
    real = args[0].type
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(real, [real] * len(args)), name)
    return builder.call(function, args)


@intrinsic
def _library_fma(typingctx: Any, x: Any, y: Any, z: Any) -> Any:
    """The function of the C library. LLVM would move its own operation out of a branch that is rarely taken."""
    return x(x, x, x), lambda context, builder, signature, args: _call(builder, "fma", *args)


# Twins of the functions in csrc/stream/arithmetic.h, which says why they are right.


def _fma_in_float64(x: Any, y: Any, z: Any) -> Any:
    p, c = np.float64(x) * np.float64(y), np.float64(z)
    s = p + c
    t = s - p
    error = (p - (s - t)) + (c - t)
    inexact = np.int64(error * error > 0.0)
    is_too_large = np.int64((float_bits(s) ^ float_bits(error)) < 0)
    return np.float32(from_float_bits((float_bits(s) - (inexact & is_too_large)) | inexact))


def _fma_in_parts(x: Any, y: Any, z: Any) -> Any:
    p = x * y
    s = p + z
    z0 = s - p
    t = (p - (s - z0)) + (z - z0)
    x0, y0 = x * 134217729.0, y * 134217729.0
    x1, y1 = x0 - (x0 - x), y0 - (y0 - y)
    x2, y2 = x - x1, y - y1
    q = ((x1 * y1 - p) + x1 * y2 + x2 * y1) + x2 * y2
    rest = q + t
    result = s + rest
    distance = rest - (result - s)
    is_exact = abs(p) > 2.0**-900 or x == 0.0 or y == 0.0
    if is_exact and result != 0.0 and result + distance * (1 + 2.0**-50) == result:
        return result
    return _library_fma(x, y, z)


@intrinsic
def fma(typingctx: Any, x: Any, y: Any, z: Any) -> Any:
    """``x * y + z`` with one rounding; all three float32 or all three float64."""
    return _of_equal_types(emit_fma, x, y, z)


@intrinsic
def transform_fma(typingctx: Any, x: Any, y: Any, z: Any) -> Any:
    """`fma` for the transform of words. On processors without FMA, it rounds floats twice, to the same bits."""
    return _of_equal_types(_emit_transform_fma, x, y, z)


def _of_equal_types(emit: Callable[..., Any], x: Any, y: Any, z: Any) -> Any:
    if x not in _INTEGER_OF or y != x or z != x:
        return None
    return x(x, x, x), lambda context, builder, signature, args: emit(context, builder, *args)


def _emit_transform_fma(context: Any, builder: Any, x: Any, y: Any, z: Any) -> Any:
    if x.type != ir.FloatType() or _has_fma(context, builder):
        return emit_fma(context, builder, x, y, z)
    # Two roundings give the bits of one here: see csrc/stream/arithmetic.h.
    x, y, z = (builder.fpext(value, ir.DoubleType()) for value in (x, y, z))
    return builder.fptrunc(builder.fadd(builder.fmul(x, y), z), ir.FloatType())


@intrinsic
def product(typingctx: Any, x: Any, y: Any) -> Any:
    """``x * y``, never contracted with an addition. libNVVM contracts other products."""
    if x not in _INTEGER_OF or y != x:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not _is_gpu(builder):
            return builder.fmul(*args)
        return _call(builder, "llvm.nvvm.mul.rn.f" if x == types.float32 else "llvm.nvvm.mul.rn.d", *args)

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
            value = _emit_transform_fma(context, builder, value, args[1], coefficient)
        return value

    return x(coefficients, x), codegen


# --- Words and roots ----------------------------------------------------------------------------------------------


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
            return _call(builder, "llvm.sqrt.f32" if x == types.float32 else "llvm.sqrt.f64", square)
        real = square.type
        y = builder.asm(ir.FunctionType(real, [real]), "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", args, False)
        g = builder.fmul(square, y)
        h = builder.fmul(y, real(0.5))
        rest = emit_fma(context, builder, builder.fsub(real(-0.0), g), g, square)
        return emit_fma(context, builder, h, rest, g)

    return x(x), codegen


def _is_gpu(builder: Any) -> bool:
    return str(builder.module.triple).startswith("nvptx")
