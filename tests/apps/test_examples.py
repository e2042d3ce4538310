"""The example programs give the results that they describe."""

import functools
import math
import re
import runpy
import shutil
import statistics
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cuda_cpp import nvrtc_compile, requires_nvrtc
from dask_cluster import local_cluster
from places import ROOT
from skip_rules import require
from tables import slow_but

import multisample
from multisample import __main__ as command_line
from multisample import examples
from multisample.backends import registry
from multisample.examples import (
    bayesian_regression,
    cart_pole,
    cem_cluster,
    evolution_strategy,
    mezo,
    mppi,
    option_prices,
    populations,
)

no_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=no_device)]

Printed = Callable[..., list[list[str]]]


@pytest.fixture
def printed(capfd: pytest.CaptureFixture[str]) -> Printed:
    """``printed(program, *argv)``: the words in the lines that a program prints after its heading."""

    def printed(program: Any, *argv: str) -> list[list[str]]:
        assert program.main(argv) == 0
        return [line.split() for line in capfd.readouterr().out.splitlines()[1:]]

    return printed


@pytest.mark.parametrize("device", DEVICES)
def test_a_population_of_a_module_learns(device: str, printed: Printed) -> None:
    lines = printed(populations, "--device", device)
    assert float(lines[-1][1]) < 0.25 * float(lines[0][1])


def test_populations_of_jax_learn() -> None:
    pytest.importorskip("jax")
    losses = populations.train_jax()
    assert losses[-1] < 0.25 * losses[0]


def test_evosax_draws_its_population_by_perturb() -> None:
    pytest.importorskip("evosax")
    losses = populations.train_evosax()
    assert min(losses[-20:]) < 0.5 * losses[0]


@pytest.mark.parametrize("device", DEVICES)
def test_mppi_swings_the_pole_up_and_keeps_it_there(device: str, printed: Printed) -> None:
    lines = printed(cart_pole, "--device", device)
    angles, positions = np.array([[angle, position] for _, angle, _, position, _ in lines], float).T
    assert abs(angles[0]) > 1
    assert abs(angles[-4:]).max() < 0.4
    assert abs(positions).max() < 3.0


@pytest.mark.parametrize("library", slow_but(["torch"], ["numpy", "torch", "jax"]))
def test_many_poles_swing_up_at_once(library: str) -> None:
    pytest.importorskip(library)
    run = cart_pole.control(carts=2, steps=70, rollouts=512, library=library)
    assert run.angles.shape == run.positions.shape == (70, 2)
    assert abs(run.angles[0]).min() > 3.0
    assert abs(np.sin(run.angles[-10:])).max() < 0.4
    assert np.cos(run.angles[-10:]).min() > 0.9
    # Each cart draws the forces that it would draw alone. Another order of sums moves it by rounding errors.
    alone = cart_pole.control(steps=5, seed=8)
    many = cart_pole.control(carts=2, steps=5, seed=7, rollouts=cart_pole.ROLLOUTS, library=library)
    angles = np.remainder(many.angles[:, 1] - np.array(alone.angles) + 1, 2 * math.pi) - 1
    assert abs(angles).max() < 1e-3
    assert abs(many.positions[:, 1] - alone.positions).max() < 1e-3


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_of_carts_draws_the_forces_of_a_loop(device: str) -> None:
    seeds, plans = torch.arange(5, device=device), torch.rand(5, cart_pole.HORIZON, device=device)
    generators = [multisample.Generator(seed) for seed in range(5)]
    for t in range(3):
        forces = cart_pole.forces_of(torch, plans, seeds, t, 33)
        pairs = zip(plans, generators, strict=True)
        loop = [multisample.sample(plan, cart_pole.FORCE, 33, generator=own) for plan, own in pairs]
        assert torch.equal(forces, torch.stack(loop))
        flattened = cart_pole.forces_of(torch, plans, seeds, t, 33, "flattened")
        assert flattened.shape == forces.shape
        # Only the first row has the noise of the batch that is not flattened.
        assert torch.equal(flattened[0], forces[0])
        assert not torch.equal(flattened[1] - plans[1, :, None], forces[1] - plans[1, :, None])


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_the_fitted_posterior_is_near_the_optimum(device: str, printed: Printed) -> None:
    reasons = registry.find("torch_ext").status().reasons
    if reasons:
        pytest.skip("; ".join(reasons))
    fitted = np.array(printed(bayesian_regression, "--device", device), float)
    assert fitted.shape == (6, 5)
    np.testing.assert_allclose(fitted[:, 1], fitted[:, 2], atol=0.012)
    np.testing.assert_allclose(fitted[:, 3], fitted[:, 4], rtol=0.1)


