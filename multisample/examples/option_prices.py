"""Monte Carlo estimates of the prices of two options: on a basket of stocks, and on the average price of one stock.

The logarithms of the stocks' final prices are normal, so one call of `multisample.sample` draws them for the basket.
The program shows two ways to reduce the variance of estimates. Antithetic pairs mirror each path, which makes the price
more exact. Common random numbers, the same seed for both prices of a finite difference, make the sensitivity (delta)
more exact. With Dask, the price comes from any number of draws, on the threads of this machine or on a cluster.

For the average price, a path needs a normal for each day, which the kernel draws itself. A thread simulates four paths,
and draws their four normals of a day in one call. The same functions run in CUDA C++ on a GPU and in Numba on the
CPU, and draw the paths of `multisample.sample`, whose matrix would have a row for each day and a column for each path.

python -m multisample examples option_prices                                    # the basket, with NumPy
python -m multisample examples option_prices --device cuda                      # with PyTorch, on a GPU
python -m multisample examples option_prices --draws 1e8                        # with Dask
python -m multisample examples option_prices --draws 1e11 --scheduler tcp://host:8786
python -m multisample examples option_prices --option average                   # in Numba, on the CPU
python -m multisample examples option_prices --option average --device cuda     # in CUDA C++ by CuPy, on a GPU
"""

import contextlib
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit

import multisample

from ._running import parsed

YEARS, RATE, SPOT, STRIKE = 1.0, 0.03, 100.0, 100.0
STOCKS = 8
REPETITIONS = 20
BUMP = 0.01
"""The relative change of the stocks' prices in the finite difference for delta."""
BLOCK = 1_000_000
"""The number of paths in a block of a Dask array. A thread draws and sums its 32 MB in a tenth of a second."""
VOLATILITY, DAYS = 0.3, 252
"""The volatility of the stock in the average-price option, and the days of a path."""
THREADS = 128
"""Threads of a block of the kernel, which has 512 paths."""


# --- The basket ----


def log_prices(spot: float) -> tuple[Any, Any]:
    """Mean and standard deviation of the logarithms of the final prices."""
    volatility = np.linspace(0.1, 0.4, STOCKS, dtype=np.float32)
    mu = math.log(spot) + (RATE - volatility**2 / 2) * np.float32(YEARS)
    return mu, volatility * np.float32(math.sqrt(YEARS))


