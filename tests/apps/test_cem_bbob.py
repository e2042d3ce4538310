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
