"""Model predictive path integral control (MPPI) swings up a pole on a cart, or the poles of many carts at once.

Each control step draws sequences of 40 forces around the current plan with one call of `multisample.sample`, simulates
all of them at once, and averages them with weights that favour low costs (Williams et al., "Information theoretic MPC
for model-based reinforcement learning", ICRA 2017). With JAX, plan, simulation and cart are one jitted scan, in which
the offset counts the steps.

Cart e of many has its own seed, ``seed + e``, and so the forces that it would draw alone, whatever the number of carts.
A step draws the forces of all carts in one launch: with PyTorch the seeds are a vector of keys on the device, and with
JAX, `jax.vmap` maps the program over the seeds. Carts that need no seeds of their own need no batch: ``--draws
flattened`` draws all forces with one seed, as rows of one matrix. ``--draws loop`` makes a call for each cart, and
``--draws randn`` takes PyTorch's noise, for comparison.

python -m multisample.examples.cart_pole                                  # NumPy, on the CPU
python -m multisample.examples.cart_pole --device cuda                    # PyTorch, on a GPU
python -m multisample.examples.cart_pole --library jax                    # on JAX's default device
python -m multisample.examples.cart_pole --library torch --carts 256      # or jax
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import multisample

from ._running import parsed, run

HORIZON, ROLLOUTS, ROLLOUTS_OF_MANY = 40, 1024, 64
SECONDS_PER_STEP = 0.04
FORCE = 5.0
"""Standard deviation of a drawn force, in newtons."""
TEMPERATURE = 0.5
CART_MASS, POLE_MASS, HALF_LENGTH, GRAVITY = 1.0, 0.1, 0.5, 9.81
START = 0.0, 0.0, math.pi, 0.0
"""The cart's position and speed, the pole's angle and angular speed: the pole hangs down."""
DRAWS = ("batch", "flattened", "loop", "randn")


class Run(NamedTuple):
    """A controlled cart after each step: the pole's angle in radians, 0 if upright, and the cart's position in metres.

    Lists of float, or for many carts NumPy arrays of shape (steps, carts).
    """

    angles: Any
    positions: Any


def control(steps: int = 120, seed: int = 7, device: str = "cpu", library: str = "numpy") -> Run:
    """Swing up one pole. `library` is "numpy" (PyTorch if `device` is "cuda") or "jax"."""
    if library == "jax":
        angles, positions = _program(steps, ROLLOUTS)(seed)
        return Run([math.remainder(float(angle), 2 * math.pi) for angle in angles], [float(x) for x in positions])
    xp: Any = np
    plan: Any = np.zeros(HORIZON, np.float32)
    if library == "torch" or device == "cuda":
        import torch

        xp, plan = torch, torch.zeros(HORIZON, device=device)
    generator = multisample.Generator(seed)
    state = list(START)
    run = Run([], [])
    for _ in range(steps):
        forces = multisample.sample(plan, FORCE, ROLLOUTS, generator=generator)
        costs = costs_of(xp, state, forces)
        weights = xp.exp((costs.min() - costs) / TEMPERATURE)
        plan = forces @ (weights / weights.sum())
        state = [float(x) for x in next_state(xp, state, plan[0])]
        plan = xp.roll(plan, -1)
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
    """The state after one step."""
    position, speed, angle, turn = state
    angle = angle if hasattr(angle, "shape") else library.asarray(angle)
    sine, cosine = library.sin(angle), library.cos(angle)
    mass = CART_MASS + POLE_MASS
    push = (force + POLE_MASS * HALF_LENGTH * turn * turn * sine) / mass
    twist = (GRAVITY * sine - cosine * push) / (HALF_LENGTH * (4 / 3 - POLE_MASS * cosine * cosine / mass))
    acceleration = push - POLE_MASS * HALF_LENGTH * twist * cosine / mass
    speed, turn = speed + SECONDS_PER_STEP * acceleration, turn + SECONDS_PER_STEP * twist
    return [position + SECONDS_PER_STEP * speed, speed, angle + SECONDS_PER_STEP * turn, turn]


# --- JAX ----------------------------------------------------------------------------------------------------------


def trajectory(seed: Any, steps: int, rollouts: int = ROLLOUTS) -> tuple[Any, Any]:
    """Angles and positions, shape (steps,), in operations of JAX: to be jitted, with `steps` static.

    `seed` is an int or a JAX key, and may be traced.
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

    _, (angles, positions) = jax.lax.scan(step, (jnp.zeros(HORIZON), jnp.array(START)), jnp.arange(steps))
    return angles, positions


@functools.cache
def _program(steps: int, rollouts: int, many: bool = False) -> Any:
    import jax

    program = functools.partial(trajectory, steps=steps, rollouts=rollouts)
    return jax.jit(jax.vmap(program) if many else program)


# --- Many carts ---------------------------------------------------------------------------------------------------


def control_many(
    carts: int = 256, steps: int = 60, seed: int = 7, rollouts: int = ROLLOUTS_OF_MANY, library: str = "torch",
    device: str = "cpu", draws: str = "batch",
) -> Run:  # fmt: skip
    """Swing up many poles, with "torch" or "jax". `seed` is that of the first cart."""
    if library == "jax":
        import jax.numpy as jnp

        program = _program(steps, rollouts, many=True)
        return Run(*(np.asarray(x).T for x in program(jnp.arange(seed, seed + carts))))
    import torch

    draw = drawn(torch.arange(seed, seed + carts, device=device), rollouts, draws)
    plans = torch.zeros(carts, HORIZON, device=device)
    states = [torch.full((carts,), x, device=device) for x in START]
    run = Run(np.empty((steps, carts), np.float32), np.empty((steps, carts), np.float32))
    for t in range(steps):
        forces = draw(plans)
        costs = costs_of(torch, [x[:, None] for x in states], forces.transpose(0, 1))
        weights = torch.softmax(-costs / TEMPERATURE, 1)
        plans = (forces @ weights[..., None])[..., 0]
        states = next_state(torch, states, plans[:, 0])
        plans = torch.nn.functional.pad(plans[:, 1:], (0, 1))
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
    return lambda plans: plans[..., None] + FORCE * torch.randn(*plans.shape, rollouts, device=plans.device)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the angle of the pole, or how many poles are upright, every half second."""
    args = parsed(
        "cart_pole", __doc__, argv, library=("numpy", "torch", "jax"), device=("cpu", "cuda"), carts=1, draws=DRAWS,
        seed=7,
    )  # fmt: skip
    if args.carts == 1:
        run = control(seed=args.seed, device=args.device, library=args.library)
        print("seconds  angle of the pole (0 is upright)  position of the cart")
        lines = [f"{angle:7.2f} rad  {position:29.2f} m" for angle, position in zip(*run, strict=True)]
    else:
        library = "jax" if args.library == "jax" else "torch"
        run = control_many(args.carts, seed=args.seed, library=library, device=args.device, draws=args.draws)
        print("seconds  poles within 0.4 rad of upright")
        angles = np.remainder(run.angles + math.pi, 2 * math.pi) - math.pi
        lines = [f"{count} of {args.carts}" for count in np.count_nonzero(abs(angles) < 0.4, axis=1)]
    for k in range(11, len(lines), 12):
        print(f"{(k + 1) * SECONDS_PER_STEP:7.2f}  {lines[k]}")
    return 0


if __name__ == "__main__":
    run(main)
