"""Derivatives and moments of traced calls draw the noise again: no program keeps the matrix."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_backend import FakeBackend
from moments import exact_moments

import multisample
from multisample import sample, weighted_moments

D, N = 6, 11
MU = np.linspace(-2, 3, D, dtype=np.float32)
SIGMA = np.linspace(0.5, 2, D, dtype=np.float32)
WEIGHTS = np.cos(np.arange(D * N, dtype=np.float32)).reshape(D, N)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "shared": {"noise": "shared"}, "nd": {"layout": "nd"},
    "all": {"antithetic": True, "dim_offset": 3, "sample_offset": 5, "layout": "nd", "noise": "shared"},
}  # fmt: skip


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
    f = lambda mu, sigma: draw(mu, sigma, jax_place, options)  # noqa: E731
    x, tangent = jax.jit(lambda *vectors: jax.jvp(f, vectors, dots))(MU, SIGMA)
    np.testing.assert_array_equal(x, sample(MU, SIGMA, N, seed=4, **options))
    np.testing.assert_array_equal(tangent, sample(*dots, N, seed=4, **options))
    _, linear = jax.linearize(lambda mu: draw(mu, SIGMA, jax_place, options), jnp.asarray(MU))
    np.testing.assert_array_equal(linear(jnp.asarray(dots[0])), sample(dots[0], 0.0, N, seed=4, **options))


@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["all"]], ids=["plain", "all"])
def test_hessians(jax_place: str, options: dict[str, Any]) -> None:
    z = noise(options).astype(np.float64)
    z = z.T if options.get("layout") == "nd" else z
    hessian = jax.hessian(lambda sigma: (draw(jnp.asarray(MU), sigma, jax_place, options) ** 2).sum())
    np.testing.assert_allclose(jax.jit(hessian)(SIGMA), np.diag(2 * (z**2).sum(1)), rtol=1e-5, atol=1e-4)


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


ROWS, COLUMNS = 30, 1001


def vectors() -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(5)
    w, mu, sigma = draw.normal(size=COLUMNS), draw.normal(size=ROWS), draw.exponential(size=ROWS)
    w[draw.random(COLUMNS) < 0.5] = 0
    return w.astype(np.float32), mu.astype(np.float32), sigma.astype(np.float32)


W, MEANS, SCALES = vectors()
MOMENTS: list[dict[str, Any]] = [
    {}, {"noise": "shared"}, {"antithetic": True}, {"dim_offset": 9, "sample_offset": 2**33 + 3},
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "name"), [*((options, "auto") for options in MOMENTS), ({}, "torch_ext"), (MOMENTS[-1], "torch_ext")]
)
def test_moments_are_those_of_the_sample(options: dict[str, Any], name: str) -> None:
    if name != "auto" and not multisample.list_backends()[name].available:
        pytest.skip(f"{name} cannot run")
    exact = exact_moments(W, MEANS, SCALES, seed=5, **options)
    device = jax.devices("cpu")[0]
    w, mu, sigma = (jax.device_put(x, device) for x in (W, MEANS, SCALES))
    eager = weighted_moments(w, mu, sigma, seed=5, backend=name, **options)
    assert all(isinstance(x, jax.Array) for x in eager)
    exact.check(*map(np.asarray, eager))

    @jax.jit
    def jitted(w: Any, mu: Any, sigma: Any, key: Any) -> Any:
        return weighted_moments(w, mu, sigma, seed=key, backend=name, **options)

    key = jnp.array([0, 5], jnp.uint32)
    in_vjp, _ = jax.vjp(lambda mu, sigma: jitted(w, mu, sigma, key), mu, sigma)
    in_batch = jax.vmap(jitted, (0, None, None, None))(jnp.stack([w, 2 * w]), mu, sigma, key)
    of_numpy = weighted_moments(W, MEANS, SCALES, seed=5, **options)
    for found in (jitted(w, mu, sigma, key), in_vjp, [x[0] for x in in_batch], of_numpy):
        assert [np.asarray(x).tobytes() for x in found] == [np.asarray(x).tobytes() for x in eager]


def test_moments_of_numpy_arrays_with_a_key_of_jax() -> None:
    (first,) = weighted_moments(W, MEANS, SCALES, order=1, seed=jax.random.key(5))
    exact_moments(W, MEANS, SCALES, seed=5).check(np.asarray(first))


def test_gradients_of_moments_flow_to_mu_and_sigma() -> None:
    z = jnp.asarray(sample(np.zeros(ROWS, np.float32), 1.0, COLUMNS, seed=5))
    scale = jnp.arange(1.0, ROWS + 1)

    def loss(mu: Any, sigma: Any) -> Any:
        first, second = weighted_moments(W, mu, sigma, seed=5)
        return ((first + second**2) * scale).sum()

    def expected(mu: Any, sigma: Any) -> Any:
        first = (mu[:, None] + sigma[:, None] * z) @ W
        second = ((sigma[:, None] * z) ** 2) @ W
        return ((first + second**2) * scale).sum()

    gradients = (jax.jit(jax.grad(f, (0, 1)))(MEANS, SCALES) for f in (loss, expected))
    for got, want in zip(*gradients, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-1)


def test_second_derivatives_and_tangents_of_weights() -> None:
    z = sample(np.zeros(ROWS, np.float32), 1.0, COLUMNS, seed=5)
    hessian = jax.hessian(lambda sigma: weighted_moments(W, MEANS, sigma, seed=5)[1].sum())(SCALES)
    np.testing.assert_allclose(hessian, np.diag(2 * z**2 @ W), rtol=2e-3, atol=1e-2)
    _, tangents = jax.jvp(lambda w: weighted_moments(w, MEANS, SCALES, seed=5), (W,), (2 * W,))
    # The tangents are the moments of JAX's device: bits depend on the kind of device.
    moments = weighted_moments(jnp.asarray(2 * W), jnp.asarray(MEANS), jnp.asarray(SCALES), seed=5)
    for tangent, moment in zip(tangents, moments, strict=True):
        assert np.asarray(tangent).tobytes() == np.asarray(moment).tobytes()


def test_gradients_of_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="weights: expected no gradient"):
        jax.jit(jax.grad(lambda w: weighted_moments(w, MEANS, SCALES, seed=5)[0].sum()))(W)
    stopped = lambda mu: weighted_moments(jax.lax.stop_gradient(mu[0] * W), mu, SCALES, seed=5)[0]  # noqa: E731
    with_stop = jax.jit(jax.grad(lambda mu: stopped(mu).sum()))(MEANS)
    assert np.isfinite(np.asarray(with_stop)).all()


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"weights": jnp.ones((3, 3))}, ValueError, r"weights: expected shape \(n,\)"),
    ({"weights": jnp.ones(0)}, ValueError, "n being at least 1"),
    ({"weights": 1.0}, TypeError, "weights: expected an array of shape"),
    ({"weights": np.array([1.0, np.nan], np.float32)}, ValueError, "weights: expected finite weights"),
    ({"mu": jnp.ones(ROWS - 1)}, ValueError, "sigma: expected as many elements as mu"),
    ({"order": 3}, ValueError, "order: expected"),
    ({"seed": None}, TypeError, "seed: expected"),
    ({"seed": jnp.ones(3)}, TypeError, "seed: expected"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=[str(k) for k in range(len(WRONG))])
def test_wrong_arguments_of_moments_are_named(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"weights": jnp.asarray(W), "mu": jnp.asarray(MEANS), "sigma": SCALES, "seed": 1, **changes}
    with pytest.raises(error, match=message):
        weighted_moments(**arguments)
