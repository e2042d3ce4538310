"""The cross-entropy method against a simple reference; the ends of runs, saved states and errors."""

import io
import json
import math
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import scipy.optimize
from cuda_memory import ExportedByDlpack
from scored_functions import START, assert_same, sphere

import multisample
from multisample import cem
from multisample.cem import CEM, _method
from multisample.cem._arrays import arrays_like
from multisample.cem._refit import COLLAPSED, CONVERGED, DIVERGED, RUNNING, UNSCORED, Settings, State, refit

Array = np.ndarray[Any, Any]
D, N = 6, 200
SEED = 7


def reference(
    iterations: int, elite_frac: float = 0.1, noise_floor: Any = 0.0, smoothing: float = 1.0
) -> tuple[Array, Array]:
    """Mean and standard deviation, computed in float64 with a full sort."""
    mu, sigma = START.astype(np.float64), np.full(D, 2.0)
    generator = multisample.Generator(SEED)
    for t in range(1, iterations + 1):
        x = multisample.sample(mu, sigma, N, generator=generator)
        best = x[:, np.argsort(sphere(x))[: round(elite_frac * N)]]
        variance = best.var(axis=1) + (noise_floor(t) if callable(noise_floor) else noise_floor)
        mu = mu + smoothing * (best.mean(axis=1) - mu)
        sigma = sigma + smoothing * (np.sqrt(variance) - sigma)
    return mu, sigma


