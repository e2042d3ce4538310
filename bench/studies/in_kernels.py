"""Normals that are never stored: `weighted_moments`, an iteration of MPPI, and an Asian option, beside stored normals.

python -m bench.studies.in_kernels results.json [cuda-moments] [cuda-mppi] [cuda-option]

`us` is the median time between device events; `host us` is the time of a call on the host. `MB` is the memory that a
call needs beside its arguments, at its peak.

`weighted_moments` is beside `sample` alone, and PyTorch. "elites" has a random tenth of the weights.

An iteration of MPPI (`multisample.examples.mppi`) draws controls, simulates, and averages them with weights. "in the
kernel": the rollouts draw them, and `multisample.weighted_moments` draws them again. "sample, matrix": they are stored,
the same rollouts read them, and cuBLAS multiplies. "randn, matrix": the same with PyTorch's randn.

The kernels of the option (`multisample.examples.option_prices`) differ only in the header, the generator and the draw
of four normals. `ns` is the time of a normal.
"""

import functools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import torch

import multisample
from bench.studies.rows import Call, Rows, cuda_vectors, main, on_device, peak, rows_of
from bench.suites.curanddx_peer import CURAND_KERNEL, nvcc
from multisample.examples import mppi, option_prices


def moments(d: int, n: int) -> dict[str, Call]:
    generator = torch.Generator("cuda").manual_seed(1)
    weights = torch.randn(n, device="cuda", generator=generator)
    elites = torch.where(torch.rand(n, device="cuda", generator=generator) < 0.1, weights, 0.0)
    mu, sigma = cuda_vectors(d)
    weights_of_host = weights.tolist()

    def accumulated() -> Any:
        total = torch.zeros_like(mu)
        for w in weights_of_host:
            total.add_(torch.randn_like(mu), alpha=w)
        return total

    calls: dict[str, Call] = {"torch, accumulated, order 1": accumulated} if n <= 100 else {}
    for mode, fast in (("", False), (", fast_math", True)):
        options: dict[str, Any] = {"seed": 7, "fast_math": fast, "backend": "torch_ext"}
        weighted = functools.partial(multisample.weighted_moments, **options)
        calls |= {
            f"sample{mode}": functools.partial(multisample.sample, mu, sigma, n, **options),
            f"order 2, torch_ext{mode}": functools.partial(weighted, weights, mu, sigma),
            f"order 1, torch_ext{mode}": functools.partial(weighted, weights, mu, sigma, order=1),
            f"elites, torch_ext{mode}": functools.partial(weighted, elites, mu, sigma),
        }
    return calls


def moments_rows() -> Rows:
    for d, n in (4096, 65_536), (100, 100_000), (100_000_000, 64):
        calls = moments(d, n)
        for row in rows_of(f"cuda {d}x{n}", on_device(calls)):
            yield {**row, "MB": peak(calls[row["call"]]) / 1e6}


QUEUED, FILLS = 10, 40  # Iterations in a row, and fills that keep the device busy until the iterations are queued.
ROLLOUTS, ROWS = 100_000, 2 * mppi.STEPS
KEY = multisample.Key(7, 3)

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


