"""Calls on host memory as C functions, for threads that cannot wait for the interpreter: XLA's.

The functions are twins of ``multisample_run_cpu`` in ``csrc/torch/cpu.cpp``. Samples have one for all types: it calls
kernels by their addresses, which `prepare` writes to a table that compiled code knows by name.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numpy as np
from numba import types

from multisample.backends.element_types import MATRIX_TYPES, ElementType
from multisample.backends.kernels.compilation import callee, inline, source_digest
from multisample.backends.kernels.stream.arithmetic import fma
from multisample.backends.kernels.stream.rounding import from_bfloat16, from_float16, unchanged
from multisample.backends.launch import SPAN, Launch, Operation, WordFormat, computing_name, type_name
from multisample.backends.system.threads import configured_threads

from .addresses import c_address, numbers_at, symbol, word_at
from .division import SHARE, most_threads, window_of, window_shape, windows
from .fields import HALF, LAUNCH_WORDS, WORD, half
from .intrinsics import integers_at, stack_array
from .kernel import window_address
from .moments import FEW_ROWS, MOST_ROWS, ROUND, SEGMENT, list_function, sum_function
from .perturb import part_function, part_size
from .threads import POOL_LENGTH, for_each, helper_pool
from .window import call_window

# The table: the address of the pool of helpers, the most threads of a call, and window kernels by type and antithetic.
_POOL, _THREADS, _KERNELS, _TABLE = 0, 1, 2, 2 + 2 * (max(ElementType) + 1)
_table = np.zeros(_TABLE, np.int64)
llvmlite.binding.add_symbol("multisample_cpu_table", _table.ctypes.data)

_FLOAT16, _BFLOAT16, _FLOAT64 = (int(ElementType[name]) for name in ("float16", "bfloat16", "float64"))
_FLOAT32 = int(ElementType.float32)
_WHOLE, _HIGH_FIRST, _BITS_32, _BITS_16, _BITS_8 = map(int, WordFormat)

_allocate = types.ExternalFunction("PyMem_RawCalloc", types.int64(types.int64, types.int64))
_free = types.ExternalFunction("PyMem_RawFree", types.void(types.int64))

# Maximum rows and maximum elements of a tile: a gradient draws the noise of one tile at a time.
_TILE_ROWS, _TILE = 64, 1 << 12
# Sums side by side, and the terms of each before they are added to a sum of float64.
_SUMS, _CHAIN = 16, 16
_REALS = ("float32", "float64")
_MOST_SUMS = 2 * MOST_ROWS


@inline
def _number(launch, place, address, form):
    """A number of a launch: its field at `place`; unless `address` is 0, the number there, in the format `form`."""
    if address == 0:
        return launch[place]
    if form == _WHOLE:
        return word_at(address)
    if form == _BITS_16:
        return np.int64(numbers_at(address, 1, np.uint16)[0])
    if form == _BITS_8:
        return np.int64(numbers_at(address, 1, np.uint8)[0])
    halves = numbers_at(address, 2, np.uint32)
    first = np.int64(halves[0])
    return first << 32 | np.int64(halves[1]) if form == _HIGH_FIRST else first


@inline
def _numbers(launch, b):
    """Seed, offset, first row and first column of matrix `b` of a batch."""
    in_origin, formats = b * launch[WORD.origin_step], half(launch, HALF.word_formats)
    return (
        _number(launch, WORD.seed, launch[WORD.seed_at] + b * launch[WORD.seed_step], formats & 255),
        _number(launch, WORD.offset, launch[WORD.offset_at] + b * launch[WORD.offset_step], formats >> 8),
        _number(launch, WORD.first_row, launch[WORD.first_row_at] + in_origin, _WHOLE),
        _number(launch, WORD.first_column, launch[WORD.first_column_at] + in_origin, _WHOLE),
    )


@inline
def _sizes(launch):
    """Bytes of a number of the computing type, and of an element."""
    kind = half(launch, HALF.type)
    if kind == _FLOAT64:
        return 8, 8
    return 4, 2 if kind in (_FLOAT16, _BFLOAT16) else 4


@inline
def _shape(launch):
    """Rows and columns of a matrix, and their strides."""
    return launch[WORD.rows], launch[WORD.columns], launch[WORD.row_stride], launch[WORD.column_stride]


@inline
def _draw_window(launch, kernel, b, top, bottom, left, right):
    """Draw a window of matrix `b`."""
    real, size = _sizes(launch)
    row_stride, column_stride = launch[WORD.row_stride], launch[WORD.column_stride]
    mu = launch[WORD.mu] + b * launch[WORD.mu_step] + top * launch[WORD.mu_stride]
    sigma = launch[WORD.sigma] + b * launch[WORD.sigma_step] + top * launch[WORD.sigma_stride]
    matrix = launch[WORD.matrix] + b * launch[WORD.matrix_step] + top * row_stride + left * column_stride
    seed, offset, first_row, first_column = _numbers(launch, b)
    call_window(
        kernel, (mu, sigma, launch[WORD.mu_stride], launch[WORD.sigma_stride], real),
        (matrix, bottom - top, right - left, row_stride, column_stride, size),
        (seed, offset, first_row + top, first_column + left), half(launch, HALF.shared_noise) != 0,
    )  # fmt: skip


def _draw_matrix(arguments, b):
    address, kernel = arguments
    launch = integers_at(address, LAUNCH_WORDS)
    _draw_window(launch, kernel, b, 0, launch[WORD.rows], 0, launch[WORD.columns])


def _draw_part(arguments, index):
    address, kernel, b, skip, height, width, across = arguments
    launch = integers_at(address, LAUNCH_WORDS)
    top, bottom, left, right = window_of(index, launch[WORD.rows], launch[WORD.columns], skip, height, width, across)
    _draw_window(launch, kernel, b, top, bottom, left, right)


def _band_function(real: str) -> Callable[..., Any]:
    number, size = getattr(np, real), np.dtype(real).itemsize
    zero, one = number(0), number(1)

    @inline
    def load(widen, element, x, matrix, rows, columns, row_stride, column_stride):
        """Copy a tile to `x`, its rows one after another. Its rows or its columns are contiguous in memory."""
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
        address, kernel, band, width = arguments
        launch = integers_at(address, LAUNCH_WORDS)
        rows, columns, row_stride, column_stride = _shape(launch)
        kind, bands = half(launch, HALF.type), (rows + band - 1) // band
        b, top = index // bands, index % bands * band
        height = min(band, rows - top)
        matrix = launch[WORD.matrix] + b * launch[WORD.matrix_step] + top * row_stride
        seed, offset, first_row, first_column = _numbers(launch, b)
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
                (seed, offset, first_row + top, first_column + left), half(launch, HALF.shared_noise) != 0,
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
        of_mu = numbers_at(launch[WORD.first] + b * launch[WORD.result_step] + top * size, height, number)
        of_sigma = numbers_at(launch[WORD.second] + b * launch[WORD.result_step] + top * size, height, number)
        for r in range(height):
            of_mu[r], of_sigma[r] = number(sums[r]), number(products[r])

    return sum_band


@inline
def _threads(launch, table, most):
    """The number of threads for a call with enough work for `most` threads."""
    limit = launch[WORD.threads]
    return min(most, table[_THREADS], limit if limit != 0 else most)


def _draw_function() -> Callable[..., Any]:
    names = {"cpu-draw_matrix": _draw_matrix, "cpu-draw_part": _draw_part}
    draw_matrix, draw_part = (callee(function, name) for name, function in names.items())

    def draw_all(address):
        launch, table = integers_at(address, LAUNCH_WORDS), integers_at(symbol("multisample_cpu_table"), _TABLE)
        pool = integers_at(table[_POOL], POOL_LENGTH)
        rows, columns, batch = launch[WORD.rows], launch[WORD.columns], max(half(launch, HALF.batch), 1)
        shared_noise = half(launch, HALF.shared_noise) != 0
        antithetic = half(launch, HALF.antithetic)
        kernel = table[_KERNELS + 2 * (half(launch, HALF.type)) + antithetic]
        most = most_threads(rows, columns, shared_noise)
        if most == 1 or (batch > 1 and rows * columns <= 2 * SHARE):
            threads = _threads(launch, table, min(batch, (batch * rows * columns + SHARE - 1) // SHARE))
            for_each(draw_matrix, (address, kernel), batch, threads, pool)
            return 0
        threads, block = _threads(launch, table, most), 8 if antithetic else 4
        down = launch[WORD.row_stride] < launch[WORD.column_stride] and rows > 1
        height, width = window_shape(rows, columns, threads, shared_noise, block, down)
        for b in range(batch):
            skip = _numbers(launch, b)[3] % block
            across, high = windows(rows, columns, skip, height, width)
            for_each(draw_part, (address, kernel, b, skip, height, width, across), across * high, threads, pool)
        return 0

    return draw_all


def _gradient_function(real: str) -> Callable[..., Any]:
    sum_band = callee(_band_function(real), f"cpu-sum_band_{real}")
    kind = int(ElementType[real])

    def sum_all(address):
        launch, table = integers_at(address, LAUNCH_WORDS), integers_at(symbol("multisample_cpu_table"), _TABLE)
        pool = integers_at(table[_POOL], POOL_LENGTH)
        rows, columns, batch = launch[WORD.rows], launch[WORD.columns], max(half(launch, HALF.batch), 1)
        kernel = table[_KERNELS + 2 * kind + half(launch, HALF.antithetic)]
        # Rows that are neighbours in memory share tiles.
        width = min(columns, _TILE if launch[WORD.column_stride] < launch[WORD.row_stride] else _TILE // _TILE_ROWS)
        height = min(rows, _TILE_ROWS, _TILE // width)
        threads = _threads(launch, table, most_threads(batch * rows, columns, False))
        for_each(sum_band, (address, kernel, height, width), batch * ((rows + height - 1) // height), threads, pool)
        return 0

    return sum_all


@functools.cache
def _moments_store(real: str) -> Callable[..., Any]:
    number, size = getattr(np, real), np.dtype(real).itemsize

    @inline
    def store(launch, top, rows, sums, weight):
        """Scale and store the moments of `rows` rows. Shared noise has one row of sums."""
        mu = numbers_at(launch.ctypes.data + 8 * WORD.mu, 1, np.float64)[0]
        sigma = numbers_at(launch.ctypes.data + 8 * WORD.sigma, 1, np.float64)[0]
        first = numbers_at(launch[WORD.first] + top * size, rows, number)
        for r in range(rows):
            first[r] = number(fma(sigma, sums[r if len(sums) > 1 else 0, 0], weight * mu))
        if launch[WORD.second] != 0:
            second = numbers_at(launch[WORD.second] + top * size, rows, number)
            for r in range(rows):
                second[r] = number(sigma * sigma * sums[r if len(sums) > 1 else 0, 1])

    return store


def _moments_part(real: str) -> Callable[..., Any]:
    number, size, store = getattr(np, real), np.dtype(real).itemsize, _moments_store(real)
    sum_rows = callee(sum_function(real), f"cpu-sum_rows_{real}")

    def sum_part(arguments, index):
        """Sum all groups of a band of rows, and store the moments. With `totals`, sum one segment into those."""
        address, lists, most, count, totals, height, weight = arguments
        launch = integers_at(address, LAUNCH_WORDS)
        of_first = numbers_at(lists, 4 * count, number)
        of_second = numbers_at(lists + 4 * most * size * half(launch, HALF.antithetic), 4 * count, number)
        groups = numbers_at(lists + 8 * most * size, count, np.uint32)
        is_shared = half(launch, HALF.shared_noise) != 0
        rows, (seed, offset, first_row, _) = 1 if is_shared else launch[WORD.rows], _numbers(launch, 0)
        bands = (rows + height - 1) // height
        top = index % bands * height
        height = min(height, rows - top)
        row = np.int64(0 if is_shared else first_row + top)
        if totals == 0:
            sums = stack_array(_MOST_SUMS, np.float64).reshape((MOST_ROWS, 2))[:height]
            sums[:] = 0
            sum_rows(groups, of_first, of_second, sums, np.uint64(seed), np.uint64(offset), row)
            store(launch, top, height, sums, weight)
            return
        begin = index // bands * SEGMENT
        end = begin + SEGMENT
        sums = numbers_at(totals + 16 * (index // bands * rows + top), 2 * height, np.float64).reshape((height, 2))
        sum_rows(
            groups[begin:end], of_first[4 * begin : 4 * end], of_second[4 * begin : 4 * end], sums, np.uint64(seed),
            np.uint64(offset), row,
        )  # fmt: skip

    return sum_part


def _moments_function(real: str) -> Callable[..., Any]:
    number, size, store = getattr(np, real), np.dtype(real).itemsize, _moments_store(real)
    list_singles, list_pairs = (
        callee(list_function(width), f"cpu-list_groups_{real}{suffix}")
        for width, suffix in ((4, ""), (8, "_antithetic"))
    )
    of_part = callee(_moments_part(real), f"cpu-sum_part_{real}")

    def sum_moments(address):
        launch, table = integers_at(address, LAUNCH_WORDS), integers_at(symbol("multisample_cpu_table"), _TABLE)
        pool = integers_at(table[_POOL], POOL_LENGTH)
        columns, is_shared = launch[WORD.columns], half(launch, HALF.shared_noise) != 0
        is_antithetic, rows = half(launch, HALF.antithetic), 1 if is_shared else launch[WORD.rows]
        most = columns // (8 if is_antithetic else 4) + 2 + ROUND
        lists = _allocate(most, 8 * size + 4)
        if lists == 0:
            return 1
        of_first, of_second = numbers_at(lists, 4 * most, number), numbers_at(lists + 4 * most * size, 4 * most, number)
        groups = numbers_at(lists + 8 * most * size, most, np.uint32)
        weights = numbers_at(launch[WORD.weights], columns, number)
        first_column = _numbers(launch, 0)[3]
        if is_antithetic:
            count, weight = list_pairs(weights, first_column, groups, of_first, of_second)
        else:
            count, weight = list_singles(weights, first_column, groups, of_first, of_second)
        count += -count % ROUND
        threads = _threads(launch, table, max(1, (4 * rows * count + SHARE - 1) // SHARE))
        height = min(MOST_ROWS, (rows + 4 * threads - 1) // (4 * threads) if threads > 1 else rows)
        bands = (rows + height - 1) // height
        if not is_shared and (threads == 1 or rows >= FEW_ROWS or count <= SEGMENT):
            for_each(of_part, (address, lists, most, count, 0, height, weight), bands, threads, pool)
            _free(lists)
            return 0
        # The segments' sums are added in the same order as by a thread that has all segments.
        segments = max(1, (count + SEGMENT - 1) // SEGMENT)
        totals = _allocate(segments * rows, 16)
        if totals == 0:
            _free(lists)
            return 1
        for_each(of_part, (address, lists, most, count, totals, height, weight), bands * segments, threads, pool)
        sums = numbers_at(totals, 2 * rows, np.float64)
        for segment in range(1, segments):
            more = numbers_at(totals + 16 * rows * segment, 2 * rows, np.float64)
            for k in range(2 * rows):
                sums[k] += more[k]
        store(launch, 0, launch[WORD.rows], sums.reshape((rows, 2)), weight)
        _free(totals)
        _free(lists)
        return 0

    return sum_moments


def _perturb_function(dtype: str) -> Callable[..., Any]:
    add_part = callee(part_function(dtype), f"cpu-perturb_{dtype}_part")
    number, words = getattr(np, MATRIX_TYPES[dtype].computing), SPAN.size // 8

    def perturb_all(address):
        launch, table = integers_at(address, LAUNCH_WORDS), integers_at(symbol("multisample_cpu_table"), _TABLE)
        pool = integers_at(table[_POOL], POOL_LENGTH)
        rows, elements = launch[WORD.rows], launch[WORD.columns]
        weights = numbers_at(launch[WORD.weights], rows, number)
        seed, offset, first_row, _ = _numbers(launch, 0)
        size = part_size(elements)
        arguments = (
            launch[WORD.matrix], words * launch[WORD.spans], size, weights, np.uint64(seed), np.uint64(offset),
            first_row,
        )  # fmt: skip
        threads = _threads(launch, table, max(1, (elements * rows + SHARE - 1) // SHARE))
        for_each(add_part, arguments, (elements + size - 1) // size, threads, pool)
        return 0

    return perturb_all


@functools.cache
def _draw_address() -> int:
    """The address of ``int64 run(const Launch*)``, which returns 0 and never enters the interpreter.

    For the operation `sample` in host memory. mu and sigma are vectors of the computing type, and `prepare` has been
    called for the type of the matrix.
    """
    return c_address(_draw_function(), "cpu-draw_all", source_digest())


@functools.cache
def _gradient_address(real: str) -> int:
    """The same for the operation `gradient`, where `real` is the computing type."""
    return c_address(_gradient_function(real), f"cpu-sum_all_{real}", source_digest())


@functools.cache
def _moments_address(real: str) -> int:
    """The same for the operation `moments`, where mu and sigma are numbers, and weights and results have type `real`.

    The function returns 1 if there is no memory.
    """
    return c_address(_moments_function(real), f"cpu-sum_moments_{real}", source_digest())


@functools.cache
def _perturb_address(dtype: str) -> int:
    """The same for the operation `perturb`, where `dtype` is the type of the parameters.

    Weights are contiguous and have the computing type.
    """
    return c_address(_perturb_function(dtype), f"cpu-perturb_all_{dtype}", source_digest())


def function_address(launch: Launch) -> int:
    """`Backend.c_function`."""
    dtype, real, antithetic = type_name(launch), computing_name(launch), bool(launch.antithetic)
    find_threads()
    if launch.operation == Operation.moments:
        return _moments_address(real)
    if launch.operation == Operation.perturb:
        return _perturb_address(dtype)
    is_sample = launch.operation == Operation.sample
    _find_kernel(dtype if is_sample else real, antithetic)
    return _draw_address() if is_sample else _gradient_address(real)


def _find_kernel(dtype: str, antithetic: bool) -> None:
    place = _KERNELS + 2 * ElementType[dtype] + antithetic
    if not _table[place]:
        _table[place] = window_address(dtype, antithetic)


def find_threads() -> None:
    """Read anew how many threads calls may have."""
    _table[_THREADS] = configured_threads()
    _find_pool()


def _find_pool() -> None:
    if _table[_THREADS]:
        _table[_POOL] = helper_pool(int(_table[_THREADS]) - 1).ctypes.data


if hasattr(os, "register_at_fork"):  # Runs after the hook of `threads`, which makes a new pool.
    os.register_at_fork(after_in_child=_find_pool)


def kernel_groups() -> list[list[Callable[[], Any]]]:
    """All C functions, as functions that compile them."""
    groups: list[list[Callable[[], Any]]] = [[_draw_address]]
    for real in _REALS:
        groups += [functools.partial(_gradient_address, real)], [functools.partial(_moments_address, real)]
    return groups + [[functools.partial(_perturb_address, dtype)] for dtype in MATRIX_TYPES]
