"""The seven pieces, drawn as text that can be checked by eye. The tables for compiled code are computed from it."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Shape: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]

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

# Greater than the height of any column.
_NO_BOTTOM = 64


def _orientations(drawn: list[str]) -> list[Shape]:
    """The different shapes of a piece under quarter turns, lowest row first."""
    shape: Shape = np.array([[cell == "#" for cell in line] for line in reversed(drawn)])
    turned: dict[bytes, Shape] = {}
    for _ in range(4):
        turned.setdefault(bytes(shape.shape) + shape.tobytes(), shape)
        shape = np.rot90(shape)
    return list(turned.values())


def _mask(shape: Shape) -> int:
    return sum(1 << (10 * int(row) + int(column)) for row, column in np.argwhere(shape))


def _bottoms(shape: Shape) -> list[int]:
    """The lowest cell of each of four columns; `_NO_BOTTOM` for columns that the piece does not have."""
    return [*shape.argmax(axis=0).tolist(), *[_NO_BOTTOM] * (4 - shape.shape[1])]


ORIENTATIONS: list[list[Shape]] = [_orientations(drawn) for drawn in _DRAWN.values()]
"""The different shapes of each piece: bool, (rows, columns), lowest row first."""

_ALL = [shape for shapes in ORIENTATIONS for shape in shapes]

FIRST = np.cumsum([0, *map(len, ORIENTATIONS)])
"""Orientations of piece ``p`` are numbers ``FIRST[p]`` to ``FIRST[p + 1] - 1`` in the tables below: (8,), int64."""

MASKS = np.array([_mask(shape) for shape in _ALL], np.uint64)
"""The cells of each orientation at the left wall and on the floor, ten bits for each row: (19,), uint64."""

SIZES = np.array([shape.shape for shape in _ALL], np.int64)
"""Rows and columns of each orientation: (19, 2), int64."""

BOTTOMS = np.array([_bottoms(shape) for shape in _ALL], np.int64)
"""The lowest cell in each column of each orientation: (19, 4), int64."""
