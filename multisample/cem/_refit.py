"""From scores to the elites, and to the next mean and standard deviation: `refit`. No operation waits for the device.

The status of a run is an element of a device array. Iterations after the end change nothing, so the loop can read the
status at any interval. All arrays may have an axis of searches in front. Each search gives the bits that it would give
alone. The dimensions of a state keep their shape; all else here has one axis of d dimensions.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from multisample.backends.contract import HostArray

from ._arrays import Arrays

COLUMNS = ("best", "mean", "threshold", "sigma", "nonfinite", "status")
"""Columns of the history: one row for each iteration."""

RUNNING, CONVERGED, COLLAPSED, UNSCORED, DIVERGED, STOPPED = range(6)
"""How a run ended. With a status below UNSCORED, the last iteration has refitted the mean and standard deviation."""

_REASONS = {
    RUNNING: "All {nit} iterations ran.",
    CONVERGED: "The largest standard deviation, {sigma:.3g}, is at most tol = {tol:.3g}.",
    COLLAPSED: "The standard deviation collapsed in iteration {nit}: adding it no longer changes the mean. If the"
    " collapse was too early, set noise_floor or smoothing, or raise n or elite_frac.",
    UNSCORED: "No score was finite in iteration {nit}, so mean and standard deviation cannot be refitted.",
    DIVERGED: "The mean or the standard deviation overflowed in iteration {nit}; mu and sigma are from before it.",
    STOPPED: "The callback ended the run.",
}


class Settings(NamedTuple):
    """The settings of all refits of a run. Compiled functions take them as one static argument."""

    arrays: Arrays
    elites: int
    smoothing: float
    tol: float | None


class State(NamedTuple):
    """The state that `step` takes and returns: arrays of one library. JAX treats it as a pytree.

    Attributes
    ----------
    mu, sigma : array, shape (d,), or (B, d) for B searches
        Mean and standard deviation of the next samples.
    x : array, shape (d,) or (B, d)
        The best sample so far, or the first mean.
    fun : array, shape () or (B,)
        Its score, or infinity.
    running : array of bool, shape () or (B,)
        Whether a further iteration changes anything.
    """

    mu: Any
    sigma: Any
    x: Any
    fun: Any
    running: Any


def _reshaped(state: State, *shape: int) -> State:
    mu, sigma, x = (array.reshape(shape) for array in state[:3])
    return state._replace(mu=mu, sigma=sigma, x=x)


def first_state(arrays: Arrays, mu: Any, sigma: Any, batch: tuple[int, ...]) -> State:
    """The state before the first iteration; `batch` is the shape of scores."""
    infinity = arrays.put(np.full(batch, math.inf), arrays.real)
    return State(mu, sigma, mu, infinity, infinity > 0)


def compiled(settings: Settings) -> tuple[Callable[..., Any], ...]:
    """`refit`, `elite_weights` and `refit_by_moments` with these settings, compiled if the arrays are JAX's."""
    functions = refit, elite_weights, refit_by_moments
    return tuple(functools.partial(settings.arrays.compiled(function), settings) for function in functions)


def refit(settings: Settings, state: State, samples: Any, scores: Any, noise: Any) -> tuple[State, Any]:
    """The next state, and this iteration's row of the history, by `COLUMNS`.

    `samples` may be a function, which draws the samples at the indices of the elites.
    """
    arrays, (*batch, n) = settings.arrays, scores.shape
    which, best_scores, weight, count, divisor = _elites(settings, scores)
    best = samples(which) if callable(samples) else arrays.columns(samples.reshape((*batch, -1, n)), which)
    best = arrays.cast(best)
    weight = weight[..., None, :]
    # A factor of 0 or 1 is exact, so a compiler that fuses it with the sum changes no bit.
    mean = arrays.quotient(arrays.sum(best * weight), divisor)
    deviation = best - mean[..., None]
    variance = arrays.quotient(arrays.sum(deviation * deviation * weight), divisor)
    first = arrays.columns(best, best_scores.argmin(-1)[..., None])[..., 0]
    return _followed(settings, state, mean, variance, first, count, best_scores, scores, noise)


def elite_weights(settings: Settings, scores: Any) -> tuple[Any, Any]:
    """Two arrays: the weight of each sample in the mean of the elites, and a 1 at the best sample."""
    arrays = settings.arrays
    which, best_scores, weight, _, divisor = _elites(settings, scores)
    zeros = arrays.xp.zeros_like(arrays.cast(scores))
    best = arrays.at(which, best_scores.argmin(-1)[..., None])
    return arrays.scattered(zeros, which, arrays.quotient(weight, divisor)), arrays.scattered(zeros, best, 1.0)


