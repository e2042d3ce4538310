"""Weighted moments on the CPU: groups with a weight are listed once, and their noise is drawn and summed tile by tile.

The order of the sums depends on the weights alone, so that any number of threads gives the same bits. A sum in the
computing type has at most 16 terms before it is added to a float64 sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from multisample.backends.element_types import MATRIX_TYPES
from multisample.backends.kernels.compilation import callee, compile_cached, inline, source_digest
from multisample.backends.kernels.stream.arithmetic import fma
from multisample.backends.kernels.stream.normals import block_f32, block_f64
from multisample.backends.kernels.stream.rounding import NARROWING
from multisample.backends.kernels.stream.words import stream_key, word

from .intrinsics import default_floats, restore_floats, stack_array
from .threads import POOL, for_each

SEGMENT = 4096
"""Groups whose sums are added up by themselves."""
ROUND = 8
"""A list has a multiple of this many groups."""
MOST_ROWS = 1024
"""Rows whose sums `moments_kernel` has in memory at once, 16 KiB of a thread's stack."""
FEW_ROWS = 1024
"""With at least so many rows, threads share rows alone."""
_MOST_SUMS = 2 * MOST_ROWS
# Groups whose noise is in the first-level cache; sums side by side, and the terms of each.
_TILE, _SUMS, _CHAIN = 256, 16, 16
_TILE_NORMALS = 4 * _TILE


