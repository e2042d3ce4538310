"""NumPy arrays over the host memory of a draw, for backends and checks that work on arrays."""

from __future__ import annotations

import ctypes

import numpy as np

from multisample.backends.contract import HostArray
from multisample.backends.draw import SIZES, Draw, ElementType, Vector, Word

__all__ = ["array_at", "arrays_at", "value_at", "vectors_at"]

# float16 and bfloat16 results are written as their bits.
_ELEMENTS = {"float16": "uint16", "bfloat16": "uint16", "float32": "float32", "float64": "float64"}


def array_at(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> HostArray:
    """An array over memory; strides in bytes."""
    element = np.dtype(dtype)
    steps = [stride * (length - 1) for stride, length in zip(strides, shape, strict=True)]
    before = -sum(step for step in steps if step < 0)
    size = before + sum(step for step in steps if step > 0) + element.itemsize
    memory = (ctypes.c_char * size).from_address(address - before)
    array: HostArray = np.ndarray(shape, element, memoryview(memory), before, strides)
    return array


def arrays_at(draw: Draw) -> tuple[HostArray, HostArray, HostArray]:
    """`mu` and `sigma` in the computing type, and the matrix, shape (d, n)."""
    shape, strides = (draw.rows, draw.columns), (draw.row_stride, draw.column_stride)
    return *vectors_at(draw), array_at(draw.matrix, shape, strides, _ELEMENTS[ElementType(draw.type).name])


def vectors_at(draw: Draw) -> tuple[HostArray, HostArray]:
    """`mu` and `sigma` in the computing type, shape (d,)."""
    real = np.float64 if draw.type == ElementType.float64 else np.float32
    with np.errstate(over="ignore"):
        mu, sigma = (_vector(vector, draw.rows).astype(real, copy=False) for vector in (draw.mu, draw.sigma))
    return mu, sigma


def _vector(vector: Vector, d: int) -> HostArray:
    if vector.type == ElementType.number:
        return np.full(d, vector.number)
    dtype = ElementType(vector.type).name
    array = array_at(vector.data, (d,), (vector.stride,), "uint16" if SIZES.get(dtype) == 2 else dtype)
    if dtype == "float16":
        return array.view(np.float16)
    return (array.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else array


def value_at(word: Word) -> int:
    """The number of a word by value or in host memory."""
    return ctypes.c_uint64.from_address(word.at).value if word.at else word.value
