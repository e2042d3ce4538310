"""`weighted_moments` beside `sample` alone, `sample` and a product, and PyTorch: time and memory.

python -m bench.studies.moments results.json [cpu] [cuda]

Arrays are PyTorch tensors. Contenders of a shape take turns, so that a disturbance slows all; `us` is the median over
the turns, on a GPU of the time between device events, with the device busy until the call has been made. `host_us` is
the time of a call on the host. `mb` is the memory that a call needs on a GPU beside its arguments, at its peak. `ratio`
is the time divided by that of `sample` in the same mode, which only draws. "elites" has a random tenth of the weights.

Aims, on an H200: at (4096, 65536) at most 1.05 of `sample` in the same mode; at (10^8, 64) with order 1 at least 3.5
times as fast as "torch, accumulated" in portable mode and 5 times with fast_math, in at most twice the parameters'
memory beside them.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import multisample
from bench.suites.machine import describe

SHAPES = {
    "cpu": ((10, 100), (100, 1000), (1000, 10_000)),
    "cuda": ((4096, 65_536), (100, 100_000), (1000, 1000), (10, 1000), (100_000_000, 64)),
}
TURNS, SECONDS = 9, 1.0  # Of all turns of a contender, at most, unless there are fewer than 3.
BUSY = 2**28  # Bytes whose fill takes longer than a call on the host.

Call = Callable[[], Any]


def contenders(device: str, d: int, n: int) -> dict[str, Call]:
    """Functions without arguments, by name."""
    generator = torch.Generator(device).manual_seed(1)
    weights = torch.randn(n, device=device, generator=generator)
    elites = torch.where(torch.rand(n, device=device, generator=generator) < 0.1, weights, 0.0)
    mu, sigma = torch.linspace(-1, 1, d, device=device), torch.linspace(1, 2, d, device=device)
    modes: dict[str, dict[str, Any]] = {"": {}}
    if device == "cuda":
        modes[", fast_math"] = {"fast_math": True}
    candidates = ("torch_ext", "cupy", "numba") if device == "cuda" else ("torch_ext", "cpu")
    names = [name for name in candidates if multisample.list_backends()[name].available]
    calls: dict[str, Call] = {}

    def add(name: str, call: Call) -> None:
        calls[name] = call

    def products(x: Any) -> Any:
        return x @ weights, ((x - mu[:, None]) ** 2) @ weights

    def accumulated() -> Any:
        total = torch.zeros_like(mu)
        for w in of_weights:
            total.add_(torch.randn_like(mu), alpha=w)
        return total

    def torch_matrix() -> Any:
        return products(mu[:, None] + sigma[:, None] * torch.randn(d, n, device=device))

    few = n <= 100
    of_weights = weights.tolist() if few else []
    for mode, options in modes.items():
        add(f"sample{mode}", lambda options=options: multisample.sample(mu, sigma, n, seed=7, **options))
        for backend in names:
            for order in (2, 1):
                add(
                    f"order {order}, {backend}{mode}",
                    lambda options=options, backend=backend, order=order: multisample.weighted_moments(
                        weights, mu, sigma, seed=7, order=order, backend=backend, **options
                    ),
                )
        add(
            f"elites, {names[0]}{mode}",
            lambda options=options: multisample.weighted_moments(elites, mu, sigma, seed=7, **options),
        )
        if few:
            add(
                f"sample and product, order 1{mode}",
                lambda options=options: multisample.sample(mu, sigma, n, seed=7, **options) @ weights,
            )
        else:
            add(
                f"sample and products{mode}",
                lambda options=options: products(multisample.sample(mu, sigma, n, seed=7, **options)),
            )
    add("torch, accumulated, order 1", accumulated) if few else add("torch", torch_matrix)
    return calls


def device_seconds(device: str, call: Call, busy: Any) -> float:
    if device == "cpu":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    busy.zero_()
    first.record()
    call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def host_seconds(call: Call) -> float:
    start = time.perf_counter()
    for _ in range(20):
        call()
    return (time.perf_counter() - start) / 20


def memory(call: Call) -> float:
    """Megabytes at the peak of a call, beside what there is before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def measured(device: str, d: int, n: int) -> list[dict[str, Any]]:
    calls = contenders(device, d, n)
    busy = torch.empty(BUSY if device == "cuda" else 1, dtype=torch.uint8, device=device)
    needed, longest = {}, 0.0
    for name, call in calls.items():
        call()  # Compiles.
        needed[name] = round(memory(call), 3) if device == "cuda" else None
        longest = max(longest, device_seconds(device, call, busy))
        if device == "cuda":
            torch.cuda.empty_cache()
    turns = max(3, min(TURNS, int(SECONDS / longest))) if longest > 0.01 else 4 * TURNS
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            times[name].append(device_seconds(device, call, busy))
    us = {name: 1e6 * statistics.median(values) for name, values in times.items()}
    rows = []
    for name, call in calls.items():
        host = round(1e6 * host_seconds(call), 1) if us[name] < 1000 else None
        base = us["sample, fast_math" if "fast_math" in name else "sample"]
        rows.append(
            {
                "device": device, "shape": (d, n), "call": name, "us": round(us[name], 2),
                "ratio": round(us[name] / base, 3), "host_us": host, "mb": needed[name],
            }
        )  # fmt: skip
    return rows


def main(path: str, *devices: str) -> None:
    rows = []
    for device in devices or SHAPES:
        if device == "cuda" and not torch.cuda.is_available():
            continue
        for d, n in SHAPES[device]:
            for row in measured(device, d, n):
                print(
                    row["device"],
                    row["shape"],
                    f"{row['call']:<40}",
                    f"{row['us']:>12}",
                    row["ratio"],
                    row["host_us"],
                    row["mb"],
                    flush=True,
                )
                rows.append(row)
    Path(path).write_text(json.dumps({"machine": describe(None), "calls": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
