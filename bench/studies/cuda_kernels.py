"""Our CUDA kernels beside memset: each layout, noise and transform of each backend.

python bench/studies/cuda_kernels.py results.json

Each figure is the time of a `cudaMemsetAsync` over the output's bytes, which is the practical write limit, divided by
the time of the kernel, in one run: medians of interleaved repetitions, by device events, with outputs rotated past the
cache.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import numpy as np

import multisample
from multisample.backends.native import csrc_files

REPEATS = 15
ROTATED = 2**31  # Bytes of outputs in rotation: far more than a cache.
BUSY = 2**28  # Bytes whose fill takes longer, 60 us, than a call on the host.

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


class Timer:
    """Medians of several calls on the device. The calls alternate, so that a disturbance slows all."""

    def __init__(self, shape: tuple[int, int]) -> None:
        d, n = shape
        self.bytes = 4 * d * n
        pitch = -(-self.bytes // 256) * 256
        count = max(2, min(256, ROTATED // pitch))
        memory = cupy.empty(count * pitch, np.uint8)
        self.size = memory.size
        self.busy = memory.data.ptr, min(BUSY, self.size)
        self.outs = [memory[k * pitch :][: self.bytes].view(np.float32).reshape(d, n) for k in range(count)]
        self.turn = 0

    def medians(self, calls: dict[str, Callable[[Any], object]]) -> dict[str, float]:
        """Seconds of each call of an output, and of memset under the name "memset"."""
        stream = cupy.cuda.get_current_stream()

        def memset(out: Any) -> None:
            cupy.cuda.runtime.memsetAsync(out.data.ptr, 1, self.bytes, stream.ptr)

        times: dict[str, list[float]] = {name: [] for name in ("memset", *calls)}
        for repeat in range(-3, REPEATS):
            for name, call in (("memset", memset), *calls.items()):
                out = self.outs[self.turn % len(self.outs)]
                self.turn += 1
                start, stop = cupy.cuda.Event(), cupy.cuda.Event()
                # The device is busy until the call has been made, so that host time does not add to the figure.
                cupy.cuda.runtime.memsetAsync(self.busy[0], 1, self.busy[1], stream.ptr)
                start.record()
                call(out)
                stop.record()
                stop.synchronize()
                if repeat >= 0:
                    times[name].append(cupy.cuda.get_elapsed_time(start, stop) / 1e3)
        return {name: statistics.median(values) for name, values in times.items()}


def vectors(d: int) -> tuple[Any, Any]:
    return cupy.linspace(-1, 1, d, dtype=np.float32), cupy.linspace(0.5, 2, d, dtype=np.float32)


def drawing(mu: Any, sigma: Any, n: int, **options: Any) -> Callable[[Any], object]:
    return lambda out: multisample.sample(mu, sigma, n, seed=7, out=out, **options)


def transposed(call: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda out: call(out.reshape(out.shape[::-1]))


def measure(backend: str, dtype: str = "float32") -> list[dict[str, Any]]:
    rows = []
    for d, n in SHAPES:
        timer, (mu, sigma) = Timer((d, n)), vectors(d)
        # These calls take longer on the host, also because the arrays are of another library.
        timer.busy = timer.busy[0], min(4 * BUSY, timer.size)
        calls = {}
        for mode, options in MODES.items():
            for way, layout_options in WAYS.items():
                call = drawing(mu, sigma, n, backend=backend, **options, **layout_options)
                calls[f"{mode}: {way}"] = transposed(call) if "layout" in layout_options else call
        seconds = timer.medians(calls)
        row: dict[str, Any] = {"shape": (d, n), "memset_us": round(seconds["memset"] * 1e6, 2)}
        row.update({name: round(seconds["memset"] / seconds[name], 3) for name in calls})
        for mode in MODES:
            row[f"{mode}: nd over dn"] = round(seconds[f"{mode}: dn"] / seconds[f"{mode}: nd"], 3)
            row[f"{mode}: antithetic over not"] = round(seconds[f"{mode}: dn"] / seconds[f"{mode}: dn, antithetic"], 3)
        rows.append(row)
        del timer
        cupy.get_default_memory_pool().free_all_blocks()
    return rows


def environment() -> dict[str, str]:
    runtime = cupy.cuda.runtime
    versions = {
        "gpu": runtime.getDeviceProperties(0)["name"].decode(),
        "driver": str(runtime.driverGetVersion()),
        "runtime": str(runtime.runtimeGetVersion()),
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "python": platform.python_version(),
        "multisample": multisample.__version__,
        "sources": csrc_files.digest()[:12],
    }
    for package in (
        "torch", "cupy-cuda12x", "cupy-cuda13x", "numba", "numba-cuda", "nvidia-nvvm", "nvidia-nvjitlink", "numpy",
    ):  # fmt: skip
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    smi = shutil.which("nvidia-smi")
    if smi:
        query = ["--query-gpu=driver_version,clocks.sm,clocks.max.sm,clocks.mem", "--format=csv,noheader"]
        versions["nvidia-smi"] = subprocess.run([smi, *query], capture_output=True, text=True).stdout.strip()
    nvcc = shutil.which("nvcc")
    if nvcc:
        versions["nvcc"] = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout.split()[-1]
    return versions


def main(path: str) -> None:
    backends = [name for name, status in multisample.backends().items() if status.available and name != "cpu"]
    result = {
        "environment": environment(),
        "fraction_of_memset": {backend: measure(backend) for backend in backends},
    }
    Path(path).write_text(json.dumps(result, indent=1) + "\n")
    for backend, rows in result["fraction_of_memset"].items():
        print(backend)
        for row in rows:
            print(row["shape"], row["memset_us"])
            for mode in MODES:
                values = [row[f"{mode}: {way}"] for way in WAYS]
                print(f"  {mode:18}", *values, "| nd over dn", row[f"{mode}: nd over dn"])


if __name__ == "__main__":
    main(sys.argv[1])
