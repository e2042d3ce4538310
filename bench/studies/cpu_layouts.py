"""The cost of layout "nd" on the CPU, relative to the same call with layout "dn".

python -m bench.studies.cpu_layouts results.json

Both calls fill existing arrays and alternate, so that a disturbance slows both. Each figure is the median, between the
quartiles, of the ratios of one turn: time of "dn" over time of "nd". The aim is 0.8. Predicted, after runs of the
kernels alone: at least 0.9 from 16 dimensions on, and 0.8 to 0.9 at ten, where a column is shorter than a vector and is
copied into place.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import multisample
from bench.suites.bench_cpu import SHAPES, filling
from bench.suites.cases import clamp
from bench.suites.machine import describe
from bench.suites.timing import quartiles

MODES: dict[str, dict[str, Any]] = {
    "independent": {},
    "antithetic": {"antithetic": True},
    "shared": {"noise": "shared"},
}
TURNS = 41
SECONDS = 0.002  # Minimum time of one turn: short calls are repeated.


def seconds(call: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def nd_over_dn(backend: str, d: int, n: int, options: dict[str, Any]) -> list[float]:
    dn = filling(backend, np.zeros((d, n), np.float32), d, n, options)
    nd = filling(backend, np.zeros((n, d), np.float32), d, n, {**options, "layout": "nd"})
    for call in (dn, nd):
        call()
    repeats = clamp(SECONDS / seconds(dn, 3), 1, 1000)
    ratios = [seconds(dn, repeats) / seconds(nd, repeats) for _ in range(TURNS)]
    return [round(ratio, 3) for ratio in quartiles(ratios)]


def main(path: str) -> None:
    backends = [name for name in ("cpu", "torch_ext") if multisample.backends()[name].available]
    rows = [
        {"backend": backend, "noise": mode, "shape": (d, n), "nd_over_dn": nd_over_dn(backend, d, n, options)}
        for backend in backends
        for mode, options in MODES.items()
        for d, n in SHAPES
    ]
    Path(path).write_text(json.dumps({"machine": describe(None), "quartiles": rows}, indent=1) + "\n")
    for row in rows:
        print(row["backend"], row["noise"], row["shape"], *row["nd_over_dn"])


if __name__ == "__main__":
    main(sys.argv[1])
