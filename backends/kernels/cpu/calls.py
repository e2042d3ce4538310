"""Calls on host memory as C functions, for threads that cannot wait for the interpreter: XLA's.

`draw_function` and `gradient_function` are twins of ``multisample_run_cpu`` in ``csrc/torch/cpu.cpp``. One compiled
function serves all types: it calls kernels by their addresses, which `prepare` writes to a table that compiled code
knows by name.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numpy as np
from numba import types

from multisample.backends.draw import OFFSETS_BYTES, SEED_BYTES, Batched
from multisample.backends.element_types import ElementType
from multisample.backends.kernels.compilation import cached, inline, source_digest
from multisample.backends.kernels.stream.arithmetic import fma
from multisample.backends.kernels.stream.rounding import from_bfloat16, from_float16, unchanged
from multisample.backends.system.threads import configured_threads

from .addresses import c_address, call_window, numbers_at, symbol, word_at
from .division import SHARE, most_threads, window_of, window_shape, windows
from .draw_words import (
    BATCHED,
    COLUMN_STRIDE,
    COLUMNS,
    COMMON_NOISE_AND_ANTITHETIC,
    DRAW,
    FIRST,
    FIRST_COLUMN,
    FIRST_ROW,
    LOW,
    MATRIX,
    MOMENTS,
    MU,
    OFFSET,
    ROW_STRIDE,
    ROWS,
    SECOND,
    SEED,
    SIGMA,
    THREADS_AND_BATCH,
    TYPE_AND_OPERATION,
    WEIGHTS,
)
from .intrinsics import integers_at, stack_array, use_widest_vectors
from .kernel import window_address
from .moments import FEW_ROWS, MOST_ROWS, PIECE, ROUND, list_function, sum_function
from .threads import SLOTS_LENGTH, for_each, helpers

__all__ = ["compile_all", "draw_function", "gradient_function", "moments_function", "prepare", "prepare_threads"]

# The table: the address of the helpers' slots, the most threads of a call, and window kernels by type and antithetic.
_SLOTS, _THREADS, _KERNELS, _TABLE = 0, 1, 2, 2 + 2 * (max(ElementType) + 1)
_table = np.zeros(_TABLE, np.int64)
llvmlite.binding.add_symbol("multisample_cpu_table", _table.ctypes.data)

_FLOAT16, _BFLOAT16, _FLOAT64 = (int(ElementType[name]) for name in ("float16", "bfloat16", "float64"))
_FLOAT32 = int(ElementType.float32)
_OF_MU, _OF_SIGMA, _OF_SEED, _OF_OFFSETS = (int(flag) for flag in Batched)

_allocate = types.ExternalFunction("PyMem_RawCalloc", types.int64(types.int64, types.int64))
_free = types.ExternalFunction("PyMem_RawFree", types.void(types.int64))

# A gradient draws the noise of a tile at a time: rows at the most, and elements.
_TILE_ROWS, _TILE = 64, 1 << 12
# Sums side by side, and the terms of each before they are added to a sum of float64.
_SUMS, _CHAIN = 16, 16
_REALS = ("float32", "float64")
_MOST_SUMS = 2 * MOST_ROWS


@inline
def _number(draw, place, step):
    """A `Word` of a draw, whose address moves by `step`."""
    address = draw[place + 1]
    return word_at(address + step) if address != 0 else draw[place]


@inline
def _words(draw, b):
    """Seed, offset, first row and first column of matrix `b` of a batch."""
    seed_step = b * SEED_BYTES if draw[BATCHED] & _OF_SEED else 0
    step = b * OFFSETS_BYTES if draw[BATCHED] & _OF_OFFSETS else 0
    seed = _number(draw, SEED, seed_step)
    if draw[SEED + 1] != 0:  # Its high half is first.
        seed = seed << 32 | (seed >> 32 & LOW)
    return seed, _number(draw, OFFSET, step), _number(draw, FIRST_ROW, step), _number(draw, FIRST_COLUMN, step)


@inline
def _sizes(draw):
    """Bytes of a number of the computing type, and of an element."""
    kind = draw[TYPE_AND_OPERATION] & LOW
    if kind == _FLOAT64:
        return 8, 8
    return 4, 2 if kind in (_FLOAT16, _BFLOAT16) else 4


@inline
def _draw_window(draw, kernel, b, top, bottom, left, right):
    """Draw a window of matrix `b`."""
    real, size = _sizes(draw)
    rows, columns, row_stride, column_stride = draw[ROWS], draw[COLUMNS], draw[ROW_STRIDE], draw[COLUMN_STRIDE]
    mu = draw[MU] + draw[MU + 1] * (top + (b * rows if draw[BATCHED] & _OF_MU else 0))
    sigma = draw[SIGMA] + draw[SIGMA + 1] * (top + (b * rows if draw[BATCHED] & _OF_SIGMA else 0))
    matrix = draw[MATRIX] + b * rows * columns * size + top * row_stride + left * column_stride
    seed, offset, first_row, first_column = _words(draw, b)
    call_window(
        kernel, (mu, sigma, draw[MU + 1], draw[SIGMA + 1], real),
        (matrix, bottom - top, right - left, row_stride, column_stride, size),
        (seed, offset, first_row + top, first_column + left), draw[COMMON_NOISE_AND_ANTITHETIC] & LOW != 0,
    )  # fmt: skip


def _draw_matrix(arguments, b):
    address, kernel = arguments
    draw = integers_at(address, DRAW)
    _draw_window(draw, kernel, b, 0, draw[ROWS], 0, draw[COLUMNS])


def _draw_part(arguments, index):
    address, kernel, b, skip, height, width, across = arguments
    draw = integers_at(address, DRAW)
    top, bottom, left, right = window_of(index, draw[ROWS], draw[COLUMNS], skip, height, width, across)
    _draw_window(draw, kernel, b, top, bottom, left, right)


def _band_function(real: str) -> Callable[..., Any]:
    number, size = getattr(np, real), np.dtype(real).itemsize
    zero, one = number(0), number(1)

    @inline
    def load(widen, element, x, matrix, rows, columns, row_stride, column_stride):
        """Copy a tile to `x`, its rows one after another. One of the strides is that of neighbours in memory."""
        if row_stride > column_stride:
            for r in range(rows):
                row = numbers_at(matrix + r * row_stride, columns, element)
                to = x[r * columns : (r + 1) * columns]
                for c in range(columns):
                    to[c] = widen(row[c])
        else:
            for c in range(columns):
                column = numbers_at(matrix + c * column_stride, rows, element)
                for r in range(rows):
                    x[r * columns + c] = widen(column[r])

    @inline
    def load_any(kind, x, matrix, rows, columns, row_stride, column_stride):
        if size == 8:
            load(unchanged, np.float64, x, matrix, rows, columns, row_stride, column_stride)
        elif kind == _FLOAT32:
            load(unchanged, np.float32, x, matrix, rows, columns, row_stride, column_stride)
        elif kind == _FLOAT16:
            load(from_float16, np.uint16, x, matrix, rows, columns, row_stride, column_stride)
        else:
            load(from_bfloat16, np.uint16, x, matrix, rows, columns, row_stride, column_stride)

    def sum_band(arguments, index):
        use_widest_vectors()
        address, kernel, band, width = arguments
        draw = integers_at(address, DRAW)
        rows, columns, row_stride, column_stride = draw[ROWS], draw[COLUMNS], draw[ROW_STRIDE], draw[COLUMN_STRIDE]
        kind, bands = draw[TYPE_AND_OPERATION] & LOW, (rows + band - 1) // band
        b, top = index // bands, index % bands * band
        height = min(band, rows - top)
        matrix = draw[MATRIX] + b * rows * columns * _sizes(draw)[1] + top * row_stride
        seed, offset, first_row, first_column = _words(draw, b)
        x, z = stack_array(_TILE, number), stack_array(_TILE, number)
        zeros, ones = stack_array(_TILE_ROWS, number), stack_array(_TILE_ROWS, number)
        sums, products = stack_array(_TILE_ROWS, np.float64), stack_array(_TILE_ROWS, np.float64)
        lanes, product_lanes = stack_array(_SUMS, number), stack_array(_SUMS, number)
        for r in range(height):
            zeros[r], ones[r], sums[r], products[r] = zero, one, 0.0, 0.0
        for left in range(0, columns, width):
            count = min(width, columns - left)
            call_window(
                kernel, (zeros.ctypes.data, ones.ctypes.data, size, size, size),
                (z.ctypes.data, height, count, count * size, size, size),
                (seed, offset, first_row + top, first_column + left), draw[COMMON_NOISE_AND_ANTITHETIC] & LOW != 0,
            )  # fmt: skip
            load_any(kind, x, matrix + left * column_stride, height, count, row_stride, column_stride)
            for r in range(height):
                of_row, noise = x[r * count : (r + 1) * count], z[r * count : (r + 1) * count]
                for chain in range(0, count, _SUMS * _CHAIN):
                    end = min(chain + _SUMS * _CHAIN, count)
                    whole = chain + (end - chain) // _SUMS * _SUMS
                    for lane in range(_SUMS):
                        lanes[lane] = product_lanes[lane] = zero
                    for k in range(np.uint64(chain), np.uint64(whole), np.uint64(_SUMS)):
                        for lane in range(np.uint64(_SUMS)):
                            lanes[lane] += of_row[k + lane]
                            product_lanes[lane] = fma(of_row[k + lane], noise[k + lane], product_lanes[lane])
                    for k in range(whole, end):
                        lanes[k - whole] += of_row[k]
                        product_lanes[k - whole] = fma(of_row[k], noise[k], product_lanes[k - whole])
                    for lane in range(_SUMS):
                        sums[r] += np.float64(lanes[lane])
                        products[r] += np.float64(product_lanes[lane])
        of_mu = numbers_at(draw[MU] + (b * rows + top) * size, height, number)
        of_sigma = numbers_at(draw[SIGMA] + (b * rows + top) * size, height, number)
        for r in range(height):
            of_mu[r], of_sigma[r] = number(sums[r]), number(products[r])

    return sum_band


@inline
def _threads(draw, table, most):
    """How many threads a call gets that has work for `most`."""
    limit = draw[THREADS_AND_BATCH] & LOW
    return min(most, table[_THREADS], limit if limit != 0 else most)


def _draw_function() -> Callable[..., Any]:
    names = {"cpu-draw_matrix": _draw_matrix, "cpu-draw_part": _draw_part}
    draw_matrix, draw_part = (cached(function, name, source_digest()) for name, function in names.items())

    def draw_all(address):
        draw, table = integers_at(address, DRAW), integers_at(symbol("multisample_cpu_table"), _TABLE)
        slots = integers_at(table[_SLOTS], SLOTS_LENGTH)
        rows, columns, batch = draw[ROWS], draw[COLUMNS], max(draw[THREADS_AND_BATCH] >> 32, 1)
        common_noise = draw[COMMON_NOISE_AND_ANTITHETIC] & LOW != 0
        antithetic = draw[COMMON_NOISE_AND_ANTITHETIC] >> 32
        kernel = table[_KERNELS + 2 * (draw[TYPE_AND_OPERATION] & LOW) + antithetic]
        most = most_threads(rows, columns, common_noise)
        if most == 1 or (batch > 1 and rows * columns <= 2 * SHARE):
            threads = _threads(draw, table, min(batch, (batch * rows * columns + SHARE - 1) // SHARE))
            for_each(draw_matrix, (address, kernel), batch, threads, slots)
            return 0
        threads, block = _threads(draw, table, most), 8 if antithetic else 4
        down = draw[ROW_STRIDE] < draw[COLUMN_STRIDE] and rows > 1
        height, width = window_shape(rows, columns, threads, common_noise, block, down)
        for b in range(batch):
            skip = _words(draw, b)[3] % block
            across, high = windows(rows, columns, skip, height, width)
            for_each(draw_part, (address, kernel, b, skip, height, width, across), across * high, threads, slots)
        return 0

    return draw_all


def _gradient_function(real: str) -> Callable[..., Any]:
    sum_band = cached(_band_function(real), f"cpu-sum_band_{real}", source_digest())
    kind = int(ElementType[real])

    def sum_all(address):
        draw, table = integers_at(address, DRAW), integers_at(symbol("multisample_cpu_table"), _TABLE)
        slots = integers_at(table[_SLOTS], SLOTS_LENGTH)
        rows, columns, batch = draw[ROWS], draw[COLUMNS], max(draw[THREADS_AND_BATCH] >> 32, 1)
        kernel = table[_KERNELS + 2 * kind + (draw[COMMON_NOISE_AND_ANTITHETIC] >> 32)]
        # Rows that are neighbours in memory share tiles.
        width = min(columns, _TILE if draw[COLUMN_STRIDE] < draw[ROW_STRIDE] else _TILE // _TILE_ROWS)
        height = min(rows, _TILE_ROWS, _TILE // width)
        threads = _threads(draw, table, most_threads(batch * rows, columns, False))
        for_each(sum_band, (address, kernel, height, width), batch * ((rows + height - 1) // height), threads, slots)
        return 0

    return sum_all


def _moments_function(real: str) -> Callable[..., Any]:
    number, size = getattr(np, real), np.dtype(real).itemsize
    list_singles, list_pairs = (
        cached(list_function(width), f"cpu-list_groups_{real}{suffix}", source_digest())
        for width, suffix in ((4, ""), (8, "_antithetic"))
    )
    sum_rows = cached(sum_function(real), f"cpu-sum_rows_{real}", source_digest())

    @inline
    def store(call, top, rows, sums):
        """Scale and store the moments of `rows` rows. Common noise has one row of sums."""
        mu = numbers_at(call.ctypes.data + 8 * (MU + 2), 1, np.float64)[0]
        sigma = numbers_at(call.ctypes.data + 8 * (SIGMA + 2), 1, np.float64)[0]
        weight = numbers_at(call.ctypes.data + 8 * (WEIGHTS + 2), 1, np.float64)[0]
        first = numbers_at(call[FIRST] + top * size, rows, number)
        for r in range(rows):
            first[r] = number(fma(sigma, sums[r if len(sums) > 1 else 0, 0], weight * mu))
        if call[SECOND] != 0:
            second = numbers_at(call[SECOND] + top * size, rows, number)
            for r in range(rows):
                second[r] = number(sigma * sigma * sums[r if len(sums) > 1 else 0, 1])

    def sum_part(arguments, index):
        """The sums of a band of rows: of all groups, which are stored, or of a piece, which are added to `totals`."""
        address, lists, most, count, totals, height = arguments
        call = integers_at(address, MOMENTS)
        of_first = numbers_at(lists, 4 * count, number)
        of_second = numbers_at(lists + 4 * most * size * (call[COMMON_NOISE_AND_ANTITHETIC] >> 32), 4 * count, number)
        groups = numbers_at(lists + 8 * most * size, count, np.uint32)
        is_common = call[COMMON_NOISE_AND_ANTITHETIC] & LOW != 0
        rows, (seed, offset, first_row, _) = 1 if is_common else call[ROWS], _words(call, 0)
        bands = (rows + height - 1) // height
        top = index % bands * height
        height = min(height, rows - top)
        row = np.int64(0 if is_common else first_row + top)
        if totals == 0:
            sums = stack_array(_MOST_SUMS, np.float64).reshape((MOST_ROWS, 2))[:height]
            sums[:] = 0
            sum_rows(groups, of_first, of_second, sums, np.uint64(seed), np.uint64(offset), row)
            store(call, top, height, sums)
            return
        begin = index // bands * PIECE
        end = begin + PIECE
        sums = numbers_at(totals + 16 * (index // bands * rows + top), 2 * height, np.float64).reshape((height, 2))
        sum_rows(
            groups[begin:end], of_first[4 * begin : 4 * end], of_second[4 * begin : 4 * end], sums, np.uint64(seed),
            np.uint64(offset), row,
        )  # fmt: skip

    of_part = cached(sum_part, f"cpu-sum_part_{real}", source_digest())

    def sum_moments(address):
        call, table = integers_at(address, MOMENTS), integers_at(symbol("multisample_cpu_table"), _TABLE)
        slots = integers_at(table[_SLOTS], SLOTS_LENGTH)
        columns, is_common = call[COLUMNS], call[COMMON_NOISE_AND_ANTITHETIC] & LOW != 0
        is_antithetic, rows = call[COMMON_NOISE_AND_ANTITHETIC] >> 32, 1 if is_common else call[ROWS]
        most = columns // (8 if is_antithetic else 4) + 2 + ROUND
        lists = _allocate(most, 8 * size + 4)
        if lists == 0:
            return 1
        of_first, of_second = numbers_at(lists, 4 * most, number), numbers_at(lists + 4 * most * size, 4 * most, number)
        groups = numbers_at(lists + 8 * most * size, most, np.uint32)
        weights = numbers_at(call[WEIGHTS], columns, number)
        first_column = _words(call, 0)[3]
        if is_antithetic:
            count, weight = list_pairs(weights, first_column, groups, of_first, of_second)
        else:
            count, weight = list_singles(weights, first_column, groups, of_first, of_second)
        count += -count % ROUND
        numbers_at(address + 8 * (WEIGHTS + 2), 1, np.float64)[0] = weight
        threads = _threads(call, table, max(1, (4 * rows * count + SHARE - 1) // SHARE))
        height = min(MOST_ROWS, (rows + 4 * threads - 1) // (4 * threads) if threads > 1 else rows)
        bands = (rows + height - 1) // height
        if not is_common and (threads == 1 or rows >= FEW_ROWS or count <= PIECE):
            for_each(of_part, (address, lists, most, count, 0, height), bands, threads, slots)
            _free(lists)
            return 0
        # The pieces' sums are added in the same order as by a thread that has all pieces.
        pieces = max(1, (count + PIECE - 1) // PIECE)
        totals = _allocate(pieces * rows, 16)
        if totals == 0:
            _free(lists)
            return 1
        for_each(of_part, (address, lists, most, count, totals, height), bands * pieces, threads, slots)
        sums = numbers_at(totals, 2 * rows, np.float64)
        for piece in range(1, pieces):
            more = numbers_at(totals + 16 * rows * piece, 2 * rows, np.float64)
            for k in range(2 * rows):
                sums[k] += more[k]
        store(call, 0, call[ROWS], sums.reshape((rows, 2)))
        _free(totals)
        _free(lists)
        return 0

    return sum_moments


@functools.cache
def moments_function(real: str) -> int:
    """The address of ``int64 run(Moments*)`` in host memory, which never enters the interpreter.

    mu and sigma are numbers, and the weights and the moments have type `real`. The function writes the sum of the
    weights in place of the number of `Moments.weights`. Returns 1 without memory. `prepare_threads` has been called.
    """
    return c_address(_moments_function(real), f"cpu-sum_moments_{real}", source_digest())


@functools.cache
def draw_function() -> int:
    """The address of ``int64 run(const Draw*)``, which returns 0 and never enters the interpreter.

    For the operation `sample` in host memory. mu and sigma are vectors of the computing type, and `prepare` has been
    called for the type of the matrix.
    """
    return c_address(_draw_function(), "cpu-draw_all", source_digest())


@functools.cache
def gradient_function(real: str) -> int:
    """The same for the operation `gradient`, where `real` is the computing type."""
    return c_address(_gradient_function(real), f"cpu-sum_all_{real}", source_digest())


def prepare(dtype: str, antithetic: bool) -> None:
    """Compile the kernel of matrices of a type. A gradient needs the kernel of its computing type."""
    place = _KERNELS + 2 * ElementType[dtype] + antithetic
    if not _table[place]:
        _table[place] = window_address(dtype, antithetic)
    prepare_threads()


def prepare_threads() -> None:
    """Read anew how many threads calls may have, and start helpers."""
    _table[_THREADS] = configured_threads()
    _find_slots(int(_table[_THREADS]) - 1)


def _find_slots(count: int = 0) -> None:
    with helpers(count) as slots:
        _table[_SLOTS] = slots.ctypes.data


if hasattr(os, "register_at_fork"):  # After the hook of `threads`, which makes new slots.
    os.register_at_fork(after_in_child=_find_slots)


def compile_all() -> int:
    """Compile every C function that is not in the cache; return how many there are."""
    functions = [draw_function(), *(make(real) for make in (gradient_function, moments_function) for real in _REALS)]
    return len(functions)
