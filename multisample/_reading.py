"""How a plan reads `mu` and `sigma`: as an address, a number, or a NumPy array of the computing type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._arguments import describe
from ._checks.operands import Inputs, check_alignment, extent, item_size
from ._checks.values import check_values, least_and_most, number_vector, vector_converter
from ._libraries import Library, check_memory
from ._libraries.numpy import cached_dtype

__all__ = ["Reader"]


class Reader:
    """Reads `mu` or `sigma` for the calls of one plan; immutable.

    Attributes
    ----------
    is_array : bool
        Whether the argument is an array rather than a number.
    is_plain : bool
        Whether the launcher takes the argument without conversion: its address, or the array itself.
    makes_arrays : bool
        Whether `read` returns arrays.
    extent : tuple of int
        Begin and end of the argument's bytes, relative to the address of its first element.
    mask : int
        The bits that are 0 in an aligned address.
    """

    __slots__ = ("_name", "_operand", "extent", "is_array", "is_plain", "makes_arrays", "mask", "read")

    def __init__(self, name: str, x: Any, inputs: Inputs, library: Library, makes_arrays: bool) -> None:
        self._name, self.makes_arrays = name, makes_arrays
        self._operand = operand = inputs.operands.get(name)
        self.is_array, self.extent, self.mask = operand is not None, (0, 0), 0
        self.is_plain = operand is not None and operand.read is None
        real = cached_dtype("float64" if inputs.dtype == "float64" else "float32")
        if operand is None:
            read_number = _number_reader(name, inputs.dtype, library)
            d = inputs.d
            self.read: Callable[[Any], tuple[Any, Any]] = (
                (lambda x: (None, number_vector(read_number(x), d, real))) if makes_arrays
                else (lambda x: (None, read_number(x)))
            )  # fmt: skip
            return
        self.extent, self.mask = extent(operand), item_size(operand.dtype) - 1
        readable = operand.read or _itself
        if makes_arrays:
            convert, host_array = vector_converter(operand, inputs.d, real), library.host_array
            self.is_plain = self.is_plain and convert is None and library.name == "numpy"
            convert = convert or _itself
            self.read = lambda x: (x, convert(host_array(readable(x))))
        else:
            address = library.address
            has_elements = 0 not in operand.shape
            self.read = lambda x: _with_address(readable(x), address, has_elements)

    def check(self, at: Any) -> None:
        """ValueError if the argument is an array and its address `at` is misaligned."""
        if self._operand is not None and at & self.mask:
            check_alignment(self._name, self._operand, at)


def _itself(x: Any) -> Any:
    return x


def _with_address(array: Any, address: Callable[[Any], int], has_elements: bool) -> tuple[Any, int]:
    at = address(array)
    if has_elements:
        check_memory(at)
    return array, at


def _number_reader(name: str, dtype: str, library: Library) -> Callable[[Any], float]:
    least, most = least_and_most(name, dtype)

    def read(x: Any) -> float:
        try:
            number = float(x)
        except OverflowError:
            raise ValueError(f"{name}: expected a finite number, got {describe(x)}") from None
        if not least <= number <= most:
            check_values(library, {name: x}, dtype)
        return number

    return read
