"""Memory, functions and symbols by address, for compiled code that C calls and that calls C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from multisample.backends.kernels.compilation import cached, compile_cached

from .intrinsics import emit_array, emit_default_floats, emit_restore_floats
from .kernel import window_parameters

_WORD = ir.IntType(64)
_C_FUNCTION = ir.FunctionType(_WORD, [_WORD])


@intrinsic
def word_at(typingctx: Any, address: Any) -> Any:
    """The int64 at an address, which need not be aligned."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], _WORD.as_pointer()), align=1)

    return types.int64(types.int64), codegen


@intrinsic
def byte_at(typingctx: Any, address: Any) -> Any:
    """The byte at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], ir.IntType(8).as_pointer()))

    return types.uint8(types.int64), codegen


@intrinsic
def numbers_at(typingctx: Any, address: Any, length: Any, dtype: Any) -> Any:
    """The `length` numbers of type `dtype` at an address as an array."""
    result = types.Array(dtype.dtype, 1, "C")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = builder.inttoptr(args[0], context.get_data_type(dtype.dtype).as_pointer())
        return emit_array(context, builder, result, data, args[1])

    return result(types.int64, types.int64, dtype), codegen


@intrinsic
def call_c(typingctx: Any, function: Any, argument: Any) -> Any:
    """Call the C function at address `function`, which takes an int64 and returns one."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.call(builder.inttoptr(args[0], _C_FUNCTION.as_pointer()), args[1:])

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def c_function(typingctx: Any, function: Any) -> Any:
    """The address of a C function that calls the compiled ``function(word)``, which returns a word and must not raise.

    The C function needs no interpreter, and computes with the settings of `intrinsics.default_floats`. It lives as long
    as the compiled function that contains this call.
    """
    parameters = (types.int64,)
    function.dispatcher.compile(parameters)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        compiled = function.dispatcher.overloads[parameters]
        context.active_code_library.add_linking_library(compiled.library)
        callee = context.declare_function(builder.module, compiled.fndesc)
        made = ir.Function(builder.module, _C_FUNCTION, builder.module.get_unique_name("c_function"))
        made.linkage = "internal"
        body = ir.IRBuilder(made.append_basic_block())
        before = emit_default_floats(body)
        _, result = context.call_conv.call_function(body, callee, types.int64, parameters, made.args)
        emit_restore_floats(body, before)
        body.ret(result)
        return builder.ptrtoint(made, _WORD)

    return types.int64(function), codegen


@intrinsic(prefer_literal=True)
def symbol(typingctx: Any, name: Any) -> Any:
    """The address of a literal `name` that `llvmlite.binding.add_symbol` defined in this process.

    Code that refers to memory by name is the same in every process, and so can be cached on disk.
    """
    if not isinstance(name, types.StringLiteral):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        known = builder.module.globals.get(name.literal_value)
        memory = known or cgutils.add_global_variable(builder.module, _WORD, name.literal_value)
        return builder.ptrtoint(memory, _WORD)

    return types.int64(name), codegen


@intrinsic(prefer_literal=True)
def c_string(typingctx: Any, text: Any) -> Any:
    """The address of a literal text, with a null character at its end."""
    if not isinstance(text, types.StringLiteral):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(context.insert_const_string(builder.module, text.literal_value), _WORD)

    return types.int64(text), codegen


@intrinsic
def call_window(typingctx: Any, kernel: Any, vectors: Any, matrix: Any, words: Any, shared_noise: Any) -> Any:
    """Call a `kernel.window_kernel`, of any type, by its address.

    Parameters
    ----------
    vectors : tuple of int
        Addresses of mu and sigma, their strides in bytes, and bytes of one element.
    matrix : tuple of int
        Address, rows, columns, strides of rows and of columns in bytes, and bytes of an element.
    words : tuple of int
        Seed, offset, first row and first column.
    """
    # The element types do not matter: a kernel gets pointers, lengths, strides and sizes.
    parameters = window_parameters("float32")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def array(kind: Any, data: Any, shape: list[Any], strides: list[Any], size: Any) -> Any:
            made = context.make_array(kind)(context, builder)
            pointer = builder.inttoptr(data, made.data.type)
            context.populate_array(made, data=pointer, shape=shape, strides=strides, itemsize=size, meminfo=None)
            return made._getvalue()

        mu, sigma, mu_stride, sigma_stride, real = cgutils.unpack_tuple(builder, args[1])
        out, rows, columns, row_stride, column_stride, size = cgutils.unpack_tuple(builder, args[2])
        values = [
            array(parameters[0], mu, [rows], [mu_stride], real),
            array(parameters[1], sigma, [rows], [sigma_stride], real),
            array(parameters[2], out, [rows, columns], [row_stride, column_stride], size),
            *cgutils.unpack_tuple(builder, args[3]),
            args[4],
        ]
        function = context.call_conv.get_function_type(types.none, parameters)
        callee = builder.inttoptr(args[0], function.as_pointer())
        context.call_conv.call_function(builder, callee, types.none, parameters, values)
        return context.get_dummy_value()

    integers = [types.UniTuple(types.int64, count) for count in (5, 6, 4)]
    return types.none(types.int64, *integers, types.boolean), codegen


def c_address(function: Callable[..., Any], name: str, digest: str) -> int:
    """The address of a C function that calls ``function(word)``: see `c_function`, and `compile_cached` for the names.

    The code is never freed.
    """
    compiled = cached(function, name, digest)
    find = compile_cached(types.int64(), lambda: c_function(compiled), f"{name}-address", digest)
    _never_freed.append((compiled, find))
    address: int = find()
    return address


_never_freed: list[Any] = []
