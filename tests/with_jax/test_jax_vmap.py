"""Batches: an element of a batch has the numbers of the call that it stands for."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from multisample import sample

jax = pytest.importorskip("jax")
jnp = jax.numpy
vmap = jax.vmap

B, D, N = 3, 5, 6
MUS = np.linspace(-2, 3, B * D, dtype=np.float32).reshape(B, D)
SIGMAS = np.linspace(0.5, 2, B * D, dtype=np.float32).reshape(B, D)
SEEDS = np.array([3, 2**31, 7], np.uint32)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared": {"noise": "shared"},
    "nd": {"layout": "nd"},
    "shared_nd": {"noise": "shared", "layout": "nd"},
    "all": {"antithetic": True, "dim_offset": 3, "sample_offset": 5, "dtype": "bfloat16"},
}


def keys() -> Any:
    return vmap(jax.random.key)(SEEDS)


def expected(b: int | None, c: int | None, e: int | None, options: dict[str, Any]) -> Any:
    return sample(MUS[b or 0], SIGMAS[c or 0], N, seed=int(SEEDS[e or 0]), **options)


AXES = [*itertools.product([0, None], repeat=3)][:-1]


@pytest.mark.parametrize(("axes", "name"), list(zip(AXES, itertools.cycle(OPTIONS), strict=False)))
def test_batches_equal_single_calls(every_place: str, axes: tuple[int | None, ...], name: str) -> None:
    def draw(mu: Any, sigma: Any, key: Any) -> Any:
        return sample(mu, sigma, N, seed=key, backend=every_place, **OPTIONS[name])

    batch = vmap(draw, in_axes=axes)
    given = [x if axis == 0 else x[0] for x, axis in zip((MUS, SIGMAS, keys()), axes, strict=True)]
    for found in (batch(*given), jax.jit(batch)(*given)):
        for i in range(B):
            own = expected(*(i if axis == 0 else None for axis in axes), OPTIONS[name])
            np.testing.assert_array_equal(np.asarray(found)[i], own)


def test_means_along_any_axis_and_windows_can_be_mapped(jax_place: str) -> None:
    def draw(mu: Any, row: Any) -> Any:
        return sample(mu, 1.0, N, seed=1, dim_offset=row, sample_offset=2 * row, backend=jax_place)

    found = vmap(draw, in_axes=(1, 0), out_axes=2)(MUS.T, np.arange(B))
    of_windows = vmap(draw, in_axes=(None, 0))(MUS[0], np.arange(B))
    for i in range(B):
        np.testing.assert_array_equal(found[:, :, i], draw(MUS[i], i))
        np.testing.assert_array_equal(of_windows[i], draw(MUS[0], i))


@pytest.mark.parametrize("options", [OPTIONS["shared_nd"], OPTIONS["all"]], ids=["shared_nd", "all"])
def test_batches_of_batches(jax_place: str, options: dict[str, Any]) -> None:
    def draw(mu: Any, sigma: Any, key: Any) -> Any:
        return sample(mu, sigma, N, seed=key, backend=jax_place, **options)

    cube = jax.jit(vmap(vmap(vmap(draw, (None, None, 0)), (None, 0, None)), (0, None, None)))(MUS, SIGMAS, keys())
    two = jax.jit(vmap(vmap(draw, (0, 0, None)), (None, None, 0)))(MUS, SIGMAS, keys())
    for b in range(B):
        for c in range(B):
            np.testing.assert_array_equal(np.asarray(two)[b, c], expected(c, c, b, options))
            for e in range(B):
                np.testing.assert_array_equal(np.asarray(cube)[b, c, e], expected(b, c, e, options))


def test_batches_of_no_or_one_element(jax_place: str) -> None:
    batch = vmap(lambda mu, key: sample(mu, 1.0, N, seed=key, backend=jax_place))
    nested = vmap(lambda mu, keys: vmap(lambda key: sample(mu, 1.0, N, seed=key))(keys), (0, None))
    for size in (0, 1):
        x = jax.jit(batch)(MUS[:size], keys()[:size])
        assert x.shape == (size, D, N)
        assert jax.jit(nested)(MUS, keys()[:size]).shape == (B, size, D, N)
    np.testing.assert_array_equal(x[0], sample(MUS[0], 1.0, N, seed=3))


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
def test_gradients_of_batches_and_batches_of_gradients(jax_place: str, axes: tuple[int | None, int | None]) -> None:
    def loss(mu: Any, sigma: Any, key: Any) -> Any:
        return (sample(mu, sigma, N, seed=key, backend=jax_place) ** 3).sum()

    mu, key = (x if axis == 0 else x[0] for x, axis in zip((MUS, keys()), axes, strict=True))
    single = [
        jax.grad(loss, (0, 1))(mu[i] if axes[0] == 0 else mu, SIGMAS[0], key[i] if axes[1] == 0 else key)
        for i in range(B)
    ]
    inside = jax.jit(vmap(jax.grad(loss, (0, 1)), (axes[0], None, axes[1])))(mu, SIGMAS[0], key)
    for i in range(B):
        np.testing.assert_allclose(inside[0][i], single[i][0], rtol=1e-5)
        np.testing.assert_allclose(inside[1][i], single[i][1], rtol=1e-5)

    def total(mu: Any, sigma: Any) -> Any:
        return vmap(loss, (axes[0], None, axes[1]))(mu, sigma, key).sum()

    outside = jax.jit(jax.grad(total, (0, 1)))(mu, SIGMAS[0])
    by_mu = np.stack([x[0] for x in single])
    np.testing.assert_allclose(outside[0], by_mu if axes[0] == 0 else by_mu.sum(0), rtol=1e-5)
    np.testing.assert_allclose(outside[1], np.stack([x[1] for x in single]).sum(0), rtol=1e-5)
