"""Samples and their gradients in PyTorch: ours beside the usual expressions, in time and in memory.

python -m bench.studies.torch_autograd results.json

The results have the minimum and the mean of each time. `kernels` times the operators alone. `training` times forward
and backward by autograd, for an upstream gradient as large as the sample. `memory` is the peak of both in units of the
sample, with that gradient included.

Predicted before the first run, on an H200: the loop for four normals has 125 instructions of the portable transform and
75 of the fast one; the forward kernel has 118 and 66. So the portable backward takes 1.08 of the forward kernel's time.
randn with mu and sigma writes and reads the sample five times, and draws at 0.4 of the memory's speed: 4 times our time
forward (6 with fast_math), 3.5 backward (5 with fast_math). Memory: 2.0 samples for us; 4 for the others, which keep
the noise and multiply it.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import multisample
from bench.studies.alternating import ROTATED, seconds
from bench.suites.machine import Clocks, describe
from bench.suites.timing import CudaDevice, Device
from multisample.backends import registry

SHAPES = [
    (4096, 65_536), (4096, 65_537), (262_144, 1024), (1_048_576, 128), (4_194_304, 32), (256, 1_000_000),
    (10, 1_000_000), (1, 10_000_000), (2500, 1024),
]  # fmt: skip
LARGE = (4096, 65_536)
MODES: dict[str, dict[str, Any]] = {
    "portable": {},
    "fast_math": {"fast_math": True},
    "shared": {"shared": True},
    "antithetic": {"antithetic": True},
    "shared, fast_math": {"shared": True, "fast_math": True},
    "antithetic, fast_math": {"antithetic": True, "fast_math": True},
}
DEVICE = "cuda"

Call = Callable[[Any], object]
Shape = tuple[int, int]


def vectors(d: int) -> tuple[Any, Any]:
    return torch.linspace(-1, 1, d, device=DEVICE), torch.linspace(0.5, 2, d, device=DEVICE)


def times(device: Device, shape: Shape, calls: dict[str, tuple[Call, ...]]) -> dict[str, list[dict[str, float]]]:
    """The minimum and the mean of each part of each call."""
    d, n = shape
    arrays = [torch.randn(shape, device=DEVICE) for _ in range(max(2, min(256, ROTATED // (4 * d * n))))]
    return {
        name: [{"min": min(found), "mean": statistics.fmean(found)} for found in parts]
        for name, parts in seconds(device, calls, arrays).items()
    }


def kernels(device: Device, shape: Shape) -> dict[str, Any]:
    """Times of the operators alone. Forward writes to an existing array; backward reads one."""
    mu, sigma = vectors(shape[0])
    operators = torch.ops.multisample
    found = {}
    for mode, options in MODES.items():
        calls: dict[str, tuple[Call, ...]] = {
            "forward": (lambda out, options=options: operators.sample_(out, mu, sigma, seed=7, **options),),
            "backward": (lambda g, options=options: operators.sample_backward(g, seed=7, **options),),
        }
        parts = {name: part for name, (part,) in times(device, shape, calls).items()}
        found[mode] = parts | {"backward over forward": round(parts["backward"]["min"] / parts["forward"]["min"], 3)}
    return {"shape": shape, "seconds": found}


def contenders(shape: Shape) -> tuple[tuple[Any, Any], dict[str, Callable[[], Any]]]:
    """mu and sigma, and ways to draw a differentiable sample of shape (d, n) with them."""
    d, n = shape
    mu, sigma = (x.requires_grad_() for x in vectors(d))
    column, scale = mu[:, None], sigma[:, None]
    return (mu, sigma), {
        "multisample": lambda: multisample.sample(mu, sigma, n, backend="torch_ext"),
        "multisample, fast_math": lambda: multisample.sample(mu, sigma, n, backend="torch_ext", fast_math=True),
        "Normal.rsample": torch.distributions.Normal(column.expand(d, n), scale.expand(d, n)).rsample,
        "mu + sigma * randn": lambda: mu[:, None] + sigma[:, None] * torch.randn((d, n), device=DEVICE),
    }


def training(device: Device, shape: Shape) -> dict[str, Any]:
    """Times of forward and backward by autograd."""
    inputs, draws = contenders(shape)
    calls: dict[str, tuple[Call, ...]] = {
        name: (lambda g, draw=draw: (draw(), g), lambda drawn: torch.autograd.grad(drawn[0], inputs, drawn[1]))
        for name, draw in draws.items()
    }
    found = times(device, shape, calls)
    return {"shape": shape, "seconds": {name: {"forward": a, "backward": b} for name, (a, b) in found.items()}}


def memory(device: Device, shape: Shape) -> dict[str, float]:
    """Peak memory of forward and backward, in units of the sample."""
    peaks = {}
    inputs, draws = contenders(shape)
    for name, draw in draws.items():
        device.wait()
        device.release()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        x = draw()
        gradients = torch.autograd.grad(x, inputs, torch.ones_like(x))
        device.wait()
        peaks[name] = round((torch.cuda.max_memory_allocated() - before) / x.nbytes, 3)
        del x, gradients
    return peaks


def show(result: dict[str, Any]) -> None:
    for part in ("kernels", "training"):
        for row in result[part]:
            print(f"{part} {row['shape']!s:18} forward min, mean; backward min, mean, in us:")
            for name, found in row["seconds"].items():
                values = [found[way][kind] * 1e6 for way in ("forward", "backward") for kind in ("min", "mean")]
                print(f"  {name:22}", *(f"{value:9.1f}" for value in values), found.get("backward over forward", ""))
    print(f"peak memory in samples at {LARGE}:", result["memory"])


def main(path: str) -> None:
    device, clocks = CudaDevice(), Clocks()
    registry.find("torch_ext").prepare(DEVICE)
    result: dict[str, Any] = {"kernels": [], "training": []}
    for shape in SHAPES:
        for name, measure in (("kernels", kernels), ("training", training)):
            result[name].append(measure(device, shape))
            device.release()
    result["memory"] = memory(device, LARGE)
    clocks.read(device)
    result["machine"] = describe(clocks)
    Path(path).write_text(json.dumps(result, indent=1) + "\n")
    show(result)


if __name__ == "__main__":
    main(sys.argv[1])
