"""The cross-entropy method and MPPI as programs of JAX: a generation is a pure function, a run is a scan."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scored_functions import sphere

from multisample import Key, cem
from multisample.examples import cart_pole

D, N = 4, 100
START = np.linspace(-2, 3, D, dtype=np.float32)


def scanned(steps: int, f: Callable[[Any], Any] = sphere, **options: Any) -> Callable[..., Any]:
    @jax.jit
    def run(state: Any, seed: Any) -> Any:
        def one(state: Any, t: Any) -> tuple[Any, Any]:
            following = cem.step(state, Key(seed, t), f, N, **options)
            return following, following.mu

        return jax.lax.scan(one, state, jnp.arange(steps))

    return run


BOUNDS = (-2.5, np.array([0.5, 4, 4, 4], np.float32))
OPTIONS: dict[str, dict[str, Any]] = {
    "bounds": {"bounds": BOUNDS, "antithetic": True, "smoothing": 0.7, "elite_frac": 0.3},
    "noise_floor": {"noise_floor": 0.01, "tol": 1e-9},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_scan_makes_the_iterations_of_a_run(jax_place: str, options: dict[str, Any]) -> None:
    run = cem.CEM(START, 2.0, N, seed=7, **options)
    means = []
    for _ in range(6):
        x = run.ask()
        run.tell(x, sphere(x))
        means.append(run.mu.copy())
    state, scanned_means = scanned(6, backend=jax_place, **options)(cem.start(jnp.asarray(START), 2.0), 7)
    # The samples of the first iteration have the same bits; sums over elites round in another order.
    np.testing.assert_allclose(scanned_means, np.stack(means), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(state.sigma, run.sigma, rtol=1e-2, atol=1e-4)
    np.testing.assert_allclose(state.fun, run.result().fun, rtol=1e-3, atol=1e-5)
    assert bool(state.running)


def test_a_step_after_the_end_changes_nothing() -> None:
    run = scanned(60, tol=0.05)
    state, means = run(cem.start(jnp.asarray(START), 2.0), 7)
    assert not bool(state.running)
    assert float(state.sigma.max()) <= 0.05
    again, _ = run(state, 8)
    for before, after in zip(state, again, strict=True):
        np.testing.assert_array_equal(before, after)
    np.testing.assert_array_equal(means[-1], means[-2])


def test_scores_that_are_not_finite_count_as_worst() -> None:
    state, _ = scanned(30, lambda x: jnp.where(x[0] > 1.5, jnp.nan, sphere(x)))(cem.start(jnp.asarray(START), 2.0), 7)
    np.testing.assert_allclose(state.mu, 1, atol=1e-2)
    ended, _ = scanned(3, lambda x: jnp.full(N, jnp.inf))(cem.start(jnp.asarray(START), 2.0), 7)
    assert not bool(ended.running)
    np.testing.assert_array_equal(ended.mu, START)


def test_a_batch_of_runs_is_a_vmap() -> None:
    run = scanned(4)
    state = cem.start(jnp.asarray(START), 2.0)
    batch = jax.vmap(run, in_axes=(None, 0))(state, jnp.arange(3))
    for seed in range(3):
        np.testing.assert_allclose(batch[1][seed], run(state, seed)[1], rtol=1e-4, atol=1e-5)


def test_integer_scores_and_float64(x64: None) -> None:
    state = cem.start(START.astype(np.float64), 2.0)
    ours = cem.start(jnp.asarray(START, jnp.float64), 2.0)
    step = jax.jit(lambda ours, key: cem.step(ours, key, lambda x: jnp.rint(sphere(x)).astype(int), N, elite_frac=1.0))
    for t in range(3):
        state = cem.step(state, Key(3, t), lambda x: np.rint(sphere(x)).astype(int), N, elite_frac=1.0)
        ours = step(ours, jnp.uint64(3) if t == 0 else Key(3, t))
    assert ours.mu.dtype == jnp.float64
    np.testing.assert_allclose(ours.mu, state.mu, rtol=1e-10)


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"n": 1}, ValueError, r"^n: "),
    ({"elite_frac": 0.001}, ValueError, r"^elite_frac: "),
    ({"smoothing": 0}, ValueError, r"^smoothing: "),
    ({"noise_floor": -1.0}, ValueError, r"^noise_floor: "),
    ({"tol": -1}, ValueError, r"^tol: "),
    ({"seed": None}, TypeError, r"^seed: "),
    ({"f": lambda x: x}, ValueError, r"^f: .*\(4, 100\)"),
    ({"f": lambda x: x[0] > 0}, None, ""),
    ({"f": lambda x: x[0] + 1j}, TypeError, r"^f: .*complex"),
])  # fmt: skip
def test_wrong_arguments_are_named(options: dict[str, Any], error: Any, message: str) -> None:
    arguments = {"seed": 1, "f": sphere, "n": N, **options}
    for start in (START, jnp.asarray(START)):
        state = cem.start(start, 2.0)
        if error is None:
            cem.step(state, **arguments)
            continue
        with pytest.raises(error, match=message):
            cem.step(state, **arguments)
        with pytest.raises(error, match=message):
            jax.jit(lambda state: cem.step(state, **arguments))(cem.start(jnp.asarray(START), 2.0))
    with pytest.raises(TypeError, match=r"^mu: expected float32 or float64"):
        cem.start(jnp.zeros(3, jnp.float16), 1.0)


def test_mppi_in_one_scan_swings_the_pole_up() -> None:
    run = cart_pole.control(steps=80, library="jax")
    assert abs(run.angles[0]) > 3.0
    assert max(map(abs, run.angles[-30:])) < 0.4
    assert max(map(abs, run.positions)) < 3.0
    # The first steps are those of the same example without JAX.
    other = cart_pole.control(steps=5)
    np.testing.assert_allclose(run.angles[:5], other.angles, atol=1e-2)
