"""SIMD vectors as values of compiled functions, for a CPU.

LLVM vectorises loops over arrays, and decides what a vector holds. A value of type `Vector` makes that explicit.
Operators take two vectors, or a vector and a number. LLVM divides vectors that are wider than those of the processor.
"""

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import lower_builtin, lower_cast
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model


class Vector(types.Type):  # type: ignore[misc]
    """The Numba type of `lanes` numbers of type `dtype`."""

    def __init__(self, dtype: Any, lanes: int) -> None:
        self.dtype, self.lanes = dtype, lanes
        super().__init__(f"Vector({dtype}, {lanes})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, ir.VectorType(manager.lookup(kind.dtype).get_value_type(), kind.lanes))


def element_type(x: Any) -> Any:
    """The type of a number, or of the numbers in a vector."""
    return x.dtype if isinstance(x, Vector) else x


def with_elements(x: Any, dtype: Any) -> Any:
    """The type of a number or a vector like `x`, with another type of its numbers."""
    return Vector(dtype, x.lanes) if isinstance(x, Vector) else dtype


def common_type(*operands: Any) -> Any:
    """The type of the first vector among the types of operands, or else of the first number."""
    return next((x for x in operands if isinstance(x, Vector)), operands[0])


def llvm_like(kind: Any, number: Any) -> Any:
    """The LLVM type `number`, or a vector of it if the LLVM type `kind` is a vector."""
    return ir.VectorType(number, kind.count) if isinstance(kind, ir.VectorType) else number


def filled(kind: Any, value: float) -> Any:
    """A constant of the LLVM type `kind`, with `value` in each lane of a vector."""
    return kind([value] * kind.count if isinstance(kind, ir.VectorType) else value)


def emit_splat(builder: Any, value: Any, lanes: int) -> Any:
    """A vector that has `value` in each lane."""
    vector = ir.VectorType(value.type, lanes)
    one = builder.insert_element(vector(ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(one, vector(ir.Undefined), ir.VectorType(ir.IntType(32), lanes)(None))


@lower_cast(types.Number, Vector)
def _from_number(context: Any, builder: Any, number: Any, vector: Any, value: Any) -> Any:
    return emit_splat(builder, context.cast(builder, value, number, vector.dtype), vector.lanes)


def _define(function: Any, emit: Callable[..., Any], result: Any = None, operands: int = 2) -> None:
    """Define an operator; ``emit(builder, dtype, x, y)``, without `y` for one operand, emits its code."""

    @infer_global(function)
    class _Template(AbstractTemplate):  # type: ignore[misc]
        def generic(self, args: Any, kws: Any) -> Any:
            kind = common_type(*args)
            if not isinstance(kind, Vector):
                return None
            return signature(kind if result is None else with_elements(kind, result), *[kind] * operands)

    @lower_builtin(function, *[Vector] * operands)
    def _lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return emit(builder, sig.args[0].dtype, *args)


def _by_kind(integer: str, real: str) -> Callable[[Any, Any, Any, Any], Any]:
    return lambda builder, dtype, x, y: getattr(builder, real if isinstance(dtype, types.Float) else integer)(x, y)


def _shift_right(builder: Any, dtype: Any, x: Any, y: Any) -> Any:
    return (builder.ashr if dtype.signed else builder.lshr)(x, y)


def _greater(builder: Any, dtype: Any, x: Any, y: Any) -> Any:
    if isinstance(dtype, types.Float):
        return builder.fcmp_ordered(">", x, y)
    return (builder.icmp_signed if dtype.signed else builder.icmp_unsigned)(">", x, y)


for _function, _integer, _real in (
    (operator.add, "add", "fadd"), (operator.sub, "sub", "fsub"), (operator.mul, "mul", "fmul"),
    (operator.xor, "xor", ""), (operator.and_, "and_", ""), (operator.or_, "or_", ""), (operator.lshift, "shl", ""),
):  # fmt: skip
    _define(_function, _by_kind(_integer, _real))
_define(operator.rshift, _shift_right)
_define(operator.gt, _greater, types.boolean)
_define(operator.neg, lambda builder, dtype, x: builder.fneg(x), operands=1)


@intrinsic(prefer_literal=True)
def in_every_lane(typingctx: Any, numbers: Any, lanes: Any) -> Any:
    """For each number of a tuple, a vector that has it in every lane. `lanes` is a literal."""
    result = types.UniTuple(Vector(numbers.dtype, lanes.literal_value), numbers.count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = [emit_splat(builder, x, lanes.literal_value) for x in cgutils.unpack_tuple(builder, args[0])]
        return context.make_tuple(builder, result, vectors)

    return result(numbers, lanes), codegen


@intrinsic(prefer_literal=True)
def lane_numbers(typingctx: Any, dtype: Any, lanes: Any) -> Any:
    """The vector (0, 1, 2, ...) of integers of type `dtype`. `lanes` is a literal."""
    kind = Vector(dtype.dtype, lanes.literal_value)
    return kind(dtype, lanes), lambda context, builder, signature, args: context.get_value_type(kind)(
        list(range(kind.lanes))
    )


def _zip(builder: Any, x: Any, y: Any, lanes: Any) -> Any:
    """The elements x[k], y[k] for each k of `lanes`."""
    places = [place for k in lanes for place in (k, k + x.type.count)]
    return builder.shuffle_vector(x, y, ir.VectorType(ir.IntType(32), len(places))(places))


@intrinsic
def interleaved(typingctx: Any, x: Any, y: Any) -> Any:
    """Two vectors with the elements x[0], y[0], x[1], y[1], ..."""
    middle = x.lanes // 2

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first, second = args
        parts = [_zip(builder, first, second, lanes) for lanes in (range(middle), range(middle, x.lanes))]
        return context.make_tuple(builder, signature.return_type, parts)

    return types.UniTuple(x, 2)(x, y), codegen


@intrinsic
def joined(typingctx: Any, lower: Any, upper: Any) -> Any:
    """Lanes of 64 bits, whose halves are the lower 32 bits of the lanes of `lower` and of `upper`.

    LLVM would compute a shifted product by a product of 64 bits, which is slow.
    """
    words = ir.VectorType(ir.IntType(32), 2 * lower.lanes)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        low, high = (builder.bitcast(vector, words) for vector in args)
        return builder.bitcast(_zip(builder, low, high, range(0, words.count, 2)), args[0].type)

    return lower(lower, lower), codegen


@intrinsic
def select(typingctx: Any, condition: Any, x: Any, y: Any) -> Any:
    """`x` where the condition holds, and else `y`: of two numbers, or in each lane."""
    kind = common_type(x, y)
    return kind(condition, kind, kind), lambda context, builder, signature, args: builder.select(*args)


@intrinsic
def converted(typingctx: Any, x: Any, dtype: Any) -> Any:
    """A number, or each lane of a vector, as `dtype`: a float extended, an integer truncated or extended by zeros."""
    number, result = element_type(x), with_elements(x, dtype.dtype)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        longer = builder.fpext if isinstance(number, types.Float) else builder.zext
        emit = longer if dtype.dtype.bitwidth >= number.bitwidth else builder.trunc
        return emit(args[0], context.get_value_type(result))

    return result(x, dtype), codegen


@intrinsic
def lane_sum(typingctx: Any, x: Any) -> Any:
    """The sum of a vector's lanes: first of both halves of the vector, then of both halves of this sum, and so on."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (total,) = args
        while total.type.count > 1:
            middle = total.type.count // 2
            halves = [
                builder.shuffle_vector(total, total, ir.VectorType(ir.IntType(32), middle)(list(lanes)))
                for lanes in (range(middle), range(middle, 2 * middle))
            ]
            total = builder.fadd(*halves)
        return builder.extract_element(total, ir.IntType(32)(0))

    return x.dtype(x), codegen