@pytest.mark.parametrize("options", [
    *({"elite_frac": fraction} for fraction in (0.01, 0.1, 0.5, 1.0)),
    *({"noise_floor": floor} for floor in (0.25, np.linspace(0, 2, D), lambda t: max(5 - t / 2, 0),
                                           lambda t: np.arange(D) / t)),
    {"smoothing": 0.7},
])  # fmt: skip
def test_the_refit_is_the_mean_and_deviation_of_the_elites(options: dict[str, Any]) -> None:
    mu, sigma = reference(8, **options)
    result = cem.minimize(sphere, START.astype(np.float64), 2.0, N, iterations=8, seed=SEED, check_every=0, **options)
    np.testing.assert_allclose(result.mu, mu, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(result.sigma, sigma, rtol=1e-9, atol=1e-12)


def test_a_result_has_the_history_and_the_best_sample_of_the_run() -> None:
    recorded: list[tuple[float, ...]] = []
    samples, sigmas = [], []

    def f(x: Array) -> Array:
        # Scores get worse, so that the best sample is in the first iteration. They are float16, a narrower type.
        scores = (sphere(x) + 100 * len(recorded)).astype(np.float16)
        recorded.append((scores.min(), scores.mean(dtype=np.float64), np.sort(scores)[19]))
        samples.append(x[:, scores.argmin()].copy())
        return np.asarray(scores)

    result = cem.minimize(f, START, 2.0, N, iterations=6, seed=SEED, callback=lambda x: sigmas.append(x.sigma.max()))
    history = result.history
    assert list(history) == ["best", "mean", "threshold", "sigma", "nonfinite"]
    for name, column in zip(("best", "mean", "threshold"), np.array(recorded, np.float64).T, strict=True):
        np.testing.assert_allclose(history[name], column, rtol=1e-6)
    assert history["sigma"].tolist() == sigmas
    assert history["nonfinite"].tolist() == [0] * 6
    assert (result.nit, result.nfev, result.nonfinite) == (6, 6 * N, 0)
    assert result.fun == recorded[0][0]
    assert np.array_equal(result.x, samples[0])


def test_results_have_the_library_of_the_initial_mean_and_differ_only_by_rounding(library: Any) -> None:
    kinds = set()

    def f(x: Any) -> Any:
        kinds.add((type(x), tuple(x.shape), str(x.dtype).removeprefix("torch.")))
        return sphere(x)

    deviation = np.full((D, 1), 2, np.float32)
    for mu, sigma in ((START, deviation), (1.0, deviation), (START, 2.0), (START, np.float32(2))):
        there = cem.minimize(sphere, mu, sigma, N, iterations=12, seed=SEED)
        own = [library.array(x) if np.ndim(x) else x for x in (mu, sigma)]
        kinds.clear()
        here, kind = cem.minimize(f, *own, N, iterations=12, seed=SEED), type(library.array(START))
        assert kinds == {(kind, (D, N), "float32")}
        for name in ("x", "mu", "sigma"):
            array = getattr(here, name)
            assert (type(array), array.shape, str(array.dtype).removeprefix("torch.")) == (kind, (D,), "float32")
        assert type(here.fun) is float
        assert all(type(column) is np.ndarray for column in here.history.values())
        np.testing.assert_allclose(library.to_numpy(here.mu), there.mu, atol=1e-4)
        np.testing.assert_allclose(library.to_numpy(here.sigma), there.sigma, rtol=1e-3)
        for name in ("best", "mean", "threshold", "sigma"):
            np.testing.assert_allclose(here.history[name], there.history[name], rtol=1e-2)
    drawn = CEM(library.array(START), 2.0, N, seed=SEED, bounds=(-2.5, 4)).ask()
    plain = multisample.sample(START, 2.0, N, seed=SEED)
    assert plain.min() < -2.5
    assert plain.max() > 4
    assert np.array_equal(library.to_numpy(drawn), np.clip(plain, np.float32(-2.5), np.float32(4)))


def test_iterations_reuse_the_memory_of_the_samples() -> None:
    addresses: set[int] = set()
    cem.minimize(lambda x: addresses.add(x.ctypes.data) or sphere(x), START, 2.0, N, iterations=5, bounds=(-5, 5))
    assert len(addresses) == 1


def test_scores_may_be_arrays_of_other_libraries(library: Any) -> None:
    ways: list[Callable[[Any], Any]] = [
        lambda x: np.round(sphere(library.to_numpy(x))).astype(np.int64),
        lambda x: np.round(sphere(library.to_numpy(x))).tolist(),
        lambda x: np.round(sphere(library.to_numpy(x))).astype(np.float64),
        lambda x: library.array(np.round(sphere(library.to_numpy(x)))),
    ]
    results = [cem.minimize(way, library.array(START), 2.0, N, iterations=3, seed=SEED) for way in ways]
    for result in results[1:]:
        assert_same(result, results[0])


def test_large_integer_scores_stay_distinct() -> None:
    result = cem.minimize(lambda x: 2**40 + np.argsort(np.argsort(x[0])), START, 2.0, N, iterations=1, seed=SEED)
    assert result.fun == 2**40
    assert result.x[0] == multisample.sample(START, 2.0, N, seed=SEED)[0].min()


def test_lists_and_objects_with_only_a_protocol_become_arrays_of_the_backends_library(torch_device: str) -> None:
    import torch

    expected = CEM(START, 2.0, N, seed=SEED).ask()
    for mu, sigma in ((START.tolist(), 2), (ExportedByDlpack(START), ExportedByDlpack(np.full(D, 2, np.float32)))):
        drawn = CEM(mu, sigma, N, seed=SEED).ask()
        assert type(drawn) is np.ndarray and drawn.dtype == np.float32
        assert np.array_equal(drawn, expected)
    drawn = CEM(START, 2.0, N, seed=SEED, backend="torch_ext").ask()
    assert isinstance(drawn, torch.Tensor)
    assert drawn.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_options_are_passed_to_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = []

    def sample(*arguments: Any, **options: Any) -> Any:
        recorded.append({name: options.pop(name, None) for name in expected_options})
        return multisample.sample(*arguments, **options)

    expected_options: Any = {"noise": "shared", "antithetic": True, "fast_math": True, "backend": "cpu"}
    monkeypatch.setattr(_method, "sample", sample)
    CEM([0.0], [2.0], N, seed=SEED, **expected_options).ask()
    assert recorded[-1] == expected_options


def test_no_gradient_is_recorded() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.ones((), requires_grad=True)
    mu = torch.zeros(D, requires_grad=True)
    result = cem.minimize(lambda x: weight * sphere(x), mu, 1.0, N, iterations=3, seed=SEED)
    assert not (result.x.requires_grad or result.mu.requires_grad or result.sigma.requires_grad)
    task = CEM(mu, 1.0, N, seed=SEED).ask_tasks(1)[0]
    assert task.score(lambda x: weight * sphere(x)).shape == (N,)


def test_the_loop_reads_nothing_from_the_device() -> None:
    # Tensors on PyTorch's meta device have no values, so reading one raises.
    torch = pytest.importorskip("torch")
    arrays = arrays_like(torch.empty(D, 0))
    mu, scalar = torch.empty(D, device="meta"), torch.empty((), dtype=torch.float64, device="meta")
    state = State(mu, mu, mu, scalar, scalar > 0)
    samples, scores = torch.empty(D, N, device="meta"), torch.empty(N, device="meta")
    following, row = refit(Settings(arrays, 20, 0.5, 1e-3), state, samples, scores, 0.5)
    assert [x.shape for x in following] == [(D,), (D,), (D,), (), ()]
    assert row.shape == (6,)
    with pytest.raises((RuntimeError, NotImplementedError)):
        bool(following.running)


OPTIONS: dict[str, Any] = {
    "noise_floor": lambda t: max(1 - t / 10, 0), "bounds": (-4, 4), "smoothing": 0.9, "tol": 1e-3, "elite_frac": 0.15,
}  # fmt: skip


def test_ask_and_tell_give_the_result_of_minimize(library: Any) -> None:
    for iterations in (0, 3, 100):
        whole = cem.minimize(sphere, library.array(START), 2.0, N, seed=SEED, iterations=iterations, **OPTIONS)
        halves = CEM(library.array(START), 2.0, N, seed=SEED, **OPTIONS)
        for _ in range(iterations):
            if halves.status != 0:
                break
            x = halves.ask()
            halves.tell(x, sphere(x))
        assert_same(halves.result(), whole)
        assert whole.status == (iterations == 100)
    assert whole.success
    assert whole.message.startswith("The largest standard deviation, 0.00")
    sigma = whole.history["sigma"]
    assert sigma[-1] <= OPTIONS["tol"] < sigma[-2]
    assert whole.nfev == N * whole.nit == N * len(sigma)


def by_npz(state: Any) -> Any:
    file = io.BytesIO()
    np.savez(file, **state)
    file.seek(0)
    return np.load(file, allow_pickle=False)


def by_json(state: Any) -> Any:
    return json.loads(json.dumps({name: value.tolist() for name, value in state.items()}))


@pytest.mark.parametrize(("saved", "after"), [(by_npz, 4), (by_json, 1), (by_json, 0)])
def test_a_resumed_run_continues_with_equal_bits(library: Any, saved: Callable[[Any], Any], after: int) -> None:
    original = CEM(library.array(START), 2.0, N, seed=2**64 - 5, **OPTIONS)
    rarely = library.array(np.where(np.arange(N) < 5, 0, np.inf).astype(np.float32))
    for t in range(after):
        x = original.ask()
        original.tell(x, sphere(x) + rarely if t == 0 else sphere(x))  # The history has infinities too.
    resumed = CEM(library.array(np.zeros(D, np.float32)), 1.0, N, **OPTIONS)
    resumed.state = saved(original.state)
    for _ in range(4):
        x, y = original.ask(), resumed.ask()
        assert library.to_numpy(x).tobytes() == library.to_numpy(y).tobytes()
        original.tell(x, sphere(x))
        resumed.tell(y, sphere(y))
    assert_same(original.result(), resumed.result())
    assert original.result().nfev == resumed.result().nfev


@pytest.mark.parametrize("scored", ["samples", "drawn samples"])
def test_an_interrupted_tell_changes_nothing_or_is_complete(scored: str) -> None:
    """The profile function, which runs at each call and return, stands in for a signal handler."""
    calls = 0

    def interrupt(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        if frame.f_code.co_filename == _method.__file__:
            calls += 1
            if calls == last:
                raise KeyboardInterrupt

    def tell(run: CEM[Any], samples: Any, scores: Any) -> None:
        run.tell(samples if scored == "samples" else None, scores)
        run.status  # noqa: B018

    expected = CEM(START, 2.0, 20, seed=7)
    for _ in range(3):
        tell(expected, samples := expected.ask(), sphere(samples))
    before, last = sys.getprofile(), 0
    while calls == last:
        calls, last, run = 0, last + 1, CEM(START, 2.0, 20, seed=7)
        for profile in (before, interrupt, before):
            samples, told = run.ask(), run.state["told"]
            try:
                sys.setprofile(profile)
                tell(run, samples, sphere(samples))
            except KeyboardInterrupt:
                pass
            finally:
                sys.setprofile(before)
            CEM(START, 2.0, 20, seed=7).state = run.state
            if run.state["told"] == told:
                tell(run, samples, sphere(samples))
        assert_same(run.result(), expected.result())
    assert last > 20


def test_a_state_is_a_copy() -> None:
    run = CEM(START, 2.0, N, seed=SEED)
    before = run.state
    x = run.ask()
    run.tell(x, sphere(x))
    mu = run.mu.copy()
    for copy in (run.state["mu"], run.ask_tasks(2)[0].mu):
        copy[:] = 0
    assert np.array_equal(run.mu, mu)
    run.state = before
    assert np.array_equal(run.ask(), x)
    assert run.result().nit == 0


def test_tell_without_samples_draws_them_again(library: Any) -> None:
    start, center = library.array(START), library.array(START[::-1].copy())[:, None]
    every: list[dict[str, Any]] = [{"antithetic": True, "noise_floor": 0.01, "smoothing": 0.7}]
    # JAX compiles for each set of options, so it has only one.
    for options in every if library.name == "jax" else [{}, *every]:
        with_samples, without = (CEM(start, 2.0, N, seed=SEED, **options) for _ in range(2))
        for k in range(5):
            x, _ = with_samples.ask(), without.ask()
            scores = ((x - center) ** 2).sum(0)
            if k == 3:
                scores = library.array(np.where(np.arange(N) % 3 == 0, np.inf, library.to_numpy(scores)))
            with_samples.tell(x, scores)
            without.tell(None, scores)
            # One step from equal states differs by rounding only.
            for name in ("mu", "sigma"):
                a, b = (library.to_numpy(getattr(run, name)) for run in (with_samples, without))
                np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)
            without.state = with_samples.state
        best = [run.result() for run in (with_samples, without)]
        assert best[0].fun == best[1].fun and best[0].nfev == best[1].nfev
        np.testing.assert_allclose(library.to_numpy(best[0].x), library.to_numpy(best[1].x), rtol=1e-6)


def test_tell_without_samples_or_a_draw_raises() -> None:
    run = CEM(START, 1.0, N, seed=SEED)
    scores = np.arange(N, dtype=np.float32)
    with pytest.raises(ValueError, match="samples: expected an array, got None, but there is no `ask`"):
        run.tell(None, scores)
    run.ask()
    run.tell(None, scores)
    with pytest.raises(ValueError, match="there is no `ask`"):
        run.tell(None, scores)
    bounded = CEM(START, 1.0, N, seed=SEED, bounds=(-5, 5))
    bounded.ask()
    with pytest.raises(ValueError, match="samples are clipped to bounds"):
        bounded.tell(None, scores)


def test_tell_accepts_samples_late_and_in_any_order() -> None:
    run = CEM(START, 2.0, N, seed=SEED)
    first, second = run.ask(), run.ask()
    assert np.array_equal(first, multisample.sample(START, 2.0, N, seed=SEED))
    assert not np.array_equal(first, second)
    state = run.state
    run.tell(second, sphere(second))
    alone = CEM(START, 2.0, N)
    alone.state = state
    alone.tell(second.tolist(), sphere(second).tolist())
    assert_same(run.result(), alone.result())
    run.tell(first, sphere(first))
    assert run.result().nit == 2


@pytest.mark.parametrize("package", ["multisample", "torch"])
def test_without_a_seed_runs_follow_the_default_generator_of_the_library(package: str) -> None:
    module: Any = pytest.importorskip(package)
    start = START if package == "multisample" else module.from_numpy(START)

    def twice() -> list[float]:
        return [cem.minimize(sphere, start, 2.0, N, iterations=2).fun for _ in range(2)]

    module.manual_seed(3)
    first = twice()
    module.manual_seed(3)
    assert twice() == first
    module.manual_seed(4)
    assert len({*twice(), *first}) == 4


@pytest.mark.parametrize("bounds", [lambda *pair: pair, scipy.optimize.Bounds], ids=["pair", "Bounds"])
def test_samples_are_clipped_to_the_bounds(bounds: Callable[[Any, Any], Any]) -> None:
    low, high = np.array([-5.0, -5, 2, -np.inf, -5, -5]), np.array([5.0, 0.5, 5, np.inf, 5, 5])

    def f(x: Array) -> Array:
        assert (x >= low[:, None]).all()
        assert (x <= high[:, None]).all()
        return np.asarray(sphere(x))

    start = np.clip(START.astype(np.float64), low, high)
    result = cem.minimize(f, start, 2.0, N, iterations=60, seed=SEED, bounds=bounds(low, high))
    np.testing.assert_allclose(result.mu, [1, 0.5, 2, 1, 1, 1], atol=1e-6)
    # The optimum is exact; samples of a truncated normal distribution would only approach it.
    assert result.mu[1:3].tolist() == [0.5, 2]
    start = np.full(6, 0.7, np.float32)  # float32 rounds 0.7 down.
    assert CEM(start, 1.0, N, seed=SEED, bounds=bounds(0.7, 1)).ask().min() == start[0]
    assert np.ptp(CEM(START, 9.0, N, seed=SEED, bounds=(Fraction(-3), Fraction(7, 2))).ask()) == 6.5
    assert cem.step(cem.start(start, 1.0), SEED, sphere, N, bounds=bounds(0.7, 1)).mu.min() >= start[0]


def test_scores_that_are_not_finite_count_as_worst(library: Any) -> None:
    def result(*values: float) -> Any:
        def f(x: Any) -> Any:
            scores = np.array(sphere(library.to_numpy(x)))
            scores[::4] = np.resize(values, N // 4)
            return library.array(scores)

        return cem.minimize(f, library.array(START), 2.0, N, iterations=10, seed=SEED)

    found, other = result(math.nan, math.inf, -math.inf), result(1e30)
    assert library.to_numpy(found.mu).tobytes() == library.to_numpy(other.mu).tobytes()
    assert library.to_numpy(found.sigma).tobytes() == library.to_numpy(other.sigma).tobytes()
    assert found.fun == other.fun
    assert found.history["nonfinite"].tolist() == [N // 4] * 10
    assert np.isfinite(found.history["mean"]).all()
    assert found.nonfinite == 10 * N // 4
    assert found.message.endswith(f"{10 * N // 4} of {10 * N} scores were NaN or infinite, and counted as worst.")
    assert found.success


@pytest.mark.parametrize("finite", [1, 2, 5])
def test_only_finite_scores_are_elites(finite: int) -> None:
    run = CEM(START, 2.0, N, seed=SEED)
    x = run.ask()
    scores = np.full(N, np.nan)
    scores[10 : 10 + finite] = 3
    run.tell(x, scores)
    best = x[:, 10 : 10 + finite]
    np.testing.assert_allclose(run.mu, best.mean(axis=1), rtol=1e-6)
    np.testing.assert_allclose(run.sigma, best.std(axis=1) if finite > 1 else 2.0, rtol=1e-5)
    assert run.status == 0
    assert run.result().history["threshold"].tolist() == [math.inf]


@pytest.mark.parametrize(("options", "ends", "message"), [
    ({"iterations": 3}, (0, True, 3), r"All 3 iterations ran\.$"),
    ({"iterations": 3, "tol": 0.01}, (0, False, 3), "All 3 iterations ran; the largest standard deviation, "),
    ({"iterations": 0, "tol": 0.01}, (0, False, 0), r"All 0 iterations ran\.$"),
    # A sigma of 0 in some dimensions is not a collapse.
    ({"iterations": 3, "sigma": np.array([2.0, 0, 2, 0, 2, 2])}, (0, True, 3), "All 3 iterations ran"),
    ({"sigma": 0.0}, (2, False, 1), "The standard deviation collapsed in iteration 1"),
    # Far from 0, the spacing of float32 numbers is as large as the range of the samples.
    ({"f": lambda x: sphere(x - 100), "sigma": 100.0, "iterations": 1000}, (2, False, None),
     r"The standard deviation collapsed in iteration \d\d: "),
    ({"f": lambda x: x[0] > 0, "mu": np.full(D, 2e38, np.float32), "sigma": 1e38}, (4, False, 1),
     r"The mean or the standard deviation overflowed in iteration 1; mu and sigma are from before it\.$"),
    ({"f": lambda x: sphere(x) * math.nan}, (3, False, 1),
     rf"No score was finite in iteration 1, so .* {N} of {N} scores were NaN or infinite, and counted as worst\.$"),
    ({"tol": 9.0, "callback": lambda run: run.status != 0}, (1, True, 1), "The largest standard deviation"),
    ({"callback": lambda run: True}, (5, False, 1), r"The callback ended the run\.$"),
])  # fmt: skip
def test_runs_end(library: Any, options: dict[str, Any], ends: tuple[int, bool, int | None], message: str) -> None:
    given = {"f": sphere, "mu": START, "sigma": 2.0, "n": N, "seed": SEED, **options}
    arrays = {name: library.array(x) for name, x in given.items() if isinstance(x, np.ndarray)}
    result = cem.minimize(**given | arrays)
    assert (result.status, result.success, result.nit) == (*ends[:2], result.nit if ends[2] is None else ends[2])
    assert re.match(message, result.message)
    mu, sigma = library.to_numpy(result.mu), given["sigma"]
    if isinstance(sigma, np.ndarray):
        assert np.array_equal(mu[sigma == 0], START[sigma == 0])
    if result.status > 2 and "f" in options:
        assert np.array_equal(mu, given["mu"])
        assert np.array_equal(library.to_numpy(result.sigma), np.full(D, np.float32(sigma)))
    if result.status == 3:
        assert result.fun == math.inf
        assert np.array_equal(library.to_numpy(result.x), START)


@pytest.mark.parametrize(
    ("f", "options", "status"),
    [
        (sphere, {"tol": 0.01}, 1),
        (lambda x: sphere(x - 100), {"sigma": 100.0}, 2),
        (lambda x: sphere(x) / (np.abs(x[0] - 1).max() > 0.1) + np.where(np.ptp(x) < 1, np.nan, 0), {}, 3),
    ],
    ids=["tol", "collapse", "unscored"],
)
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
def test_check_every_does_not_change_the_result(f: Any, options: Any, status: int) -> None:
    fixed: Any = {"mu": START, "sigma": 2.0, "n": N, "iterations": 60, "seed": SEED, **options}
    expected = cem.minimize(f, **fixed)
    assert (expected.status, expected.nfev) == (status, N * expected.nit)
    assert expected.nit < 50
    for check_every, made in ((0, 60), (7, -(-expected.nit // 7) * 7)):
        result = cem.minimize(f, check_every=check_every, **fixed)
        assert_same(result, expected)
        assert result.nfev == N * made


NUMBER = "expected a finite number"


@pytest.mark.parametrize(("changed", "error", "message"), [
    ({"f": 3}, TypeError, "f: expected a function, got 3 of type int"),
    ({"f": lambda x: None}, TypeError, "scores: expected numbers, got None of type NoneType"),
    ({"f": lambda x: x.sum()}, ValueError, r"scores: expected shape \(200,\), got \(\)"),
    ({"f": lambda x: np.ma.masked_less(x.sum(0), 0)}, TypeError, "scores: expected an array without a mask"),
    ({"f": lambda x: x.sum(0).astype(np.dtype("f8").newbyteorder())}, ValueError, "scores: .* got swapped bytes"),
    ({"callback": 3}, TypeError, "callback: expected a function, got 3"),
    ({"n": 1}, ValueError, "n: expected 2 <= n"),
    ({"n": 10}, ValueError, r"elite_frac: expected at least 2 elites.*, such as 0\.2 for n = 10, got 0\.1, which"),
    ({"iterations": -1}, ValueError, "iterations: expected 0 <= iterations"),
    ({"check_every": 0.5}, TypeError, "check_every: expected an integer"),
    ({"elite_frac": 1.5}, ValueError, rf"elite_frac: {NUMBER}, 0 <= elite_frac <= 1, got 1\.5"),
    ({"smoothing": 0}, ValueError, "smoothing: expected 0 < smoothing <= 1, got 0"),
    ({"smoothing": 2}, ValueError, f"smoothing: {NUMBER}, 0 <= smoothing <= 1"),
    ({"tol": math.inf}, ValueError, f"tol: {NUMBER}, tol >= 0, got inf"),
    ({"tol": True}, TypeError, "tol: expected a number, got True of type bool"),
    ({"noise_floor": -1}, ValueError, f"noise_floor: {NUMBER}, noise_floor >= 0, got -1"),
    ({"noise_floor": -START}, ValueError, "noise_floor: expected finite variances of at least 0"),
    ({"noise_floor": lambda t: -3}, ValueError, f"noise_floor: {NUMBER}, noise_floor >= 0, got -3"),
    ({"noise_floor": lambda t: [1, 2]}, ValueError, r"noise_floor: .* shape \(6,\), got shape \(2,\)"),
    ({"bounds": 3}, TypeError, r"bounds: expected a pair \(low, high\) or a scipy\.optimize\.Bounds, got 3 of"),
    ({"bounds": (3, -3)}, ValueError, r"bounds: expected low <= high, got 3\.0 and -3\.0 at 0"),
    ({"bounds": (math.nan, 3)}, ValueError, "bounds: expected low <= high, got nan"),
    ({"bounds": (-1, 5)}, ValueError, r"mu: expected it within bounds, got mu\[0\] = -2\.0, not from -1\.0 to 5\.0"),
    ({"mu": START * math.nan}, ValueError, r"mu: expected finite means, got mu\[0\] = nan"),
    ({"mu": START.astype(np.float16)}, TypeError, "mu: expected float32 or float64, got float16"),
    ({"sigma": -1.0}, ValueError, "sigma: expected finite standard deviations of at least 0"),
    ({"seed": -1}, ValueError, r"seed: expected 0 <= seed < 2\*\*64, got -1"),
    ({"backend": "nowhere"}, multisample.UnknownBackendError, "backend: .*nowhere"),
])  # fmt: skip
def test_errors_name_the_argument(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"f": sphere, "mu": START, "sigma": 1.0, "n": N, "iterations": 1, "seed": SEED}
    with pytest.raises(error, match=f"^{message}"):
        cem.minimize(**{**arguments, **changed})


def test_tell_and_ask_raise_for_wrong_arrays() -> None:
    run = CEM(START, 1.0, N, seed=SEED)
    x = run.ask()
    with pytest.raises(ValueError, match=r"^samples: expected shape \(6, 200\), got \(200, 6\)"):
        run.tell(x.T, sphere(x))
    with pytest.raises(ValueError, match=r"^out: expected shape \(6, 200\)"):
        run.ask(np.empty((D, 3), np.float32))
    assert (run.result().nit, int(run.state["offset"])) == (0, 1)
    jax = pytest.importorskip("jax")
    with jax.default_device(jax.devices("cpu")[0]):
        run = CEM(jax.numpy.asarray(START), 1.0, N, seed=SEED)
        with pytest.raises(TypeError, match=r"^out: expected None with JAX"):
            run.ask(run.ask())


def test_concurrent_calls_of_ask_take_different_offsets_up_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    run, draw, both = CEM(START, 1.0, N, seed=SEED), _method.sample, threading.Barrier(2, timeout=60)
    with monkeypatch.context() as patched, ThreadPoolExecutor(2) as executor:
        patched.setattr(_method, "sample", lambda *args, **options: both.wait() < 2 and draw(*args, **options))
        samples = [future.result() for future in [executor.submit(run.ask) for _ in range(2)]]
    assert not np.array_equal(*samples)
    run.state = {**run.state, "offset": 2**64}
    with pytest.raises(OverflowError, match=r"^generator: .*used up"):
        run.ask()


def test_libraries_without_arithmetic_raise() -> None:
    class DeviceNDArray:
        """A fake of Numba's class, in a module of Numba's package."""

        dtype = np.dtype(np.float32)

    DeviceNDArray.__module__ = "numba.cuda"
    with pytest.raises(TypeError, match=r"^mu: expected an array of NumPy, PyTorch, .*a Numba device array$"):
        arrays_like(DeviceNDArray())


NUMBERS = np.arange(6.0)
ROW = [1.0, 2.0, 3.0, 0.5, 0.0, 0.0]  # One iteration: best, mean, threshold, sigma, nonfinite, status


def with_one(value: float) -> Array:
    return np.where(NUMBERS == 2, value, NUMBERS)


def row(status: float) -> list[float]:
    return [*ROW[:-1], status]


@pytest.mark.parametrize(("error", "message", "changed"), [
    (TypeError, r"^state: expected a mapping with keys mu, sigma,", None),
    (TypeError, r"^state: expected a mapping with keys mu, sigma,", {"more": 1}),
    (ValueError, r"^state\['mu'\]: expected shape \(6,\), got \(1, 6\)", {"mu": [[0] * 6]}),
    (TypeError, r"^state\['mu'\]: expected numbers, got \[None, ", {"mu": [None] * 6}),
    (TypeError, r"^state\['mu'\]: expected numbers, got \[\[1\], ", {"mu": [[1], [2, 3]]}),
    (TypeError, r"^state\['x'\]: expected numbers, got \[True, ", {"x": [True] * 6}),
    (ValueError, r"^state\['mu'\]: expected finite numbers, got 1e\+39 at 2", {"mu": with_one(1e39)}),
    (ValueError, r"^state\['sigma'\]: .* of at least 0, got -1.0 at 2", {"sigma": with_one(-1)}),
    (ValueError, r"^state\['history'\]: expected shape \(1, 6\), got \(1, 2\)", {"history": [[0, 0]]}),
    (ValueError, r"^state\['history'\]: expected shape \(6,\), got \(\)", {"history": 1}),
    (ValueError, r"^state\['history'\]: expected statuses 0 to 4, got 5\.0 in row 1", {"history": [ROW, row(5)]}),
    (ValueError, r"^state\['history'\]: expected statuses 0 to 4, got nan", {"history": [row(math.nan)]}),
    (ValueError, r"^state\['told'\]: expected 0 <=", {"told": -1}),
    (TypeError, r"^state\['told'\]: expected an integer", {"told": 1.0}),
    (ValueError, r"^state\['told'\]: expected shape \(\), got \(1,\)", {"told": [1]}),
    (ValueError, r"^state\['seed'\]: expected 0 <= .* < 2\*\*64, got 18446744073709551616", {"seed": 2**64}),
    (ValueError, r"^state\['offset'\]: expected 0 <=", {"offset": -1}),
    (TypeError, r"^state\['offset'\]: expected an integer, got the bool True", {"offset": True}),
])  # fmt: skip
def test_wrong_states_raise_and_change_nothing(error: Any, message: str, changed: dict[str, Any] | None) -> None:
    run = CEM(START, 1.0, N, seed=SEED)
    state: Any = run.state
    with pytest.raises(error, match=message):
        run.state = [state] if changed is None else {**state, **changed}
    assert all(np.array_equal(run.state[name], state[name]) for name in state)


@pytest.mark.parametrize("status", [RUNNING, CONVERGED, COLLAPSED, UNSCORED, DIVERGED])
def test_a_state_of_any_end_can_be_restored(status: int) -> None:
    run = CEM(START, 0.0 if status == COLLAPSED else 1.0, N, seed=SEED, tol=9.0 if status == CONVERGED else None)
    samples = run.ask()
    scores = np.full(N, np.nan) if status == UNSCORED else np.arange(float(N))
    if status == DIVERGED:
        samples = samples.copy()
        samples[:, 0] = np.inf
    for _ in range(1 if status == RUNNING else 2):  # Scores after the end count in `told`.
        run.tell(samples, scores)
    assert run.status == status
    restored = CEM(START, 1.0, N, tol=9.0 if status == CONVERGED else None)
    restored.state = run.state
    assert restored.status == status
    assert all(np.array_equal(restored.state[name], run.state[name], equal_nan=True) for name in run.state)


@pytest.mark.parametrize(("name", "mu", "sigma"), [("mu", [], 1.0), ("mu", np.zeros((0, 1)), []), ("sigma", 0.0, [])])
def test_zero_dimensions_raise(name: str, mu: Any, sigma: Any) -> None:
    for call in (lambda: CEM(mu, sigma, N), lambda: cem.minimize(np.sum, mu, sigma, N)):
        with pytest.raises(ValueError, match=rf"^{name}: expected at least one element, got none$"):
            call()
