"""Tetris: the game agrees with a slow, simple implementation, and training improves players with equal bits."""

import dataclasses
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import slow_tetris
from tables import slow_but

from multisample.examples.tetris import FEATURES, Learner, Settings, learning, play
from multisample.examples.tetris.game import FIRST, MASKS, NAMES, ORIENTATIONS
from multisample.examples.tetris.player import moves, placement
from multisample.examples.tetris.player_kernel import OVER, PIECES, STATE, player_kernel

DELLACHERIE = [-1, 1, -1, -1, -4, -1, 0, 0]
# A player that survives some hundred pieces.
BERTSEKAS = [*[-1] * 10, *[-10] * 9, -5, -200, 3]
PLAYERS = {"dellacherie": DELLACHERIE, "bertsekas": BERTSEKAS}


def cells_of(board: np.ndarray[Any, Any]) -> slow_tetris.Cells:
    return frozenset((int(row), int(column)) for row, column in np.argwhere(board))


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


@pytest.mark.parametrize("features", FEATURES)
def test_placements_have_the_features_and_boards_of_the_slow_implementation(features: str) -> None:
    rng = np.random.default_rng(7)
    for number in range(14):
        height = int(rng.integers(4, 25))
        board = rng.random((24, 10)) < rng.uniform(0.1, 0.95)
        board[rng.integers(0, height + 1) :] = False
        # Fill some rows except for one cell, so that pieces can complete them.
        for row in rng.permutation(height)[:3]:
            board[row] = board[row].any()
        board[board.all(axis=1), rng.integers(0, 10)] = False
        kind = number % len(NAMES)
        expected = {(turn, left): place for turn, left, place in slow_tetris.placements(cells_of(board), kind, height)}
        for turn, shape in enumerate(ORIENTATIONS[kind]):
            for left in range(11 - shape.shape[1]):
                found = placement(board, NAMES[kind], turn, left, features=features, height=height)
                place = expected.get((turn, left))
                assert (found is None) == (place is None)
                if found is not None and place is not None:
                    assert (list(found[0].values()), cells_of(found[1])) == (place.features(features), place.after)
    with pytest.raises(ValueError, match="column: expected 0 <= column < 9, got 9"):
        placement(board, "O", 0, 9)


@pytest.mark.parametrize("height", slow_but([6], [6, 13, 20]))
@pytest.mark.parametrize("features", slow_but(["dellacherie"], FEATURES))
def test_games_of_random_players_equal_the_slow_implementation(features: str, height: int) -> None:
    rng = np.random.default_rng(height)
    good = PLAYERS[features]
    bad = rng.integers(-2, 3, len(good)).tolist()
    options: dict[str, Any] = {"features": features, "height": height}
    seed, games = 0xFEDCBA9876543210, [(1 << 40) + height, 3]
    call: dict[str, Any] = {"seed": seed, "most_pieces": 60, **options}
    played, again = (play(np.array([good, bad]).T, games, threads=threads, **call) for threads in (1, 2))
    assert all((one == other).all() for one, other in zip(played, again, strict=True))
    for (player, game), pieces in np.ndenumerate(played.pieces):
        weights, number = (good, bad)[player], games[game]
        expected = slow_tetris.play(weights, seed, number, most_pieces=60, **options)
        found = moves(weights, number, 0, 60, seed=seed, **options)
        turns = [(move.piece, move.orientation - FIRST[move.piece], move.column) for move in found]
        ends = [(move.lines, cells_of(move.board)) for move in found]
        assert [(*turn, *end) for turn, end in zip(turns, ends, strict=True)] == expected
        assert (pieces, played.lines[player, game]) == (len(expected), expected[-1][3])
        assert played.over[player, game] == (len(expected) < 60)


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


