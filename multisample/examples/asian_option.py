"""Monte Carlo price of an option on the average price of a stock, in a kernel that draws its own normals.

A path has a normal for each day. `multisample.sample` would store them as a matrix with a row for each day and a column
for each path. The kernel stores none: each thread simulates four paths, and draws their normals of a day in one call.
The same functions run in CUDA C++ on a GPU and in Numba on the CPU, and draw the same paths.

python -m multisample.examples.asian_option                  # Numba, on the CPU
python -m multisample.examples.asian_option --device cuda    # CUDA C++ by CuPy, on a GPU
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import njit

import multisample

from ._running import parsed, run

SPOT, STRIKE, YEARS, RATE, VOLATILITY, DAYS = 100.0, 100.0, 1.0, 0.03, 0.3, 252
THREADS = 128
"""Threads of a block, which has 512 paths."""

KERNEL = r"""
#include <multisample/normal.h>

// Adds up the payoffs of 512 paths, and their squares, for each block. A path is the logarithm to base 2 of the stock's
// price, relative to today's.
extern "C" __global__ void simulate(unsigned long long seed, unsigned days, float drift, float volatility, float spot,
                                    float strike, double2* sums) {
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
  double sum = 0, squares = 0;
  const float totals[] = {total0, total1, total2, total3};
  for (float total : totals) {
    const double payoff = fmaxf(spot * total / days - strike, 0.0f);
    sum += payoff, squares += payoff * payoff;
  }
  __shared__ double2 shared[128];
  shared[threadIdx.x] = {sum, squares};
  for (unsigned half = 64; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) {
      shared[threadIdx.x].x += shared[threadIdx.x + half].x;
      shared[threadIdx.x].y += shared[threadIdx.x + half].y;
    }
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = shared[0];
}
"""
OPTIONS = ("-std=c++17", "-ftz=true", f"-I{multisample.get_include()}")
"""Options for the compiler of `KERNEL`."""


class Price(NamedTuple):
    """A Monte Carlo estimate, and its standard error."""

    mean: float
    error: float


def price(seed: int = 7, paths: int = 65_536, device: str = "cpu") -> Price:
    """The price of the right to receive, after a year, the excess of the stock's average price over 100.

    `paths` are rounded up to a multiple of 512. On the device "cpu" Numba simulates them, on "cuda" CUDA C++.
    """
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed: {seed}; must be at least 0 and less than 2**64")
    if paths < 4 * THREADS:
        raise ValueError(f"paths: {paths}; must be at least {4 * THREADS}")
    blocks = -(-paths // (4 * THREADS))
    daily = np.float32(VOLATILITY * math.sqrt(YEARS / DAYS) / math.log(2))
    drift = np.float32((RATE - VOLATILITY**2 / 2) * YEARS / DAYS / math.log(2))
    arguments = np.uint64(seed), np.uint32(DAYS), drift, daily, np.float32(SPOT), np.float32(STRIKE)
    if device == "cuda":
        import cupy

        sums = cupy.empty((blocks, 2))
        compiled_kernel()((blocks,), (THREADS,), (*arguments, sums))
        sums = sums.sum(axis=0).get()
    else:
        sums = simulate(*arguments, blocks * THREADS)
    paths, discount = 4 * THREADS * blocks, math.exp(-RATE * YEARS)
    mean, square = discount * float(sums[0]) / paths, discount**2 * float(sums[1]) / paths
    return Price(mean, math.sqrt((square - mean**2) / paths))


@functools.cache
def compiled_kernel() -> Any:
    """`KERNEL`, compiled by NVRTC."""
    import cupy

    return cupy.RawKernel(KERNEL, "simulate", OPTIONS)


@njit
def simulate(seed, days, drift, volatility, spot, strike, groups):  # type: ignore[no-untyped-def]
    """Sums of the payoffs of ``4 * groups`` paths, and of their squares: `KERNEL` for the CPU."""
    lanes = 64
    x, total = np.empty((lanes, 4), np.float32), np.empty((lanes, 4), np.float32)
    payoffs, squares = 0.0, 0.0
    for first in range(0, groups, lanes):
        x[:], total[:] = 0, 0
        for day in range(days):
            for k in range(lanes):
                z = multisample.numba.normals4(seed, 0, day, first + k)
                for c in range(4):
                    x[k, c] += drift + volatility * z[c]
                    total[k, c] += np.exp2(x[k, c])
        for k in range(min(lanes, groups - first)):
            for c in range(4):
                payoff = max(float(spot * total[k, c] / np.float32(days) - strike), 0.0)
                payoffs += payoff
                squares += payoff * payoff
    return payoffs, squares


def main(argv: Sequence[str] | None = None) -> int:
    """Print the estimates of four seeds."""
    args = parsed("asian_option", __doc__, argv, device=("cpu", "cuda"), paths=65_536)
    print(f"{args.paths} paths of {DAYS} days  price   standard error")
    for seed in range(4):
        mean, error = price(seed, args.paths, args.device)
        print(f"seed {seed}{mean:27.4f}{error:10.4f}")
    return 0


if __name__ == "__main__":
    run(main)
