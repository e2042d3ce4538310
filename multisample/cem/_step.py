"""One iteration as a pure function: for `jax.jit` and `jax.lax.scan`, where a run is part of a larger program."""

import math
from collections.abc import Callable
from typing import Any, SupportsIndex

import numpy as np

from .._arguments import checked_integer, describe
from .._operations import COLUMNS as MOST_SAMPLES
from .._randomness.seed_argument import batch_of
from .._sample import sample
from .._typing import Bounds, Noise, Number
from ._arrays import adopted, arrays_like
from ._method import checked_number, checked_settings, converted, pair_of, placed
from ._refit import State, first_state, refit


def start(mu: Any, sigma: Any, searches: SupportsIndex | None = None) -> State:
    """Return the state of a run before its first iteration.

    Parameters
    ----------
    mu, sigma : array, shape (d,) or (d, 1), or shapes that broadcast to any S
        As for `minimize`. Under JAX's transformations they may be traced. With `searches` also (B, d) or ``(B, *S)``.
    searches : int, optional
        The number B of searches, at least 1: `step` then takes a vector of B seeds.

    Returns
    -------
    State

    Raises
    ------
    TypeError
        If `mu` or `sigma` is neither an array nor a number, or its library has no arithmetic on arrays.
    ValueError
        If a shape differs from the above, or a value is invalid as a mean or a standard deviation.
    """
    batch = () if searches is None else (checked_integer("searches", searches, 1, 2**31),)
    seed = np.zeros(batch, np.uint64) if batch else 0
    none_of_them = sample(mu, sigma, 0, seed=seed)
    arrays, shape = arrays_like(none_of_them), tuple(map(int, none_of_them.shape[:-1]))
    with arrays.scope():
        mu, sigma = (converted(arrays, x, shape, seed) for x in (mu, sigma))
        return first_state(arrays, mu, sigma, batch)


def step(
    state: State,
    seed: Any,
    f: Callable[[Any], Any],
    n: SupportsIndex,
    *,
    elite_frac: Number = 0.1,
    smoothing: Number = 1.0,
    noise_floor: Any = 0.0,
    bounds: tuple[Any, Any] | Bounds | None = None,
    tol: Number | None = None,
    backend: str = "auto",
    noise: Noise = "independent",
    antithetic: bool = False,
    fast_math: bool = False,
) -> State:
    """Return the state after one more iteration of the cross-entropy method.

    A pure function of its arguments: `jax.jit`, `jax.vmap` and `jax.lax.scan` take it, with the state and the seed
    traced. A step after the end of a run, when ``state.running`` is false, returns the state as it is.

    Parameters
    ----------
    state : State
        From `start`, or from the step before.
    seed : int, Key or JAX key, or a vector of B of them
        As for `multisample.sample`: another one for each step.
    f : callable
        Takes samples of shape (d, n), ``(*S, n)`` or with B in front, and returns their scores, an array of the same
        library of shape (n,) or (B, n).
    n : int
        Number of samples, at least 2.
    elite_frac, smoothing, bounds, tol, backend, noise, antithetic, fast_math : various
        As for `minimize`.
    noise_floor : float or array, shape (d,) or (B, d), default 0.0
        A variance that is added to the refitted variances; it may be traced.

    Returns
    -------
    State

    Raises
    ------
    TypeError
        If an argument is of the wrong kind.
    ValueError
        If an argument is out of range, or the scores are not n numbers; whatever `multisample.sample` and `f` raise.

    Examples
    --------
    >>> import numpy as np
    >>> from multisample import Key, cem
    >>> state = cem.start(np.zeros(3), 2.0)
    >>> for t in range(30):
    ...     state = cem.step(state, Key(7, t), lambda x: np.square(x - 1.0).sum(axis=0), 200)
    >>> state.mu.round(4)
    array([1., 1., 1.])
    """
    n = checked_integer("n", n, 2, MOST_SAMPLES + 1)
    arrays, batch, shape = arrays_like(state.mu), tuple(state.fun.shape), tuple(state.mu.shape)
    settings = checked_settings(arrays, n, elite_frac, smoothing, tol)
    if seed is None:
        raise TypeError("seed: expected an integer, a Key or a JAX key for each step, got None")
    dims = shape[len(batch) :]
    if batch_of(seed) != (batch[0] if batch else None):
        accepted = f"a vector of {batch[0]} seeds" if batch else "one seed"
        raise ValueError(f"seed: expected {accepted}, for state.mu of shape {shape}, got {describe(seed)}")
    options: dict[str, Any] = {"noise": noise, "antithetic": antithetic, "fast_math": fast_math, "backend": backend}
    with arrays.scope():
        pair = () if bounds is None else pair_of(bounds)
        edges = [placed(arrays, "bounds", edge, batch, dims).reshape((*shape, 1)) for edge in pair]
        if isinstance(noise_floor, (int, float)):
            noise_floor = checked_number("noise_floor", noise_floor, 0, math.inf)
        else:
            noise_floor = placed(arrays, "noise_floor", noise_floor, batch, dims)

        def draw() -> Any:
            samples = sample(state.mu, state.sigma, n, seed=seed, **options)
            return arrays.clipped(samples, *edges) if edges else samples

        scores, samples, _ = arrays.score(f, draw(), draw)
        scores = adopted(arrays, "f", scores, (*batch, n))
        following, _ = refit(settings, state, samples, scores, noise_floor)
    return following