def test_games_stop_at_their_limits_and_after_an_exception_of_the_progress_callback() -> None:
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
    ({"weights": np.zeros((22, 3))}, ValueError, r"weights: expected shape \(8,\) or \(8, n\), got \(22, 3\)"),
    ({"weights": [0, 0, 0, np.nan, 0, 0, 0, 0]}, ValueError, "weights: expected finite numbers, got nan"),
    ({"most_lines": -1}, ValueError, "most_lines: expected"),
    ({"most_pieces": 1e6}, TypeError, "most_pieces: expected"),
    ({"features": "all"}, ValueError, "features: expected 'dellacherie' or 'bertsekas', got 'all'"),
    ({"height": 25}, ValueError, "height: expected 4 <= height < 25, got 25"),
    ({"seed": -1}, ValueError, "seed: expected 0 <= seed"),
    ({"games": [0.5]}, TypeError, "games: expected an integer"),
    ({"threads": 0}, ValueError, "threads: expected 1 <= threads"),
])  # fmt: skip
def test_wrong_arguments_raise(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        play(**{"weights": DELLACHERIE, "games": range(1), **arguments})


QUICK = Settings(seed=7, n=20, games=2, height=6)


def outcome(learner: Learner) -> tuple[list[tuple[float, ...]], list[float]]:
    """The results of a run, except its duration."""
    steps = [dataclasses.astuple(dataclasses.replace(done, seconds=0)) for done in learner.history]
    return steps, learner.weights.tolist()


def learnt(settings: Settings, iterations: int, threads: int | None = None) -> Learner:
    learner = Learner(settings)
    for _ in range(iterations):
        learner.step(threads=threads)
    return learner


@pytest.mark.parametrize(("features", "factor", "lines"), [
    ("dellacherie", 10, 2000), pytest.param("bertsekas", 2, 20, marks=pytest.mark.slow),
])  # fmt: skip
def test_training_improves_the_players(features: str, factor: float, lines: int) -> None:
    learner = learnt(Settings(features=features, seed=7, n=60, games=3, height=8), 8)
    assert learner.history[-1].mean > factor * learner.history[0].mean
    assert learner.history[-1].sigma < learner.history[0].sigma
    assert all(done.best > done.mean and done.pieces > 0 for done in learner.history)
    fresh = play(learner.weights, range(1 << 32, (1 << 32) + 5), features=features, most_lines=2000)
    assert fresh.lines.mean() >= lines


@pytest.mark.parametrize("features", slow_but(["dellacherie"], FEATURES))
def test_equal_settings_learn_equal_weights(features: str) -> None:
    settings, counts = dataclasses.replace(QUICK, features=features), list[int]()
    Learner(settings).step(counts.append, threads=1)
    assert counts == list(range(41))  # Finished games.
    expected = outcome(learnt(settings, 3, threads=1))
    assert outcome(learnt(settings, 3, threads=3)) == expected
    for other in ({"seed": 8}, {"games": 3}):
        assert outcome(learnt(dataclasses.replace(settings, **other), 3)) != expected
    for tasks in (3, 100):
        learner, finished = Learner(settings), list[int]()
        with ThreadPoolExecutor(3) as executor:
            for _ in range(3):
                learner.step(finished.append, executor=executor, tasks=tasks)
        assert outcome(learner) == expected
        assert finished[-1] == QUICK.n * QUICK.games
        assert len(finished) == 3 * min(tasks, QUICK.n // 2)


def test_a_failed_or_interrupted_iteration_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, calls, original = learnt(QUICK, 1), itertools.count(), learning._play_task

    def fails(*args: Any) -> Any:
        if next(calls) == 3:
            raise ArithmeticError
        return original(*args)

    def interrupt(finished: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, ThreadPoolExecutor(1) as executor:
        patched.setattr(learning, "_play_task", fails)
        with pytest.raises(ArithmeticError):
            learner.step(executor=executor, tasks=5)
    for iterations in (1, 2):
        assert outcome(learner) == outcome(learnt(QUICK, iterations))
        with pytest.raises(KeyboardInterrupt):
            learner.step(interrupt, threads=1)
        learner.step()
    assert outcome(learner) == outcome(learnt(QUICK, 3))


def test_added_variance_decreases_and_new_games_stop_at_the_limit_of_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    sigmas, played = {}, list[int]()
    for noise, step in ((0.0, 0.0), (9.0, 0.0), (9.0, 5.0), (9.0, 10.0)):
        learner = Learner(dataclasses.replace(QUICK, noise=noise, noise_step=step))
        sigmas[noise, step] = learner.step().sigma
    assert sigmas[9, 0] ** 2 == pytest.approx(sigmas[0, 0] ** 2 + 9)
    assert sigmas[9, 5] ** 2 == pytest.approx(sigmas[0, 0] ** 2 + 4)
    assert sigmas[9, 10] == sigmas[0, 0]

    def noted(weights: Any, games: range, **options: Any) -> Any:
        assert options["seed"] == QUICK.seed
        played.extend(games)
        return play(weights, games, **options)

    monkeypatch.setattr(learning, "play", noted)
    learner = Learner(dataclasses.replace(QUICK, height=20, most_lines=5))
    assert max(learner.step().best for _ in range(6)) <= 8
    assert len(set(played)) == len(played) == 12


@pytest.mark.parametrize("iterations", [0, 3])
def test_a_saved_learner_continues_with_equal_bits(tmp_path: Path, iterations: int) -> None:
    path = tmp_path / "state.json"
    settings = dataclasses.replace(QUICK, seed=(1 << 64) - 1, games=1)
    learnt(settings, iterations).save(path)
    resumed = Learner.load(path)
    assert resumed.settings == settings
    assert len(resumed.history) == iterations
    resumed.step()
    assert outcome(resumed) == outcome(learnt(settings, iterations + 1))
    assert [file.name for file in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize(("path", "value", "message"), [
    ((), [], "TypeError: "),
    ((), {"version": 1}, "KeyError: 'settings'"),
    (("version",), 2, "ValueError: version: expected 1, got 2"),
    (("settings", "height"), 99, "ValueError: height: expected"),
    (("history",), [{"mean": 1.0}], "TypeError: .*missing 4 required"),
    (("cem", "mu"), [1.0], r"ValueError: state\['mu'\]: expected shape \(8,\), got \(1,\)"),
])  # fmt: skip
def test_invalid_state_files_raise(tmp_path: Path, path: tuple[Any, ...], value: Any, message: str) -> None:
    file = tmp_path / "state.json"
    learnt(QUICK, 1).save(file)
    outer = {"state": json.loads(file.read_text())}
    inner, last = outer, "state"
    for name in path:
        inner, last = inner[last], name
    inner[last] = value
    file.write_text(json.dumps(outer["state"]))
    with pytest.raises(ValueError, match=rf"state\.json: not a saved state of training \({message}"):
        Learner.load(file)


@pytest.mark.parametrize("content", [b"\xff{", b"{", b"[" * 100_000])
def test_files_that_are_not_json_raise(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"state\.json: not a saved state of training"):
        Learner.load(tmp_path / "state.json")


@pytest.mark.parametrize("setting", [
    ("features", "some"), ("seed", -1), ("n", 1), ("games", 0), ("height", 3), ("most_lines", 0), ("sigma", -1.0),
    ("noise", np.nan), ("noise_step", -1.0),
])  # fmt: skip
def test_wrong_settings_raise(setting: tuple[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{setting[0]}: expected"):
        Learner(Settings(**dict([setting])))
