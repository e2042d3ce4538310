"""How many threads may work on a call."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import SupportsIndex

from ._arguments import checked_integer

__all__ = ["limit_threads"]


def limit_threads(n: SupportsIndex) -> AbstractContextManager[None]:
    """Let at most `n` threads work on each call on the CPU that is made inside the ``with`` block.

    For programs that run many threads or tasks of their own, such as Dask or joblib. Results do not depend on it.

    Parameters
    ----------
    n : int
        At least 1. An outer block or ``MULTISAMPLE_NUM_THREADS`` that allows fewer goes on to count.

    Returns
    -------
    context manager
        It holds for the thread that enters it, or for the asyncio task.

    Raises
    ------
    TypeError
        If `n` is not an integer.
    ValueError
        If `n` is less than 1.

    Examples
    --------
    >>> import numpy as np
    >>> import multisample
    >>> mu, sigma = np.zeros(1000, np.float32), np.ones(1000, np.float32)
    >>> with multisample.limit_threads(1):
    ...     x = multisample.sample(mu, sigma, 1000, seed=7)
    >>> bool((x == multisample.sample(mu, sigma, 1000, seed=7)).all())
    True
    """
    from multisample.backends.system import worker_pool  # Which only calls on the CPU need.

    return worker_pool.limit_threads(checked_integer("n", n, 1, 2**31))
