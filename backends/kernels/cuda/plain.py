"""The plain kernels, kPlain and kPlainTransposed: ``csrc/cuda/plain.cuh`` explains them."""

from __future__ import annotations

import functools
from types import ModuleType

import numpy as np

from multisample.backends.element_types import SIZES, ElementType
from multisample.backends.kernels.compilation import Function, inline
from multisample.backends.kernels.stream.arithmetic import from_float_bits
from multisample.backends.kernels.stream.words import row_part

from .geometry import PLAIN_TRANSPOSED_THREADS
from .group import computing_type, each, group_width, inside, keys_of, mu_of, noise, offset_of, place, scaled, sigma_of
from .kernel_choice import own_rows_of
from .stores import MOST_STORED, aligned, strided


@inline
def _quotient(n, geometry):
    """The quotient n / blocks_per_band with kPlain, n / pieces with kPlainTransposed: see ``Geometry`` in C++."""
    return np.uint32(np.uint64(n) * np.uint64(geometry.one_by_units) >> np.uint64(geometry.units_shift))


@functools.cache
def _operand(gpu: ModuleType, dtype: str) -> Function:
    """``value(vector, row)``: an element of mu or sigma, which is a number or a vector of `dtype`'s computing type."""
    load, (real, _), number = gpu.load, computing_type(dtype), int(ElementType.number)

    @inline
    def value(vector, row):
        if vector.type == number:
            return real(from_float_bits(vector.input))
        return load(vector.input + row * vector.stride, real)

    return value