@pytest.mark.parametrize("device", DEVICES)
def test_antithetic_pairs_and_common_random_numbers_reduce_variance(device: str) -> None:
    seeds = range(30)
    plain = [option_prices.basket_price(seed=seed, paths=5_000, device=device) for seed in seeds]
    pairs = [option_prices.basket_price(seed=seed, paths=5_000, antithetic=True, device=device) for seed in seeds]
    assert statistics.fmean(plain) == pytest.approx(statistics.fmean(pairs), abs=0.1)
    assert statistics.stdev(pairs) < 0.9 * statistics.stdev(plain)
    other = [option_prices.delta(seed, seed + 30, device) for seed in seeds[:10]]
    common = [option_prices.delta(seed, seed, device) for seed in seeds[:10]]
    assert statistics.stdev(common) < 0.3 * statistics.stdev(other)


def needs(device: str) -> None:
    """Skip the test if a program with kernels of its own cannot run on `device`."""
    if device != "cpu":
        require("cupy")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_kernel_prices_the_paths_that_sample_draws(device: str) -> None:
    needs(device)
    days, paths = option_prices.DAYS, 4096
    rate, volatility = option_prices.RATE, option_prices.VOLATILITY
    drift, daily = np.full(days, (rate - volatility**2 / 2) / days), volatility * np.full(days, days**-0.5)
    steps = multisample.sample(drift, daily, paths, seed=3, dtype="float32", backend="cpu").astype(np.float64)
    payoffs = np.exp(-rate) * np.maximum(100 * np.exp(steps.cumsum(axis=0)).mean(axis=0) - 100, 0)
    mean, error = option_prices.average_price(3, paths, device)
    assert mean == pytest.approx(payoffs.mean(), rel=1e-4)
    assert error == pytest.approx(payoffs.std() / paths**0.5, rel=1e-3)


ROLLOUT = (
    np.linspace(-0.5, 1.5, 2 * 30, dtype=np.float32), np.full(2 * 30, 2, np.float32),
    np.array([0.0, 0.3, 1.0, -0.5], np.float32), multisample.Key(2**63 + 1, 2**35),
)  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rollouts_have_the_controls_that_sample_draws(device: str) -> None:
    needs(device)
    plan, sigma, start, key, n = *ROLLOUT, 1001
    expected = []
    for accelerations in multisample.sample(plan, sigma, n, seed=key, layout="nd", backend="cpu"):
        vehicle = (*start, np.float32(0))
        for a, b in accelerations.reshape(-1, 2):
            vehicle = mppi.moved.py_func(vehicle, a, b)
        expected.append(vehicle[4])
    arrays: list[object] = [plan, sigma]
    if device != "cpu":
        import cupy

        arrays = [cupy.asarray(plan), cupy.asarray(sigma)]
    costs = mppi.costs_of(*arrays, start, n, key, device)
    costs = costs if device == "cpu" else costs.get()
    # Rounding decides whether a vehicle that touches the obstacle is in it, once in a while.
    assert np.isclose(costs, expected, rtol=1e-4).mean() > 0.99


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_mppi_flies_around_the_obstacle_to_the_goal(device: str) -> None:
    needs(device)
    positions = np.array(mppi.control(device=device))
    if device == "cpu":  # The same accelerations, in memory.
        assert np.allclose(positions[:20], mppi.control(steps=20, device="arrays"), atol=1e-4)
    assert np.hypot(*(positions[-10:] - mppi.GOAL).T).max() < 0.15
    assert np.hypot(*(positions - mppi.OBSTACLE).T).min() > 0.9 * float(mppi.RADIUS)


