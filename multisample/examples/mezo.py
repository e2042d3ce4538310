"""MeZO, which trains with forward passes alone, next to backpropagation, on a small transformer.

A step perturbs all parameters in one direction and in the opposite one. The difference of the losses tells how far the
parameters move along that direction (Malladi et al., "Fine-Tuning Language Models with Just Forward Passes",
arXiv:2305.17333). Each direction is drawn again from its seed, in place: a step needs no memory beside that of a
forward pass. Its gradient is noisy, so MeZO takes many more steps than backpropagation.

python -m multisample examples mezo                    # on the CPU
python -m multisample examples mezo --device cuda      # on a GPU
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import multisample

from ._running import parsed

if TYPE_CHECKING:
    import torch

SIGMA = 1e-3
"""Standard deviation of a perturbation."""
RATE = 0.03
"""Learning rate of MeZO."""
DIRECTIONS = 4
"""Directions of a step, whose updates are added up in one call. Each has two members: itself and its opposite."""


def make_task(device: str = "cpu") -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """A transformer of one layer, and its loss on a task: to name the most frequent of eight symbols.

    The loss is the mean cross-entropy over 64 sequences.
    """
    import torch

    generator = torch.Generator().manual_seed(3)
    symbols = torch.randint(8, (64, 9), generator=generator)
    labels = torch.nn.functional.one_hot(symbols, 8).sum(1).argmax(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        embedding, head = torch.nn.Embedding(8, 16), torch.nn.Linear(16, 8)
    model = torch.nn.ModuleDict({"embedding": embedding, "layer": layer, "head": head}).to(device)
    symbols, labels = symbols.to(device), labels.to(device)

    def loss() -> torch.Tensor:
        states = model["layer"](model["embedding"](symbols))
        return torch.nn.functional.cross_entropy(model["head"](states.mean(1)), labels)

    return model, loss


def step(model: Any, loss: Callable[[], Any], key: multisample.Key) -> None:
    """A step of MeZO, in place. `key` is that of the step: direction k is member k of its noise."""
    import torch

    from multisample.torch import perturb_

    coefficients = []
    with torch.no_grad():
        for member in range(DIRECTIONS):
            perturb_(model, SIGMA, seed=key, member=member)
            above = float(loss())
            perturb_(model, -2 * SIGMA, seed=key, member=member)
            below = float(loss())
            perturb_(model, SIGMA, seed=key, member=member)
            coefficients.append(-RATE / (2 * DIRECTIONS * SIGMA) * (above - below))
    perturb_(model, coefficients, seed=key)


def train(steps: int = 300, seed: int = 7, device: str = "cpu", backward_steps: int = 60) -> tuple[list[float], float]:
    """Train with MeZO, and with gradient descent for comparison.

    Returns the losses before each step of MeZO and after the last, and the loss after gradient descent.
    """
    import torch

    model, loss = make_task(device)
    losses = []
    for t in range(steps):
        losses.append(float(loss().detach()))
        step(model, loss, multisample.Key(seed, t))
    losses.append(float(loss().detach()))
    model, loss = make_task(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(backward_steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return losses, float(loss().detach())


def main(argv: Sequence[str] | None = None) -> int:
    """Print the losses."""
    losses, backward_loss = train(device=parsed("mezo", __doc__, argv, device=("cpu", "cuda")).device)
    print(f"step{'loss':>10}")
    for t in (*range(0, len(losses) - 1, 50), len(losses) - 1):
        print(f"{t:4d}{losses[t]:10.4f}")
    print(f"after backpropagation: {backward_loss:.4f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
