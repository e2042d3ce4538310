"""Model predictive path integral control (MPPI) whose rollouts draw their own controls in the kernel.

A vehicle flies around an obstacle to a goal. Each control step simulates many sequences of accelerations around the
current plan, and averages them with weights that favour low costs (Williams et al., "Information theoretic MPC for
model-based reinforcement learning", ICRA 2017). The accelerations are never in memory: the rollouts draw them, and
`multisample.weighted_moments` draws them again for the average. Rollouts run in Numba on the CPU or in CUDA C++ on a
GPU, with the same accelerations.

python -m multisample examples mppi                    # Numba, on the CPU
python -m multisample examples mppi --device cuda      # CUDA C++ by CuPy, on a GPU
python -m multisample examples mppi --device arrays    # NumPy, with the accelerations in memory: (rollouts, steps, 2)
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit

import multisample

from ._running import parsed

STEPS = 100
"""Steps of a plan. Row 2 t of the matrix of accelerations is in direction x at step t, row 2 t + 1 in direction y."""
SECONDS = np.float32(0.05)
ACCELERATION = 2.0
"""Standard deviation of a drawn acceleration, in m/s^2."""
TEMPERATURE = 20.0
GOAL = np.float32(4.0), np.float32(0.0)
OBSTACLE, RADIUS = (np.float32(2.0), np.float32(0.1)), np.float32(0.7)
START = 0.0, 0.0, 0.0, 0.0
"""Position and speed, in m and m/s."""
THREADS = 128

KERNEL = r"""
#include <multisample/normal.h>

struct Vehicle {
  float x, y, u, v, cost;
  __device__ void move(float a, float b) {
    u += SECONDS * a, v += SECONDS * b;
    x += SECONDS * u, y += SECONDS * v;
    const float to_x = x - GOAL_X, to_y = y - GOAL_Y, by_x = x - OBSTACLE_X, by_y = y - OBSTACLE_Y;
    cost += to_x * to_x + to_y * to_y + 0.1f * (u * u + v * v);
    if (by_x * by_x + by_y * by_y < RADIUS * RADIUS) cost += 1000.0f;
  }
};

// Four lanes with four values each: lane k gets value k of every lane.
__device__ float4 transposed(float4 z) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  const float a = __shfl_xor_sync(~0u, odd ? z.x : z.y, 1), b = __shfl_xor_sync(~0u, odd ? z.z : z.w, 1);
  z = odd ? float4{a, z.y, b, z.w} : float4{z.x, a, z.z, b};
  const float c = __shfl_xor_sync(~0u, upper ? z.x : z.z, 2), d = __shfl_xor_sync(~0u, upper ? z.y : z.w, 2);
  return upper ? float4{c, d, z.z, z.w} : float4{z.x, z.y, c, d};
}

// Rows i to i + 3 of the thread's column j. A call of normals4 gives one row of four columns, so four neighbouring
// threads draw a row each, and exchange.
__device__ float4 noise(const multisample::Stream& stream, unsigned i, unsigned j) {
  const auto [z0, z1, z2, z3] = stream.NORMALS4(i + j % 4, j / 4);
  return transposed({z0, z1, z2, z3});
}