def plain_kernel(gpu: ModuleType, dtype: str, shared_noise: bool, antithetic: bool, fast: bool) -> Function:
    """``kernel(call, geometry)``: see `multisample.backends.kernels.cuda.kernel.sample_kernel`."""
    size, width, at_once = SIZES[dtype], group_width(antithetic), 1 if dtype == "float64" else 4
    block_index, place_of, offset_of_call = gpu.block_index, place(gpu), offset_of(gpu)
    prepared, in_row, *_ = noise(gpu, dtype, shared_noise, fast)
    elements, value = scaled(gpu, dtype, antithetic), _operand(gpu, dtype)
    put_aligned, put_strided = aligned(gpu, size, width, 4), strided(gpu, width)
    quad, every = min(4 * size, MOST_STORED), (np.int64(size), np.int32(0), np.int32(width))
    values = each(range(at_once), lambda r: lambda vector, row, apart, last: value(vector, min(row + r * apart, last)))

    def drawing(r: int) -> Function:
        def draw(mu, sigma, row, at, turns, own, stores, call):
            columns_noise, keys, offset = own
            is_aligned, is_adjacent, apart, step, first, last = stores
            here = row + r * apart
            if turns > r and here < call.rows:
                words = row_part(np.uint32(call.first_row + here), offset, keys[0])
                x = elements(mu[r], sigma[r], in_row(columns_noise, words, keys))
                if is_aligned:
                    put_aligned(at + r * step, x, 0)
                elif is_adjacent:
                    put_strided(at + r * step, x, every)
                else:
                    put_strided(at + r * step, x, (call.column_stride, first, last))

        return draw

    draw_rows = each(range(at_once), drawing)

    def kernel(call, geometry):
        block = block_index()
        band = _quotient(block, geometry)
        tile = np.uint32(block - band * geometry.blocks_per_band)
        row_of_pass, group = place_of(tile, geometry)
        first, last = inside(width, (row_of_pass, group), call, geometry)
        if first >= last:
            return
        own = (
            prepared(np.uint32(call.first_column // width + group), call),
            keys_of(call),
            np.uint32(offset_of_call(call)),
        )
        apart, turns = np.int64(geometry.rows_per_pass), np.int64(geometry.turns)
        row = np.int64(band) * (turns * apart) + row_of_pass
        step = call.row_stride * apart
        at = call.matrix + row * call.row_stride + (width * group - geometry.skip) * call.column_stride
        is_adjacent = first == 0 and last == width and call.column_stride == size
        stores = is_adjacent and (at | step) % quad == 0, is_adjacent, apart, step, first, last
        while turns > 0:
            # All loads come first: the thread then waits for memory once.
            last_row = call.rows - 1
            mu, sigma = values(mu_of(call), row, apart, last_row), values(sigma_of(call), row, apart, last_row)
            draw_rows(mu, sigma, row, at, turns, own, stores, call)
            row += at_once * apart
            at += at_once * step
            turns -= at_once

    return kernel


def plain_transposed_kernel(gpu: ModuleType, dtype: str, shared_noise: bool, antithetic: bool, fast: bool) -> Function:
    """``kernel(call, geometry)``: see `multisample.backends.kernels.cuda.kernel.sample_kernel`."""
    size, width = SIZES[dtype], group_width(antithetic)
    own_rows = own_rows_of(size)
    block_index, thread_index, store, store_vector = gpu.block_index, gpu.thread_index, gpu.store, gpu.store_vector
    prepared, in_row, *_ = noise(gpu, dtype, shared_noise, fast)
    elements, value, offset_of_call = scaled(gpu, dtype, antithetic), _operand(gpu, dtype), offset_of(gpu)
    rows_from = each(range(own_rows), lambda r: lambda row, count: row + (r if r < count else 0))
    values = each(range(own_rows), lambda r: lambda vector, rows: value(vector, rows[r]))
    parts = each(
        range(own_rows),
        lambda r: lambda rows, offset, call, key: row_part(np.uint32(call.first_row + rows[r]), offset, key),
    )

    def drawing(r: int) -> Function:
        return lambda words, mu, sigma, made, keys: elements(mu[r], sigma[r], in_row(made, words[r], keys))

    def column(c: int) -> tuple[Function, Function]:
        piece_of = each(range(own_rows), lambda r: lambda x: x[r][c])

        def one(r: int) -> Function:
            def put(at, x, count):
                if r < count:
                    store(at + r * size, x[r][c])

            return put

        put_each = each(range(own_rows), one)

        def put_whole(at, stride, x):
            store_vector(at + c * stride, piece_of(x))

        def put_some(at, stride, x, first, count, columns):
            if first + c >= 0 and first + c < columns:
                put_each(at + c * stride, x, count)

        return put_whole, put_some

    draw_rows = each(range(own_rows), drawing)
    columns = [column(c) for c in range(width)]
    put_whole, put_some = each(range(width), lambda c: columns[c][0]), each(range(width), lambda c: columns[c][1])

    def kernel(call, geometry):
        thread = np.uint32(block_index() * np.uint32(PLAIN_TRANSPOSED_THREADS) + thread_index())
        turn = _quotient(thread, geometry)
        first_row = np.int64(np.uint32(thread - turn * geometry.pieces)) * own_rows
        group, stride = np.int64(turn) * geometry.turns, call.column_stride
        column = width * group - np.int64(geometry.skip)
        if column >= call.columns:
            return
        count = min(call.rows - first_row, own_rows)
        rows, keys = rows_from(first_row, count), keys_of(call)
        mu, sigma = values(mu_of(call), rows), values(sigma_of(call), rows)
        words = parts(rows, np.uint32(offset_of_call(call)), call, keys[0])
        at = call.matrix + first_row * size + column * stride
        is_aligned = count == own_rows and (at | stride) % (own_rows * size) == 0 and column >= 0
        end = min(call.columns, column + width * np.int64(geometry.turns))
        while column < end:
            made = prepared(np.uint32(call.first_column // width + group), call)
            x = draw_rows(words, mu, sigma, made, keys)
            if is_aligned and column + width <= end:
                put_whole(at, stride, x)
            else:
                put_some(at, stride, x, column, count, call.columns)
            column += width
            at += width * stride
            group += 1

    return kernel
