"""MeZO on a model of `transformers`: OPT-1.3B with random weights, bfloat16, 16 sequences of 256 tokens.

python -m bench.studies.transformer results.json        # needs transformers

`us` is the time of a call from GPU events around two calls in a row, and `host us` the time until it returns. "two
forward passes" is the least that a step takes. "perturbation" adds the noise of one member in place. "loop" is
published code: it seeds PyTorch's generator, and for each parameter draws, multiplies, adds and assigns. A step of the
loop makes four such passes, and one of `perturb_` three, since one call goes back and updates. "named_parameters"
lists the parameters, on the host alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.report.results import Row
from bench.studies.rows import main, rows_of
from bench.suites.timing import Call, on_device
from multisample.torch import perturb_

SIGMA, RATE = 1e-3, 1e-6


def opt(tied: bool) -> Any:
    """OPT-1.3B (Zhang et al., arXiv:2205.01068), whose embedding is the output layer if `tied`."""
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        hidden_size=2048, word_embed_proj_dim=2048, ffn_dim=8192, num_hidden_layers=24, num_attention_heads=32,
        tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.device("cuda"):
        return OPTForCausalLM(config).to(torch.bfloat16).eval()


def contenders(model: Any) -> dict[str, Call]:
    other = copy.deepcopy(model)  # The loop gives parameters new memory.
    text = torch.randint(50272, (16, 256), device="cuda")

    @torch.no_grad()
    def loss() -> float:
        return float(model(input_ids=text, labels=text).loss)

    @torch.no_grad()
    def loop(scale: float) -> None:
        torch.manual_seed(7)
        for _, x in other.named_parameters():
            x.data = x.data + scale * torch.normal(0.0, 1.0, x.shape, dtype=x.dtype, device=x.device)

    def step(perturb: Callable[[float], Any], passes: int) -> None:
        perturb(SIGMA)
        above = loss()
        perturb(-2 * SIGMA)
        update = -RATE / (2 * SIGMA) * (above - loss())
        for scale in (SIGMA + update,) if passes == 3 else (SIGMA, update):
            perturb(scale)

    def ours(scale: float) -> Any:
        return perturb_(model, scale, seed=7)

    return {
        "two forward passes": lambda: (loss(), loss()),
        "perturbation": lambda: ours(SIGMA),
        "perturbation, loop": lambda: loop(SIGMA),
        "MeZO step": lambda: step(ours, passes=3),
        "MeZO step, loop": lambda: step(loop, passes=4),
        "named_parameters": lambda: list(model.named_parameters(remove_duplicate=False)),
    }


def rows() -> Iterator[Row]:
    for tied in (False, True):
        model = opt(tied)
        case = f"cuda OPT-1.3B bfloat16, {'tied' if tied else 'not tied'}, {sum(1 for _ in model.parameters())} tensors"
        yield from rows_of(case, on_device(contenders(model), row=2, fills=0), base="two forward passes")


if __name__ == "__main__":
    main(__doc__ or "", {"cuda": rows})
