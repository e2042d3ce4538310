"""One iteration of MPPI on a GPU: controls drawn in the kernel, or stored in a matrix.

python bench/studies/mppi.py results.json

An iteration draws sequences of two controls around a plan, simulates each (`multisample.examples.mppi`), and averages
them with weights. The ways differ in where the controls are. "in the kernel": the rollouts draw them, and
`multisample.weighted_moments` draws them again. "sample, matrix": `multisample.sample` stores them, the same rollouts
read them, and cuBLAS multiplies the matrix by the weights. "randn, matrix": the same with PyTorch's randn. "PyTorch":
randn, and the rollouts in PyTorch's operations too, one step at a time for all rollouts.

Times are those of the device, for iterations that the host has queued before: parts, and all of an iteration. PyTorch's
operations are too many to be queued, and have the host's time. Memory is what an iteration allocates at its peak.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import torch

import multisample
from multisample.backends.native import csrc_files
from multisample.examples import mppi

ROLLOUTS, ROWS, REPEATS, QUEUED = 100_000, 2 * mppi.STEPS, 9, 10
KEY = multisample.Key(7, 3)
START = np.array(mppi.START, np.float32)

# The rollouts of the example with controls from a matrix.
READ = (
    mppi.KERNEL.partition("// Four lanes")[0]
    + r"""
extern "C" __global__ void rollouts(const float* controls, unsigned steps, const float* start, unsigned n,
                                    float* costs) {
  const unsigned j = blockIdx.x * blockDim.x + threadIdx.x;
  if (j >= n) return;
  Vehicle vehicle = {start[0], start[1], start[2], start[3], 0};
  const float* column = controls + j;
  #pragma unroll 4
  for (unsigned t = 0; t < steps; ++t, column += 2 * size_t(n)) vehicle.move(column[0], column[n]);
  costs[j] = vehicle.cost;
}
"""
)
WAIT = r"""
extern "C" __global__ void wait(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {}
}
"""


class Iteration:
    """The parts of an iteration. `draw` returns what `costs` and `update` get."""

    def __init__(self) -> None:
        self.plan = cupy.linspace(0, 1, ROWS, dtype=np.float32)
        self.sigma = cupy.full(ROWS, mppi.ACCELERATION, np.float32)
        self.start = cupy.asarray(START)
        self.reading = cupy.RawKernel(READ, "rollouts", mppi.OPTIONS)

    def weights(self, costs: Any) -> Any:
        weights = cupy.exp((costs.min() - costs) / mppi.TEMPERATURE)
        return weights / weights.sum()

    def in_kernel(self, fast_math: bool) -> dict[str, Callable[..., Any]]:
        return {
            "draw": lambda: None,
            "costs": lambda _: mppi.costs_of(self.plan, self.sigma, self.start, ROLLOUTS, KEY, "cuda", fast_math),
            "update": lambda _, weights: multisample.weighted_moments(
                weights, self.plan, self.sigma, order=1, seed=KEY, fast_math=fast_math
            ),
        }

    def matrix(self, draw: Callable[[], Any]) -> dict[str, Callable[..., Any]]:
        def costs(controls: Any) -> Any:
            found = cupy.empty(ROLLOUTS, np.float32)
            arguments = controls, np.uint32(mppi.STEPS), self.start, np.uint32(ROLLOUTS), found
            self.reading((-(-ROLLOUTS // mppi.THREADS),), (mppi.THREADS,), arguments)
            return found

        return {"draw": draw, "costs": costs, "update": lambda controls, weights: controls @ weights}


class PyTorch:
    """An iteration in PyTorch's operations."""

    def __init__(self) -> None:
        self.plan = torch.linspace(0, 1, ROWS, device="cuda")
        self.sigma = torch.full((ROWS,), mppi.ACCELERATION, device="cuda")

    def draw(self) -> Any:
        return self.plan[:, None] + self.sigma[:, None] * torch.randn(ROWS, ROLLOUTS, device="cuda")

    def run(self) -> Any:
        controls = self.draw()
        x, y, u, v = (torch.full((ROLLOUTS,), float(s), device="cuda") for s in START)
        total = torch.zeros(ROLLOUTS, device="cuda")
        dt = float(mppi.SECONDS)
        (goal_x, goal_y), (by_x, by_y), square = mppi.GOAL, mppi.OBSTACLE, float(mppi.RADIUS) ** 2
        for a, b in controls.view(-1, 2, ROLLOUTS):
            u, v = u + dt * a, v + dt * b
            x, y = x + dt * u, y + dt * v
            total = total + (x - goal_x) ** 2 + (y - goal_y) ** 2 + 0.1 * (u * u + v * v)
            total = total + 1000 * ((x - by_x) ** 2 + (y - by_y) ** 2 < square)
        return controls @ torch.softmax(-total / mppi.TEMPERATURE, 0)


