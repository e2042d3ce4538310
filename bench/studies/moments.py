"""`weighted_moments` beside `sample` alone, `sample` and a product, and PyTorch: time and memory.

python -m bench.studies.moments results.json [cpu] [cuda]

Arrays are PyTorch tensors. `us` is the median time, on a GPU between device events; `host us` is the time of a call on
the host. `MB` is the memory that a call needs on a GPU beside its arguments, at its peak. "elites" has a random tenth
of the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

import multisample
from bench.studies.turns import Call, Row, cuda_device, main, on_device, on_host, rows_of

SHAPES = {
    "cpu": ((10, 100), (100, 1000), (1000, 10_000)),
    "cuda": ((4096, 65_536), (100, 100_000), (1000, 1000), (10, 1000), (100_000_000, 64)),
}


def contenders(device: str, d: int, n: int) -> dict[str, Call]:
    generator = torch.Generator(device).manual_seed(1)
    weights = torch.randn(n, device=device, generator=generator)
    elites = torch.where(torch.rand(n, device=device, generator=generator) < 0.1, weights, 0.0)
    mu, sigma = torch.linspace(-1, 1, d, device=device), torch.linspace(1, 2, d, device=device)
    candidates = ("torch_ext", "cupy", "numba") if device == "cuda" else ("torch_ext", "cpu")
    names = [name for name in candidates if multisample.list_backends()[name].available]
    few = n <= 100

    def products(x: Any) -> Any:
        return x @ weights if few else (x @ weights, ((x - mu[:, None]) ** 2) @ weights)

    def accumulated() -> Any:
        total = torch.zeros_like(mu)
        for w in weights_of_host:
            total.add_(torch.randn_like(mu), alpha=w)
        return total

    weights_of_host = weights.tolist()
    moments, sample, calls = multisample.weighted_moments, multisample.sample, {}
    for fast in (False, True) if device == "cuda" else (False,):
        mode, options = ", fast_math" * fast, {"seed": 7, "fast_math": fast}
        draw = functools.partial(sample, mu, sigma, n, **options)
        calls[f"sample{mode}"] = draw
        for backend in names:
            for order in (2, 1):
                keywords = {**options, "order": order, "backend": backend}
                calls[f"order {order}, {backend}{mode}"] = functools.partial(moments, weights, mu, sigma, **keywords)
        calls[f"elites, {names[0]}{mode}"] = functools.partial(moments, elites, mu, sigma, **options)
        calls[f"sample and products{mode}"] = lambda draw=draw: products(draw())
    if few:
        calls["torch, accumulated, order 1"] = accumulated
    else:
        calls["torch"] = lambda: products(mu[:, None] + sigma[:, None] * torch.randn(d, n, device=device))
    return calls


def memory(call: Call) -> float:
    """Megabytes at the peak of a call, beside what there is before it."""
    cuda_device().release()
    cuda_device().wait()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    cuda_device().wait()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def rows(device: str) -> Iterator[Row]:
    for d, n in SHAPES[device]:
        calls = contenders(device, d, n)
        for row in rows_of(f"{device} {d}x{n}", on_host(calls) if device == "cpu" else on_device(calls)):
            yield row if device == "cpu" else {**row, "MB": memory(calls[row["call"]])}


if __name__ == "__main__":
    main(__doc__ or "", {device: functools.partial(rows, device) for device in SHAPES})
