"""Memory, functions and symbols by address, for compiled code that C calls and that calls C."""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from multisample.backends.element_types import MATRIX_TYPES
from multisample.backends.kernels.compilation import callee, compile_cached, inline
from multisample.backends.kernels.stream.rounding import WIDENING

from .intrinsics import emit_array, emit_default_floats, emit_restore_floats

_WORD = ir.IntType(64)


@intrinsic
def numbers_at(typingctx: Any, address: Any, length: Any, dtype: Any, stride: Any = None) -> Any:
    """The `length` numbers of type `dtype` at an address, which may be unaligned, as an array; `stride` is in bytes."""
    result = types.Array(dtype.dtype, 1, "A" if stride else "C", aligned=False)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = builder.inttoptr(args[0], context.get_data_type(dtype.dtype).as_pointer())
        return emit_array(context, builder, result, data, args[1], args[3] if stride else None)

    return result(types.int64, types.int64, dtype, types.int64 if stride else types.none), codegen


@inline
def word_at(address):
    """The int64 at an address, which need not be aligned."""
    return numbers_at(address, 1, np.int64)[0]


@intrinsic
def call_c(typingctx: Any, function: Any, *arguments: Any) -> Any:
    """Call the C function at address `function`, which takes values of type int64 and returns one."""
    words = types.StarArgTuple.from_types((types.int64,) * len(arguments))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        c_type = ir.FunctionType(_WORD, [_WORD] * len(words))
        return builder.call(builder.inttoptr(args[0], c_type.as_pointer()), cgutils.unpack_tuple(builder, args[1]))

    return types.int64(types.int64, words), codegen


@intrinsic
def c_function(typingctx: Any, function: Any, arguments: Any = None) -> Any:
    """The address of a C function that calls the compiled ``function(word)``, which returns a word and must not raise.

    With `arguments`, a tuple, the C function takes the address of such a tuple, as by `stack_copy`, and an index. It
    calls ``function(tuple, index)``. It returns 0 if the compiled function returns nothing.

    The C function needs no interpreter, and computes with the settings of `intrinsics.default_floats`. It lives as long
    as the compiled function that contains this call.
    """
    parameters = (types.int64,) if arguments is None else (arguments, types.int64)
    function.dispatcher.compile(parameters)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        compiled = function.dispatcher.overloads[parameters]
        context.active_code_library.add_linking_library(compiled.library)
        callee = context.declare_function(builder.module, compiled.fndesc)
        kind = ir.FunctionType(_WORD, [_WORD] * len(parameters))
        entry = ir.Function(builder.module, kind, builder.module.get_unique_name("entry"))
        entry.linkage = "internal"
        body = ir.IRBuilder(entry.append_basic_block())
        before = emit_default_floats(body)
        first, *rest = entry.args
        if arguments is not None:
            first = body.load(body.inttoptr(first, context.get_value_type(arguments).as_pointer()))
        returned = compiled.signature.return_type
        _, result = context.call_conv.call_function(body, callee, returned, parameters, [first, *rest])
        emit_restore_floats(body, before)
        body.ret(result if returned == types.int64 else _WORD(0))
        return builder.ptrtoint(entry, _WORD)

    return types.int64(function, types.none if arguments is None else arguments), codegen


@intrinsic(prefer_literal=True)
def symbol(typingctx: Any, name: Any) -> Any:
    """The address of a literal `name` that `llvmlite.binding.add_symbol` defined in this process.

    Code that refers to memory by name is the same in every process, and so can be cached on disk.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        known = builder.module.globals.get(name.literal_value)
        memory = known or cgutils.add_global_variable(builder.module, _WORD, name.literal_value)
        return builder.ptrtoint(memory, _WORD)

    return types.int64(name), codegen


@intrinsic(prefer_literal=True)
def c_string(typingctx: Any, text: Any) -> Any:
    """The address of a literal text, with a null character at its end."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(context.insert_const_string(builder.module, text.literal_value), _WORD)

    return types.int64(text), codegen


def copier(dtype: str) -> Callable[..., Any]:
    """``copy(x, source, stride, count)`` copies elements, `stride` bytes apart, to `x`, as numbers."""
    row = MATRIX_TYPES[dtype]
    element, size, widen = getattr(np, row.stored), row.size, WIDENING[dtype]

    @inline
    def copy(x, source, stride, count):
        if stride == size:
            run = numbers_at(source, count, element)
            for c in range(np.uint64(count)):
                x[c] = widen(run[c])
        else:
            for c in range(count):
                x[c] = widen(numbers_at(source + c * stride, 1, element)[0])

    return copy


def c_address(function: Callable[..., Any], name: str, digest: str) -> int:
    """The address of a C function that calls ``function(word)``: see `c_function`, and `compile_cached` for the names.

    The code is never freed.
    """
    compiled = callee(function, name)
    find = compile_cached(types.int64(), lambda: c_function(compiled), f"{name}-address", digest).entry_point
    _never_freed.append(find)
    address: int = find()
    return address


_never_freed: list[Any] = []
