"""Batches: each element of a vector of seeds, or of `jax.vmap`, has the bits of its own call."""

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
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "shared": {"noise": "shared"}, "nd": {"layout": "nd"},
    "shared_nd": {"noise": "shared", "layout": "nd"},
    "all": {"antithetic": True, "dim_offset": 3, "sample_offset": 2**33 + 5, "dtype": "bfloat16"},
}  # fmt: skip


def element(x: Any, b: int) -> Any:
    return x[b] if np.ndim(x) == 2 else x


def run(draw: Callable[..., Any], seeds: Any, jitted: bool) -> Any:
    """``draw(seeds)``. If jitted, JAX arrays are traced, and lists and NumPy arrays are constants."""
    if not jitted:
        return draw(seeds)
    return jax.jit(lambda: draw(seeds))() if isinstance(seeds, (list, np.ndarray)) else jax.jit(draw)(seeds)


# All pairs of a shape and options, each with the next form.
TURNS = list(zip(itertools.cycle(FORMS), itertools.product(SHAPES, ("plain", "shared_nd", "all"))))


@pytest.mark.parametrize(("form", "shape_and_options"), TURNS, ids=str)
def test_each_element_of_a_sample_is_its_own_call(form: str, shape_and_options: Any) -> None:
    (make, keys), (shape, name) = FORMS[form], shape_and_options
    (mu, sigma), options = SHAPES[shape], OPTIONS[name]
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
    for seed, drawn in ((keys[0], mapped[0]), (keys[1], mapped[1]), (keys, mapped), (keys[1], mapped[1])):
        np.testing.assert_array_equal(sample(mu, 1.0, N, seed=seed), drawn)  # One key and a vector have own plans.
    text = jax.jit(lambda keys: sample(mu, 1.0, N, seed=keys)).lower(keys).compile().as_text()
    assert text.count(" custom-call(") == 1
    gradient = jax.jit(jax.grad(lambda mu: (sample(mu, 1.0, N, seed=keys) ** 2).sum()))(mu)
    assert gradient.shape == (D,)


@pytest.mark.parametrize(("form", "shape", "shares_weights", "jitted"), [
    ("keys", "number", True, False), ("uint32[B, 4]", "own", False, True), ("list", "shared", False, True),
])  # fmt: skip
def test_each_element_of_moments_is_its_own_call(form: str, shape: str, shares_weights: bool, jitted: bool) -> None:
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


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"mu": jnp.zeros((2, D))}, ValueError, r"^mu: expected shape \(B, \*S\) or \(d,\), B being 3 .*\(2, 5\)"),
    ({"sigma": np.ones((2, D, 1))}, ValueError, r"^sigma: expected shape \(B, \*S\) or \(d,\).*\(2, 5, 1\)"),
    ({"sigma": jnp.ones((B, D + 1))}, ValueError, r"^sigma: expected as many elements as mu"),
    ({"sigma": -SIGMAS}, ValueError, r"^sigma: "),
    ({"seed": jnp.zeros((3, 3), jnp.uint32)}, ValueError, r"^seed: expected key data .*\(3, 3\)"),
    ({"seed": jnp.zeros((3, 3), jnp.int32)}, ValueError, r"^seed: expected an array .*\(3, 3\)"),
    ({"seed": jnp.zeros(3)}, TypeError, r"^seed: expected integers, got a JAX array of type float"),
    ({"seed": [1, -1, 2]}, ValueError, r"^seed.*-1"),
    ({"seed": [1, 2.0, 3]}, TypeError, r"^seed.*float"),
    ({"seed": jax.random.split(jax.random.key(0, impl="rbg"), 3)}, ValueError, r"^seed: .*128 bits"),
])  # fmt: skip
def test_wrong_arguments_are_named(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"mu": jnp.asarray(MUS[0]), "sigma": SIGMAS[0], "n": N, "seed": jnp.zeros((3, 2), jnp.uint32)}
    with pytest.raises(error, match=message):
        sample(**arguments | changes)


def test_weights_have_a_row_for_each_seed() -> None:
    with pytest.raises(ValueError, match=r"^weights: expected shape \(n,\) or \(B, n\), B being 3 .*\(2, 13\)"):
        weighted_moments(jnp.asarray(WEIGHTS[:2]), MUS, 1.0, seed=[1, 2, 3])


def keys() -> Any:
    return FORMS["keys"][0]()


def expected(b: int | None, c: int | None, e: int | None, options: dict[str, Any]) -> Any:
    return sample(MUS[b or 0], SIGMAS[c or 0], N, seed=SEEDS[e or 0], **options)


AXES = [*itertools.product([0, None], repeat=3)][:-1]