@requires_nvrtc
@pytest.mark.parametrize("draw", ["normals4", "fast_normals4"])
def test_kernels_of_the_programs_compile_without_a_warning(draw: str) -> None:
    for program, kernel in ((option_prices, "simulate"), (mppi, "rollouts")):
        options = [*program.OPTIONS, f"-DNORMALS4={draw}"]
        assert nvrtc_compile(program.KERNEL, [kernel], "sm_90", options).log == ""


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_mezo_lowers_the_loss_of_a_transformer(device: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        losses, backward_loss = mezo.train(steps=60, device=device, backward_steps=30)
    finally:
        torch.set_num_threads(threads)
    assert losses[-1] < 0.9 * losses[0]
    assert backward_loss < 0.9 * losses[0]


@pytest.mark.slow
def test_workers_that_exchange_scores_keep_equal_parameters(printed: Printed) -> None:
    """Workers on the CPU and, if there is one, on a GPU."""
    lines = printed(evolution_strategy, "--devices", "cpu", "cuda" if torch.cuda.is_available() else "cpu")
    assert [len(line) for line in lines] == [3] * 6, "the digests of a step differ"
    assert len({digest for *_, digest in lines}) == 6
    assert float(lines[-1][1]) > 0.1 * float(lines[0][1])


@pytest.mark.slow
def test_a_failed_worker_of_an_evolution_strategy_ends_the_others() -> None:
    with pytest.raises(RuntimeError, match="nowhere"):  # Not the BrokenBarrierError of the other worker.
        evolution_strategy.train(["cpu", "nowhere"], steps=1)


def test_workers_of_an_evolution_strategy_share_scores_and_seeds_alone() -> None:
    key = multisample.Key(3, 9)
    parameters = {name: np.zeros(shape, np.float32) for name, shape in evolution_strategy.SHAPES.items()}
    scores = evolution_strategy.scores_of(parameters, key, range(64))
    shared = [0.0] * 64
    for worker in range(4):
        shared[worker::4] = evolution_strategy.scores_of(parameters, key, range(worker, 64, 4))
    assert shared == scores
    # The update adds the noise of all members, in proportion to their scores.
    weights = (np.array(scores) - np.mean(scores)) / np.std(scores)
    expected = {name: np.zeros(x.shape) for name, x in parameters.items()}
    for member in range(64):
        for name, x in multisample.perturb(parameters, 1.0, seed=key, member=member).items():
            expected[name] += 0.125 / (64 * 0.1) * weights[member] * x
    evolution_strategy.update(parameters, scores, key)
    for name, x in parameters.items():
        np.testing.assert_allclose(x, expected[name], rtol=1e-4, atol=1e-5)


def test_a_step_of_an_evolution_strategy_needs_memory_for_two_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evolution_strategy, "score", lambda parameters: float(parameters["x"][0]))
    parameters, key = {"x": np.zeros(250_000, np.float32)}, multisample.Key(3, 9)

    def step() -> None:
        evolution_strategy.update(parameters, evolution_strategy.scores_of(parameters, key, range(64)), key)

    step()  # Compiles.
    tracemalloc.start()
    step()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.2 * parameters["x"].nbytes  # Beside the parameters.


def test_the_command_lists_every_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["examples"]) == 0
    printed = capsys.readouterr().out
    for name in examples.__all__:
        assert f"\n    python -m multisample examples {name}\n" in printed


@pytest.mark.parametrize("name", examples.__all__)
def test_the_command_runs_a_program_with_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        command_line.main(["examples", name, "--help"])
    assert exit_.value.code == 0
    assert re.match(rf"usage: python -m multisample (examples )?{name} ", capsys.readouterr().out)


OUTPUTS = ROOT / ".github" / "site" / "output"


def numbers_of(lines: list[list[str]]) -> list[float]:
    return [float(word) for line in lines for word in line]


@pytest.mark.parametrize("program", [mppi, pytest.param(bayesian_regression, marks=pytest.mark.slow)])
def test_the_site_shows_what_a_program_prints(program: Any, printed: Printed) -> None:
    """To the digits that depend on the processor."""
    shown = (OUTPUTS / f"{program.__name__.rpartition('.')[2]}.txt").read_text(encoding="utf-8").splitlines()
    found = printed(program)
    assert len(found) == len(shown) - 1
    np.testing.assert_allclose(numbers_of(found), numbers_of([line.split() for line in shown[1:]]), atol=0.1)


def test_the_site_has_the_output_of_every_program() -> None:
    assert {path.stem for path in OUTPUTS.iterdir()} == {*examples.__all__} - {"tetris"}


