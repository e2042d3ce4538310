"""Training improves players, and gives equal bits after interruptions and on any number of threads."""

import dataclasses
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tables import slow_but

from multisample.examples.tetris import FEATURES, Learner, Settings, learning, play

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


@pytest.mark.parametrize(
    ("features", "factor", "lines"),
    [("dellacherie", 10, 2000), pytest.param("bertsekas", 2, 20, marks=pytest.mark.slow)],
)
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
    ((), [], r"state: expected version, settings, history, cem, got \[\]"),
    ((), {"settings": 1, "history": 1, "cem": 1}, "state: expected version,"),
    (("version",), 2, "version: expected 1, got 2"),
    (("settings",), None, "settings: expected features, seed, n, .* got None"),
    (("settings", "height"), 99, "height: expected"),
    (("settings", "seed"), 8, "cem: expected seed 8, as in settings and history, got 7"),
    (("history",), {}, "history: expected a list, got {}"),
    (("history",), [], "cem: expected told 0, as in settings and history, got 1"),
    (("history",), [{"mean": 1.0}], "history: expected mean, best, sigma, pieces, seconds, got"),
    (("history", 0, "mean"), "1", "mean: expected a number, got '1'"),
    (("history", 0, "best"), float("inf"), "best: expected"),
    (("history", 0, "sigma"), True, "sigma: expected a number, got True"),
    (("history", 0, "pieces"), 1.5, "pieces: expected"),
    (("history", 0, "seconds"), -1.0, "seconds: expected"),
    (("cem",), 7, "cem: expected mu, sigma, x, history, told, seed, offset, got 7"),
    (("cem", "mu"), [1.0], r"state\['mu'\]: expected shape \(8,\), got \(1,\)"),
    (("cem", "offset"), 3, "cem: expected offset 1, as in settings and history, got 3"),
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


@pytest.mark.parametrize(
    "setting",
    [("features", "some"), ("seed", -1), ("n", 1), ("games", 0), ("height", 3), ("most_lines", 0), ("sigma", -1.0),
     ("noise", np.nan), ("noise_step", -1.0)],
)  # fmt: skip
def test_wrong_settings_raise(setting: tuple[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{setting[0]}: expected"):
        Learner(Settings(**dict([setting])))
