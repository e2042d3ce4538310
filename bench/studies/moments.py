"""`weighted_moments` beside `sample` alone, and PyTorch: time and memory.

Arrays are PyTorch tensors on a GPU. `us` is the median time between device events; `host us` is the time of a call on
the host. `MB` is the memory that a call needs beside its arguments, at its peak. "elites" has a random tenth of the
weights.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

import multisample
from bench.report.results import Row
from bench.studies.rows import main, peak, rows_of
from bench.suites.timing import Call, on_device

SHAPES = (4096, 65_536), (100, 100_000), (100_000_000, 64)


def contenders(d: int, n: int) -> dict[str, Call]:
    generator = torch.Generator("cuda").manual_seed(1)
    weights = torch.randn(n, device="cuda", generator=generator)
    elites = torch.where(torch.rand(n, device="cuda", generator=generator) < 0.1, weights, 0.0)
    mu, sigma = torch.linspace(-1, 1, d, device="cuda"), torch.linspace(1, 2, d, device="cuda")
    weights_of_host = weights.tolist()

    def accumulated() -> Any:
        total = torch.zeros_like(mu)
        for w in weights_of_host:
            total.add_(torch.randn_like(mu), alpha=w)
        return total

    moments, calls = multisample.weighted_moments, {}
    for mode, fast in (("", False), (", fast_math", True)):
        options: dict[str, Any] = {"seed": 7, "fast_math": fast, "backend": "torch_ext"}
        calls[f"sample{mode}"] = functools.partial(multisample.sample, mu, sigma, n, **options)
        for order in (2, 1):
            call = functools.partial(moments, weights, mu, sigma, order=order, **options)
            calls[f"order {order}, torch_ext{mode}"] = call
        calls[f"elites, torch_ext{mode}"] = functools.partial(moments, elites, mu, sigma, **options)
    if n <= 100:
        calls["torch, accumulated, order 1"] = accumulated
    return calls


def rows() -> Iterator[Row]:
    for d, n in SHAPES:
        calls = contenders(d, n)
        for row in rows_of(f"cuda {d}x{n}", on_device(calls)):
            yield {**row, "MB": peak(calls[row["call"]]) / 1e6}


if __name__ == "__main__":
    main(__doc__ or "", {"cuda": rows})
