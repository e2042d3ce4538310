"""The sampling kernel for the CPU.

`window_kernel` draws one window of a sample matrix on one thread. `calls.py` shares windows, and the matrices of a
batch, among threads. There are eight window kernels per dtype: for shared noise or not, for antithetic pairs or not,
and for vectors down the columns or along the rows. Kernels down the columns take matrices whose rows are adjacent, the
others arrays of any strides. They are cached on disk, so that a user waits for LLVM once.

Numba's ``parallel=True`` would bring a threading layer that dies in a forked child (GNU OpenMP) or aborts under
concurrent calls (workqueue).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.core.compiler import CompileResult
from numba.extending import intrinsic

from multisample.backends.element_types import MATRIX_TYPES
from multisample.backends.kernels.compilation import compile_cached, inline, source_digest
from multisample.backends.kernels.stream.arithmetic import fma
from multisample.backends.kernels.stream.rounding import NARROWING

from .addresses import numbers_at
from .intrinsics import (
    default_floats,
    has_default_floats,
    load_vector,
    prefetch,
    restore_floats,
    run_from,
    stack_array,
    store_vector,
)
from .tile import Tile, stream_of, tile_of

# Rows of a chunk, whose mu and sigma are copied to the stack.
_CHUNK = 4096
# Maximum rows of a tile that has several blocks down its rows.
_PACKED = 256
# Normals of shared noise that are drawn at a time.
_SHARED = 1 << 14
# Elements of short runs that are gathered in a buffer, well inside the first-level cache.
_GATHERED = 1 << 11
# Prefetch distance in bytes, for writes that the hardware prefetcher does not detect.
_AHEAD = 2048


@inline
def _copy(vector, first, count, to):
    """Copy elements of mu or sigma."""
    if vector.strides[0] == vector.itemsize:
        # LLVM makes vector loads of numbers that it knows to be adjacent.
        source = numbers_at(vector.ctypes.data + first * vector.itemsize, count, vector.dtype)
        for k in range(np.uint64(count)):
            to[k] = source[k]
    elif vector.strides[0] == 0:  # One number.
        number = vector[first]
        for k in range(np.uint64(count)):
            to[k] = number
    else:
        for k in range(count):
            to[k] = vector[first + k]


@inline
def clear(x, first, count):
    """Set elements to zero. A vector computes with those behind a run too, and is slow if they are subnormal."""
    for k in range(np.uint64(first), np.uint64(first + count)):
        x[k] = 0


@functools.cache
def _runs(lanes: int) -> tuple[Callable[..., Any], ...]:
    """Functions for runs of adjacent elements, in vectors: ``store`` and the values that it may store.

    ``store(value, operands, narrow, run, count)`` stores ``narrow(value(operands, k))`` at ``run[k]``. The run has at
    least one vector. Shorter runs than two vectors, if adjacent, are gathered in a buffer, in which each overwrites the
    excess of the vectors of the previous one. Then the buffer is stored as one run.
    """

    # Values of a row: noise, its first index, and mu and sigma as numbers.
    @inline
    def of_row(operands, k):
        z, at, m, s = operands
        return fma(s, load_vector(z, at + k, lanes), m)

    # Values of a column: noise, its first index, and mu and sigma as arrays.
    @inline
    def of_column(operands, k):
        z, at, m, s = operands
        return fma(load_vector(s, k, lanes), load_vector(z, at + k, lanes), load_vector(m, k, lanes))

    # Values of a column of shared noise: one normal, and mu and sigma as arrays.
    @inline
    def of_normal(operands, k):
        z, m, s = operands
        return fma(load_vector(s, k, lanes), z, load_vector(m, k, lanes))

    # Values of a buffer.
    @inline
    def gathered(x, k):
        return load_vector(x, k, lanes)

    @inline
    def store(value, operands, narrow, run, count):
        width, last = lanes * run.itemsize, count - lanes
        store_vector(run, 0, narrow(value(operands, 0)))
        # All vectors but the first and the last are aligned: a store across two cache lines takes longer.
        for k in range((width - run.ctypes.data % width) // run.itemsize, last, lanes):
            store_vector(run, k, narrow(value(operands, k)))
        store_vector(run, last, narrow(value(operands, last)))

    return store, of_row, of_column, of_normal, gathered


def _along(tile: Tile, narrow: Any, antithetic: bool) -> Callable[..., Any]:
    """``draw(mu, sigma, out, stream, first_row, first_column)``: independent noise where vectors hold columns."""
    lanes, most_places, width = tile.lanes, tile.places // 2, 8 if antithetic else 4
    short, noise = 2 * lanes, width * most_places + lanes
    words_length, layout_length, word_type = tile.words_length, tile.layout_length, tile.word_type
    lay_out, draw_row, draw_rows, put_normals = tile.lay_out_along, tile.draw_row, tile.draw_rows, tile.put_normals
    store, of_row, _, _, gathered = _runs(lanes)

    @inline
    def draw(mu, sigma, out, stream, first_row, first_column):
        rows, columns = out.shape
        skip, first_block = first_column % width, first_column // width
        blocks = (skip + columns + width - 1) // width
        # Long rows are divided evenly.
        tiles = (blocks + most_places - 1) // most_places
        tile_blocks = blocks if tiles == 1 else ((blocks + tiles - 1) // tiles + 7) // 8 * 8
        tile_rows = max(1, min(rows, most_places // blocks))
        words, layout = stack_array(words_length, word_type), stack_array(layout_length, np.uint64)
        z, x, nowhere = stack_array(noise, mu.dtype), stack_array(noise, mu.dtype), stack_array(1, out.dtype)
        has_unit_stride = out.strides[1] == out.itemsize
        is_short = columns < short and has_unit_stride and out.strides[0] == columns * out.itemsize
        for t in range(0, blocks, tile_blocks):
            part = min(tile_blocks, blocks - t)
            pitch, left, right = width * part, max(0, width * t - skip), min(columns, width * (t + part) - skip)
            count, shift = right - left, left + skip - width * t
            lay_out(layout, first_block + t, part, tile_rows * part, stream)
            for r in range(0, rows, tile_rows):
                height, run = min(tile_rows, rows - r), run_from(out, r, left, nowhere)
                if tile_rows == 1:
                    draw_row(words, layout, first_row + r, part, stream)
                else:
                    draw_rows(words, layout, first_row + r, height * part, stream)
                put_normals(z, 0, words, height * part, antithetic, run)
                if is_short and height * count >= lanes:
                    clear(z, height * pitch, lanes)
                    for k in range(height):
                        operands = z, shift + k * pitch, mu[r + k], sigma[r + k]
                        for c in range(0, count, lanes):
                            store_vector(x, k * count + c, of_row(operands, c))
                    store(gathered, x, narrow, run, height * count)
                elif has_unit_stride and count >= lanes:
                    for k in range(height):
                        operands = z, shift + k * pitch, mu[r + k], sigma[r + k]
                        store(of_row, operands, narrow, run_from(out, r + k, left, nowhere), count)
                else:
                    for k in range(height):
                        for c in range(count):
                            normal = z[shift + k * pitch + c]
                            out[r + k, left + c] = narrow(fma(sigma[r + k], normal, mu[r + k]))

    return draw


def _down(tile: Tile, narrow: Any, antithetic: bool) -> Callable[..., Any]:
    """The same where rows are adjacent and vectors hold rows."""
    lanes, most_places, width = tile.lanes, tile.places, 8 if antithetic else 4
    # Columns of a pair of normals, and of a normal.
    of_pair, of_normal, ahead = width // 2, width // 4, width // 2 * lanes
    short, noise, elements, padded = 2 * lanes, 4 * most_places + lanes, width * most_places + lanes, _PACKED + lanes
    words_length, layout_length, word_type = tile.words_length, tile.layout_length, tile.word_type
    lay_out, draw_block, draw_blocks, pair_at = tile.lay_out_down, tile.draw_block, tile.draw_blocks, tile.pair_at
    first_at, (store, _, of_column, _, gathered) = tile.first_at, _runs(lanes)

    @inline
    def pairs_of(block, skip, columns):
        """The first pair of a block that has columns in the window, and the pair after the last one."""
        begin = skip - width * block
        return max(0, begin) // of_pair, min(2, (begin + columns + of_pair - 1) // of_pair)

    @inline
    def draw_strips(mu, sigma, out, stream, first_row, skip, first_block, blocks):
        rows, columns = out.shape
        m, s = stack_array(_CHUNK, mu.dtype), stack_array(_CHUNK, mu.dtype)
        words, nowhere = stack_array(words_length, word_type), stack_array(most_places, out.dtype)
        # Rows are divided evenly. The last chunk ends where the rows end, the last strip where the chunk ends, and the
        # last vector where the strip ends: storing some elements twice is faster than a loop for the remainder.
        chunks = (rows + _CHUNK - 1) // _CHUNK
        chunk = (rows + chunks - 1) // chunks
        strips = (chunk + most_places - 1) // most_places
        strip = (chunk + strips - 1) // strips
        for r in range(0, rows, chunk):
            top = min(r, rows - chunk)
            _copy(mu, top, chunk, m)
            _copy(sigma, top, chunk, s)
            for b in range(blocks):
                first_pair, last_pair = pairs_of(b, skip, columns)
                for q in range(0, chunk, strip):
                    begin = min(q, chunk - strip)
                    i = top + begin
                    draw_block(words, first_block + b, first_row + i, strip, stream, True)
                    for pair in range(first_pair, last_pair):
                        c = width * b - skip + of_pair * pair
                        x, y = run_from(out, i, c, nowhere), run_from(out, i, c + of_normal, nowhere)
                        u, v = run_from(out, i, c + 1, nowhere), run_from(out, i, c + 3, nowhere)
                        for k in range(0, strip, lanes):
                            at = min(k, strip - lanes)
                            first, second = pair_at(words, pair, at)
                            scale, mean = load_vector(s, begin + at, lanes), load_vector(m, begin + at, lanes)
                            store_vector(x, at, narrow(fma(scale, first, mean)))
                            store_vector(y, at, narrow(fma(scale, second, mean)))
                            if antithetic:
                                store_vector(u, at, narrow(fma(scale, -first, mean)))
                                store_vector(v, at, narrow(fma(scale, -second, mean)))

    @inline
    def draw_firsts_of(mu, sigma, out, stream, first_row, block):
        """For the first column of a block alone, which is a quarter of the normals."""
        rows = out.shape[0]
        m, s = stack_array(most_places, mu.dtype), stack_array(most_places, mu.dtype)
        words, nowhere = stack_array(words_length, word_type), stack_array(most_places, out.dtype)
        for r in range(0, rows, most_places):
            # The last tile ends where the rows end.
            top, strip = max(0, min(r, rows - most_places)), min(most_places, rows)
            _copy(mu, top, strip, m)
            _copy(sigma, top, strip, s)
            draw_block(words, block, first_row + top, strip, stream, False)
            run = run_from(out, top, 0, nowhere)
            for k in range(0, strip, lanes):
                at = min(k, strip - lanes)
                value = fma(load_vector(s, at, lanes), first_at(words, at), load_vector(m, at, lanes))
                store_vector(run, at, narrow(value))

    @inline
    def draw_packed(mu, sigma, out, stream, first_row, skip, first_block, blocks):
        """For few rows: a tile has several blocks."""
        rows, columns = out.shape
        m, s, n = stack_array(padded, mu.dtype), stack_array(padded, mu.dtype), stack_array(padded, mu.dtype)
        z, x, nowhere = stack_array(noise, mu.dtype), stack_array(elements, mu.dtype), stack_array(1, out.dtype)
        words, layout = stack_array(words_length, word_type), stack_array(layout_length, np.uint64)
        tile_blocks = min(most_places // rows, blocks)
        is_short = rows < short and out.strides[1] == rows * out.itemsize
        _copy(mu, 0, rows, m)
        _copy(sigma, 0, rows, s)
        clear(m, rows, lanes)
        clear(s, rows, lanes)
        for k in range(rows + lanes):
            n[k] = -s[k]
        for k in range(4):
            clear(z, k * most_places + tile_blocks * rows, lanes)
        lay_out(layout, first_row, rows, tile_blocks * rows, stream)
        for t in range(0, blocks, tile_blocks):
            part = min(tile_blocks, blocks - t)
            left, right = max(0, width * t - skip), min(columns, width * (t + part) - skip)
            count, shift, run = right - left, left + skip - width * t, run_from(out, 0, left, nowhere)
            draw_blocks(words, layout, first_block + t, part * rows, stream)
            first_pair, last_pair = pairs_of(t, skip, columns) if part == 1 else (0, 2)
            for pair in range(first_pair, last_pair):
                for place in range(0, part * rows, lanes):
                    prefetch(run, of_pair * (pair * part * rows + place), ahead)
                    first, second = pair_at(words, pair, place)
                    store_vector(z, 2 * pair * most_places + place, first)
                    store_vector(z, (2 * pair + 1) * most_places + place, second)
            if is_short and rows * count >= lanes:
                # From the last vector of each column to its first one, which overwrites the excess of the others.
                for k in range((rows - 1) // lanes * lanes, -1, -lanes):
                    mean, scale = load_vector(m, k, lanes), load_vector(s, k, lanes)
                    for b in range(part):
                        for c in range(width):
                            normals = load_vector(z, c // of_normal * most_places + b * rows + k, lanes)
                            signed = -normals if antithetic and c % 2 == 1 else normals
                            store_vector(x, (b * width + c) * rows + k, fma(scale, signed, mean))
                store(gathered, x[shift * rows :], narrow, run, rows * count)
                continue
            for place in range(shift, shift + count):
                c, at = left + place - shift, place % width // of_normal * most_places + place // width * rows
                scales = n if antithetic and place % 2 == 1 else s
                if rows >= lanes:
                    store(of_column, (z, at, m, scales), narrow, run_from(out, 0, c, nowhere), rows)
                else:
                    for r in range(rows):
                        out[r, c] = narrow(fma(scales[r], z[at + r], m[r]))

    @inline
    def draw(mu, sigma, out, stream, first_row, first_column):
        rows, columns = out.shape
        skip, first_block = first_column % width, first_column // width
        blocks = (skip + columns + width - 1) // width
        if columns == 1 and skip == 0 and rows >= lanes:
            draw_firsts_of(mu, sigma, out, stream, first_row, first_block)
        elif rows > _PACKED or rows % lanes == 0:
            draw_strips(mu, sigma, out, stream, first_row, skip, first_block, blocks)
        else:
            draw_packed(mu, sigma, out, stream, first_row, skip, first_block, blocks)

    return draw


def _shared(tile: Tile, narrow: Any, antithetic: bool, down: bool) -> Callable[..., Any]:
    """The same with one row of noise for all rows. With `down`, rows are adjacent, and vectors hold rows."""
    lanes, most_places, width = tile.lanes, tile.places // 2, 8 if antithetic else 4
    short, most_blocks, noise, elements = 2 * lanes, _SHARED // width, _SHARED + lanes, _GATHERED + lanes
    words_length, layout_length, word_type = tile.words_length, tile.layout_length, tile.word_type
    lay_out, draw_row, put_normals = tile.lay_out_along, tile.draw_row, tile.put_normals
    store, of_row, _, of_normal, gathered = _runs(lanes)

    @inline
    def scale_rows(z, mu, sigma, out, left, count):
        rows, columns = out.shape
        x, nowhere = stack_array(elements, mu.dtype), stack_array(1, out.dtype)
        has_unit_stride = out.strides[1] == out.itemsize
        is_short = columns < short and has_unit_stride and out.strides[0] == columns * out.itemsize
        tile_rows = _GATHERED // columns if is_short else 1
        clear(z, count, lanes)
        for r in range(0, rows, tile_rows):
            height, run = min(tile_rows, rows - r), run_from(out, r, left, nowhere)
            if is_short and height * count >= lanes:
                for k in range(height):
                    prefetch(run, k * count, lanes)
                    for c in range(0, count, lanes):
                        store_vector(x, k * count + c, of_row((z, 0, mu[r + k], sigma[r + k]), c))
                store(gathered, x, narrow, run, height * count)
            elif has_unit_stride and count >= lanes:
                store(of_row, (z, 0, mu[r], sigma[r]), narrow, run, count)
            else:
                for k in range(height):
                    for c in range(count):
                        out[r + k, left + c] = narrow(fma(sigma[r + k], z[c], mu[r + k]))

    @inline
    def scale_columns(z, mu, sigma, out, left, count):
        rows = out.shape[0]
        m, s = stack_array(_CHUNK, mu.dtype), stack_array(_CHUNK, mu.dtype)
        x, nowhere = stack_array(elements, mu.dtype), stack_array(1, out.dtype)
        is_short = rows < short and out.strides[1] == rows * out.itemsize
        most, step, near = _GATHERED // rows if is_short else 4, out.strides[1] // out.itemsize, _AHEAD // out.itemsize
        # Chunks and vectors as in `draw_strips`.
        chunks = (rows + _CHUNK - 1) // _CHUNK
        chunk = (rows + chunks - 1) // chunks
        for r in range(0, rows, chunk):
            top = min(r, rows - chunk)
            _copy(mu, top, chunk, m)
            _copy(sigma, top, chunk, s)
            if is_short:
                clear(m, rows, lanes)
                clear(s, rows, lanes)
            for c in range(0, count, most):
                part, run = min(most, count - c), run_from(out, top, left + c, nowhere)
                if is_short and part * rows >= lanes:
                    for i in range((rows - 1) // lanes * lanes, -1, -lanes):
                        mean, scale = load_vector(m, i, lanes), load_vector(s, i, lanes)
                        for k in range(part):
                            prefetch(run, k * rows, lanes)
                            store_vector(x, k * rows + i, fma(scale, z[c + k], mean))
                    store(gathered, x, narrow, run, part * rows)
                elif chunk >= lanes and part == 4:
                    # Four columns share each read of mu and sigma.
                    z0, z1, z2, z3 = z[c], z[c + 1], z[c + 2], z[c + 3]
                    x1, x2 = run_from(out, top, left + c + 1, nowhere), run_from(out, top, left + c + 2, nowhere)
                    x3 = run_from(out, top, left + c + 3, nowhere)
                    for k in range(0, chunk, lanes):
                        at = min(k, chunk - lanes)
                        far = at + (near if at + near < chunk else near + 4 * step - chunk)
                        prefetch(run, far, lanes)
                        prefetch(x1, far, lanes)
                        prefetch(x2, far, lanes)
                        prefetch(x3, far, lanes)
                        store_vector(run, at, narrow(of_normal((z0, m, s), at)))
                        store_vector(x1, at, narrow(of_normal((z1, m, s), at)))
                        store_vector(x2, at, narrow(of_normal((z2, m, s), at)))
                        store_vector(x3, at, narrow(of_normal((z3, m, s), at)))
                elif chunk >= lanes:
                    for k in range(part):
                        store(of_normal, (z[c + k], m, s), narrow, run_from(out, top, left + c + k, nowhere), chunk)
                else:
                    for k in range(part):
                        for i in range(chunk):
                            out[top + i, left + c + k] = narrow(fma(s[i], z[c + k], m[i]))

    scale = scale_columns if down else scale_rows

    @inline
    def draw(mu, sigma, out, stream, first_row, first_column):
        columns = out.shape[1]
        skip, first_block = first_column % width, first_column // width
        blocks = (skip + columns + width - 1) // width
        words, layout = stack_array(words_length, word_type), stack_array(layout_length, np.uint64)
        z = stack_array(noise, mu.dtype)
        for t in range(0, blocks, most_blocks):
            last = min(t + most_blocks, blocks)
            for b in range(t, last, most_places):
                part = min(most_places, last - b)
                lay_out(layout, first_block + b, part, part, stream)
                draw_row(words, layout, 0, part, stream)
                put_normals(z, width * (b - t), words, part, antithetic, z)
            left, right = max(0, width * t - skip), min(columns, width * last - skip)
            of_window = z[left + skip - width * t :]
            scale(of_window, mu, sigma, out, left, right - left)

    return draw


@inline
def _valid(mu, sigma):
    """Whether every mean is finite, and every standard deviation finite and not negative."""
    if mu.strides[0] == mu.itemsize and sigma.strides[0] == sigma.itemsize:
        numbers = numbers_at(mu.ctypes.data, mu.size, mu.dtype)
        return _all_valid(numbers, numbers_at(sigma.ctypes.data, sigma.size, sigma.dtype))
    return _all_valid(mu, sigma)


@inline
def _all_valid(mu, sigma):
    valid = True
    for k in range(np.uint64(mu.size)):
        valid &= -math.inf < mu[k] < math.inf
    for k in range(np.uint64(sigma.size)):
        valid &= 0 <= sigma[k] < math.inf
    return valid


def _window_function(dtype: str, shared_noise: bool, antithetic: bool, down: bool) -> Callable[..., Any]:
    # Numba treats variables of the closure as constants.
    tile, narrow = tile_of(MATRIX_TYPES[dtype].computing), NARROWING[dtype]
    if shared_noise:
        fill = _shared(tile, narrow, antithetic, down)
    else:
        fill = (_down if down else _along)(tile, narrow, antithetic)

    def draw(mu, sigma, out, seed, offset, i, j):
        before = default_floats()
        if out.shape[0] > 0 and out.shape[1] > 0:
            fill(mu, sigma, out, stream_of(seed, offset), i, j)
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
    return vector, vector, _array(element, 2), *[types.uint64] * 2, *[types.int64] * 2


@intrinsic
def call_window(typingctx: Any, kernel: Any, vectors: Any, matrix: Any, words: Any) -> Any:
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
        ]
        function = context.call_conv.get_function_type(types.none, parameters)
        callee = builder.inttoptr(args[0], function.as_pointer())
        context.call_conv.call_function(builder, callee, types.none, parameters, values)
        return context.get_dummy_value()

    integers = [types.UniTuple(types.int64, count) for count in (5, 6, 4)]
    return types.none(types.int64, *integers), codegen


def _check(mu, sigma, weights):
    return has_default_floats() and _valid(mu, sigma) and (weights is None or _valid(weights, sigma[:0]))


def _compiled(signature: Any, function: Callable[..., Any], name: str) -> Callable[..., Any]:
    kernel: Callable[..., Any] = compile_cached(signature, function, f"cpu-{name}", source_digest()).entry_point
    return kernel


@functools.cache
def window_kernel(dtype: str, shared_noise: bool, antithetic: bool, down: bool) -> CompileResult:
    """``kernel(mu, sigma, out, seed, offset, first_row, first_column)`` draws the window `out`.

    With `antithetic`, the columns of `out` and `first_column` count both halves of each pair. The window begins at row
    `first_row` and column `first_column` of the sample matrix. `down` is `launch.runs_down`. The kernel is the result's
    `entry_point`, or its `address_of`, for `call_window`.
    """
    name = f"cpu-draw_{dtype}{'_shared' * shared_noise}{'_antithetic' * antithetic}{'_down' * down}"
    function = _window_function(dtype, shared_noise, antithetic, down)
    return compile_cached(types.void(*window_parameters(dtype)), function, name, source_digest())


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
