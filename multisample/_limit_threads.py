"""`limit_threads`: an upper limit on the threads that work on a call."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import SupportsIndex

from ._arguments import checked_integer


def limit_threads(n: SupportsIndex) -> AbstractContextManager[None]:
    """Limit each CPU call inside the ``with`` block to at most `n` threads.

    Useful in programs that run many threads or tasks themselves, such as Dask or joblib. Results do not depend on the
    number of threads.

    Parameters
    ----------
    n : int
        At least 1. A lower limit, from an outer block or ``MULTISAMPLE_NUM_THREADS``, still applies.

    Returns
    -------
    context manager
        The limit applies to the thread or the asyncio task that enters it.

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
    from multisample.backends.system import threads  # Only CPU calls need this module.

    return threads.limit_threads(checked_integer("n", n, 1, 2**31))