def basket_price(
    spot: float = SPOT, seed: int = 7, paths: int = 100_000, antithetic: bool = False, device: str = "cpu"
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
    high, low = SPOT * (1 + BUMP), SPOT * (1 - BUMP)
    return (basket_price(high, seed, device=device) - basket_price(low, other_seed, device=device)) / (high - low)


def price_on_dask(paths: int, *, seed: int = 7, block: int = BLOCK) -> tuple[Any, Any]:
    """The price and its standard error, as lazy Dask scalars. Each thread has `block` paths in memory at a time.

    >>> import dask
    >>> from multisample.examples.option_prices import price_on_dask
    >>> mean, error = dask.compute(*price_on_dask(100_000, block=20_000), scheduler="threads")
    >>> bool(5.0 < mean < 6.0), bool(0.0 < error < 0.1)
    (True, True)
    """
    import dask.array as da

    from multisample.dask import sample

    x = sample(*log_prices(SPOT), paths, chunks=(-1, block), seed=seed)
    payoff = math.exp(-RATE * YEARS) * (da.exp(x).mean(axis=0, dtype=np.float64) - STRIKE).clip(0)
    return payoff.mean(), payoff.std() / math.sqrt(paths)


def print_price(draws: float, scheduler: str) -> None:
    """Print the price from this number of draws, on the Dask cluster with this scheduler, if any."""
    import dask

    cluster: Any = contextlib.nullcontext()
    if scheduler:
        from distributed import Client

        cluster = Client(scheduler)
    with cluster:
        start = time.perf_counter()
        mean, error = dask.compute(*price_on_dask(max(round(draws / STOCKS), 1)))
        seconds = time.perf_counter() - start
    print(f"price {mean:.6f}, standard error {error:.6f}; {draws:.3g} draws in {seconds:.1f} s")


# --- The average price ---

KERNEL = r"""
#include <multisample/normal.h>

// Each thread writes the payoffs of four paths. A path is the logarithm to base 2 of the stock's price, relative to
// today's.
extern "C" __global__ void simulate(unsigned long long seed, unsigned days, float drift, float volatility, float spot,
                                    float strike, float4* payoffs) {
  const unsigned g = blockIdx.x * blockDim.x + threadIdx.x;
  const multisample::Stream stream(seed);
  float x0 = 0, x1 = 0, x2 = 0, x3 = 0, total0 = 0, total1 = 0, total2 = 0, total3 = 0;
  for (unsigned day = 0; day < days; ++day) {
    const auto [z0, z1, z2, z3] = stream.normals4(day, g);
    total0 += exp2f(x0 += drift + volatility * z0);
    total1 += exp2f(x1 += drift + volatility * z1);
    total2 += exp2f(x2 += drift + volatility * z2);
    total3 += exp2f(x3 += drift + volatility * z3);
  }
  const auto payoff = [&](float total) { return fmaxf(spot * total / days - strike, 0.0f); };
  payoffs[g] = {payoff(total0), payoff(total1), payoff(total2), payoff(total3)};
}
"""
OPTIONS = ("-std=c++17", "-ftz=true", f"-I{multisample.get_include()}")
"""Options for the compiler of `KERNEL`."""


def average_price(seed: int = 7, paths: int = 65_536, device: str = "cpu") -> tuple[float, float]:
    """The price of the right to receive, after a year, the excess of the stock's average price over 100.

    Returns the price and its standard error. `paths` are rounded up to a multiple of 512. On the device "cpu" Numba
    simulates them, on "cuda" CUDA C++.
    """
    blocks = -(-paths // (4 * THREADS))
    daily = np.float32(VOLATILITY * math.sqrt(YEARS / DAYS) / math.log(2))
    drift = np.float32((RATE - VOLATILITY**2 / 2) * YEARS / DAYS / math.log(2))
    arguments = np.uint64(seed), np.uint32(DAYS), drift, daily, np.float32(SPOT), np.float32(STRIKE)
    if device == "cuda":
        import cupy

        payoffs = cupy.empty(4 * THREADS * blocks, np.float32)
        kernel = cupy.RawKernel(KERNEL, "simulate", OPTIONS)  # NVRTC compiles it once.
        kernel((blocks,), (THREADS,), (*arguments, payoffs))
    else:
        payoffs = np.empty(4 * THREADS * blocks, np.float32)
        simulate(*arguments, payoffs)
    discount = math.exp(-RATE * YEARS)
    mean, deviation = payoffs.mean(dtype=np.float64), payoffs.std(dtype=np.float64)
    return discount * float(mean), discount * float(deviation) / math.sqrt(payoffs.size)


@njit
def simulate(seed, days, drift, volatility, spot, strike, payoffs):  # type: ignore[no-untyped-def]
    """`KERNEL` for the CPU: writes the payoff of each path. The number of paths is a multiple of 256."""
    lanes = 64
    x, total = np.empty((lanes, 4), np.float32), np.empty((lanes, 4), np.float32)
    for first in range(0, payoffs.size // 4, lanes):
        x[:], total[:] = 0, 0
        for day in range(days):
            for k in range(lanes):
                z = multisample.numba.normals4(seed, 0, day, first + k)
                for c in range(4):
                    x[k, c] += drift + volatility * z[c]
                    total[k, c] += np.exp2(x[k, c])
        for k in range(lanes):
            for c in range(4):
                payoffs[4 * (first + k) + c] = max(spot * total[k, c] / np.float32(days) - strike, np.float32(0))


def main(argv: Sequence[str] | None = None) -> int:
    """Print means and standard deviations of 20 estimates for the basket, or what else the options ask for."""
    args = parsed(
        "option_prices", __doc__, argv, option=("basket", "average"), device=("cpu", "cuda"), draws=0.0, scheduler="",
        paths=65_536,
    )  # fmt: skip
    seeds, device = range(REPETITIONS), args.device
    if args.draws or args.scheduler:
        print_price(args.draws or 1e8, args.scheduler)
    elif args.option == "average":
        print(f"{args.paths} paths of {DAYS} days  price   standard error")
        for seed in range(4):
            mean, error = average_price(seed, args.paths, device)
            print(f"seed {seed}{mean:27.4f}{error:10.4f}")
    else:
        estimates = {
            "price": [basket_price(seed=seed, device=device) for seed in seeds],
            "price, antithetic pairs": [basket_price(seed=seed, antithetic=True, device=device) for seed in seeds],
            "delta, different seeds": [delta(seed, seed + REPETITIONS, device) for seed in seeds],
            "delta, common random numbers": [delta(seed, seed, device) for seed in seeds],
        }
        print(f"{REPETITIONS} estimates of 100,000 paths each{'mean':>8}  standard deviation")
        for name, values in estimates.items():
            print(f"{name:36}{statistics.fmean(values):10.4f}  {statistics.stdev(values):.5f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