// The cost of rollout j. `steps` must be even. `plan` has two rows per step.
extern "C" __global__ void rollouts(const float* plan, const float* sigma, unsigned steps, const float* start,
                                    unsigned long long seed, unsigned long long offset, unsigned n, float* costs) {
  const multisample::Stream stream(seed, offset);
  const unsigned j = blockIdx.x * blockDim.x + threadIdx.x;
  Vehicle vehicle = {start[0], start[1], start[2], start[3], 0};
  for (unsigned i = 0; i < 2 * steps; i += 4) {
    const float4 z = noise(stream, i, j);
    vehicle.move(fmaf(sigma[i], z.x, plan[i]), fmaf(sigma[i + 1], z.y, plan[i + 1]));
    vehicle.move(fmaf(sigma[i + 2], z.z, plan[i + 2]), fmaf(sigma[i + 3], z.w, plan[i + 3]));
  }
  if (j < n) costs[j] = vehicle.cost;
}
"""
_NUMBERS = {
    "SECONDS": SECONDS, "GOAL_X": GOAL[0], "GOAL_Y": GOAL[1], "OBSTACLE_X": OBSTACLE[0], "OBSTACLE_Y": OBSTACLE[1],
    "RADIUS": RADIUS,
}  # fmt: skip
OPTIONS = ("-std=c++17", f"-I{multisample.get_include()}", *(f"-D{k}={float(v)!r}f" for k, v in _NUMBERS.items()))
"""Options for the compiler of `KERNEL`. It also needs ``-DNORMALS4=normals4`` or ``-DNORMALS4=fast_normals4``."""


def control(steps: int = 80, rollouts: int = 2048, seed: int = 7, device: str = "cpu") -> list[tuple[float, float]]:
    """Fly to the goal, with `rollouts` sequences for each control step; returns x and y after each, in metres.

    With device "cpu", the kernels are Numba's, and with "cuda" CUDA C++. With "arrays", the accelerations are an array,
    for rollouts that cannot draw in a kernel, such as those of a learned model.
    """
    library: Any = np
    if device == "cuda":
        import cupy

        library = cupy
    plan = library.zeros(2 * STEPS, np.float32)
    sigma = library.full(2 * STEPS, ACCELERATION, np.float32)
    generator = multisample.Generator(seed)
    state = np.array([*START, 0.0], np.float32)
    positions = []
    for _ in range(steps):
        key = generator.take()
        if device == "arrays":
            controls = multisample.sample(plan.reshape(STEPS, 2), ACCELERATION, rollouts, seed=key, layout="nd")
            costs = costs_of_controls(controls, state[:4])
        else:
            costs = costs_of(plan, sigma, state[:4], rollouts, key, device)
        weights = library.exp((costs.min() - costs) / np.float32(TEMPERATURE))
        weights /= weights.sum()
        if device == "arrays":
            plan = np.tensordot(weights, controls, 1).reshape(-1)
        else:
            (plan,) = multisample.weighted_moments(weights, plan, sigma, order=1, seed=key)
        a, b = (float(x) for x in plan[:2])
        state = np.array(moved((*state[:4], np.float32(0)), np.float32(a), np.float32(b)), np.float32)
        plan = library.concatenate([plan[2:], library.zeros(2, np.float32)])
        positions.append((float(state[0]), float(state[1])))
    return positions


def costs_of(
    plan: Any, sigma: Any, start: Any, n: int, key: multisample.Key, device: str = "cpu", fast_math: bool = False
) -> Any:
    """The costs of n sequences of accelerations from N(plan, sigma^2), shape (n,), in the library of `plan`.

    The accelerations are those of ``multisample.sample(plan, sigma, n, seed=key)``. `plan` and `sigma` have an even
    number of steps. `start` has position and speed, in memory of the host or the device.
    """
    seed, offset = np.uint64(key.seed), np.uint64(key.offset)
    if device == "cpu":
        costs = np.empty(-(-n // 4) * 4, np.float32)
        for_every_group(plan, sigma, start, seed, offset, costs)
        return costs[:n]
    import cupy

    costs = cupy.empty(n, np.float32)
    arguments = plan, sigma, np.uint32(plan.size // 2), cupy.asarray(start), seed, offset, np.uint32(n), costs
    draw = "fast_normals4" if fast_math else "normals4"
    kernel = cupy.RawKernel(KERNEL, "rollouts", (*OPTIONS, f"-DNORMALS4={draw}"))  # NVRTC compiles it once.
    kernel((-(-n // THREADS),), (THREADS,), arguments)
    return costs


def costs_of_controls(controls: Any, start: Any) -> Any:
    """The costs of rollouts with given accelerations, shape (rollouts, steps, 2)."""
    vehicle = (*start, np.zeros(len(controls), np.float32))
    for a, b in np.moveaxis(controls, 0, -1):
        vehicle = moved.py_func(vehicle, a, b)
    return vehicle[4]


@njit
def for_every_group(plan, sigma, start, seed, offset, costs):  # type: ignore[no-untyped-def]
    """The costs of all rollouts. Rollouts ``4 g`` to ``4 g + 3`` are a group, whose normals come from one call."""
    for g in range(costs.size // 4):
        first = (start[0], start[1], start[2], start[3], np.float32(0))
        v0, v1, v2, v3 = first, first, first, first
        for t in range(plan.size // 2):
            m, s, n, r = plan[2 * t], sigma[2 * t], plan[2 * t + 1], sigma[2 * t + 1]
            a0, a1, a2, a3 = multisample.numba.normals4(seed, offset, 2 * t, g)
            b0, b1, b2, b3 = multisample.numba.normals4(seed, offset, 2 * t + 1, g)
            v0 = moved(v0, m + s * a0, n + r * b0)
            v1 = moved(v1, m + s * a1, n + r * b1)
            v2 = moved(v2, m + s * a2, n + r * b2)
            v3 = moved(v3, m + s * a3, n + r * b3)
        costs[4 * g : 4 * g + 4] = v0[4], v1[4], v2[4], v3[4]


@njit
def moved(vehicle, a, b):  # type: ignore[no-untyped-def]
    """Position, speed and cost after one step with acceleration (a, b): ``Vehicle::move`` of `KERNEL`."""
    x, y, u, v, cost = vehicle
    u, v = u + SECONDS * a, v + SECONDS * b
    x, y = x + SECONDS * u, y + SECONDS * v
    to_x, to_y, by_x, by_y = x - GOAL[0], y - GOAL[1], x - OBSTACLE[0], y - OBSTACLE[1]
    cost += to_x * to_x + to_y * to_y + np.float32(0.1) * (u * u + v * v)
    cost += np.float32(1000) * np.float32(by_x * by_x + by_y * by_y < RADIUS * RADIUS)
    return x, y, u, v, cost


def main(argv: Sequence[str] | None = None) -> int:
    """Print the vehicle's position every half second."""
    args = parsed("mppi", __doc__, argv, device=("cpu", "cuda", "arrays"), rollouts=2048, seed=7)
    positions = control(rollouts=args.rollouts, seed=args.seed, device=args.device)
    print("seconds       x       y  distance to the goal")
    for k in range(9, len(positions), 10):
        x, y = positions[k]
        distance = math.hypot(x - float(GOAL[0]), y - float(GOAL[1]))
        print(f"{(k + 1) * float(SECONDS):7.2f}{x:8.2f}{y:8.2f}{distance:22.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
