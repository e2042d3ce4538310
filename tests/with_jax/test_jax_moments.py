"""`weighted_moments` with JAX: eager, in jit, vmap and grad."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moments import exact_moments

import multisample

Array = np.ndarray[Any, Any]
D, N = 30, 1001


def vectors() -> tuple[Array, Array, Array]:
    draw = np.random.default_rng(5)
    w, mu, sigma = draw.normal(size=N), draw.normal(size=D), draw.exponential(size=D)
    w[draw.random(N) < 0.5] = 0
    return w.astype(np.float32), mu.astype(np.float32), sigma.astype(np.float32)


W, MU, SIGMA = vectors()
OPTIONS: list[dict[str, Any]] = [
    {}, {"noise": "shared"}, {"antithetic": True}, {"dim_offset": 9, "sample_offset": 2**33 + 3},
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "name"), [*((options, "auto") for options in OPTIONS), ({}, "torch_ext"), (OPTIONS[-1], "torch_ext")]
)
def test_moments_are_those_of_the_sample(options: dict[str, Any], name: str) -> None:
    if name != "auto" and not multisample.list_backends()[name].available:
        pytest.skip(f"{name} cannot run")
    exact = exact_moments(W, MU, SIGMA, seed=5, **options)
    device = jax.devices("cpu")[0]
    w, mu, sigma = (jax.device_put(x, device) for x in (W, MU, SIGMA))
    eager = multisample.weighted_moments(w, mu, sigma, seed=5, backend=name, **options)
    assert all(isinstance(x, jax.Array) for x in eager)
    exact.check(*map(np.asarray, eager))

    @jax.jit
    def jitted(w: Any, mu: Any, sigma: Any, key: Any) -> Any:
        return multisample.weighted_moments(w, mu, sigma, seed=key, backend=name, **options)

    key = jnp.array([0, 5], jnp.uint32)
    in_vjp, _ = jax.vjp(lambda mu, sigma: jitted(w, mu, sigma, key), mu, sigma)
    in_batch = jax.vmap(jitted, (0, None, None, None))(jnp.stack([w, 2 * w]), mu, sigma, key)
    of_numpy = multisample.weighted_moments(W, MU, SIGMA, seed=5, **options)
    for found in (jitted(w, mu, sigma, key), in_vjp, [x[0] for x in in_batch], of_numpy):
        assert [np.asarray(x).tobytes() for x in found] == [np.asarray(x).tobytes() for x in eager]


def test_moments_of_numpy_arrays_with_a_key_of_jax() -> None:
    (first,) = multisample.weighted_moments(W, MU, SIGMA, order=1, seed=jax.random.key(5))
    exact_moments(W, MU, SIGMA, seed=5).check(np.asarray(first))


def test_gradients_flow_to_mu_and_sigma() -> None:
    z = jnp.asarray(multisample.sample(np.zeros(D, np.float32), 1.0, N, seed=5))
    scale = jnp.arange(1.0, D + 1)

    def loss(mu: Any, sigma: Any) -> Any:
        first, second = multisample.weighted_moments(W, mu, sigma, seed=5)
        return ((first + second**2) * scale).sum()

    def expected(mu: Any, sigma: Any) -> Any:
        first = (mu[:, None] + sigma[:, None] * z) @ W
        second = ((sigma[:, None] * z) ** 2) @ W
        return ((first + second**2) * scale).sum()

    for got, want in zip(
        jax.jit(jax.grad(loss, (0, 1)))(MU, SIGMA), jax.jit(jax.grad(expected, (0, 1)))(MU, SIGMA), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-1)


def test_second_derivatives_and_tangents_of_weights() -> None:
    z = multisample.sample(np.zeros(D, np.float32), 1.0, N, seed=5)
    hessian = jax.hessian(lambda sigma: multisample.weighted_moments(W, MU, sigma, seed=5)[1].sum())(SIGMA)
    np.testing.assert_allclose(hessian, np.diag(2 * z**2 @ W), rtol=2e-3, atol=1e-2)
    _, tangents = jax.jvp(lambda w: multisample.weighted_moments(w, MU, SIGMA, seed=5), (W,), (2 * W,))
    # The tangents are the moments of JAX's device: bits depend on the kind of device.
    moments = multisample.weighted_moments(jnp.asarray(2 * W), jnp.asarray(MU), jnp.asarray(SIGMA), seed=5)
    for tangent, moment in zip(tangents, moments, strict=True):
        assert np.asarray(tangent).tobytes() == np.asarray(moment).tobytes()


def test_gradients_of_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="weights: expected no gradient"):
        jax.jit(jax.grad(lambda w: multisample.weighted_moments(w, MU, SIGMA, seed=5)[0].sum()))(W)
    with_stop = jax.jit(
        jax.grad(lambda mu: multisample.weighted_moments(jax.lax.stop_gradient(mu[0] * W), mu, SIGMA, seed=5)[0].sum())
    )(MU)
    assert np.isfinite(np.asarray(with_stop)).all()


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"weights": jnp.ones((3, 3))}, ValueError, r"weights: expected shape \(n,\)"),
    ({"weights": jnp.ones(0)}, ValueError, "n being at least 1"),
    ({"weights": 1.0}, TypeError, "weights: expected an array of JAX or NumPy"),
    ({"weights": np.array([1.0, np.nan], np.float32)}, ValueError, "weights: expected finite weights"),
    ({"sigma": np.full(D, -1.0, np.float32)}, ValueError, "sigma: expected finite standard deviations"),
    ({"mu": jnp.ones(D - 1)}, ValueError, "sigma: expected as many elements as mu"),
    ({"order": 3}, ValueError, "order: expected"),
    ({"seed": None}, TypeError, "seed: expected"),
    ({"seed": jnp.ones(3)}, TypeError, "seed: expected"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=[str(k) for k in range(len(WRONG))])
def test_wrong_arguments_are_named(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"weights": jnp.asarray(W), "mu": jnp.asarray(MU), "sigma": SIGMA, "seed": 1, **changes}
    with pytest.raises(error, match=message):
        multisample.weighted_moments(**arguments)
