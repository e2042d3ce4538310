"""The example programs give the results that they describe."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys

import numpy as np
import pytest
import torch
from dask_cluster import local_cluster

from multisample import __main__ as command_line
from multisample import examples
from multisample.backends import registry
from multisample.examples import (
    basket_option,
    bayesian_regression,
    cart_pole,
    cem_cluster,
    cem_torchrun,
    monte_carlo_dask,
)

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


def test_the_command_lists_every_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["examples"]) == 0
    printed = capsys.readouterr().out
    for name in examples.__all__:
        assert f"\n    python -m multisample{' ' if name == 'tetris' else '.examples.'}{name}\n" in printed


@pytest.mark.parametrize("program", [basket_option, bayesian_regression, cart_pole])
def test_a_program_prints_its_result(program: object, capsys: pytest.CaptureFixture[str]) -> None:
    if program is bayesian_regression and registry.find("torch_ext").status().reasons:
        pytest.skip("torch_ext cannot run")
    assert program.main([]) == 0  # type: ignore[attr-defined]
    assert len(capsys.readouterr().out.splitlines()) >= 5


@pytest.mark.parametrize("executor", ["none", "threads", "processes", "dask"])
def test_a_controller_is_tuned_on_executors(executor: str, capsys: pytest.CaptureFixture[str]) -> None:
    if executor == "dask":
        pytest.importorskip("distributed")
        with local_cluster() as client:
            argv = ["--executor", executor, "--scheduler", client.scheduler.address, "--tasks", "3"]
            assert cem_cluster.main(argv) == 0
    else:
        assert cem_cluster.main(["--executor", executor]) == 0
    assert capsys.readouterr().out.startswith("gains [ 4.84   6.434 48.975 10.68 ], cost 1.5102;")


def test_the_tuned_controller_keeps_the_pole_upright() -> None:
    without = cem_cluster.cost(np.zeros((4, 1)))
    assert cem_cluster.cost(cem_cluster.tune().mu[:, None]) < 0.02 * without


def test_ranks_find_the_same_minimum(capsys: pytest.CaptureFixture[str]) -> None:
    if registry.find("torch_ext").status().reasons:
        pytest.skip("torch_ext cannot run")
    assert cem_torchrun.main([]) == 0
    alone = capsys.readouterr().out
    assert "is at most tol = 0.0001. Best score" in alone
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", cem_torchrun.__name__]
    ranks = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    assert ranks.stdout == alone.replace("on 1 ranks", "on 2 ranks")


@pytest.mark.parametrize("draws", [4_000_000, pytest.param(1_000_000_000, marks=pytest.mark.slow)])
def test_a_monte_carlo_estimate_on_dask(draws: int, capsys: pytest.CaptureFixture[str]) -> None:
    dask = pytest.importorskip("dask")
    mean, error = dask.compute(*monte_carlo_dask.price(draws // 8, block=100_000), scheduler="threads")
    assert error == pytest.approx(7.1 / math.sqrt(draws // 8), rel=0.05)
    assert abs(mean - 5.4307) < 4 * error + 0.0005
    with local_cluster() as client:
        argv = ["--draws", str(draws), "--scheduler", client.scheduler.address]
        assert monte_carlo_dask.main(argv) == 0
    assert capsys.readouterr().out.startswith(f"price {5.4:.1f}")