def iterations() -> dict[str, Call]:
    plan = cupy.linspace(0, 1, ROWS, dtype=np.float32)
    sigma = cupy.full(ROWS, mppi.ACCELERATION, np.float32)
    start = cupy.asarray(mppi.START, np.float32)
    reading = cupy.RawKernel(READ, "rollouts", mppi.OPTIONS)

    def weights_of(costs: Any) -> Any:
        weights = cupy.exp((costs.min() - costs) / mppi.TEMPERATURE)
        return weights / weights.sum()

    def in_kernel(fast_math: bool) -> Any:
        weights = weights_of(mppi.costs_of(plan, sigma, start, ROLLOUTS, KEY, "cuda", fast_math))
        return multisample.weighted_moments(weights, plan, sigma, order=1, seed=KEY, fast_math=fast_math)[0]

    def stored(draw: Callable[[], Any]) -> Any:
        controls, costs = draw(), cupy.empty(ROLLOUTS, np.float32)
        arguments = controls, np.uint32(mppi.STEPS), start, np.uint32(ROLLOUTS), costs
        reading((-(-ROLLOUTS // mppi.THREADS),), (mppi.THREADS,), arguments)
        return controls @ weights_of(costs)

    def randn() -> Any:
        mu, spread = torch.from_dlpack(plan), torch.from_dlpack(sigma)
        return cupy.asarray(mu[:, None] + spread[:, None] * torch.randn(ROWS, ROLLOUTS, device="cuda"))

    calls: dict[str, Call] = {"randn, matrix": functools.partial(stored, randn)}
    for fast, mode in ((False, ""), (True, ", fast_math")):
        draw = functools.partial(multisample.sample, plan, sigma, ROLLOUTS, seed=KEY, fast_math=fast)
        calls[f"in the kernel{mode}"] = functools.partial(in_kernel, fast)
        calls[f"sample, matrix{mode}"] = functools.partial(stored, draw)
        # The same controls give the same plan, up to the rounding of sums.
        ours, theirs = (cupy.asnumpy(calls[f"{name}{mode}"]()) for name in ("in the kernel", "sample, matrix"))
        np.testing.assert_allclose(ours, theirs, atol=1e-3)
    return calls


def mppi_rows() -> Rows:
    calls = iterations()
    for row in rows_of("MPPI", on_device(calls, row=QUEUED, fills=FILLS)):
        call = row["call"]
        yield {"case": "MPPI", "call": call, "iteration us": row["us"], "MB": peak(calls[call]) / 1e6}


PATHS, SEED = 2**22, 7
DAYS, THREADS = option_prices.DAYS, option_prices.THREADS
DAILY = np.float32(option_prices.VOLATILITY * DAYS**-0.5 / math.log(2))
DRIFT = np.float32((option_prices.RATE - option_prices.VOLATILITY**2 / 2) / DAYS / math.log(2))

# Changes of the example's kernel.
GENERATORS = {
    "multisample": {},
    "multisample, fast_math": {"stream.normals4(day, g)": "stream.fast_normals4(day, g)"},
    "cuRAND": {
        "#include <multisample/normal.h>": "#include <curand_kernel.h>",
        "const multisample::Stream stream(seed);": "curandStatePhilox4_32_10_t state; curand_init(seed, g, 0, &state);",
        "stream.normals4(day, g)": "curand_normal4(&state)",
    },
}


def pricing(changes: dict[str, str], payoffs: Any) -> Call:
    text = option_prices.KERNEL
    for ours, theirs in changes.items():
        assert text.count(ours) == 1
        text = text.replace(ours, theirs)
    with tempfile.TemporaryDirectory() as folder:
        program, cubin = Path(folder, "kernel.cu"), Path(folder, "kernel.cubin")
        program.write_text(text)
        architecture = cupy.cuda.Device().compute_capability
        nvcc(program, architecture, (CURAND_KERNEL,), *option_prices.OPTIONS, "-cubin", f"-o={cubin}")
        kernel = cupy.RawModule(path=str(cubin)).get_function("simulate")
    arguments = np.uint64(SEED), np.uint32(DAYS), DRIFT, DAILY, np.float32(100), np.float32(100), payoffs
    return lambda: kernel((PATHS // (4 * THREADS),), (THREADS,), arguments)


def option_rows() -> Rows:
    payoffs = cupy.empty(PATHS, np.float32)
    calls = {name: pricing(changes, payoffs) for name, changes in GENERATORS.items()}
    for row in rows_of("Asian option", on_device(calls)):
        yield {**row, "ns": 1e3 * row["us"] / (DAYS * PATHS)}


if __name__ == "__main__":
    main(__doc__ or "", {"cuda-moments": moments_rows, "cuda-mppi": mppi_rows, "cuda-option": option_rows})
