"""Many games at once, on every core: each game is one task, played some thousand pieces at a time.

What a game brings depends on its number, the seed and the weights alone: not on threads, nor on what else is played.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from multisample._arguments import check_choice, checked_integer
from multisample.backends.system.worker_pool import run_all, thread_count

from .board import COLUMNS, MOST_ROWS, Board, board_of, words_of
from .pieces import FIRST, NAMES, ORIENTATIONS
from .player_kernel import LINES, OVER, PIECES, STATE, feature_kernel, player_kernel

__all__ = ["FEATURES", "Move", "Played", "checked_weights", "moves", "placement", "play"]

FEATURES: dict[str, tuple[str, ...]] = {
    "dellacherie": (
        "landing height", "eroded piece cells", "row transitions", "column transitions", "holes", "board wells",
        "hole depth", "rows with holes",
    ),
    "bertsekas": (
        *(f"height of column {column}" for column in range(10)),
        *(f"difference of columns {column} and {column + 1}" for column in range(9)),
        "greatest height", "holes", "constant",
    ),
}  # fmt: skip
"""Names of the features of each set, in the order of their weights; module `features` says what they are."""

ENDLESS = 1 << 62
_LEAST_ROWS = 4
# 25 ms: what Ctrl-C may have to wait.
_SLICE = 1 << 15


class Played(NamedTuple):
    """What came of games, arrays of shape (n, games): one row for each player."""

    lines: np.ndarray[Any, np.dtype[np.int64]]
    """Rows completed."""
    pieces: np.ndarray[Any, np.dtype[np.int64]]
    """Pieces placed."""
    over: np.ndarray[Any, np.dtype[np.bool_]]
    """Whether a piece found no room: the others were stopped at `most_lines`, or at `most_pieces`."""


class Move(NamedTuple):
    """One placement of a game."""

    number: int
    """How many pieces came before."""
    piece: int
    """The number of the piece, in `multisample.examples.tetris.pieces.NAMES`."""
    orientation: int
    """The number of its orientation, in the tables of `multisample.examples.tetris.pieces`."""
    column: int
    """Where its leftmost column is."""
    lines: int
    """Rows completed by then, with those of this placement."""
    board: Board
    """The board that it leaves, shape (24, 10), the lowest row first."""


def checked_weights(weights: Any, features: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """`weights` as an array of shape (d, n) that belong to the set of `features`."""
    check_choice("features", features, tuple(FEATURES))
    checked: np.ndarray[Any, np.dtype[np.float64]] = np.asarray(weights, np.float64)
    d = len(FEATURES[features])
    if checked.ndim not in (1, 2) or len(checked) != d:
        raise ValueError(f"weights: expected shape ({d},) or ({d}, n), got {checked.shape}")
    if not np.isfinite(checked).all():
        raise ValueError(f"weights: expected finite numbers, got {checked[~np.isfinite(checked)][0]}")
    return checked.reshape(d, -1)


def checked_height(height: int) -> int:
    """`height`, if a board can have it."""
    return checked_integer("height", height, _LEAST_ROWS, MOST_ROWS + 1)


def play(
    weights: Any,
    games: Sequence[int],
    *,
    seed: int = 0,
    features: str = "dellacherie",
    height: int = 20,
    most_lines: int = ENDLESS,
    most_pieces: int = ENDLESS,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Played:
    """Let every player play every game.

    A player sees the piece that comes, and no further. Of all the places where it fits under the top of the board,
    falling straight down in any orientation, the player takes the one whose features times its weights are the most;
    the first such one, if there are several. The game ends when a piece fits nowhere.

    Parameters
    ----------
    weights : array_like of float, shape (d,) or (d, n)
        One column for each player.
    games : sequence of int, shape (g,)
        The numbers of the games. A number stands for a sequence of pieces, together with the seed.
    seed : int
        0 <= seed < 2**64.
    features : {"dellacherie", "bertsekas"}
        The set of features that the weights are for: d is 8 or 22.
    height : int
        Rows of the board, 4 to 24. Players live much shorter on low boards.
    most_lines, most_pieces : int
        Where a game is stopped if it is not over by then.
    threads : int, optional
        How many threads play; by default `MULTISAMPLE_NUM_THREADS`, or one for each core.
    progress : callable, optional
        Called on this thread now and then, with how many games are finished.

    Returns
    -------
    Played
        Lines, pieces and ends of all games, each of shape (n, g).

    Raises
    ------
    ValueError
        If the weights do not fit the features or are not finite, or a number is out of range.
    TypeError
        If a number is not an integer.

    Examples
    --------
    Dellacherie's own weights, on a low board:

    >>> played = play([-1, 1, -1, -1, -4, -1, 0, 0], range(3), seed=7, height=8)
    >>> played.lines.shape, bool(played.over.all())
    ((1, 3), True)
    """
    columns = np.ascontiguousarray(checked_weights(weights, features).T)
    seed, height = checked_integer("seed", seed, 0, 1 << 64), checked_height(height)
    kernel = player_kernel(features)
    numbers = [checked_integer("games", number, 0, 1 << 64) for number in games]
    most_lines = checked_integer("most_lines", most_lines, 0, ENDLESS + 1)
    most_pieces = checked_integer("most_pieces", most_pieces, 0, ENDLESS + 1)
    states = np.zeros((len(columns), len(numbers), STATE), np.uint64)
    caller = threading.get_ident()
    stopped = False
    finished = 0

    def finish(task: tuple[int, int]) -> None:
        nonlocal stopped, finished
        player, game = task
        state = states[player, game]
        try:
            while not stopped and not state[OVER] and state[LINES] < most_lines and state[PIECES] < most_pieces:
                most = min(_SLICE, most_pieces - int(state[PIECES]))
                kernel(columns[player], state, seed, numbers[game], height, most, most_lines)
                if progress is not None and threading.get_ident() == caller:
                    progress(finished)
            finished += 1
        except BaseException:
            stopped = True
            raise

    tasks = [(player, game) for game in range(len(numbers)) for player in range(len(columns))]
    run_all(finish, tasks, thread_count() if threads is None else checked_integer("threads", threads, 1, 1 << 16))
    return Played(states[..., LINES].astype(np.int64), states[..., PIECES].astype(np.int64), states[..., OVER] != 0)


def moves(
    weights: Any,
    game: int,
    first: int,
    last: int,
    *,
    seed: int = 0,
    features: str = "dellacherie",
    height: int = 20,
) -> list[Move]:
    """Placements `first` to ``last - 1`` of a game of one player, or to its end, if that comes before.

    Parameters
    ----------
    weights : array_like of float, shape (d,)
        The player.
    game : int
        The number of the game.
    first, last : int
        Which placements, counted from 0.
    seed, features, height : various
        As for `play`.

    Returns
    -------
    list of Move
        One for each piece.

    Raises
    ------
    TypeError
        As by `play`.
    ValueError
        As by `play`.

    Examples
    --------
    >>> [move.lines for move in moves([-1, 1, -1, -1, -4, -1, 0, 0], 0, 10, 15, seed=7)]
    [3, 3, 3, 3, 4]
    """
    (column,) = np.ascontiguousarray(checked_weights(weights, features).T)
    seed, height = checked_integer("seed", seed, 0, 1 << 64), checked_height(height)
    game = checked_integer("game", game, 0, 1 << 64)
    first, last = checked_integer("first", first, 0, ENDLESS + 1), checked_integer("last", last, 0, ENDLESS + 1)
    kernel = player_kernel(features)
    state = np.zeros(STATE, np.uint64)
    while not state[OVER] and state[PIECES] < first:
        kernel(column, state, seed, game, height, min(_SLICE, first - int(state[PIECES])), ENDLESS)
    made = []
    while not state[OVER] and state[PIECES] < last:
        number = int(state[PIECES])
        orientation, left = divmod(kernel(column, state, seed, game, height, 1, ENDLESS), 64)
        if not state[OVER]:
            piece = int(np.searchsorted(FIRST, orientation, side="right")) - 1
            made.append(Move(number, piece, orientation, left, int(state[LINES]), board_of(state)))
    return made


def placement(
    board: Board,
    piece: str,
    turn: int,
    column: int,
    *,
    features: str = "dellacherie",
    height: int = 20,
) -> tuple[dict[str, float], Board] | None:
    """What a player looks at when it considers one placement, and the board that this would leave.

    Parameters
    ----------
    board : array of bool, shape (rows, 10)
        Full cells, the lowest row first.
    piece : {"I", "O", "T", "S", "Z", "J", "L"}
        The piece.
    turn : int
        Which of its orientations, in `multisample.examples.tetris.pieces.ORIENTATIONS`.
    column : int
        Where its leftmost column goes.
    features : {"dellacherie", "bertsekas"}
        The set of features.
    height : int
        Rows of the board, 4 to 24.

    Returns
    -------
    tuple of dict and array, or None
        The features by name, and the board after the placement, shape (24, 10). None, if there is no room.

    Raises
    ------
    TypeError
        If a number is not an integer.
    ValueError
        If there is no such piece, orientation or column, or the board has another shape.

    Examples
    --------
    >>> from multisample.examples.tetris.board import parse
    >>> found, after = placement(parse("########.."), "O", 0, 8)
    >>> found["eroded piece cells"], found["row transitions"], after.sum()
    (2.0, 40.0, np.int64(2))
    """
    check_choice("features", features, tuple(FEATURES))
    check_choice("piece", piece, tuple(NAMES))
    shapes = ORIENTATIONS[NAMES.index(piece)]
    turn = checked_integer("turn", turn, 0, len(shapes))
    column = checked_integer("column", column, 0, COLUMNS + 1 - shapes[turn].shape[1])
    values = np.zeros(len(FEATURES[features]))
    state = words_of(board)
    orientation = int(FIRST[NAMES.index(piece)]) + turn
    if feature_kernel(features)(state, orientation, column, checked_height(height), values) < 0:
        return None
    return dict(zip(FEATURES[features], values.tolist(), strict=True)), board_of(state)
