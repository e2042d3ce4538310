"""One launch as plain numbers and addresses: ``Draw`` of ``csrc/draw.h``. Every layer passes it.

C++ and CUDA kernels take its bytes, kernels in Python its fields.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

from .element_types import SIZES, ElementType

__all__ = [
    "HOST",
    "OFFSETS_BYTES",
    "PACKED_DRAW",
    "SEED_BYTES",
    "SIZES",
    "Batched",
    "Draw",
    "ElementType",
    "Operation",
    "Packer",
    "Vector",
    "Word",
    "batch_steps",
    "matrix_of_batch",
    "memory_packer",
    "pack",
    "packer",
    "parts_of_batch",
]


HOST = -1
"""The `device` of a draw in host memory."""


class Operation(enum.IntEnum):
    """The operation of a launch.

    sample : reads `mu` and `sigma`, writes the matrix ``x[r, c] = mu[r] + sigma[r] * z[r, c]``.
    gradient : reads the matrix ``g``, writes ``mu[r] = sum(g[r, :])`` and ``sigma[r] = sum(g[r, :] * z[r, :])``.
    """

    sample = 0
    gradient = 1


class Vector(NamedTuple):
    """`mu` or `sigma`: elements in memory, or one number.

    A gradient writes contiguous vectors, of float64 for a float64 matrix and of float32 otherwise.
    """

    data: int
    """Address of the first element."""
    stride: int
    """In bytes."""
    number: float
    type: int
    """An `ElementType`."""
    unused: int = 0


class Word(NamedTuple):
    """An unsigned 64-bit number: `value`, or if `at` is not 0 the number at address `at` in device memory."""

    value: int
    at: int = 0


class Batched(enum.IntFlag):
    """Operands with an element for each matrix of a batch, one after another in memory.

    The element of `offsets` is three 64-bit numbers: offset, first row and first column.
    """

    mu = 1
    sigma = 2
    seed = 4
    offsets = 8


class Draw(NamedTuple):
    """One launch.

    ``z[r, c]`` is the noise of row ``first_row + r`` (of row 0 with `common_noise`) and column ``first_column + c``.
    With `antithetic`, columns come in pairs: ``z[r, 2 * k]`` is column k of the noise, and ``z[r, 2 * k + 1]`` is its
    negative.
    """

    mu: Vector
    sigma: Vector
    matrix: int
    """Address of the first element, in host memory or in memory of `device`."""
    row_stride: int
    column_stride: int
    """In bytes. The elements of a sample must not overlap."""
    rows: int
    columns: int
    """At least 1."""
    seed: Word
    """In memory its high half is first, as in JAX's keys."""
    offset: Word
    first_row: Word
    first_column: Word
    """``first_row + rows <= 2**32`` and ``first_column + columns <= 2**34``."""
    scratch: int
    """Address of scratch memory for a gradient on CUDA, with the size that torch_ext returns."""
    stream: int
    """Handle of a stream on `device`."""
    type: int
    """The `ElementType` of the matrix's elements, one of `MATRIX_TYPES`."""
    operation: int
    common_noise: bool
    antithetic: bool
    fast_math: bool
    """No effect on the CPU and on float64."""
    device: int
    """The ordinal of a CUDA device, or `HOST`."""
    threads: int = 0
    """On the CPU, the most threads for the call; 0 for no limit."""
    batch: int = 0
    """How many matrices; 0 counts as 1. They are contiguous and lie one after another. A batch needs its words in
    memory."""
    batched: int = 0
    """Flags of `Batched`."""
    column_phase: int = 0
    """Where `first_column` is in memory: 1 + first_column % 8, or 0 if that is not known."""


_VECTOR = "PqdI4x"
_STRUCT = struct.Struct(f"{_VECTOR}{_VECTOR}PqqQQ{'QP' * 4}PP5IiIIII")
_pack = _STRUCT.pack

SEED_BYTES, OFFSETS_BYTES = 8, 24
"""Bytes of a seed, and of offset, first row and first column, of a matrix in a batch."""

PACKED_DRAW = _STRUCT.size
"""Bytes of a `Draw`."""


def pack(draw: Draw) -> bytes:
    """The bytes of the C++ struct ``Draw``."""
    vectors = (number for vector in (draw.mu, draw.sigma) for number in vector[:4])
    words = (number for word in draw[7:11] for number in word)
    return _pack(*vectors, *draw[2:7], *words, *draw[11:])


