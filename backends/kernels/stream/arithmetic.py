"""IEEE 754 operations that Numba lacks, as LLVM operations.

The bits are the same everywhere only if each fused multiply-add is fused everywhere. Neither Python nor Numba can
express that. The operations of this module mean the same on a CPU and in PTX.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing import Context
from numba.extending import intrinsic
from numba.np.numpy_support import from_dtype

from .vectors import Vector, common_type, element_type, filled, llvm_like, with_elements

_INTEGER_OF = {types.float32: types.int32, types.float64: types.int64}
_FLOAT_OF = {integer: real for real, integer in _INTEGER_OF.items()}
_SIGNED = {types.uint32: types.int32, types.uint64: types.int64}


# --- Bits ---------------------------------------------------------------------------------------------------------


def _bitcast(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.bitcast(args[0], context.get_value_type(signature.return_type))


@intrinsic
def float_bits(typingctx: Any, x: Any) -> Any:
    """The bit pattern of a float32 as an int32, or of a float64 as an int64."""
    kind = _INTEGER_OF.get(element_type(x))
    return (with_elements(x, kind)(x), _bitcast) if kind else None


@intrinsic
def from_float_bits(typingctx: Any, bits: Any) -> Any:
    """The float32 of an int32 bit pattern, or the float64 of an int64 one."""
    kind = _FLOAT_OF.get(element_type(bits))
    return (with_elements(bits, kind)(bits), _bitcast) if kind else None


# --- Fused multiply-adds ------------------------------------------------------------------------------------------


def _has_feature(context: Any, builder: Any, name: str) -> bool:
    """Whether a processor of x86 has this extension. True for other processors."""
    if not str(builder.module.triple).startswith(("x86", "i386", "i686")):
        return True
    _, _, features = context.codegen().magic_tuple()
    return f"+{name}" in features.split(",")


def _call(builder: Any, name: str, *args: Any) -> Any:
    """Call a function of LLVM. The name of `llvm.fma` or `llvm.sqrt` lacks the type.

    On processors without fused multiply-adds, LLVM calls the C library, which takes 60 to 170 ns.
    """
    real = args[0].type
    if name in ("llvm.fma", "llvm.sqrt"):
        name += f".v{real.count}{real.element.intrinsic_name}" if hasattr(real, "count") else f".{real.intrinsic_name}"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(real, [real] * len(args)), name)
    return builder.call(function, args)


@intrinsic
def fma(typingctx: Any, x: Any, y: Any, z: Any) -> Any:
    """``x * y + z`` with one rounding; all three float32 or all three float64."""
    return _of_equal_types(lambda context, builder, *args: _call(builder, "llvm.fma", *args), x, y, z)


@intrinsic
def transform_fma(typingctx: Any, x: Any, y: Any, z: Any) -> Any:
    """`fma` for the transform of words. On processors without FMA, it rounds floats twice, to the same bits."""
    return _of_equal_types(_emit_transform_fma, x, y, z)


def _of_equal_types(emit: Callable[..., Any], x: Any, y: Any, z: Any) -> Any:
    kind, number = common_type(x, y, z), element_type(x)
    if number not in _INTEGER_OF or element_type(y) != number or element_type(z) != number:
        return None
    return kind(kind, kind, kind), lambda context, builder, signature, args: emit(context, builder, *args)


def _emit_transform_fma(context: Any, builder: Any, x: Any, y: Any, z: Any) -> Any:
    single = llvm_like(x.type, ir.FloatType())
    if x.type != single or _has_feature(context, builder, "fma"):
        return _call(builder, "llvm.fma", x, y, z)
    # For every float32 that a word converts to, rounding to float64 and to float32 gives the bits of one rounding:
    # tests/stream/test_transform_fma.py tries them all.
    x, y, z = (builder.fpext(value, llvm_like(single, ir.DoubleType())) for value in (x, y, z))
    return builder.fptrunc(builder.fadd(builder.fmul(x, y), z), single)


@intrinsic
def product(typingctx: Any, x: Any, y: Any) -> Any:
    """``x * y``, never contracted with an addition. libNVVM contracts other products."""
    if element_type(x) not in _INTEGER_OF or y != x:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not _is_gpu(builder):
            return builder.fmul(*args)
        return _call(builder, "llvm.nvvm.mul.rn.f" if x == types.float32 else "llvm.nvvm.mul.rn.d", *args)

    return x(x, x), codegen


def horner(coefficients: Sequence[Any]) -> Any:
    """A function that evaluates a polynomial at x, with one fma for each power.

    `coefficients` begin with the highest power. They and x are float32 or float64, and x may be a vector.
    """
    number = from_dtype(coefficients[0].dtype)

    # An intrinsic, because LLVM unrolls a loop over a tuple too late to vectorise it.
    @intrinsic
    def polynomial(typingctx: Any, x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value, *rest = _emit_constants(context, builder, args[0].type, [float(k) for k in coefficients])
            for coefficient in rest:
                value = _emit_transform_fma(context, builder, value, args[0], coefficient)
            return value

        return (x(x), codegen) if element_type(x) == number else None

    return polynomial


def _emit_constants(context: Any, builder: Any, kind: Any, numbers: list[float]) -> list[Any]:
    """Constants of the LLVM type `kind`. Vectors for a processor with few registers are loaded from an array."""
    constants = [filled(kind, number) for number in numbers]
    is_vector = isinstance(kind, ir.VectorType)
    if not is_vector or not _has_feature(context, builder, "fma") or _has_feature(context, builder, "avx512f"):
        return constants
    # LLVM would load the address of each constant, and broadcast the constant: a third of the instructions of the loop
    # over normals. An fma reads an element of the array by itself. The empty assembly hides from LLVM what is there.
    array = cgutils.global_constant(builder, "coefficients", ir.ArrayType(kind, len(constants))(constants))
    array.align = 64
    address = builder.asm(ir.FunctionType(array.type, [array.type]), "", "=r,0", [array], True)
    zero, *places = map(ir.IntType(32), range(len(constants)))
    return [builder.load(builder.gep(address, [zero, place])) for place in (zero, *places)]


# --- Words and roots ----------------------------------------------------------------------------------------------


@intrinsic
def like(typingctx: Any, x: Any, word: Any) -> Any:
    """The lower bits of an integer `x`, in the type of `word`. If one of both is a vector, the result is a vector."""
    kind = common_type(x, word)
    if isinstance(kind, Vector):
        return kind(kind, word), lambda context, builder, signature, args: args[0]
    if not (isinstance(x, types.Integer) and isinstance(word, types.Integer)):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to = context.get_value_type(word)
        if x.bitwidth > word.bitwidth:
            return builder.trunc(args[0], to)
        return (builder.sext if x.signed else builder.zext)(args[0], to)

    return word(x, word), codegen


@intrinsic
def signed(typingctx: Any, x: Any) -> Any:
    """The bits of an unsigned integer as a signed one."""
    kind = _SIGNED.get(element_type(x))
    return (with_elements(x, kind)(x), lambda context, builder, signature, args: args[0]) if kind else None


@intrinsic
def to_real(typingctx: Any, x: Any) -> Any:
    """An integer of 32 or 64 bits as a float of as many bits, rounded."""
    number = element_type(x)
    kind = _FLOAT_OF.get(_SIGNED.get(number, number))
    if kind is None:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (bits,), to = args, context.get_value_type(signature.return_type)
        if not isinstance(x, Vector) or number.bitwidth == 32 or _has_feature(context, builder, "avx512dq"):
            return (builder.sitofp if number.signed else builder.uitofp)(bits, to)

        # LLVM would convert each lane by itself. Each 32-bit half is placed in the low bits of a large float64. This
        # and the subtraction of the large number are exact: only the sum of the halves rounds.
        def constant(value: int) -> Any:
            return filled(bits.type, value)

        if number.signed:
            bits = builder.xor(bits, constant(1 << 63))
        upper = builder.or_(builder.lshr(bits, constant(32)), constant(0x4530000000000000))
        lower = builder.or_(builder.and_(bits, constant(0xFFFFFFFF)), constant(0x4330000000000000))
        base = 2.0**84 + 2.0**52 + (2.0**63 if number.signed else 0)
        return builder.fadd(builder.fsub(builder.bitcast(upper, to), filled(to, base)), builder.bitcast(lower, to))

    return with_elements(x, kind)(x), codegen


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
    number = element_type(x)
    if number not in (types.uint32, types.uint64) or not isinstance(multiplier, types.IntegerLiteral):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lane = llvm_like(args[0].type, ir.IntType(64))
        constant, shift = filled(lane, multiplier.literal_value), filled(lane, 32)
        if number == types.uint64:
            low = builder.mul(builder.and_(args[0], filled(lane, 0xFFFFFFFF)), constant)
            high = builder.lshr(low, shift)
        else:
            product = builder.mul(builder.zext(args[0], lane), constant)
            low = builder.trunc(product, args[0].type)
            high = builder.trunc(builder.lshr(product, shift), args[0].type)
        return context.make_tuple(builder, signature.return_type, (high, low))

    return types.UniTuple(x, 2)(x, multiplier), codegen


@intrinsic
def sqrt(typingctx: Any, x: Any) -> Any:
    """The square root of a positive float32 or float64, correctly rounded.

    On a GPU it omits the slow path for subnormal float32: it is correctly rounded for the square of every radius that
    a word gives.
    """
    if element_type(x) not in _INTEGER_OF:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (square,) = args
        if x == types.float64 or not _is_gpu(builder):
            return _call(builder, "llvm.sqrt", square)
        real = square.type
        y = builder.asm(ir.FunctionType(real, [real]), "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", args, False)
        g = builder.fmul(square, y)
        h = builder.fmul(y, real(0.5))
        rest = _call(builder, "llvm.fma", builder.fsub(real(-0.0), g), g, square)
        return _call(builder, "llvm.fma", h, rest, g)

    return x(x), codegen


def _is_gpu(builder: Any) -> bool:
    return str(builder.module.triple).startswith("nvptx")
