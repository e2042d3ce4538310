"""A board in four words of 64 bits, so that a feature takes a few word operations instead of a loop over cells.

A word has six rows of ten columns. Row r, counted from the floor, is bits 10 (r mod 6) to 10 (r mod 6) + 9 of word
r div 6; the leftmost column is the lowest bit. A shift by 10 moves cells by one row, a shift by 1 by one column.
"""

import numpy as np

from multisample.backends.kernels.compilation import jit

from .game import COLUMNS

ROW = np.uint64(0x3FF)
"""The cells of a word's lowest row."""
LEFT = np.uint64(sum(1 << (10 * row) for row in range(6)))
"""The leftmost cells of a word."""
RIGHT = np.uint64(int(LEFT) << 9)
"""The rightmost cells of a word."""
CELLS = np.uint64((1 << 60) - 1)
"""All cells of a word."""

_TEN, _TWENTY, _FORTY, _FIFTY, _SIXTY = (np.uint64(bits) for bits in (10, 20, 40, 50, 60))
# Four rows: the height of the tallest piece.
_FOUR_ROWS = np.uint64((1 << 40) - 1)
_FOUR_LEFT, _FOUR_RIGHT = LEFT & _FOUR_ROWS, RIGHT & _FOUR_ROWS
_BYTES_55, _BYTES_33, _BYTES_0F, _BYTES_01 = (np.uint64(0x0101010101010101 * byte) for byte in (0x55, 0x33, 0x0F, 1))
_ZERO, _NINE = np.uint64(0), np.uint64(9)


@jit
def count(x):
    """The number of set bits of a uint64, as an int64, in the form that LLVM replaces with one instruction."""
    x -= x >> np.uint64(1) & _BYTES_55
    x = (x & _BYTES_33) + (x >> np.uint64(2) & _BYTES_33)
    return np.int64((x + (x >> np.uint64(4)) & _BYTES_0F) * _BYTES_01 >> np.uint64(56))


@jit
def covered(x, lowest):
    """The cells of word `x` at or below full cells; `lowest` has the covered cells in the next word's lowest row."""
    x |= x >> _TEN
    x |= x >> _TWENTY
    return x | x >> _FORTY | lowest * LEFT


@jit
def column_heights(board, heights):
    """Write the heights of the ten columns."""
    c3 = covered(board[3], _ZERO)
    c2 = covered(board[2], c3 & ROW)
    c1 = covered(board[1], c2 & ROW)
    c0 = covered(board[0], c1 & ROW)
    for column in range(COLUMNS):
        cells = LEFT << np.uint64(column)
        heights[column] = count(c0 & cells) + count(c1 & cells) + count(c2 & cells) + count(c3 & cells)


@jit
def landing_row(heights, bottoms, column):
    """The row of a piece's lowest cells after a free fall; `heights` has three elements after the ten columns."""
    return max(
        max(heights[column] - bottoms[0], heights[column + 1] - bottoms[1]),
        max(heights[column + 2] - bottoms[2], heights[column + 3] - bottoms[3]),
    )


@jit
def drop(board, cells, row):
    """The board with the `cells` of a piece added at `row`, and a mask of the full rows among the four from `row` on.

    The mask marks a full row at its rightmost cell.
    """
    x0, x1, x2, x3 = board
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
    # In a row with nine full cells, adding 1 at the left carries into the tenth cell.
    nine = rows & (_FOUR_ROWS ^ _FOUR_RIGHT)
    return (x0, x1, x2, x3), nine + _FOUR_LEFT & rows & _FOUR_RIGHT


@jit
def _without_row(x, above, row):
    """Word `x` without row `row`, and with the lowest row of the word `above` at the top.

    `row` is counted from the word's lowest row. A negative `row` removes the lowest row; 6 or more removes none.
    """
    below = (np.uint64(1) << _TEN * np.uint64(min(max(row, 0), 6))) - np.uint64(1)
    return x & below | (x >> _TEN | above << _FIFTY) & CELLS & ~below


@jit
def without_full_rows(board, full, row):
    """The board without the rows in the mask `full`, which covers the four rows from `row` on."""
    x0, x1, x2, x3 = board
    for k in range(row + 3, row - 1, -1):
        if full >> np.uint64(10 * (k - row) + 9) & np.uint64(1):
            x0, x1 = _without_row(x0, x1, k), _without_row(x1, x2, k - 6)
            x2, x3 = _without_row(x2, x3, k - 12), _without_row(x3, _ZERO, k - 18)
    return x0, x1, x2, x3
