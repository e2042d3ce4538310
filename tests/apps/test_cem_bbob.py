"""The cross-entropy method on functions of COCO's suite BBOB: medians of five runs in ten dimensions.

The tests include functions on which a method without correlations must fail.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import bbob
import numpy as np
import pytest

from multisample import cem

D = 10
EVALUATIONS = 20_000
MEAN, SIGMA = 0.0, 3.0


def median(f: bbob.Function) -> float:
    """The median of the lowest values of five runs."""
    found = []
    for seed in range(1, 6):
        result = cem.minimize(f, np.full(D, MEAN), SIGMA, EVALUATIONS // 100, iterations=100, seed=seed)
        assert result.nfev <= EVALUATIONS
        found.append(result.fun)
    return statistics.median(found)


@pytest.mark.parametrize(
    "make",
    [bbob.sphere, bbob.ellipsoid, bbob.rotated_ellipsoid, bbob.rosenbrock, bbob.rastrigin, bbob.rotated_rastrigin],
)
def test_functions_have_their_minimum_at_the_stated_point(
    make: Callable[[int, int], tuple[bbob.Function, bbob.Array]],
) -> None:
    f, optimum = make(D, 1)
    assert f(optimum[:, None]) == pytest.approx([0], abs=1e-12)
    around = optimum[:, None] + np.random.default_rng(2).normal(size=(D, 1000)) * np.logspace(-6, 0, 1000)
    assert (f(around) > 0).all()


@pytest.mark.parametrize(
    ("make", "lowest", "highest"),
    [
        (bbob.sphere, 0, 1e-25),
        (bbob.ellipsoid, 0, 1e-20),
        # The method learns axes of condition 10**6 only if they are the coordinate axes.
        (bbob.rotated_ellipsoid, 1e3, np.inf),
        # The method finds Rosenbrock's valley, and collapses there: no scaling of axes follows the bend.
        (bbob.rosenbrock, 1, 20),
        # A wide distribution follows the parabola below the waves; a narrow one follows a wave to a local minimum.
        (bbob.rastrigin, 1e-2, 6),
        (bbob.rotated_rastrigin, 0, 6),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_medians_of_five_runs_are_within_bounds(
    make: Callable[[int, int], tuple[bbob.Function, bbob.Array]], lowest: float, highest: float
) -> None:
    f, _ = make(D, 1)
    assert lowest <= median(f) < highest


def test_with_shared_noise_all_candidates_lie_on_one_line() -> None:
    # x = mu + sigma * z with one z for all dimensions: the refitted mean and deviation lie on the same line.
    f, optimum = bbob.sphere(D, 1)
    sigma = np.linspace(1, 3, D)
    candidates = []

    def scored(x: bbob.Array) -> bbob.Array:
        candidates.append(x.copy())
        return f(x)

    result = cem.minimize(scored, np.zeros(D), sigma, 200, seed=1, noise="shared")
    x = np.concatenate(candidates, axis=1)
    direction = sigma / np.linalg.norm(sigma)
    along = direction @ x
    assert np.ptp(along) > 1
    np.testing.assert_allclose(x, direction[:, None] * along, atol=1e-12)
    # The method finds the best point on that line, which is far from the optimum.
    best_of_line = direction * (direction @ optimum)
    np.testing.assert_allclose(result.mu, best_of_line, atol=1e-6)
    assert result.fun == pytest.approx(np.square(best_of_line - optimum).sum(), rel=1e-9)
    assert result.fun > 1
    independent = cem.minimize(f, np.zeros(D), sigma, 200, seed=1)
    assert independent.fun < 1e-20
    np.testing.assert_allclose(independent.mu, optimum, atol=1e-9)
