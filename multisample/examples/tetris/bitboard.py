"""A board in four words of 64 bits, so that a feature is a few operations on whole words, not a loop over cells.

Row r, counted from the floor, is bits 10 (r mod 6) to 10 (r mod 6) + 9 of word r div 6, the leftmost column lowest: six
rows to a word, and 24 in all. Shifts by 10 lead to the row above or below, and shifts by 1 to the next column.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = [
    "CELLS",
    "LEFT",
    "RIGHT",
    "ROW",
    "column_heights",
    "count",
    "covered",
    "drop",
    "landing_row",
    "without_full_rows",
]

ROW = np.uint64(0x3FF)
"""The cells of a word's lowest row."""
LEFT = np.uint64(sum(1 << (10 * row) for row in range(6)))
"""The leftmost cells of a word."""
RIGHT = np.uint64(int(LEFT) << 9)
"""The rightmost cells of a word."""
CELLS = np.uint64((1 << 60) - 1)
"""All cells of a word."""

_TEN, _TWENTY, _FORTY, _FIFTY, _SIXTY = (np.uint64(bits) for bits in (10, 20, 40, 50, 60))
# Four rows, as many as a piece can have.
_FOUR_ROWS = np.uint64((1 << 40) - 1)
_FOUR_LEFT, _FOUR_RIGHT = LEFT & _FOUR_ROWS, RIGHT & _FOUR_ROWS
_ZERO, _NINE = np.uint64(0), np.uint64(9)


@intrinsic
def count(typingctx: Any, x: Any) -> Any:
    """How many bits of a uint64 are set, as an int64."""
    if x != types.uint64:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(word, [word]), "llvm.ctpop.i64")
        return builder.call(function, args)

    return types.int64(x), codegen


@njit(forceinline=True)
def covered(x, lowest):
    """The cells of word `x` that are filled or lie under filled ones, `lowest` being those of the row above it."""
    x |= x >> _TEN
    x |= x >> _TWENTY
    return x | x >> _FORTY | lowest * LEFT


@njit(forceinline=True)
def column_heights(x0, x1, x2, x3, heights):
    """Write how high the ten columns are."""
    c3 = covered(x3, _ZERO)
    c2 = covered(x2, c3 & ROW)
    c1 = covered(x1, c2 & ROW)
    c0 = covered(x0, c1 & ROW)
    for column in range(10):
        cells = LEFT << np.uint64(column)
        heights[column] = count(c0 & cells) + count(c1 & cells) + count(c2 & cells) + count(c3 & cells)


@njit(forceinline=True)
def landing_row(heights, bottoms, column):
    """The row that the lowest cells of a piece come to in a free fall; `heights` has three more than ten columns."""
    return max(
        max(heights[column] - bottoms[0], heights[column + 1] - bottoms[1]),
        max(heights[column + 2] - bottoms[2], heights[column + 3] - bottoms[3]),
    )


@njit(forceinline=True)
def drop(x0, x1, x2, x3, cells, row):
    """The board with the `cells` of a piece put in at `row`, and which of the four rows from there on are full.

    The latter are marked at their rightmost cells.
    """
    place = _TEN * (np.uint64(row) % np.uint64(6))
    rest = _SIXTY - place
    low, high = cells << place & CELLS, cells >> rest
    if row < 6:
        x0 |= low
        x1 |= high
        rows = x0 >> place | x1 << rest
    elif row < 12:
        x1 |= low
        x2 |= high
        rows = x1 >> place | x2 << rest
    elif row < 18:
        x2 |= low
        x3 |= high
        rows = x2 >> place | x3 << rest
    else:
        x3 |= low
        rows = x3 >> place
    # Nine ones and a one on the left carry into the tenth place.
    nine = rows & (_FOUR_ROWS ^ _FOUR_RIGHT)
    return x0, x1, x2, x3, nine + _FOUR_LEFT & rows & _FOUR_RIGHT


@njit(forceinline=True)
def _without_row(x, above, row):
    """Word `x` without one row, with the lowest row of the word `above` at the top.

    Rows are counted from the word's lowest: one that is under it takes the lowest, and one over it leaves all.
    """
    below = (np.uint64(1) << _TEN * np.uint64(min(max(row, 0), 6))) - np.uint64(1)
    return x & below | (x >> _TEN | above << _FIFTY) & CELLS & ~below


@njit
def without_full_rows(x0, x1, x2, x3, full, row):
    """The board without the rows that are marked in `full`, the four from `row` on, and what was above them lowered."""
    for k in range(3, -1, -1):
        if full >> np.uint64(10 * k + 9) & np.uint64(1):
            x0, x1, x2, x3 = (
                _without_row(x0, x1, row + k),
                _without_row(x1, x2, row + k - 6),
                _without_row(x2, x3, row + k - 12),
                _without_row(x3, _ZERO, row + k - 18),
            )
    return x0, x1, x2, x3