def milliseconds(call: Callable[[], Any], queued: int, wait: Any) -> float:
    """The least time of one of `queued` calls, which the host queues while the device waits."""
    best = math.inf
    for repeat in range(-2, REPEATS):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        if wait is not None:
            wait((1,), (1,), (np.int64(20_000_000),))
        start.record()
        for _ in range(queued):
            call()
        end.record()
        end.synchronize()
        if repeat >= 0:
            best = min(best, cupy.cuda.get_elapsed_time(start, end) / queued)
    return best


def peak(call: Callable[[], Any]) -> int:
    """Bytes that PyTorch's and CuPy's pools hand out at the peak of a call."""
    pool = cupy.get_default_memory_pool()
    cupy.cuda.Device().synchronize()
    pool.free_all_blocks()
    torch.cuda.reset_peak_memory_stats()
    before, held = torch.cuda.memory_allocated(), pool.total_bytes()
    result = call()
    cupy.cuda.Device().synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before + pool.total_bytes() - held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    arguments = parser.parse_args()
    wait, iteration, pytorch = cupy.RawKernel(WAIT, "wait"), Iteration(), PyTorch()
    plan, sigma = iteration.plan, iteration.sigma

    def randn() -> Any:
        return cupy.asarray(pytorch.draw())

    ways = {
        "in the kernel": iteration.in_kernel(False),
        "in the kernel, fast_math": iteration.in_kernel(True),
        "sample, matrix": iteration.matrix(lambda: multisample.sample(plan, sigma, ROLLOUTS, seed=KEY)),
        "sample, matrix, fast_math": iteration.matrix(
            lambda: multisample.sample(plan, sigma, ROLLOUTS, seed=KEY, fast_math=True)
        ),
        "randn, matrix": iteration.matrix(randn),
    }
    result: dict[str, Any] = {
        "environment": {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "cupy": cupy.__version__,
            "sources": csrc_files.digest()[:12],
        },
        "rollouts": ROLLOUTS, "rows": ROWS, "ways": {},
    }  # fmt: skip
    plans = {}
    for name, parts in ways.items():
        drawn = parts["draw"]()
        costs = parts["costs"](drawn)
        weights = iteration.weights(costs)

        def whole(parts: dict[str, Callable[..., Any]] = parts) -> Any:
            drawn = parts["draw"]()
            return parts["update"](drawn, iteration.weights(parts["costs"](drawn)))

        plans[name] = cupy.asnumpy(whole()[0] if "kernel" in name else whole())
        calls: dict[str, Callable[[], Any]] = {
            "draw": parts["draw"],
            "costs": lambda parts=parts, drawn=drawn: parts["costs"](drawn),
            "weights": lambda costs=costs: iteration.weights(costs),
            "update": lambda parts=parts, drawn=drawn, weights=weights: parts["update"](drawn, weights),
            "iteration": whole,
        }
        result["ways"][name] = {part: milliseconds(call, QUEUED, wait) for part, call in calls.items()}
        result["ways"][name]["iteration with the host"] = milliseconds(whole, 50, None)
        result["ways"][name]["bytes"] = peak(whole)
        del drawn, costs, weights, calls
    result["ways"]["PyTorch"] = {
        "iteration": milliseconds(pytorch.run, 2, None), "bytes": peak(pytorch.run),
    }  # fmt: skip
    # The same controls give the same plan, up to the rounding of sums.
    np.testing.assert_allclose(plans["in the kernel"], plans["sample, matrix"], atol=1e-3)
    np.testing.assert_allclose(plans["in the kernel, fast_math"], plans["sample, matrix, fast_math"], atol=1e-3)
    arguments.results.write_text(json.dumps(result, indent=1) + "\n")
    print(f"MPPI, us{'':20}   draw  costs weights update  iteration with host   MB")
    for name, way in result["ways"].items():
        parts = [way.get(part, math.nan) * 1e3 for part in ("draw", "costs", "weights", "update", "iteration")]
        host = way.get("iteration with the host", math.nan) * 1e3
        print(f"{name:26}", *(f"{part:7.1f}" for part in parts), f"{host:12.1f}{way['bytes'] / 1e6:9.1f}")


if __name__ == "__main__":
    main()
