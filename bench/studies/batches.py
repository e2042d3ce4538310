"""Batches, a matrix for each seed, beside one flattened call, a loop of calls, and the expression that they replace.

python -m bench.studies.batches results.json [cpu] [cuda]

`us` is the median of a call that the device has finished; `ratio` is that of the flattened call of the same size. Seeds
are a list on the host, or an array in the memory of the vectors. The expression is ``mu + sigma * randn`` of the
library, which takes no seeds. "Normal" are the samples of PyTorch's and of our class for these means. "carts" is the
example `multisample.examples.cart_poles`: its draws, and whole control steps with each of them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import multisample
from bench.studies.turns import Call, Row, main, on_host, rows_of
from multisample.examples import cart_pole, cart_poles

# Matrices, dimensions, samples.
CARTS = (256, cart_pole.HORIZON, cart_poles.ROLLOUTS)
SHAPES = {
    "numpy": ((1000, 10, 10), (1, 7, 512), (64, 7, 512)),
    "torch cpu": ((1000, 10, 10), (256, 8, 64), (1, 7, 512), (64, 7, 512)),
    "carts cpu": (CARTS,),
    "torch cuda": ((64, 7, 512), (1, 7, 512), (4096, 12, 32), (100_000, 1, 4), (8, 4096, 1024)),
    "carts cuda": (CARTS, (256, cart_pole.HORIZON, cart_pole.ROLLOUTS)),
}
MOST_LOOP = 5000


def contenders(library: str, device: str, batch: int, d: int, n: int) -> dict[str, Call]:
    seeds, vectors = list(range(batch)), np.linspace(-1, 1, batch * d, dtype=np.float32).reshape(batch, d)
    mu, sigma, own = vectors, np.abs(vectors) + 1, np.array(seeds)
    draw = functools.partial(np.random.default_rng(7).standard_normal, dtype=np.float32)
    if library == "torch":
        mu, sigma, own = (torch.from_numpy(x).to(device) for x in (mu, sigma, own))
        draw = functools.partial(torch.randn, device=device)
    sample, flat = multisample.sample, (mu.reshape(-1), sigma.reshape(-1))
    calls: dict[str, Call] = {
        "flattened": lambda: sample(*flat, n, seed=7),
        "seeds in an array": lambda: sample(mu, sigma, n, seed=own),
        "seeds in a list": lambda: sample(mu, sigma, n, seed=seeds),
        "expression": lambda: mu[..., None] + sigma[..., None] * draw((batch, d, n)),
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


def rows(where: str) -> Iterator[Row]:
    def wait(result: Any) -> None:
        if where == "cuda":
            torch.cuda.synchronize()

    for kind, shapes in SHAPES.items():
        library, _, device = kind.partition(" ")
        for shape in shapes if (device or "cpu") == where else ():
            batch, _, n = shape
            calls = controllers(device, batch, n) if library == "carts" else contenders(library, device, *shape)
            yield from rows_of(f"{kind} {'x'.join(map(str, shape))}", on_host(calls, wait), "flattened")


if __name__ == "__main__":
    main(__doc__ or "", {where: functools.partial(rows, where) for where in ("cpu", "cuda")})
