"""How well the cross-entropy method does, on functions of COCO's suite BBOB, beside others with as many evaluations.

Beside CMA-ES and its separable form of the package cmaes, and SciPy's differential evolution and dual annealing:
medians of five runs in ten dimensions. Where a method with nothing but standard deviations has to lose, the tests say
so too.
"""

from __future__ import annotations

import functools
import statistics
import warnings
from collections.abc import Callable

import bbob
import cmaes
import numpy as np
import pytest
from scipy import optimize

from multisample import cem

D = 10
EVALUATIONS = 20_000
# What all of them start from: optima are between -4 and 4.
MEAN, SIGMA, BOUND = 0.0, 3.0, 5.0
SEEDS = range(1, 6)


def cross_entropy(f: bbob.Function, seed: int) -> float:
    result = cem.minimize(f, np.full(D, MEAN), SIGMA, EVALUATIONS // 100, iterations=100, seed=seed)
    assert result.nfev <= EVALUATIONS
    return result.fun


def differential_evolution(f: bbob.Function, seed: int) -> float:
    options = {"popsize": 10, "maxiter": EVALUATIONS // (10 * D) - 1, "tol": 0, "polish": False, "seed": seed}
    result = optimize.differential_evolution(
        lambda x: f(x.reshape(D, -1)), [(-BOUND, BOUND)] * D, vectorized=True, updating="deferred", **options
    )
    return float(result.fun)


def dual_annealing(f: bbob.Function, seed: int) -> float:
    options = {"maxfun": EVALUATIONS, "maxiter": EVALUATIONS, "no_local_search": True, "seed": seed}
    return float(optimize.dual_annealing(lambda x: f(x[:, None])[0], [(-BOUND, BOUND)] * D, **options).fun)


def evolution_strategy(kind: type[cmaes.CMA | cmaes.SepCMA], f: bbob.Function, seed: int) -> float:
    optimizer = kind(mean=np.full(D, MEAN), sigma=SIGMA, seed=seed)
    best = np.inf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of a step size that has become 0, at the optimum.
        for _ in range(EVALUATIONS // optimizer.population_size):
            asked = [optimizer.ask() for _ in range(optimizer.population_size)]
            scores = f(np.stack(asked, axis=1))
            best = min(best, float(scores.min()))
            optimizer.tell(list(zip(asked, scores.tolist(), strict=True)))
    return best


cma_es = functools.partial(evolution_strategy, cmaes.CMA)
separable_cma_es = functools.partial(evolution_strategy, cmaes.SepCMA)


def median(method: Callable[[bbob.Function, int], float], f: bbob.Function) -> float:
    return statistics.median(method(f, seed) for seed in SEEDS)


@pytest.mark.parametrize(
    "make",
    [bbob.sphere, bbob.ellipsoid, bbob.rotated_ellipsoid, bbob.rosenbrock, bbob.rastrigin, bbob.rotated_rastrigin],
)
def test_functions_have_their_minimum_where_they_say(
    make: Callable[[int, int], tuple[bbob.Function, bbob.Array]],
) -> None:
    f, optimum = make(D, 1)
    assert f(optimum[:, None]) == pytest.approx([0], abs=1e-12)
    around = optimum[:, None] + np.random.default_rng(2).normal(size=(D, 1000)) * np.logspace(-6, 0, 1000)
    assert (f(around) > 0).all()


def test_on_the_sphere_it_is_ahead_of_scipy() -> None:
    f, _ = bbob.sphere(D, 1)
    mine = median(cross_entropy, f)
    assert mine < 1e-25
    assert mine < 1e-6 * median(differential_evolution, f)
    # And CMA-ES reaches the last bit, as this method would with some more.
    assert median(cma_es, f) < 1e-25


def test_among_many_minima_it_is_ahead_of_most() -> None:
    # A wide distribution sees the parabola below the waves, which others follow to the next minimum.
    for make in (bbob.rastrigin, bbob.rotated_rastrigin):
        f, _ = make(D, 1)
        mine = median(cross_entropy, f)
        assert mine < 6
        assert mine < 0.5 * median(cma_es, f)
        assert mine < 0.5 * median(differential_evolution, f)


def test_one_dimension_at_a_time_is_better_where_they_do_not_interact() -> None:
    # As dual annealing searches: far ahead on the separable function, far behind on the rotated one.
    f, _ = bbob.rastrigin(D, 1)
    assert dual_annealing(f, 1) < 1e-2 < median(cross_entropy, f)
    f, _ = bbob.rotated_rastrigin(D, 1)
    assert dual_annealing(f, 1) > 2 * median(cross_entropy, f)


def test_in_a_curved_valley_it_gets_stuck() -> None:
    # It finds Rosenbrock's valley, in which no scaling of axes follows the bend, and collapses there.
    f, _ = bbob.rosenbrock(D, 1)
    mine = median(cross_entropy, f)
    assert f(np.full((D, 1), MEAN))[0] > 1e4
    assert 1 < mine < 20
    assert median(cma_es, f) < 1e-10
    assert median(differential_evolution, f) < 0.5 * mine


def test_without_correlations_a_rotated_ellipsoid_is_out_of_reach() -> None:
    # The axes of condition 10**6 are learnt where they are the coordinates', and only there; for the separable CMA-ES,
    # with nothing but variances either, it is the same.
    straight, _ = bbob.ellipsoid(D, 1)
    assert median(cross_entropy, straight) < 1e-20
    oblique, _ = bbob.rotated_ellipsoid(D, 1)
    assert median(cross_entropy, oblique) > 1e3
    assert median(separable_cma_es, oblique) > 1e2
    assert median(cma_es, oblique) < 1e-20


def test_with_shared_noise_all_candidates_lie_on_one_line() -> None:
    # x = mu + sigma * z with one z for all dimensions: whatever is refitted to such samples is on the line again.
    f, optimum = bbob.sphere(D, 1)
    sigma = np.linspace(1, 3, D)
    candidates = []

    def seen(x: bbob.Array) -> bbob.Array:
        candidates.append(x.copy())
        return f(x)

    result = cem.minimize(seen, np.zeros(D), sigma, 200, seed=1, noise="shared")
    x = np.concatenate(candidates, axis=1)
    direction = sigma / np.linalg.norm(sigma)
    along = direction @ x
    assert np.ptp(along) > 1
    np.testing.assert_allclose(x, direction[:, None] * along, atol=1e-12)
    # It finds the best point of that line, which is nowhere near the optimum.
    best_of_line = direction * (direction @ optimum)
    np.testing.assert_allclose(result.mu, best_of_line, atol=1e-6)
    assert result.fun == pytest.approx(np.square(best_of_line - optimum).sum(), rel=1e-9)
    assert result.fun > 1
    independent = cem.minimize(f, np.zeros(D), sigma, 200, seed=1)
    assert independent.fun < 1e-20
    np.testing.assert_allclose(independent.mu, optimum, atol=1e-9)
