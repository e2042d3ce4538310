"""An evolution strategy whose workers exchange only scores.

Each worker is a process with its own copy of the parameters. It scores some members of the population, sends (member,
score) to all others, and applies the update by itself: `multisample.perturb` draws the noise of all members again. The
parameters of all workers stay equal, bit for bit, also where some compute on a CPU and some on a GPU.

python -m multisample.examples.score_exchange                     # four workers, every second on a GPU if there is one
python -m multisample.examples.score_exchange --devices cpu cpu   # two workers on the CPU
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import multiprocessing
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import multisample

from ._running import run

MEMBERS = 32
SCALE = 0.1
"""Standard deviation of the noise."""
RATE = 0.02


def score(parameters: Mapping[str, Any]) -> float:
    """Minus the squared distance of all parameters from 1, computed on the host in float64."""
    return -sum(float(np.square(_on_host(x).astype(np.float64) - 1).sum()) for x in parameters.values())


def _on_host(x: Any) -> Any:
    return x if isinstance(x, np.ndarray) else x.cpu().numpy()


def update(parameters: Any, scores: Mapping[int, float], key: multisample.Key) -> None:
    """Move the parameters, in place, towards the members with high scores in the step with this key."""
    ordered = np.array([scores[member] for member in range(MEMBERS)])
    coefficients = RATE * (ordered - ordered.mean()) / ordered.std()
    multisample.perturb(parameters, coefficients, seed=key, out=parameters)


def digest(parameters: Mapping[str, Any]) -> str:
    """A digest of the bits of all parameters."""
    found = hashlib.sha256()
    for x in parameters.values():
        found.update(_on_host(x).tobytes())
    return found.hexdigest()


def _work(worker: int, workers: int, device: str, steps: int, seed: int, pipe: Connection) -> None:
    shapes = {"weight": (16, 8), "bias": (8,)}
    parameters: dict[str, Any] = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    if device != "cpu":
        import torch

        parameters = {name: torch.from_numpy(x).to(device) for name, x in parameters.items()}
    for t in range(steps):
        key = multisample.Key(seed, t)
        mine = {}
        for member in range(worker, MEMBERS, workers):
            mine[member] = score(multisample.perturb(parameters, SCALE, seed=key, member=member))
        pipe.send(mine)
        update(parameters, pipe.recv(), key)
        pipe.send((digest(parameters), score(parameters)))


def default_devices() -> list[str]:
    """The devices of four workers: every second is a GPU, if PyTorch has one."""
    other = "cpu"
    if importlib.util.find_spec("torch") is not None:
        import torch

        other = "cuda" if torch.cuda.is_available() else "cpu"
    return ["cpu", other] * 2


def train(
    devices: Sequence[str] | None = None, steps: int = 100, seed: int = 7
) -> tuple[list[float], list[set[str]]]:  # fmt: skip
    """Train with one worker for each device: "cpu" for NumPy arrays, any other for PyTorch's tensors.

    Returns the score after each step, and the digests of all workers: one digest, since their parameters are equal.
    """
    context = multiprocessing.get_context("spawn")
    devices = default_devices() if devices is None else devices
    pipes, processes = [], []
    for worker, device in enumerate(devices):
        pipe, end = context.Pipe()
        process = context.Process(target=_work, args=(worker, len(devices), device, steps, seed, end), daemon=True)
        process.start()
        end.close()
        pipes.append(pipe)
        processes.append(process)
    scores, digests = [], []
    for _ in range(steps):
        every: dict[int, float] = {}
        for pipe in pipes:
            every |= pipe.recv()
        for pipe in pipes:
            pipe.send(every)
        found = [pipe.recv() for pipe in pipes]
        digests.append({text for text, _ in found})
        scores.append(found[0][1])
    for process in processes:
        process.join()
    return scores, digests


def main(argv: Sequence[str] | None = None) -> int:
    """Print the scores, and whether the workers agree."""
    parser = argparse.ArgumentParser(prog="python -m multisample.examples.score_exchange", description=__doc__)
    parser.add_argument("--devices", nargs="+", default=None)
    scores, digests = train(parser.parse_args(argv).devices)
    print(f"step{'score':>12}  digests")
    for t in (*range(0, len(scores), 20), len(scores) - 1):
        print(f"{t:4d}{scores[t]:12.3f}  {' '.join(sorted(text[:12] for text in digests[t]))}")
    return 0


if __name__ == "__main__":
    run(main)
