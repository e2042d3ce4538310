"""Several searches of the cross-entropy method in one run, and means of any shape: each equals a plain run."""

import concurrent.futures
import json
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tables import slow_but

from multisample import Key, cem, sample
from multisample.cem import CEM, Result

ON_ARRAYS = pytest.mark.parametrize("library", ["numpy", "torch"], indirect=True)
# With JAX, compilation takes most of the time of a test.
SLOW_ON_JAX = pytest.mark.parametrize("library", slow_but(["numpy", "torch"], ["numpy", "torch", "jax"]), indirect=True)
Array = np.ndarray[Any, Any]
B, D, N = 4, 3, 60
SEEDS = [7, 2**64 - 1, 0, 2**63]
RANDOM_RUNS = int(os.environ.get("MULTISAMPLE_TEST_CEM_BATCHES", "90"))


def key_data(seeds: list[int]) -> Array:
    return np.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], np.uint32)


def squares(library: Any, targets: Array, kind: str = "") -> Callable[[Any], Any]:
    """A function with equal bits for one search and for several: squared distances, summed row by row."""

    def f(x: Any) -> Any:
        samples, scores = library.to_numpy(x), 0.0
        for i in range(samples.shape[-2]):
            scores = scores + (samples[..., i, :] - targets[..., i, None]) ** 2
        if kind == "few finite":
            scores = np.where(scores > 4, np.nan, scores)
        if kind == "equal":
            scores = np.round(scores)
        if kind == "integers":
            return np.round(scores).astype(np.int32).tolist()
        if kind == "by columns":
            scores = np.asfortranarray(scores)
        return library.array(scores)

    return f


def assert_equal_runs(together: Result[Any], alone: list[Result[Any]], to_numpy: Callable[[Any], Array]) -> None:
    for b, one in enumerate(alone):
        for name in ("x", "mu", "sigma"):
            assert to_numpy(getattr(together, name)[b]).tobytes() == to_numpy(getattr(one, name)).tobytes(), name
        for name in ("fun", "nit", "nonfinite", "success", "status", "message"):
            assert getattr(together, name)[b] == getattr(one, name), name
        for name, column in one.history.items():
            rows = together.history[name][b]
            assert np.array_equal(rows[: one.nit], column, equal_nan=True), name
            assert len(rows) == max(run.nit for run in alone)


