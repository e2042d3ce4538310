"""Rows that begin at any address, beside aligned ones, as a fraction of the speed of `cudaMemsetAsync`.

python -m bench.studies.unaligned_rows results.json

Times of one run by CUDA's events, the median of 21 turns of memset and both modes. Before each call, a memset of 256
MiB clears the L2 cache and keeps the GPU busy until the call is launched.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import cupy

import multisample
from bench.suites.machine import describe
from multisample.backends.element_types import SIZES

TURNS = 21

CALLS: list[tuple[int, int, dict[str, Any]]] = [
    (262144, 1024, {}),
    (262144, 1025, {}),
    (131072, 2049, {}),
    (131072, 1537, {}),
    (200000, 777, {}),
    (300000, 573, {}),
    (4096, 65537, {}),
    (1048576, 127, {}),
    (4194304, 33, {}),
    (300000, 509, {}),
    (300000, 301, {}),
    (44739242, 3, {}),
    (262144, 1025, {"noise": "shared"}),
    (1048576, 127, {"noise": "shared"}),
    (4194304, 33, {"noise": "shared"}),
    (262144, 1026, {"antithetic": True}),
    (1048576, 126, {"antithetic": True}),
    (131072, 1025, {"dtype": "float64"}),
    (1048576, 127, {"dtype": "float64"}),
    (262144, 1025, {"dtype": "float16"}),
    (1048576, 127, {"dtype": "float16"}),
    (1000, 1025, {}),
    (100, 1025, {}),
    (1000, 127, {}),
    (1000, 33, {}),
]


def microseconds(calls: dict[str, Any], busy: cupy.ndarray) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-2, TURNS):
        for name, call in calls.items():
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            busy.data.memset_async(0, busy.nbytes)
            start.record()
            call()
            stop.record()
            stop.synchronize()
            if turn >= 0:
                times[name].append(1e3 * cupy.cuda.get_elapsed_time(start, stop))
    return {name: statistics.median(values) for name, values in times.items()}


def measure(d: int, n: int, options: dict[str, Any], backend: str, busy: cupy.ndarray) -> dict[str, Any]:
    dtype = options.get("dtype", "float32")
    mu, sigma = cupy.zeros(d, "float32"), cupy.ones(d, "float32")
    out = cupy.empty((d, n), dtype)
    calls = {"memset": lambda: out.data.memset_async(0, d * n * SIZES[dtype])}
    for mode in ("portable", "fast_math")[: 1 if dtype == "float64" else 2]:
        arguments = {"seed": 7, "backend": backend, "out": out, "fast_math": mode == "fast_math", **options}
        calls[mode] = lambda arguments=arguments: multisample.sample(mu, sigma, n, **arguments)
    us = microseconds(calls, busy)
    return {
        "shape": (d, n), "options": options, "backend": backend, "us": {name: round(t, 1) for name, t in us.items()},
        "of memset": {name: round(us["memset"] / t, 3) for name, t in us.items() if name != "memset"},
    }  # fmt: skip


def main(path: str) -> None:
    busy = cupy.empty(2**28, "u1")
    rows = []
    for backend in ("cupy", "numba"):
        for call in CALLS:
            rows.append(measure(*call, backend, busy))
            print(rows[-1], flush=True)
    Path(path).write_text(json.dumps({"machine": describe(None), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
