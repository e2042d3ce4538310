"""The block-per-dimension kernel for the CPU: one call draws one window of the sample matrix.

Compiled once per dtype, with arrays of any strides in the signature, and kept on disk: a user waits for LLVM
once. ``nogil`` lets windows run on several threads; ``parallel=True`` would bring a threading layer that dies
in a forked child (GNU OpenMP) or aborts under concurrent calls (workqueue).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types

from .compilation import compile_cached, source_digest
from .intrinsics import contiguous, fma, stack_array
from .narrow import to_bfloat16, to_float16, unchanged
from .normals import block_f32, block_f64
from .words import stream_key, word

__all__ = ["small_kernel", "value_kernel", "window_kernel"]

# From this length on, a row is worth vector loops of its own.
_LONG_ROW = 512
# From this length on, a run of columns is worth a loop of its own.
_LONG_RUN = 16
# Blocks that the widest vectors hold, a divisor of _TILE.
_LANES = np.uint64(16)
# Blocks of four normals in a tile: 4 KiB of float32, well inside the first-level cache.
_TILE = 256
_TILE_NORMALS = 4 * _TILE


@njit(forceinline=True)
def _draw_long_rows(block, narrow, mu, sigma, out, o0, o1, k0, k1, first_row, first_column):
    """Each row in place: up to three columns, whole blocks of four, up to three columns."""
    rows, columns = out.shape
    head = min(-first_column & 3, columns)
    blocks = (columns - head) // 4
    done = head + 4 * blocks
    first_block = np.uint64((first_column + head) // 4)
    for r in range(rows):
        i = np.uint64(first_row + r)
        m, s = mu[r], sigma[r]
        row = contiguous(out[r])
        if head > 0:
            z = block(first_block - np.uint64(1), i, o0, o1, k0, k1)
            for c in range(head):
                row[c] = narrow(fma(s, z[4 - head + c], m))
        body = row[head:done]
        for b in range(np.uint64(blocks)):
            z0, z1, z2, z3 = block(first_block + b, i, o0, o1, k0, k1)
            c = np.uint64(4) * b
            body[c] = narrow(fma(s, z0, m))
            body[c + np.uint64(1)] = narrow(fma(s, z1, m))
            body[c + np.uint64(2)] = narrow(fma(s, z2, m))
            body[c + np.uint64(3)] = narrow(fma(s, z3, m))
        if done < columns:
            z = block(first_block + np.uint64(blocks), i, o0, o1, k0, k1)
            for c in range(columns - done):
                row[done + c] = narrow(fma(s, z[c], m))


@njit(forceinline=True)
def _draw_tiles(block, narrow, mu, sigma, out, o0, o1, k0, k1, first_row, first_column, shared):
    """Noise by the tile, then scaled into place: short rows share a tile, and shared noise serves every row."""
    rows, columns = out.shape
    skip = first_column & 3
    first_block = first_column // 4
    row_blocks = (skip + columns + 3) // 4
    noise_rows = 1 if shared else rows
    unit_stride = out.strides[1] == out.itemsize
    tile_rows = max(1, _TILE // row_blocks)
    z = stack_array(_TILE_NORMALS, mu.dtype)
    tile_row = stack_array(_TILE, np.uint32)
    tile_block = stack_array(_TILE, np.uint32)
    for r in range(0, noise_rows, tile_rows):
        packed = min(tile_rows, noise_rows - r)
        for t in range(0, row_blocks, _TILE):
            width = min(_TILE, row_blocks - t)
            k = np.uint64(0)
            for p in range(packed):
                i = np.uint32(0 if shared else first_row + r + p)
                for b in range(first_block + t, first_block + t + width):
                    tile_row[k] = i
                    tile_block[k] = np.uint32(b)
                    k += np.uint64(1)
            # Whole vectors: what lies beyond is noise of no place, which costs less than a loop for the rest.
            for b in range((k + _LANES - np.uint64(1)) & ~(_LANES - np.uint64(1))):
                z0, z1, z2, z3 = block(np.uint64(tile_block[b]), np.uint64(tile_row[b]), o0, o1, k0, k1)
                c = np.uint64(4) * b
                z[c] = z0
                z[c + np.uint64(1)] = z1
                z[c + np.uint64(2)] = z2
                z[c + np.uint64(3)] = z3
            start = max(0, 4 * t - skip)
            stop = min(columns, 4 * (t + width) - skip)
            shift = np.uint64(start + skip - 4 * t)
            pitch = np.uint64(0 if shared else 4 * width)
            last = rows if shared else r + packed
            if unit_stride and stop - start >= _LONG_RUN:
                for i in range(r, last):
                    m, s = mu[i], sigma[i]
                    row = contiguous(out[i, start:stop])
                    noise = z[shift:]
                    for c in range(np.uint64(row.size)):
                        row[c] = narrow(fma(s, noise[c], m))
                    shift += pitch
            else:
                for i in range(np.uint64(r), np.uint64(last)):
                    m, s = mu[i], sigma[i]
                    for c in range(np.uint64(stop - start)):
                        out[i, np.uint64(start) + c] = narrow(fma(s, z[shift + c], m))
                    shift += pitch


@njit(forceinline=True)
def _draw(block, narrow, mu, sigma, out, seed, offset, first_row, first_column, shared):
    columns = out.shape[1]
    k0, k1 = stream_key(seed)
    o0, o1 = word(offset), offset >> np.uint64(32)
    if columns >= _LONG_ROW and out.strides[1] == out.itemsize and not shared:
        _draw_long_rows(block, narrow, mu, sigma, out, o0, o1, k0, k1, first_row, first_column)
    elif columns > 0:
        _draw_tiles(block, narrow, mu, sigma, out, o0, o1, k0, k1, first_row, first_column, shared)


@njit(forceinline=True)
def _valid(mu, sigma):
    """Whether every mean is finite, and every standard deviation finite and not negative."""
    valid = True
    for m in mu:
        valid &= -math.inf < m < math.inf
    for s in sigma:
        valid &= 0 <= s < math.inf
    return valid


def _kernels(digest: int) -> dict[str, Callable[..., Any]]:
    # `digest` is named in each because a closure's values are part of the key in Numba's disk cache.
    def draw_float32(mu, sigma, out, seed, offset, i, j, shared):
        _ = digest
        _draw(block_f32, unchanged, mu, sigma, out, seed, offset, i, j, shared)

    def draw_float64(mu, sigma, out, seed, offset, i, j, shared):
        _ = digest
        _draw(block_f64, unchanged, mu, sigma, out, seed, offset, i, j, shared)

    def draw_float16(mu, sigma, out, seed, offset, i, j, shared):
        _ = digest
        _draw(block_f32, to_float16, mu, sigma, out, seed, offset, i, j, shared)

    def draw_bfloat16(mu, sigma, out, seed, offset, i, j, shared):
        _ = digest
        _draw(block_f32, to_bfloat16, mu, sigma, out, seed, offset, i, j, shared)

    def check_and_draw_float32(mu, sigma, out, seed, offset):
        _ = digest
        if not _valid(mu, sigma):
            return False
        _draw(block_f32, unchanged, mu, sigma, out, seed, offset, 0, 0, False)
        return True

    def check_and_draw_float64(mu, sigma, out, seed, offset):
        _ = digest
        if not _valid(mu, sigma):
            return False
        _draw(block_f64, unchanged, mu, sigma, out, seed, offset, 0, 0, False)
        return True

    def check(mu, sigma):
        _ = digest
        return _valid(mu, sigma)

    functions = (
        draw_float32, draw_float64, draw_float16, draw_bfloat16,
        check_and_draw_float32, check_and_draw_float64, check,
    )  # fmt: skip
    return {function.__name__: function for function in functions}


def _array(dtype: Any, ndim: int, *, readonly: bool = False) -> Any:
    # "A": any strides; unaligned: x86 and ARM load and store it as fast. Every other array converts to this.
    return types.Array(dtype, ndim, "A", readonly=readonly, aligned=False)


# Computing type and element of `out`.
_TYPES = {
    "float32": (types.float32, types.float32),
    "float64": (types.float64, types.float64),
    "float16": (types.float32, types.uint16),
    "bfloat16": (types.float32, types.uint16),
}


@functools.cache
def window_kernel(dtype: str) -> Callable[..., None]:
    """``kernel(mu, sigma, out, seed, offset, first_row, first_column, shared)`` draws the window `out`.

    `first_row` and `first_column` say where in the sample matrix it begins.
    """
    real, element = _TYPES[dtype]
    vector, matrix = _array(real, 1, readonly=True), _array(element, 2)
    signature = types.void(vector, vector, matrix, types.uint64, types.uint64, types.int64, types.int64, types.boolean)
    kernel: Callable[..., None] = compile_cached(signature, _kernels(source_digest())[f"draw_{dtype}"])
    return kernel


@functools.cache
def small_kernel(dtype: str) -> Callable[..., bool]:
    """``kernel(mu, sigma, out, seed, offset)`` for a C-contiguous `out`: checks the values, draws if all are good.

    One call, because to call compiled code costs as much as to draw a hundred normals; and the GIL is kept, because to
    release and take it again does too.
    """
    real, element = _TYPES[dtype]
    vector, matrix = _array(real, 1, readonly=True), types.Array(element, 2, "C")
    signature = types.boolean(vector, vector, matrix, types.uint64, types.uint64)
    function = _kernels(source_digest())[f"check_and_draw_{dtype}"]
    kernel: Callable[..., bool] = compile_cached(signature, function, nogil=False)
    return kernel


@functools.cache
def value_kernel(dtype: str) -> Callable[..., bool]:
    """``kernel(mu, sigma)``: whether every mean is finite, and every standard deviation finite and not negative."""
    vector = _array(_TYPES[dtype][0], 1, readonly=True)
    function = _kernels(source_digest())["check"]
    kernel: Callable[..., bool] = compile_cached(types.boolean(vector, vector), function)
    return kernel
