"""`weighted_moments`: a key made of the arguments finds a plan, and the plan sums."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, overload

from multisample.backends.launch import Operation

from ._libraries import BY_TYPE, NUMBERS
from ._operations import Call
from ._plan import PLANS
from ._randomness.generator import Key
from ._randomness.seed_argument import is_in_array, signature_of
from ._routes import run_first
from ._tracing import is_traced

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._typing import (
        AnyArray,
        HostArray,
        HostMomentsOptions,
        HostVector,
        MomentsOptions,
        Noise,
        Number,
        OwnArray,
        T,
        Tensor,
    )  # fmt: skip


@overload
def weighted_moments(
    weights: OwnArray, mu: OwnArray | Number, sigma: OwnArray | Number, **options: Unpack[MomentsOptions]
) -> tuple[OwnArray, ...]: ...
@overload
def weighted_moments(
    weights: Tensor[T], mu: Tensor[T] | Number, sigma: Tensor[T] | Number, **options: Unpack[MomentsOptions]
) -> tuple[T, ...]: ...
@overload
def weighted_moments(
    weights: HostVector, mu: HostVector | Number, sigma: HostVector | Number, **options: Unpack[HostMomentsOptions]
) -> tuple[HostArray, ...]: ...
@overload
def weighted_moments(
    weights: AnyArray, mu: AnyArray | Number, sigma: AnyArray | Number, **options: Unpack[MomentsOptions]
) -> tuple[Any, ...]: ...
def weighted_moments(
    weights: Any,
    mu: Any,
    sigma: Any,
    *,
    order: Literal[1, 2] = 2,
    seed: Any,
    noise: Noise = "independent",
    dtype: Any = None,
    dim_offset: SupportsIndex = 0,
    sample_offset: SupportsIndex = 0,
    antithetic: bool = False,
    fast_math: bool = False,
    backend: str = "auto",
) -> tuple[Any, ...]:
    """Return the weighted moments of a sample that is never stored.

    Computes ``m1[i] = sum_j weights[j] * (mu[i] + sigma[i] * z[i, j])`` and with ``order=2`` also
    ``m2[i] = sum_j weights[j] * (sigma[i] * z[i, j]) ** 2``, where z is the noise of
    ``sample(mu, sigma, len(weights), seed=seed, ...)`` with the same options. The kernel draws the noise again, so
    a call needs memory for d + n numbers, never for d * n. This is the update of the cross-entropy method, of MPPI
    control and of evolution strategies.

    Parameters
    ----------
    weights : array, shape (n,), or with B seeds (B, n)
        At least one weight, of any sign. An array of the library and the device of `mu` and `sigma`. Groups of four
        adjacent weights (of eight with `antithetic`) that are all zero cost nothing; groups begin where
        ``sample_offset + j`` is a multiple of four (of eight).
    mu, sigma : array, shape (d,) or (d, 1); with B seeds (B, d) or (d,)
        As for `sample`; one of the two may be a number.
    order : {1, 2}, default 2
        The number of moments to return.
    seed : int, Key or JAX key, or a vector of B of them
        Required: the seed of the sample whose moments these are, in any form that `sample` takes.
    noise, dtype, dim_offset, sample_offset, antithetic, fast_math, backend : various
        As for `sample`. The moments of two windows of samples add up to those of their union.

    Returns
    -------
    tuple of `order` arrays, shape (d,), or with B seeds (B, d)
        `m1` and `m2`, of the library and on the device of `mu`, with the type that the sample would have.

    Raises
    ------
    TypeError
        If `order` is not an integer, or `weights` is not an array; also as for `sample`.
    ValueError
        If a weight in host memory is not finite; a weight on a device is not checked, and makes every sum NaN if it is
        NaN. If `weights` require grad, or a dispatch mode or a trace of PyTorch sees the call. Also as for `sample`.
    UnknownBackendError, BackendUnavailableError
        As for `sample`.

    Notes
    -----
    The sums are those of real numbers up to rounding: samples are not rounded before they are added up. At most 16
    terms (on a GPU 32) are added up in the computing type, and their sums in float64. The bits depend on the arguments
    and the kind of device alone: a CPU adds up in another order than a GPU.

    Weights, `mu` and `sigma` are first rounded to the computing type: float64 for float64 results, float32 for all
    others. A float64 weight of 1e-50 is therefore 0 for float32 results. After that, intermediate results neither
    overflow nor lose bits: weights of any size, and `sigma` of any size, give every moment that is in the range of
    its type.

    With PyTorch, gradients flow to `mu` and `sigma`, not to `weights`; inside ``torch.compile`` the call breaks the
    graph. `torch.func.vmap` over weights, `mu`, `sigma` and seeds is one launch. With JAX, the call may be inside
    `jit`, `vmap` and `grad`, with gradients to `mu` and `sigma`.

    Examples
    --------
    A step of the cross-entropy method: mean and variance of the best tenth of the samples.

    >>> import numpy as np
    >>> import multisample
    >>> mu, sigma = np.zeros(3, np.float32), np.ones(3, np.float32)
    >>> x = multisample.sample(mu, sigma, 1000, seed=7)
    >>> elites = np.argsort(np.square(x - 1).sum(axis=0))[:100]
    >>> weights = np.zeros(1000, np.float32)
    >>> weights[elites] = 1 / 100
    >>> m1, m2 = multisample.weighted_moments(weights, mu, sigma, seed=7)
    >>> bool(np.allclose(m1, x[:, elites].mean(axis=1), atol=1e-6))
    True
    >>> variance = m2 - (m1 - mu) ** 2
    >>> bool(np.allclose(variance, x[:, elites].var(axis=1), atol=1e-6))
    True
    """
    library = None if is_traced() else BY_TYPE.get(type(weights))
    key: Hashable = None
    plan = None
    if library is not None:
        try:
            signature, state = library.signature, library.state()
            if state is not None:
                key = (
                    "weighted_moments", signature(weights), None if type(mu) in NUMBERS else signature(mu),
                    None if type(sigma) in NUMBERS else signature(sigma), state, type(weights), type(mu), type(sigma),
                    order, type(order), noise, dtype, antithetic, type(antithetic), fast_math, type(fast_math), backend,
                    type(seed), type(dim_offset), type(sample_offset),
                )  # fmt: skip
                if is_in_array(seed):
                    key = key, signature_of(seed)
                plan = PLANS.get(key)
        except Exception:  # A wrong argument may raise anything here; `run_first` reports the error.
            key = None
    if plan is not None and (type(seed) is not Key or (type(seed[0]) is int and type(seed[1]) is int)):
        moments: tuple[Any, ...] = plan.run(mu, sigma, weights, None, seed, None, dim_offset, sample_offset)[0]
        return moments
    call = Call(
        Operation.moments, mu, sigma, 0, backend, seed, noise, dtype, fast_math, dim_offset, sample_offset, antithetic,
        weights=weights, order=order,
    )  # fmt: skip
    first: tuple[Any, ...] = run_first(call, key, weighted_moments)
    return first
