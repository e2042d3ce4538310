"""Matrices of small and middle size on a CPU: the kernel alone, one thread beside two, and shared noise beside NumPy.

python -m bench.studies.cpu_middle results.json

"kernel": normals per second of the compiled kernel of `cpu`, on one thread. "threads": `sample(..., out=)` on one
thread and on two, in turns of 2 ms; "speed-up" is the median of the ratios, and "after 2 ms" and "after 10 ms" are
those of single calls after such pauses. "shared": `sample(..., noise="shared")` beside
``mu[:, None] + sigma[:, None] * generator.standard_normal(n)`` of NumPy.

Aims: the kernel at (1000, 100) and (100, 100) has 0.85 of its speed at (1000, 1000); two threads are 1.3 times as fast
as one from 2**17 normals on, 1.7 times from 2**18 on, and never slower; shared noise is as fast as NumPy's expression.
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
from bench.suites.machine import describe
from multisample.backends.kernels.cpu.kernel import window_kernel

TURNS, SECONDS = 41, 2e-3  # Of a contender in each turn.
PAUSES = 2, 10  # Milliseconds.

Call = Callable[[], Any]


def take_turns(calls: dict[str, Call]) -> dict[str, list[float]]:
    """Seconds of a call of each contender, in each turn."""
    repeats = {}
    for name, call in calls.items():
        call()
        start = time.perf_counter()
        call()
        repeats[name] = max(1, round(SECONDS / (time.perf_counter() - start)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            times[name].append((time.perf_counter() - start) / repeats[name])
    return times


def take_turns_after_pauses(calls: dict[str, Call], pause: int) -> dict[str, list[float]]:
    """Seconds of a single call of each contender after a pause of `pause` ms, in each turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            time.sleep(1e-3 * pause)
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return times


def speed_up(times: dict[str, list[float]]) -> float:
    return round(statistics.median(one / two for one, two in zip(times["one"], times["two"], strict=True)), 2)


def kernels() -> list[dict[str, Any]]:
    kernel, calls = window_kernel("float32"), {}
    shapes = ((1000, 1000), (1000, 100), (100, 100), (100, 1000))
    for d, n in shapes:
        arrays = np.zeros(d, np.float32), np.ones(d, np.float32), np.empty((d, n), np.float32)
        words = np.uint64(7), np.uint64(0), 0, 0, False
        calls[f"{d}, {n}"] = lambda arrays=arrays, words=words: kernel(*arrays, *words)
    times = {name: statistics.median(values) for name, values in take_turns(calls).items()}
    rates = [d * n / times[f"{d}, {n}"] for d, n in shapes]
    return [
        {"shape": shape, "normals per second": round(rate), "of the first": round(rate / rates[0], 3)}
        for shape, rate in zip(shapes, rates, strict=True)
    ]


def threads() -> list[dict[str, Any]]:
    rows = []
    for backend, array in (("cpu", np.asarray), ("torch_ext", torch.tensor)):
        for d, n in ((256, 256), (512, 256), (100, 1311), (512, 512), (1024, 512), (1000, 1000), (2000, 1000)):
            mu, sigma = array(np.zeros(d, np.float32)), array(np.ones(d, np.float32))
            out = multisample.sample(mu, sigma, n, seed=7, backend=backend)

            def draw(most: int, arguments: Any = (mu, sigma, n), backend: str = backend, out: Any = out) -> None:
                with multisample.limit_threads(most):
                    multisample.sample(*arguments, seed=7, backend=backend, out=out)

            calls: dict[str, Call] = {"one": lambda draw=draw: draw(1), "two": lambda draw=draw: draw(2)}
            times = take_turns(calls)
            rows.append({
                "backend": backend, "shape": (d, n), "normals, log2": round(float(np.log2(d * n)), 2),
                "us, one thread": round(1e6 * statistics.median(times["one"]), 1),
                "us, two threads": round(1e6 * statistics.median(times["two"]), 1),
                "speed-up": speed_up(times),
                **{f"after {ms} ms": speed_up(take_turns_after_pauses(calls, ms)) for ms in PAUSES},
            })  # fmt: skip
    return rows


def shared() -> list[dict[str, Any]]:
    rows, generator = [], np.random.default_rng(7)
    for d, n in ((10, 100), (100, 100), (1000, 100)):
        mu, sigma = np.zeros(d, np.float32), np.ones(d, np.float32)
        times = take_turns({
            "sample": lambda mu=mu, sigma=sigma, n=n: multisample.sample(mu, sigma, n, seed=7, noise="shared"),
            "NumPy": lambda mu=mu, sigma=sigma, n=n: mu[:, None] + sigma[:, None] * generator.standard_normal(n, "f4"),
        })  # fmt: skip
        us = {name: round(1e6 * statistics.median(values), 2) for name, values in times.items()}
        rows.append({"shape": (d, n), "us": us, "NumPy / sample": round(us["NumPy"] / us["sample"], 2)})
    return rows


def main(path: str) -> None:
    results = {"machine": describe(None), "kernel": kernels(), "threads": threads(), "shared": shared()}
    Path(path).write_text(json.dumps(results, indent=1) + "\n")
    for part in ("kernel", "threads", "shared"):
        print(part, *results[part], sep="\n    ")


if __name__ == "__main__":
    main(*sys.argv[1:])
