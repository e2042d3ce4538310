"""CPU intrinsics that Numba lacks: arrays at addresses, vectors, prefetches, the stack, atomics, rounding modes."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic

from multisample.backends.kernels.stream.vectors import Vector


def _address(context: Any, builder: Any, array: Any, args: Any, element: Any = None) -> Any:
    """A pointer, to type `element`, to element ``args[1]`` of ``args[0]``, an array of unit stride."""
    address = builder.gep(context.make_array(array)(context, builder, args[0]).data, [args[1]])
    return builder.bitcast(address, element.as_pointer()) if element else address


@intrinsic
def fetch_add(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """Add `value` to an element of `array` in one atomic step, and return the previous value.

    `array` has unit stride. A thread that sees the sum also sees what this thread wrote before.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _address(context, builder, array, args), args[2], "acq_rel")

    return array.dtype(array, types.intp, array.dtype), codegen


@intrinsic
def compare_exchange(typingctx: Any, array: Any, index: Any, expected: Any, value: Any) -> Any:
    """Replace an element of `array` by `value` if it is `expected`, in one atomic step; return whether it did.

    `array` has unit stride. Orders memory as `fetch_add` does.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        result = builder.cmpxchg(_address(context, builder, array, args), args[2], args[3], "acq_rel", "acquire")
        return builder.extract_value(result, 1)

    return types.boolean(array, types.intp, array.dtype, array.dtype), codegen


@intrinsic
def load_acquire(typingctx: Any, array: Any, index: Any) -> Any:
    """An element of `array` that other threads change by atomic operations. `array` has unit stride."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        size = context.get_abi_sizeof(context.get_data_type(array.dtype))
        return builder.load_atomic(_address(context, builder, array, args), "acquire", size)

    return array.dtype(array, types.intp), codegen


@intrinsic
def run_from(typingctx: Any, matrix: Any, row: Any, column: Any, instead: Any) -> Any:
    """A contiguous view of `matrix` from an element on, with the type and the length of the array `instead`.

    The caller guarantees that the elements are contiguous. Returns `instead` if `matrix` has no such column.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = context.make_array(matrix)(context, builder, args[0])
        array = context.make_array(instead)(context, builder, args[3])
        strides = cgutils.unpack_tuple(builder, source.strides)
        columns = cgutils.unpack_tuple(builder, source.shape)[1]
        offset = builder.add(builder.mul(args[1], strides[0]), builder.mul(args[2], strides[1]))
        there = builder.icmp_unsigned("<", args[2], columns)
        array.data = builder.select(there, cgutils.pointer_add(builder, source.data, offset), array.data)
        return impl_ret_borrowed(context, builder, instead, array._getvalue())

    return instead(matrix, types.intp, types.intp, instead), codegen


@intrinsic(prefer_literal=True)
def prefetch(typingctx: Any, array: Any, index: Any, length: Any) -> Any:
    """Prefetch ``array[index : index + length]`` for writing. The elements may lie outside the array.

    `length` is a literal, and the array has unit stride.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        address = _address(context, builder, array, args, ir.IntType(8))
        function_type = ir.FunctionType(ir.VoidType(), [address.type, word, word, word])
        function = builder.module.declare_intrinsic("llvm.prefetch", (address.type,), function_type)
        for line in range(0, length.literal_value * context.get_abi_sizeof(context.get_data_type(array.dtype)), 64):
            # Write access, highest locality, data cache.
            builder.call(function, (cgutils.pointer_add(builder, address, line), word(1), word(3), word(1)))
        return context.get_dummy_value()

    return types.none(array, types.intp, length), codegen


_WORD = ir.IntType(64)
# Bits of the control register that flush subnormal numbers to zero, or round other than to nearest.
_X86_FLAGS = 0x8000 | 0x6000 | 0x0040
_ARM_FLAGS = 1 << 24 | 3 << 22 | 1 << 19


def _floats(builder: Any) -> tuple[Any, Any, Callable[[Any], object]]:
    """The thread's floating-point settings, the flags to clear, and a function that emits a change of the settings.

    On other processors than x86 and ARM, both numbers are 0, and the function does nothing.
    """
    word, module, triple = ir.IntType(32), builder.module, str(builder.module.triple)
    if triple.startswith(("x86", "i386", "i686")):
        memory = cgutils.alloca_once(builder, word)
        address = builder.bitcast(memory, ir.IntType(8).as_pointer())
        function_type = ir.FunctionType(ir.VoidType(), [address.type])
        builder.call(cgutils.get_or_insert_function(module, function_type, "llvm.x86.sse.stmxcsr"), [address])

        def load(value: Any) -> None:
            builder.store(builder.trunc(value, word), memory)
            builder.call(cgutils.get_or_insert_function(module, function_type, "llvm.x86.sse.ldmxcsr"), [address])

        return builder.zext(builder.load(memory), _WORD), _WORD(_X86_FLAGS), load
    if triple.startswith(("aarch64", "arm64")):
        get, put = ir.FunctionType(_WORD, []), ir.FunctionType(ir.VoidType(), [_WORD])
        settings = builder.call(cgutils.get_or_insert_function(module, get, "llvm.aarch64.get.fpcr"), [])
        setter = cgutils.get_or_insert_function(module, put, "llvm.aarch64.set.fpcr")
        return settings, _WORD(_ARM_FLAGS), lambda value: builder.call(setter, [value])
    return _WORD(0), _WORD(0), lambda value: None


