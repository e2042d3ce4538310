"""The example programs give the results that they describe."""

from __future__ import annotations

import statistics
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

import multisample
from multisample import __main__ as command_line
from multisample import examples
from multisample.backends import registry
from multisample.examples import basket_option, bayesian_regression, cart_pole, evolution_strategy

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]


@pytest.mark.parametrize("device", DEVICES)
def test_mppi_swings_the_pole_up_and_keeps_it_there(device: str) -> None:
    run = cart_pole.control(steps=80, device=device)
    assert abs(run.angles[0]) > 3.0
    assert max(map(abs, run.angles[-30:])) < 0.4
    assert max(map(abs, run.positions)) < 3.0


@pytest.mark.parametrize("device", DEVICES)
def test_the_fitted_posterior_is_near_the_optimum(device: str) -> None:
    reasons = registry.find("torch_ext").status().reasons
    if reasons:
        pytest.skip("; ".join(reasons))
    fit = bayesian_regression.fit(steps=400, device=device)
    torch.testing.assert_close(fit.loc, fit.best_loc, atol=0.01, rtol=0)
    torch.testing.assert_close(fit.scale, fit.best_scale, atol=0, rtol=0.1)


@pytest.mark.parametrize("device", DEVICES)
def test_antithetic_pairs_and_common_random_numbers_reduce_variance(device: str) -> None:
    seeds = range(30)
    plain = [basket_option.price(seed=seed, paths=20_000, device=device) for seed in seeds]
    pairs = [basket_option.price(seed=seed, paths=20_000, antithetic=True, device=device) for seed in seeds]
    assert statistics.fmean(plain) == pytest.approx(statistics.fmean(pairs), abs=0.05)
    assert statistics.stdev(pairs) < 0.9 * statistics.stdev(plain)
    other = [basket_option.delta(seed, seed + 30, device) for seed in seeds[:10]]
    common = [basket_option.delta(seed, seed, device) for seed in seeds[:10]]
    assert statistics.stdev(common) < 0.3 * statistics.stdev(other)


@pytest.mark.parametrize("device", DEVICES)
def test_an_evolution_strategy_approaches_its_target(device: str) -> None:
    distances = evolution_strategy.train(d=200, steps=150, device=device)
    assert distances[-1] < 0.2 * distances[0]


def test_workers_of_an_evolution_strategy_share_scores_and_seeds_alone() -> None:
    target, key = np.linspace(-1, 1, 50, dtype=np.float32), multisample.Key(3, 9)
    start = target * 0

    def score(x: Any) -> Any:
        return -np.square(x - target).mean()

    scores = evolution_strategy.scores_of(start, score, key, range(64))
    shared = [0.0] * 64
    for worker in range(4):
        part = range(worker, 64, 4)
        shared[worker::4] = evolution_strategy.scores_of(start, score, key, part)
    assert shared == scores
    z = (multisample.sample(start, evolution_strategy.SCALE, 64, seed=key) - start[:, None]) / evolution_strategy.SCALE
    weights = np.asarray(scores, np.float32)
    weights = (weights - weights.mean()) / weights.std()
    moved = start.copy()
    evolution_strategy.move(np, moved, scores, key)
    np.testing.assert_allclose(moved, evolution_strategy.RATE * z @ weights, rtol=1e-4, atol=1e-5)


def test_a_step_of_an_evolution_strategy_needs_memory_for_few_vectors() -> None:
    parameters, key = np.zeros(10**6, np.float32), multisample.Key(3, 9)

    def step() -> None:
        scores = evolution_strategy.scores_of(parameters, lambda x: x[0], key, range(64))
        evolution_strategy.move(np, parameters, scores, key)

    step()  # Compiles.
    tracemalloc.start()
    step()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.2 * parameters.nbytes  # Beside the parameters.


def test_the_command_lists_every_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["examples"]) == 0
    printed = capsys.readouterr().out
    for name in examples.__all__:
        assert f"\n    python -m multisample{' ' if name == 'tetris' else '.examples.'}{name}\n" in printed


@pytest.mark.parametrize("program", [basket_option, bayesian_regression, cart_pole, evolution_strategy])
def test_a_program_prints_its_result(program: object, capsys: pytest.CaptureFixture[str]) -> None:
    if program is bayesian_regression and registry.find("torch_ext").status().reasons:
        pytest.skip("torch_ext cannot run")
    assert program.main([]) == 0  # type: ignore[attr-defined]
    assert len(capsys.readouterr().out.splitlines()) >= 5