@SLOW_ON_JAX
def test_searches_equal_their_own_runs(library: Any) -> None:
    random = np.random.default_rng(1)
    # JAX compiles every shape.
    for _ in range(max(RANDOM_RUNS // (90 if library.name == "jax" else 1), 1)):
        check_random_searches(library, random)


def check_random_searches(library: Any, random: Any) -> None:
    batch, d, n = (int(random.choice(sizes)) for sizes in ([1, 2, 5], [1, 2, 7, 33], [2, 5, 33, 257, 1000]))
    dtype = "float32" if library.name == "jax" else random.choice(["float32", "float64"])
    seeds = [int(x) for x in random.integers(2**64, size=batch, dtype=np.uint64)]
    mu, sigma, floor, target, below, above = random.uniform(0.1, 2, (6, batch, d)).astype(dtype)
    common: dict[str, Any] = {
        "noise": random.choice(["independent", "shared"]), "antithetic": bool(random.integers(2)),
        "smoothing": float(random.choice([1.0, 0.7])), "elite_frac": max(float(random.choice([0.1, 0.3, 1.0])), 2 / n),
        "tol": random.choice([None, 0.5, 1.0]),
    }  # fmt: skip
    if random.random() < 0.3:
        common["noise_floor"] = random.choice([0.1, lambda t: 1 / t])
    together, alone = dict(common), [dict(common) for _ in seeds]
    if random.random() < 0.5:
        together["noise_floor"] = (lambda t: floor / t) if random.random() < 0.5 else floor
        for b, options in enumerate(alone):
            is_schedule = callable(together["noise_floor"])
            options["noise_floor"] = (lambda t, b=b: floor[b] / t) if is_schedule else floor[b]
    if has_bounds := random.random() < 0.3:
        together["bounds"] = mu - below, mu + above
        for b, options in enumerate(alone):
            options["bounds"] = mu[b] - below[b], mu[b] + above[b]
    kind = random.choice(["", "few finite", "equal", "integers", "by columns"])
    ways = ["minimize", "ask and tell", "saved"] + ["without samples"] * (not has_bounds)
    way, iterations = random.choice(ways), int(random.choice([0, 1, 3, 8]))
    forms: list[Callable[[list[int]], Any]] = [list, lambda seeds: np.array(seeds, np.uint64), library.seeds]
    vector = forms[random.integers(3)](seeds)

    def result(mu: Array, sigma: Array, target: Array, seed: Any, options: dict[str, Any]) -> Result[Any]:
        f = squares(library, target, kind)
        start, deviation = library.array(mu), library.array(sigma)
        if way == "minimize":
            return cem.minimize(f, start, deviation, n, seed=seed, iterations=iterations, **options)
        run = CEM(start, deviation, n, seed=seed, **options)
        for t in range(iterations):
            x = run.ask()
            scores = f(x)
            run.tell(None if way == "without samples" else x, scores)
            if way == "saved" and t == iterations // 2:
                state, run = run.state, CEM(start, deviation, n, seed=np.zeros_like(run.state["seed"]), **options)
                run.state = json.loads(json.dumps({name: value.tolist() for name, value in state.items()}))
                assert np.array_equal(run.state["seed"], state["seed"])  # All 64 bits.
        return run.result()

    try:
        own = [result(mu[b], sigma[b], target[b], seed, alone[b]) for b, seed in enumerate(seeds)]
        assert_equal_runs(result(mu, sigma, target, vector, together), own, library.to_numpy)
    except AssertionError as error:
        error.add_note(f"{batch=} {d=} {n=} {dtype=} {kind=} {way=} {iterations=} {common}")
        raise


@pytest.mark.parametrize("way", ["samples", pytest.param(None, marks=pytest.mark.slow)])
def test_sums_do_not_depend_on_the_number_of_searches(library: Any, way: str | None) -> None:
    """XLA, NumPy and PyTorch would sum many elites in an order that depends on shape and strides."""
    random, batch, d, n = np.random.default_rng(1), 3, 16, 1000
    mu, target = random.normal(size=(2, batch, d)).astype(np.float32)

    def result(mu: Array, target: Array, seed: Any) -> Result[Any]:
        run = CEM(library.array(mu), 1.5, n, seed=seed, smoothing=0.9, noise_floor=0.1)
        for _ in range(2):
            x = run.ask()
            run.tell(x if way else None, squares(library, target, "by columns")(x))
        return run.result()

    alone = [result(mu[b], target[b], b) for b in range(batch)]
    assert_equal_runs(result(mu, target, list(range(batch))), alone, library.to_numpy)


MU = np.linspace(-1, 2, B * D).reshape(B, D).astype(np.float32)
TARGETS = np.linspace(0, 1, B * D).reshape(B, D).astype(np.float32)


def alone(library: Any, sigma: Any = 1.5, mu: Array = MU, **options: Any) -> list[Result[Any]]:
    """The results of a run for each search."""
    sigmas = np.broadcast_to(np.float32(sigma), (B, D))
    starts = [(squares(library, TARGETS[b]), library.array(mu[b]), library.array(sigmas[b])) for b in range(B)]
    return [cem.minimize(*start, N, seed=seed, **options) for start, seed in zip(starts, SEEDS, strict=True)]


@ON_ARRAYS
def test_a_shared_mean_and_scalar_options_apply_to_all_searches(library: Any) -> None:
    options, f = {"iterations": 4, "bounds": (-3, 3), "noise_floor": MU[0] ** 2}, squares(library, TARGETS)

    def overwriting(x: Any) -> Any:
        scores = f(x)
        x[:] = 0
        return scores

    together = cem.minimize(overwriting, library.array(MU[0]), 1.5, N, seed=SEEDS, **options)
    assert_equal_runs(together, alone(library, mu=np.stack([MU[0]] * B), **options), library.to_numpy)


@SLOW_ON_JAX
def test_every_search_stops_by_itself(library: Any) -> None:
    """The function gets all searches until the last has ended, and scores of searches that have ended are ignored."""
    sigma, statuses = np.repeat(np.array([[0.1], [1.0], [0.02], [3.0]], np.float32), D, 1), []
    f, ended = squares(library, TARGETS), np.zeros(B, bool)

    def scored(x: Any) -> Any:
        assert tuple(x.shape) == (B, D, N)
        return library.array(np.where(ended[:, None], np.float32(-1e9), library.to_numpy(f(x))))

    def callback(run: CEM[Any]) -> None:
        statuses.append(run.status)
        ended[:] = run.status != 0

    start, options = library.array(MU), {"tol": 0.05, "iterations": 60}
    together = cem.minimize(scored, start, library.array(sigma), N, seed=SEEDS, callback=callback, **options)
    assert_equal_runs(together, alone(library, sigma, **options), library.to_numpy)
    assert len(set(together.nit.tolist())) > 2
    assert together.nfev == N * together.nit.max() == N * len(statuses)
    assert together.status.tolist() == [1] * B
    assert np.isnan(together.history["best"][2, together.nit[2] :]).all()


def test_ends_of_all_kinds_side_by_side() -> None:
    """Search 0 collapses, 1 has no finite score, 2 overflows and 3 runs on until the callback ends it."""
    mu = np.array([[0.0], [0.0], [2e38], [0.0]], np.float32)
    sigma = np.array([[0.0], [1.0], [1e38], [1.0]], np.float32)
    factors = np.array([[1], [np.nan], [-1], [1]], np.float32)
    options: dict[str, Any] = {"iterations": 30, "noise_floor": np.array([0, 0, 1e38, 1.0])[:, None], "seed": SEEDS}
    for callback, end in ((None, 0), (lambda run: run.result().nit[3] == 30, 5)):
        result = cem.minimize(lambda x: x[:, 0] * factors, mu, sigma, N, callback=callback, **options)
        assert result.status.tolist() == [2, 3, 4, end]
        assert result.success.tolist() == [False] * 3 + [end == 0]
        assert result.fun[1] == math.inf
        assert result.nit.tolist() == [1, 1, 1, 30]
        starts = "The standard", "No score", "The mean", "The callback" if callback else "All 30"
        assert all(map(str.startswith, result.message, starts))


def test_one_search_in_a_vector_has_results_with_an_axis() -> None:
    result = cem.minimize(lambda x: x.sum(-2), MU[:1], 1.0, N, seed=[7], iterations=2)
    assert tuple(result.mu.shape) == (1, D)
    assert result.fun.shape == result.nit.shape == result.success.shape == result.status.shape == (1,)
    assert result.message == ("All 2 iterations ran.",)
    assert result.history["best"].shape == (1, 2)


@pytest.mark.parametrize(("message", "changed"), [
    (r"^state\['seed'\]: expected shape \(4,\), got \(\)", {"seed": 7}),
    (r"^state\['history'\]: expected shape \(1, 4, 6\), got \(1, 6\)", {"history": [[1, 2, 3, 0.5, 0, 0]]}),
    (r"^state\['seed'\]: expected 0 <= .* got 18446744073709551616", {"seed": [2**64, 1, 2, 3]}),
    (r"^state\['sigma'\]: .* got -1.0 at 1, 2", {"sigma": np.where(np.arange(12).reshape(4, 3) == 5, -1.0, 1.0)}),
])  # fmt: skip
def test_a_state_of_another_shape_raises_and_changes_nothing(message: str, changed: dict[str, Any]) -> None:
    run = CEM(MU, 1.0, N, seed=SEEDS)
    with pytest.raises(ValueError, match=message):
        run.state = {**run.state, **changed}  # type: ignore[typeddict-item]
    assert np.array_equal(run.ask(), CEM(MU, 1.0, N, seed=SEEDS).ask())


@SLOW_ON_JAX
def test_steps_equal_those_of_single_searches(library: Any) -> None:
    options: dict[str, Any] = {"smoothing": 0.8, "tol": 0.2, "noise": "independent", "antithetic": True}

    def stepped(state: Any, key: Any, b: Any) -> Any:
        low, high, floor = (library.array(x[b]) for x in (MU - 1, MU + 1, MU**2))
        f = squares(library, TARGETS[b])
        return cem.step(state, key, f, N, noise_floor=floor, bounds=(low, high), **options)

    together = cem.start(library.array(MU), 1.5, searches=B)
    alone = [cem.start(library.array(MU[b]), 1.5) for b in range(B)]
    for t in range(3):
        together = stepped(together, [Key(seed, t) for seed in SEEDS], slice(None))
        alone = [stepped(alone[b], Key(seed, t), b) for b, seed in enumerate(SEEDS)]
    for name, column in together._asdict().items():
        for b in range(B):
            assert library.to_numpy(column[b]).tobytes() == library.to_numpy(getattr(alone[b], name)).tobytes(), name


def test_a_common_mean_starts_all_searches(library: Any) -> None:
    state = cem.start(library.array(MU[0]), library.array(np.ones((B, D), np.float32)), searches=B)
    assert np.array_equal(library.to_numpy(state.mu), np.broadcast_to(MU[0], (B, D)))
    assert tuple(state.sigma.shape) == (B, D)
    square = cem.start(1.0, library.array(TARGETS[0]), searches=D)  # As many searches as dimensions.
    assert np.array_equal(library.to_numpy(square.sigma), np.broadcast_to(TARGETS[0], (D, D)))


def test_steps_of_several_searches_are_one_jitted_scan() -> None:
    jax = pytest.importorskip("jax")
    targets = jax.numpy.asarray(TARGETS)[..., None]

    def f(x: Any) -> Any:
        return ((x - targets) ** 2).sum(-2)

    def run(mu: Any, keys: Any) -> Any:
        start = cem.start(mu, 1.0, searches=B)
        return jax.lax.scan(lambda state, keys: (cem.step(state, keys, f, N), None), start, keys)[0]

    with jax.default_device(jax.devices("cpu")[0]):
        data = np.stack([np.concatenate([key_data(SEEDS), key_data([t] * B)], 1) for t in range(20)])
        state = jax.jit(run)(MU, data)
        assert np.abs(np.asarray(state.mu) - TARGETS).max() < 0.05
        eager = cem.minimize(f, jax.numpy.asarray(MU), 1.0, N, seed=SEEDS, iterations=20)
    np.testing.assert_allclose(np.asarray(state.mu), np.asarray(eager.mu), atol=1e-5)


@ON_ARRAYS
@pytest.mark.parametrize("shape", [(), (D,), (B, D), (B, D, 1)])
def test_steps_accept_bounds_and_floors_of_these_shapes(library: Any, shape: tuple[int, ...]) -> None:
    value = library.array(np.full(shape, 0.5, np.float32))
    start, f = cem.start(library.array(0 * MU), 1.0, searches=B), squares(library, TARGETS)
    state = cem.step(start, SEEDS, f, N, bounds=(-0.5, value), noise_floor=value)
    assert library.to_numpy(state.x).max() <= 0.5
    assert library.to_numpy(state.sigma).min() >= math.sqrt(0.5)


def test_steps_refuse_arrays_of_other_shapes(library: Any) -> None:
    for batch, shape in ((B, (B, 1)), (B, (D + 1,)), (D, (D, 1)), (None, (D + 1,)), (None, (B, D))):
        array = library.array(np.ones(shape, np.float32))
        state = cem.start(library.array(np.zeros(D, np.float32)), 1.0, searches=batch)
        options: list[Any] = [{"bounds": (-1, array)}, {"noise_floor": array}]
        for option in options:
            message = rf"^{next(iter(option))}: expected a number or shape \(3,\).*, got shape "
            with pytest.raises(ValueError, match=message):
                cem.step(state, 7 if batch is None else SEEDS[:batch], lambda x: x.sum(-2), N, **option)


@pytest.mark.parametrize(("error", "message", "mu", "options"), [
    (ValueError, r"^(mu|seed): .*3", MU, {"seed": [1, 2, 3]}),
    (ValueError, r"^seed: expected at least one element, got none", MU[0], {"seed": []}),
    (ValueError, r"^seed: expected seeds without offsets", MU, {"seed": [Key(1, 2), 3, 4, 5]}),
    (TypeError, r"^seed\[2\]: expected an integer", MU, {"seed": [1, 1, 2.5, 3]}),
    (ValueError, r"^noise_floor: .* shape \(3,\) or \(4, 3\)", MU, {"seed": SEEDS, "noise_floor": np.ones(4)}),
    (ValueError, r"^mu: expected it within bounds, got mu\[2, 2\] = ", MU, {"seed": SEEDS, "bounds": (-1, 1)}),
])  # fmt: skip
def test_errors_name_the_argument(error: type[Exception], message: str, mu: Any, options: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        cem.minimize(np.sum, mu, 1.0, N, **options)


@pytest.mark.parametrize("shape", [(N,), (N, B), (B, 1)])
def test_scores_of_another_shape_raise(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^scores: expected shape \(4, 60\), got "):
        cem.minimize(lambda x: np.ones(shape), MU, 1.0, N, seed=SEEDS)
    with pytest.raises(ValueError, match=r"^f: .* shape \(4, 60\), got "):
        cem.step(cem.start(MU, 1.0, searches=B), SEEDS, lambda x: np.ones(shape), N)


def test_executors_and_tasks_are_for_single_searches() -> None:
    run, executor = CEM(MU, 1.0, N, seed=SEEDS), concurrent.futures.ThreadPoolExecutor(1)
    calls: dict[str, Callable[[], Any]] = {
        "executor": lambda: cem.minimize(np.sum, MU, 1.0, N, seed=SEEDS, executor=executor),
        "ask_tasks": lambda: run.ask_tasks(2),
        "tell_scores": lambda: run.tell_scores(CEM(MU[0], 1.0, N).ask_tasks(1)[0], np.ones(N)),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=rf"^{name}: expected a run with one seed"):
            call()
    with pytest.raises(ValueError, match=r"^seed: expected a vector of 4 seeds, for state.mu of shape \(4, 3\), got 7"):
        cem.step(cem.start(MU, 1.0, searches=B), 7, np.sum, N)
    with pytest.raises(ValueError, match=r"^seed: expected one seed, for state.mu of shape \(3,\), got \[7"):
        cem.step(cem.start(MU[0], 1.0), SEEDS, np.sum, N)


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
    options |= {"bounds": (shape(LOW), shape(HIGH)), "noise_floor": floor}
    return cem.minimize(f, np.zeros(np.shape(floor)), sigma, 200, seed=7, iterations=20, **options)


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


@pytest.mark.parametrize("kind", [list, tuple])
def test_seeds_of_a_state_may_be_python_integers(kind: Callable[[list[int]], Any]) -> None:
    search = CEM(np.zeros((B, D)), 2.0, N, seed=[0] * B)
    search.state = {**search.state, "seed": kind(SEEDS)}
    assert search.state["seed"].tolist() == SEEDS


@pytest.mark.parametrize("searches", [None, 2])
def test_steps_have_the_shape_of_the_mean(searches: int | None) -> None:
    batch = () if searches is None else (searches,)
    states = [cem.start(np.zeros((*batch, *dims)), 2.0, searches) for dims in ((4, 3), (12,))]
    for seed in range(5):
        keys = seed if searches is None else [seed, seed + 10]
        f, edges = lambda x: distances(x.reshape(*batch, 4, 3, -1)), [(LOW, HIGH), (flat(LOW), flat(HIGH))]
        states = [cem.step(states[k], keys, f, 100, bounds=edges[k], noise_floor=1e-6) for k in range(2)]
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