def emit_default_floats(builder: Any) -> Any:
    """The code of `default_floats`."""
    settings, flags, load = _floats(builder)
    with builder.if_then(builder.icmp_unsigned("!=", builder.and_(settings, flags), _WORD(0)), likely=False):
        load(builder.and_(settings, builder.not_(flags)))
    return settings


def emit_restore_floats(builder: Any, before: Any) -> None:
    """The code of `restore_floats`."""
    # With a condition, LLVM would duplicate a whole kernel for both cases.
    _floats(builder)[2](before)


@intrinsic
def default_floats(typingctx: Any) -> Any:
    """Set IEEE 754's rounding to nearest and subnormal numbers on this thread. Return the settings before.

    XLA flushes subnormal numbers on its threads, and `torch.set_flush_denormal` on the calling one.
    """
    return types.uint64(), lambda context, builder, signature, args: emit_default_floats(builder)


@intrinsic
def has_default_floats(typingctx: Any) -> Any:
    """Whether this thread has the settings of `default_floats`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        settings, flags, _ = _floats(builder)
        return builder.icmp_unsigned("==", builder.and_(settings, flags), _WORD(0))

    return types.boolean(), codegen


@intrinsic
def restore_floats(typingctx: Any, before: Any) -> Any:
    """Set what `default_floats` has returned."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_restore_floats(builder, args[0])
        return context.get_dummy_value()

    return types.none(types.uint64), codegen


def emit_array(context: Any, builder: Any, result: Any, data: Any, length: Any, stride: Any = None) -> Any:
    """An array over memory that it does not own, of unit stride unless `stride` is given."""
    itemsize = context.get_constant(types.intp, context.get_abi_sizeof(data.type.pointee))
    array = context.make_array(result)(context, builder)
    strides = [itemsize if stride is None else stride]
    context.populate_array(array, data=data, shape=[length], strides=strides, itemsize=itemsize, meminfo=None)
    return array._getvalue()


@intrinsic(prefer_literal=True)
def stack_array(typingctx: Any, length: Any, dtype: Any) -> Any:
    """An uninitialised array of a literal `length` on the stack, valid until the function returns."""
    result = types.Array(dtype.dtype, 1, "C")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = context.get_data_type(dtype.dtype)
        with builder.goto_entry_block():
            memory = builder.alloca(ir.ArrayType(element, length.literal_value))
            memory.align = 64
        length_value = context.get_constant(types.intp, length.literal_value)
        return emit_array(context, builder, result, builder.bitcast(memory, element.as_pointer()), length_value)

    return result(length, dtype), codegen


@intrinsic
def stack_copy(typingctx: Any, value: Any) -> Any:
    """The address of a copy of `value` on the stack, valid until the function returns."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        memory = cgutils.alloca_once_value(builder, args[0])
        return builder.ptrtoint(memory, context.get_value_type(types.intp))

    return types.intp(value), codegen


@intrinsic(prefer_literal=True)
def load_vector(typingctx: Any, array: Any, index: Any, lanes: Any, count: Any = None) -> Any:
    """``array[index : index + lanes]`` as a vector, or with `count` a tuple of so many adjacent vectors.

    `array` has unit stride. `lanes` and `count` are literals.
    """
    vector = Vector(array.dtype, lanes.literal_value)
    result = types.UniTuple(vector, count.literal_value) if count else vector

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = _address(context, builder, array, args, context.get_value_type(vector))
        if count is None:
            return builder.load(first, align=1)
        places = [builder.gep(first, [_WORD(k)]) for k in range(result.count)]
        return context.make_tuple(builder, result, [builder.load(place, align=1) for place in places])

    return result(array, types.intp, lanes, count or types.none), codegen


@intrinsic
def store_vector(typingctx: Any, array: Any, index: Any, vectors: Any) -> Any:
    """Store a vector, or a tuple of them one after another, from ``array[index]`` on.

    `array` has unit stride, and elements of any type.
    """
    is_one = isinstance(vectors, Vector)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = context.get_value_type(vectors if is_one else vectors.dtype)
        first = _address(context, builder, array, args, kind)
        for k, vector in enumerate([args[2]] if is_one else cgutils.unpack_tuple(builder, args[2])):
            builder.store(vector, builder.gep(first, [_WORD(k)]), align=1)
        return context.get_dummy_value()

    return types.none(array, types.intp, vectors), codegen
