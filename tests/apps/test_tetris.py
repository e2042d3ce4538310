"""Tetris: the game and the features agree with examples computed by hand and with a slow, simple implementation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import slow_tetris
from tables import slow_but

from multisample.examples.tetris import game as boards
from multisample.examples.tetris.game import FIRST, MASKS, NAMES, ORIENTATIONS
from multisample.examples.tetris.player import FEATURES, moves, placement, play
from multisample.examples.tetris.player_kernel import OVER, PIECES, STATE, player_kernel

DELLACHERIE = [-1, 1, -1, -1, -4, -1, 0, 0]
# A player that survives some hundred pieces.
BERTSEKAS = [*[-1] * 10, *[-10] * 9, -5, -200, 3]
PLAYERS = {"dellacherie": DELLACHERIE, "bertsekas": BERTSEKAS}


def cells_of(board: np.ndarray[Any, Any]) -> slow_tetris.Cells:
    return frozenset((int(row), int(column)) for row, column in np.argwhere(board))


def turn_of(drawn: str) -> tuple[str, int]:
    """The piece and the orientation with this drawing."""
    cells = slow_tetris.cells_of(drawn)
    for name, shapes in zip(NAMES, ORIENTATIONS, strict=True):
        for turn, shape in enumerate(shapes):
            if cells_of(shape) == cells:
                return name, turn
    raise AssertionError(drawn)


def test_pieces_have_the_orientations_and_placements_of_the_literature() -> None:
    assert NAMES == "IOTSZJL"
    assert [len(shapes) for shapes in ORIENTATIONS] == [2, 1, 4, 2, 2, 4, 4]
    assert np.diff(FIRST).tolist() == [2, 1, 4, 2, 2, 4, 4]
    for kind, shapes in enumerate(ORIENTATIONS):
        assert [cells_of(shape) for shape in shapes] == slow_tetris.orientations(kind)
        assert all(shape.sum() == 4 for shape in shapes)
    # Numbers of placements on an empty board, from the literature.
    places = [sum(11 - shape.shape[1] for shape in shapes) for shapes in ORIENTATIONS]
    assert places == [17, 9, 34, 17, 17, 34, 34]
    assert MASKS[0] == 0b1111
    assert MASKS[1] == 1 << 30 | 1 << 20 | 1 << 10 | 1


def test_boards_convert_to_words_and_back() -> None:
    board = np.zeros((24, 10), bool)
    board[0, 0] = board[5, 9] = board[6, 0] = board[23, 9] = True
    assert boards.words_of(board).tolist() == [1 | 1 << 59, 1, 0, 1 << 59]
    assert (boards.board_of(boards.words_of(board)) == board).all()
    with pytest.raises(ValueError, match=r"text: expected lines of 10 cells, got '#'"):
        boards.parse("#")
    with pytest.raises(ValueError, match="text: expected at most 24 rows, got 25"):
        boards.parse(".......... " * 25)


# The board, the piece and its column, the board after the placement, and the features in the order of FEATURES.
# Comments derive features that are not obvious.
BY_HAND = {
    "on the right": (
        """
        #.........
        ##.#......
        .#.##....#
        ##.###.#.#
        """,
        ("# # # #", 9),
        """
        .........#
        .........#
        #........#
        ##.#.....#
        .#.##....#
        ##.###.#.#
        """,
        # The middle of rows 2 to 5 is 3.5.
        # Row transitions from the top: 2 + 2 + 2 + 4 + 6 + 6, and 2 for each of 14 empty rows.
        # Column transitions: 3 in the first column, 1 in each other.
        # Two full cells lie on the only hole.
        # Wells: 1 for the hole, 3 + 2 + 1 in column 2, 1 in column 6, 1 in column 8.
        [3.5, 0, 50, 12, 1, 9, 2, 1],
        [4, 3, 0, 3, 2, 1, 0, 1, 0, 6, 1, 3, 3, 1, 1, 1, 1, 1, 6, 6, 1, 1],
    ),
    "two rows completed": (
        """
        #.#.......
        ###..#####
        ####.#####
        """,
        (".# ## .#", 3),
        "#.#.#.....",
        # Three cells of the piece, times two rows.
        [1, 6, 44, 10, 0, 2, 0, 0],
        [1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 0, 1],
    ),
    "across words": (
        "#......... " * 9 + "#########.",
        ("# # # #", 9),
        "#......... " * 6 + "#........# " * 3,
        # The lowest row is completed. Nine rows have two transitions each, like empty rows.
        [1.5, 1, 40, 10, 0, 0, 0, 0],
        [9, 0, 0, 0, 0, 0, 0, 0, 0, 3, 9, 0, 0, 0, 0, 0, 0, 0, 3, 9, 0, 1],
    ),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_features_equal_values_computed_by_hand(case: str) -> None:
    before, (drawn, column), after, dellacherie, bertsekas = BY_HAND[case]
    piece, turn = turn_of(drawn)
    for features, expected in (("dellacherie", dellacherie), ("bertsekas", bertsekas)):
        found = placement(boards.parse(before), piece, turn, column, features=features)
        assert found is not None
        values, left = found
        assert values == dict(zip(FEATURES[features], expected, strict=True))
        left_over = boards.parse(after)
        assert (left[: len(left_over)] == left_over).all()
        assert not left[len(left_over) :].any()


def test_a_piece_must_fit_before_rows_are_removed() -> None:
    board = boards.parse("#########. " * 4)
    assert placement(board, *turn_of("# # # #"), 9, height=4) is not None
    assert placement(board[:2], *turn_of("# # # #"), 9, height=4) is not None
    assert placement(board, "O", 0, 0, height=5) is None
    # The piece would complete a row, but does not fit under the top.
    full_but_two = boards.parse("########.. " * 3)
    assert placement(np.vstack([full_but_two, boards.parse("#.........")]), "I", 1, 0, height=7) is None
    for height in (4, 10, 24):  # Empty rows count.
        found = placement(boards.parse(""), "I", 0, 0, height=height)
        assert found is not None and found[0]["row transitions"] == 2 * height


def test_the_game_ends_when_a_piece_fits_nowhere() -> None:
    # A player with a positive weight for height builds a tower.
    played = play([1, 0, 0, 0, 0, 0, 0, 0], range(50), height=4)
    assert played.over.all()
    for game in range(50):
        made = moves([1, 0, 0, 0, 0, 0, 0, 0], game, 0, 1000, height=4)
        assert len(made) == played.pieces[0, game]
        kind = slow_tetris.piece(0, game, len(made))
        assert not list(slow_tetris.placements(cells_of(made[-1].board), kind, 4))


@pytest.mark.parametrize("features", slow_but(["bertsekas"], FEATURES))
def test_features_of_random_boards_equal_the_slow_implementation(features: str) -> None:
    rng = np.random.default_rng(7)
    for _ in range(80):
        height = int(rng.integers(4, 25))
        board = rng.random((height, 10)) < rng.uniform(0.1, 0.95)
        board[rng.integers(0, height + 1) :] = False
        # A board has no full rows; pieces complete almost full rows.
        for row in rng.permutation(height)[:3]:
            board[row] = board[row].any()
        board[board.all(axis=1), rng.integers(0, 10)] = False
        kind = int(rng.integers(0, 7))
        expected = {
            (turn, left): (found.features(features), found.after)
            for turn, left, found in slow_tetris.placements(cells_of(board), kind, height)
        }
        for turn, shape in enumerate(ORIENTATIONS[kind]):
            for left in range(11 - shape.shape[1]):
                found = placement(board, NAMES[kind], turn, left, features=features, height=height)
                if found is None:
                    assert (turn, left) not in expected
                else:
                    assert (list(found[0].values()), cells_of(found[1])) == expected[turn, left]


@pytest.mark.parametrize("height", slow_but([6], [6, 13, 20]))
@pytest.mark.parametrize("features", slow_but(["dellacherie"], FEATURES))
def test_games_of_random_players_equal_the_slow_implementation(features: str, height: int) -> None:
    rng = np.random.default_rng(height)
    good = PLAYERS[features]
    bad = rng.integers(-2, 3, len(good)).tolist()
    seed, game = 0xFEDCBA9876543210, (1 << 40) + height
    for weights, most in ((good, 120), (bad, 40)):
        expected = slow_tetris.play(weights, seed, game, features=features, height=height, most_pieces=most)
        found = moves(weights, game, 0, most, seed=seed, features=features, height=height)
        turns = [(move.piece, move.orientation - FIRST[move.piece], move.column) for move in found]
        assert [(*turn, move.lines, cells_of(move.board)) for turn, move in zip(turns, found, strict=True)] == expected
        played = play(weights, [game], seed=seed, features=features, height=height, most_pieces=most)
        assert played.pieces == len(expected)
        assert played.lines == expected[-1][3]
        assert played.over == (len(expected) < most)


def players(n: int, features: str = "dellacherie") -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(1)
    good = np.array(PLAYERS[features], float)
    return good[:, None] + rng.normal(size=(good.size, n)) * np.abs(good[:, None]) / 2


@pytest.mark.slow
@pytest.mark.parametrize("features", FEATURES)
def test_games_do_not_depend_on_threads_or_other_games(features: str) -> None:
    weights = players(8, features)
    games = [3, 1 << 63, 4]
    together = play(weights, games, seed=5, features=features, height=12, threads=1)
    assert together.lines.shape == (8, 3)
    assert len(np.unique(together.pieces)) > 12
    for threads in (2, 7):
        again = play(weights, games, seed=5, features=features, height=12, threads=threads)
        assert all((one == other).all() for one, other in zip(together, again, strict=True))
    for player in range(8):
        alone = play(weights[:, player], games[::-1], seed=5, features=features, height=12)
        assert (alone.lines[0, ::-1] == together.lines[player]).all()
    assert (play(weights, games, seed=6, features=features, height=12).pieces != together.pieces).any()


def test_a_game_continues_from_its_state() -> None:
    kernel = player_kernel("dellacherie")
    weights = np.array(DELLACHERIE, float)
    at_once, in_pieces = np.zeros(STATE, np.uint64), np.zeros(STATE, np.uint64)
    kernel(weights, at_once, 7, 0, 10, 1 << 40, 1 << 40)
    rng = np.random.default_rng(0)
    while not in_pieces[OVER]:
        kernel(weights, in_pieces, 7, 0, 10, int(rng.integers(0, 9)), 1 << 40)
    assert at_once[PIECES] > 100
    assert (at_once == in_pieces).all()


def test_games_stop_at_most_lines_or_most_pieces_and_after_an_exception_in_progress() -> None:
    played = play(DELLACHERIE, range(4), most_lines=100)
    assert ((played.lines >= 100) & (played.lines < 104)).all()
    assert not played.over.any()
    played = play(DELLACHERIE, range(4), most_pieces=77)
    assert (played.pieces == 77).all()
    assert not played.over.any()
    calls = []

    def stop(finished: int) -> None:
        calls.append(finished)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(DELLACHERIE, range(4), progress=stop, threads=2)
    assert len(calls) == 1
    assert play(DELLACHERIE, []).lines.shape == (1, 0)
    assert play(np.zeros((8, 0)), range(3)).lines.shape == (0, 3)


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"weights": [1, 2]}, ValueError, r"weights: expected shape \(8,\) or \(8, n\), got \(2,\)"),
    ({"weights": np.zeros((22, 3))}, ValueError, r"weights: expected shape .*, got \(22, 3\)"),
    ({"weights": [0, 0, 0, np.nan, 0, 0, 0, 0]}, ValueError, "weights: expected finite numbers, got nan"),
    ({"most_lines": -1}, ValueError, "most_lines: expected"),
    ({"most_pieces": 1e6}, TypeError, "most_pieces: expected"),
    ({"features": "all"}, ValueError, "features: expected 'dellacherie' or 'bertsekas', got 'all'"),
    ({"height": 25}, ValueError, "height: expected 4 <= height < 25, got 25"),
    ({"height": 10.0}, TypeError, "height: expected an integer, got 10.0 of type float"),
    ({"seed": -1}, ValueError, "seed: expected 0 <= seed"),
    ({"games": [0.5]}, TypeError, "games: expected an integer"),
    ({"threads": 0}, ValueError, "threads: expected 1 <= threads"),
    ({"piece": "X"}, ValueError, "piece: expected 'I' or .* or 'L', got 'X'"),
    ({"turn": 2}, ValueError, "turn: expected 0 or 1, got 2"),
    ({"column": 7}, ValueError, "column: expected 0 <= column < 7, got 7"),
    ({"board": np.zeros((25, 10), bool)}, ValueError, r"board: expected shape \(rows, 10\) of .*, got \(25, 10\)"),
    ({"board": np.zeros((5, 9), bool)}, ValueError, r"board: expected shape .*, got \(5, 9\)"),
])  # fmt: skip
def test_wrong_arguments_raise(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    placed: dict[str, Any] = {"board": boards.parse(""), "piece": "I", "turn": 0, "column": 0}
    if arguments.keys() <= placed.keys() | {"features"}:
        with pytest.raises(error, match=message):
            placement(**placed | arguments)
    if not arguments.keys() & placed.keys():
        with pytest.raises(error, match=message):
            play(**{"weights": DELLACHERIE, "games": range(1), **arguments})
