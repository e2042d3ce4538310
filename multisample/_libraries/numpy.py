"""NumPy arrays, and objects that NumPy can convert: lists, NumPy scalars, objects with ``__array__``."""

import ctypes
import functools
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from multisample.backends.memory.dlpack import numpy_dtype

from .._arguments import describe
from .library import CPU, Device, Library, Operand, Shape, counted_as, name_of

cached_dtype = functools.cache(numpy_dtype)


class ListArray(np.ndarray):
    """An array made from a list. Its elements count as float32."""


def _check_mask(name: str, array: Any) -> None:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name}: expected an array without a mask, got a masked array; fill it first")


def check_plain(name: str, array: Any) -> None:
    """TypeError for a masked array of NumPy, ValueError for swapped bytes."""
    _check_mask(name, array)
    if not getattr(getattr(array, "dtype", None), "isnative", True):
        raise ValueError(f"{name}: expected native byte order, got swapped bytes")


class NumpyLibrary(Library):
    name = "numpy"
    types = (np.ndarray, ListArray)

    def signature(self, array: Any) -> Hashable:
        return array.dtype, array.shape, array.strides

    def target_signature(self, out: Any) -> Hashable:
        kind = type(out)
        if kind is not np.ndarray:
            out = np.asarray(out)
        return kind, out.dtype, out.shape, out.strides, out.flags.writeable

    # Attributes of a subclass, such as `T` and `flags`, may differ from those of its memory.
    host_array = to_host = staticmethod(np.asarray)

    def address(self, array: Any) -> int:
        try:
            return _address_of(_element_in(array))  # In half the time of `ctypes.data`.
        except (BufferError, TypeError, ValueError):  # Read-only, not contiguous, or empty.
            return int(np.asarray(array).ctypes.data)

    def share_memory(self, a: Any, b: Any) -> bool:
        if type(a) is not np.ndarray:
            a = np.asarray(a)
        if a.flags.owndata and b.flags.owndata:  # Different arrays that own their memory share none.
            return a is b
        return np.may_share_memory(a, b) and np.shares_memory(a, b)

    def normalized(self, name: str, array: Any) -> Any:
        if type(array) in self.types:
            return array
        _check_mask(name, array)
        try:
            # Convert subclasses, whose indexing may differ: np.matrix stays two-dimensional.
            converted = np.asarray(array)
        except MemoryError:
            raise
        except Exception as error:  # ``__array__`` of a foreign class may raise anything.
            raise TypeError(f"{name}: expected numbers, got {describe(array)} ({error})") from None
        return converted.view(ListArray) if isinstance(array, (list, tuple)) else converted

    def describe(self, name: str, array: Any) -> Operand:
        dtype = name_of(array.dtype)
        counts_as = counted_as(name, dtype, array.dtype)
        swapped = not array.dtype.isnative
        if name.startswith("out"):
            check_plain(name, array)
            if not array.flags.writeable:
                raise ValueError(f"{name}: expected a writable array, got a read-only one")
        if type(array) is ListArray:
            counts_as = "float32"
        if not swapped:
            return Operand(array.shape, array.strides, dtype, counts_as, CPU)
        native = array.dtype.newbyteorder("=")
        return Operand(array.shape, array.astype(native).strides, dtype, counts_as, CPU, lambda x: x.astype(native))

    def flattener(self, aligned: Shape, shape: Shape, flat: Shape) -> Callable[[Any], Any]:
        return lambda x: np.ascontiguousarray(np.broadcast_to(x.reshape(aligned), shape)).reshape(flat)

    def device(self, name: str, array: Any) -> Device:
        return CPU

    def check_target(self, out: Any) -> None:
        _check_mask("out", out)
        if not issubclass(type(out), np.ndarray):  # `isinstance` trusts an attribute ``__class__``.
            raise TypeError(f"out: expected a NumPy array, got {describe(out)} of type {type(out).__name__}")

    def allocator(self, shape: Shape, dtype: str, device: Device) -> Callable[[Any], Any]:
        element, empty = cached_dtype(dtype), np.empty
        return lambda like: empty(shape, element)


_address_of, _element_in = ctypes.addressof, ctypes.c_char.from_buffer

HOST = NumpyLibrary()
