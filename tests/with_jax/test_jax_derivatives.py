"""Derivatives of traced calls draw the noise again: no program keeps the matrix for its backward pass."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_backend import FakeBackend

from multisample import sample

jax = pytest.importorskip("jax")
jnp = jax.numpy

D, N = 6, 11
MU = np.linspace(-2, 3, D, dtype=np.float32)
SIGMA = np.linspace(0.5, 2, D, dtype=np.float32)
WEIGHTS = np.cos(np.arange(D * N, dtype=np.float32)).reshape(D, N)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared": {"noise": "shared"},
    "nd": {"layout": "nd"},
    "all": {"antithetic": True, "dim_offset": 3, "sample_offset": 5, "layout": "nd", "noise": "shared"},
}


def noise(options: dict[str, Any]) -> Any:
    """The normals of a call, as it lays them out."""
    return sample(np.zeros(D, np.float32), 1.0, N, seed=4, **options)


def weights(options: dict[str, Any]) -> Any:
    return WEIGHTS.T if options.get("layout") == "nd" else WEIGHTS


def draw(mu: Any, sigma: Any, backend: str, options: dict[str, Any]) -> Any:
    return sample(mu, sigma, N, seed=4, backend=backend, **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_reverse_mode(every_place: str, options: dict[str, Any]) -> None:
    def loss(mu: Any, sigma: Any) -> Any:
        return (weights(options) * draw(mu, sigma, every_place, options)).sum()

    axis = 0 if options.get("layout") == "nd" else 1
    w, z = weights(options).astype(np.float64), noise(options).astype(np.float64)
    expected = w.sum(axis), (w * z).sum(axis)

    def gradients(mu: Any, sigma: Any) -> Any:
        """Of both vectors, also with a checkpoint, and of one while the other is constant."""
        both = [jax.grad(f, (0, 1))(mu, sigma) for f in (loss, jax.checkpoint(loss))]
        return [*both, [jax.grad(loss, k)(mu, sigma) for k in (0, 1)]]

    for found in (*jax.jit(gradients)(MU, SIGMA), jax.grad(loss, (0, 1))(MU, SIGMA)):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_forward_mode_has_the_bits_of_a_sample(jax_place: str, options: dict[str, Any]) -> None:
    dots = np.linspace(1, 2, D, dtype=np.float32), np.linspace(3, 1, D, dtype=np.float32)
    x, tangent = jax.jit(
        lambda *vectors: jax.jvp(lambda mu, sigma: draw(mu, sigma, jax_place, options), vectors, dots)
    )(MU, SIGMA)
    np.testing.assert_array_equal(x, sample(MU, SIGMA, N, seed=4, **options))
    np.testing.assert_array_equal(tangent, sample(*dots, N, seed=4, **options))
    _, linear = jax.linearize(lambda mu: draw(mu, SIGMA, jax_place, options), jnp.asarray(MU))
    np.testing.assert_array_equal(linear(jnp.asarray(dots[0])), sample(dots[0], 0.0, N, seed=4, **options))


@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["all"]], ids=["plain", "all"])
def test_hessians(jax_place: str, options: dict[str, Any]) -> None:
    z = noise(options).astype(np.float64)
    z = z.T if options.get("layout") == "nd" else z

    def loss(sigma: Any) -> Any:
        return (draw(jnp.asarray(MU), sigma, jax_place, options) ** 2).sum()

    np.testing.assert_allclose(jax.jit(jax.hessian(loss))(SIGMA), np.diag(2 * (z**2).sum(1)), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_gradients_of_every_type_have_the_type_of_mu(jax_place: str, x64: None, dtype: str) -> None:
    mu, sigma = jnp.asarray(MU, dtype), jnp.asarray(SIGMA, dtype)

    def loss(mu: Any, sigma: Any) -> Any:
        return sample(mu, sigma, N, seed=4, backend=jax_place).astype(jnp.float64).sum()

    computing = "float64" if dtype == "float64" else "float32"
    z = sample(np.zeros(D), 1.0, N, seed=4, dtype=computing)
    gradient = jax.jit(jax.grad(loss, (0, 1)))
    for found, expected in zip(gradient(mu, sigma), (np.full(D, N), z.sum(1)), strict=True):
        assert found.dtype == mu.dtype
        tolerance = {"float64": 1e-12, "float32": 1e-5}.get(dtype, 2**-7)
        np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=tolerance, atol=tolerance)


def test_the_gradient_of_a_scalar_sigma_sums_over_dimensions() -> None:
    found = jax.grad(lambda s: sample(MU, s, N, seed=4).sum())(jnp.float32(2.0))
    np.testing.assert_allclose(found, noise({}).sum(), rtol=1e-5)


def test_a_backend_without_gradients_draws_the_noise_for_them(registered: Callable[[Any], Any]) -> None:
    registered(FakeBackend("samples"))
    with jax.default_device(jax.devices("cpu")[0]):
        found = jax.grad(lambda s: (WEIGHTS.T * draw(MU, s, "samples", OPTIONS["nd"])).sum())(SIGMA)
    np.testing.assert_allclose(found, (WEIGHTS * noise({})).sum(1), rtol=1e-5, atol=1e-5)


def test_a_compiled_gradient_holds_no_noise() -> None:
    """If the loss is linear in the sample, its gradient does not depend on the sample, and never draws it."""
    with jax.default_device(jax.devices("cpu")[0]):
        n, size = 10_000, 4 * D * 10_000
        g = np.ones((D, n), np.float32)

        def loss(mu: Any, sigma: Any, g: Any) -> Any:
            return (g * sample(mu, sigma, n, seed=4)).sum()

        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(MU, SIGMA, g).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < size / 100
        assert re.findall(r'custom_call_target="(\w+)"', compiled.as_text()) == ["multisample_gradient"]

        def steps(mu: Any, sigma: Any, keys: Any) -> Any:
            def step(total: Any, key: Any) -> tuple[Any, None]:
                return total + jnp.tanh(sample(mu, sigma, n, seed=key).mean(1)), None

            return jax.lax.scan(step, jnp.zeros(D), keys)[0].sum()

        keys = jax.random.split(jax.random.key(0), 50)
        compiled = jax.jit(jax.grad(steps, (0, 1))).lower(MU, SIGMA, keys).compile()
        # The program holds one matrix at a time, forwards and backwards, not those of all 50 steps.
        assert compiled.memory_analysis().temp_size_in_bytes < 4 * size
