"""The element types, listed once in Python; ``csrc/element_types.h`` has the same rows.

``backends/README.md`` lists what a new type needs.
"""

import enum
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt


class ElementType(enum.IntEnum):
    """Element types by NumPy's names. `number` is one number in place of a vector."""

    number = 0
    float16 = 1
    bfloat16 = 2
    float32 = 3
    float64 = 4
    int8 = 5
    int16 = 6
    int32 = 7
    int64 = 8
    uint8 = 9
    uint16 = 10
    uint32 = 11
    uint64 = 12


class MatrixType(NamedTuple):
    """An element type of a matrix."""

    size: int
    """In bytes."""
    computing: str
    """The type of the arithmetic."""
    stored: str
    """NumPy's name of the type in memory. Types that NumPy or Numba lack are stored as their bits."""
    cpp: str
    dlpack: int
    """DLPack's type code."""
    widen: Callable[[npt.NDArray[Any]], npt.NDArray[Any]] | None = None
    """Converts an array of bits to an array of numbers, for types that are stored as bits."""


def _widened_bfloat16(bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    # NumPy 1 promotes a shift of a scalar to 64 bits.
    shifted: npt.NDArray[np.uint32] = np.left_shift(bits, 16, dtype=np.uint32)
    return shifted.view(np.float32)


DTypeName: TypeAlias = Literal["float16", "bfloat16", "float32", "float64"]
"""The names of `MATRIX_TYPES`, for type checkers."""

MATRIX_TYPES = {
    "float16": MatrixType(2, "float32", "uint16", "multisample::float16", 2, lambda bits: bits.view(np.float16)),
    "bfloat16": MatrixType(2, "float32", "uint16", "multisample::bfloat16", 4, _widened_bfloat16),
    "float32": MatrixType(4, "float32", "float32", "float", 2),
    "float64": MatrixType(8, "float64", "float64", "double", 2),
}

SIZES = {name: row.size for name, row in MATRIX_TYPES.items()}
"""Bytes of an element of a matrix, by the name of its type."""
