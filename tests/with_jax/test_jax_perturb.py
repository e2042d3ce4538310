"""`perturb` of JAX's pytrees: eager, in jit, with donated arguments and traced seeds, coefficients and members."""

import itertools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import slow_but

import multisample
from multisample import Key, perturb
from multisample.backends.element_types import MATRIX_TYPES

Array = np.ndarray[Any, Any]
SEED = Key(2**40 + 5, 2**31 + 9)


class Layer(NamedTuple):
    w: Any
    b: Any


def random(*shape: int, dtype: str = "float32") -> Array:
    x: Array = np.random.default_rng(len(shape) + sum(shape)).normal(size=shape).astype(jnp.dtype(dtype))
    return x


def named(tree: Any) -> dict[str, Any]:
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in paths}


def same(found: Any, expected: Any) -> None:
    """Equal pytrees of arrays, bit for bit."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


# Pytrees, each with its conversion to the argument that `perturb` takes with NumPy arrays.
TREES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "array": (random(5, 7), lambda tree: tree),
    "scalar": (random(), lambda tree: tree),
    "list": ([random(3), random(2, 3), random(0, 4)], lambda tree: tree),
    "tuple": ((random(70000), random(3)), lambda tree: tree),
    "named tuple": (Layer(random(3, 5), random(5)), lambda tree: tree),
    "mapping": ({"w": random(9, 2), "_orig_mod.b": random(2), "empty": random(0, dtype="float16")}, dict),
    "nested": (
        {"layers": [Layer(random(4, 3), random(3)), Layer(random(3, 2, 2), random(2))], "x": {"y": (random(6),)}},
        lambda tree: tree,
    ),
    "list with None": ([random(3), None, random(2, 3)], named),
    "types": ([random(33, dtype="float16"), random(4, 5), random(3, 3, dtype="bfloat16")], lambda tree: tree),
    "many": ({f"p{k}": random(k % 7, k % 5) for k in range(35)}, dict),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "coefficients"), [*zip(TREES, itertools.cycle([0.5, [0.25, -1.0, 3.0]]), strict=False)]
)
def test_pytrees_have_the_numbers_of_numpy(jax_place: str, name: str, coefficients: Any) -> None:
    tree, of_numpy = TREES[name]
    expected = perturb(of_numpy(tree), coefficients, seed=SEED, member=11)
    arrays = jax.tree.map(jnp.asarray, tree)

    def call(tree: Any) -> Any:
        return perturb(tree, coefficients, seed=SEED, member=11, backend=jax_place)

    for found in (call(arrays), jax.jit(call)(tree)):
        assert jax.tree.structure(found) == jax.tree.structure(tree)
        same(of_numpy(found), expected)
    abstract = jax.eval_shape(call, arrays)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), abstract) == jax.tree.map(lambda x: (x.shape, x.dtype), arrays)
    assert "multisample_perturb" in str(jax.make_jaxpr(call)(arrays))


FAST = [(dtype, fast_math) for fast_math in (False, True) for dtype in MATRIX_TYPES]


@pytest.mark.parametrize("fast", slow_but([*FAST[: len(MATRIX_TYPES)], ("float32", True)], FAST), ids=str)
def test_elements_are_those_of_the_sample(every_place: str, x64: None, fast: tuple[str, bool]) -> None:
    dtype, fast_math = fast
    real = MATRIX_TYPES[dtype].computing
    zeros = {"a": jnp.zeros((50, 41), dtype)}
    options: dict[str, Any] = {"backend": every_place, "fast_math": fast_math}
    call = jax.jit(lambda tree: perturb(tree, 1.0, seed=SEED, member=3, **options))
    for found in (call(zeros), perturb(zeros, 1.0, seed=SEED, member=3, **options)):
        key = Key(SEED.seed, SEED.offset + (zlib.crc32(b"a") << 32))
        z = multisample.sample(jnp.zeros(1, real), 1.0, 50 * 41, seed=key, dim_offset=3, **options)
        same(found["a"].ravel(), z[0].astype(dtype) + jnp.zeros((), dtype))


TREE = {"w": random(5, 9), "b": random(9)}
SEEDS: dict[str, tuple[Any, Any]] = {
    "int": (7, 7),
    "Key": (Key(7, 9), Key(7, 9)),
    "key data": (np.array([1, 7], np.uint32), 2**32 + 7),
    "key data with an offset": (multisample.jax.key_data(SEED), SEED),
    "typed key": (jax.random.key(7), 7),
    "one seed of a vector": (np.array([[1, 7]], np.uint32), 2**32 + 7),
}


@pytest.mark.parametrize("name", SEEDS)
def test_seeds_coefficients_and_members_may_be_traced(jax_place: str, name: str) -> None:
    seed, own = SEEDS[name]
    traces = []

    @jax.jit
    def call(tree: Any, coefficients: Any, seed: Any, member: Any) -> Any:
        traces.append(None)
        return perturb(tree, coefficients, seed=seed, member=member, backend=jax_place)

    for coefficients in (np.float32(0.5), np.array([0.5, 2.0], np.float32)):
        for member in (0, 5):  # The second call has a plan.
            expected = perturb(TREE, coefficients, seed=own, member=member)
            same(call(TREE, coefficients, seed, member), expected)
            arrays = jax.tree.map(jnp.asarray, TREE)
            same(perturb(arrays, jnp.asarray(coefficients), seed=seed, member=member, backend=jax_place), expected)
    assert len(traces) == 2  # One for each shape of the coefficients.


def test_only_donated_parameters_are_written_in_place(jax_place: str) -> None:
    tree = jax.tree.map(jnp.asarray, {**TREE, "half": random(400, 30, dtype="bfloat16")})
    expected = perturb(jax.tree.map(np.asarray, tree), [1.0, -0.5], seed=7)
    call = jax.jit(lambda tree: perturb(tree, [1.0, -0.5], seed=7, backend=jax_place), donate_argnums=0)
    text = call.lower(tree).compile().as_text()
    assert " copy(" not in text and "copy_fusion" not in text
    tree = jax.tree.map(lambda x: x.copy(), tree)
    before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]
    found = call(tree)
    same(found, expected)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(found)] == before
    assert all(x.is_deleted() for x in jax.tree.leaves(tree))
    arrays = jax.tree.map(jnp.asarray, TREE)
    kept = jax.jit(lambda tree: (perturb(tree, 1.0, seed=7, backend=jax_place), tree["w"] + 1))(arrays)
    same([arrays, *kept], [TREE, perturb(TREE, 1.0, seed=7), TREE["w"] + 1])


def test_ids_replace_the_hashes_of_names() -> None:
    arrays = jax.tree.map(jnp.asarray, TREE)
    expected = perturb(TREE, 1.0, seed=7, ids={"w": 5})
    same(perturb(arrays, 1.0, seed=7, ids={"w": 5}), expected)
    same(jax.jit(lambda tree: perturb(tree, 1.0, seed=7, ids={"w": 5}))(arrays), expected)
    same(perturb([arrays["w"]], 1.0, seed=7, ids=[5]), [expected["w"]])


ONE = jnp.ones(3)
FAR = np.array([[0, 1, 1, 0], [0, 1, 0, 1]], np.uint32)  # The first offset is 2**32.
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"parameters": {"a": {"b": jnp.arange(3)}}}, TypeError, r"parameters\['a.b'\]: expected elements of type float16"),
    ({"parameters": [ONE, 1.0]}, TypeError, r"parameters\[1\]: expected an array, got the number 1.0"),
    ({"parameters": [ONE, "x"]}, TypeError, r"parameters\[1\]: expected "),
    ({"parameters": [ONE, np.ones(2)]}, TypeError, r"parameters\[1\]: JAX has float64 only after"),
    ({"parameters": {"a": {"b": ONE}, "a.b": ONE}}, ValueError, "a different name for each array, got two called 'a.b"),
    ({"parameters": {"plumless": ONE, "buckeroo": ONE}}, ValueError, r"pass ids=\{'plumless': "),
    ({"ids": {"b": 1}}, TypeError, "ids: expected a sequence of 1 integers"),
    ({"out": [ONE]}, TypeError, "out: expected None with JAX"),
    ({"coefficients": jnp.ones((2, 2))}, ValueError, r"coefficients: expected a number or shape \(K,\)"),
    ({"coefficients": jnp.ones(2, complex)}, TypeError, "coefficients: expected real numbers"),
    ({"coefficients": float("nan")}, ValueError, "coefficients: expected finite numbers"),
    ({"member": -1}, ValueError, "member: expected "),
    ({"member": 2**32 - 1, "coefficients": [1.0, 2.0]}, ValueError, r"member: expected member \+ K <= 2\*\*32"),
    *(({"seed": seed}, ValueError, "seed: expected a Key with an offset below") for seed in (
        Key(1, 2**32), Key(1, np.uint64(2**32)), Key(1, jnp.array([1, 0], np.uint32)), FAR[0], jnp.array(FAR[0]))),
    ({"seed": [1, 2], "member": [1, 2]}, ValueError, "seed, member: expected a vector for one of the two"),
    *(({"seed": seed}, ValueError, r"seed\[1\]: expected a Key with an offset below") for seed in (
        [1, Key(1, 2**32)], np.flip(FAR, 0), jnp.flip(FAR, 0))),
    ({"member": [1, -2]}, ValueError, r"member\[1\]: expected 0 <= member"),
    ({"member": jnp.ones(3)}, TypeError, "member: expected integers, got elements of type float32"),
    ({"member": jnp.ones((3, 1), int)}, ValueError, r"member: .* vector of shape \(K,\), got \(3, 1\)"),
    ({"decay": 1.5}, ValueError, "decay: expected 0 <= decay <= 1, got 1.5"),
    ({"fast_math": 2}, TypeError, "fast_math: expected "),
    ({"backend": 3}, TypeError, "backend: expected a name"),
    ({"backend": "none"}, multisample.UnknownBackendError, "none"),
]  # fmt: skip


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=[str(k) for k in range(len(WRONG))])
def test_wrong_arguments_are_named(changes: dict[str, Any], error: Any, message: str, jitted: bool) -> None:
    arguments: dict[str, Any] = {"parameters": [ONE], "coefficients": 1.0, "seed": 1, **changes}
    parameters = arguments.pop("parameters")
    with pytest.raises(error, match=message):
        if jitted:
            jax.jit(lambda x: perturb(jax.tree.map(lambda y: x if y is ONE else y, parameters), **arguments))(ONE)
        else:
            perturb(parameters, **arguments)


def test_a_traced_member_beyond_the_last_row_is_an_error_of_the_program() -> None:
    call = jax.jit(lambda member: perturb([ONE], [1.0, 2.0], seed=1, member=member))
    error = pytest.raises(jax.errors.JaxRuntimeError, match=r"member: expected member \+ K <= 2\*\*32")
    with jax.default_device(jax.devices("cpu")[0]), error:
        jax.block_until_ready(call(np.uint32(2**32 - 1)))


def test_values_in_host_memory_are_checked() -> None:
    with jax.default_device(jax.devices("cpu")[0]), pytest.raises(ValueError, match="coefficients: expected finite"):
        perturb([jnp.ones(3)], jnp.array([1.0, jnp.inf]), seed=1)


HOST_TREE = {"w": random(9, 7), "b": random(33), "h": random(5, 3, dtype="bfloat16"), "none": random(0, 2)}
KEYS = [3, Key(4, 9), 2**63 + 5]


def stacked(calls: list[Any]) -> Any:
    return jax.tree.map(lambda *x: np.stack(x), *calls)


@pytest.mark.parametrize("decay", [0, 0.3, {"w": 0.25}])
def test_vectors_of_seeds_or_members_add_an_axis(jax_place: str, decay: Any) -> None:
    tree = jax.tree.map(jnp.asarray, HOST_TREE)
    by_seed = stacked([perturb(HOST_TREE, 0.5, seed=key, member=2, decay=decay) for key in KEYS])
    by_member = stacked([perturb(HOST_TREE, 0.5, seed=SEED, member=k, decay=decay) for k in (4, 0, 2**32 - 1)])
    update = perturb(HOST_TREE, [0.5, 2.0, -1.0], seed=KEYS, member=2, decay=decay)
    options = {"decay": decay, "backend": jax_place}
    for mode in (lambda f: f, jax.jit):
        same(mode(lambda x: perturb(x, 0.5, seed=KEYS, member=2, **options))(tree), by_seed)
        same(mode(lambda x: perturb(x, 0.5, seed=SEED, member=[4, 0, 2**32 - 1], **options))(tree), by_member)
        same(mode(lambda x: perturb(x, [0.5, 2.0, -1.0], seed=KEYS, member=2, **options))(tree), update)


def test_vmap_is_a_population_in_one_call_for_each_type(jax_place: str) -> None:
    tree = jax.tree.map(jnp.asarray, HOST_TREE)
    keys = jax.random.split(jax.random.key(3), 3)
    expected = [perturb(tree, 0.5, seed=key) for key in keys]
    by_key = jax.jit(jax.vmap(lambda key: perturb(tree, 0.5, seed=key, backend=jax_place)))
    same(by_key(keys), stacked(expected))
    same(perturb(tree, 0.5, seed=keys), stacked(expected))
    four = jax.random.split(jax.random.key(3), 4)  # As uint32, four numbers would be one key.
    same(perturb(tree, 0.5, seed=four), stacked([perturb(tree, 0.5, seed=key) for key in four]))
    assert by_key.lower(keys).as_text().count("custom_call @multisample_perturb") == 2
    assert by_key(keys[:0])["w"].shape == (0, 9, 7)
    numbers = jnp.array([0.5, -1.0, 2.0])
    found = jax.vmap(lambda c: perturb(tree, c, seed=SEED))(numbers)
    same(found, stacked([perturb(HOST_TREE, float(c), seed=SEED) for c in numbers]))
    matrix = jnp.asarray(random(3, 4))
    for seed in (SEED, [1, 2, 3, 4]):
        found = jax.vmap(lambda c, seed=seed: perturb(tree, c, seed=seed))(matrix)
        same(found, stacked([perturb(HOST_TREE, np.asarray(c), seed=seed) for c in matrix]))
    twice = jax.vmap(lambda m: jax.vmap(lambda key: perturb(tree, 0.5, seed=key, member=m))(keys))(jnp.arange(2))
    rows = [stacked([perturb(tree, 0.5, seed=key, member=m) for key in keys]) for m in range(2)]
    same(twice, stacked(rows))
    several = jax.tree.map(lambda x: jnp.stack([x, x + 1, x - 2]), tree)
    found = jax.vmap(lambda x, key: perturb(x, 0.5, seed=key))(several, keys)
    own = [perturb(jax.tree.map(lambda x, k=k: x[k], several), 0.5, seed=keys[k]) for k in range(3)]
    same(found, stacked(own))
    found = jax.vmap(lambda x: perturb(tree, 0.5, seed=SEED, decay=x))(jnp.array([0.0, 0.25]))
    same(found, stacked([perturb(HOST_TREE, 0.5, seed=SEED, decay=x) for x in (0, 0.25)]))


def test_decay_may_be_traced() -> None:
    tree = jax.tree.map(jnp.asarray, HOST_TREE)
    both = jax.jit(lambda rate: (perturb(tree, 1.0, seed=7, decay=rate), perturb(tree, 1.0, seed=7, decay={"w": rate})))
    expected = [perturb(HOST_TREE, 1.0, seed=7, decay=decay) for decay in (0.3125, {"w": 0.3125})]
    same(both(0.3125), tuple(expected))
    with pytest.raises(TypeError, match=r"^decay: expected a number, got a traced int32"):
        jax.jit(lambda k: perturb(tree, 1.0, seed=7, decay=k))(1)


@pytest.mark.parametrize("size", [None, 2])
def test_the_derivative_is_one_minus_decay(size: int | None) -> None:
    tree, weights = jax.tree.map(jnp.asarray, HOST_TREE), random(*([size] if size else []), 9, 7)

    def call(x: Any) -> Any:
        return perturb(x, 0.1, seed=3 if size is None else [3, 4], decay={"w": 0.25})

    def loss(x: Any) -> Any:
        return (call(x)["w"] * weights).sum()

    right = (weights if size is None else weights.sum(0)) * np.float32(0.75)
    for gradient in (jax.grad(loss)(tree), jax.jit(jax.grad(loss))(tree)):
        np.testing.assert_allclose(gradient["w"], right, rtol=1e-6)
        assert not gradient["b"].any()
    found, tangents = jax.jvp(call, (tree,), (tree,))
    same(found, call(tree))
    np.testing.assert_allclose(tangents["w"], np.broadcast_to(tree["w"] * 0.75, found["w"].shape), rtol=1e-6)
    same(tangents["h"], jnp.broadcast_to(tree["h"], found["h"].shape))
    keys = jnp.arange(3)
    each = jax.vmap(jax.grad(lambda x, key: (perturb(x, 0.1, seed=key)["w"] ** 2).sum()), (None, 0))(tree, keys)
    np.testing.assert_allclose(each["w"], 2 * perturb(tree, 0.1, seed=keys)["w"], rtol=1e-6)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "coefficients": jax.grad(lambda c: perturb(ONE, c, seed=1).sum()),
    "decay": jax.grad(lambda x: perturb(ONE, 1.0, seed=1, decay=x).sum()),
}


@pytest.mark.parametrize("argument", REFUSED)
def test_gradients_of_other_arguments_are_refused(argument: str) -> None:
    with pytest.raises(ValueError, match=f"^{argument}: expected no gradient"):
        REFUSED[argument](0.5)


def test_derivatives_of_other_values_pass() -> None:
    def loss(x: Any) -> Any:
        return (x * perturb(ONE, 1.0, seed=1)).sum()

    same(jax.grad(loss)(ONE), perturb(ONE, 1.0, seed=1))
    same(jax.grad(lambda x: loss(jax.lax.stop_gradient(x)))(ONE), jnp.zeros(3))
    same(jax.grad(lambda x: perturb(jax.lax.stop_gradient(x), 1.0, seed=1).sum())(ONE), jnp.zeros(3))
    same(jax.vmap(lambda x: x + perturb(ONE, 1.0, seed=1))(jnp.zeros((2, 3)))[1], perturb(ONE, 1.0, seed=1))
