"""What a player looks at: features of a placement and of the board that it leaves, as compiled code.

Definitions are those of the published players and of the program that their authors measured them with. Rows and
columns are counted from 0, at the floor and at the left wall; walls and floor are full, the space above the board is
empty, and full rows are taken away before anything but the first two features is looked at.

Dellacherie's six, and two of Thiery and Scherrer's:

- landing height: the row of the middle of the piece, before rows are taken away;
- eroded piece cells: the rows that the placement completes, times the cells of the piece in them;
- row transitions: neighbours in a row of which one is full and one empty, two in every empty row;
- column transitions: the same in columns;
- holes: empty cells with a full one somewhere above;
- board wells: for each empty cell between two full ones, itself and the empty cells right below it, counted;
- hole depth: full cells that lie on a hole, or on such full cells;
- rows with holes.

Bertsekas and Tsitsiklis's 22: ten column heights, nine absolute differences of heights that are side by side, the
greatest height, the holes, and the constant 1.

References
----------
C. P. Fahey, "Tetris AI", 2003, which has P. Dellacherie's player.
C. Thiery, B. Scherrer, "Improvements on learning Tetris with cross entropy", ICGA Journal 32 (1), 2009.
C. Thiery, B. Scherrer, "Building controllers for Tetris", ICGA Journal 32 (1), 2009; their program is MDPTetris.
D. P. Bertsekas, J. N. Tsitsiklis, "Neuro-dynamic programming", Athena Scientific, 1996.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .bitboard import CELLS, LEFT, RIGHT, ROW, column_heights, count, covered

__all__ = ["bertsekas", "dellacherie"]

_ZERO, _ONE = np.uint64(0), np.uint64(1)
_TEN, _TWENTY, _FORTY, _FIFTY = (np.uint64(bits) for bits in (10, 20, 40, 50))


@njit(forceinline=True)
def _row_transitions(x):
    # Each cell and the one on its left, and then the right wall.
    return count((x ^ (x << _ONE | LEFT)) & CELLS) + count(~x & RIGHT)


@njit(forceinline=True)
def _column_transitions(x, below):
    return count(x ^ (x << _TEN & CELLS | below))


@njit(forceinline=True)
def _on_holes(x, below):
    """Full cells on holes, or on such cells; `below` are the holes and such cells of the row under the word."""
    on = x & (~x << _TEN & CELLS & ~ROW | below)
    on |= x & on << _TEN
    x &= x << _TEN
    on |= x & on << _TWENTY
    x &= x << _TWENTY
    return on | x & on << _FORTY


@njit(forceinline=True)
def _holes(x, cover, above):
    """Holes of word `x`; `cover` are its covered cells, and `above` those of the row over it."""
    return (cover >> _TEN | above << _FIFTY) & ~x


@njit(forceinline=True)
def _rows_with(holes):
    # Any of nine cells carries into the tenth place.
    return count(((holes & ~RIGHT) + (CELLS ^ RIGHT) | holes) & RIGHT)


@njit(forceinline=True)
def _wells(x):
    """Empty cells between full ones."""
    return ~x & (x << _ONE | LEFT) & (x >> _ONE | RIGHT) & CELLS


@njit(forceinline=True)
def _well_sum(x0, x1, x2, x3):
    t0, t1, t2, t3 = _wells(x0), _wells(x1), _wells(x2), _wells(x3)
    total = 0
    # All wells go down a row at a time, until each has come to a full cell.
    while t2 | t3:
        total += count(t0) + count(t1) + count(t2) + count(t3)
        t0 = (t0 >> _TEN | t1 << _FIFTY) & CELLS & ~x0
        t1 = (t1 >> _TEN | t2 << _FIFTY) & CELLS & ~x1
        t2 = (t2 >> _TEN | t3 << _FIFTY) & CELLS & ~x2
        t3 = t3 >> _TEN & ~x3
    while t0 | t1:
        total += count(t0) + count(t1)
        t0 = (t0 >> _TEN | t1 << _FIFTY) & CELLS & ~x0
        t1 = t1 >> _TEN & ~x1
    return total


@njit(forceinline=True)
def dellacherie(x0, x1, x2, x3, height, landing, eroded, features, heights):
    """Write the eight features of Dellacherie, Thiery and Scherrer."""
    rows = _row_transitions(x0) + _row_transitions(x1)
    columns = _column_transitions(x0, ROW) + _column_transitions(x1, x0 >> _FIFTY)
    on0 = _on_holes(x0, _ZERO)
    on1 = _on_holes(x1, (on0 | ~x0 & CELLS) >> _FIFTY)
    depth = count(on0) + count(on1)
    holes = with_holes = 0
    above = _ZERO
    if x2 | x3:
        rows += _row_transitions(x2) + _row_transitions(x3)
        columns += _column_transitions(x2, x1 >> _FIFTY) + _column_transitions(x3, x2 >> _FIFTY) + count(x3 >> _FIFTY)
        on2 = _on_holes(x2, (on1 | ~x1 & CELLS) >> _FIFTY)
        on3 = _on_holes(x3, (on2 | ~x2 & CELLS) >> _FIFTY)
        depth += count(on2) + count(on3)
        c3 = covered(x3, _ZERO)
        c2 = covered(x2, c3 & ROW)
        h3, h2 = _holes(x3, c3, _ZERO), _holes(x2, c2, c3 & ROW)
        holes = count(h3) + count(h2)
        with_holes = _rows_with(h3) + _rows_with(h2)
        above = c2 & ROW
    else:
        rows += 24
        columns += count(x1 >> _FIFTY)
    c1 = covered(x1, above)
    c0 = covered(x0, c1 & ROW)
    h1, h0 = _holes(x1, c1, above), _holes(x0, c0, c1 & ROW)
    features[0] = landing
    features[1] = eroded
    features[2] = rows - 2 * (24 - height)
    features[3] = columns
    features[4] = holes + count(h1) + count(h0)
    features[5] = _well_sum(x0, x1, x2, x3)
    features[6] = depth
    features[7] = with_holes + _rows_with(h1) + _rows_with(h0)


@njit(forceinline=True)
def bertsekas(x0, x1, x2, x3, height, landing, eroded, features, heights):
    """Write the 22 features of Bertsekas and Tsitsiklis; `heights` is for use."""
    column_heights(x0, x1, x2, x3, heights)
    total = highest = 0
    for column in range(10):
        total += heights[column]
        highest = max(highest, heights[column])
        features[column] = heights[column]
    for column in range(9):
        features[10 + column] = abs(heights[column] - heights[column + 1])
    features[19] = highest
    # What is covered and not full.
    features[20] = total - count(x0) - count(x1) - count(x2) - count(x3)
    features[21] = 1
