"""Evolution strategies as people write them in JAX and PyTorch, with the whole population from one launch.

A step of OpenAI's evolution strategy (Salimans et al., "Evolution strategies as a scalable alternative to reinforcement
learning", 2017) perturbs the parameters for each member, scores all members by vmap, and moves the parameters by the
sum of the noise, weighted by the scores. `multisample.perturb` makes the population in one launch, and the update draws
the noise of all members again, so no step keeps it. Weight decay is part of the update.

python -m multisample examples populations --library torch     # functional PyTorch; --device cuda on a GPU
python -m multisample examples populations --library jax       # JAX, also with evosax if it is installed
"""

import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np

import multisample

from ._running import parsed

MEMBERS, SIGMA, RATE, DECAY = 64, 0.1, 0.02, 1e-4
INPUTS, HIDDEN = 4, 16


def problem(seed: int = 3) -> tuple[Any, Any]:
    """Inputs and outputs of a function that a small network can learn."""
    x = np.random.default_rng(seed).uniform(-1, 1, (128, INPUTS)).astype(np.float32)
    return x, np.sin(2 * x[:, :1]) + x[:, 1:2]


def coefficients_of(losses: Any) -> Any:
    """The coefficients of the update, for losses on the device: low ones pull."""
    ranks = losses.argsort().argsort() / (MEMBERS - 1) - 0.5
    return ranks * (-RATE / (MEMBERS * SIGMA) * 12**0.5)


# --- PyTorch --------------------------------------------------------------------------------------


def train_torch(steps: int = 200, device: str = "cpu", seed: int = 7) -> list[float]:
    """The loss before each step, of a module whose population is a dict for `torch.func.functional_call`."""
    import torch

    from multisample.torch import perturb_

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(INPUTS, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, 1)).to(device)
    x, y = (torch.from_numpy(a).to(device) for a in problem())

    def loss(parameters: Any) -> Any:
        return ((torch.func.functional_call(model, parameters, (x,)) - y) ** 2).mean()

    losses = []
    with torch.no_grad():
        for t in range(steps):
            losses.append(float(loss(dict(model.named_parameters()))))
            key = multisample.Key(seed, t)
            members = multisample.perturb(model, SIGMA, seed=key, member=range(MEMBERS))
            scores = torch.func.vmap(loss)(members)
            perturb_(model, coefficients_of(scores), seed=key, decay={"0.weight": DECAY, "2.weight": DECAY})
    return losses


# --- JAX ------------------------------------------------------------------------------------------


def network() -> Any:
    """The parameters of the network in JAX."""
    draw = np.random.default_rng(1)
    shapes = {"w1": (INPUTS, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, 1), "b2": (1,)}
    return {name: (draw.normal(size=shape) / 2).astype(np.float32) for name, shape in shapes.items()}


def loss_of(p: Any) -> Any:
    """The loss of the network with these parameters, in operations of JAX."""
    import jax.numpy as jnp

    x, y = problem()
    return ((jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"] - y) ** 2).mean()


def train_jax(steps: int = 200, seed: int = 7) -> list[float]:
    """The loss before each step, of a jitted scan in which each member has a JAX key of its own."""
    import jax
    import jax.numpy as jnp

    def step(p: Any, key: Any) -> Any:
        keys = jax.random.split(key, MEMBERS)
        members = multisample.perturb(p, SIGMA, seed=keys)
        coefficients = coefficients_of(jax.vmap(loss_of)(members))
        return multisample.perturb(p, coefficients, seed=keys, decay={"w1": DECAY, "w2": DECAY}), loss_of(p)

    keys = jax.random.split(jax.random.key(seed), steps)
    _, losses = jax.jit(lambda p: jax.lax.scan(step, p, keys))(jax.tree.map(jnp.asarray, network()))
    return [float(x) for x in losses]


def open_es(population_size: int, solution: Any, **options: Any) -> Any:
    """OpenES of evosax, with noise from `multisample`: it stores the key of a generation in place of the noise."""
    import jax
    import jax.numpy as jnp
    import optax
    from evosax.algorithms.distribution_based.open_es import Open_ES, State
    from flax import struct

    @struct.dataclass
    class KeyState(State):  # type: ignore[misc]
        key: Any = None

    class OpenES(Open_ES):  # type: ignore[misc]
        def _init(self, key: Any, params: Any) -> Any:
            return KeyState(**vars(super()._init(key, params)), key=jax.random.key_data(key))

        def _ask(self, key: Any, state: Any, params: Any) -> Any:
            members = jnp.arange(self.population_size)
            population = multisample.perturb(state.mean, state.std, seed=key, member=members)
            return population, state.replace(key=jax.random.key_data(key))

        def _tell(self, key: Any, population: Any, fitness: Any, state: Any, params: Any) -> Any:
            weights = fitness / (self.population_size * state.std)
            gradient = multisample.perturb(jnp.zeros_like(state.mean), weights, seed=state.key)
            updates, opt_state = self.optimizer.update(gradient, state.opt_state, state.mean)
            mean, std = optax.apply_updates(state.mean, updates), self.std_schedule(state.generation_counter)
            return state.replace(mean=mean, std=std, opt_state=opt_state)

    return OpenES(population_size, solution, **options)


def train_evosax(steps: int = 200, seed: int = 7) -> list[float]:
    """The best loss of each generation with `open_es`."""
    import jax
    import jax.numpy as jnp
    import optax

    solution = jax.tree.map(jnp.asarray, network())
    strategy = open_es(
        MEMBERS, solution, optimizer=optax.sgd(RATE * 12**0.5), std_schedule=optax.constant_schedule(SIGMA)
    )
    parameters = strategy.default_params
    state = strategy.init(jax.random.key(seed), solution, parameters)

    def step(state: Any, key: Any) -> Any:
        population, state = strategy.ask(key, state, parameters)
        losses = jax.vmap(loss_of)(population)
        state, _ = strategy.tell(key, population, losses, state, parameters)
        return state, losses.min()

    jitted, best = jax.jit(step), []
    for key in jax.random.split(jax.random.key(seed), steps):
        state, least = jitted(state, key)
        best.append(float(least))
    return best


def main(argv: Sequence[str] | None = None) -> int:
    """Print the losses."""
    options = parsed("populations", __doc__, argv, device="cpu", library=("torch", "jax"))
    runs: dict[str, list[float]] = {}
    if options.library == "torch":
        runs["PyTorch"] = train_torch(device=options.device)
    else:
        runs["JAX"] = train_jax()
        if importlib.util.find_spec("evosax") is not None:
            runs["evosax"] = train_evosax()
    print(f"step{''.join(f'{name:>12}' for name in runs)}")
    for t in (0, 20, 50, 100, 199):
        print(f"{t:4d}" + "".join(f"{losses[t]:12.4f}" for losses in runs.values()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
