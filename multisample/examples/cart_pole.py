"""Model predictive path integral control (MPPI) swings up a pole on a cart, or the poles of many carts at once.

Each control step draws sequences of 40 forces around the current plan with one call of `multisample.sample`, simulates
all of them at once, and averages them with weights that favour low costs (Williams et al., "Information theoretic MPC
for model-based reinforcement learning", ICRA 2017). With JAX, plan, simulation and cart are one jitted scan, in which
the offset counts the steps.

Cart e of many has its own seed, ``seed + e``, and so the forces that it would draw alone, whatever the number of carts.
A step draws the forces of all carts in one launch: with NumPy and PyTorch the seeds are a vector of keys, and with JAX,
`jax.vmap` maps the program over the seeds. Carts that need no seeds of their own need no batch: ``--draws flattened``
draws all forces with one seed, as rows of one matrix.

python -m multisample examples cart_pole                                  # NumPy, on the CPU
python -m multisample examples cart_pole --device cuda                    # PyTorch, on a GPU
python -m multisample examples cart_pole --library jax                    # on JAX's default device
python -m multisample examples cart_pole --library torch --carts 256      # or jax
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import multisample

from ._running import parsed

HORIZON, ROLLOUTS, ROLLOUTS_OF_MANY = 40, 1024, 64
SECONDS_PER_STEP = 0.04
FORCE = 5.0
"""Standard deviation of a drawn force, in newtons."""
TEMPERATURE = 0.5
CART_MASS, POLE_MASS, HALF_LENGTH, GRAVITY = 1.0, 0.1, 0.5, 9.81
START = 0.0, 0.0, math.pi, 0.0
"""The cart's position and speed, the pole's angle and angular speed: the pole hangs down."""


class Run(NamedTuple):
    """Controlled carts after each step: the poles' angles in radians, 0 if upright, and the carts' positions in metres.

    NumPy arrays of shape (steps, carts), or (steps,) for one cart.
    """

    angles: Any
    positions: Any


def control(
    steps: int = 120, seed: int = 7, device: str = "cpu", library: str = "numpy", carts: int = 1, rollouts: int = 0,
    draws: str = "batch",
) -> Run:  # fmt: skip
    """Swing up poles. `library` is "numpy" (PyTorch if `device` is "cuda"), "torch" or "jax".

    Each step simulates `rollouts` sequences for each cart, by default 1024, and 64 if there are many carts.
    """
    rollouts = rollouts or (ROLLOUTS if carts == 1 else ROLLOUTS_OF_MANY)
    if library == "jax":
        import jax
        import jax.numpy as jnp

        program = jax.jit(jax.vmap(functools.partial(trajectory, steps=steps, rollouts=rollouts)))
        angles, positions = (np.asarray(x).T for x in program(jnp.arange(seed, seed + carts)))
        return _run(angles, positions)
    xp: Any = np
    where = {}
    if library == "torch" or device == "cuda":
        import torch

        xp, where = torch, {"device": device}
    seeds = xp.arange(seed, seed + carts, **where)
    plans = xp.zeros((carts, HORIZON), dtype=xp.float32, **where)
    states = [xp.full((carts,), x, dtype=xp.float32, **where) for x in START]
    angles, positions = np.empty((steps, carts), np.float32), np.empty((steps, carts), np.float32)
    for t in range(steps):
        plans, states = after_step(xp, states, forces_of(xp, plans, seeds, t, rollouts, draws))
        angles[t], positions[t] = (np.asarray(x if xp is np else x.cpu()) for x in (states[2], states[0]))
    return _run(angles, positions)


def _run(angles: Any, positions: Any) -> Run:
    angles = np.remainder(angles + math.pi, 2 * math.pi) - math.pi
    return Run(angles[:, 0], positions[:, 0]) if angles.shape[1] == 1 else Run(angles, positions)


def forces_of(xp: Any, plans: Any, seeds: Any, t: int, rollouts: int, draws: str = "batch") -> Any:
    """The forces of step t around `plans`, shape (carts, horizon, rollouts)."""
    keys = xp.stack([seeds, xp.full_like(seeds, t)], 1)  # Seeds and offsets.
    if draws == "flattened":  # One seed, which is not read from a GPU.
        plans, keys = plans.reshape(1, -1), keys[:1]
    return multisample.sample(plans, FORCE, rollouts, seed=keys).reshape(len(seeds), -1, rollouts)


def after_step(library: Any, state: Sequence[Any], forces: Any) -> tuple[Any, list[Any]]:
    """The plan and the state after a step with these `forces`, of shape (horizon, rollouts) or (carts, ...)."""
    costs = costs_of(library, [x[..., None] for x in state], library.moveaxis(forces, -2, 0))
    weights = library.exp((library.amin(costs, -1)[..., None] - costs) / TEMPERATURE)
    plan = (forces @ (weights / weights.sum(-1)[..., None])[..., None])[..., 0]
    return library.concatenate([plan[..., 1:], 0 * plan[..., :1]], -1), next_state(library, state, plan[..., 0])


def costs_of(library: Any, state: Sequence[Any], forces: Any) -> Any:
    """The cost of each sequence of forces, shape (n,) or (carts, n). Axis 0 of `forces` counts the steps."""
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
    """The state after one step."""
    position, speed, angle, turn = state
    sine, cosine = library.sin(angle), library.cos(angle)
    mass = CART_MASS + POLE_MASS
    push = (force + POLE_MASS * HALF_LENGTH * turn * turn * sine) / mass
    twist = (GRAVITY * sine - cosine * push) / (HALF_LENGTH * (4 / 3 - POLE_MASS * cosine * cosine / mass))
    acceleration = push - POLE_MASS * HALF_LENGTH * twist * cosine / mass
    speed, turn = speed + SECONDS_PER_STEP * acceleration, turn + SECONDS_PER_STEP * twist
    return [position + SECONDS_PER_STEP * speed, speed, angle + SECONDS_PER_STEP * turn, turn]


def trajectory(seed: Any, steps: int, rollouts: int = ROLLOUTS) -> tuple[Any, Any]:
    """Angles and positions, shape (steps,), in operations of JAX: to be jitted, with `steps` static.

    `seed` is an int or a JAX key, and may be traced.
    """
    import jax
    import jax.numpy as jnp

    def step(carry: tuple[Any, Any], t: Any) -> tuple[Any, Any]:
        plan, state = carry
        forces = multisample.sample(plan, FORCE, rollouts, seed=multisample.Key(seed, t))
        plan, state = after_step(jnp, state, forces)
        return (plan, state), (state[2], state[0])

    _, (angles, positions) = jax.lax.scan(step, (jnp.zeros(HORIZON), [*jnp.array(START)]), jnp.arange(steps))
    return angles, positions


def main(argv: Sequence[str] | None = None) -> int:
    """Print the angle of the pole, or how many poles are upright, every half second."""
    args = parsed(
        "cart_pole", __doc__, argv, library=("numpy", "torch", "jax"), device=("cpu", "cuda"), carts=1,
        draws=("batch", "flattened"), seed=7,
    )  # fmt: skip
    run = control(**vars(args))
    if args.carts == 1:
        print("seconds  angle of the pole (0 is upright)  position of the cart")
        lines = [f"{angle:7.2f} rad  {position:29.2f} m" for angle, position in zip(*run, strict=True)]
    else:
        print("seconds  poles within 0.4 rad of upright")
        lines = [f"{count} of {args.carts}" for count in np.count_nonzero(abs(run.angles) < 0.4, axis=1)]
    for k in range(11, len(lines), 12):
        print(f"{(k + 1) * SECONDS_PER_STEP:7.2f}  {lines[k]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
