"""NumPy arrays over the host memory of a draw, for backends and checks that work on arrays."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from multisample.backends.contract import HostArray
from multisample.backends.draw import OFFSETS_BYTES, SEED_BYTES, Batched, Draw, Vector, Word, batch_steps
from multisample.backends.element_types import MATRIX_TYPES, ElementType

__all__ = ["advise_huge_pages", "array_at", "arrays_at", "batch_at", "quiet", "rounded", "vectors_at", "words_at"]


quiet: Callable[[], contextlib.AbstractContextManager[Any]] = functools.partial(np.errstate, all="ignore")
"""The context of our own arithmetic with NumPy, which must not obey the caller's `numpy.seterr`.

Underflow is rounding, and overflow gives an infinity, which the checks of values find.
"""


def rounded(array: HostArray, dtype: Any) -> HostArray:
    """`array` with the type `dtype`: itself, or a rounded copy."""
    with quiet():
        return array.astype(dtype, copy=False)


def array_at(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> HostArray:
    """An array over memory. Strides are in bytes."""
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
    return *vectors_at(draw), array_at(draw.matrix, shape, strides, MATRIX_TYPES[ElementType(draw.type).name].stored)


def vectors_at(draw: Draw) -> tuple[HostArray, HostArray]:
    """`mu` and `sigma` in the computing type, shape (d,)."""
    real = np.dtype(MATRIX_TYPES[ElementType(draw.type).name].computing)
    mu, sigma = (rounded(_vector(vector, draw.rows), real) for vector in (draw.mu, draw.sigma))
    return mu, sigma


def batch_at(draw: Draw) -> tuple[HostArray, HostArray, HostArray, HostArray, HostArray]:
    """`mu`, `sigma`, the matrices, shape (b, d, n), the seeds and the offsets of a batch.

    The others have one row for each matrix, or one that all share: shapes (b, d), (b, d), (b,) and (b, 3).
    """
    counts = [draw.batch if draw.batched & flag else 1 for flag in Batched]
    row = MATRIX_TYPES[ElementType(draw.type).name]
    # The vectors of a batch are one vector in memory.
    mu, sigma = (
        rounded(_vector(vector, count * draw.rows), row.computing).reshape(-1, draw.rows)
        for vector, count in zip((draw.mu, draw.sigma), counts[:2], strict=True)
    )
    shape, strides = (draw.rows, draw.columns), (draw.row_stride, draw.column_stride)
    matrices = array_at(draw.matrix, (draw.batch, *shape), (batch_steps(draw)[2], *strides), row.stored)
    seeds = array_at(draw.seed.at, (counts[2],), (SEED_BYTES,), "uint64")
    offsets = np.array([[word.value for word in draw[8:11]]], np.uint64)
    if draw.offset.at:
        offsets = array_at(draw.offset.at, (counts[3], 3), (OFFSETS_BYTES, 8), "uint64")
    return mu, sigma, matrices, seeds << 32 | seeds >> 32, offsets


def _vector(vector: Vector, d: int) -> HostArray:
    if vector.type == ElementType.number:
        return np.full(d, vector.number)
    dtype = ElementType(vector.type).name
    matrix_type = MATRIX_TYPES.get(dtype)
    array = array_at(vector.data, (d,), (vector.stride,), matrix_type.stored if matrix_type else dtype)
    return matrix_type.widen(array) if matrix_type and matrix_type.widen else array


def words_at(draw: Draw) -> tuple[int, int, int, int]:
    """Seed, offset, first row and first column of a draw, by value or from host memory."""
    seed, offset, first_row, first_column = map(_value_at, draw[7:11])
    if draw.seed.at:  # Its high half is first.
        seed = (seed << 32 | seed >> 32) & 0xFFFF_FFFF_FFFF_FFFF
    return seed, offset, first_row, first_column


def _value_at(word: Word) -> int:
    return ctypes.c_uint64.from_address(word.at).value if word.at else word.value


def advise_huge_pages(address: int, size: int) -> None:
    """Let Linux back memory that is about to be written by huge pages, as NumPy does for its own arrays.

    Fresh memory of 40 MB is then written in half of the time.
    """
    advise = _advise()
    if advise is not None:
        advise(address, size)


@functools.cache
def _advise() -> Callable[[int, int], Any] | None:
    import mmap  # Which only large results of JAX's need.

    function = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None
    if function is None:
        return None
    function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    page, huge = mmap.PAGESIZE, mmap.MADV_HUGEPAGE

    def advise(address: int, size: int) -> None:
        start = -(-address // page) * page
        function(start, max(0, (address + size - start) // page * page), huge)

    return advise
