"""Conversion of boards between text, NumPy arrays and the words of `multisample.examples.tetris.bitboard`."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

COLUMNS = 10
MOST_ROWS = 24
"""Rows in four words."""

_ROWS_OF_WORD = 6

Board: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]
"""Full cells, shape (rows, 10), the lowest row first."""

Words: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]


def parse(text: str) -> Board:
    """The board that is drawn in `text`, highest row first. ``.`` is an empty cell; other characters are full cells.

    Examples
    --------
    >>> parse('''
    ...     #.........
    ...     ##.#######
    ... ''').astype(int)
    array([[1, 1, 0, 1, 1, 1, 1, 1, 1, 1],
           [1, 0, 0, 0, 0, 0, 0, 0, 0, 0]])
    """
    lines = text.split()
    for line in lines:
        if len(line) != COLUMNS:
            raise ValueError(f"text: expected lines of {COLUMNS} cells, got {line!r}")
    if len(lines) > MOST_ROWS:
        raise ValueError(f"text: expected at most {MOST_ROWS} rows, got {len(lines)}")
    return np.array([[cell != "." for cell in line] for line in reversed(lines)], bool).reshape(-1, COLUMNS)


def words_of(board: Board) -> Words:
    """The four words of a board, shape (4,); ValueError if `board` has another shape."""
    if board.ndim != 2 or len(board) > MOST_ROWS or board.shape[1] != COLUMNS:
        raise ValueError(f"board: expected shape (rows, {COLUMNS}) of at most {MOST_ROWS} rows, got {board.shape}")
    cells = np.zeros((4, _ROWS_OF_WORD, COLUMNS), bool)
    cells.reshape(-1, COLUMNS)[: len(board)] = board
    bits = np.uint64(1) << np.arange(_ROWS_OF_WORD * COLUMNS, dtype=np.uint64)
    words: Words = (cells.reshape(4, -1) * bits).sum(axis=1, dtype=np.uint64)
    return words


def board_of(words: Words) -> Board:
    """The 24 rows of the board in the first four `words`."""
    places = np.arange(_ROWS_OF_WORD * COLUMNS, dtype=np.uint64)
    board: Board = ((words[:4, None] >> places) & np.uint64(1)).astype(bool).reshape(MOST_ROWS, COLUMNS)
    return board
