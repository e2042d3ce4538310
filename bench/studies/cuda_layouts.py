"""The cost of layout "nd" and of antithetic pairs on a GPU, relative to the same call without them.

python bench/studies/cuda_layouts.py results.json

As in cuda_steps.py, each figure is the time of a `cudaMemsetAsync` over the output's bytes divided by that of the
kernel: medians of interleaved repetitions in one run.

Predicted before the first measurement, from counted instructions: nd has three more stores, with their addresses, for
four normals. That makes 122 instructions instead of 116 of the portable transform, and 72 instead of 66 of the fast
one, so 0.95 and 0.92 of the speed where instructions are the limit. Antithetic pairs have 70 instead of 116, and so
come near the fast transform's 0.95 of memset. Predicted later, for rows at any address: 0.9 of the speed of aligned
rows if no two warps write to one sector, which was wrong; then, after blocks with few passes had proved faster, 0.8 of
memset for pairs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
from cuda_steps import BUSY, MODES, Timer, drawing, environment, vectors

import multisample

SHAPES = [
    (4096, 65_536), (262_144, 1024), (1_048_576, 128), (4_194_304, 32), (4097, 65_537),
    (32, 8_388_608), (33, 8_000_000), (100, 2_500_000), (256, 1_000_000), (257, 1_000_000),
    (1000, 100_000), (1001, 262_144), (2500, 1024), (10, 1_000_000),
]  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "dn": {},
    "nd": {"layout": "nd"},
    "dn, antithetic": {"antithetic": True},
    "nd, antithetic": {"layout": "nd", "antithetic": True},
}


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
