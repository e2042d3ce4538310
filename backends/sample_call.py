"""What one launch is told, as the bytes of ``csrc/call.h``: what the C++ and CUDA kernels take instead of arrays."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np

from .contract import RawArray, RawVector

__all__ = ["ELEMENT_TYPES", "PACKED_CALL", "SampleCall", "Vector", "pack_call", "pack_plain_call"]

# ElementType of csrc/call.h; 0 is a number in place of a vector.
ELEMENT_TYPES: dict[Any, int] = {
    name: code
    for code, name in enumerate(
        (
            "float16", "bfloat16", "float32", "float64",
            "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        ),
        start=1,
    )
}  # fmt: skip

# Of host memory, which only comes as these, by NumPy's objects: their names are slow.
ELEMENT_TYPES |= {np.dtype(name): ELEMENT_TYPES[name] for name in ("float32", "float64")}


class Vector(NamedTuple):
    """The fields of the C++ struct, in their order."""

    data: int
    stride: int
    number: float
    type: int
    unused: int


class SampleCall(NamedTuple):
    """The fields of the C++ struct, in their order."""

    mu: Vector
    sigma: Vector
    out: int
    row_stride: int
    column_stride: int
    rows: int
    columns: int
    first_row: int
    first_column: int
    seed: int
    offset: int
    counter: int
    type: int
    shared: int
    antithetic: int
    fast_math: int
    device: int
    unused: int
    stream: int


_VECTOR = "PqdI4x"
_STRUCT = struct.Struct(f"{_VECTOR}{_VECTOR}PqqQQQQQQPIIIIi4xP")
_pack = _STRUCT.pack
_PLAIN = {dtype: (size, ELEMENT_TYPES[dtype]) for dtype, size in (("float32", 4), ("float64", 8))}

PACKED_CALL = _STRUCT.size
"""Bytes of a call."""


def pack_call(
    mu: RawVector,
    sigma: RawVector,
    out: RawArray,
    dtype: str,
    seed: int,
    offset: int,
    counter: int,
    dim_offset: int,
    sample_offset: int,
    shared: bool,
    antithetic: bool,
    fast_math: bool,
    device: int,
    stream: int,
) -> bytes:
    """A ``SampleCall``, from the arguments of `multisample.backends.contract.Backend.launch`."""
    rows, columns = out.shape
    row_stride, column_stride = out.strides
    return _pack(
        *_vector(mu), *_vector(sigma), _pointer(out), row_stride, column_stride, rows, columns,
        dim_offset, sample_offset, seed, offset, counter,
        ELEMENT_TYPES[dtype], shared, antithetic, fast_math, device, stream,
    )  # fmt: skip


def pack_plain_call(
    mu: int, sigma: int, out: int, d: int, n: int, dtype: str, seed: int, offset: int,
    shared: bool, fast_math: bool, device: int, stream: int,
) -> bytes:  # fmt: skip
    """The same for addresses of contiguous memory, all of type `dtype`."""
    size, element = _PLAIN[dtype]
    return _pack(
        mu, size, 0.0, element, sigma, size, 0.0, element, out, n * size, size, d, n, 0, 0, seed, offset, 0,
        element, shared, False, fast_math, device, stream,
    )  # fmt: skip


def _vector(vector: RawVector) -> tuple[int, int, float, int]:
    if isinstance(vector, float):
        return 0, 0, vector, 0
    return _pointer(vector), vector.strides[0], 0.0, ELEMENT_TYPES[vector.dtype]


def _pointer(array: RawArray) -> int:
    return int(array.__array_interface__["data"][0]) if isinstance(array, np.ndarray) else array.pointer
