"""Typed calls by a user of PyTorch; see typed_user.py."""

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from typing_extensions import assert_type

import multisample

t = torch.zeros(3)
parameter = torch.nn.Parameter(t)
assert_type(multisample.sample(t, t, 5), torch.Tensor)
assert_type(multisample.sample(0.0, t, 5, dtype=torch.float64, generator=torch.Generator()), torch.Tensor)
assert_type(multisample.sample(parameter, 1.0, 5, backend="torch_ext", out=t), torch.Tensor)
assert_type(multisample.sample(parameter, parameter, 5, generator=multisample.Generator(7)), torch.Tensor)
assert_type(multisample.sample(parameter, np.float32(1), 5), torch.Tensor)
assert_type(multisample.weighted_moments(t, parameter, 1.0, seed=7), tuple[torch.Tensor, ...])
module = torch.nn.Linear(2, 3)
assert_type(multisample.perturb(module, 0.1, seed=7), dict[str, torch.Tensor])
assert_type(multisample.perturb(parameter, np.float32(0.1), seed=7), torch.Tensor)
assert_type(multisample.perturb(dict(module.named_parameters()), t, seed=t), dict[str, torch.Tensor])
assert_type(multisample.perturb(list(module.parameters()), [0.1], seed=7), list[torch.Tensor])
assert_type(multisample.perturb((t, parameter), 0.1, seed=7, backend="cpu"), tuple[torch.Tensor, ...])
assert_type(multisample.perturb(module.parameters(), 0.1, seed=7), list[torch.Tensor])
assert_type(multisample.perturb(module.named_parameters(), 0.1, seed=7), dict[str, torch.Tensor])
assert_type(multisample.perturb(list(module.named_parameters()), 0.1, seed=7), dict[str, torch.Tensor])
assert_type(multisample.perturb(t, 0.1, seed=7, out=parameter), torch.nn.Parameter)
assert_type(multisample.perturb(module, 0.1, seed=7, out=module), torch.nn.Linear)
assert_type(multisample.torch.perturb_(module, 0.1, seed=7), torch.nn.Linear)

multisample.perturb(module, "x", seed=7)  # type: ignore[arg-type]
multisample.perturb(module, 0.1, seed="x")  # type: ignore[arg-type]
multisample.torch.perturb_(module, 0.1, seed=1.5)  # type: ignore[arg-type]
multisample.weighted_moments(t, t, t, seed=7, order=3)  # type: ignore[call-overload]
multisample.sample(t, t, 5.0)  # type: ignore[call-overload]
multisample.sample(t, t, 5, seed="7")  # type: ignore[arg-type]
multisample.sample(t, t, 5, generator=np.random.default_rng())  # type: ignore[call-overload]
multisample.sample(t, "x", 5)  # type: ignore[arg-type]


def draw(sharded: DTensor, mesh: DeviceMesh) -> None:
    assert_type(multisample.sample(sharded, 1.0, 5), DTensor)
    assert_type(multisample.torch.sample_sharded(t, 1.0, 5, mesh=mesh, placements=[Shard(0)]), DTensor)
    multisample.torch.sample_sharded(t, 1.0, 5, mesh=mesh, placements=Shard(0))  # type: ignore[arg-type]


def score(x: torch.Tensor) -> torch.Tensor:
    return x.square().sum(0)


result = multisample.cem.minimize(score, t, 1.0, 100, callback=lambda run: bool(run.result().x.isnan().any()))
assert_type(result.x, torch.Tensor)
assert_type(multisample.cem.CEM(t, 1.0, 100).ask(), torch.Tensor)
assert_type(multisample.torch.Normal(t, 1.0).rsample((5,)), torch.Tensor)
assert_type(multisample.torch.Normal(t, 1.0).sample((5,), seed=multisample.Key(7, 0)), torch.Tensor)
assert_type(multisample.torch.Normal(t, 1.0).rsample((5,), generator=torch.Generator()), torch.Tensor)

multisample.cem.minimize(score, np.zeros(3), 1.0, 100)  # type: ignore[arg-type]
multisample.torch.randnn(3)  # type: ignore[attr-defined]
