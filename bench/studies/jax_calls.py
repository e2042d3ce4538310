"""Calls in jitted functions of JAX, beside `mu + sigma * jax.random.normal` in a jitted function.

python -m bench.studies.jax_calls results.json [cpu] [cuda]

`us` is the time of a call that is waited for. `queued us` is the time of each of several calls of which only the last
is waited for: throughput, where the device takes longer than the host. Ratios are to "sample, jit".

A population has 64 members of 2^20 parameters: "perturb" makes it in one call, "vmap" draws each by threefry.

"normal" draws with threefry, "rbg" with JAX's generator of that name. "mu + sigma" is what any jitted call costs. Eager
calls have a key or an integer as their seed, the same in all calls or a new one in each. "copy of a seed" copies the 8
bytes of an integer seed to the device. "torch_ext" is a call with PyTorch tensors on the same GPU.
"""

import functools
import itertools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import multisample
from bench.studies.rows import Call, Rows, cuda_vectors, main, on_host, rows_of

SHAPES = {"cpu": ((10, 10), (100, 1024), (1000, 10_000)), "cuda": ((10, 10), (100, 1024), (4096, 65_536))}
SECONDS = 0.03  # The least duration of a turn.


def contenders(platform: str, d: int, n: int) -> dict[str, Call]:
    """Functions of no argument that return what is to be waited for."""
    mu, sigma = jnp.linspace(-1, 1, d, dtype=jnp.float32), jnp.linspace(1, 2, d, dtype=jnp.float32)
    key, rbg, words = jax.random.key(0), jax.random.key(0, impl="rbg"), np.zeros(2, np.uint32)
    seeds = itertools.count(2**20)

    draw = jax.jit(lambda mu, sigma, key: multisample.sample(mu, sigma, n, seed=key))
    normal = jax.jit(lambda mu, sigma, key: mu[:, None] + sigma[:, None] * jax.random.normal(key, (d, n)))
    add = jax.jit(lambda mu, sigma: mu + sigma)
    calls: dict[str, Call] = {
        "sample, jit": lambda: draw(mu, sigma, key),
        "normal": lambda: normal(mu, sigma, key),
        "rbg": lambda: normal(mu, sigma, rbg),
        "mu + sigma": lambda: add(mu, sigma),
        "sample, eager, key": lambda: multisample.sample(mu, sigma, n, seed=key),
        "sample, eager": lambda: multisample.sample(mu, sigma, n, seed=7),
        "sample, eager, new seeds": lambda: multisample.sample(mu, sigma, n, seed=next(seeds)),
        "sample, eager, new keys": lambda: multisample.sample(mu, sigma, n, seed=jax.random.key(next(seeds))),
        "copy of a seed": lambda: jax.device_put(words),
    }
    if platform == "cuda":
        calls["torch_ext"] = functools.partial(multisample.sample, *cuda_vectors(d), n, seed=7)
    return calls


def wait(result: Any) -> None:
    if type(result).__module__ == "torch":
        sys.modules["torch"].cuda.synchronize()
    else:
        jax.block_until_ready(result)


def rows(platform: str) -> Rows:
    with jax.default_device(jax.devices(platform)[0]):
        for d, n in SHAPES[platform]:
            queued = contenders(platform, d, n)
            waited = {name: lambda call=call: wait(call()) for name, call in queued.items()}
            found = on_host(waited, least=SECONDS), on_host(queued, wait, least=SECONDS)
            pairs = (rows_of(f"{platform} {d}x{n}", turns, "sample, jit") for turns in found)
            for row, other in zip(*pairs, strict=True):
                yield {**row, "queued us": other["us"], "queued ratio": other["ratio"]}


def population(platform: str) -> Rows:
    with jax.default_device(jax.devices(platform)[0]):
        p, keys = jnp.zeros(1 << 20), jax.random.split(jax.random.key(1), 64)
        perturb = jax.jit(lambda p, keys: multisample.perturb(p, 0.1, seed=keys))
        vmap = jax.jit(jax.vmap(lambda p, key: p + 0.1 * jax.random.normal(key, p.shape), (None, 0)))
        calls: dict[str, Call] = {"perturb": lambda: wait(perturb(p, keys)), "vmap": lambda: wait(vmap(p, keys))}
        yield from rows_of(f"{platform} population", on_host(calls, least=SECONDS), "perturb")


if __name__ == "__main__":
    parts = {platform: functools.partial(rows, platform) for platform in SHAPES}
    parts |= {f"{platform} population": functools.partial(population, platform) for platform in SHAPES}
    main(__doc__ or "", parts)