def list_function(width: int) -> Callable[..., Any]:
    """The function of `listing_kernel` for groups of `width` columns."""

    def list_groups(weights, first_column, groups, first, second):
        before = default_floats()
        skip = first_column % width
        count, total = 0, 0.0
        for g in range((skip + weights.size + width - 1) // width):
            begin, end = max(g * width - skip, 0), min((g + 1) * width - skip, weights.size)
            is_listed = False
            for c in range(begin, end):
                is_listed = is_listed or weights[c] != 0
            if is_listed:
                groups[count] = np.uint32(first_column // width + g)
                for c in range(begin, end):
                    place = (c + skip) % width
                    total += weights[c]
                    if width == 8:  # Two columns have the same normal, with either sign.
                        at = 4 * count + place // 2
                        first[at] += -weights[c] if place % 2 == 1 else weights[c]
                        second[at] += weights[c]
                    else:
                        first[4 * count + place] = weights[c]
                count += 1
        restore_floats(before)
        return count, total

    return list_groups


def sum_function(real: str) -> Callable[..., Any]:
    """``sum_rows(groups, first, second, sums, seed, offset, first_row)`` adds the sums of listed groups to `sums`."""
    block = block_f64 if real == "float64" else block_f32
    number = getattr(np, real)
    zero = number(0)

    @inline
    def add_products(z, first, second, begin, count, a, b):
        """Returns the sums of first * z and of second * z * z over `count` normals."""
        s, q = 0.0, 0.0
        for chain in range(0, count, _SUMS * _CHAIN):
            for lane in range(_SUMS):
                a[lane] = b[lane] = zero
            for k in range(np.uint64(chain), np.uint64(min(chain + _SUMS * _CHAIN, count)), np.uint64(_SUMS)):
                for lane in range(np.uint64(_SUMS)):
                    x = z[k + lane]
                    a[lane] = fma(first[np.uint64(begin) + k + lane], x, a[lane])
                    b[lane] = fma(second[np.uint64(begin) + k + lane], x * x, b[lane])
            for lane in range(_SUMS):
                s += np.float64(a[lane])
                q += np.float64(b[lane])
        return s, q

    def sum_rows(groups, first, second, sums, seed, offset, first_row):
        before = default_floats()
        k0, k1 = stream_key(seed)
        o0, o1 = word(offset), offset >> np.uint64(32)
        z, a, b = stack_array(_TILE_NORMALS, number), stack_array(_SUMS, number), stack_array(_SUMS, number)
        for r in range(sums.shape[0]):
            i = np.uint64(first_row + r)
            s_row, q_row = 0.0, 0.0
            for segment in range(0, groups.size, SEGMENT):
                s_segment, q_segment = 0.0, 0.0
                for t in range(segment, min(segment + SEGMENT, groups.size), _TILE):
                    count = min(_TILE, groups.size - t)
                    for g in range(np.uint64(count)):
                        z0, z1, z2, z3 = block(np.uint64(groups[np.uint64(t) + g]), i, o0, o1, k0, k1)
                        c = np.uint64(4) * g
                        z[c] = z0
                        z[c + np.uint64(1)] = z1
                        z[c + np.uint64(2)] = z2
                        z[c + np.uint64(3)] = z3
                    s, q = add_products(z, first, second, 4 * t, 4 * count, a, b)
                    s_segment += s
                    q_segment += q
                s_row += s_segment
                q_row += q_segment
            sums[r, 0] += s_row
            sums[r, 1] += q_row
        restore_floats(before)

    return sum_rows


def _finish_function(dtype: str) -> Callable[..., Any]:
    narrow, number = NARROWING[dtype], getattr(np, MATRIX_TYPES[dtype].computing)

    def finish(mu, sigma, sums, weight, first, second):
        before = default_floats()
        for r in range(first.size):
            of_row = sums[0 if sums.shape[0] == 1 else r]
            m, s = np.float64(mu[r]), np.float64(sigma[r])
            first[r] = narrow(number(fma(s, of_row[0], weight * m)))
            if second.size > 0:
                second[r] = narrow(number(s * s * of_row[1]))
        restore_floats(before)

    return finish


_REALS = ("float32", "float64")
# float64 sums of rows, two for each.
_SUMS_TYPE = types.Array(types.float64, 2, "C")


def _array(dtype: Any, ndim: int = 1, layout: str = "C", *, readonly: bool = False) -> Any:
    return types.Array(dtype, ndim, layout, readonly=readonly, aligned=False)


def _compiled(signature: Any, function: Callable[..., Any], name: str) -> Callable[..., Any]:
    kernel: Callable[..., Any] = compile_cached(signature, function, f"cpu-{name}", source_digest())
    return kernel


@functools.cache
def listing_kernel(real: str, antithetic: bool) -> Callable[..., tuple[int, float]]:
    """``kernel(weights, first_column, groups, first, second)`` lists the groups with a weight other than zero.

    `first` and `second`, zeros before, get four weights for each group: those of its normals, and with `antithetic`
    those of their squares. Without, `second` is not written. Returns the number of groups and the sum of all weights.
    """
    vector = _array(getattr(types, real))
    signature = types.Tuple((types.int64, types.float64))(
        _array(getattr(types, real), layout="A", readonly=True), types.int64, _array(types.uint32), vector, vector
    )
    name = f"list_groups_{real}{'_antithetic' if antithetic else ''}"
    return _compiled(signature, list_function(8 if antithetic else 4), name)


def _sum_parameters(real: str) -> tuple[Any, ...]:
    vector = _array(getattr(types, real))
    return _array(types.uint32), vector, vector, _SUMS_TYPE, types.uint64, types.uint64, types.int64


@functools.cache
def summing_kernel(real: str) -> Callable[..., None]:
    """``kernel(groups, first, second, totals, seed, offset, first_row, height, threads, pool)`` draws listed groups.

    `totals` has a matrix for each SEGMENT groups, and a row for each row of noise. The kernel adds the sums of `first`
    times z, and of `second` times z squared. A thread adds up a segment in up to `height` rows at a
    time; `kernel.windows_kernel` explains `threads` and `pool`. The list has a multiple of ROUND groups.
    """
    sum_rows = callee(sum_function(real), f"cpu-sum_rows_{real}")
    groups, first, second, _, seed, offset, first_row = _sum_parameters(real)
    parameters = groups, first, second, types.Array(types.float64, 3, "C"), seed, offset, first_row, types.int64

    def sum_segment(arguments, index):
        groups, first, second, totals, seed, offset, first_row, height = arguments
        bands = (totals.shape[1] + height - 1) // height
        begin, top = index // bands * SEGMENT, index % bands * height
        end = begin + SEGMENT
        sum_rows(
            groups[begin:end], first[4 * begin : 4 * end], second[4 * begin : 4 * end],
            totals[index // bands, top : top + height], seed, offset, first_row + top,
        )  # fmt: skip

    of_segment = callee(sum_segment, f"cpu-sum_segment_{real}")

    def sum_segments(groups, first, second, totals, seed, offset, first_row, height, threads, pool):
        bands = (totals.shape[1] + height - 1) // height
        arguments = groups, first, second, totals, seed, offset, first_row, height
        for_each(of_segment, arguments, bands * totals.shape[0], threads, pool)

    return _compiled(types.void(*parameters, types.int64, POOL), sum_segments, f"sum_segments_{real}")


@functools.cache
def moments_kernel(dtype: str) -> Callable[..., None]:
    """Draw, sum and store the moments of independent noise: `summing_kernel` and `finishing_kernel` in one.

    ``kernel(groups, of_first, of_second, seed, offset, first_row, mu, sigma, weight, first, second, height, threads,
    pool)``. A thread takes up to `height` rows at a time, at most MOST_ROWS.
    """
    real = MATRIX_TYPES[dtype].computing
    sum_rows = callee(sum_function(real), f"cpu-sum_rows_{real}")
    finish = callee(_finish_function(dtype), f"cpu-finish_{dtype}")
    groups, first, second, _, *words = _sum_parameters(real)
    mu, sigma, _, weight, *results = _finish_parameters(dtype)
    parameters = groups, first, second, *words, mu, sigma, weight, *results, types.int64

    def finish_band(arguments, band):
        groups, of_first, of_second, seed, offset, first_row, mu, sigma, weight, first, second, height = arguments
        top = band * height
        bottom = min(top + height, len(first))
        sums = stack_array(_MOST_SUMS, np.float64).reshape((MOST_ROWS, 2))[: bottom - top]
        sums[:] = 0
        sum_rows(groups, of_first, of_second, sums, seed, offset, first_row + top)
        finish(mu[top:bottom], sigma[top:bottom], sums, weight, first[top:bottom], second[top:bottom])

    of_band = callee(finish_band, f"cpu-finish_band_{dtype}")

    def finish_bands(
        groups, of_first, of_second, seed, offset, first_row, mu, sigma, weight, first, second, height, threads, pool
    ):
        arguments = groups, of_first, of_second, seed, offset, first_row, mu, sigma, weight, first, second, height
        for_each(of_band, arguments, (len(first) + height - 1) // height, threads, pool)

    return _compiled(types.void(*parameters, types.int64, POOL), finish_bands, f"finish_bands_{dtype}")


@functools.cache
def finishing_kernel(dtype: str) -> Callable[..., None]:
    """``kernel(mu, sigma, sums, weight, first, second)`` stores the moments; `sums` of one row serve all rows."""
    return _compiled(types.void(*_finish_parameters(dtype)), _finish_function(dtype), f"finish_{dtype}")


def _finish_parameters(dtype: str) -> tuple[Any, ...]:
    row = MATRIX_TYPES[dtype]
    vector = _array(getattr(types, row.computing), layout="A", readonly=True)
    result = _array(getattr(types, row.stored))
    return vector, vector, _SUMS_TYPE, types.float64, result, result


def kernel_groups() -> list[list[Callable[[], Any]]]:
    """All kernels, as functions that compile them. The first kernel of a group shares functions with the others."""
    groups: list[list[Callable[[], Any]]] = []
    for real in _REALS:
        dtypes = [dtype for dtype, row in MATRIX_TYPES.items() if row.computing == real]
        groups += [[functools.partial(listing_kernel, real, antithetic)] for antithetic in (False, True)]
        groups += [[functools.partial(finishing_kernel, dtype)] for dtype in dtypes]
        groups.append([functools.partial(summing_kernel, real)])
        groups[-1] += [functools.partial(moments_kernel, dtype) for dtype in dtypes]
    return groups
