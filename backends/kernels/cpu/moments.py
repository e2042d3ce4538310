"""Weighted moments on the CPU: groups with a weight are listed once, and their noise is drawn and summed tile by tile.

The order of the sums depends on the weights alone, so that any number of threads gives the same bits. A sum in the
computing type has at most 16 terms before it is added to a float64 sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from multisample.backends.kernels.stream.arithmetic import fma
from multisample.backends.kernels.stream.normals import block_f32, block_f64
from multisample.backends.kernels.stream.words import stream_key, word

from .intrinsics import default_floats, restore_floats, stack_array, use_widest_vectors

SEGMENT = 4096
"""Groups whose sums are added up by themselves."""
ROUND = 8
"""A list has a multiple of this many groups."""
MOST_ROWS = 1024
"""Rows whose sums a thread has in memory at once, 16 KiB of its stack."""
FEW_ROWS = 1024
"""With at least so many rows, threads share rows alone."""
# Groups whose noise is in the first-level cache; sums side by side, and the terms of each.
_TILE, _SUMS, _CHAIN = 256, 16, 16
_TILE_NORMALS = 4 * _TILE


def list_function(width: int) -> Callable[..., Any]:
    """``list_groups(weights, first_column, groups, first, second)`` lists the groups with a weight other than zero.

    A group has `width` columns, 8 with antithetic pairs. `first` and `second`, zeros before, get four weights for each
    group: those of its normals, and with pairs those of their squares. Without, `second` is not written. Returns the
    number of groups and the sum of all weights.
    """

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
    """``sum_rows(groups, first, second, sums, seed, offset, first_row)`` draws listed groups and adds to `sums`.

    Each row of `sums` gets the sums of `first` times z, and of `second` times z squared. The list has a multiple of
    ROUND groups.
    """
    block = block_f64 if real == "float64" else block_f32
    number = getattr(np, real)
    zero = number(0)

    @njit(forceinline=True)
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
        use_widest_vectors()
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
