"""Samples and their gradients in PyTorch: ours beside the usual expressions, in time and in memory.

python bench/studies/torch_autograd.py results.json [--device cpu]

Calls are repeated and alternate; the results have the minimum and the mean of each. On a GPU, device events take the
time, arrays rotate past the cache, and the device is busy until a call has been made, so that host time does not add.
`kernels` times the operators alone, also relative to reading the gradient once. `training` times forward and backward
by autograd, for an upstream gradient as large as the sample. `memory` is the peak of both in units of the sample, with
that gradient included.

Predicted before the first run, on an H200: the loop for four normals has 125 instructions of the portable transform and
75 of the fast one; the forward kernel has 118 and 66. So the portable backward takes 1.08 of the forward kernel's time.
The fast one is bound by memory, at 1.05 of the time to read the gradient once. Common noise takes 1.05 too, antithetic
pairs 1.1. randn with mu and sigma writes and reads the sample five times, and draws at 0.4 of the memory's speed: 4
times our time forward (6 with fast_math), 3.5 backward (5 with fast_math). Memory: 2.0 samples for us; 4 for the
others, which keep the noise and multiply it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import multisample
from multisample.backends import registry
from multisample.backends.native import csrc_files

REPEATS = 15
ROTATED = 2**31  # Bytes of arrays in rotation: far more than a cache.
BUSY = 2**30  # Bytes whose fill takes longer, 240 us, than a call on the host.
SHAPES = {
    "cuda": [
        (4096, 65_536), (4096, 65_537), (262_144, 1024), (1_048_576, 128), (4_194_304, 32), (256, 1_000_000),
        (10, 1_000_000), (1, 10_000_000), (2500, 1024),
    ],
    "cpu": [(1000, 10_000), (10, 100_000), (10_000, 100)],
}  # fmt: skip
LARGE = (4096, 65_536)
MODES: dict[str, dict[str, Any]] = {
    "portable": {},
    "fast_math": {"fast_math": True},
    "shared": {"shared": True},
    "antithetic": {"antithetic": True},
    "shared, fast_math": {"shared": True, "fast_math": True},
    "antithetic, fast_math": {"antithetic": True, "fast_math": True},
}

# Reads rows with as many bytes in flight as a processor can have. The store is never executed.
READ = r"""
extern "C" __global__ void read_once(const float4* g, float* out, long long groups) {
  const float4* row = g + blockIdx.y * groups;
  float sum = 0;
  const long long first = blockIdx.x * 2048ll, end = min(groups, first + 2048);
  for (long long k = first + threadIdx.x; k < end; k += 1024) {
    float4 x[4];
    #pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = k + 256 * j < end ? row[k + 256 * j] : float4{0, 0, 0, 0};
    #pragma unroll
    for (int j = 0; j < 4; ++j) sum += x[j].x + x[j].y + x[j].z + x[j].w;
  }
  if (sum == 1.2345e30f) *out = sum;
}
"""

Call = Callable[[Any], object]


class Timer:
    """Times of several calls. They alternate, so that a disturbance slows all, and take arrays in rotation."""

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        d, n = shape
        count = max(2, min(256, ROTATED // (4 * d * n))) if device.type == "cuda" else 2
        self.device = device
        self.turns = itertools.cycle([torch.randn((d, n), device=device) for _ in range(count)])
        self.busy = torch.empty(BUSY, dtype=torch.uint8, device=device) if device.type == "cuda" else None

    def seconds(self, calls: dict[str, tuple[Call, ...]]) -> dict[str, list[dict[str, float]]]:
        """Minimum and mean of each part of each call. A part gets the result of the part before."""
        times: dict[str, list[list[float]]] = {name: [[] for _ in parts] for name, parts in calls.items()}
        for repeat in range(-3, REPEATS):
            for name, parts in calls.items():
                for seconds, part in zip(times[name], self._run(parts), strict=True):
                    if repeat >= 0:
                        seconds.append(part)
        return {
            name: [{"min": min(seconds), "mean": statistics.fmean(seconds)} for seconds in parts]
            for name, parts in times.items()
        }

    def _run(self, parts: tuple[Call, ...]) -> list[float]:
        value: Any = next(self.turns)
        if self.busy is None:
            stamps = [time.perf_counter()]
            for part in parts:
                value = part(value)
                stamps.append(time.perf_counter())
            return [b - a for a, b in itertools.pairwise(stamps)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(parts) + 1)]
        self.busy.zero_()
        events[0].record()
        for part, event in zip(parts, events[1:], strict=True):
            value = part(value)
            event.record()
        events[-1].synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]


def vectors(d: int, device: torch.device) -> tuple[Any, Any]:
    return torch.linspace(-1, 1, d, device=device), torch.linspace(0.5, 2, d, device=device)


def reading(n: int) -> Call | None:
    """A kernel that only reads an array; None without CuPy, or for rows that the kernel does not support."""
    if n % 4:
        return None
    try:
        import cupy

        kernel = cupy.RawKernel(READ, "read_once")
        nowhere = cupy.empty(1, "float32")
    except Exception:  # A missing or broken installation may raise anything.
        return None

    def read(g: Any) -> None:
        d, n = g.shape
        # The whole matrix is one long row where its rows are short.
        rows, groups = (d, n // 4) if n >= 4096 and d < 65_536 else (1, d * n // 4)
        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        with stream:
            kernel((-(-groups // 2048), rows), (256,), (g.data_ptr(), nowhere, groups))

    return read


def kernels(shape: tuple[int, int], device: torch.device) -> dict[str, Any]:
    """Times of the operators alone. Forward writes to an existing array; backward reads one."""
    d, n = shape
    mu, sigma = vectors(d, device)
    operators = torch.ops.multisample
    calls: dict[str, tuple[Call, ...]] = {"torch.sum(g, 1)": (lambda g: torch.sum(g, 1),)}
    if device.type == "cuda" and (read := reading(n)):
        calls["reading once"] = (read,)
    for mode, options in MODES.items():
        if device.type == "cpu" and "fast_math" in options:
            continue  # fast_math has no effect on the CPU.
        calls[f"{mode}: forward"] = (
            lambda out, options=options: operators.sample_(out, mu, sigma, seed=7, **options),
        )  # fmt: skip
        calls[f"{mode}: backward"] = (lambda g, options=options: operators.sample_backward(g, seed=7, **options),)
    times = {name: parts[0] for name, parts in Timer(shape, device).seconds(calls).items()}
    once = times.get("reading once", times["torch.sum(g, 1)"])["min"]
    ratios = {
        name.removesuffix(": backward"): {
            "over forward": round(entry["min"] / times[name.replace("backward", "forward")]["min"], 3),
            "over reading once": round(entry["min"] / once, 3),
        }
        for name, entry in times.items()
        if name.endswith("backward")
    }
    return {"shape": shape, "seconds": times, "backward": ratios}


def ways(shape: tuple[int, int], device: torch.device) -> dict[str, tuple[Any, Any, Callable[[], Any]]]:
    """Contenders that draw a differentiable sample of shape (d, n): mu, sigma, and the call."""
    d, n = shape
    found: dict[str, tuple[Any, Any, Callable[[], Any]]] = {}
    for name in ("multisample", "multisample, fast_math", "Normal.rsample", "mu + sigma * randn"):
        mu, sigma = (x.requires_grad_() for x in vectors(d, device))
        if name == "Normal.rsample":
            normal = torch.distributions.Normal(mu[:, None].expand(d, n), sigma[:, None].expand(d, n))
            found[name] = mu, sigma, normal.rsample
        elif name == "mu + sigma * randn":
            found[name] = (
                mu, sigma,
                lambda mu=mu, sigma=sigma: mu[:, None] + sigma[:, None] * torch.randn((d, n), device=device),
            )  # fmt: skip
        elif device.type == "cuda" or "fast_math" not in name:
            fast = "fast_math" in name
            found[name] = (
                mu, sigma,
                lambda mu=mu, sigma=sigma, fast=fast: multisample.sample(
                    mu, sigma, n, backend="torch_ext", fast_math=fast
                ),
            )  # fmt: skip
    return found


def training(shape: tuple[int, int], device: torch.device) -> dict[str, Any]:
    """Times of forward and backward by autograd."""
    calls: dict[str, tuple[Call, ...]] = {}
    for name, (mu, sigma, draw) in ways(shape, device).items():
        calls[name] = (
            lambda g, draw=draw: (draw(), g),
            lambda drawn, inputs=(mu, sigma): torch.autograd.grad(drawn[0], inputs, drawn[1]),
        )
    times = Timer(shape, device).seconds(calls)
    return {
        "shape": shape,
        "seconds": {
            name: {"forward": forward, "backward": backward} for name, (forward, backward) in times.items()
        },
    }  # fmt: skip


def memory(shape: tuple[int, int], device: torch.device) -> dict[str, float]:
    """Peak memory of forward and backward, in units of the sample."""
    size = 4 * shape[0] * shape[1]
    peaks = {}
    for name, (mu, sigma, draw) in ways(shape, device).items():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        x = draw()
        gradients = torch.autograd.grad(x, (mu, sigma), torch.ones_like(x))
        torch.cuda.synchronize()
        peaks[name] = round((torch.cuda.max_memory_allocated() - before) / size, 3)
        del x, gradients
    return peaks


def environment(device: torch.device) -> dict[str, str]:
    found = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "cuda": str(torch.version.cuda),
        "multisample": multisample.__version__,
        "sources": csrc_files.digest()[:12],
    }
    for package in ("torch", "cupy-cuda13x", "cupy-cuda12x"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def show(result: dict[str, Any]) -> None:
    print(json.dumps(result["environment"]))
    for row in result["kernels"]:
        read = row["seconds"].get("reading once", row["seconds"]["torch.sum(g, 1)"])["min"]
        print(f"{row['shape']!s:18} reading once {read * 1e6:9.1f} us; backward over forward, over reading once:")
        for mode, ratios in row["backward"].items():
            print(f"  {mode:22} {ratios['over forward']:6.3f} {ratios['over reading once']:6.3f}")
    for row in result["training"]:
        print(f"{row['shape']!s:18} forward min, mean; backward min, mean, in us:")
        for name, times in row["seconds"].items():
            values = [times[part][kind] * 1e6 for part in ("forward", "backward") for kind in ("min", "mean")]
            print(f"  {name:22}", *(f"{value:9.1f}" for value in values))
    if "memory" in result:
        print(f"peak memory in samples at {LARGE}:", result["memory"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    registry.find("torch_ext").prepare(arguments.device)
    result: dict[str, Any] = {"environment": environment(device), "kernels": [], "training": []}
    for shape in SHAPES[device.type]:
        for name, measure in (("kernels", kernels), ("training", training)):
            result[name].append(measure(shape, device))
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if device.type == "cuda":
        result["memory"] = memory(LARGE, device)
    arguments.results.write_text(json.dumps(result, indent=1) + "\n")
    show(result)


if __name__ == "__main__":
    main()
