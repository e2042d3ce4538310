"""Model predictive path integral control (MPPI) swings a pole up on a cart.

Each control step draws 1024 sequences of 40 forces around the current plan with one call of `multisample.sample`,
simulates all of them at once, and averages them with weights that favour low costs (Williams et al., "Information
theoretic MPC for model-based reinforcement learning", ICRA 2017).

python -m multisample.examples.cart_pole                    # NumPy, on the CPU
python -m multisample.examples.cart_pole --device cuda      # PyTorch, on a GPU
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import multisample

from ._running import run

HORIZON, ROLLOUTS = 40, 1024
SECONDS_PER_STEP = 0.04
FORCE = 5.0
"""Standard deviation of a drawn force, in newtons."""
TEMPERATURE = 0.5
CART_MASS, POLE_MASS, HALF_LENGTH, GRAVITY = 1.0, 0.1, 0.5, 9.81


class Run(NamedTuple):
    """The trajectory of a controlled cart.

    Attributes
    ----------
    angles : list of float
        The pole's angle after each step, in radians; 0 is upright.
    positions : list of float
        The cart's position after each step, in metres.
    """

    angles: list[float]
    positions: list[float]


def control(steps: int = 120, seed: int = 7, device: str = "cpu") -> Run:
    """Swing up a pole that hangs down.

    Parameters
    ----------
    steps : int, default 120
        Control steps of 0.04 s.
    seed : int, default 7
        ``0 <= seed < 2**64``.
    device : {"cpu", "cuda"}, default "cpu"
        NumPy arrays on the CPU, or PyTorch tensors on a GPU.

    Returns
    -------
    Run

    Raises
    ------
    TypeError, ValueError
        If `seed` is not an integer in its range.
    """
    library: Any = np
    plan: Any = np.zeros(HORIZON, np.float32)
    if device == "cuda":
        import torch

        library, plan = torch, torch.zeros(HORIZON, device=device)
    generator = multisample.Generator(seed)
    state = [0.0, 0.0, math.pi, 0.0]
    run = Run([], [])
    for _ in range(steps):
        forces = multisample.sample(plan, FORCE, ROLLOUTS, generator=generator)
        costs = costs_of(library, state, forces)
        weights = library.exp((costs.min() - costs) / TEMPERATURE)
        plan = forces @ (weights / weights.sum())
        state = [float(x) for x in next_state(library, state, plan[0])]
        plan = library.roll(plan, -1)
        plan[-1] = 0
        run.angles.append(math.remainder(state[2], 2 * math.pi))
        run.positions.append(state[0])
    return run


def costs_of(library: Any, state: Sequence[Any], forces: Any) -> Any:
    """The cost of each sequence of forces, shape (n,)."""
    total = 0.0 * forces[0]
    state = [total + x for x in state]
    for force in forces:
        state = next_state(library, state, force)
        position, speed, angle, turn = state
        total = (
            total + 20 * (1 - library.cos(angle)) + 0.2 * turn * turn + 2 * position * position + 0.1 * speed * speed
        )
    return total


def next_state(library: Any, state: Sequence[Any], force: Any) -> list[Any]:
    """The state after one step: the cart's position and speed, the pole's angle and angular speed."""
    position, speed, angle, turn = state
    angle = angle if hasattr(angle, "shape") else library.asarray(angle)
    sine, cosine = library.sin(angle), library.cos(angle)
    mass = CART_MASS + POLE_MASS
    push = (force + POLE_MASS * HALF_LENGTH * turn * turn * sine) / mass
    twist = (GRAVITY * sine - cosine * push) / (HALF_LENGTH * (4 / 3 - POLE_MASS * cosine * cosine / mass))
    acceleration = push - POLE_MASS * HALF_LENGTH * twist * cosine / mass
    speed, turn = speed + SECONDS_PER_STEP * acceleration, turn + SECONDS_PER_STEP * twist
    return [position + SECONDS_PER_STEP * speed, speed, angle + SECONDS_PER_STEP * turn, turn]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the angle of the pole every half second."""
    parser = argparse.ArgumentParser(prog="python -m multisample.examples.cart_pole", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args(argv)
    run = control(seed=args.seed, device=args.device)
    print("seconds  angle of the pole (0 is upright)  position of the cart")
    for k in range(11, len(run.angles), 12):
        print(f"{(k + 1) * SECONDS_PER_STEP:7.2f}  {run.angles[k]:7.2f} rad  {run.positions[k]:29.2f} m")
    return 0


if __name__ == "__main__":
    run(main)
