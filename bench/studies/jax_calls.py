"""Calls in jitted functions of JAX, beside `mu + sigma * jax.random.normal` in a jitted function.

python -m bench.studies.jax_calls results.json [cpu] [cuda]

`us` is the time of a call that is waited for. `queued us` is the time of each of several calls of which only the last
is waited for: throughput, where the device takes longer than the host. All contenders of a shape take turns, so that
what disturbs one disturbs all: times are medians over the turns, and ratios are medians of the ratios within a turn,
time of the contender by time of "sample, jit". An unmeasured call precedes each measurement, so that no contender pays
for the memory that another one returned.

"normal" draws with threefry, "rbg" with JAX's generator of that name. "gradient" is of a loss that is linear in the
sample, with respect to mu and sigma. "torch_ext" is a call with PyTorch tensors on the same device.

Aims: on an H200, queued, "normal" at least 4 and "rbg" at least 2.5 at (4096, 65536) and (262144, 1024), "torch_ext" at
least 0.97 there; waited for, "normal" at least 0.83 at (100, 1024). On two CPU cores "normal" at least 10 at
(1000, 10000) and 2 at (10, 10), and "sample, eager" at most 40 us there.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import multisample
from bench.suites.cases import clamp
from bench.suites.machine import describe
from multisample.exceptions import BackendUnavailableError

SHAPES = {
    "cpu": ((10, 10), (100, 1024), (1000, 10_000)),
    "cuda": ((10, 10), (100, 1024), (4096, 65_536), (262_144, 1024)),
}
TURNS = 21
SECONDS = 0.03  # Of one turn, at least: short calls are made several times.

Call = Callable[[], Any]


def served(platform: str) -> list[str]:
    """The backends that can run on the platform."""
    found = []
    for name in multisample.list_backends():
        try:
            multisample._backends.choose(name, "jax", platform)
        except (BackendUnavailableError, ValueError):
            continue
        found.append(name)
    return found


def contenders(platform: str, d: int, n: int) -> dict[str, Call]:
    """Functions of no argument that return what is to be waited for."""
    mu, sigma = jnp.linspace(-1, 1, d, dtype=jnp.float32), jnp.linspace(1, 2, d, dtype=jnp.float32)
    key, rbg = jax.random.key(0), jax.random.key(0, impl="rbg")

    def ours(**options: Any) -> Call:
        draw = jax.jit(lambda mu, sigma, key: multisample.sample(mu, sigma, n, seed=key, **options))
        return lambda: draw(mu, sigma, key)

    normal = jax.jit(lambda mu, sigma, key: mu[:, None] + sigma[:, None] * jax.random.normal(key, (d, n)))
    calls: dict[str, Call] = {
        "sample, jit": ours(),
        "normal": lambda: normal(mu, sigma, key),
        "rbg": lambda: normal(mu, sigma, rbg),
        "sample, eager": lambda: multisample.sample(mu, sigma, n, seed=7),
        "sample, eager, key": lambda: multisample.sample(mu, sigma, n, seed=key),
    }
    for name in served(platform):
        calls[f"sample, jit, {name}"] = ours(backend=name)
        if platform == "cuda":
            calls[f"sample, jit, {name}, fast_math"] = ours(backend=name, fast_math=True)
    g = jnp.ones((d, n), jnp.float32)
    draws: dict[str, Callable[..., Any]] = {
        "gradient": lambda mu, sigma: multisample.sample(mu, sigma, n, seed=7),
        "gradient of normal": lambda mu, sigma: mu[:, None] + sigma[:, None] * jax.random.normal(key, (d, n)),
    }
    for name, draw in draws.items():
        gradient = jax.jit(jax.grad(lambda mu, sigma, g, draw=draw: (g * draw(mu, sigma)).sum(), (0, 1)))
        calls[name] = lambda gradient=gradient: gradient(mu, sigma, g)
    if platform == "cuda" and "torch_ext" in served("cuda"):
        import torch

        tensors = [torch.from_numpy(np.array(x)).cuda() for x in (mu, sigma)]
        for name, options in {"torch_ext": {}, "torch_ext, fast_math": {"fast_math": True}}.items():
            calls[name] = lambda options=options: multisample.sample(*tensors, n, seed=7, **options)
    return calls


def wait(result: Any) -> None:
    if type(result).__module__ == "torch":
        sys.modules["torch"].cuda.synchronize()
    else:
        jax.block_until_ready(result)


def seconds(call: Call, repeats: int) -> tuple[float, float]:
    """The time of a call that is waited for, and of a call in a queue of calls."""
    wait(call())
    start = time.perf_counter()
    for _ in range(repeats):
        wait(call())
    waited = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(repeats):
        result = call()
    wait(result)
    return waited / repeats, (time.perf_counter() - start) / repeats


def measured(platform: str, d: int, n: int) -> list[dict[str, Any]]:
    calls = contenders(platform, d, n)
    repeats = {name: clamp(SECONDS / seconds(call, 3)[0], 1, 2000) for name, call in calls.items()}
    turns = [{name: seconds(call, repeats[name]) for name, call in calls.items()} for _ in range(TURNS)]
    rows = []
    for name in calls:
        row: dict[str, Any] = {"platform": platform, "shape": (d, n), "call": name}
        for i, kind in enumerate(("", "queued ")):
            row[f"{kind}us"] = round(1e6 * statistics.median(turn[name][i] for turn in turns), 2)
            ratios = (turn[name][i] / turn["sample, jit"][i] for turn in turns)
            row[f"{kind}ratio"] = round(statistics.median(ratios), 3)
        rows.append(row)
    return rows


def main(path: str, *platforms: str) -> None:
    rows = []
    for platform in platforms or SHAPES:
        try:
            device = jax.devices(platform)[0]
        except RuntimeError:
            continue
        with jax.default_device(device):
            for d, n in SHAPES[platform]:
                rows += measured(platform, d, n)
    devices = sorted({device.device_kind for device in jax.devices()})
    Path(path).write_text(
        json.dumps({"machine": describe(None) | {"devices": devices}, "calls": rows}, indent=1) + "\n"
    )
    for row in rows:
        times = (f"{row[name]:>11}" for name in ("us", "ratio", "queued us", "queued ratio"))
        print(row["platform"], row["shape"], f"{row['call']:<36}", *times)


if __name__ == "__main__":
    main(*sys.argv[1:])
