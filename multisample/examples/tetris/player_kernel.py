"""The compiled player: a call plays a limited number of pieces of one game, and the next call continues the game.

The limit lets the caller stop or report progress during a game of minutes. Philox words determine the pieces, as a
function of seed, game and number of the piece.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from multisample.backends.kernels.compilation import compile_cached, jit, source_digest
from multisample.backends.kernels.stream.words import philox4x32_10, word
from multisample.backends.system.sources import python_sources

from .bitboard import ROW, column_heights, count, drop, landing_row, without_full_rows
from .features import bertsekas, dellacherie
from .game import BOTTOMS, COLUMNS, FIRST, MASKS, SIZES

PIECES, LINES, OVER = 4, 5, 6
"""Indices in the state of a game: number of placed pieces, number of completed rows, and whether the game is over."""
STATE = 7
"""Number of uint64 words in the state of a game; the first four are the board."""

# "Tetris's" in ASCII. The key makes the pieces independent of samples with the same seed.
_KEY_0, _KEY_1 = np.uint64(0x54657472), np.uint64(0x69732773)
_THIRTY_TWO = np.uint64(32)
_KINDS = np.uint64(7)
# Ten columns, and three more for columns that narrow pieces do not have.
_HEIGHTS = 13
_SOURCES = python_sources("examples", "tetris")


@jit
def _draw_four(seed, game, block, kinds):
    """Write pieces ``4 * block`` to ``4 * block + 3`` of a game; the seven pieces are equally likely."""
    words = philox4x32_10(
        word(block), word(game), game >> _THIRTY_TWO, block >> _THIRTY_TWO,
        word(seed) ^ _KEY_0, seed >> _THIRTY_TWO ^ _KEY_1,
    )  # fmt: skip
    for k in range(4):
        kinds[k] = word(words[k]) * _KINDS >> _THIRTY_TWO


@jit
def _place(write_features, board, heights, orientation, column, height, features, scratch):
    """Write the features of a placement; returns the board after it, and the number of completed rows.

    If the piece does not fit, the function returns -1 as this number, and writes no features.
    """
    rows = SIZES[orientation, 0]
    row = landing_row(heights, BOTTOMS[orientation], column)
    if row + rows > height:
        return board, -1
    cells = MASKS[orientation] << np.uint64(column)
    board, full = drop(board, cells, row)
    lines = eroded = 0
    if full:
        lines = count(full)
        eroded = lines * count(cells & (full >> np.uint64(9)) * ROW)
        board = without_full_rows(board, full, row)
    write_features(board, height, row + 0.5 * (rows - 1), eroded, features, scratch)
    return board, lines


@jit
def _play(write_features, d, weights, state, seed, game, height, most_pieces, most_lines):
    """Place up to `most_pieces` pieces, each where the value is highest; returns the last orientation and column.

    `d`, the number of features, is a compile-time constant.
    """
    board = state[0], state[1], state[2], state[3]
    placed, lines = state[PIECES], np.int64(state[LINES])
    heights, scratch = np.zeros(_HEIGHTS, np.int64), np.zeros(_HEIGHTS, np.int64)
    features, kinds = np.zeros(d, np.float64), np.zeros(4, np.int64)
    _draw_four(seed, game, placed // np.uint64(4), kinds)
    best_orientation = best_column = -1
    for _ in range(most_pieces):
        if state[OVER] or lines >= most_lines:
            break
        if placed % np.uint64(4) == 0:
            _draw_four(seed, game, placed // np.uint64(4), kinds)
        kind = kinds[placed % np.uint64(4)]
        column_heights(board, heights)
        best, best_lines, best_board = -math.inf, -1, board
        for orientation in range(FIRST[kind], FIRST[kind + 1]):
            for column in range(COLUMNS + 1 - SIZES[orientation, 1]):
                after, completed = _place(
                    write_features, board, heights, orientation, column, height, features, scratch
                )
                if completed < 0:
                    continue
                value = 0.0
                for k in range(d):
                    value += weights[k] * features[k]
                if value > best:
                    best, best_lines, best_board = value, completed, after
                    best_orientation, best_column = orientation, column
        if best_lines < 0:
            state[OVER] = np.uint64(1)
            break
        board = best_board
        lines += best_lines
        placed += np.uint64(1)
    state[0], state[1], state[2], state[3] = board
    state[PIECES], state[LINES] = placed, np.uint64(lines)
    return 64 * best_orientation + best_column


_SETS = {"dellacherie": (dellacherie, 8), "bertsekas": (bertsekas, 22)}
_REAL, _WORDS = types.Array(types.float64, 1, "C"), types.Array(types.uint64, 1, "C")


def _compiled(function: Callable[..., Any], name: str, signature: Any) -> Callable[..., int]:
    digest = source_digest() + _SOURCES.digest()
    return compile_cached(signature, function, f"tetris-{name}", digest, allocates=True).entry_point


@functools.cache
def player_kernel(features: str) -> Callable[..., int]:
    """``kernel(weights, state, seed, game, height, most_pieces, most_lines)``: continues the game in `state`.

    The kernel returns 64 times the orientation of the last piece plus its column.
    """
    write, d = _SETS[features]

    def kernel(weights, state, seed, game, height, most_pieces, most_lines):
        return _play(write, d, weights, state, seed, game, height, most_pieces, most_lines)

    integers = (types.uint64, types.uint64, types.int64, types.int64, types.int64)
    return _compiled(kernel, f"play_{features}", types.int64(_REAL, _WORDS, *integers))


@functools.cache
def feature_kernel(features: str) -> Callable[..., int]:
    """``kernel(state, orientation, column, height, features)``: places one piece and writes its features.

    The kernel returns the number of completed rows. If the piece does not fit, it returns -1 and writes nothing.
    """
    write, _ = _SETS[features]

    def kernel(state, orientation, column, height, features):
        board = state[0], state[1], state[2], state[3]
        heights, scratch = np.zeros(_HEIGHTS, np.int64), np.zeros(_HEIGHTS, np.int64)
        column_heights(board, heights)
        board, lines = _place(write, board, heights, orientation, column, height, features, scratch)
        state[0], state[1], state[2], state[3] = board
        return lines

    integers = (types.int64, types.int64, types.int64)
    return _compiled(kernel, f"features_{features}", types.int64(_WORDS, *integers, _REAL))
