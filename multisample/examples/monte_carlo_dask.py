"""A Monte Carlo estimate on a Dask cluster: the price of a basket option, from any number of normal draws.

python -m multisample.examples.monte_carlo_dask                                          # threads of this machine
python -m multisample.examples.monte_carlo_dask --draws 1e11 --scheduler tcp://host:8786    # a cluster
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ._running import run
from .basket_option import RATE, STOCKS, STRIKE, YEARS

BLOCK = 1_000_000
"""Paths in a block: 32 MB of draws, which a thread draws and reduces in a tenth of a second."""


class Estimate(NamedTuple):
    """An estimate of an expectation."""

    mean: Any
    error: Any
    """The standard deviation of the mean."""


def price(paths: int, *, seed: int = 7, block: int = BLOCK) -> Estimate:
    """The price of the right to buy the mean of eight stocks for 100 in a year, as lazy Dask scalars.

    Parameters
    ----------
    paths : int
        Number of samples, with eight draws each.
    seed : int, default 7
        ``0 <= seed < 2**64``.
    block : int, default 1_000_000
        Number of paths that are in memory at a time, for each thread.

    Returns
    -------
    Estimate

    Raises
    ------
    TypeError, ValueError
        If `multisample.dask.sample` refuses an argument.

    Examples
    --------
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
    parser = argparse.ArgumentParser(prog="python -m multisample.examples.monte_carlo_dask", description=__doc__)
    parser.add_argument("--draws", type=float, default=1e8, help="number of normal draws (default: 1e8)")
    parser.add_argument("--scheduler", metavar="ADDRESS", help="address of a Dask scheduler (default: no cluster)")
    args = parser.parse_args(argv)
    import dask

    with contextlib.ExitStack() as stack:
        if args.scheduler is not None:
            from distributed import Client

            stack.enter_context(Client(args.scheduler))
        start = time.perf_counter()
        mean, error = dask.compute(*price(max(round(args.draws / STOCKS), 1)))
        seconds = time.perf_counter() - start
    print(f"price {mean:.6f}, standard error {error:.6f}; {args.draws:.3g} draws in {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    run(main)
