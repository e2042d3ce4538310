"""JAX: means of any shape, `n` of any shape, and `multisample.jax.normal`."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
from cuda_memory import ExportedByDlpack

import multisample
from multisample import Generator, Key, sample, standard_normal

jax = pytest.importorskip("jax")
jnp = jax.numpy

SIZE = (2, 3, 4)


@pytest.mark.parametrize("shape", [(2, 3), (3,), (2, 1), (1, 1), ()])
@pytest.mark.parametrize("layout", ["dn", "nd"])
def test_samples_of_any_shape_have_the_numbers_of_the_cpu_backend(layout: Any, shape: tuple[int, ...]) -> None:
    mu, sigma = np.arange(6, dtype=np.float32).reshape(2, 3), np.full(shape, 0.5, np.float32)

    def draw(mu: Any, sigma: Any, seed: Any = 7) -> Any:
        return sample(mu, sigma, (4, 2), seed=seed, layout=layout)

    expected = draw(mu, sigma)
    for function in (draw, jax.jit(draw)):
        found = function(jnp.asarray(mu), jnp.asarray(sigma))
        assert found.shape == expected.shape
        assert np.array_equal(found, expected)
    batch = draw(jnp.asarray([mu, mu + 1]), jnp.asarray(sigma) if len(shape) < 2 else 0.5, [7, 8])
    assert np.array_equal(batch[1], draw(mu + 1, sigma, 8))
    gradients = jax.grad(lambda *arrays: draw(*arrays).sum(), (0, 1))(jnp.asarray(mu), jnp.asarray(sigma))
    assert [x.shape for x in gradients] == [(2, 3), shape]
    assert np.array_equal(gradients[0], np.full((2, 3), 8))


@pytest.mark.parametrize("shape", [(3,), (2, 3), (3, 1)])
@pytest.mark.parametrize("n", [4, (4,), (2, 2)])
def test_arrays_of_other_libraries_beside_a_key_or_an_array_of_jax_raise(shape: tuple[int, ...], n: Any) -> None:
    one, key = np.ones(shape, np.float32), jax.random.key(7)
    others: list[Any] = [ExportedByDlpack(one)]
    if importlib.util.find_spec("torch") is not None:
        others.append(importlib.import_module("torch").from_numpy(one))
    for other in others:
        for name, mu, sigma, seed in (
            ("mu", other, 1.0, key), ("mu", other, other, key), ("sigma", one, other, key),
            ("mu", other, jnp.asarray(one), 7), ("sigma", jnp.asarray(one), other, 7),
        ):  # fmt: skip
            with pytest.raises(TypeError, match=f"^{name}: expected an array of JAX or NumPy where others are JAX's"):
                sample(mu, sigma, n, seed=seed)


def test_standard_normals_of_other_libraries_refuse_jax() -> None:
    draws: list[Any] = [standard_normal]
    if importlib.util.find_spec("torch") is not None:
        draws.append(multisample.torch.randn)
    key = jax.random.key(7)
    for draw in draws:
        for seed in (key, jax.random.split(key, 3), jnp.asarray([1, 2, 3]), Key(jnp.uint32(7), 0)):
            for options in ({}, {"dtype": "float32"}):
                with pytest.raises(TypeError, match=r"^seed: .* of JAX, got .*; use multisample\.jax\.normal$"):
                    draw(3, seed=seed, **options)


def test_normal_has_the_numbers_of_standard_normal() -> None:
    key = jax.random.key(7)
    words = np.asarray(jax.random.key_data(key))
    for dtype in (None, "float16", jnp.bfloat16, jnp.float32):
        expected = standard_normal(SIZE, seed=words, dtype=dtype or "float32")
        for draw in (multisample.jax.normal, jax.jit(multisample.jax.normal, static_argnums=(1, 2))):
            found = draw(key, SIZE, dtype)
            assert (found.shape, found.dtype) == (SIZE, expected.dtype)
            assert np.asarray(found).tobytes() == expected.tobytes()
    keys = jax.random.split(key, 3)
    batch = jax.vmap(lambda key: multisample.jax.normal(key, SIZE))(keys)
    assert np.array_equal(batch[2], multisample.jax.normal(keys[2], SIZE))
    assert multisample.jax.normal(Key(7, 1)).shape == ()
    assert np.array_equal(multisample.jax.normal(7, 5), standard_normal(5, seed=7, dtype="float32"))
    with jax.enable_x64(True):
        assert multisample.jax.normal(key, 5).dtype == np.float64


def test_wrong_arguments_of_normal_raise() -> None:
    key = jax.random.key(7)
    for arguments, error, message in (
        ((None, 3), TypeError, "^key: expected a JAX key"),
        ((Generator(7), 3), TypeError, r"^key: expected a JAX key .* got Generator\(seed=7, offset=0\)$"),
        ((-1, 3), ValueError, "^key: expected a JAX key .* got -1$"),
        ((np.zeros((2, 3), np.uint32), 3), ValueError, "^key: expected a JAX key"),
        ((jax.random.key(7, impl="rbg"), 3), ValueError, "^key: expected a JAX key of 64 bits"),
        ((key, (2**20, 2**15)), ValueError, r"^shape: expected at most 2\*\*34 elements, got 34359738368"),
        ((key, 3, jnp.float64), TypeError, "^dtype: JAX has float64 only after"),
        ((jax.random.split(key), 3), ValueError, r"^key: expected one key, got a vector of 2; use jax\.vmap"),
        ((key, 3.0), TypeError, r"^shape: expected an integer, got 3\.0"),
        ((key, (3, -1)), ValueError, r"^shape\[1\]: expected 0 <="),
        ((key, 3, int), TypeError, "^dtype: expected float16"),
    ):
        with pytest.raises(error, match=message):
            multisample.jax.normal(*arguments)
