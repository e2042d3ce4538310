"""Weighted moments on the CPU: groups with a weight other than 0 are listed once, then drawn and summed by tiles.

The order of the sums depends on the weights alone, so any number of threads gives the same bits. A sum in the computing
type has at most 16 terms, and is then added to a float64 sum. Products with very large or very small weights would
overflow or lose bits, so the weights of such a call are divided by a power of two.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from multisample.backends.element_types import MATRIX_TYPES
from multisample.backends.kernels.compilation import callee, inline
from multisample.backends.kernels.stream.arithmetic import fma
from multisample.backends.kernels.stream.rounding import NARROWING
from multisample.backends.kernels.stream.vectors import converted, in_every_lane

from .addresses import numbers_at
from .fields import HALF, LAUNCH_WORDS, WORD, half, input_place, numbers_of
from .helper_threads import for_each, threads_for
from .intrinsics import load_vector, stack_array, store_vector
from .thread_windows import most_threads
from .tile import stream_of, tile_of

# Groups of a segment. A list is padded to a multiple of _ROUND groups.
_SEGMENT, _ROUND = 4096, 8
# Maximum rows that a thread sums at once. Their sums take 16 KiB of its stack.
_MOST_ROWS = 1024
_MOST_SUMS = 2 * _MOST_ROWS
# From this many rows on, threads divide rows only, not segments.
_FEW_ROWS = 1024
# Rows that share the column parts of a tile; parallel sums of a row; maximum terms of such a sum.
_STRIP, _SUMS, _CHAIN = 8, 16, 16
_BOTH_SUMS = 2 * _SUMS
_STRIP_SUMS = _STRIP * _BOTH_SUMS

# Weights need no scaling if the exponent of the largest weight, by `math.frexp`, is in this range, as in
# csrc/cuda/moments_kernel.cuh.
_ORDINARY_EXPONENTS = {"float32": (-109, 100), "float64": (-399, 400)}
# The exponent of zero. It is less than any sum of exponents.
_NO_EXPONENT = -16384

allocate = types.ExternalFunction("PyMem_RawCalloc", types.int64(types.int64, types.int64))
free = types.ExternalFunction("PyMem_RawFree", types.void(types.int64))


@inline
def _parts_of(x):
    """A fraction and an exponent: x = fraction * 2**exponent."""
    fraction, exponent = math.frexp(x)
    return fraction, exponent if fraction != 0 else _NO_EXPONENT


@inline
def _first_moment(sigma, first, weight, mu, e):
    """``(sigma * first + weight * mu) * 2**e``. No intermediate result overflows; only negligible ones underflow."""
    (s, of_s), (z, of_z), (w, of_w), (m, of_m) = _parts_of(sigma), _parts_of(first), _parts_of(weight), _parts_of(mu)
    most = max(of_s + of_z, of_w + of_m)
    mean = math.ldexp(w * m, of_w + of_m - most)
    return math.ldexp(fma(math.ldexp(s, of_s + of_z - most), z, mean), most + e)


@inline
def _second_moment(sigma, second, e):
    """``sigma**2 * second * 2**e``, likewise."""
    (s, of_s), (q, of_q) = _parts_of(sigma), _parts_of(second)
    return math.ldexp(s * s * q, 2 * of_s + of_q + e)


def _list_function(real: str, width: int) -> Callable[..., Any]:
    """``list_groups(weights, first_column, groups, first, second)`` lists the groups with a weight other than zero.

    Groups have `width` columns. `first` and `second` are zeros. `first` gets the weights of each group's four normals.
    With antithetic noise, `second` gets the weights of their squares. Returns the number of listed groups, the sum of
    the weights, and the exponent of the power of two by which the weights were divided. The exponent is 0 if that of
    the largest weight is in `_ORDINARY_EXPONENTS`.
    """
    number, (least, most) = getattr(np, real), _ORDINARY_EXPONENTS[real]

    @inline
    def list_scaled(weights, first_column, groups, first, second, exponent):
        """List groups with weights divided by ``2**exponent``. Also returns the largest magnitude of a weight."""
        skip, largest = first_column % width, number(0)
        count, total = 0, 0.0
        for g in range((skip + weights.size + width - 1) // width):
            begin, end = max(g * width - skip, 0), min((g + 1) * width - skip, weights.size)
            is_listed = False
            for c in range(begin, end):
                is_listed = is_listed or weights[c] != 0
            if is_listed:
                groups[count] = np.uint64(first_column // width + g)
                for c in range(begin, end):
                    place, weight = (c + skip) % width, weights[c]
                    if exponent != 0:
                        weight = number(math.ldexp(weight, -exponent))
                    if abs(weight) > largest:
                        largest = abs(weight)
                    total += weight
                    if width == 8:  # Two columns have the same normal, with opposite signs.
                        at = 4 * count + place // 2
                        first[at] += -weight if place % 2 == 1 else weight
                        second[at] += weight
                    else:
                        first[4 * count + place] = weight
                count += 1
        return count, total, np.float64(largest)

    def list_groups(weights, first_column, groups, first, second):
        count, total, largest = list_scaled(weights, first_column, groups, first, second, 0)
        _, exponent = math.frexp(largest)
        if largest == 0 or least <= exponent <= most:
            return count, total, 0
        first[:], second[:] = 0, 0
        count, total, _ = list_scaled(weights, first_column, groups, first, second, exponent)
        return count, total, exponent

    return list_groups


def _sum_function(real: str) -> Callable[..., Any]:
    """``sum_rows(groups, first, second, sums, seed, offset, first_row)`` adds the sums of listed groups to `sums`."""
    number, tile = getattr(np, real), tile_of(real)
    words_length, layout_length, word_type = tile.words_length, tile.layout_length, tile.word_type
    lay_out, draw_row, put_normals = tile.lay_out_list, tile.draw_row, tile.put_normals
    # Groups of a tile.
    most, most_normals = tile.places // 2, 2 * tile.places

    def sum_rows(groups, first, second, sums, seed, offset, first_row):
        stream = stream_of(seed, offset)
        words, layout = stack_array(words_length, word_type), stack_array(layout_length, np.uint64)
        z, lanes = stack_array(most_normals, number), stack_array(_STRIP_SUMS, np.float64)
        (zeros,) = in_every_lane((number(0),), _SUMS)
        for top in range(0, sums.shape[0], _STRIP):
            rows = min(_STRIP, sums.shape[0] - top)
            for segment in range(0, groups.size, _SEGMENT):
                for lane in range(_BOTH_SUMS * rows):
                    lanes[lane] = 0.0
                last = min(segment + _SEGMENT, groups.size)
                for t in range(segment, last, most):
                    count = min(most, last - t)
                    lay_out(layout, groups, t, count, stream)
                    for r in range(rows):
                        draw_row(words, layout, first_row + top + r, count, stream)
                        put_normals(z, 0, words, count, False, z)
                        at = _BOTH_SUMS * r
                        for chain in range(0, 4 * count, _SUMS * _CHAIN):
                            u, v = zeros, zeros
                            for k in range(chain, min(chain + _SUMS * _CHAIN, 4 * count), _SUMS):
                                normals = load_vector(z, k, _SUMS)
                                u = fma(load_vector(first, 4 * t + k, _SUMS), normals, u)
                                v = fma(load_vector(second, 4 * t + k, _SUMS), normals * normals, v)
                            store_vector(lanes, at, load_vector(lanes, at, _SUMS) + converted(u, np.float64))
                            store_vector(
                                lanes, at + _SUMS, load_vector(lanes, at + _SUMS, _SUMS) + converted(v, np.float64)
                            )
                for r in range(rows):
                    s, q = 0.0, 0.0
                    for lane in range(_BOTH_SUMS * r, _BOTH_SUMS * r + _SUMS):
                        s += lanes[lane]
                        q += lanes[_SUMS + lane]
                    sums[top + r, 0] += s
                    sums[top + r, 1] += q

    return sum_rows


def _storing(dtype: str) -> Callable[..., Any]:
    """``store(launch, b, top, rows, sums, weight, exponent)`` scales and stores moments.

    With shared noise, `sums` has one row for all rows. The sums of noise and the sum of weights, `weight`, lack the
    factor ``2**exponent``.
    """
    row = MATRIX_TYPES[dtype]
    number, stored, narrow = getattr(np, row.computing), getattr(np, row.stored), NARROWING[dtype]
    is_wide = row.computing == "float64"  # In float64, products of float32 numbers neither overflow nor underflow.
    mu_at, sigma_at, size = input_place("mu", number), input_place("sigma", number), row.size

    @inline
    def store(launch, b, top, rows, sums, weight, exponent):
        one_mu, one_sigma = stack_array(1, number), stack_array(1, number)
        at_mu, mu_stride = mu_at(launch, b, top, one_mu)
        at_sigma, sigma_stride = sigma_at(launch, b, top, one_sigma)
        mu, sigma = numbers_at(at_mu, rows, number, mu_stride), numbers_at(at_sigma, rows, number, sigma_stride)
        behind = b * launch[WORD.result_step] + top * size
        first = numbers_at(launch[WORD.first] + behind, rows, stored)
        second = numbers_at(launch[WORD.second] + behind, rows, stored)
        has_second = launch[WORD.second] != 0
        for r in range(rows):
            of_row = sums[0 if sums.shape[0] == 1 else r]
            m, s = np.float64(mu[r]), np.float64(sigma[r])
            if is_wide and (exponent != 0 or not (2.0**-400 <= s <= 2.0**400 and abs(m) <= 2.0**400)):
                m1, m2 = _first_moment(s, of_row[0], weight, m, exponent), _second_moment(s, of_row[1], exponent)
            else:
                m1, m2 = fma(s, of_row[0], weight * m), s * s * of_row[1]
                if exponent != 0:
                    m1, m2 = math.ldexp(m1, exponent), math.ldexp(m2, exponent)
            first[r] = narrow(number(m1))
            if has_second:
                second[r] = narrow(number(m2))

    return store


def _summing_part(dtype: str) -> Callable[..., Any]:
    real = MATRIX_TYPES[dtype].computing
    number, size, store = getattr(np, real), np.dtype(real).itemsize, _storing(dtype)
    sum_rows = callee(_sum_function(real), f"cpu-sum_rows_{real}")

    def sum_part(arguments, index):
        """Store the moments of a band of rows if `totals` is 0; otherwise add the sums of one segment to `totals`."""
        address, b, lists, most, count, totals, height, weight, exponent = arguments
        launch = numbers_at(address, LAUNCH_WORDS, np.int64)
        is_shared = half(launch, HALF.shared_noise) != 0
        rows, (seed, offset, first_row, _) = 1 if is_shared else launch[WORD.rows], numbers_of(launch, b)
        bands = (rows + height - 1) // height
        top = index % bands * height
        height = min(height, rows - top)
        row = np.int64(0 if is_shared else first_row + top)
        segment, at = 0, stack_array(_MOST_SUMS, np.float64).ctypes.data
        if totals != 0:
            segment = index // bands
            at, count = totals + 16 * (segment * rows + top), min(_SEGMENT, count - segment * _SEGMENT)
        begin = segment * _SEGMENT
        of_first = numbers_at(lists + 4 * begin * size, 4 * count, number)
        of_second = numbers_at(lists + 4 * (most * half(launch, HALF.antithetic) + begin) * size, 4 * count, number)
        groups = numbers_at(lists + 8 * (most * size + begin), count, np.uint64)
        sums = numbers_at(at, 2 * height, np.float64).reshape((height, 2))
        sums[:] = 0
        sum_rows(groups, of_first, of_second, sums, np.uint64(seed), np.uint64(offset), row)
        if totals == 0:
            store(launch, b, top, height, sums, weight, exponent)

    return sum_part


def moments_function(dtype: str) -> Callable[..., Any]:
    """Weighted moments, whose results have type `dtype`.

    mu and sigma are vectors of the computing type, or numbers representable in it; weights are a vector of that type.
    """
    real = MATRIX_TYPES[dtype].computing
    number, size, store = getattr(np, real), np.dtype(real).itemsize, _storing(dtype)
    list_singles, list_pairs = (
        callee(_list_function(real, width), f"cpu-list_groups_{real}{suffix}")
        for width, suffix in ((4, ""), (8, "_antithetic"))
    )
    of_part = callee(_summing_part(dtype), f"cpu-sum_part_{dtype}")

    @inline
    def sum_listed(address, b, lists, most, count, weight, exponent):
        """Sum and store the moments of matrix `b`. Returns 0, or 1 if memory cannot be allocated."""
        launch = numbers_at(address, LAUNCH_WORDS, np.int64)
        is_shared = half(launch, HALF.shared_noise) != 0
        rows = 1 if is_shared else launch[WORD.rows]
        threads = threads_for(most_threads(4 * rows * count), launch[WORD.threads])
        height = min(_MOST_ROWS, (rows + 4 * threads - 1) // (4 * threads) if threads > 1 else rows)
        bands = (rows + height - 1) // height
        totals, segments = 0, 1
        if is_shared or (threads > 1 and rows < _FEW_ROWS and count > _SEGMENT):
            segments = max(1, (count + _SEGMENT - 1) // _SEGMENT)
            totals = allocate(segments * rows, 16)
            if totals == 0:
                return 1
        of_all = address, b, lists, most, count, totals, height, weight, exponent
        for_each(of_part, of_all, bands * segments, threads)
        if totals != 0:
            # The sums of segments are added in the order in which one thread with all segments adds them.
            sums = numbers_at(totals, 2 * rows, np.float64)
            for segment in range(1, segments):
                more = numbers_at(totals + 16 * rows * segment, 2 * rows, np.float64)
                for k in range(2 * rows):
                    sums[k] += more[k]
            store(launch, b, 0, launch[WORD.rows], sums.reshape((rows, 2)), weight, exponent)
            free(totals)
        return 0

    def sum_moments(address):
        launch = numbers_at(address, LAUNCH_WORDS, np.int64)
        columns, is_antithetic = launch[WORD.columns], half(launch, HALF.antithetic)
        most = columns // (8 if is_antithetic else 4) + 2 + _ROUND
        for b in range(max(half(launch, HALF.batch), 1)):
            lists = allocate(most, 8 * size + 8)
            if lists == 0:
                return 1
            of_first = numbers_at(lists, 4 * most, number)
            of_second = numbers_at(lists + 4 * most * size, 4 * most, number)
            groups = numbers_at(lists + 8 * most * size, most, np.uint64)
            begin, stride = launch[WORD.weights] + b * launch[WORD.weights_step], launch[WORD.weights_stride]
            weights = numbers_at(begin, columns, number, stride)
            first_column = numbers_of(launch, b)[3]
            if is_antithetic:
                count, weight, exponent = list_pairs(weights, first_column, groups, of_first, of_second)
            else:
                count, weight, exponent = list_singles(weights, first_column, groups, of_first, of_second)
            error = sum_listed(address, b, lists, most, count + -count % _ROUND, weight, exponent)
            free(lists)
            if error != 0:
                return error
        return 0

    return sum_moments
