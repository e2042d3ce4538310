"""NumPy arrays over the host memory of a launch, for backends and checks that work on arrays."""

import contextlib
import ctypes
import functools
import mmap
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from multisample.backends.contract import HostArray
from multisample.backends.element_types import MATRIX_TYPES, SIZES, ElementType
from multisample.backends.launch import INPUTS, OPERANDS, SPAN, Launch, Operation, computing_name, type_name

__all__ = ["LARGE", "address_of", "array_at", "arrays_at", "inputs_at", "quiet", "rounded", "use_huge_pages"]


quiet: Callable[[], contextlib.AbstractContextManager[Any]] = functools.partial(np.errstate, all="ignore")
"""The context of our own arithmetic with NumPy, which must not obey the caller's `numpy.seterr`.

Underflow is rounding, and overflow gives an infinity, which the checks of values find.
"""


def rounded(array: HostArray, dtype: Any) -> HostArray:
    """`array` with the type `dtype`: itself, or a rounded copy."""
    with quiet():
        return array.astype(dtype, copy=False)


LARGE = 1 << 22
"""From so many bytes on, NumPy asks for huge pages. Memory of this size often comes fresh from the system."""

_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)
_advise: Any = getattr(ctypes.CDLL(None), "madvise", None) if _HUGE is not None else None


def use_huge_pages(address: int, size: int) -> None:
    """Let Linux use huge pages for large memory: fresh memory is then written in half of the time."""
    if _advise is not None and size >= LARGE:
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        _advise(ctypes.c_void_p(start), ctypes.c_size_t(address + size - start), _HUGE)


def array_at(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> HostArray:
    """An array over memory. Strides are in bytes."""
    interface = {
        "data": (address, False), "shape": shape, "strides": strides, "typestr": np.dtype(dtype).str, "version": 3
    }  # fmt: skip
    array: HostArray = np.asarray(types.SimpleNamespace(__array_interface__=interface))
    return array


def address_of(memory: HostArray | bytes | int | None) -> int:
    """The address of `memory`, which the caller keeps alive; 0 for None, and `memory` itself if that is an address."""
    if memory is None or isinstance(memory, int):
        return memory or 0
    if isinstance(memory, bytes):
        return ctypes.c_void_p.from_buffer(ctypes.c_char_p(memory)).value or 0
    try:
        # In a quarter of the time of `ctypes.data`.
        return _address(_first_byte(memory if memory.flags.c_contiguous else memory.T))
    except (TypeError, ValueError):  # A read-only, strided or empty array.
        return memory.ctypes.data


_address = ctypes.addressof
_first_byte: Callable[[Any], ctypes.c_char] = ctypes.c_char.from_buffer


def arrays_at(launch: Launch) -> dict[str, Any]:
    """All arrays that the operation reads and writes, by field. The matrix has the shape (d, n).

    The matrix of perturb is its packed spans.
    """
    (reads, writes), name = OPERANDS[launch.operation], type_name(launch)
    arrays: dict[str, Any] = dict(inputs_at(launch))
    if launch.operation == Operation.perturb:
        arrays["matrix"] = ctypes.string_at(launch.matrix, launch.spans * SPAN.size)
    elif "matrix" in reads + writes:
        shape, strides = (launch.rows, launch.columns), (launch.row_stride, launch.column_stride)
        arrays["matrix"] = array_at(launch.matrix, shape, strides, MATRIX_TYPES[name].stored)
    for result in ("first", "second")[: launch.results]:
        arrays[result] = array_at(getattr(launch, result), (launch.rows,), (SIZES[name],), MATRIX_TYPES[name].stored)
    return arrays


def inputs_at(launch: Launch) -> dict[str, HostArray]:
    """The vectors that the operation reads, by field, in the computing type.

    The `weights` of moments have shape (n,), all others (d,).
    """
    reads = OPERANDS[launch.operation].reads
    lengths = {"weights": launch.columns} if launch.operation == Operation.moments else {}
    return {name: _vector(launch, name, lengths.get(name, launch.rows)) for name in INPUTS if name in reads}


def _vector(launch: Launch, name: str, length: int) -> HostArray:
    """Elements of the input `name`, in the computing type."""
    real, kind = np.dtype(computing_name(launch)), ElementType(getattr(launch, f"{name}_type"))
    value, matrix_type = getattr(launch, name), MATRIX_TYPES.get(kind.name)
    if kind is ElementType.number:
        array: HostArray = np.full(length, float(value))
    else:
        stored = matrix_type.stored if matrix_type else kind.name
        array = array_at(value, (length,), (getattr(launch, f"{name}_stride"),), stored)
    if matrix_type and matrix_type.widen:
        array = matrix_type.widen(array)
    return rounded(array, real)
