"""Our CUDA kernels beside memset: each layout, noise and transform of each backend.

python -m bench.studies.cuda_kernels results.json

Each figure is the time of a `cudaMemsetAsync` over the output's bytes, which is the practical write limit, divided by
the time of the kernel, in one run: medians of interleaved repetitions, by device events, with outputs rotated past the
cache.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import numpy as np

import multisample
from bench.studies.alternating import ROTATED, seconds
from bench.suites.machine import Clocks, describe
from bench.suites.timing import CudaDevice

SHAPES = [
    (4096, 65_536), (262_144, 1024), (1_048_576, 128), (4_194_304, 32), (4097, 65_537),
    (32, 8_388_608), (33, 8_000_000), (100, 2_500_000), (256, 1_000_000), (257, 1_000_000),
    (1000, 100_000), (1001, 262_144), (2500, 1024), (10, 1_000_000),
    (4096, 65_537), (262_144, 1025), (1_048_576, 127), (4_194_304, 33),
]  # fmt: skip
MODES: dict[str, dict[str, Any]] = {
    "portable": {},
    "fast_math": {"fast_math": True},
    "shared": {"noise": "shared"},
    "shared, fast_math": {"noise": "shared", "fast_math": True},
}
WAYS: dict[str, dict[str, Any]] = {
    "dn": {},
    "nd": {"layout": "nd"},
    "dn, antithetic": {"antithetic": True},
    "nd, antithetic": {"layout": "nd", "antithetic": True},
}


def outputs(d: int, n: int) -> list[Any]:
    """Aligned outputs whose bytes together exceed the cache."""
    size = 4 * d * n
    pitch = -(-size // 256) * 256
    count = max(2, min(256, ROTATED // pitch))
    memory = cupy.empty(count * pitch, np.uint8)
    return [memory[k * pitch :][:size].view(np.float32).reshape(d, n) for k in range(count)]


def memset(out: Any) -> None:
    cupy.cuda.runtime.memsetAsync(out.data.ptr, 1, out.nbytes, 0)


def drawing(d: int, n: int, **options: Any) -> Callable[[Any], object]:
    mu, sigma = cupy.linspace(-1, 1, d, dtype=np.float32), cupy.linspace(0.5, 2, d, dtype=np.float32)
    shape = (n, d) if options.get("layout") == "nd" else (d, n)
    return lambda out: multisample.sample(mu, sigma, n, seed=7, out=out.reshape(shape), **options)


def measure(device: CudaDevice, backend: str, d: int, n: int) -> dict[str, Any]:
    calls = {"memset": (memset,)} | {
        f"{mode}: {way}": (drawing(d, n, backend=backend, **options, **layout),)
        for mode, options in MODES.items()
        for way, layout in WAYS.items()
    }
    time = {name: statistics.median(times) for name, (times,) in seconds(device, calls, outputs(d, n)).items()}
    row: dict[str, Any] = {"shape": (d, n), "memset_us": round(time["memset"] * 1e6, 2)}
    row |= {name: round(time["memset"] / time[name], 3) for name in calls if name != "memset"}
    for mode in MODES:
        row[f"{mode}: nd over dn"] = round(time[f"{mode}: dn"] / time[f"{mode}: nd"], 3)
        row[f"{mode}: antithetic over not"] = round(time[f"{mode}: dn"] / time[f"{mode}: dn, antithetic"], 3)
    device.release()
    return row


def main(path: str) -> None:
    device, clocks = CudaDevice(), Clocks()
    backends = [name for name, status in multisample.list_backends().items() if status.available and name != "cpu"]
    fractions = {backend: [measure(device, backend, d, n) for d, n in SHAPES] for backend in backends}
    clocks.read(device)
    result = {"machine": describe(clocks), "fraction_of_memset": fractions}
    Path(path).write_text(json.dumps(result, indent=1) + "\n")
    for backend, rows in fractions.items():
        print(backend)
        for row in rows:
            print(row["shape"], row["memset_us"])
            for mode in MODES:
                values = [row[f"{mode}: {way}"] for way in WAYS]
                print(f"  {mode:18}", *values, "| nd over dn", row[f"{mode}: nd over dn"])


if __name__ == "__main__":
    main(sys.argv[1])
