"""Training improves players, and gives equal bits after interruptions and on any number of threads."""

from __future__ import annotations

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
    assert counts == list(range(40))  # Finished games.
    expected = outcome(learnt(settings, 3, threads=1))
    assert outcome(learnt(settings, 3, threads=3)) == expected
    for other in ({"seed": 8}, {"games": 3}):
        assert outcome(learnt(dataclasses.replace(settings, **other), 3)) != expected


@pytest.mark.parametrize("tasks", [1, 3, 100])
def test_executors_and_tasks_do_not_matter(tasks: int) -> None:
    learner, finished = Learner(QUICK), list[int]()
    with ThreadPoolExecutor(3) as executor:
        for _ in range(3):
            learner.step(finished.append, executor=executor, tasks=tasks)
    assert outcome(learner) == outcome(learnt(QUICK, 3))
    assert finished[-1] == QUICK.n * QUICK.games
    assert len(finished) == 3 * min(tasks, QUICK.n // 2)


def test_a_failed_task_leaves_the_learner_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, calls, original = learnt(QUICK, 1), itertools.count(), learning._play_task

    def fails(*args: Any) -> Any:
        if next(calls) == 3:
            raise ArithmeticError
        return original(*args)

    with ThreadPoolExecutor(1) as executor:
        monkeypatch.setattr(learning, "_play_task", fails)
        with pytest.raises(ArithmeticError):
            learner.step(executor=executor, tasks=5)
        assert outcome(learner) == outcome(learnt(QUICK, 1))
        learner.step(executor=executor, tasks=5)
    assert outcome(learner) == outcome(learnt(QUICK, 2))


def test_added_variance_decreases_by_noise_step_and_games_are_fresh_and_end_at_most_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_an_interrupted_iteration_changes_nothing(tmp_path: Path) -> None:
    def interrupt(finished: int) -> None:
        raise KeyboardInterrupt

    learner = learnt(QUICK, 1)
    with pytest.raises(KeyboardInterrupt):
        learner.step(interrupt, threads=1)
    learner.save(tmp_path / "state.json")
    for resumed in (learner, Learner.load(tmp_path / "state.json")):
        resumed.step()
        assert outcome(resumed) == outcome(learnt(QUICK, 2))


@pytest.mark.parametrize("iterations", [0, 1, 3])
def test_a_saved_learner_continues_with_equal_bits(tmp_path: Path, iterations: int) -> None:
    path = tmp_path / "state.json"
    settings = dataclasses.replace(QUICK, seed=(1 << 64) - 1, features="bertsekas")
    Learner(settings).save(path)
    assert Learner.load(path).settings == settings
    settings = dataclasses.replace(settings, features="dellacherie")  # One kernel is compiled.
    learnt(settings, iterations).save(path)
    resumed = Learner.load(path)
    assert resumed.settings == settings
    assert len(resumed.history) == iterations
    resumed.step()
    assert outcome(resumed) == outcome(learnt(settings, iterations + 1))
    assert [file.name for file in tmp_path.iterdir()] == ["state.json"]


def changed(*path: str, to: Any) -> Any:
    """A function that replaces the value at `path` in a state by `to`."""

    def change(state: Any) -> Any:
        inner = state
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = to
        return state

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: [], r"state: expected version, settings, history, cem, got \[\]"),
        (changed("version", to=2), "version: expected 1, got 2"),
        (lambda state: {name: value for name, value in state.items() if name != "cem"}, "state: expected version,"),
        (changed("settings", to=None), "settings: expected features, seed, n, .* got None"),
        (changed("settings", "height", to=99), "height: expected"),
        (changed("settings", "seed", to=8), "cem: expected seed 8, as in settings and history, got 7"),
        (changed("settings", "sigma", to=[1.0] * 8), r"sigma: expected a finite number of at least 0, got \[1.0"),
        (changed("history", to={}), "history: expected a list, got {}"),
        (changed("history", to=[]), "cem: expected told 0, as in settings and history, got 1"),
        (changed("history", to=[{"mean": 1.0}]), "history: expected mean, best, sigma, pieces, seconds, got"),
        *(
            (lambda state, name=name, value=value: changed("history", to=[{**state["history"][0], name: value}])(state),
             f"{name}: expected")
            for name in ("mean", "best", "sigma", "pieces", "seconds")
            for value in ("1", None, float("nan"), -1.0)
        ),
        (changed("cem", to=7), "cem: expected mu, sigma, x, history, told, seed, offset, got 7"),
        (changed("cem", "mu", to=[1.0]), r"state\['mu'\]: expected shape \(8,\), got \(1,\)"),
        (changed("cem", "seed", to="seven"), r"state\['seed'\]: expected numbers, got 'seven'"),
        (changed("cem", "told", to=0), r"state\['told'\]: expected 1, .* got 0"),
        (changed("cem", "offset", to=3), "cem: expected offset 1, as in settings and history, got 3"),
    ],
)  # fmt: skip
def test_other_files_raise(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "state.json"
    learnt(QUICK, 1).save(path)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ValueError, match=rf"state\.json: not a saved state of training \({message}"):
        Learner.load(path)


@pytest.mark.parametrize("content", [b"\xff{", b"", b"{", b"[" * 100_000, b'{"version": ' * 100_000])
def test_files_that_are_not_json_raise(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"state\.json: not a saved state of training"):
        Learner.load(tmp_path / "state.json")


WRONG: dict[str, list[Any]] = {
    "features": ["some"], "seed": [-1], "n": [1], "games": [0], "height": [3], "most_lines": [0], "sigma": [-1.0],
    "noise": [np.nan, "much"], "noise_step": [-1.0],
}  # fmt: skip


def test_wrong_settings_raise() -> None:
    for name, values in WRONG.items():
        for value in values:
            with pytest.raises(ValueError, match=f"^{name}: expected"):
                Learner(Settings(**{name: value}))
    with pytest.raises(ValueError, match="elite_frac: expected at least 2 elites"):
        Learner(Settings(n=10))
