"""The controller of `cart_pole` as one jitted scan of JAX: plan, simulation and cart in a single program.

Each control step draws the normals of the same step of `cart_pole`: the seed is an argument of the program, and the
offset counts the steps. A batch of seeds is one `jax.vmap` more, as in `cart_poles`.

python -m multisample.examples.cart_pole_jax                    # on JAX's default device
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Sequence
from typing import Any

import multisample

from ._running import run
from .cart_pole import FORCE, HORIZON, ROLLOUTS, SECONDS_PER_STEP, TEMPERATURE, Run, costs_of, next_state


def trajectory(seed: Any, steps: int, rollouts: int = ROLLOUTS) -> tuple[Any, Any]:
    """Swing up a pole that hangs down, in operations of JAX: to be jitted, with `steps` static.

    Parameters
    ----------
    seed : int or JAX key
        As for `multisample.sample`; may be traced.
    steps : int
        Control steps of 0.04 s.
    rollouts : int, default 1024
        Sequences of forces in each step.

    Returns
    -------
    angles, positions : jax.Array, shape (steps,)
    """
    import jax
    import jax.numpy as jnp

    def step(carry: tuple[Any, Any], t: Any) -> tuple[Any, Any]:
        plan, state = carry
        forces = multisample.sample(plan, FORCE, rollouts, seed=multisample.Key(seed, t))
        costs = costs_of(jnp, list(state), forces)
        weights = jnp.exp((costs.min() - costs) / TEMPERATURE)
        plan = forces @ (weights / weights.sum())
        state = jnp.stack(next_state(jnp, list(state), plan[0]))
        return (jnp.roll(plan, -1).at[-1].set(0), state), (state[2], state[0])

    start = jnp.zeros(HORIZON), jnp.array([0.0, 0.0, math.pi, 0.0])
    _, (angles, positions) = jax.lax.scan(step, start, jnp.arange(steps))
    return angles, positions


@functools.cache
def _program(steps: int) -> Any:
    import jax

    return jax.jit(functools.partial(trajectory, steps=steps))


def control(steps: int = 120, seed: int = 7) -> Run:
    """Swing up a pole that hangs down, as `cart_pole.control` does.

    Parameters
    ----------
    steps : int, default 120
        Control steps of 0.04 s.
    seed : int, default 7
        ``0 <= seed < 2**31``.

    Returns
    -------
    Run
    """
    angles, positions = _program(steps)(seed)
    return Run([math.remainder(float(angle), 2 * math.pi) for angle in angles], [float(x) for x in positions])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the angle of the pole every half second."""
    parser = argparse.ArgumentParser(prog="python -m multisample.examples.cart_pole_jax", description=__doc__)
    parser.add_argument("--seed", type=int, default=7)
    run = control(seed=parser.parse_args(argv).seed)
    print("seconds  angle of the pole (0 is upright)  position of the cart")
    for k in range(11, len(run.angles), 12):
        print(f"{(k + 1) * SECONDS_PER_STEP:7.2f}  {run.angles[k]:7.2f} rad  {run.positions[k]:29.2f} m")
    return 0


if __name__ == "__main__":
    run(main)