@pytest.mark.parametrize(("axes", "name"), list(zip(AXES, itertools.cycle(OPTIONS), strict=False)))
def test_batches_equal_single_calls(every_place: str, axes: tuple[int | None, ...], name: str) -> None:
    options = OPTIONS[name] | {"backend": every_place}
    batch = jax.vmap(lambda mu, sigma, key: sample(mu, sigma, N, seed=key, **options), in_axes=axes)
    given = [x if axis == 0 else x[0] for x, axis in zip((MUS, SIGMAS, keys()), axes, strict=True)]
    for found in (batch(*given), jax.jit(batch)(*given)):
        for i in range(B):
            own = expected(*(i if axis == 0 else None for axis in axes), OPTIONS[name])
            np.testing.assert_array_equal(np.asarray(found)[i], own)


def test_means_along_any_axis_and_windows_can_be_mapped(jax_place: str) -> None:
    def draw(mu: Any, row: Any) -> Any:
        return sample(jnp.asarray(mu), 1.0, N, seed=1, dim_offset=row, sample_offset=2 * row, backend=jax_place)

    found = jax.vmap(draw, in_axes=(1, 0), out_axes=2)(MUS.T, np.arange(B))
    of_windows = jax.vmap(draw, in_axes=(None, 0))(MUS[0], np.arange(B))
    for i in range(B):
        np.testing.assert_array_equal(found[:, :, i], draw(MUS[i], i))
        np.testing.assert_array_equal(of_windows[i], draw(MUS[0], i))


@pytest.mark.parametrize("options", [OPTIONS["shared_nd"], OPTIONS["all"]], ids=["shared_nd", "all"])
def test_batches_of_batches(jax_place: str, options: dict[str, Any]) -> None:
    def draw(mu: Any, sigma: Any, key: Any) -> Any:
        return sample(mu, sigma, N, seed=key, backend=jax_place, **options)

    over_all = jax.vmap(jax.vmap(jax.vmap(draw, (None, None, 0)), (None, 0, None)), (0, None, None))
    cube = jax.jit(over_all)(MUS, SIGMAS, keys())
    two = jax.jit(jax.vmap(jax.vmap(draw, (0, 0, None)), (None, None, 0)))(MUS, SIGMAS, keys())
    for b in range(B):
        for c in range(B):
            np.testing.assert_array_equal(np.asarray(two)[b, c], expected(c, c, b, options))
            for e in range(B):
                np.testing.assert_array_equal(np.asarray(cube)[b, c, e], expected(b, c, e, options))


def test_batches_of_no_or_one_element(jax_place: str) -> None:
    batch = jax.vmap(lambda mu, key: sample(mu, 1.0, N, seed=key, backend=jax_place))
    nested = jax.vmap(lambda mu, keys: jax.vmap(lambda key: sample(mu, 1.0, N, seed=key))(keys), (0, None))
    for size in (0, 1):
        x = jax.jit(batch)(MUS[:size], keys()[:size])
        assert x.shape == (size, D, N)
        assert jax.jit(nested)(MUS, keys()[:size]).shape == (B, size, D, N)
    np.testing.assert_array_equal(x[0], sample(MUS[0], 1.0, N, seed=SEEDS[0]))


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
def test_gradients_of_batches_and_batches_of_gradients(jax_place: str, axes: tuple[int | None, int | None]) -> None:
    def loss(mu: Any, sigma: Any, key: Any) -> Any:
        return (sample(mu, sigma, N, seed=key, backend=jax_place) ** 3).sum()

    mu, key = (x if axis == 0 else x[0] for x, axis in zip((MUS, keys()), axes, strict=True))
    of_each = [(mu[i] if axes[0] == 0 else mu, SIGMAS[0], key[i] if axes[1] == 0 else key) for i in range(B)]
    single = [jax.grad(loss, (0, 1))(*arguments) for arguments in of_each]
    inside = jax.jit(jax.vmap(jax.grad(loss, (0, 1)), (axes[0], None, axes[1])))(mu, SIGMAS[0], key)
    for i in range(B):
        np.testing.assert_allclose(inside[0][i], single[i][0], rtol=1e-5)
        np.testing.assert_allclose(inside[1][i], single[i][1], rtol=1e-5)
    total = jax.grad(lambda mu, sigma: jax.vmap(loss, (axes[0], None, axes[1]))(mu, sigma, key).sum(), (0, 1))
    outside = jax.jit(total)(mu, SIGMAS[0])
    by_mu = np.stack([x[0] for x in single])
    np.testing.assert_allclose(outside[0], by_mu if axes[0] == 0 else by_mu.sum(0), rtol=1e-5)
    np.testing.assert_allclose(outside[1], np.stack([x[1] for x in single]).sum(0), rtol=1e-5)