def test_programs_print_their_results(printed: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(option_prices, "REPETITIONS", 2)
    assert len(printed(option_prices)) == 4
    assert len(printed(option_prices, "--option", "average", "--paths", "512")) == 4
    assert len(printed(mppi)) == 8
    monkeypatch.setattr(cart_pole, "control", functools.partial(cart_pole.control, steps=12))
    assert printed(cart_pole, "--carts", "2", "--draws", "flattened") == [["0.48", "0", "of", "2"]]


@pytest.mark.parametrize("executor", slow_but(["threads"], ["none", "threads", "processes", "dask", "mpi"]))
def test_a_controller_is_tuned_on_executors(executor: str, capfd: pytest.CaptureFixture[str]) -> None:
    if executor == "dask":
        with local_cluster() as client:
            argv = ["--executor", executor, "--scheduler", client.scheduler.address, "--tasks", "3"]
            assert cem_cluster.main(argv) == 0
    elif executor == "mpi":
        pytest.importorskip("mpi4py")
        command = [shutil.which("mpiexec") or pytest.skip("no mpiexec"), "-n", "3", sys.executable, "-m"]
        command += ["mpi4py.futures", "-m", cem_cluster.__name__, "--executor", executor]
        subprocess.run(command, check=True, timeout=300)
    else:
        assert cem_cluster.main(["--executor", executor]) == 0
    assert capfd.readouterr().out.startswith("gains [ 5.17   6.516 49.566 10.23 ], cost 0.6365;")
    # The controller keeps the pole upright.
    assert cem_cluster.cost(np.zeros((4, 1))) > 50 * 0.6365


@pytest.mark.slow
def test_ranks_find_the_same_minimum(capsys: pytest.CaptureFixture[str]) -> None:
    if registry.find("torch_ext").status().reasons:
        pytest.skip("torch_ext cannot run")
    assert cem_cluster.main(["--executor", "torchrun"]) == 0
    alone = capsys.readouterr().out
    assert "is at most tol = 0.0001. Best score" in alone
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += [cem_cluster.__name__, "--executor", "torchrun"]
    for _ in range(4):
        ranks = subprocess.run(command, capture_output=True, text=True, timeout=600)
        # At exit, a thread of Gloo may wait for the GIL of an interpreter that has ended: pytorch/pytorch#179291.
        if "terminate called without an active exception" not in ranks.stderr:
            break
    assert ranks.returncode == 0, ranks.stderr
    assert ranks.stdout == alone.replace("on 1 ranks", "on 2 ranks")


@pytest.mark.parametrize(
    ("draws", "on_cluster"), [(4_000_000, False), pytest.param(200_000_000, True, marks=pytest.mark.slow)]
)
def test_a_monte_carlo_estimate_on_dask(draws: int, on_cluster: bool, capsys: pytest.CaptureFixture[str]) -> None:
    dask = pytest.importorskip("dask")
    mean, error = dask.compute(*option_prices.price_on_dask(draws // 8, block=100_000), scheduler="threads")
    assert error == pytest.approx(7.1 / math.sqrt(draws // 8), rel=0.05)
    assert abs(mean - 5.4307) < 4 * error + 0.0005
    argv = ["--draws", str(draws)]
    if on_cluster:
        with local_cluster(n_workers=1) as client:
            assert option_prices.main([*argv, "--scheduler", client.scheduler.address]) == 0
    else:
        assert option_prices.main(argv) == 0
    assert capsys.readouterr().out.startswith("price 5.4")


@pytest.mark.parametrize("name", sorted({*examples.__all__} - {"tetris"}))
def test_examples_are_programs_and_attributes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.delitem(sys.modules, f"multisample.examples.{name}")
    monkeypatch.delattr(examples, name)
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module(f"multisample.examples.{name}", run_name="__main__")
    assert exit_.value.code == 0
    assert getattr(examples, name).main


@pytest.mark.parametrize(("program", "library"), [
    ("bayesian_regression", "torch"), ("cart_pole --library jax", "jax"), ("option_prices --draws 1e6", "dask"),
])  # fmt: skip
def test_a_program_without_its_library_says_what_to_install(
    program: str, library: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, package = {"torch": ("PyTorch", "torch"), "jax": ("JAX", "jax"), "dask": ("Dask", "'dask[array]'")}[library]
    monkeypatch.setitem(sys.modules, library, None)
    assert command_line.main(["examples", *program.split()]) == 1
    assert capsys.readouterr().err == f"multisample: error: {name} is not installed: pip install {package}\n"
