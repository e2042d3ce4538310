"""Noise for model parameters, beside the loops of PyTorch that it replaces.

`us` is the time per member of a call in place, from GPU events around five calls in a row. In rows of populations, of
64 members of 2^20 parameters, it is that of a call. "loop" is what a call replaces, for each tensor and member. "loop
with a generator" seeds a generator for each tensor, as published code does. `host us` is the time until a call returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TypeAlias

import torch

from bench.report.results import Row
from bench.studies.rows import main, rows_of
from bench.suites.timing import Call, on_device, on_host
from multisample import perturb
from multisample.torch import perturb_

Shapes: TypeAlias = list[tuple[int, ...]]

# The tensors of OPT-1.3B (Zhang et al., arXiv:2205.01068): 388, with 24 layers.
OPT_LAYER: Shapes = [*4 * [(2048, 2048), (2048,)], *4 * [(2048,)], (8192, 2048), (8192,), (2048, 8192), (2048,)]
OPT: Shapes = [(50272, 2048), (2050, 2048), *24 * OPT_LAYER, (2048,), (2048,)]
# The tensors of Llama 2 7B (Touvron et al., arXiv:2307.09288): 291, with 32 layers.
LLAMA_LAYER: Shapes = [*4 * [(4096, 4096)], *2 * [(11008, 4096)], (4096, 11008), *2 * [(4096,)]]
LLAMA: Shapes = [(32000, 4096), *32 * LLAMA_LAYER, (4096,), (32000, 4096)]
MODELS: dict[str, tuple[str, Shapes, int]] = {  # The type, the shapes, and the members of an update.
    "cuda 2^28 float32": ("float32", [(1 << 28,)], 30),
    "cuda 2^28 bfloat16": ("bfloat16", [(1 << 28,)], 30),
    "cuda OPT-1.3B bfloat16": ("bfloat16", OPT, 30),
    "cuda Llama 7B bfloat16": ("bfloat16", LLAMA, 30),
    "cuda 388 tensors of 100": ("float32", [(100,)] * 388, 8),
}


def contenders(tensors: list[torch.Tensor], members: int) -> dict[str, Call]:
    coefficients = 1e-3 if members == 1 else torch.full((members,), 1e-3, device="cuda")
    generator = torch.Generator("cuda")

    def generator_loop() -> None:
        for x in tensors:
            generator.manual_seed(7)
            x.add_(1e-3 * torch.randn(x.shape, generator=generator, dtype=x.dtype, device="cuda"))

    calls: dict[str, Call] = {"perturb_": lambda: perturb_(tensors, coefficients, seed=7)}
    calls["perturb_, fast_math"] = lambda: perturb_(tensors, coefficients, seed=7, fast_math=True)
    loops = {
        "loop": lambda: [x.add_(torch.randn_like(x), alpha=1e-3) for x in tensors],
        "loop with a generator": generator_loop, "mul_": lambda: [x.mul_(0.5) for x in tensors],
    }  # fmt: skip
    return calls | (loops if members == 1 else {})


def rows() -> Iterator[Row]:
    for model, (dtype, shapes, most) in MODELS.items():
        tensors = [torch.zeros(shape, dtype=getattr(torch, dtype), device="cuda") for shape in shapes]
        for members in (1, most):
            for row in rows_of(f"{model}, {members} members", on_device(contenders(tensors, members), row=5, fills=0)):
                yield {**row, "us": row["us"] / members}


def populations(place: str) -> Iterator[Row]:
    p, out, weights = (torch.zeros(shape, device=place) for shape in ((1 << 20,), (64, 1 << 20), (64,)))
    seeds = torch.arange(64, device=place)
    calls: dict[str, Call] = {
        "update by members": lambda: perturb_(p, weights, seed=7),
        "update by seeds": lambda: perturb_(p, weights, seed=seeds),
        "64 members": lambda: perturb(p, 0.1, seed=7, member=seeds, out=out),
        "64 seeds": lambda: perturb(p, 0.1, seed=seeds, out=out),
        "one launch of as many bytes": lambda: perturb_(out, 0.1, seed=7),
        "loop": lambda: [torch.add(p, torch.randn_like(p), alpha=0.1, out=x) for x in out],
    }
    yield from rows_of(f"{place} population", (on_host if place == "cpu" else on_device)(calls), "loop")


if __name__ == "__main__":
    main(__doc__ or "", {"cuda": rows, **{f"{x} population": partial(populations, x) for x in ("cpu", "cuda")}})
