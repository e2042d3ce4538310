"""Samples and their gradients in PyTorch on a GPU: ours beside the usual expressions, in time and in memory.

"operator" is the operators alone: forward writes to an existing array, backward reads one. For the others, `backward
us` is the time of forward and backward by autograd, minus `forward us`. The upstream gradient is as large as the
sample. `memory` is the peak of forward and backward in units of the sample, with the upstream gradient included.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch

import multisample
from bench.studies.rows import Call, Rows, cuda_device, cuda_vectors, main, on_device, peak, rows_of
from multisample.backends import registry

SHAPES = [(4096, 65_536), (262_144, 1024), (1_048_576, 128), (4_194_304, 32), (256, 1_000_000)]
ROTATED = 2**31  # Bytes of the gradients in rotation: far more than a cache.


def contenders(d: int, n: int, gradients: Iterator[Any]) -> Iterator[tuple[str, Call, Call]]:
    """Names, each with its forward call, and its call of backward, including the forward call that backward needs."""
    mu, sigma = cuda_vectors(d)
    operators = torch.ops.multisample
    yield (
        "operator, portable",
        lambda: operators.sample_(next(gradients), mu, sigma, seed=7),
        lambda: operators.sample_backward(next(gradients), seed=7),
    )
    inputs = [x.clone().requires_grad_() for x in (mu, sigma)]
    column, scale = (x[:, None] for x in inputs)
    sample = multisample.sample
    for name, draw in {
        "multisample": lambda: sample(*inputs, n, backend="torch_ext"),
        "multisample, fast_math": lambda: sample(*inputs, n, backend="torch_ext", fast_math=True),
        "Normal.rsample": lambda: torch.distributions.Normal(column.expand(d, n), scale.expand(d, n)).rsample(),
    }.items():
        yield name, draw, lambda draw=draw: torch.autograd.grad(draw(), inputs, next(gradients))


def rows() -> Rows:
    registry.find("torch_ext").prepare("cuda")
    for d, n in SHAPES:
        size = 4 * d * n
        count = max(2, min(256, ROTATED // size))
        gradients = itertools.cycle([torch.randn((d, n), device="cuda") for _ in range(count)])
        named = {name: (forward, backward) for name, forward, backward in contenders(d, n, gradients)}
        turns = [on_device({name: calls[k] for name, calls in named.items()}) for k in range(2)]
        for first, second in zip(*(rows_of(f"{d}x{n}", found) for found in turns), strict=True):
            name, forward = first["call"], first["us"]
            backward = second["us"] if name.startswith("operator") else second["us"] - forward
            row = {"case": f"{d}x{n}", "call": name, "forward us": forward, "backward us": backward}
            row["backward / forward"] = backward / forward
            if not name.startswith("operator"):
                row["memory"] = 1 + peak(named[name][1]) / size
            yield row
        cuda_device().release()


if __name__ == "__main__":
    main(__doc__ or "", {"cuda": rows})
