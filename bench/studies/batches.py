"""Batches, a matrix for each seed, beside one flattened call, a loop of calls, and the expression that they replace.

python -m bench.studies.batches results.json [cpu] [cuda]

Contenders of a shape take turns, so that a disturbance slows all. `us` is the median over the turns of a call that the
device has finished; `ratio` is that of the flattened call of the same size. Seeds are a list on the host, or an array
in the memory of the vectors. The expression is ``mu + sigma * randn`` of the library, which takes no seeds.
"Normal" are the samples of PyTorch's and of our class for these means, of shape (n, B, d). "carts" is the example
`multisample.examples.cart_poles`: its draws, and whole control steps with each of them.

Predicted before the first run, for two CPU cores: NumPy's batch of (10, 10) is 5 times as fast as its expression, and
20 times as fast as the loop; a batch of one costs 12 us more than the plain call, for reading the seeds. For an H200:
at (64, 7, 512), 1.1 of the flattened call with seeds on the device, and 10 us more with a list, for the copy.
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
from multisample.examples import cart_pole, cart_poles

# Matrices, dimensions, samples.
SHAPES = {
    "numpy": ((1000, 10, 10), (1, 7, 512), (64, 7, 512)),
    "torch cpu": ((1000, 10, 10), (256, 8, 64), (1, 7, 512), (64, 7, 512)),
    "carts cpu": ((256, cart_pole.HORIZON, cart_poles.ROLLOUTS),),
    "torch cuda": ((64, 7, 512), (1, 7, 512), (4096, 12, 32), (100_000, 1, 4), (8, 4096, 1024)),
    "carts cuda": ((256, cart_pole.HORIZON, cart_poles.ROLLOUTS), (256, cart_pole.HORIZON, cart_pole.ROLLOUTS)),
}
TURNS, SECONDS, MOST_LOOP = 25, 2.0, 5000

Call = Callable[[], Any]


def contenders(kind: str, batch: int, d: int, n: int) -> dict[str, Call]:
    """Functions without arguments, by name."""
    library, _, device = kind.partition(" ")
    seeds, vectors = list(range(batch)), np.linspace(-1, 1, batch * d, dtype=np.float32).reshape(batch, d)
    if library == "numpy":
        draw = np.random.default_rng(7).standard_normal
        mu, sigma, own = vectors, np.abs(vectors) + 1, np.array(seeds)

        def expression() -> Any:
            return mu[..., None] + sigma[..., None] * draw((batch, d, n), np.float32)
    else:
        mu = torch.from_numpy(vectors).to(device)
        sigma, own = mu.abs() + 1, torch.tensor(seeds, device=device)

        def expression() -> Any:
            return mu[..., None] + sigma[..., None] * torch.randn(batch, d, n, device=device)

    sample, flat = multisample.sample, (mu.reshape(-1), sigma.reshape(-1))
    calls: dict[str, Call] = {
        "flattened": lambda: sample(*flat, n, seed=7),
        "seeds in an array": lambda: sample(mu, sigma, n, seed=own),
        "seeds in a list": lambda: sample(mu, sigma, n, seed=seeds),
        "expression": expression,
    }
    if library == "torch":
        calls["vmap"] = lambda: torch.func.vmap(lambda m, s, k: sample(m, s, n, seed=k))(mu, sigma, own)
        ours, theirs = multisample.torch.Normal(mu, sigma), torch.distributions.Normal(mu, sigma)
        calls["Normal"] = lambda: ours.sample((n,))
        calls["PyTorch's Normal"] = lambda: theirs.sample((n,))
    if batch <= MOST_LOOP:
        calls["loop"] = lambda: [sample(mu[b], sigma[b], n, seed=b) for b in range(batch)]
    return calls


def controllers(device: str, carts: int, rollouts: int) -> dict[str, Call]:
    """The draws of the example, and control steps with them."""
    plans = torch.zeros(carts, cart_pole.HORIZON, device=device)
    states = [torch.full((carts,), x, device=device) for x in (0.0, 0.0, 3.0, 0.0)]
    draws = {name: cart_poles.drawn(torch.arange(carts, device=device), rollouts, name) for name in cart_poles.DRAWS}
    calls: dict[str, Call] = {name: lambda draw=draw: draw(plans) for name, draw in draws.items()}
    for name, draw in draws.items():
        calls[f"step, {name}"] = lambda draw=draw: cart_poles.followed(plans, states, draw(plans))
    return calls


def measured(kind: str, batch: int, d: int, n: int) -> list[dict[str, Any]]:
    library, _, device = kind.partition(" ")
    calls = controllers(device, batch, n) if library == "carts" else contenders(kind, batch, d, n)
    wait: Call = torch.cuda.synchronize if kind.endswith("cuda") else lambda: None
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    repeats = {name: max(1, int(2e-3 / seconds(call, 1, wait))) for name, call in calls.items()}
    end = time.perf_counter() + SECONDS * len(calls)
    for turn in range(TURNS):
        if turn >= 3 and time.perf_counter() > end:
            break
        for name, call in calls.items():
            times[name].append(seconds(call, repeats[name], wait))
    us = {name: statistics.median(taken) * 1e6 for name, taken in times.items()}
    return [
        {
            "kind": kind,
            "shape": [batch, d, n],
            "contender": name,
            "us": round(x, 2),
            "ratio": round(x / us["flattened"], 3),
        }
        for name, x in us.items()
    ]


def seconds(call: Call, count: int, wait: Call) -> float:
    wait()
    start = time.perf_counter()
    for _ in range(count):
        call()
    wait()
    return (time.perf_counter() - start) / count


def main() -> None:
    path, *devices = sys.argv[1:]
    devices = devices or ["cpu"]
    kinds = [kind for kind in SHAPES if ("cuda" if kind.endswith("cuda") else "cpu") in devices]
    rows = [row for kind in kinds for shape in SHAPES[kind] for row in measured(kind, *shape)]
    Path(path).write_text(json.dumps({"machine": describe(None), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