def batch_steps(draw: Draw) -> tuple[int, int, int, int, int]:
    """Bytes from one matrix of a batch to the next: of mu, sigma, the matrix, the seed and the offsets."""
    size = SIZES[ElementType(draw.type).name]
    return (
        draw.rows * draw.mu.stride if draw.batched & Batched.mu else 0,
        draw.rows * draw.sigma.stride if draw.batched & Batched.sigma else 0,
        draw.rows * draw.columns * size,
        SEED_BYTES if draw.batched & Batched.seed else 0,
        OFFSETS_BYTES if draw.batched & Batched.offsets else 0,
    )


def matrix_of_batch(draw: Draw, b: int) -> Draw:
    """Matrix `b` of a batch."""
    mu, sigma, matrix, seed_step, step = (b * step for step in batch_steps(draw))
    seed, offset, row, column = (
        word._replace(at=word.at + moved) if word.at else word
        for word, moved in zip(draw[7:11], (seed_step, step, step, step), strict=True)
    )
    return draw._replace(
        mu=draw.mu._replace(data=draw.mu.data + mu), sigma=draw.sigma._replace(data=draw.sigma.data + sigma),
        matrix=draw.matrix + matrix, seed=seed, offset=offset, first_row=row, first_column=column, batch=0,
    )  # fmt: skip


def parts_of_batch(draw: Draw, most: int) -> Iterator[Draw]:
    """A batch in parts of at most `most` matrices."""
    if draw.batch <= most:
        yield draw
        return
    for b in range(0, draw.batch, most):
        yield matrix_of_batch(draw, b)._replace(batch=min(most, draw.batch - b))


Packer = Callable[..., bytes]
"""``packed(mu, sigma, matrix, seed, offset, offset_at, first_row, first_column, stream, threads=0, scratch=0)``.

`mu` and `sigma` are addresses, or numbers if the draw has numbers.
"""


def packer(draw: Draw) -> Packer:
    """A function that packs draws like `draw`, in a third of the time of `pack`."""
    (_, s, _, t, _), (_, u, _, v, _), _, rs, cs, rows, columns = draw[:7]
    kind, operation, common, antithetic, fast, device = draw[13:19]
    if t == v == ElementType.number:
        return lambda mu, sigma, matrix, seed, offset, at, row, column, stream, threads=0, scratch=0: _pack(
            0, 0, mu, 0, 0, 0, sigma, 0, matrix, rs, cs, rows, columns, seed, 0, offset, at, row, 0, column, 0,
            scratch, stream, kind, operation, common, antithetic, fast, device, threads, 0, 0, 0,
        )  # fmt: skip
    if t == ElementType.number:
        return lambda mu, sigma, matrix, seed, offset, at, row, column, stream, threads=0, scratch=0: _pack(
            0, 0, mu, 0, sigma, u, 0.0, v, matrix, rs, cs, rows, columns, seed, 0, offset, at, row, 0, column, 0,
            scratch, stream, kind, operation, common, antithetic, fast, device, threads, 0, 0, 0,
        )  # fmt: skip
    if v == ElementType.number:
        return lambda mu, sigma, matrix, seed, offset, at, row, column, stream, threads=0, scratch=0: _pack(
            mu, s, 0.0, t, 0, 0, sigma, 0, matrix, rs, cs, rows, columns, seed, 0, offset, at, row, 0, column, 0,
            scratch, stream, kind, operation, common, antithetic, fast, device, threads, 0, 0, 0,
        )  # fmt: skip
    return lambda mu, sigma, matrix, seed, offset, at, row, column, stream, threads=0, scratch=0: _pack(
        mu, s, 0.0, t, sigma, u, 0.0, v, matrix, rs, cs, rows, columns, seed, 0, offset, at, row, 0, column, 0,
        scratch, stream, kind, operation, common, antithetic, fast, device, threads, 0, 0, 0,
    )  # fmt: skip


def memory_packer(draw: Draw) -> Callable[[int, int, int, int, int, int], bytes]:
    """``packed(mu, sigma, seed, offsets, matrix, stream)``: packs draws like `draw` whose words are in device memory.

    All but the stream are addresses; at `offsets` are the offset, the first row and the first column, and 0 means that
    they are 0.
    """
    (_, s, _, t, _), (_, u, _, v, _), _, rs, cs, rows, columns = draw[:7]
    options = draw[13:]
    return lambda mu, sigma, seed, offsets, matrix, stream: _pack(
        mu, s, 0.0, t, sigma, u, 0.0, v, matrix, rs, cs, rows, columns, 0, seed, 0, offsets, 0, offsets and offsets + 8,
        0, offsets and offsets + 16, 0, stream, *options,
    )  # fmt: skip
