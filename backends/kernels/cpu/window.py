"""The signature of the kernels that draw one window, and calls of these kernels by address.

A caller links no code of the kernel, so one caller serves all element types of one size.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from multisample.backends.element_types import MATRIX_TYPES


def array(dtype: Any, ndim: int, *, readonly: bool = False) -> Any:
    """The Numba type of an array."""
    # "A": any strides. Unaligned: x86 and ARM access it as fast. Every other array converts to this type.
    return types.Array(dtype, ndim, "A", readonly=readonly, aligned=False)


TYPES = {name: (getattr(types, row.computing), getattr(types, row.stored)) for name, row in MATRIX_TYPES.items()}
"""The Numba types of mu and sigma, and of an element of the matrix."""


def window_parameters(dtype: str) -> tuple[Any, ...]:
    """The Numba types of the parameters of a `kernel.window_kernel`."""
    real, element = TYPES[dtype]
    vector = array(real, 1, readonly=True)
    return vector, vector, array(element, 2), *[types.uint64] * 2, *[types.int64] * 2, types.boolean


@intrinsic
def call_window(typingctx: Any, kernel: Any, vectors: Any, matrix: Any, words: Any, shared_noise: Any) -> Any:
    """Call a `kernel.window_kernel`, of any type, by its address.

    `vectors` are the addresses of mu and sigma, their strides, and the size of an element. `matrix` is address, rows,
    columns, both strides, and the size of an element. Strides and sizes are in bytes. `words` are seed, offset, first
    row and first column.
    """
    # The element types do not matter: a kernel gets pointers, lengths, strides and sizes.
    parameters = window_parameters("float32")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def filled(kind: Any, data: Any, shape: list[Any], strides: list[Any], size: Any) -> Any:
            made = context.make_array(kind)(context, builder)
            pointer = builder.inttoptr(data, made.data.type)
            context.populate_array(made, data=pointer, shape=shape, strides=strides, itemsize=size, meminfo=None)
            return made._getvalue()

        mu, sigma, mu_stride, sigma_stride, real = cgutils.unpack_tuple(builder, args[1])
        out, rows, columns, row_stride, column_stride, size = cgutils.unpack_tuple(builder, args[2])
        values = [
            filled(parameters[0], mu, [rows], [mu_stride], real),
            filled(parameters[1], sigma, [rows], [sigma_stride], real),
            filled(parameters[2], out, [rows, columns], [row_stride, column_stride], size),
            *cgutils.unpack_tuple(builder, args[3]),
            args[4],
        ]
        function = context.call_conv.get_function_type(types.none, parameters)
        callee = builder.inttoptr(args[0], function.as_pointer())
        context.call_conv.call_function(builder, callee, types.none, parameters, values)
        return context.get_dummy_value()

    integers = [types.UniTuple(types.int64, count) for count in (5, 6, 4)]
    return types.none(types.int64, *integers, types.boolean), codegen
