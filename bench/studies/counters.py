"""Reads hardware counters of the sampling kernels with Nsight Compute, to find the resource that limits each.

python -m bench.studies.counters results.json

`ncu` must be on the PATH, and must be allowed to read counters. It runs each kernel a few times, once for each group of
counters, and leaves the GPU's clocks alone.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import cupy

import multisample
from bench.suites.machine import Clocks, describe
from bench.suites.timing import BUSY, CudaDevice

BOTH = (False, True)
CALLS: list[tuple[int, int, dict[str, Any]]] = [
    (d, n, {**options, "fast_math": fast})
    for d, n, options, modes in (
        (4096, 65536, {}, BOTH),
        (4096, 65536, {"dtype": "float16"}, BOTH),
        (4096, 65536, {"dtype": "bfloat16"}, BOTH),
        (4096, 65536, {"dtype": "float64"}, (False,)),
        (262144, 1024, {}, BOTH),
        (262144, 1025, {}, BOTH),
        (1048576, 127, {}, BOTH),
        (4194304, 33, {}, BOTH),
        (4194304, 32, {}, BOTH),
        (1048576, 128, {"noise": "shared"}, (False,)),
        (4194304, 32, {"noise": "shared"}, (False,)),
        (1048576, 127, {"noise": "shared"}, (False,)),
    )
    for fast in modes
]

PERCENT = {
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "alu": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "fma heavy": "sm__inst_executed_pipe_fmaheavy.avg.pct_of_peak_sustained_active",
    "xu": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "fp64": "sm__inst_executed_pipe_fp64.avg.pct_of_peak_sustained_active",
    "lsu": "sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_active",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
REASONS = (
    "barrier", "dispatch_stall", "drain", "lg_throttle", "long_scoreboard", "math_pipe_throttle", "mio_throttle",
    "no_instruction", "not_selected", "short_scoreboard", "wait",
)  # fmt: skip
STALLS = {reason: f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio" for reason in REASONS}
NANOSECONDS, INSTRUCTIONS, REGISTERS = (
    "gpu__time_duration.sum", "smsp__inst_executed.sum", "launch__registers_per_thread",
)  # fmt: skip
METRICS = (NANOSECONDS, INSTRUCTIONS, REGISTERS, *PERCENT.values(), *STALLS.values())


def draw() -> None:
    """Launch one kernel for each call."""
    for d, n, options in CALLS:
        mu, sigma = cupy.zeros(d, "float32"), cupy.ones(d, "float32")
        multisample.sample(mu, sigma, n, seed=1, backend="cupy", **options)
    cupy.cuda.Device().synchronize()


def profiled() -> str:
    """Run ncu. Returns its CSV: a line for each kernel, with metrics in base units."""
    ncu = ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
    kernels = ["--kernel-name-base", "demangled", "--kernel-name", "regex:sample_kernel"]
    command = [*ncu, *kernels, "--metrics", ",".join(METRICS), sys.executable, "-m", "bench.studies.counters", "--draw"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"ncu: {(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def rows_of(printed: str) -> list[dict[str, Any]]:
    """The counters of each call."""
    lines = csv.DictReader(line for line in printed.splitlines() if line.startswith('"'))
    kernels = [line for line in lines if line["ID"]]  # the line of the units has no ID
    rows = []
    for (d, n, options), kernel in zip(CALLS, kernels, strict=True):
        value = {metric: float(kernel[metric].replace(",", "")) for metric in METRICS}
        stalls = sorted(STALLS, key=lambda reason: -value[STALLS[reason]])[:3]
        rows.append(
            {
                "shape": (d, n),
                "options": options,
                "us": round(value[NANOSECONDS] / 1e3, 1),
                "instructions for four normals": round(value[INSTRUCTIONS] * 32 * 4 / (d * n), 1),
                "registers": int(value[REGISTERS]),
                "percent of peak": {name: round(value[metric], 1) for name, metric in PERCENT.items()},
                "warps that wait, per issued instruction": {
                    reason: round(value[STALLS[reason]], 2) for reason in stalls
                },
            }
        )
    return rows


def main(path: str) -> None:
    if path == "--draw":
        draw()
        return
    clocks = Clocks()
    device = CudaDevice()
    device.reserve(BUSY)
    clocks.read(device)
    rows = rows_of(profiled())
    for row in rows:
        print(row)
    Path(path).write_text(json.dumps({"machine": describe(clocks), "kernels": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
