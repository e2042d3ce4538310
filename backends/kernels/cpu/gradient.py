"""The gradient on the CPU: grad_mu[i] = sum_j grad[i, j] and grad_sigma[i] = sum_j grad[i, j] z[i, j].

The noise is drawn again, by tiles. A row is cut into segments of a fixed length, and the order of its sums depends on
the launch alone, so that any number of threads gives the same bits. Float32 sums have at most 16 terms before they are
added to a float64 sum.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from multisample.backends.element_types import MATRIX_TYPES
from multisample.backends.kernels.compilation import callee, inline
from multisample.backends.kernels.stream.arithmetic import fma
from multisample.backends.kernels.stream.rounding import WIDENING, unchanged
from multisample.backends.kernels.stream.vectors import converted, in_every_lane, lane_numbers, lane_sum, select

from .addresses import copier, numbers_at
from .fields import HALF, LAUNCH_WORDS, WORD, half, numbers_of
from .helper_threads import for_each, threads_for
from .intrinsics import load_vector, stack_array, store_vector
from .kernel import clear
from .moments import allocate, free
from .thread_windows import most_threads
from .tile import stream_of, tile_of

# Columns of a segment, and terms of a sum in the computing type.
_SEGMENT, _CHAIN = 1 << 12, 16
# Minimum elements of a part.
_PART = 1 << 15
# Vectors hold rows if there are at least so many rows, which are adjacent in memory or have few columns.
_MANY_ROWS, _FEW_COLUMNS = 64, 16


def _part_function(dtype: str) -> Callable[..., Any]:
    """``sum_part(arguments, part)``, for `for_each`.

    `arguments` are the address of the launch, that of an array for the sums of segments, or 0 if there is one, the rows
    of a part, and the number of segments.
    """
    kinds = MATRIX_TYPES[dtype]
    number, element, size, widen = getattr(np, kinds.computing), getattr(np, kinds.stored), kinds.size, WIDENING[dtype]
    tile, real_size = tile_of(kinds.computing), np.dtype(kinds.computing).itemsize
    lanes, most_places, load_run = tile.lanes, tile.places, copier(dtype)
    words_length, layout_length, word_type = tile.words_length, tile.layout_length, tile.word_type
    lay_out, draw_row, draw_rows, put_normals = tile.lay_out_along, tile.draw_row, tile.draw_rows, tile.put_normals
    draw_block, pair_at = tile.draw_block, tile.pair_at
    most_blocks, noise, shared_noise = most_places // 2, 4 * most_places + lanes, _SEGMENT + 8 * lanes
    # Arrays of sums have those of grad_mu, then those of grad_sigma.
    both, grads = 2 * most_places, 4 * most_places

    @inline
    def filled(x):
        return in_every_lane((x,), lanes)[0]

    @inline
    def add_vectors(totals, r, run, convert, z, place, count):
        """Add the sums of a run, which is at least a vector, to those of row `r`."""
        total, products = converted(filled(number(0)), np.float64), converted(filled(number(0)), np.float64)
        for begin in range(0, count, _CHAIN * lanes):
            p, q = filled(number(0)), filled(number(0))
            for k in range(begin, min(count, begin + _CHAIN * lanes), lanes):
                # The last vector ends where the run ends. Elements of the vector before it do not count.
                at = min(k, count - lanes)
                g = convert(load_vector(run, at, lanes))
                if at < k:
                    g = select(lane_numbers(np.int64, lanes) > filled(k - at - 1), g, filled(number(0)))
                p, q = p + g, fma(g, load_vector(z, place + at, lanes), q)
            total, products = total + converted(p, np.float64), products + converted(q, np.float64)
        totals[r] += lane_sum(total)
        totals[most_places + r] += lane_sum(products)

    @inline
    def add_run(totals, r, x, source, stride, z, place, count):
        """The same for elements `stride` bytes apart; `x` is a buffer."""
        if stride == size and count >= lanes:
            add_vectors(totals, r, numbers_at(source, count, element), widen, z, place, count)
        else:
            load_run(x, source, stride, count)
            for c in range(count, lanes):
                x[c] = 0
            add_vectors(totals, r, x, unchanged, z, place, max(count, lanes))

    @inline
    def sum_shared(totals, source, row_stride, column_stride, rows, columns, position, stream, antithetic):
        """The sums of shared noise."""
        width = 8 if antithetic else 4
        place, first, z = position % width, position // width, stack_array(shared_noise, number)
        blocks = (place + columns + width - 1) // width
        words, layout = stack_array(words_length, word_type), stack_array(layout_length, np.uint64)
        for t in range(0, blocks, most_blocks):
            part = min(most_blocks, blocks - t)
            lay_out(layout, first + t, part, part, stream)
            draw_row(words, layout, 0, part, stream)
            put_normals(z, width * t, words, part, antithetic, z)
        store_vector(z, place + columns, filled(number(0)))
        if row_stride == size and rows >= lanes:
            for v in range(0, rows, lanes):
                # The last vector ends where the rows end.
                r = min(v, rows - lanes)
                total, products = converted(filled(number(0)), np.float64), converted(filled(number(0)), np.float64)
                for begin in range(0, columns, _CHAIN):
                    p, q = filled(number(0)), filled(number(0))
                    for c in range(begin, min(columns, begin + _CHAIN)):
                        run = numbers_at(source + r * size + c * column_stride, lanes, element)
                        g = widen(load_vector(run, 0, lanes))
                        p, q = p + g, fma(g, filled(z[place + c]), q)
                    total, products = total + converted(p, np.float64), products + converted(q, np.float64)
                store_vector(totals, r, total)
                store_vector(totals, most_places + r, products)
        else:
            x = stack_array(shared_noise, number)
            for r in range(rows):
                add_run(totals, r, x, source + r * row_stride, column_stride, z, place, columns)

    @inline
    def sum_along(totals, source, row_stride, column_stride, rows, columns, i, position, stream, antithetic):
        """The sums where vectors hold columns."""
        width = 8 if antithetic else 4
        skip, first = position % width, position // width
        blocks = (skip + columns + width - 1) // width
        tile_rows = max(1, min(rows, most_blocks // blocks))
        words, layout = stack_array(words_length, word_type), stack_array(layout_length, np.uint64)
        z, x = stack_array(noise, number), stack_array(noise, number)
        for t in range(0, blocks, most_blocks):
            part = min(most_blocks, blocks - t)
            left, right = max(0, width * t - skip), min(columns, width * (t + part) - skip)
            count, shift = right - left, left + skip - width * t
            lay_out(layout, first + t, part, tile_rows * part, stream)
            for r in range(0, rows, tile_rows):
                height, at = min(tile_rows, rows - r), source + r * row_stride + left * column_stride
                if tile_rows == 1:
                    draw_row(words, layout, i + r, part, stream)
                else:
                    draw_rows(words, layout, i + r, height * part, stream)
                put_normals(z, 0, words, height * part, antithetic, x)
                # A vector also reads normals behind a run, and multiplies them by zero.
                store_vector(z, height * part * width, filled(number(0)))
                for k in range(height):
                    place = shift + k * part * width
                    add_run(totals, r + k, x, at + k * row_stride, column_stride, z, place, count)

    @inline
    def sum_down(totals, source, row_stride, column_stride, rows, columns, i, position, stream, antithetic):
        """The sums where vectors hold rows, at least one vector of them."""
        width = 8 if antithetic else 4
        skip, first, of_pair, of_normal = position % width, position // width, width // 2, width // 4
        blocks = (skip + columns + width - 1) // width
        words, x = stack_array(words_length, word_type), stack_array(grads, number)
        # The last vector ends where the rows end. A row in two vectors has a place, and the same sum, in each.
        sums, parts = stack_array(both, np.float64), stack_array(both, number)
        for g in range(0, blocks, _CHAIN // width):
            last = min(blocks, g + _CHAIN // width)
            for place in range(0, rows, lanes):
                store_vector(parts, place, filled(number(0)))
                store_vector(parts, most_places + place, filled(number(0)))
            for b in range(g, last):
                draw_block(words, first + b, i, rows, stream, True)
                for pair in range(2):
                    c = width * b - skip + of_pair * pair
                    if c + of_pair <= 0 or c >= columns:
                        continue
                    for k in range(of_pair):
                        column = x[k * most_places : (k + 1) * most_places]
                        if 0 <= c + k < columns:
                            load_run(column, source + (c + k) * column_stride, row_stride, rows)
                        else:
                            clear(column, 0, rows)
                    for place in range(0, rows, lanes):
                        r = min(place, rows - lanes)
                        normals = pair_at(words, pair, r)
                        p, s = load_vector(parts, place, lanes), load_vector(parts, most_places + place, lanes)
                        for n in range(2):
                            column = load_vector(x, n * of_normal * most_places + r, lanes)
                            p, s = p + column, fma(column, normals[n], s)
                            if antithetic:
                                column = load_vector(x, (2 * n + 1) * most_places + r, lanes)
                                p, s = p + column, fma(-column, normals[n], s)
                        store_vector(parts, place, p)
                        store_vector(parts, most_places + place, s)
            for place in range(0, rows, lanes):
                for k in range(2):
                    at = k * most_places + place
                    total = converted(load_vector(parts, at, lanes), np.float64)
                    if g > 0:
                        total = load_vector(sums, at, lanes) + total
                    if last == blocks:
                        store_vector(totals, k * most_places + min(place, rows - lanes), total)
                    else:
                        store_vector(sums, at, total)

    def sum_part(arguments, index):
        address, of_segments, height, segments = arguments
        launch = numbers_at(address, LAUNCH_WORDS, np.int64)
        rows, columns = launch[WORD.rows], launch[WORD.columns]
        row_stride, column_stride = launch[WORD.row_stride], launch[WORD.column_stride]
        bands = (rows + height - 1) // height
        segment, b = index % segments, index // segments // bands
        # The last band ends where the rows end. Two bands may compute and store the same sums.
        top = min(index // segments % bands * height, rows - height)
        antithetic, is_shared = half(launch, HALF.antithetic) != 0, half(launch, HALF.shared_noise) != 0
        seed, offset, first_row, first_column = numbers_of(launch, b)
        skip = first_column % (8 if antithetic else 4)
        left, right = max(0, segment * _SEGMENT - skip), min(columns, (segment + 1) * _SEGMENT - skip)
        source = launch[WORD.matrix] + b * launch[WORD.matrix_step] + top * row_stride + left * column_stride
        stream, position, count = stream_of(np.uint64(seed), np.uint64(offset)), first_column + left, right - left
        totals = stack_array(both, np.float64)
        for r in range(height):
            totals[r] = totals[most_places + r] = 0.0
        band = (
            totals, source, row_stride, column_stride, height, count, first_row + top, position, stream, antithetic,
        )  # fmt: skip
        if is_shared:
            sum_shared(totals, source, row_stride, column_stride, height, count, position, stream, antithetic)
        elif rows >= _MANY_ROWS and (row_stride == size or columns <= _FEW_COLUMNS):
            sum_down(*band)
        else:
            sum_along(*band)
        for k in range(2):
            to = launch[WORD.second if k else WORD.first]
            if of_segments != 0:
                at = of_segments + 8 * (((b * segments + segment) * 2 + k) * rows + top)
                sums = numbers_at(at, height, np.float64)
                for r in range(height):
                    sums[r] = totals[k * most_places + r]
            else:
                result = numbers_at(to + b * launch[WORD.result_step] + top * real_size, height, number)
                for r in range(height):
                    result[r] = number(totals[k * most_places + r])

    return sum_part


def gradient_function(dtype: str) -> Callable[..., Any]:
    """The gradient of matrices of type `dtype`, of any strides."""
    sum_part = callee(_part_function(dtype), f"cpu-sum_part_{dtype}_gradient")
    real = MATRIX_TYPES[dtype].computing
    number, most_rows = getattr(np, real), tile_of(real).places

    def sum_all(address):
        launch = numbers_at(address, LAUNCH_WORDS, np.int64)
        rows, columns, batch = launch[WORD.rows], launch[WORD.columns], max(half(launch, HALF.batch), 1)
        # No segment more than there are if the first one begins at the last column of a block.
        segments = (columns + 6 + _SEGMENT) // _SEGMENT
        threads = threads_for(most_threads(batch * rows * columns), launch[WORD.threads])
        even = (batch * rows * segments + 4 * threads - 1) // (4 * threads)
        least = max(_MANY_ROWS, _PART // min(columns, _SEGMENT))
        height = min(rows, most_rows, max(even, least) if threads > 1 else rows)
        totals = 0
        if segments > 1:
            totals = allocate(2 * batch * segments * rows, 8)
            if totals == 0:
                return 1
        for_each(
            sum_part, (address, totals, height, segments), batch * segments * ((rows + height - 1) // height), threads
        )
        if totals != 0:
            for b in range(batch):
                for k in range(2):
                    to = launch[WORD.second if k else WORD.first]
                    result = numbers_at(to + b * launch[WORD.result_step], rows, number)
                    for r in range(rows):
                        total = 0.0
                        for segment in range(segments):
                            at = totals + 8 * (((b * segments + segment) * 2 + k) * rows + r)
                            total += numbers_at(at, 1, np.float64)[0]
                        result[r] = number(total)
            free(totals)
        return 0

    return sum_all
