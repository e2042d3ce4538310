"""Noise for model parameters, beside the loops of PyTorch that it replaces.

python -m bench.studies.perturb results.json [cuda] [cuda-population] [cuda-transformer]

`us` is the time of a call in place, from GPU events around calls in a row, and `host us` the time until it returns.

"cuda": the tensors of models, where `us` is the time per member. "loop" is what a call replaces, for each tensor and
member. "loop with a generator" seeds a generator for each tensor, as published code does. "cuda-population": 64 members
of 2^20 parameters.

"cuda-transformer": MeZO and an evolution strategy on OPT-1.3B of `transformers` with random weights. "two forward
passes" is the least that a step of MeZO takes. "perturbation" adds the noise of one member in place. "loop" is
published code. A step of MeZO makes four such passes with the loop, and three with `perturb_`, since one call goes
back and updates. A step of the evolution strategy has MEMBERS members, each with a forward pass. The loop adds each
member's noise, subtracts the noise after the forward pass, and adds the noise again for the update.
"""

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from bench.studies.rows import Call, Rows, main, on_device, rows_of
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


def updates(tensors: list[torch.Tensor], members: int) -> dict[str, Call]:
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


def models() -> Rows:
    for model, (dtype, shapes, most) in MODELS.items():
        tensors = [torch.zeros(shape, dtype=getattr(torch, dtype), device="cuda") for shape in shapes]
        for members in (1, most):
            for row in rows_of(f"{model}, {members} members", on_device(updates(tensors, members), row=5, fills=0)):
                yield {**row, "us": row["us"] / members}


def populations() -> Rows:
    p, out, weights = (torch.zeros(shape, device="cuda") for shape in ((1 << 20,), (64, 1 << 20), (64,)))
    seeds = torch.arange(64, device="cuda")
    calls: dict[str, Call] = {
        "update by members": lambda: perturb_(p, weights, seed=7),
        "update by seeds": lambda: perturb_(p, weights, seed=seeds),
        "64 members": lambda: perturb(p, 0.1, seed=7, member=seeds, out=out),
        "64 seeds": lambda: perturb(p, 0.1, seed=seeds, out=out),
        "loop": lambda: [torch.add(p, torch.randn_like(p), alpha=0.1, out=x) for x in out],
    }
    yield from rows_of("cuda population", on_device(calls), "loop")


SIGMA, RATE, MEMBERS = 1e-3, 1e-6, 8


def opt(tied: bool) -> Any:
    """OPT-1.3B (Zhang et al., arXiv:2205.01068), whose embedding is the output layer if `tied`."""
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        hidden_size=2048, word_embed_proj_dim=2048, ffn_dim=8192, num_hidden_layers=24, num_attention_heads=32,
        tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.device("cuda"):
        return OPTForCausalLM(config).to(torch.bfloat16).eval()


def steps(model: Any) -> dict[str, Call]:
    tried, other = copy.deepcopy(model), copy.deepcopy(model)  # The loop gives parameters new memory.
    text = torch.randint(50272, (16, 256), device="cuda")

    @torch.no_grad()
    def loss(of: Any = model) -> float:
        return float(of(input_ids=text, labels=text).loss)

    @torch.no_grad()
    def loop(scale: float) -> None:
        torch.manual_seed(7)
        for _, x in other.named_parameters():
            x.data = x.data + scale * torch.normal(0.0, 1.0, x.shape, dtype=x.dtype, device=x.device)

    def step(add_noise: Callable[[float], Any], passes: int) -> None:
        add_noise(SIGMA)
        above = loss()
        add_noise(-2 * SIGMA)
        update = -RATE / (2 * SIGMA) * (above - loss())
        for scale in (SIGMA + update,) if passes == 3 else (SIGMA, update):
            add_noise(scale)

    def ours(scale: float) -> Any:
        return perturb_(model, scale, seed=7)

    def evolve() -> None:
        losses = [loss(perturb(model, SIGMA, seed=7, member=m, out=tried)) for m in range(MEMBERS)]
        perturb_(model, [-RATE * x for x in losses], seed=7)

    def evolve_by_loop() -> None:
        losses = []
        for _ in range(MEMBERS):
            loop(SIGMA)
            losses.append(loss(other))
            loop(-SIGMA)
        for x in losses:
            loop(-RATE * x)

    return {
        "two forward passes": lambda: (loss(), loss()),
        "perturbation": lambda: ours(SIGMA),
        "perturbation, loop": lambda: loop(SIGMA),
        "MeZO step": lambda: step(ours, passes=3),
        "MeZO step, loop": lambda: step(loop, passes=4),
        "ES step": evolve,
        "ES step, loop": evolve_by_loop,
    }


def transformer() -> Rows:
    for tied in (False, True):
        model = opt(tied)
        case = f"cuda OPT-1.3B bfloat16, {'tied' if tied else 'not tied'}, {sum(1 for _ in model.parameters())} tensors"
        yield from rows_of(case, on_device(steps(model), row=2, fills=0), base="two forward passes")


if __name__ == "__main__":
    main(__doc__ or "", {"cuda": models, "cuda-population": populations, "cuda-transformer": transformer})
