"""The sampling kernel for the CPU.

`window_kernel` draws one window of a sample matrix on one thread. `calls.py` shares windows, and the matrices of a
batch, among threads. There are two window kernels per dtype, one of them for antithetic pairs. The kernels take arrays
of any strides. They are cached on disk, so that a user waits for LLVM once.

Numba's ``parallel=True`` would bring a threading layer that dies in a forked child (GNU OpenMP) or aborts under
concurrent calls (workqueue).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from multisample.backends.element_types import MATRIX_TYPES
from multisample.backends.kernels.compilation import compile_cached, function_address, inline, source_digest
from multisample.backends.kernels.stream.arithmetic import fma
from multisample.backends.kernels.stream.normals import block_f32, block_f64
from multisample.backends.kernels.stream.rounding import NARROWING, unchanged
from multisample.backends.kernels.stream.words import stream_key, word

from .intrinsics import (
    contiguous,
    copy_vector,
    default_floats,
    has_default_floats,
    prefetch,
    restore_floats,
    run_down,
    scale_vector,
    stack_array,
    store_apart,
)

# `_draw_long_rows` draws rows of this length and more.
_LONG_ROW = 512
# `_draw_tiles` has a vector loop for runs of at least this many columns.
_LONG_RUN = 8
# Blocks that the widest vectors hold, a divisor of _TILE.
_LANES = np.uint64(16)
# Blocks of four normals in a tile: 4 KiB of float32, well inside the first-level cache.
_TILE = 256
_TILE_NORMALS = 4 * _TILE
_TILE_PAIRS = 2 * _TILE_NORMALS
# Rows of a chunk, whose mu and sigma are copied to the stack. The more rows, the longer the runs of memory. Shared
# noise is drawn faster and needs longer runs.
_CHUNK, _LONG_CHUNK = 2048, 8192
# Rows that the widest vectors hold.
_HEIGHT = 16
# In `_draw_few_rows`, elements of a tile's column, and of a tile. A tile has eight columns and a vector of padding.
_PLACES = 512
_TILE_PLACES = 8 * _PLACES + _HEIGHT
# Prefetch distance down a column, in elements.
_NEAR = 256
# Prefetch distance in bytes, for writes that the hardware prefetcher does not detect.
_AHEAD = 2048


@inline
def _draw_long_rows(block, narrow, mu, sigma, out, o0, o1, k0, k1, first_row, first_column, antithetic):
    """Draw each row without a buffer: whole blocks in a vector loop, then the incomplete blocks at both ends."""
    rows, columns = out.shape
    block_columns = 8 if antithetic else 4
    head = min(-first_column % block_columns, columns)
    blocks = (columns - head) // block_columns
    done = head + block_columns * blocks
    first_block = np.uint64((first_column + head) // block_columns)
    edges = (first_block - np.uint64(1), 0, head), (first_block + np.uint64(blocks), done, columns)
    for r in range(rows):
        i = np.uint64(first_row + r)
        m, s = mu[r], sigma[r]
        row = contiguous(out[r])
        body = row[head:done]
        for b in range(np.uint64(blocks)):
            z0, z1, z2, z3 = block(first_block + b, i, o0, o1, k0, k1)
            c = np.uint64(block_columns) * b
            if antithetic:
                body[c] = narrow(fma(s, z0, m))
                body[c + np.uint64(1)] = narrow(fma(s, -z0, m))
                body[c + np.uint64(2)] = narrow(fma(s, z1, m))
                body[c + np.uint64(3)] = narrow(fma(s, -z1, m))
                body[c + np.uint64(4)] = narrow(fma(s, z2, m))
                body[c + np.uint64(5)] = narrow(fma(s, -z2, m))
                body[c + np.uint64(6)] = narrow(fma(s, z3, m))
                body[c + np.uint64(7)] = narrow(fma(s, -z3, m))
            else:
                body[c] = narrow(fma(s, z0, m))
                body[c + np.uint64(1)] = narrow(fma(s, z1, m))
                body[c + np.uint64(2)] = narrow(fma(s, z2, m))
                body[c + np.uint64(3)] = narrow(fma(s, z3, m))
        for b, left, right in edges:
            if left < right:
                z = block(b, i, o0, o1, k0, k1)
                for c in range(left, right):
                    place = (first_column + c) % block_columns
                    normal = z[place // (block_columns // 4)]
                    row[c] = narrow(fma(s, -normal if antithetic and place % 2 == 1 else normal, m))


@inline
def _runs_down(out):
    """Whether vectors can run down the columns: rows are adjacent in memory."""
    return out.strides[0] == out.itemsize and out.shape[0] > 1


@inline
def _copy_columns(x, block_columns, first, out, top, left, right):
    """Copy columns `left` to `right` of the tile `x` to the rows of `out` from `top` on, for `_draw_few_rows`.

    Column `left` of `out` is column `first` of the tile. The rows are fewer than a vector holds, so that a vector also
    writes to the columns that follow. It overwrites only elements that are drawn later: in rows before `top`, or in
    columns from `right` on.
    """
    height, columns = out.shape
    rows = height - top
    # The shortest vector that holds the rows.
    length = 8 if rows <= 8 else 16
    # Columns before the first whole block, and the number of whole blocks whose vectors end inside this window.
    before = min(-first % block_columns, right - left)
    blocks = 0
    if out.strides[1] == height * out.itemsize:
        last = min(right, columns - (length - rows + height - 1) // height)
        blocks = max(0, last - left - before) // block_columns
    c = left
    while c < right:
        place = first + c - left
        start = place // block_columns * rows
        if c == left + before and blocks > 0:
            to = run_down(out, 0, 0, x)
            for _ in range(blocks):
                for k in range(block_columns):
                    at, of = (c + k) * height + top, start + k * _PLACES
                    if length == 8:
                        copy_vector(to, at, x, of, 8)
                    else:
                        copy_vector(to, at, x, of, 16)
                start += rows
                c += block_columns
        else:
            column = run_down(out, top, c, x)
            for k in range(rows):
                column[k] = x[start + place % block_columns * _PLACES + k]
            c += 1


@inline
def _draw_few_rows(
    block, narrow, m, s, row_of, block_of, out, o0, o1, k0, k1, i, g, antithetic, top, part, first, left
):
    """Independent noise in `part` blocks of the rows from `top` on, fewer rows than a vector holds.

    Column `left` of the window is column `first` of the first block. Place k of the tile is row
    ``i + row_of[k]`` of block ``g + block_of[k]`` of the stream.
    """
    rows = out.shape[0] - top
    block_columns = 8 if antithetic else 4
    right = min(out.shape[1], left - first + block_columns * part)
    step = np.uint64(block_columns // 4)
    pitch = np.uint64(_PLACES)
    x = stack_array(_TILE_PLACES, out.dtype)
    # The output of the next tile, if it is contiguous.
    after = run_down(out, 0, right if out.strides[1] == rows * out.itemsize else out.shape[1], x)
    for start in range(0, part * rows, _HEIGHT):
        for c in range(block_columns):
            prefetch(after, block_columns * start + _HEIGHT * c, _HEIGHT)
        for k in range(np.uint64(start), np.uint64(start + _HEIGHT)):
            z0, z1, z2, z3 = block(g + np.uint64(block_of[k]), i + np.uint64(row_of[k]), o0, o1, k0, k1)
            x[k] = narrow(fma(s[k], z0, m[k]))
            x[k + step * pitch] = narrow(fma(s[k], z1, m[k]))
            x[k + np.uint64(2) * step * pitch] = narrow(fma(s[k], z2, m[k]))
            x[k + np.uint64(3) * step * pitch] = narrow(fma(s[k], z3, m[k]))
            if antithetic:
                x[k + pitch] = narrow(fma(s[k], -z0, m[k]))
                x[k + np.uint64(3) * pitch] = narrow(fma(s[k], -z1, m[k]))
                x[k + np.uint64(5) * pitch] = narrow(fma(s[k], -z2, m[k]))
                x[k + np.uint64(7) * pitch] = narrow(fma(s[k], -z3, m[k]))
    _copy_columns(x, block_columns, first, out, top, left, right)


@inline
def _draw_column(block, narrow, m, s, column, chunk, o0, o1, k0, k1, i, g, in_second_pair, is_second, is_mirrored):
    """One column of block `g`, `chunk` rows from row `i` on: only the pair of normals that it needs.

    `in_second_pair` is a literal.
    """
    for start in range(0, chunk, _HEIGHT):
        first = np.uint64(min(start, chunk - _HEIGHT))
        for k in range(first, first + np.uint64(_HEIGHT)):
            z0, z1, z2, z3 = block(g, i + k, o0, o1, k0, k1)
            a, b = (z2, z3) if in_second_pair else (z0, z1)
            z = b if is_second else a
            column[k] = narrow(fma(s[k], -z if is_mirrored else z, m[k]))


@inline
def _tile_of_few_rows(mu, sigma, rows, height, row_blocks, few_m, few_s, row_of, block_of):
    """Lay out the rows from `height` on in vectors, for several blocks. Return the number of blocks."""
    few, tile_blocks = rows - height, max(_HEIGHT, _PLACES // rows)
    # The rows of `tile_blocks` blocks fill whole vectors.
    divisor = 8 if few % 8 == 0 else 4 if few % 4 == 0 else 2 if few % 2 == 0 else 1
    tile_blocks -= tile_blocks % (_HEIGHT // divisor)
    tile_blocks = min(tile_blocks, row_blocks)
    r, b = 0, 0
    for k in range((tile_blocks * few + _HEIGHT - 1) // _HEIGHT * _HEIGHT):
        few_m[k], few_s[k] = mu[height + r], sigma[height + r]
        row_of[k], block_of[k] = r, b
        r += 1
        if r == few:
            r = 0
            b += 1
    return tile_blocks


@inline
def _draw_only_column(block, narrow, m, s, column, chunk, o0, o1, k0, k1, i, g, skip, step, antithetic):
    """Draw the column of a matrix (d, 1): one normal of each block."""
    is_second, is_mirrored = skip // step % 2 == 1, antithetic and skip % 2 == 1
    if skip // step >= 2:
        _draw_column(block, narrow, m, s, column, chunk, o0, o1, k0, k1, i, g, True, is_second, is_mirrored)
    else:
        _draw_column(block, narrow, m, s, column, chunk, o0, o1, k0, k1, i, g, False, is_second, is_mirrored)


@inline
def _draw_down(block, narrow, mu, sigma, out, o0, o1, k0, k1, first_row, first_column, antithetic):
    """Independent noise where rows are adjacent. A vector holds rows of one block, or the last rows of several."""
    rows, columns = out.shape
    block_columns = 8 if antithetic else 4
    step = block_columns // 4
    skip = first_column % block_columns
    first_block = first_column // block_columns
    row_blocks = (skip + columns + block_columns - 1) // block_columns
    m, s = stack_array(_CHUNK, mu.dtype), stack_array(_CHUNK, mu.dtype)
    nowhere = stack_array(_CHUNK, out.dtype)
    few_m, few_s = stack_array(_PLACES, mu.dtype), stack_array(_PLACES, mu.dtype)
    row_of, block_of = stack_array(_PLACES, np.uint32), stack_array(_PLACES, np.uint32)
    # If the last vector of a column would be largely empty, its rows are drawn before the other rows, several blocks at
    # a time.
    height, tile_blocks = rows, row_blocks
    if rows < _HEIGHT or -rows % _HEIGHT > rows // 4:
        height = rows - rows % _HEIGHT
        tile_blocks = _tile_of_few_rows(mu, sigma, rows, height, row_blocks, few_m, few_s, row_of, block_of)
    # Rows are divided evenly. The last chunk ends where the rows end, and the last vector where the chunk ends: storing
    # some elements twice is faster than a loop for the remainder.
    chunks = max(1, (height + _CHUNK - 1) // _CHUNK)
    chunk = max(1, (height + chunks - 1) // chunks)
    # Prefetch elements further down the column, then those of the next block or tile.
    pitch = out.strides[1] // out.itemsize
    near, far = _NEAR, _NEAR - chunk + block_columns * pitch
    if height < rows:
        near = far = tile_blocks * block_columns * pitch
    for t in range(0, row_blocks, tile_blocks):
        part = min(tile_blocks, row_blocks - t)
        if height < rows:
            i, g = np.uint64(first_row + height), np.uint64(first_block + t)
            left = max(0, block_columns * t - skip)
            of_block = skip + left - block_columns * t
            _draw_few_rows(
                block, narrow, few_m, few_s, row_of, block_of, out, o0, o1, k0, k1, i, g, antithetic, height, part,
                of_block, left,
            )  # fmt: skip
        for r in range(0, height, chunk):
            top = min(r, height - chunk)
            i = np.uint64(first_row + top)
            for k in range(chunk):
                m[k], s[k] = mu[top + k], sigma[top + k]
            if columns == 1 and chunk > 0:
                column, g = run_down(out, top, 0, nowhere), np.uint64(first_block)
                _draw_only_column(block, narrow, m, s, column, chunk, o0, o1, k0, k1, i, g, skip, step, antithetic)
                continue
            for b in range(t, t + part):
                g = np.uint64(first_block + b)
                c = block_columns * b - skip
                x0, y0 = run_down(out, top, c, nowhere), run_down(out, top, c + 1, nowhere)
                x1, y1 = run_down(out, top, c + step, nowhere), run_down(out, top, c + step + 1, nowhere)
                x2, y2 = run_down(out, top, c + 2 * step, nowhere), run_down(out, top, c + 2 * step + 1, nowhere)
                x3, y3 = run_down(out, top, c + 3 * step, nowhere), run_down(out, top, c + 3 * step + 1, nowhere)
                for start in range(0, chunk, _HEIGHT):
                    last = min(start, chunk - _HEIGHT)
                    first = np.uint64(last)
                    ahead = last + (near if last + near < chunk else far)
                    prefetch(x0, ahead, 16)
                    prefetch(x1, ahead, 16)
                    prefetch(x2, ahead, 16)
                    prefetch(x3, ahead, 16)
                    if antithetic:
                        prefetch(y0, ahead, 16)
                        prefetch(y1, ahead, 16)
                        prefetch(y2, ahead, 16)
                        prefetch(y3, ahead, 16)
                    for k in range(first, first + np.uint64(_HEIGHT)):
                        z0, z1, z2, z3 = block(g, i + k, o0, o1, k0, k1)
                        store_apart(x0, k, narrow(fma(s[k], z0, m[k])), 0)
                        store_apart(x1, k, narrow(fma(s[k], z1, m[k])), 1)
                        store_apart(x2, k, narrow(fma(s[k], z2, m[k])), 2)
                        store_apart(x3, k, narrow(fma(s[k], z3, m[k])), 3)
                        if antithetic:
                            store_apart(y0, k, narrow(fma(s[k], -z0, m[k])), 4)
                            store_apart(y1, k, narrow(fma(s[k], -z1, m[k])), 5)
                            store_apart(y2, k, narrow(fma(s[k], -z2, m[k])), 6)
                            store_apart(y3, k, narrow(fma(s[k], -z3, m[k])), 7)


@inline
def _scale_and_narrow_down(narrow, z, mu, sigma, out):
    """Store columns of shared noise `z` where rows are adjacent."""
    rows, columns = out.shape
    m, s = stack_array(_CHUNK, mu.dtype), stack_array(_CHUNK, mu.dtype)
    for top in range(0, rows, _CHUNK):
        chunk = min(_CHUNK, rows - top)
        for k in range(chunk):
            m[k], s[k] = mu[top + k], sigma[top + k]
        for c in range(columns):
            of_column = z[c]
            column = contiguous(out[top : top + chunk, c])
            for k in range(np.uint64(chunk)):
                column[k] = narrow(fma(s[k], of_column, m[k]))


@inline
def _scale_down(narrow, z, mu, sigma, out):
    """`_scale_and_narrow_down` for types that need no narrowing."""
    rows, columns = out.shape
    m, s = stack_array(_LONG_CHUNK, mu.dtype), stack_array(_LONG_CHUNK, mu.dtype)
    step = out.strides[1] // out.itemsize
    if rows <= 3 * _HEIGHT:
        for k in range(_HEIGHT):
            m[k], s[k] = 0, 0
        for k in range(rows):
            m[k], s[k] = mu[k], sigma[k]
        to = run_down(out, 0, 0, m)
        far = max(1, _TILE_NORMALS // rows) * step
        whole, last = columns, rows - _HEIGHT
        if rows < _HEIGHT:
            # Each column overwrites the excess of the one before. The last columns are stored element by element.
            length = 8 if rows <= 8 else 16
            whole = max(0, columns - (length - 1) // rows) if step == rows else 0
        if rows <= 8:
            for c in range(whole):
                scale_vector(to, c * step, s, z[np.uint64(c)], m, 0, 8, far)
        elif rows <= 16:
            for c in range(whole):
                scale_vector(to, c * step, s, z[np.uint64(c)], m, 0, 16, far)
        elif rows <= 32:
            for c in range(whole):
                of_column = z[np.uint64(c)]
                scale_vector(to, c * step, s, of_column, m, 0, 16, far)
                scale_vector(to, c * step + last, s, of_column, m, last, 16, far)
        else:
            for c in range(whole):
                of_column = z[np.uint64(c)]
                scale_vector(to, c * step, s, of_column, m, 0, 16, far)
                scale_vector(to, c * step + 16, s, of_column, m, 16, 16, far)
                scale_vector(to, c * step + last, s, of_column, m, last, 16, far)
        for c in range(whole, columns):
            for k in range(rows):
                out[k, c] = fma(s[k], z[c], m[k])
        return
    # Chunks and vectors as in `_draw_down`.
    chunks = (rows + _LONG_CHUNK - 1) // _LONG_CHUNK
    chunk = (rows + chunks - 1) // chunks
    near = _AHEAD // out.itemsize
    for r in range(0, rows, chunk):
        top = min(r, rows - chunk)
        for k in range(chunk):
            m[k], s[k] = mu[top + k], sigma[top + k]
        # Four columns share each read of mu and sigma, which come from the second-level cache if there are many rows.
        # The last column is repeated to fill four.
        for c0 in range(0, columns, 4):
            c1, c2, c3 = min(c0 + 1, columns - 1), min(c0 + 2, columns - 1), min(c0 + 3, columns - 1)
            z0, z1, z2, z3 = z[c0], z[c1], z[c2], z[c3]
            x0, x1 = run_down(out, top, c0, m), run_down(out, top, c1, m)
            x2, x3 = run_down(out, top, c2, m), run_down(out, top, c3, m)
            for start in range(0, chunk, _HEIGHT):
                k = min(start, chunk - _HEIGHT)
                far = near if k + near < chunk else near + 4 * step - chunk
                scale_vector(x0, k, s, z0, m, k, 16, far)
                scale_vector(x1, k, s, z1, m, k, 16, far)
                scale_vector(x2, k, s, z2, m, k, 16, far)
                scale_vector(x3, k, s, z3, m, k, 16, far)


@inline
def _draw_tiles(
    block, narrow, scale_down, mu, sigma, out, o0, o1, k0, k1, first_row, first_column, shared_noise, antithetic
):
    """Draw noise in tiles, then scale it into place. Short rows share a tile, and shared noise serves every row."""
    rows, columns = out.shape
    block_columns = 8 if antithetic else 4
    skip = first_column % block_columns
    first_block = first_column // block_columns
    row_blocks = (skip + columns + block_columns - 1) // block_columns
    noise_rows = 1 if shared_noise else rows
    unit_stride = out.strides[1] == out.itemsize
    down = shared_noise and _runs_down(out)
    tile_rows = max(1, _TILE // row_blocks)
    z = stack_array(_TILE_NORMALS, mu.dtype)
    pairs = stack_array(_TILE_PAIRS, mu.dtype)
    tile_row = stack_array(_TILE, np.uint32)
    tile_block = stack_array(_TILE, np.uint32)
    for r in range(0, noise_rows, tile_rows):
        packed = min(tile_rows, noise_rows - r)
        for t in range(0, row_blocks, _TILE):
            width = min(_TILE, row_blocks - t)
            k = np.uint64(0)
            for p in range(packed):
                i = np.uint32(0 if shared_noise else first_row + r + p)
                for b in range(first_block + t, first_block + t + width):
                    tile_row[k] = i
                    tile_block[k] = np.uint32(b)
                    k += np.uint64(1)
            # Draws whole vectors, with unused noise behind the last place: faster than a loop for the remainder.
            drawn = (k + _LANES - np.uint64(1)) & ~(_LANES - np.uint64(1))
            for b in range(drawn):
                z0, z1, z2, z3 = block(np.uint64(tile_block[b]), np.uint64(tile_row[b]), o0, o1, k0, k1)
                c = np.uint64(4) * b
                z[c] = z0
                z[c + np.uint64(1)] = z1
                z[c + np.uint64(2)] = z2
                z[c + np.uint64(3)] = z3
            noise = z
            if antithetic:
                for c in range(np.uint64(4) * drawn):
                    pairs[np.uint64(2) * c] = z[c]
                    pairs[np.uint64(2) * c + np.uint64(1)] = -z[c]
                noise = pairs
            start = max(0, block_columns * t - skip)
            stop = min(columns, block_columns * (t + width) - skip)
            shift = np.uint64(start + skip - block_columns * t)
            pitch = np.uint64(0 if shared_noise else block_columns * width)
            last = rows if shared_noise else r + packed
            if unit_stride and stop - start >= _LONG_RUN:
                for i in range(r, last):
                    m, s = mu[i], sigma[i]
                    row = contiguous(out[i, start:stop])
                    of_row = noise[shift:]
                    for c in range(np.uint64(row.size)):
                        row[c] = narrow(fma(s, of_row[c], m))
                    shift += pitch
            elif down:
                scale_down(narrow, noise[shift:], mu, sigma, out[:, start:stop])
            else:
                for i in range(np.uint64(r), np.uint64(last)):
                    m, s = mu[i], sigma[i]
                    for c in range(np.uint64(stop - start)):
                        out[i, np.uint64(start) + c] = narrow(fma(s, noise[shift + c], m))
                    shift += pitch


@inline
def _draw(block, narrow, scale_down, mu, sigma, out, seed, offset, first_row, first_column, shared_noise, antithetic):
    """Draw the window `out`."""
    columns = out.shape[1]
    k0, k1 = stream_key(seed)
    o0, o1 = word(offset), offset >> np.uint64(32)
    if not shared_noise and columns > 0 and _runs_down(out):
        _draw_down(block, narrow, mu, sigma, out, o0, o1, k0, k1, first_row, first_column, antithetic)
    elif (
        columns >= _LONG_ROW
        and out.strides[1] == out.itemsize
        and not shared_noise
        and not (antithetic and out.itemsize == 8)  # LLVM does not vectorise eight such stores.
    ):
        _draw_long_rows(block, narrow, mu, sigma, out, o0, o1, k0, k1, first_row, first_column, antithetic)
    elif columns > 0:
        _draw_tiles(
            block, narrow, scale_down, mu, sigma, out, o0, o1, k0, k1, first_row, first_column, shared_noise, antithetic
        )


@inline
def _valid(mu, sigma):
    """Whether every mean is finite, and every standard deviation finite and not negative."""
    if mu.strides[0] == mu.itemsize and sigma.strides[0] == sigma.itemsize:
        return _all_valid(contiguous(mu), contiguous(sigma))
    return _all_valid(mu, sigma)


@inline
def _all_valid(mu, sigma):
    valid = True
    for k in range(np.uint64(mu.size)):
        valid &= -math.inf < mu[k] < math.inf
    for k in range(np.uint64(sigma.size)):
        valid &= 0 <= sigma[k] < math.inf
    return valid


def _window_function(dtype: str, antithetic: bool) -> Callable[..., Any]:
    # Numba treats variables of the closure as constants.
    block = block_f64 if MATRIX_TYPES[dtype].computing == "float64" else block_f32
    narrow = NARROWING[dtype]
    scale_down = _scale_down if narrow is unchanged else _scale_and_narrow_down

    def draw(mu, sigma, out, seed, offset, i, j, shared_noise):
        before = default_floats()
        _draw(block, narrow, scale_down, mu, sigma, out, seed, offset, i, j, shared_noise, antithetic)
        restore_floats(before)

    return draw


def _array(dtype: Any, ndim: int, *, readonly: bool = False) -> Any:
    """The Numba type of an array."""
    # "A": any strides. Unaligned: x86 and ARM access it as fast. Every other array converts to this type.
    return types.Array(dtype, ndim, "A", readonly=readonly, aligned=False)


TYPES = {name: (getattr(types, row.computing), getattr(types, row.stored)) for name, row in MATRIX_TYPES.items()}
"""The Numba types of mu and sigma, and of an element of the matrix."""


def window_parameters(dtype: str) -> tuple[Any, ...]:
    """The Numba types of the parameters of a `window_kernel`."""
    real, element = TYPES[dtype]
    vector = _array(real, 1, readonly=True)
    return vector, vector, _array(element, 2), *[types.uint64] * 2, *[types.int64] * 2, types.boolean


@intrinsic
def call_window(typingctx: Any, kernel: Any, vectors: Any, matrix: Any, words: Any, shared_noise: Any) -> Any:
    """Call a `window_kernel`, of any type, by its address.

    A caller links no code of the kernel, so one caller serves all element types of one size. `vectors` are the
    addresses of mu and sigma, their strides, and the size of an element. `matrix` is address, rows, columns, both
    strides, and the size of an element. Strides and sizes are in bytes. `words` are seed, offset, first row and first
    column.
    """
    # The element types do not matter: a kernel gets pointers, lengths, strides and sizes.
    parameters = window_parameters("float32")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def filled(kind: Any, data: Any, shape: list[Any], strides: list[Any], size: Any) -> Any:
            made = context.make_array(kind)(context, builder)
            pointer = builder.inttoptr(data, made.data.type)
            context.populate_array(made, data=pointer, shape=shape, strides=strides, itemsize=size, meminfo=None)
            return made._getvalue()

        mu, sigma, mu_stride, sigma_stride, real = cgutils.unpack_tuple(builder, args[1])
        out, rows, columns, row_stride, column_stride, size = cgutils.unpack_tuple(builder, args[2])
        values = [
            filled(parameters[0], mu, [rows], [mu_stride], real),
            filled(parameters[1], sigma, [rows], [sigma_stride], real),
            filled(parameters[2], out, [rows, columns], [row_stride, column_stride], size),
            *cgutils.unpack_tuple(builder, args[3]),
            args[4],
        ]
        function = context.call_conv.get_function_type(types.none, parameters)
        callee = builder.inttoptr(args[0], function.as_pointer())
        context.call_conv.call_function(builder, callee, types.none, parameters, values)
        return context.get_dummy_value()

    integers = [types.UniTuple(types.int64, count) for count in (5, 6, 4)]
    return types.none(types.int64, *integers, types.boolean), codegen


def _check(mu, sigma, weights):
    return has_default_floats() and _valid(mu, sigma) and (weights is None or _valid(weights, sigma[:0]))


def _compiled(signature: Any, function: Callable[..., Any], name: str) -> Callable[..., Any]:
    kernel: Callable[..., Any] = compile_cached(signature, function, f"cpu-{name}", source_digest())
    return kernel


@functools.cache
def window_kernel(dtype: str, antithetic: bool = False) -> Callable[..., None]:
    """``kernel(mu, sigma, out, seed, offset, first_row, first_column, shared_noise)`` draws the window `out`.

    With `antithetic`, the columns of `out` and `first_column` count both halves of each pair. The window begins at row
    `first_row` and column `first_column` of the sample matrix.
    """
    signature = types.void(*window_parameters(dtype))
    return _compiled(signature, _window_function(dtype, antithetic), _window_name(dtype, antithetic))


@functools.cache
def window_address(dtype: str, antithetic: bool) -> int:
    """The address of a `window_kernel`, for `call_window`."""
    function, name = _window_function(dtype, antithetic), f"cpu-{_window_name(dtype, antithetic)}"
    return function_address(types.void(*window_parameters(dtype)), function, name, source_digest())


def _window_name(dtype: str, antithetic: bool) -> str:
    return f"draw_{dtype}_antithetic" if antithetic else f"draw_{dtype}"


@functools.cache
def value_kernel(dtype: str, weighted: bool = False) -> Callable[..., bool]:
    """``kernel(mu, sigma, weights)``: `Launcher.is_valid`. `weights` is None if not `weighted`."""
    vector = _array(TYPES[dtype][0], 1, readonly=True)
    weights = vector if weighted else types.none
    return _compiled(types.boolean(vector, vector, weights), _check, f"check_{dtype}{'_weighted' * weighted}")


@functools.cache
def settings_kernel(restores: bool = False) -> Callable[..., int]:
    """``kernel()`` is `default_floats`; the kernel that `restores` is ``kernel(settings)``, `restore_floats`."""
    if restores:
        return _compiled(types.void(types.uint64), lambda settings: restore_floats(settings), "restore_floats")
    return _compiled(types.uint64(), lambda: default_floats(), "default_floats")
