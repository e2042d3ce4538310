"""A large matrix on many cores of a CPU, beside the speed of its memory.

python -m bench.studies.cpu_cores results.json

"sample": `sample(..., out=)` at (1000, 10000) and (1000, 100000) on 1, 2, 4, ... threads, in turns; "speed-up" is the
median of the ratios to one thread. "memory": the kernels Copy (c = a) and Triad (a = b + 3 c) of STREAM (McCalpin,
https://www.cs.virginia.edu/stream/) and a fill, by PyTorch on the same numbers of threads, over float32 arrays of the
same sizes. STREAM counts the bytes that a kernel reads and writes.

Aim: on 16 cores, 12 times the speed of one at (1000, 10000), or the speed at which the memory is written.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import multisample
from bench.studies.cpu_middle import Call, take_turns
from bench.suites.machine import describe
from multisample.backends.system.threads import thread_count

SHAPES = ((1000, 10_000), (1000, 100_000))


def counts() -> list[int]:
    """1, 2, 4, ..., and the number of all processors."""
    most = thread_count()
    return sorted({*(2**k for k in range(most.bit_length())), most})


def on_threads(call: Call, count: int) -> Call:
    def run() -> None:
        with multisample.limit_threads(count):
            call()

    return run


def samples() -> list[dict[str, Any]]:
    rows = []
    for d, n in SHAPES:
        for backend, array in (("cpu", np.asarray), ("torch_ext", torch.tensor)):
            mu, sigma = array(np.zeros(d, np.float32)), array(np.ones(d, np.float32))
            out = multisample.sample(mu, sigma, n, seed=7, backend=backend)

            def draw(arguments: Any = (mu, sigma, n), backend: str = backend, out: Any = out) -> None:
                multisample.sample(*arguments, seed=7, backend=backend, out=out)

            times = take_turns({str(count): on_threads(draw, count) for count in counts()})
            for count in counts():
                median = statistics.median(times[str(count)])
                ratios = [one / many for one, many in zip(times["1"], times[str(count)], strict=True)]
                rows.append({
                    "backend": backend, "shape": (d, n), "threads": count, "ms": round(1e3 * median, 3),
                    "speed-up": round(statistics.median(ratios), 2), "GB/s": round(4e-9 * d * n / median, 1),
                })  # fmt: skip
    return rows


def memory() -> list[dict[str, Any]]:
    rows = []
    before = torch.get_num_threads()
    for d, n in SHAPES:
        a, b, c = (torch.ones(d * n) for _ in range(3))
        calls: dict[str, tuple[Call, int]] = {
            "fill": (lambda a=a: a.fill_(2), 1),
            "copy": (lambda a=a, c=c: c.copy_(a), 2),
            "triad": (lambda a=a, b=b, c=c: torch.add(b, c, alpha=3, out=a), 3),
        }
        for count in counts():
            torch.set_num_threads(count)
            times = take_turns({name: call for name, (call, _) in calls.items()})
            for name, (_, arrays) in calls.items():
                speed = round(4e-9 * d * n * arrays / statistics.median(times[name]), 1)
                rows.append({"kernel": name, "elements": d * n, "threads": count, "GB/s": speed})
    torch.set_num_threads(before)
    return rows


def main(path: str) -> None:
    results = {"machine": describe(None), "sample": samples(), "memory": memory()}
    Path(path).write_text(json.dumps(results, indent=1) + "\n")
    for part in ("sample", "memory"):
        print(part, *results[part], sep="\n    ")


if __name__ == "__main__":
    main(*sys.argv[1:])
