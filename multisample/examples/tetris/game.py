"""The board as a NumPy array and as words, and the seven pieces, drawn as text."""

from typing import Any, TypeAlias

import numpy as np

COLUMNS = 10
MOST_ROWS = 24
"""Rows in four words."""
_PLACES = np.arange(6 * COLUMNS, dtype=np.uint64)

Board: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]
"""Full cells, shape (rows, 10), the lowest row first."""

Words: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]


def words_of(board: Board) -> Words:
    """The four words of `multisample.examples.tetris.bitboard` of a board, shape (4,)."""
    cells = np.zeros((MOST_ROWS, COLUMNS), bool)
    cells[: len(board), : board.shape[1]] = board
    words: Words = cells.reshape(4, -1) @ (np.uint64(1) << _PLACES)
    return words


def board_of(words: Words) -> Board:
    """The 24 rows of the board in the first four `words`."""
    board: Board = (words[:4, None] >> _PLACES & np.uint64(1)).astype(bool).reshape(MOST_ROWS, COLUMNS)
    return board


_DRAWN = {
    "I": ["####"],
    "O": ["##", "##"],
    "T": ["###", ".#."],
    "S": [".##", "##."],
    "Z": ["##.", ".##"],
    "J": ["###", "..#"],
    "L": ["###", "#.."],
}

NAMES = "".join(_DRAWN)
"""Piece number ``p`` is called ``NAMES[p]``."""


def _orientations(lines: list[str]) -> list[Board]:
    """The different shapes of a piece under quarter turns. In `lines`, the highest row is first."""
    shape = np.array([[cell == "#" for cell in line] for line in reversed(lines)])
    turned: dict[str, Board] = {}
    for turns in range(4):
        turned.setdefault(str(np.rot90(shape, turns)), np.rot90(shape, turns))
    return list(turned.values())


ORIENTATIONS: list[list[Board]] = [_orientations(lines) for lines in _DRAWN.values()]
"""The different shapes of each piece: bool, (rows, columns), lowest row first."""

SHAPES = [shape for shapes in ORIENTATIONS for shape in shapes]

FIRST = np.cumsum([0, *map(len, ORIENTATIONS)])
"""Orientations of piece ``p`` are ``SHAPES[FIRST[p]]`` to ``SHAPES[FIRST[p + 1] - 1]``: (8,), int64."""

MASKS = np.array([words_of(shape)[0] for shape in SHAPES])
"""The cells of each orientation at the left wall and on the floor, ten bits for each row: (19,), uint64."""

SIZES = np.array([shape.shape for shape in SHAPES], np.int64)
"""Rows and columns of each orientation: (19, 2), int64."""

# Nothing is as high as the bottom of a column that the piece does not have.
BOTTOMS = np.full((len(SHAPES), 4), 64)
"""The lowest cell in each column of each orientation: (19, 4), int64."""
for _bottoms, _shape in zip(BOTTOMS, SHAPES, strict=True):
    _bottoms[: _shape.shape[1]] = _shape.argmax(axis=0)