def refit_by_moments(
    settings: Settings, state: State, center: Any, mean: Any, square: Any, first: Any, scores: Any, noise: Any
) -> tuple[State, Any]:
    """`refit`, from the elites' mean, their mean squared distance from `center`, and the best sample."""
    arrays = settings.arrays
    _, best_scores, _, count, _ = _elites(settings, scores)
    distance = mean - center
    variance = square - distance * distance
    variance = arrays.xp.where(variance > 0, variance, 0 * variance)
    return _followed(settings, state, mean, variance, first, count, best_scores, scores, noise)


def _elites(settings: Settings, scores: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Indices, scores and weights of the elites, the sum of the weights, and a divisor: the sum, or 1 if it is 0.

    Scores that are not finite become infinity, with weight 0. Other weights are 1.
    """
    arrays = settings.arrays
    ranked = arrays.xp.where(arrays.xp.isfinite(scores), scores, math.inf)
    which = arrays.lowest(ranked, settings.elites)
    best_scores = arrays.at(ranked, which)
    weight = best_scores < math.inf
    count = arrays.cast(weight.sum(-1))
    return which, best_scores, arrays.cast(weight), count, arrays.xp.where(count > 0, count, 1)[..., None]


def _followed(
    settings: Settings, state: State, mean: Any, variance: Any, first: Any, count: Any, best_scores: Any, scores: Any,
    noise: Any,
) -> tuple[State, Any]:  # fmt: skip
    """The next state and its row, from the elites' mean and variance, the best sample and the number of elites."""
    arrays, smoothing, xp = settings.arrays, settings.smoothing, settings.arrays.xp
    shape, state, finite = state.mu.shape, _reshaped(state, *scores.shape[:-1], -1), xp.isfinite(scores)
    # With a single finite score, the variance stays.
    variance = xp.where(count[..., None] > 1, variance, state.sigma * state.sigma)
    sigma = xp.sqrt(variance + noise)
    if smoothing != 1:
        mean = state.mu + smoothing * (mean - state.mu)
        sigma = state.sigma + smoothing * (sigma - state.sigma)
    one_sigma_away = mean + sigma
    status = xp.where((one_sigma_away == mean).all(-1), COLLAPSED, RUNNING)
    if settings.tol is not None:
        status = xp.where(xp.amax(sigma, -1) <= settings.tol, CONVERGED, status)
    status = xp.where(xp.isfinite(one_sigma_away).all(-1), status, DIVERGED)
    status = xp.where(count == 0, UNSCORED, status)
    goes_on = (state.running & (status < UNSCORED))[..., None]
    fun = arrays.cast(xp.amin(best_scores, -1), arrays.real)
    improved = state.running & (fun < state.fun)
    following = State(
        mu=xp.where(goes_on, mean, state.mu),
        sigma=xp.where(goes_on, sigma, state.sigma),
        x=xp.where(improved[..., None], first, state.x),
        fun=xp.where(improved, fun, state.fun),
        running=state.running & (status == RUNNING),
    )
    finite_count = arrays.cast(finite.sum(-1), arrays.real)
    total = arrays.sum(arrays.cast(xp.where(finite, scores, 0), arrays.real))
    row = (
        fun, total / finite_count, xp.amax(best_scores, -1), xp.amax(following.sigma, -1),
        scores.shape[-1] - finite_count, status,
    )  # fmt: skip
    return _reshaped(following, *shape), xp.stack([arrays.cast(value, arrays.real) for value in row], -1)


def message_of(n: int, tol: float | None, status: Any, nit: Any, nonfinite: Any, sigma: HostArray) -> str:
    """The status in words. `sigma` has the largest standard deviation after each iteration of `n` scores."""
    reason = _REASONS[int(status)]
    if status == RUNNING and tol is not None and nit:
        reason = "All {nit} iterations ran; the largest standard deviation, {sigma:.3g}, is above tol."
    reason = reason.format(nit=nit, sigma=sigma[nit - 1] if nit else math.nan, tol=tol)
    if not nonfinite:
        return reason
    return f"{reason} {nonfinite} of {n * nit} scores were NaN or infinite, and counted as worst."
