"""The controller of `cart_pole` for 256 carts at once: one draw for all of them in each control step.

Cart e has its own seed, ``seed + e``, and so the forces that it would draw alone, whatever the number of carts. With
PyTorch the seeds are a tensor on the device: a vector of keys, whose offsets count the steps. With JAX, `jax.vmap` maps
the program of `cart_pole_jax` over the seeds. Both are one launch for each step.

Carts that need no seeds of their own need no batch: ``--draws flattened`` draws all forces with one seed, as rows of
one matrix. ``--draws loop`` makes a call for each cart, and ``--draws randn`` takes PyTorch's noise, for comparison.

python -m multisample.examples.cart_poles                    # PyTorch, on the CPU
python -m multisample.examples.cart_poles --device cuda      # PyTorch, on a GPU
python -m multisample.examples.cart_poles --library jax      # on JAX's default device
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import multisample

from ._running import run
from .cart_pole import FORCE, HORIZON, SECONDS_PER_STEP, TEMPERATURE, costs_of, next_state

CARTS, ROLLOUTS = 256, 64
DRAWS = ("batch", "flattened", "loop", "randn")


class Run(NamedTuple):
    """The trajectories of the controlled carts.

    Attributes
    ----------
    angles : numpy.ndarray, shape (steps, carts)
        The angle of each pole after each step, in radians; 0 is upright.
    positions : numpy.ndarray, shape (steps, carts)
        The position of each cart after each step, in metres.
    """

    angles: np.ndarray[Any, Any]
    positions: np.ndarray[Any, Any]


def control(
    carts: int = CARTS, steps: int = 60, seed: int = 7, rollouts: int = ROLLOUTS, library: str = "torch",
    device: str = "cpu", draws: str = "batch",
) -> Run:  # fmt: skip
    """Swing up poles that hang down.

    Parameters
    ----------
    carts : int, default 256
    steps : int, default 60
        Control steps of 0.04 s.
    seed : int, default 7
        Of the first cart; the others follow. ``0 <= seed < 2**31 - carts``.
    rollouts : int, default 64
        Sequences of forces for each cart in each step.
    library : {"torch", "jax"}, default "torch"
    device : {"cpu", "cuda"}, default "cpu"
        For PyTorch.
    draws : {"batch", "flattened", "loop", "randn"}, default "batch"
        How PyTorch draws: see the module.

    Returns
    -------
    Run
    """
    if library == "jax":
        import jax.numpy as jnp

        return Run(*(np.asarray(x).T for x in _jax_program(steps, rollouts)(jnp.arange(seed, seed + carts))))
    import torch

    draw = drawn(torch.arange(seed, seed + carts, device=device), rollouts, draws)
    plans = torch.zeros(carts, HORIZON, device=device)
    states = [torch.full((carts,), x, device=device) for x in (0.0, 0.0, math.pi, 0.0)]
    run = Run(np.empty((steps, carts), np.float32), np.empty((steps, carts), np.float32))
    for t in range(steps):
        plans, states = followed(plans, states, draw(plans))
        run.angles[t], run.positions[t] = states[2].cpu(), states[0].cpu()
    return run


def drawn(seeds: Any, rollouts: int, draws: str = "batch") -> Callable[[Any], Any]:
    """A function from plans (carts, horizon) to forces (carts, horizon, rollouts); each call has new noise."""
    import torch

    if draws == "batch":
        keys = torch.stack([seeds, torch.full_like(seeds, -1)], 1)  # Seeds and offsets.

        def batch(plans: Any) -> Any:
            keys[:, 1] += 1
            return multisample.sample(plans, FORCE, rollouts, seed=keys)

        return batch
    if draws == "flattened":
        generator = multisample.Generator(int(seeds[0]))

        def flattened(plans: Any) -> Any:
            forces = multisample.sample(plans.reshape(-1), FORCE, rollouts, generator=generator)
            return forces.reshape(*plans.shape, rollouts)

        return flattened
    if draws == "loop":
        generators = [multisample.Generator(seed) for seed in seeds.tolist()]

        def loop(plans: Any) -> Any:
            forces = plans.new_empty(*plans.shape, rollouts)
            for plan, generator, out in zip(plans, generators, forces, strict=True):
                multisample.sample(plan, FORCE, rollouts, generator=generator, out=out)
            return forces

        return loop

    def randn(plans: Any) -> Any:
        return plans[..., None] + FORCE * torch.randn(*plans.shape, rollouts, device=plans.device)

    return randn


def followed(plans: Any, states: Sequence[Any], forces: Any) -> tuple[Any, list[Any]]:
    """The plans and states after a control step with these forces, in PyTorch's operations."""
    import torch

    costs = costs_of(torch, [x[:, None] for x in states], forces.transpose(0, 1))
    weights = torch.softmax(-costs / TEMPERATURE, 1)
    plans = (forces @ weights[..., None])[..., 0]
    states = next_state(torch, states, plans[:, 0])
    return torch.nn.functional.pad(plans[:, 1:], (0, 1)), states


@functools.cache
def _jax_program(steps: int, rollouts: int) -> Any:
    import jax

    from .cart_pole_jax import trajectory

    return jax.jit(jax.vmap(functools.partial(trajectory, steps=steps, rollouts=rollouts)))


def main(argv: Sequence[str] | None = None) -> int:
    """Print how many poles are upright, every half second."""
    parser = argparse.ArgumentParser(prog="python -m multisample.examples.cart_poles", description=__doc__)
    parser.add_argument("--library", choices=("torch", "jax"), default="torch")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--draws", choices=DRAWS, default="batch")
    parser.add_argument("--carts", type=int, default=CARTS)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args(argv)
    run = control(args.carts, seed=args.seed, library=args.library, device=args.device, draws=args.draws)
    print("seconds  poles within 0.4 rad of upright")
    for k in range(11, len(run.angles), 12):
        angles = np.remainder(run.angles[k] + math.pi, 2 * math.pi) - math.pi
        print(f"{(k + 1) * SECONDS_PER_STEP:7.2f}  {np.count_nonzero(abs(angles) < 0.4)} of {args.carts}")
    return 0


if __name__ == "__main__":
    run(main)
