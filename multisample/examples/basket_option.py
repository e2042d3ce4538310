"""Monte Carlo estimates of the price of an option on a basket of stocks, and of its delta.

The logarithms of the stocks' final prices are normal, so one call of `multisample.sample` draws them. The program shows
two ways to reduce the variance of estimates. Antithetic pairs mirror each path, which makes the price more exact.
Common random numbers, the same seed for both prices of a finite difference, make the sensitivity (delta) more exact.

python -m multisample.examples.basket_option                  # NumPy, on the CPU
python -m multisample.examples.basket_option --device cuda    # PyTorch, on a GPU
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

import multisample

from ._running import parsed, run

STOCKS, YEARS, RATE, STRIKE = 8, 1.0, 0.03, 100.0
REPETITIONS = 20
BUMP = 0.01
"""Relative change of the stocks' prices for the finite difference."""


def price(
    spot: float = 100.0, seed: int = 7, paths: int = 100_000, antithetic: bool = False, device: str = "cpu"
) -> float:
    """The price of the right to buy the mean of the stocks for 100 in a year, if each stock costs `spot` today.

    With `antithetic`, pairs of samples mirror each other. The device "cuda" is for PyTorch, "cpu" for NumPy.
    """
    volatility = np.linspace(0.1, 0.4, STOCKS, dtype=np.float32)
    mu: Any = math.log(spot) + (RATE - volatility**2 / 2) * np.float32(YEARS)
    sigma: Any = volatility * np.float32(math.sqrt(YEARS))
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


def main(argv: Sequence[str] | None = None) -> int:
    """Print means and standard deviations of 20 estimates."""
    device = parsed("basket_option", __doc__, argv, device=("cpu", "cuda")).device
    seeds = range(REPETITIONS)
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
