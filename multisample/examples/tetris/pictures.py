"""Pictures of training and games. Matplotlib and Pillow are optional: `missing` tells what to install."""

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .game import COLUMNS, MOST_ROWS, SHAPES
from .learning import Iteration
from .player import Move

_CELL = 12
_MARGIN = 6
_CAPTION = 18
_MILLISECONDS = 90
_LAST_MILLISECONDS = 3000
# Kinds of cells: empty, one of seven pieces (1 to 7), part of a full row, from before the first move.
_EMPTY, _FULL_ROW, _OLD = 0, 8, 9
_COLOURS = [
    (24, 26, 32), (64, 196, 222), (240, 200, 60), (170, 100, 210), (100, 200, 100), (225, 85, 85), (80, 120, 220),
    (235, 150, 60), (250, 250, 250), (110, 114, 124),
]  # fmt: skip
_GRID, _INK = 10, 11
_PALETTE = [*_COLOURS, (40, 43, 51), (215, 218, 224)]


def missing() -> str:
    """The missing packages and the command that installs them; empty if none is missing."""
    packages = {"matplotlib": "matplotlib", "PIL": "pillow"}
    absent = [package for module, package in packages.items() if importlib.util.find_spec(module) is None]
    return f"no {' and no '.join(absent)}: pip install -e '.[tetris]'" if absent else ""


def plot_learning(path: Path, history: Sequence[Iteration]) -> None:
    """Write the learning curve as PNG: lines, and the largest standard deviation, by iteration."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    lines, spread = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    iterations = np.arange(1, len(history) + 1)
    lines.plot(iterations, [done.best for done in history], label="best player")
    lines.plot(iterations, [done.mean for done in history], label="mean of all players")
    # Untrained players clear no lines.
    lines.set_yscale("symlog", linthresh=1)
    lines.set_ylim(bottom=0)
    lines.set_ylabel("lines per training game")
    lines.legend(loc="lower right")
    spread.plot(iterations, [done.sigma for done in history], color="C2")
    spread.set_ylabel("sigma")
    spread.set_ylim(bottom=0)
    spread.set_xlabel("iteration")
    for axes in (lines, spread):
        axes.grid(alpha=0.3)
    figure.savefig(path, format="png", dpi=110)


def animate(path: Path, moves: Sequence[Move], height: int) -> None:
    """Write the moves of a game on `height` rows as GIF.

    If `moves` begin after the first move of the game, the first of them is not shown: only its board is used.
    """
    from PIL import Image, ImageDraw

    size = (COLUMNS * _CELL + 2 * _MARGIN, height * _CELL + 2 * _MARGIN + _CAPTION)
    pictures = []
    for grid, lines in _grids(moves):
        picture = Image.new("P", size, _EMPTY)
        picture.putpalette([channel for colour in _PALETTE for channel in colour])
        draw = ImageDraw.Draw(picture)
        for row, column in np.ndindex(height, COLUMNS):
            left, top = _MARGIN + column * _CELL, _MARGIN + (height - 1 - row) * _CELL
            cell = (left, top, left + _CELL - 1, top + _CELL - 1)
            draw.rectangle(cell, fill=int(grid[row, column]), outline=_GRID)
        draw.text((_MARGIN, size[1] - _CAPTION), f"{lines:,} lines", fill=_INK)
        pictures.append(picture)
    first, *rest = pictures
    durations = [_MILLISECONDS] * len(rest) + [_LAST_MILLISECONDS]
    first.save(path, format="GIF", save_all=True, append_images=rest, duration=durations, loop=0, optimize=False)


def _grids(moves: Sequence[Move]) -> Iterator[tuple[np.ndarray[Any, Any], int]]:
    """The kinds of all cells, and the number of lines, after each move, and before completed rows are removed."""
    grid = np.zeros((MOST_ROWS + 4, COLUMNS), np.uint8)
    lines = 0
    if moves[0].number > 0:
        first, *moves = moves
        grid[:MOST_ROWS][first.board] = _OLD
        lines = first.lines
    for move in moves:
        shape = SHAPES[move.orientation]
        heights = np.where(grid.any(axis=0), len(grid) - np.argmax(grid[::-1] != _EMPTY, axis=0), 0)
        rows, columns = shape.shape
        across = slice(move.column, move.column + columns)
        row = int((heights[across] - shape.argmax(axis=0)).max())
        grid[row : row + rows, across][shape] = 1 + move.piece
        full = (grid != _EMPTY).all(axis=1)
        if full.any():
            marked = grid.copy()
            marked[full] = _FULL_ROW
            yield marked, lines
            grid = np.vstack([grid[~full], np.zeros((full.sum(), COLUMNS), np.uint8)])
        lines = move.lines
        yield grid.copy(), lines
