"""The kernels of both CPU backends for processors with AVX-512, with AVX2, and without fused multiply-adds.

python -m bench.studies.cpu_instructions results.json

Nanoseconds for a normal at (100, 1000), on one thread: the median of TURNS processes, in turns. "256 bits": vectors as
compilers prefer them on this processor. "library": the C library computes each fused multiply-add that is not an
instruction. On a processor with the instruction, the C library of Linux uses it; glibc's tunables hide it here, as on a
processor without it. NumPy's `standard_normal` is beside them.

Linux on x86-64 only.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.suites.machine import describe
from multisample.backends.native import build, csrc_files

TURNS = 5
HIDDEN = "glibc.cpu.hwcaps=-FMA,-FMA4,-AVX2"
DTYPES = ("float32", "float64")

CPP = r"""
#include <chrono>
#include <cmath>
#include <cstdio>
#include <vector>

#include "cpu/kernel.h"

using namespace multisample;

int main() {
  const u64 d = 100, n = 1000;
  const std::vector<double> mu(d, 0.7), sigma(d, 1.3);
  std::vector<double> matrix(d * n);
  for (const u32 type : {kFloat32, kFloat64}) {
    Launch call{};
    call.mu.data = mu.data(), call.sigma.data = sigma.data();
    call.mu_stride = call.sigma_stride = sizeof(double);
    call.mu_type = call.sigma_type = kFloat64;
    call.matrix = matrix.data();
    call.column_stride = element_size(type);
    call.row_stride = n * call.column_stride;
    call.rows = d;
    call.columns = n;
    call.seed = 7;
    call.type = type;
    double least = INFINITY;
    for (int turn = 0; turn < 5; ++turn) {
      const auto start = std::chrono::steady_clock::now();
      draw_window(call, 0, d, 0, n);
      const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - start;
      if (time.count() < least) least = time.count();
    }
    std::printf("%g\n", least / (d * n));
  }
}
"""

PYTHON = """
import sys, time
import numpy as np
from numba import njit
from multisample.backends.kernels.cpu import intrinsics
from multisample.backends.kernels.stream import arithmetic

if sys.argv[1] == "library":
    arithmetic._has_fma = lambda context, builder: True
if sys.argv[1] == "256 bits":
    intrinsics.use_widest_vectors = njit(lambda: None)
from multisample.backends.kernels.cpu.kernel import window_kernel

d, n = 100, 1000
for dtype in ("float32", "float64"):
    matrix, kernel = np.empty((d, n), dtype), window_kernel(dtype)
    arrays = np.full(d, 0.7, dtype), np.full(d, 1.3, dtype)
    times = []
    for turn in range(6):
        start = time.perf_counter()
        if sys.argv[1] == "numpy":
            np.random.default_rng(7).standard_normal(dtype=dtype, out=matrix)
        else:
            kernel(*arrays, matrix, np.uint64(7), np.uint64(0), 0, 0, False)
        times.append(time.perf_counter() - start)
    print(1e9 * min(times[1:]) / (d * n))
"""


def programs(folder: Path) -> dict[tuple[str, str, str], tuple[list[str], dict[str, str]]]:
    """Commands that print a time for each type, and their environments, by backend, processor and kind."""
    library = build.LIBRARIES["cpu"]
    source = folder / "kernel.cpp"
    source.write_text(CPP)
    found = {}
    software, narrow = "-DMULTISAMPLE_SOFTWARE_FMA", "-mprefer-vector-width=256"
    for processor, kind in (
        ("native", "ours"), ("native", "256 bits"), ("x86-64-v3", "ours"), ("x86-64", "ours"), ("x86-64", "library"),
    ):  # fmt: skip
        flags = [flag for flag in library.flags if flag != software or kind != "library"]
        flags += library.native_flags if processor == "native" else [f"-march={processor}"]
        flags += [narrow] * (kind == "256 bits")
        program = folder / f"{processor}-{kind}"
        subprocess.run(["g++", *flags, f"-I{csrc_files.folder()}", source, "-o", program], check=True)
        found["torch_ext", processor, kind] = (
            [str(program)],
            {"GLIBC_TUNABLES": HIDDEN} if processor == "x86-64" else {},
        )
    plain = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "GLIBC_TUNABLES": HIDDEN}
    for name, kind, environment in (
        ("cpu", "ours", {}), ("cpu", "256 bits", {}), ("cpu", "ours", plain), ("cpu", "library", plain),
        ("NumPy", "numpy", {}),
    ):  # fmt: skip
        caches = {"MULTISAMPLE_CACHE_DIR": str(folder / f"cache-{kind}-{len(environment)}")}
        processor = "x86-64" if environment else "native"
        found[name, processor, kind] = [sys.executable, "-c", PYTHON, kind], environment | caches
    return found


def main() -> None:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        commands = programs(Path(folder))
        times: dict[Any, list[list[float]]] = {name: [] for name in commands}
        for _ in range(TURNS):
            for name, (command, environment) in commands.items():
                output = subprocess.run(command, env=os.environ | environment, capture_output=True, check=True).stdout
                times[name].append(list(map(float, output.split())))
    for (backend, processor, kind), turns in times.items():
        for dtype, values in zip(DTYPES, zip(*turns, strict=True), strict=True):
            row = {"backend": backend, "processor": processor, "fma": kind, "dtype": dtype}
            rows.append(row | {"ns": round(statistics.median(values), 3)})
            print(f"{backend:10}{processor:12}{kind:9}{dtype:9}{rows[-1]['ns']:10}")
    Path(sys.argv[1]).write_text(json.dumps({"machine": describe(None), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
