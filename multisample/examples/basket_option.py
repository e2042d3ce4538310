"""Monte Carlo estimates of the price of an option on a basket of stocks, and of its delta.

The logarithms of the stocks' final prices are normal, so one call of `multisample.sample` draws them. The program shows
two ways to reduce the variance of estimates. Antithetic pairs mirror each path, which makes the price more exact.
Common random numbers, the same seed for both prices of a finite difference, make the sensitivity (delta) more exact.

python -m multisample.examples.basket_option                  # NumPy, on the CPU
python -m multisample.examples.basket_option --device cuda    # PyTorch, on a GPU

With Dask, the price comes from any number of draws, on the threads of this machine or on a cluster:

python -m multisample.examples.basket_option --draws 1e8
python -m multisample.examples.basket_option --draws 1e11 --scheduler tcp://host:8786
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import multisample

from ._running import parsed, run

STOCKS, YEARS, RATE, STRIKE = 8, 1.0, 0.03, 100.0
REPETITIONS = 20
BUMP = 0.01
"""Relative change of the stocks' prices for the finite difference."""
BLOCK = 1_000_000
"""Paths in a block of Dask: 32 MB of draws, which a thread draws and reduces in a tenth of a second."""


def log_prices(spot: float) -> tuple[Any, Any]:
    """Mean and standard deviation of the logarithms of the final prices."""
    volatility = np.linspace(0.1, 0.4, STOCKS, dtype=np.float32)
    mu = math.log(spot) + (RATE - volatility**2 / 2) * np.float32(YEARS)
    return mu, volatility * np.float32(math.sqrt(YEARS))


def price(
    spot: float = 100.0, seed: int = 7, paths: int = 100_000, antithetic: bool = False, device: str = "cpu"
) -> float:
    """The price of the right to buy the mean of the stocks for 100 in a year, if each stock costs `spot` today.

    With `antithetic`, pairs of samples mirror each other. The device "cuda" is for PyTorch, "cpu" for NumPy.
    """
    mu, sigma = log_prices(spot)
    library: Any = np
    if device == "cuda":
        import torch

        library, mu, sigma = torch, torch.from_numpy(mu).cuda(), torch.from_numpy(sigma).cuda()
    basket = library.exp(multisample.sample(mu, sigma, paths, seed=seed, antithetic=antithetic)).mean(0)
    return math.exp(-RATE * YEARS) * float((basket - STRIKE).clip(0).mean())


def delta(seed: int, other_seed: int, device: str = "cpu") -> float:
    """The derivative of the price by the spot price, as a finite difference.

    The seeds are those of the higher and of the lower price. Equal seeds give common random numbers.
    """
    high, low = 100 * (1 + BUMP), 100 * (1 - BUMP)
    return (price(high, seed, device=device) - price(low, other_seed, device=device)) / (high - low)


def price_on_dask(paths: int, *, seed: int = 7, block: int = BLOCK) -> tuple[Any, Any]:
    """The price and its standard error, as lazy Dask scalars. Each thread has `block` paths in memory at a time.

    >>> import dask
    >>> from multisample.examples.basket_option import price_on_dask
    >>> mean, error = dask.compute(*price_on_dask(100_000, block=20_000), scheduler="threads")
    >>> bool(5.0 < mean < 6.0), bool(0.0 < error < 0.1)
    (True, True)
    """
    import dask.array as da

    from multisample.dask import sample

    x = sample(*log_prices(100.0), paths, chunks=(-1, block), seed=seed)
    payoff = math.exp(-RATE * YEARS) * (da.exp(x).mean(axis=0, dtype=np.float64) - STRIKE).clip(0)
    return payoff.mean(), payoff.std() / math.sqrt(paths)


def print_price(draws: float, scheduler: str) -> None:
    """Print the price from this number of draws, on the Dask cluster with this scheduler, if any."""
    import dask

    with contextlib.ExitStack() as stack:
        if scheduler:
            from distributed import Client

            stack.enter_context(Client(scheduler))
        start = time.perf_counter()
        mean, error = dask.compute(*price_on_dask(max(round(draws / STOCKS), 1)))
        seconds = time.perf_counter() - start
    print(f"price {mean:.6f}, standard error {error:.6f}; {draws:.3g} draws in {seconds:.1f} s")


def main(argv: Sequence[str] | None = None) -> int:
    """Print means and standard deviations of 20 estimates, or the price from the draws that the options ask for."""
    args = parsed("basket_option", __doc__, argv, device=("cpu", "cuda"), draws=0.0, scheduler="")
    if args.draws or args.scheduler:
        print_price(args.draws or 1e8, args.scheduler)
        return 0
    seeds, device = range(REPETITIONS), args.device
    estimates = {
        "price": [price(seed=seed, device=device) for seed in seeds],
        "price, antithetic pairs": [price(seed=seed, antithetic=True, device=device) for seed in seeds],
        "delta, different seeds": [delta(seed, seed + REPETITIONS, device) for seed in seeds],
        "delta, common random numbers": [delta(seed, seed, device) for seed in seeds],
    }
    print(f"{REPETITIONS} estimates of 100,000 paths each{'mean':>8}  standard deviation")
    for name, values in estimates.items():
        print(f"{name:36}{statistics.fmean(values):10.4f}  {statistics.stdev(values):.5f}")
    return 0


if __name__ == "__main__":
    run(main)
