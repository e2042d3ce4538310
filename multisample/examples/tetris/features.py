"""Features of a placement and of the board after it, as compiled code.

The definitions follow the published players and their authors' program. Rows and columns are counted from 0, at the
floor and at the left wall. Walls and floor count as full, and the space above the board as empty. All features except
the first two are computed after full rows are removed.

Dellacherie's six features, and two of Thiery and Scherrer's:

- landing height: the row of the middle of the piece, before rows are removed;
- eroded piece cells: the number of completed rows, times the number of the piece's cells in them;
- row transitions: adjacent cells in a row of which one is full and one is empty; two in every empty row;
- column transitions: adjacent cells in a column of which one is full and one is empty;
- holes: empty cells below a full cell of their column;
- board wells: for each empty cell between two full cells, 1 plus the number of empty cells directly below it;
- hole depth: full cells in unbroken stacks directly above holes;
- rows with holes: their number.

Bertsekas and Tsitsiklis's 22 features: ten column heights, nine absolute differences of adjacent heights, the greatest
height, the holes, and the constant 1.

References
----------
C. P. Fahey, "Tetris AI", 2003 (P. Dellacherie's player).
C. Thiery, B. Scherrer, "Improvements on learning Tetris with cross entropy", ICGA Journal 32 (1), 2009.
C. Thiery, B. Scherrer, "Building controllers for Tetris", ICGA Journal 32 (1), 2009; their program is MDPTetris.
D. P. Bertsekas, J. N. Tsitsiklis, "Neuro-dynamic programming", Athena Scientific, 1996.
"""

import numpy as np

from multisample.backends.kernels.compilation import jit

from .bitboard import CELLS, LEFT, RIGHT, ROW, column_heights, count, covered

_ZERO, _ONE = np.uint64(0), np.uint64(1)
_TEN, _TWENTY, _FORTY, _FIFTY = (np.uint64(bits) for bits in (10, 20, 40, 50))


@jit
def _on_holes(x, below):
    """Full cells in unbroken stacks directly above holes; `below` has holes and such cells in the row below `x`."""
    on = x & (~x << _TEN & CELLS & ~ROW | below)
    on |= x & on << _TEN
    x &= x << _TEN
    on |= x & on << _TWENTY
    x &= x << _TWENTY
    return on | x & on << _FORTY


@jit
def _wells(x):
    """Empty cells between full ones."""
    return ~x & (x << _ONE | LEFT) & (x >> _ONE | RIGHT) & CELLS


@jit
def _well_sum(board, words):
    x0, x1, x2, x3 = board
    t0, t1, t2, t3 = _wells(x0), _wells(x1), _wells(x2), _wells(x3)
    total = 0
    # All wells descend one row per step, until each reaches a full cell.
    while t0 | t1 | t2 | t3 if words == 4 else t0 | t1:
        total += count(t0) + count(t1)
        t0 = (t0 >> _TEN | t1 << _FIFTY) & CELLS & ~x0
        t1 = t1 >> _TEN & ~x1
        if words == 4:
            total += count(t2) + count(t3)
            t1 |= t2 << _FIFTY & CELLS & ~x1
            t2 = (t2 >> _TEN | t3 << _FIFTY) & CELLS & ~x2
            t3 = t3 >> _TEN & ~x3
    return total


@jit
def _sums(board, words):
    """Return six features of a board: row and column transitions, holes, wells, hole depth, and rows with holes.

    All cells from word `words` on are empty. `words` is a compile-time constant.
    """
    rows = columns = depth = holes = with_holes = 0
    below, on_below, above = ROW, _ZERO, _ZERO
    for k in range(words):
        x = board[k]
        # Each cell and its left neighbour, plus the right wall.
        rows += count((x ^ (x << _ONE | LEFT)) & CELLS) + count(~x & RIGHT)
        columns += count(x ^ (x << _TEN & CELLS | below))
        on = _on_holes(x, on_below)
        depth += count(on)
        below, on_below = x >> _FIFTY, (on | ~x & CELLS) >> _FIFTY
    for k in range(words - 1, -1, -1):
        cover = covered(board[k], above)
        empty = (cover >> _TEN | above << _FIFTY) & ~board[k]
        holes += count(empty)
        # In each row, adding 0x1FF to the first nine cells carries into the tenth if any of the nine is a hole.
        with_holes += count(((empty & ~RIGHT) + (CELLS ^ RIGHT) | empty) & RIGHT)
        above = cover & ROW
    return rows, columns + count(below), holes, _well_sum(board, words), depth, with_holes


@jit
def dellacherie(board, height, landing, eroded, features, heights):
    """Write the eight features of Dellacherie, Thiery and Scherrer."""
    features[0], features[1] = landing, eroded
    if board[2] | board[3]:
        sums, rows = _sums(board, 4), 24
    else:
        sums, rows = _sums(board, 2), 12
    for k in range(6):
        features[2 + k] = sums[k]
    features[2] += 2 * (height - rows)


@jit
def bertsekas(board, height, landing, eroded, features, heights):
    """Write the 22 features of Bertsekas and Tsitsiklis; `heights` is scratch memory."""
    column_heights(board, heights)
    total = highest = 0
    for column in range(10):
        total += heights[column]
        highest = max(highest, heights[column])
        features[column] = heights[column]
    for column in range(9):
        features[10 + column] = abs(heights[column] - heights[column + 1])
    features[19] = highest
    # Holes: covered cells that are not full.
    features[20] = total - count(board[0]) - count(board[1]) - count(board[2]) - count(board[3])
    features[21] = 1
