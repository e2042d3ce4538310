"""Noise for model parameters, beside the loops of PyTorch that it replaces.

`us` is the time per member of a call in place, from GPU events around five calls in a row. "loop" is what a call
replaces, for each tensor and member: ``p.add_(torch.randn_like(p), alpha=c)``. "loop with a generator" seeds a
generator for each tensor, draws, multiplies and adds, as published code does. ``mul_`` only reads and writes each
tensor. `host us` is the time until the call returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch

from bench.report.results import Row
from bench.studies.rows import main, rows_of
from bench.suites.timing import Call, on_device
from multisample.torch import perturb_

Shapes: TypeAlias = list[tuple[int, ...]]

# The tensors of OPT-1.3B (Zhang et al., arXiv:2205.01068): 388, with 24 layers.
OPT_LAYER: Shapes = [*4 * [(2048, 2048), (2048,)], *4 * [(2048,)], (8192, 2048), (8192,), (2048, 8192), (2048,)]
OPT: Shapes = [(50272, 2048), (2050, 2048), *24 * OPT_LAYER, (2048,), (2048,)]
# The tensors of Llama 2 7B (Touvron et al., arXiv:2307.09288): 291, with 32 layers.
LLAMA_LAYER: Shapes = [*4 * [(4096, 4096)], *2 * [(11008, 4096)], (4096, 11008), *2 * [(4096,)]]
LLAMA: Shapes = [(32000, 4096), *32 * LLAMA_LAYER, (4096,), (32000, 4096)]
MODELS: dict[str, tuple[str, Shapes, int]] = {
    # The type, the shapes, and the members of an update.
    "cuda 2^28 float32": ("float32", [(1 << 28,)], 30),
    "cuda 2^28 bfloat16": ("bfloat16", [(1 << 28,)], 30),
    "cuda OPT-1.3B bfloat16": ("bfloat16", OPT, 30),
    "cuda Llama 7B bfloat16": ("bfloat16", LLAMA, 30),
    "cuda 388 tensors of 100": ("float32", [(100,)] * 388, 8),
}


def contenders(tensors: list[torch.Tensor], members: int) -> dict[str, Call]:
    coefficients = 1e-3 if members == 1 else torch.full((members,), 1e-3, device="cuda")
    generator = torch.Generator("cuda")

    def loop() -> None:
        for x in tensors:
            x.add_(torch.randn_like(x), alpha=1e-3)

    def generator_loop() -> None:
        for x in tensors:
            generator.manual_seed(7)
            x.add_(1e-3 * torch.randn(x.shape, generator=generator, dtype=x.dtype, device="cuda"))

    calls: dict[str, Call] = {
        "perturb_": lambda: perturb_(tensors, coefficients, seed=7),
        "perturb_, fast_math": lambda: perturb_(tensors, coefficients, seed=7, fast_math=True),
    }
    loops = {"loop": loop, "loop with a generator": generator_loop, "mul_": lambda: [x.mul_(0.5) for x in tensors]}
    return calls | (loops if members == 1 else {})


def rows() -> Iterator[Row]:
    for model, (dtype, shapes, most) in MODELS.items():
        tensors = [torch.zeros(shape, dtype=getattr(torch, dtype), device="cuda") for shape in shapes]
        for members in (1, most):
            for row in rows_of(f"{model}, {members} members", on_device(contenders(tensors, members), row=5, fills=0)):
                yield {**row, "us": row["us"] / members}


if __name__ == "__main__":
    main(__doc__ or "", {"cuda": rows})
