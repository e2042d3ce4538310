"""`play`: many games in parallel. Each game is one task, played some thousand pieces at a time.

The result of a game depends on its number, the seed and the weights only, not on the threads or on other games.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

import numpy as np

from multisample._arguments import check_choice, checked_integer
from multisample.backends.system.threads import thread_count

from .game import COLUMNS, FIRST, MOST_ROWS, NAMES, ORIENTATIONS, Board, board_of, words_of
from .player_kernel import LINES, OVER, PIECES, STATE, feature_kernel, player_kernel

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
"""Names of the features of each set, in the order of their weights; module `features` defines them."""

ENDLESS = 1 << 62
_LEAST_ROWS = 4
# Pieces per kernel call, about 25 ms: the longest wait after Ctrl-C.
_SLICE = 1 << 15


class Played(NamedTuple):
    """Results of games: arrays of shape (n, games), with one row for each player."""

    lines: np.ndarray[Any, np.dtype[np.int64]]
    """Number of completed rows."""
    pieces: np.ndarray[Any, np.dtype[np.int64]]
    """Number of placed pieces."""
    over: np.ndarray[Any, np.dtype[np.bool_]]
    """Whether a piece did not fit. Other games were stopped at `most_lines` or `most_pieces`."""


class Move(NamedTuple):
    """One placement of a game."""

    number: int
    """Number of earlier pieces in the game."""
    piece: int
    """Index of the piece in `multisample.examples.tetris.game.NAMES`."""
    orientation: int
    """Index of its orientation in `multisample.examples.tetris.game.SHAPES`."""
    column: int
    """Column of its leftmost cells."""
    lines: int
    """Number of rows completed so far, including this placement."""
    board: Board
    """The board after the placement, shape (24, 10), lowest row first."""


def checked_weights(weights: Any, features: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """`weights` as an array of shape (d, n) for the set of `features`; ValueError otherwise."""
    check_choice("features", features, tuple(FEATURES))
    checked: np.ndarray[Any, np.dtype[np.float64]] = np.asarray(weights, np.float64)
    d = len(FEATURES[features])
    if checked.ndim not in (1, 2) or len(checked) != d:
        raise ValueError(f"weights: expected shape ({d},) or ({d}, n), got {checked.shape}")
    if not np.isfinite(checked).all():
        raise ValueError(f"weights: expected finite numbers, got {checked[~np.isfinite(checked)][0]}")
    return checked.reshape(d, -1)


def checked_height(height: int) -> int:
    """`height` as an int from 4 to 24; TypeError or ValueError otherwise."""
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

    A player sees the current piece only. The piece drops straight down, in any orientation and column. Of the
    placements below the top of the board, the player chooses the one with the largest dot product of features and
    weights, and the first of equal ones. The game ends when a piece fits nowhere.

    Parameters
    ----------
    weights : array_like of float, shape (d,) or (d, n)
        One column for each player.
    games : sequence of int, shape (g,)
        Numbers of the games. The seed and the number of a game determine its pieces.
    seed : int
        0 <= seed < 2**64.
    features : {"dellacherie", "bertsekas"}
        The set of features that the weights are for: d is 8 or 22.
    height : int
        Rows of the board, 4 to 24. Games are much shorter on low boards.
    most_lines, most_pieces : int
        Number of lines or pieces at which a game is stopped.
    threads : int, optional
        Number of threads; by default `MULTISAMPLE_NUM_THREADS`, or one for each core.
    progress : callable, optional
        Called first and after each game, on the calling thread, with the number of finished games.

    Returns
    -------
    Played
        Results of all games, as arrays of shape (n, g).

    Raises
    ------
    ValueError
        If the weights do not match the features or are not finite, or a number is out of range.
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
    stopped = False

    def finish(player: int, game: int) -> None:
        state = states[player, game]
        while not stopped and not state[OVER] and state[LINES] < most_lines and state[PIECES] < most_pieces:
            most = min(_SLICE, most_pieces - int(state[PIECES]))
            kernel(columns[player], state, seed, numbers[game], height, most, most_lines)

    count = thread_count() if threads is None else checked_integer("threads", threads, 1, 1 << 16)
    with ThreadPoolExecutor(count) as executor:
        try:
            tasks = [executor.submit(finish, k, game) for game in range(len(numbers)) for k in range(len(columns))]
            report = progress or (lambda finished: None)
            report(0)
            for finished, task in enumerate(as_completed(tasks), 1):
                task.result()
                report(finished)
        except BaseException:
            stopped = True
            raise
    return Played(states[..., LINES].astype(np.int64), states[..., PIECES].astype(np.int64), states[..., OVER] != 0)


def moves(
    weights: Any, game: int, first: int, last: int, *, seed: int = 0, features: str = "dellacherie", height: int = 20
) -> list[Move]:
    """Placements `first` to ``last - 1`` of one player's game, or fewer if the game ends earlier.

    Parameters
    ----------
    weights : array_like of float, shape (d,)
        The player.
    game : int
        The number of the game.
    first, last : int
        Range of placements, counted from 0.
    seed, features, height : various
        As for `play`.

    Returns
    -------
    list of Move
        One move for each piece.

    Raises
    ------
    TypeError
        As for `play`.
    ValueError
        As for `play`.

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
    board: Board, piece: str, turn: int, column: int, *, features: str = "dellacherie", height: int = 20
) -> tuple[dict[str, float], Board] | None:
    """The features of one placement, and the board after it.

    Parameters
    ----------
    board : array of bool, shape (rows, 10)
        Full cells, lowest row first.
    piece : {"I", "O", "T", "S", "Z", "J", "L"}
        The piece.
    turn : int
        Index of the orientation in `multisample.examples.tetris.game.ORIENTATIONS`.
    column : int
        Column of the piece's leftmost cells.
    features, height : various
        As for `play`.

    Returns
    -------
    tuple of dict and array, or None
        The features by name, and the board after the placement, shape (24, 10). None if the piece does not fit.

    Raises
    ------
    TypeError
        If a number is not an integer.
    ValueError
        If the piece, the orientation or the column does not exist, or the board has another shape.

    Examples
    --------
    >>> board = np.arange(10)[None] < 8
    >>> found, after = placement(board, "O", 0, 8)
    >>> found["eroded piece cells"], found["row transitions"], int(after.sum())
    (2.0, 40.0, 2)
    """
    check_choice("features", features, tuple(FEATURES))
    check_choice("piece", piece, tuple(NAMES))
    shapes = ORIENTATIONS[NAMES.index(piece)]
    turn = checked_integer("turn", turn, 0, len(shapes))
    column = checked_integer("column", column, 0, COLUMNS + 1 - shapes[turn].shape[1])
    if board.ndim != 2 or len(board) > MOST_ROWS or board.shape[1] != COLUMNS:
        raise ValueError(f"board: expected shape (rows, {COLUMNS}) of at most {MOST_ROWS} rows, got {board.shape}")
    values, state = np.zeros(len(FEATURES[features])), words_of(board)
    orientation = int(FIRST[NAMES.index(piece)]) + turn
    if feature_kernel(features)(state, orientation, column, checked_height(height), values) < 0:
        return None
    return dict(zip(FEATURES[features], values.tolist(), strict=True)), board_of(state)
