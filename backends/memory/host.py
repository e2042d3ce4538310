"""NumPy arrays over the host memory of a launch, for backends and checks that work on arrays."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from multisample.backends.contract import HostArray
from multisample.backends.element_types import MATRIX_TYPES, SIZES, ElementType
from multisample.backends.launch import (
    INPUTS,
    OFFSETS_BYTES,
    OPERANDS,
    SEED_BYTES,
    Batched,
    Launch,
    batch_steps,
    computing_name,
    type_name,
)

__all__ = ["advise_huge_pages", "array_at", "arrays_at", "batch_at", "inputs_at", "words_at"]


def array_at(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> HostArray:
    """An array over memory. Strides are in bytes."""
    element = np.dtype(dtype)
    steps = [stride * (length - 1) for stride, length in zip(strides, shape, strict=True)]
    before = -sum(step for step in steps if step < 0)
    size = before + sum(step for step in steps if step > 0) + element.itemsize
    memory = (ctypes.c_char * size).from_address(address - before)
    array: HostArray = np.ndarray(shape, element, memoryview(memory), before, strides)
    return array


def arrays_at(launch: Launch) -> dict[str, HostArray]:
    """All that the operation reads and writes, by field: `inputs_at`, the matrix, shape (d, n), and the results."""
    (reads, writes), name = OPERANDS[launch.operation], type_name(launch)
    arrays = inputs_at(launch)
    if "matrix" in reads + writes:
        shape, strides = (launch.rows, launch.columns), (launch.row_stride, launch.column_stride)
        arrays["matrix"] = array_at(launch.matrix, shape, strides, MATRIX_TYPES[name].stored)
    for result in ("first", "second")[: launch.results]:
        arrays[result] = array_at(getattr(launch, result), (launch.rows,), (SIZES[name],), MATRIX_TYPES[name].stored)
    return arrays


def inputs_at(launch: Launch) -> dict[str, HostArray]:
    """The vectors that the operation reads, by field, in the computing type.

    `weights` has shape (n,), the others (d,).
    """
    reads = OPERANDS[launch.operation].reads
    return {
        name: _vector(launch, name, launch.columns if name == "weights" else launch.rows)
        for name in INPUTS
        if name in reads
    }


def batch_at(launch: Launch) -> tuple[HostArray, HostArray, HostArray, HostArray, HostArray]:
    """`mu`, `sigma`, the matrices, shape (b, d, n), the seeds and the offsets of a batch.

    The others have one row for each matrix, or one that all share: shapes (b, d), (b, d), (b,) and (b, 3).
    """
    counts = [launch.batch if launch.batched & flag else 1 for flag in Batched]
    # The vectors of a batch are one vector in memory.
    mu, sigma = (
        _vector(launch, name, count * launch.rows).reshape(-1, launch.rows)
        for name, count in zip(("mu", "sigma"), counts[:2], strict=True)
    )
    shape, strides = (launch.rows, launch.columns), (launch.row_stride, launch.column_stride)
    step, stored = batch_steps(launch)["matrix"], MATRIX_TYPES[type_name(launch)].stored
    matrices = array_at(launch.matrix, (launch.batch, *shape), (step, *strides), stored)
    seeds = array_at(launch.seed_at, (counts[2],), (SEED_BYTES,), "uint64")
    offsets = np.array([[launch.offset, launch.first_row, launch.first_column]], np.uint64)
    if launch.offset_at:
        offsets = array_at(launch.offset_at, (counts[3], 3), (OFFSETS_BYTES, 8), "uint64")
    return mu, sigma, matrices, seeds << 32 | seeds >> 32, offsets


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
    with np.errstate(over="ignore"):
        return array.astype(real, copy=False)


def words_at(launch: Launch) -> tuple[int, int, int, int]:
    """Seed, offset, first row and first column of a launch, by value or from host memory."""
    seed, offset, first_row, first_column = (
        ctypes.c_uint64.from_address(at).value if at else value
        for value, at in (
            (launch.seed, launch.seed_at), (launch.offset, launch.offset_at),
            (launch.first_row, launch.first_row_at), (launch.first_column, launch.first_column_at),
        )
    )  # fmt: skip
    if launch.seed_at:  # Its high half is first.
        seed = (seed << 32 | seed >> 32) & 0xFFFF_FFFF_FFFF_FFFF
    return seed, offset, first_row, first_column


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
