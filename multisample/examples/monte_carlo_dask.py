"""A Monte Carlo estimate on a Dask cluster: the price of a basket option, from any number of normal draws.

python -m multisample.examples.monte_carlo_dask                                          # threads of this machine
python -m multisample.examples.monte_carlo_dask --draws 1e11 --scheduler tcp://host:8786    # a cluster
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ._running import parsed, run
from .basket_option import RATE, STOCKS, STRIKE, YEARS

BLOCK = 1_000_000
"""Paths in a block: 32 MB of draws, which a thread draws and reduces in a tenth of a second."""


class Estimate(NamedTuple):
    """An estimate of an expectation, and the standard deviation of its mean."""

    mean: Any
    error: Any


def price(paths: int, *, seed: int = 7, block: int = BLOCK) -> Estimate:
    """The price of the right to buy the mean of eight stocks for 100 in a year, as lazy Dask scalars.

    A path has eight draws. Each thread has `block` paths in memory at a time.

    >>> import dask
    >>> from multisample.examples.monte_carlo_dask import price
    >>> mean, error = dask.compute(*price(100_000, block=20_000), scheduler="threads")
    >>> bool(5.0 < mean < 6.0), bool(0.0 < error < 0.1)
    (True, True)
    """
    import dask.array as da

    from multisample.dask import sample

    volatility = np.linspace(0.1, 0.4, STOCKS, dtype=np.float32)
    mu = math.log(100.0) + (RATE - volatility**2 / 2) * np.float32(YEARS)
    x = sample(mu, volatility * np.float32(math.sqrt(YEARS)), paths, chunks=(-1, block), seed=seed)
    payoff = math.exp(-RATE * YEARS) * (da.exp(x).mean(axis=0, dtype=np.float64) - STRIKE).clip(0)
    return Estimate(payoff.mean(), payoff.std() / math.sqrt(paths))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the estimate and its error."""
    args = parsed("monte_carlo_dask", __doc__, argv, draws=1e8, scheduler="")
    import dask

    with contextlib.ExitStack() as stack:
        if args.scheduler:
            from distributed import Client

            stack.enter_context(Client(args.scheduler))
        start = time.perf_counter()
        mean, error = dask.compute(*price(max(round(args.draws / STOCKS), 1)))
        seconds = time.perf_counter() - start
    print(f"price {mean:.6f}, standard error {error:.6f}; {args.draws:.3g} draws in {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    run(main)
