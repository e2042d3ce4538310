"""The cross-entropy method on functions of COCO's suite BBOB, beside other methods with as many evaluations.

python -m bench.studies.cem_bbob

The others are CMA-ES and its separable form of the package cmaes, and SciPy's differential evolution and dual
annealing. The figures are medians of five runs in ten dimensions; the optimum is 0. tests/apps/test_cem_bbob.py has the
values that the cross-entropy method must reach.
"""

from __future__ import annotations

import functools
import statistics
import warnings

import cmaes
import numpy as np
from scipy import optimize

from bench.studies import bbob
from multisample import cem

D = 10
EVALUATIONS = 20_000
# The start of all methods. Optima are between -4 and 4.
MEAN, SIGMA, BOUND = 0.0, 3.0, 5.0
SEEDS = range(1, 6)


def cross_entropy(f: bbob.Function, seed: int) -> float:
    return cem.minimize(f, np.full(D, MEAN), SIGMA, EVALUATIONS // 100, iterations=100, seed=seed).fun


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
        warnings.simplefilter("ignore")  # cmaes warns of a step size of 0, at the optimum.
        for _ in range(EVALUATIONS // optimizer.population_size):
            asked = [optimizer.ask() for _ in range(optimizer.population_size)]
            scores = f(np.stack(asked, axis=1))
            best = min(best, float(scores.min()))
            optimizer.tell(list(zip(asked, scores.tolist(), strict=True)))
    return best


METHODS = {
    "cross-entropy": cross_entropy,
    "CMA-ES": functools.partial(evolution_strategy, cmaes.CMA),
    "separable CMA-ES": functools.partial(evolution_strategy, cmaes.SepCMA),
    "differential evolution": differential_evolution,
    "dual annealing": dual_annealing,
}
FUNCTIONS = (
    bbob.sphere, bbob.ellipsoid, bbob.rotated_ellipsoid, bbob.rosenbrock, bbob.rastrigin, bbob.rotated_rastrigin,
)  # fmt: skip


def main() -> None:
    print(f"{'':20}" + "".join(f"{name:>24}" for name in METHODS))
    for make in FUNCTIONS:
        f, _ = make(D, 1)
        medians = [statistics.median(method(f, seed) for seed in SEEDS) for method in METHODS.values()]
        print(f"{make.__name__:20}" + "".join(f"{value:24.2g}" for value in medians), flush=True)


if __name__ == "__main__":
    main()
