"""The seven pieces, drawn as text: tables that compiled code reads are made from what can be checked by eye."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

__all__ = ["BOTTOMS", "FIRST", "MASKS", "NAMES", "ORIENTATIONS", "SIZES"]

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

# Further down than any column is high.
_NO_BOTTOM = 64


def _orientations(drawn: list[str]) -> list[Shape]:
    """The different shapes that quarter turns make, lowest row first."""
    shape: Shape = np.array([[cell == "#" for cell in line] for line in reversed(drawn)])
    turned: dict[bytes, Shape] = {}
    for _ in range(4):
        turned.setdefault(bytes(shape.shape) + shape.tobytes(), shape)
        shape = np.rot90(shape)
    return list(turned.values())


def _mask(shape: Shape) -> int:
    return sum(1 << (10 * int(row) + int(column)) for row, column in np.argwhere(shape))


def _bottoms(shape: Shape) -> list[int]:
    """The lowest cell of each of four columns; far down, where the piece has no such column."""
    return [*shape.argmax(axis=0).tolist(), *[_NO_BOTTOM] * (4 - shape.shape[1])]


ORIENTATIONS: list[list[Shape]] = [_orientations(drawn) for drawn in _DRAWN.values()]
"""Of each piece the shapes that differ: bool, (rows, columns), lowest row first."""

_ALL = [shape for shapes in ORIENTATIONS for shape in shapes]

FIRST = np.cumsum([0, *map(len, ORIENTATIONS)])
"""Orientations of piece ``p`` are numbers ``FIRST[p]`` to ``FIRST[p + 1] - 1`` in the tables below: (8,), int64."""

MASKS = np.array([_mask(shape) for shape in _ALL], np.uint64)
"""The cells at the left wall and on the floor, ten bits for each row: (19,), uint64."""

SIZES = np.array([shape.shape for shape in _ALL], np.int64)
"""Rows and columns: (19, 2), int64."""

BOTTOMS = np.array([_bottoms(shape) for shape in _ALL], np.int64)
"""The lowest cell of each column: (19, 4), int64."""
