"""Command buffers of CUDA, which need flags of their own, and so a process of its own."""

from __future__ import annotations

import os
from typing import Any

import pytest
from processes import run_python
from skip_rules import require_device

import multisample

require_device()

pytest.importorskip("jax")

IN_COMMAND_BUFFERS = """
import sys
import jax, jax.numpy as jnp, numpy as np
from multisample import Key, perturb, sample

backend = sys.argv[1]
mu, sigma = np.linspace(-1, 1, 37, dtype=np.float32), np.linspace(1, 2, 37, dtype=np.float32)

@jax.jit
def draw(mu, sigma, key):
    x = sample(mu, sigma, 100, seed=key, backend=backend)
    y = sample(x.mean(1), sigma, 50, seed=Key(key, 1), backend=backend, layout="nd", antithetic=True)
    z = sample(y.mean(0), 1.0, 20, seed=Key(key, 2), backend=backend, noise="shared")
    tree = jax.lax.stop_gradient([mu, sigma.astype("float16")])
    return x, y, z, *perturb(tree, [1.0, 2.0], seed=Key(key, 3), member=4, backend=backend)

def loss(mu, sigma, key):
    return sum((x ** 2).sum() for x in draw(mu, sigma, key)[:3])

text = draw.lower(mu, sigma, jax.random.key(0)).compile().as_text()
for seed in range(5):  # The first runs record, later ones replay with other seeds.
    x, y, z, *tried = map(np.asarray, draw(mu, sigma, jax.random.key(seed)))
    for found, p in zip(tried, perturb([mu, sigma.astype("float16")], [1.0, 2.0], seed=Key(seed, 3), member=4)):
        assert (found == p).all()
    assert (x == sample(mu, sigma, 100, seed=seed)).all()
    center = np.asarray(jax.jit(lambda x: x.mean(1))(x))
    np.testing.assert_allclose(y, sample(center, sigma, 50, seed=Key(seed, 1), layout="nd", antithetic=True), atol=1e-5)
gradient = jax.jit(jax.grad(loss, (0, 1)))
first = gradient(mu, sigma, jax.random.key(3))
for _ in range(3):
    np.testing.assert_allclose(gradient(mu, sigma, jax.random.key(3)), first, rtol=1e-4)
jax.block_until_ready(gradient(mu, sigma, jax.random.key(4)))
print("recorded" if "command_buffer" in text else "not recorded")
"""


@pytest.mark.parametrize("name", ["cupy", "numba", "torch_ext"])
def test_calls_can_be_recorded_into_command_buffers(gpus: list[Any], name: str) -> None:
    status = multisample.list_backends()[name]
    if not status.available:
        pytest.skip("; ".join(status.reasons))
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_graph_min_graph_size=1"
    run = run_python("-c", IN_COMMAND_BUFFERS, name, seconds=600, XLA_FLAGS=flags)
    assert run.stdout.split()[-1] == "recorded"
