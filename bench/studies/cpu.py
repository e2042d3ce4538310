"""The CPU: threads on small, middle and large matrices, and shared noise beside NumPy.

python -m bench.studies.cpu results.json [threads] [cores] [shared]

"threads": `sample(..., out=)` on one thread and on two; "after 2 ms" and "after 10 ms" are speed-ups of single calls
after such pauses. "cores": the same at (1000, 10000) on 1, 2, 4, ... threads. "shared": the time of shared noise,
divided by that of NumPy's expression.
"""

import functools
import time
from typing import Any

import numpy as np
import torch

import multisample
from bench.studies.rows import Call, Rows, main, on_host, rows_of
from multisample.backends.system.threads import thread_count

TURNS = 41
ARRAYS = {"cpu": np.asarray, "torch_ext": torch.tensor}


def drawing(backend: str, d: int, n: int, threads: int) -> Call:
    mu, sigma = (ARRAYS[backend](np.full(d, value, np.float32)) for value in (0, 1))
    keywords: dict[str, Any] = {"seed": 7, "backend": backend}
    keywords["out"] = multisample.sample(mu, sigma, n, **keywords)

    def draw() -> None:
        with multisample.limit_threads(threads):
            multisample.sample(mu, sigma, n, **keywords)

    return draw


def after_pauses(one: Call, two: Call, pause: float) -> float:
    """The speed-up of single calls, each after a pause of so many seconds."""
    found = on_host({"one": one, "two": two}, lambda result: time.sleep(pause), TURNS, repeats=1)
    return float(next(rows_of("", found, "two", "host"))["ratio"])


def threads() -> Rows:
    for backend in ARRAYS:
        for d, n in ((256, 256), (512, 256), (100, 1311), (512, 512), (1024, 512), (1000, 1000)):
            one, two = (drawing(backend, d, n, count) for count in (1, 2))
            first, second = rows_of(f"threads {d}x{n}", on_host({"one": one, "two": two}, turns=TURNS), "two")
            pauses = {f"after {ms} ms": after_pauses(one, two, 1e-3 * ms) for ms in (2, 10)}
            yield {"case": first["case"], "call": backend, "us": second["us"], "speed-up": first["ratio"], **pauses}


def cores() -> Rows:
    most, d, n = thread_count(), 1000, 10_000
    counts = sorted({*(2**k for k in range(most.bit_length())), most})
    for backend in ARRAYS:
        calls = {f"{backend}, {count} threads": drawing(backend, d, n, count) for count in counts}
        for row in rows_of(f"cores {d}x{n}", on_host(calls, turns=TURNS), f"{backend}, 1 threads"):
            speeds = {"speed-up": 1 / row["ratio"], "GB/s": 4e-3 * d * n / row["us"]}
            yield {"case": row["case"], "call": row["call"], "us": row["us"], **speeds}


def shared() -> Rows:
    rng = np.random.default_rng(7)

    def expression(mu: Any, sigma: Any, n: int) -> Any:
        return mu[:, None] + sigma[:, None] * rng.standard_normal(n, np.float32)

    for d, n in ((100, 100), (1000, 100)):
        arguments = np.zeros(d, np.float32), np.ones(d, np.float32), n
        calls = {
            "cpu": functools.partial(multisample.sample, *arguments, seed=7, noise="shared"),
            "NumPy": functools.partial(expression, *arguments),
        }
        yield from rows_of(f"shared {d}x{n}", on_host(calls, turns=TURNS), "NumPy")


if __name__ == "__main__":
    main(__doc__ or "", {part.__name__: part for part in (threads, cores, shared)})
