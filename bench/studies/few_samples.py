"""Few samples of many dimensions: 2^26 normals of float32 with n = 1 to 8, beside `torch.randn` and memset.

python -m bench.studies.few_samples results.json cuda
python -m bench.studies.few_samples results.json cpu

"cuda" measures each layout and transform of each backend, also with a number for sigma: medians in us of interleaved
repetitions, by device events, with outputs rotated past the cache. "cpu" measures n = 1 with two million dimensions on
two cores: minimum and median in ms, beside PyTorch's expression. Samples are compared with the cpu backend's first.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import multisample
from bench.suites.machine import Clocks, describe

NORMALS, CPU_ROWS, CPU_TURNS, COMPARED = 2**26, 2_000_000, 40, 1000
LENGTHS = range(1, 9)
MODES: dict[str, dict[str, Any]] = {"portable": {}, "fast_math": {"fast_math": True}}


def on_cuda() -> tuple[dict[str, Any], Clocks]:
    from bench.studies.alternating import seconds
    from bench.studies.cuda_kernels import memset, outputs
    from bench.suites.timing import CudaDevice

    device, clocks = CudaDevice(), Clocks()
    statuses = multisample.list_backends()
    backends = [name for name in ("torch_ext", "cupy", "numba") if statuses[name].available]
    rows = [cuda_row(device, n, backends, seconds, memset, outputs) for n in LENGTHS]
    clocks.read(device)
    return {"us": rows}, clocks


def cuda_row(device: Any, n: int, backends: list[str], seconds: Any, memset: Any, outputs: Any) -> dict[str, Any]:
    import cupy

    d = NORMALS // n
    mu, sigma = cupy.linspace(-1, 1, d, dtype=np.float32), cupy.linspace(0.5, 2, d, dtype=np.float32)
    calls: dict[str, Any] = {
        "memset": (memset,),
        "torch.randn": (lambda out: torch.randn(out.shape, out=torch.from_dlpack(out)),),
    }
    for backend in backends:
        for layout, shape in (("dn", (d, n)), ("nd", (n, d))):
            for mode, options in {**MODES, "sigma a number": {}}.items():
                spread = 0.5 if mode == "sigma a number" else sigma
                arguments = {"seed": 7, "backend": backend, "layout": layout, **options}

                def draw(out: Any, spread: Any = spread, arguments: Any = arguments, shape: Any = shape) -> object:
                    return multisample.sample(mu, spread, n, out=out.reshape(shape), **arguments)

                compare(draw, mu, spread, n, cupy.empty(shape, np.float32), options)
                calls[f"{backend}, {layout}, {mode}"] = (draw,)
    times = seconds(device, calls, outputs(d, n))
    device.release()
    return {"n": n} | {name: round(statistics.median(part) * 1e6, 1) for name, (part,) in times.items()}


def compare(draw: Callable[[Any], object], mu: Any, sigma: Any, n: int, out: Any, options: dict[str, Any]) -> None:
    """Compare the first and the last rows with those of the cpu backend."""
    draw(out)
    samples = out if out.shape == (len(mu), n) else out.T
    for begin in (0, len(mu) - COMPARED):
        part = slice(begin, begin + COMPARED)
        spread = sigma if isinstance(sigma, float) else sigma[part].get()
        expected = multisample.sample(mu[part].get(), spread, n, seed=7, dim_offset=begin)
        got = samples[part].get()
        near = np.abs(got - expected).max() < 2e-3 if options else np.array_equal(got, expected)
        assert near, (out.shape, options, begin)


def on_cpu() -> dict[str, Any]:
    torch.set_num_threads(2)
    mu, sigma = torch.linspace(-1, 1, CPU_ROWS), torch.linspace(0.5, 2, CPU_ROWS)
    calls: dict[str, Callable[[], object]] = {
        "torch.randn": lambda: torch.randn(CPU_ROWS, 1),
        "mu + sigma * torch.randn": lambda: mu[:, None] + sigma[:, None] * torch.randn(CPU_ROWS, 1),
    }
    for backend in ("torch_ext", "cpu"):
        for layout in ("dn", "nd"):
            arguments = {"seed": 7, "backend": backend, "layout": layout}
            calls[f"{backend}, {layout}"] = lambda arguments=arguments: multisample.sample(mu, sigma, 1, **arguments)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-2, CPU_TURNS):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if turn >= 0:
                times[name].append(time.perf_counter() - begin)
    found = {name: [min(part), statistics.median(part)] for name, part in times.items()}
    return {"ms": {name: [round(1e3 * t, 2) for t in part] for name, part in found.items()}}


def main(path: str, kind: str) -> None:
    figures, clocks = on_cuda() if kind == "cuda" else (on_cpu(), None)
    result = {"machine": describe(clocks), **figures}
    Path(path).write_text(json.dumps(result, indent=1) + "\n")
    for row in figures.get("us", [figures.get("ms", {})]):
        print(*(f"{name:36} {value}" for name, value in row.items()), "", sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
