"""Checks that a contender draws correct samples. Only contenders that pass are timed.

The statistics of a correct sampler have nearly the standard normal distribution. The chance that any of the some
30,000 statistics of a matrix exceeds BOUND is below 1e-7.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from bench.suites.cases import Case, weights

BOUND = 7.0
SHARED_NOISE_ERROR = 1e-4  # Bound of residuals in units of sigma: some hundred times the rounding of float32.
MOST_ELEMENTS = 2**20  # The most elements to check, from rows spread over the matrix.

Array = np.ndarray[Any, Any]


def host_part(result: Any, rows: slice, columns: slice = slice(None)) -> Array:
    """Part of any library's matrix as float64 in host memory. Every narrower value is exact in float64."""
    part = result[rows, columns]
    if type(part).__module__.partition(".")[0] == "torch":
        return np.asarray(part.detach().double().cpu().numpy())
    return np.asarray(part.get() if hasattr(part, "get") else part).astype(np.float64)


def moment_errors(samples: Array, mu: Array, sigma: Array, noise: str) -> dict[str, float]:
    """The largest z value of each statistic of the `samples`, in float64, of shape (d, n).

    The statistics are each dimension's mean and, if n > 1, its variance. With independent noise they are also the mean
    and the variance of all elements, and the correlation of neighbouring rows.
    """
    residuals = (samples - mu[:, None]) / sigma[:, None]
    d, n = residuals.shape
    found = {"mean": np.abs(residuals.mean(axis=1)).max() * np.sqrt(n)}
    if n > 1:
        found["variance"] = np.abs(_variance_z(residuals.var(axis=1, ddof=1), n - 1)).max()
    if noise == "independent":
        found["mean of all"] = abs(residuals.mean()) * np.sqrt(d * n)
        found["variance of all"] = abs(_variance_z((residuals**2).mean(), d * n))
        if d > 1:
            found["correlation"] = abs((residuals[1:] * residuals[:-1]).sum()) / np.sqrt((d - 1) * n)
    return {name: float(value) for name, value in found.items()}


def _variance_z(ratio: Any, degrees: int) -> Any:
    # The cube root of a chi-square is nearly normal even for few degrees of freedom (Wilson and Hilferty).
    spread = 2 / (9 * degrees)
    return (np.cbrt(ratio) - (1 - spread)) / np.sqrt(spread)


def check_moments(first: Any, second: Any, mu: Array, sigma: Array, noise: str) -> None:
    """Raise AssertionError unless two results have the right mean, variance and noise, and differ."""
    d, n = first.shape
    assert d == len(mu), f"expected {len(mu)} rows, got {d}"
    rows, columns = slice(None, None, -(-d // max(1, MOST_ELEMENTS // n))), slice(MOST_ELEMENTS)
    samples, second_samples = host_part(first, rows, columns), host_part(second, rows, columns)
    assert not np.array_equal(samples, second_samples), "expected new numbers from a second call, got the same"
    errors = moment_errors(samples, mu[rows], sigma[rows], noise)
    wrong = {name: round(value, 1) for name, value in errors.items() if not value < BOUND}
    assert not wrong, f"expected z values below {BOUND}, got {wrong}"
    if noise == "shared":
        residuals = (samples - mu[rows, None]) / sigma[rows, None]
        error = np.abs(residuals - residuals[0]).max()
        assert error < SHARED_NOISE_ERROR, f"expected the same noise in every row, got a difference of {error:.2g}"


def _check_samples(call: Callable[[], Any], case: Case, mu: Array, sigma: Array) -> None:
    first, second = call(), call()
    check_moments(first, second, mu, sigma, case.noise)


def _check_batch(call: Callable[[], Any], case: Case, mu: Array, sigma: Array) -> None:
    results = [np.concatenate([host_part(matrix, slice(None)) for matrix in call()]) for _ in range(2)]
    check_moments(*results, mu, sigma, case.noise)


def _check_perturb(call: Callable[[], Any], case: Case, mu: Array, sigma: Array) -> None:
    """Calls add noise in place. A member's coefficient is its sigma."""
    before, first, second = (host_part(call().reshape(1, -1), slice(None), slice(MOST_ELEMENTS)) for _ in range(3))
    check_moments(first - before, second - first, np.zeros(1), np.sqrt((sigma**2).sum(keepdims=True)), case.noise)


def _check_weighted(call: Callable[[], Any], case: Case, mu: Array, sigma: Array) -> None:
    """The first moments are normal, and the second are right on average."""
    spread = np.sqrt((weights(case.n) ** 2).sum())
    results = [[host_part(moment.reshape(1, -1), slice(None)) for moment in call()] for _ in range(2)]
    first, second = ((m1 - mu) / (sigma * spread) for m1, _ in results)
    check_moments(first, second, np.zeros(1), np.ones(1), case.noise)
    error = abs((results[0][1] / sigma**2 - 1).mean()) * np.sqrt(case.d / 2) / spread
    assert error < BOUND, f"expected second moments of sigma**2, got a z value of {error:.1f}"


OPERATIONS = {
    "sample": _check_samples,
    "fill": lambda call, *rest: _check_samples(lambda: np.asarray(call()).copy(), *rest),
    "batch": _check_batch,
    "perturb": _check_perturb,
    "moments": _check_weighted,
}
"""The check of each operation, by results of repeated calls. Calls of "fill" return one matrix: results are copied."""
