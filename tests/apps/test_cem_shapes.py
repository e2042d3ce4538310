"""The cross-entropy method with means of any shape: the run of the flattened means, shaped outside."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from multisample import cem, sample

GOAL = np.arange(12.0).reshape(4, 3)
LOW, HIGH = [-1.0, 0.0, -2.0], [12.0, 10.5, 14.0]
"""Bounds of three controls, for each of four steps."""


def distances(x: Any) -> Any:
    axes = tuple(range(x.ndim - 3, x.ndim - 1))
    return np.square(x - GOAL[..., None]).sum(axes)


def flat(value: Any) -> Any:
    return np.broadcast_to(value, (4, 3)).reshape(-1)


def run(f: Any, shape: Any, **options: Any) -> Any:
    sigma, floor = shape([3.0, 4.0, 5.0]), shape(np.full((4, 3), 1e-6))
    return cem.minimize(
        f, np.zeros(np.shape(floor)), sigma, 200, seed=7, iterations=20, bounds=(shape(LOW), shape(HIGH)),
        noise_floor=floor, **options,
    )  # fmt: skip


def test_a_run_equals_that_of_flat_means() -> None:
    expected = run(lambda x: distances(x.reshape(4, 3, -1)), flat)
    with ThreadPoolExecutor(2) as executor:
        for options in ({}, {"executor": executor, "tasks": 3}):
            found = run(distances, np.asarray, **options)
            for name in ("x", "mu", "sigma"):
                assert getattr(found, name).shape == (4, 3)
                assert np.array_equal(getattr(found, name).reshape(-1), getattr(expected, name)), name


def test_each_of_several_searches_equals_its_own_run() -> None:
    options: dict[str, Any] = {"iterations": 5, "bounds": (LOW, 11.0)}
    batch = cem.minimize(distances, np.zeros((2, 4, 3)), 2.0, 100, seed=[7, 8], **options)
    assert batch.x.shape == (2, 4, 3)
    for b, seed in enumerate((7, 8)):
        alone = cem.minimize(distances, np.zeros((4, 3)), 2.0, 100, seed=seed, **options)
        assert np.array_equal(batch.mu[b], alone.mu)
        assert np.array_equal(batch.x[b], alone.x)


def test_ask_tell_and_state_have_the_shape_of_the_mean() -> None:
    search, resumed = cem.CEM(np.zeros((4, 3)), 2.0, 50, seed=7), cem.CEM(np.zeros((4, 3)), 2.0, 50)
    x = search.ask()
    assert x.shape == (4, 3, 50)
    with pytest.raises(ValueError, match=r"^samples: expected shape \(4, 3, 50\), got \(12, 50\)"):
        search.tell(x.reshape(12, 50), distances(x))
    search.tell(None, distances(x))
    resumed.state = json.loads(json.dumps({name: value.tolist() for name, value in search.state.items()}))
    assert resumed.state["mu"].shape == (4, 3)
    assert np.array_equal(resumed.ask(), search.ask(x))


@pytest.mark.parametrize("searches", [None, 2])
def test_steps_have_the_shape_of_the_mean(searches: int | None) -> None:
    batch = () if searches is None else (searches,)
    states = [cem.start(np.zeros((*batch, *dims)), 2.0, searches) for dims in ((4, 3), (12,))]
    for seed in range(5):
        keys = seed if searches is None else [seed, seed + 10]
        states = [
            cem.step(state, keys, lambda x: distances(x.reshape(*batch, 4, 3, -1)), 100, bounds=edges, noise_floor=1e-6)
            for state, edges in zip(states, ((LOW, HIGH), (flat(LOW), flat(HIGH))), strict=True)
        ]
    assert states[0].mu.shape == (*batch, 4, 3)
    assert np.array_equal(states[0].mu.reshape(*batch, 12), states[1].mu)
    assert np.array_equal(states[0].fun, states[1].fun)


@pytest.mark.parametrize(("mu", "sigma", "seed"), [
    ((3, 3), (3, 1), 7), ((3, 1), (3, 3), 7), ((3, 1), (1, 3), 7), ((6, 2), (6, 1), 7), ((6, 1), (6, 2), 7),
    ((2,), (6, 2), 7), ((6, 1), (6,), 7), ((4, 2, 3), (2, 1), 7), ((3, 5), (5,), [7, 8, 9]),
    ((3, 5, 1), (3, 5), [7, 8, 9]), ((3, 4, 2), (2,), [7, 8, 9]), ((3, 4, 2), (3, 1), [7, 8, 9]),
    ((3, 4, 2), (3, 2), [7, 8, 9]), ((3, 4, 2), (3, 4, 1), [7, 8, 9]), ((3, 4, 2), (3, 1, 2), [7, 8, 9]),
    ((2,), (3, 4, 2), [7, 8, 9]), ((3, 4, 1), (3, 4, 2), [7, 8, 9]), ((3, 3, 2), (3, 2), [7, 8, 9]),
])  # fmt: skip
def test_mean_and_deviation_broadcast_as_in_sample(library: Any, mu: Any, sigma: Any, seed: Any) -> None:
    hosts = [np.arange(math.prod(shape), dtype=np.float32).reshape(shape) for shape in (mu, sigma)]
    arrays, batch = [library.array(x) for x in hosts], () if seed == 7 else (3,)
    expected = sample(*hosts, 20, seed=seed)
    search = cem.CEM(*arrays, 20, seed=seed)
    assert np.array_equal(library.to_numpy(search.ask()), expected)
    for found in (search, cem.start(*arrays, *batch)):
        assert found.mu.shape == found.sigma.shape == expected.shape[:-1]
        assert np.array_equal(library.to_numpy(sample(found.mu, found.sigma, 20, seed=seed)), expected)
    result = cem.minimize(lambda x: x.reshape(*batch, -1, 20).sum(-2), *arrays, 20, seed=seed, iterations=2)
    assert result.mu.shape == expected.shape[:-1]


def test_lists_broadcast_as_in_sample() -> None:
    mu, sigma = np.zeros((3, 3), np.float32), [[0.1], [1.0], [10.0]]
    assert np.array_equal(cem.CEM(mu, sigma, 20, seed=7).ask(), sample(mu, sigma, 20, seed=7))


def test_wrong_shapes_raise() -> None:
    for options, message in (
        ({"bounds": ([0.0, 0.0], 1.0)}, r"^bounds: expected a number or shape \(4, 3\), got shape \(2,\)"),
        ({"bounds": (1.0, 2.0)}, r"^mu: expected it within bounds, got mu\[0, 0\] = 0.0"),
        ({"noise_floor": np.zeros(2)}, r"^noise_floor: expected a number or shape \(4, 3\)"),
    ):
        with pytest.raises(ValueError, match=message):
            cem.minimize(distances, np.zeros((4, 3)), 2.0, 100, **options)  # type: ignore[arg-type]
