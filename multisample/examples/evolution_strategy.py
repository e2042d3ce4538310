"""An evolution strategy whose perturbations are never stored.

Each step scores perturbations of all parameters, one at a time, and moves the parameters along their weighted sum,
which `multisample.weighted_moments` draws again from the seed. So a step needs the memory of two vectors of parameters,
however many perturbations there are, and workers that score different perturbations exchange only their scores
(Salimans et al., "Evolution strategies as a scalable alternative to reinforcement learning", 2017).

python -m multisample.examples.evolution_strategy                    # NumPy, on the CPU
python -m multisample.examples.evolution_strategy --device cuda      # PyTorch, on a GPU
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

import multisample

from ._running import parsed, run

PERTURBATIONS = 64
SCALE = 0.05
"""Standard deviation of a perturbation."""
RATE = 0.01
"""Length of a step."""


def scores_of(
    parameters: Any, score: Callable[[Any], Any], key: multisample.Key, perturbations: Iterable[int]
) -> list[float]:
    """Scores of perturbations of a step, by their numbers: the work of one worker.

    `score` takes an array like `parameters`, shape (d,), and returns a number; higher is better. `key` is that of the
    step, the same for all workers.
    """
    one, scores = None, []
    for j in perturbations:
        one = multisample.sample(parameters, SCALE, 1, seed=key, sample_offset=j, out=one)
        scores.append(float(score(one[:, 0])))
    return scores


def move(library: Any, parameters: Any, scores: Sequence[float], key: multisample.Key) -> None:
    """Move the parameters, in place, towards the perturbations with high scores.

    `library` is numpy or torch. The scores are those of the perturbations 0, 1, ... of the step with this key.
    """
    weights = np.asarray(scores, np.float32)
    weights = (weights - weights.mean()) / (weights.std() + 1e-12)
    if library is not np:
        weights = library.from_numpy(weights).to(parameters.device)
    # One number with the shape of the parameters takes no memory.
    rate = library.broadcast_to(parameters[:1] * 0 + RATE, parameters.shape)
    (step,) = multisample.weighted_moments(weights, 0.0, rate, order=1, seed=key)
    parameters += step


def train(d: int = 1000, steps: int = 200, seed: int = 7, device: str = "cpu") -> list[float]:
    """Fit `d` parameters to a target; returns the mean squared distance from it before each step."""
    library: Any = np
    target: Any = np.linspace(-1, 1, d, dtype=np.float32)
    if device == "cuda":
        import torch

        library, target = torch, torch.from_numpy(target).cuda()
    parameters, distances = target * 0, []
    for t in range(steps):
        distances.append(float(((parameters - target) ** 2).mean()))
        key = multisample.Key(seed, t)
        scores = scores_of(parameters, lambda x: -((x - target) ** 2).mean(), key, range(PERTURBATIONS))
        move(library, parameters, scores, key)
    return distances


def main(argv: Sequence[str] | None = None) -> int:
    """Print how the parameters approach the target."""
    distances = train(device=parsed("evolution_strategy", __doc__, argv, device=("cpu", "cuda")).device)
    print(f"step{'mean squared distance':>24}")
    for t in (*range(0, len(distances), 25), len(distances) - 1):
        print(f"{t:4d}{distances[t]:24.4f}")
    return 0


if __name__ == "__main__":
    run(main)
