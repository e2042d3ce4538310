"""A vector of seeds: a sample has the bits of `jax.vmap` over them, and of a call for each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from multisample import Key, sample, weighted_moments

B, D, N = 3, 5, 13
MUS = np.linspace(-2, 3, B * D, dtype=np.float32).reshape(B, D)
SIGMAS = np.linspace(0.5, 2, B * D, dtype=np.float32).reshape(B, D)
WEIGHTS = np.linspace(-1, 1, B * N, dtype=np.float32).reshape(B, N)
PAIRS = [(2**40 + 3, 2**33 + 1), (2**32 - 1, 0), (7, 5)]
SEEDS = [seed for seed, _ in PAIRS]


def data(*numbers: int) -> list[int]:
    return [half for number in numbers for half in (number >> 32, number & 0xFFFF_FFFF)]


PLAIN = [Key(seed, 0) for seed in SEEDS]
WITH_OFFSETS = [Key(*pair) for pair in PAIRS]
# The vector of seeds, and the Key of each element.
FORMS: dict[str, tuple[Callable[[], Any], list[Key]]] = {
    "keys": (lambda: jax.random.wrap_key_data(jnp.array([data(x) for x in SEEDS], jnp.uint32)), PLAIN),
    "uint32[B, 2]": (lambda: jnp.array([data(x) for x in SEEDS], jnp.uint32), PLAIN),
    "uint32[B, 4]": (lambda: jnp.array([data(*pair) for pair in PAIRS], jnp.uint32), WITH_OFFSETS),
    "int32[B]": (lambda: jnp.array([1, 0, 9], jnp.int32), [Key(1, 0), Key(0, 0), Key(9, 0)]),
    "int8[B, 2]": (lambda: jnp.array([[127, 2], [3, 4], [0, 0]], jnp.int8), [Key(127, 2), Key(3, 4), Key(0, 0)]),
    "uint64[B] of NumPy": (lambda: np.array(SEEDS, np.uint64), PLAIN),
    "uint64[B, 2] of NumPy": (lambda: np.array(PAIRS, np.uint64), WITH_OFFSETS),
    "list": (lambda: [SEEDS[0], Key(*PAIRS[1]), np.int64(7)], [PLAIN[0], WITH_OFFSETS[1], Key(7, 0)]),
}
SHAPES = {"own": (MUS, SIGMAS), "shared mu": (MUS[0], SIGMAS), "shared": (MUS[0], SIGMAS[0]), "number": (MUS, 2.0)}
OPTIONS: list[dict[str, Any]] = [
    {}, {"layout": "nd", "noise": "shared"}, {"antithetic": True, "dim_offset": 3, "sample_offset": 2**33 + 5},
]  # fmt: skip


def element(x: Any, b: int) -> Any:
    return x[b] if np.ndim(x) == 2 else x


def run(draw: Callable[..., Any], seeds: Any, jitted: bool) -> Any:
    """``draw(seeds)``. If jitted, JAX arrays are traced, and lists and NumPy arrays are constants."""
    if not jitted:
        return draw(seeds)
    return jax.jit(lambda: draw(seeds))() if isinstance(seeds, (list, np.ndarray)) else jax.jit(draw)(seeds)


# All pairs of a shape and options, each with the next form.
TURNS = list(zip(itertools.cycle(FORMS), itertools.product(SHAPES, OPTIONS)))


@pytest.mark.parametrize(("form", "shape_and_options"), TURNS, ids=range(len(TURNS)))
def test_each_element_of_a_sample_is_its_own_call(form: str, shape_and_options: Any) -> None:
    (make, keys), (shape, options) = FORMS[form], shape_and_options
    mu, sigma = SHAPES[shape]
    for jitted in (False, True):
        x = run(lambda seeds: sample(jnp.asarray(mu), sigma, N, seed=seeds, **options), make(), jitted)
        assert x.shape == ((B, N, D) if "layout" in options else (B, D, N))
        for b, key in enumerate(keys):
            np.testing.assert_array_equal(x[b], sample(element(mu, b), element(sigma, b), N, seed=key, **options))


@pytest.mark.parametrize(
    ("seeds", "keys"), [(np.array([-1, 9], np.int32), [2**32 - 1, 9]), (np.array([[3, -4]], np.int8), [Key(3, 252)])]
)
def test_negative_seeds_raise_on_the_host_and_count_modulo_their_type_if_traced(seeds: Any, keys: list[Any]) -> None:
    def draw(seeds: Any) -> Any:
        return sample(jnp.asarray(MUS[0]), 1.0, N, seed=seeds)

    with jax.default_device(jax.devices("cpu")[0]):
        for seed, jitted in ((seeds, False), (seeds, True), (jnp.asarray(seeds), False)):
            with pytest.raises(ValueError, match=r"^seed\[0.*\]: expected 0 <= .*, got -"):
                run(draw, seed, jitted)
        np.testing.assert_array_equal(run(draw, jnp.asarray(seeds), True), draw(keys))


def test_a_vector_of_seeds_is_vmap_over_them() -> None:
    keys, mu = jax.random.split(jax.random.key(3), B), jnp.asarray(MUS[0])
    mapped = jax.jit(jax.vmap(lambda key: sample(mu, 1.0, N, seed=key)))(keys)
    sample(mu, 1.0, N, seed=keys[0])  # Its plan is for one key of this type.
    sample(mu, 1.0, N, seed=keys[1])
    np.testing.assert_array_equal(sample(mu, 1.0, N, seed=keys), mapped)
    np.testing.assert_array_equal(sample(mu, 1.0, N, seed=keys[1]), mapped[1])
    text = jax.jit(lambda keys: sample(mu, 1.0, N, seed=keys)).lower(keys).compile().as_text()
    assert text.count(" custom-call(") == 1
    gradient = jax.jit(jax.grad(lambda mu: (sample(mu, 1.0, N, seed=keys) ** 2).sum()))(mu)
    assert gradient.shape == (D,)


@pytest.mark.parametrize(
    ("form", "shape", "shares_weights", "jitted"),
    [("keys", "number", True, False), ("uint32[B, 4]", "own", False, True), ("list", "shared", False, True)],
)
def test_each_element_of_moments_has_the_sums_of_its_own_call(
    form: str, shape: str, shares_weights: bool, jitted: bool
) -> None:
    (make, keys), (mu, sigma) = FORMS[form], SHAPES[shape]
    operands = jnp.asarray(WEIGHTS[0] if shares_weights else WEIGHTS), jnp.asarray(mu), sigma
    found = run(lambda seeds: weighted_moments(*operands, seed=seeds), make(), jitted)
    assert [x.shape for x in found] == [(B, D)] * 2
    for b, key in enumerate(keys):
        one = weighted_moments(*(jnp.asarray(element(x, b)) for x in operands[:2]), element(sigma, b), seed=key)
        # XLA may fuse one of the two products of the first moment with their sum.
        np.testing.assert_allclose(found[0][b], one[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(found[1][b], one[1])


def test_no_seeds_give_an_empty_result() -> None:
    empty = jnp.zeros((0, 2), jnp.uint32)
    assert sample(jnp.asarray(MUS[0]), 1.0, N, seed=empty).shape == (0, D, N)
    assert sample(jnp.asarray(MUS[:0]), 1.0, N, seed=[]).shape == (0, D, N)
    assert weighted_moments(jnp.ones(N), MUS[0], 1.0, seed=empty)[1].shape == (0, D)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"mu": jnp.zeros((2, D))}, ValueError, r"^mu: expected shape \(B, \*S\) or \(d,\), B being 3 .*\(2, 5\)"),
        ({"sigma": np.ones((2, D, 1))}, ValueError, r"^sigma: expected shape \(B, \*S\) or \(d,\).*\(2, 5, 1\)"),
        ({"sigma": jnp.ones((B, D + 1))}, ValueError, r"^sigma: expected as many elements as mu"),
        ({"sigma": -SIGMAS}, ValueError, r"^sigma: "),
        ({"seed": jnp.zeros((3, 3), jnp.uint32)}, TypeError, r"^seed: expected .*uint32\[3, 3\]"),
        ({"seed": jnp.zeros((3, 3), jnp.int32)}, TypeError, r"^seed: expected .*int32\[3, 3\]"),
        ({"seed": [1, -1, 2]}, ValueError, r"^seed.*-1"),
        ({"seed": [1, 2.0, 3]}, TypeError, r"^seed.*float"),
        ({"seed": jax.random.split(jax.random.key(0, impl="rbg"), 3)}, ValueError, r"^seed: .*128 bits"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"mu": jnp.asarray(MUS[0]), "sigma": SIGMAS[0], "n": N, "seed": jnp.zeros((3, 2), jnp.uint32)}
    with pytest.raises(error, match=message):
        sample(**arguments | changes)


def test_weights_have_a_row_for_each_seed() -> None:
    with pytest.raises(ValueError, match=r"^weights: expected shape \(n,\) or \(B, n\), B being 3 .*\(2, 13\)"):
        weighted_moments(jnp.asarray(WEIGHTS[:2]), MUS, 1.0, seed=[1, 2, 3])
