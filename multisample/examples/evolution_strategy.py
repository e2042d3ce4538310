"""An evolution strategy whose perturbations are never stored, and whose workers exchange only scores.

Each worker has its own copy of the parameters. It scores some members of the population, sends the scores to all
others, and applies the update by itself: `multisample.perturb` draws the noise of all members again (Salimans et al.,
"Evolution strategies as a scalable alternative to reinforcement learning", 2017). So a step needs memory for two copies
of the parameters, however many members there are. The parameters of all workers stay equal, bit for bit, also where
some compute on a CPU and some on a GPU.

python -m multisample examples evolution_strategy                        # NumPy, on the CPU
python -m multisample examples evolution_strategy --devices cuda         # PyTorch, on a GPU
python -m multisample examples evolution_strategy --devices cpu cuda     # two workers
"""

import hashlib
import multiprocessing
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from typing import Any

import numpy as np

import multisample

from ._running import parsed

MEMBERS = 64
SIGMA = 0.1
"""Standard deviation of the noise."""
RATE = 0.125
"""A step moves each parameter by about RATE / (SIGMA * sqrt(MEMBERS)) = 0.16."""
SHAPES = {"weight": (16, 8), "bias": (8,)}
SECONDS = 300
"""How long a worker waits for the others."""


def score(parameters: Mapping[str, Any]) -> float:
    """Minus the squared distance of all parameters from 1, computed on the host in float64; higher is better."""
    return -sum(float(np.square(_on_host(x).astype(np.float64) - 1).sum()) for x in parameters.values())


def _on_host(x: Any) -> Any:
    return x if isinstance(x, np.ndarray) else x.cpu().numpy()


def scores_of(parameters: Mapping[str, Any], key: multisample.Key, members: Iterable[int]) -> list[float]:
    """Scores of some members of the step with this key: the work of one worker."""
    one, scores = None, []
    for member in members:
        one = multisample.perturb(parameters, SIGMA, seed=key, member=member, out=one)
        scores.append(score(one))
    return scores


def update(parameters: Any, scores: Any, key: multisample.Key) -> None:
    """Move the parameters, in place, towards the members with high scores. `scores` are those of all members."""
    normalized = (scores - np.mean(scores)) / (np.std(scores) + 1e-12)
    coefficients = RATE / (MEMBERS * SIGMA) * normalized
    multisample.perturb(parameters, coefficients, seed=key, out=parameters)


_shared: Any = None


def share(*shared: Any) -> None:
    """Keep what all workers share: an array of scores, and a barrier."""
    global _shared
    _shared = shared


def work(worker: int, device: str, steps: int, seed: int) -> tuple[list[float], list[str]]:
    """The scores of the parameters after each step, and digests of their bits, in one of the workers."""
    buffer, barrier = _shared
    scores, members = np.frombuffer(buffer), range(worker, MEMBERS, barrier.parties)
    parameters: dict[str, Any] = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    if device != "cpu":
        import torch

        parameters = {name: torch.from_numpy(x).to(device) for name, x in parameters.items()}
    reached, digests = [], []
    for t in range(steps):
        key = multisample.Key(seed, t)
        scores[members] = scores_of(parameters, key, members)
        barrier.wait(SECONDS)
        update(parameters, scores, key)
        barrier.wait(SECONDS)  # All have read the scores.
        reached.append(score(parameters))
        digests.append(hashlib.sha256(b"".join(_on_host(x).tobytes() for x in parameters.values())).hexdigest())
    return reached, digests


def train(devices: Sequence[str] = ("cpu",), steps: int = 100, seed: int = 7) -> tuple[list[float], list[set[str]]]:
    """Train with one worker for each device: "cpu" for NumPy arrays, any other for PyTorch's tensors.

    Returns the score after each step, and the digests of all workers: one digest, since their parameters are equal.
    """
    context = multiprocessing.get_context("spawn")
    shared = context.Array("d", MEMBERS, lock=False), context.Barrier(len(devices))
    with ProcessPoolExecutor(len(devices), context, share, shared) as executor:
        futures = [executor.submit(work, *worker, steps, seed) for worker in enumerate(devices)]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        shared[1].abort()  # The others would wait for a worker that failed.
        for future in done:
            future.result()  # Raises that worker's error.
        scores, digests = zip(*(future.result() for future in futures), strict=True)
    return scores[0], [set(of_step) for of_step in zip(*digests, strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the scores, and whether the workers agree."""
    scores, digests = train(parsed("evolution_strategy", __doc__, argv, devices=["cpu"]).devices)
    print(f"step{'score':>12}  digests")
    for t in (*range(0, len(scores), 20), len(scores) - 1):
        print(f"{t:4d}{scores[t]:12.3f}  {' '.join(sorted(text[:12] for text in digests[t]))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
