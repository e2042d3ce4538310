"""Checks of sharded calls on at least two devices, for a process of its own, which prints the checks that fail."""

import functools
import itertools
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from multisample import Key, perturb, sample

D, N = 16, 24
MU, SIGMA = np.linspace(0, 1, D, dtype=np.float32), np.linspace(1, 2, D, dtype=np.float32)
SEED = 2**32 - 3
COMMUNICATION = re.compile(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)[\w-]*\(")
CALLS = re.compile(r"\w+(\[[\d,]+\])\S* custom-call\(.*multisample")

_count = len(jax.devices())
_shape = (_count // 2, 2)
MESH = jax.make_mesh(_shape, ("x", "y"), axis_types=(AxisType.Auto, AxisType.Auto))
CHECKS: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


def sharding(*spec: Any) -> NamedSharding:
    return NamedSharding(MESH, P(*spec))


def parts(axes: Any) -> int:
    size = {"x": _shape[0], "y": _shape[1], None: 1}
    return int(np.prod([size[axis] for axis in ((axes,) if axes is None or isinstance(axes, str) else axes)]))


def expected(**options: Any) -> Any:
    return sample(MU, SIGMA, N, seed=SEED, **options)


def same(x: Any, values: Any) -> None:
    np.testing.assert_array_equal(np.asarray(x).view(f"u{values.itemsize}"), values.view(f"u{values.itemsize}"))


def ran(draw: Any, *arguments: Any, **options: Any) -> tuple[Any, str]:
    """The results of a function that is compiled once, and its program."""
    compiled = (draw if hasattr(draw, "lower") else jax.jit(draw, **options)).lower(*arguments).compile()
    return compiled(*arguments), compiled.as_text()


def cubes(x: Any) -> Any:
    return (x**3).sum()


def gradients(loss: Any) -> Any:
    return jax.grad(loss, (0, 1))


@functools.cache
def expected_gradients() -> Any:
    return gradients(lambda mu, sigma: cubes(sample(mu, sigma, N, seed=SEED)))(MU, SIGMA)


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def is_drawn_in_windows(text: str, shape: tuple[int, ...]) -> None:
    """The program draws a window of that shape on each device, and moves nothing between devices."""
    assert COMMUNICATION.findall(text) == []
    assert CALLS.findall(text) == [str([1, *shape]).replace(" ", "")]


@check
def every_kind_of_sharding_is_drawn_in_windows() -> None:
    key = jax.random.key(SEED)
    specs = [("x", None), (None, "y"), (None, ("x", "y")), ("y", "x"), (("y", "x"), None)]
    every = [{}, {"antithetic": True, "layout": "nd"}, {"noise": "shared"}, {"layout": "nd"}]
    for (rows, columns), options in zip(specs, itertools.cycle(every), strict=False):
        window, spec = (D // parts(rows), N // parts(columns)), (rows, columns)
        if options.get("layout") == "nd":
            window, spec = window[::-1], spec[::-1]

        def draw(mu: Any, sigma: Any, key: Any, options: Any = options) -> Any:
            return sample(mu, sigma, N, seed=key, **options)

        mu, sigma = (jax.device_put(x, sharding(rows)) for x in (MU, SIGMA))
        x, text = ran(draw, mu, sigma, key, out_shardings=sharding(*spec))
        same(x, expected(**options))
        is_drawn_in_windows(text, window)


@check
def stores_are_aligned_only_where_every_window_begins_at_a_multiple_of_8() -> None:
    """The option of a custom call that chooses aligned stores on CUDA."""
    for n, first, columns, aligned in ((32, 24, "y", True), (24, 0, "y", False), (24, 0, None, True),
                                       (32, 4, None, False)):  # fmt: skip

        def draw(key: Any, n: int = n, first: int = first) -> Any:
            return sample(MU, SIGMA, n, seed=key, sample_offset=first)

        _, text = ran(draw, jax.random.key(SEED), out_shardings=sharding(None, columns))
        assert re.findall(r"aligned\\22: (\w+)", text) == [str(aligned).lower()], (n, first, columns)


@check
def the_result_follows_mu_and_sigma() -> None:
    mu, sigma = (jax.device_put(x, sharding("x")) for x in (MU, SIGMA))
    for x in (
        jax.jit(lambda mu, sigma: sample(mu, sigma, N, seed=SEED))(mu, sigma),
        sample(mu, sigma, N, seed=SEED),  # Eagerly.
        sample(mu, sigma, N, seed=jax.random.key(SEED)),
    ):
        same(x, expected())
        assert x.sharding.is_equivalent_to(sharding("x", None), 2), x.sharding
    # One sharded vector is enough.
    x, text = ran(lambda mu: sample(mu, SIGMA, N, seed=SEED), mu)
    same(x, expected())
    assert x.sharding.is_equivalent_to(sharding("x", None), 2)
    assert COMMUNICATION.findall(text) == []


@check
def windows_begin_beyond_32_bits() -> None:
    jax.config.update("jax_enable_x64", True)
    first = 2**32 - 5
    draw = lambda seed, column: sample(MU, SIGMA, N, seed=seed, dim_offset=2**31, sample_offset=column)  # noqa: E731
    draw = jax.jit(draw, out_shardings=sharding(None, ("x", "y")))
    same(draw(3, first), sample(MU, SIGMA, N, seed=3, dim_offset=2**31, sample_offset=first))


@check
def sizes_that_do_not_divide() -> None:
    d, n = D - 1, N - 1
    mu, sigma = jnp.asarray(MU[:d]), jnp.asarray(SIGMA[:d])
    values = sample(MU[:d], SIGMA[:d], n, seed=SEED)
    whole = gradients(lambda mu, sigma: cubes(sample(mu, sigma, n, seed=SEED)))(mu, sigma)
    for spec in (("y", "x"), (None, ("x", "y"))):

        def both(mu: Any, sigma: Any, spec: Any = spec) -> Any:
            def draw(mu: Any, sigma: Any) -> Any:
                return jax.lax.with_sharding_constraint(sample(mu, sigma, n, seed=SEED), sharding(*spec)) + 0

            return draw(mu, sigma), gradients(lambda mu, sigma: cubes(draw(mu, sigma)))(mu, sigma)

        x, found = jax.jit(both)(mu, sigma)
        same(x, values)
        close(found, whole)


@check
def gradients_move_sums_only() -> None:
    key = jax.random.key(SEED)
    for spec in ((("x", "y"), None), (None, "y"), ("x", "y")):

        def loss(mu: Any, sigma: Any, key: Any, spec: Any = spec) -> Any:
            return cubes(jax.lax.with_sharding_constraint(sample(mu, sigma, N, seed=key), sharding(*spec)))

        mu, sigma = (jax.device_put(x, sharding(spec[0])) for x in (MU, SIGMA))
        found, text = ran(gradients(loss), mu, sigma, key)
        close(found, expected_gradients())
        moved = set(COMMUNICATION.findall(text))
        assert moved == ({"all-reduce"} if spec[1] else set()), moved
        sizes = [int(np.prod(list(map(int, x.split(","))))) for x in re.findall(r"\w+\[([\d,]+)\]\S* all-reduce", text)]
        assert max(sizes, default=0) <= 2 * D, sizes


@check
def batches_are_sharded_too() -> None:
    keys = jax.random.split(jax.random.key(SEED), 2 * _count)
    draw = jax.vmap(lambda key: sample(MU, SIGMA, N, seed=key))
    alone = np.asarray(draw(keys))
    for b in (0, 2 * _count - 1):
        same(alone[b], np.asarray(sample(MU, SIGMA, N, seed=keys[b])))
    spread = jax.device_put(keys, sharding(("x", "y")))
    x, text = ran(draw, spread)
    same(x, alone)
    assert x.sharding.is_equivalent_to(sharding(("x", "y"), None, None), 3)
    assert COMMUNICATION.findall(text) == []
    found = jax.jit(jax.grad(lambda sigma, keys: (jax.vmap(lambda k: sample(MU, sigma, N, seed=k))(keys) ** 2).sum()))
    close(found(SIGMA, spread), found(SIGMA, keys))


def shard(mu: Any, sigma: Any, key: Any) -> Any:
    """The window of one device in `jax.shard_map`."""
    n = N // _shape[1]
    row, column = jax.lax.axis_index("x") * mu.shape[0], jax.lax.axis_index("y") * n
    return sample(mu, sigma, n, seed=key, dim_offset=row, sample_offset=column)


@check
def shard_map_draws_windows_by_offsets() -> None:
    key = jax.random.key(SEED)
    for check_vma in (True, False):
        specs: dict[str, Any] = {"in_specs": (P("x"), P("x"), P()), "out_specs": P("x", "y")}
        x, text = ran(jax.shard_map(shard, mesh=MESH, check_vma=check_vma, **specs), MU, SIGMA, key)
        same(x, expected())
        is_drawn_in_windows(text, (D // _shape[0], N // _shape[1]))

    total = lambda mu, sigma: jax.lax.psum(cubes(shard(mu, sigma, key)), ("x", "y"))  # noqa: E731
    loss = jax.shard_map(total, mesh=MESH, in_specs=(P("x"), P("x")), out_specs=P())
    close(jax.jit(gradients(loss))(MU, SIGMA), expected_gradients())


@check
def partly_manual_shard_map() -> None:
    """`jax.shard_map` shards the rows, and XLA the columns."""

    def body(mu: Any, sigma: Any) -> Any:
        x = sample(mu, sigma, N, seed=SEED, dim_offset=jax.lax.axis_index("x") * mu.shape[0])
        return jax.lax.with_sharding_constraint(x, P(None, "y"))

    draw = jax.shard_map(body, mesh=MESH, in_specs=(P("x"), P("x")), out_specs=P("x"), axis_names=frozenset("x"))
    x, text = ran(draw, MU, SIGMA)
    same(x, expected())
    assert COMMUNICATION.findall(text) == []


@check
def arrays_on_two_devices_are_refused() -> None:
    mu, sigma = (jax.device_put(x, device) for x, device in zip((MU, SIGMA), jax.devices(), strict=False))
    with pytest.raises(ValueError, match=r"^sigma: expected it on the device of mu, "):
        sample(mu, sigma, N, seed=SEED)
    same(sample(mu, jnp.asarray(SIGMA), N, seed=SEED), expected())  # Not committed to a device.
    x = sample(jax.device_put(MU, jax.devices()[1]), 1.0, N, seed=SEED)
    assert x.devices() == {jax.devices()[1]}


@check
def explicit_sharding() -> None:
    key = jax.random.key(SEED)
    mesh = jax.make_mesh(_shape, ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Explicit))
    with jax.set_mesh(mesh):
        mu, sigma = jax.device_put(MU, P("x")), jax.device_put(SIGMA, P("x"))

        def draw(mu: Any, sigma: Any, key: Any) -> Any:
            return sample(mu, sigma, N, seed=key)

        drawn, text = ran(draw, mu, sigma, key)
        for x in (drawn, draw(mu, sigma, key), sample(mu, 1.0, N, seed=key)):
            assert jax.typeof(x).sharding.spec == P("x", None), jax.typeof(x)
        same(drawn, expected())
        for shape, n in (((D,), (2, N // 2)), ((D, 1), N), ((D // 2, 2), N)):
            means = MU.reshape(shape)
            same(sample(jax.device_put(means, P("x")), 1.0, n, seed=SEED), np.asarray(sample(means, 1.0, n, seed=SEED)))
        is_drawn_in_windows(text, (D // _shape[0], N))
        close(jax.jit(gradients(lambda mu, sigma: cubes(draw(mu, sigma, key))))(mu, sigma), expected_gradients())
        # To shard over samples, `auto_axes` leaves explicit sharding.
        x, text = ran(jax.sharding.auto_axes(draw, out_sharding=P("x", "y"), axes=("x", "y")), mu, sigma, key)
        same(x, expected())
        is_drawn_in_windows(text, (D // _shape[0], N // _shape[1]))
        keys = jax.random.split(key, 3)
        batch = jax.jit(jax.vmap(lambda key: sample(mu, sigma, N, seed=key)))(keys)
        same(batch[1], np.asarray(sample(MU, SIGMA, N, seed=keys[1])))
        with pytest.raises(TypeError, match=r"^mu, sigma: expected the same sharding"):
            sample(mu, jax.device_put(SIGMA, P("y")), N, seed=key)


PARAMETERS = {
    "w": np.random.default_rng(1).normal(size=(D, N)).astype(np.float32),
    "conv": np.random.default_rng(2).normal(size=(4, D, 3)).astype(np.float16),
    "odd": np.random.default_rng(3).normal(size=(D - 1, N - 1)).astype(np.float32),
    "b": np.random.default_rng(4).normal(size=D).astype(np.float32),
}
SPECS: dict[str, list[tuple[Any, ...]]] = {
    "w": [("x", "y"), (None, ("x", "y")), (("y", "x"), None), ("y",)],
    "conv": [(None, "x"), ("y", "x"), (), (None, ("x", "y"))],
    "odd": [(), (), (), ()],
    "b": [("x",), (), (("x", "y"),), ("y",)],
}
PERTURBED = perturb(PARAMETERS, [0.5, -1.0], seed=Key(SEED, 3), member=2)


def perturbed(tree: Any) -> Any:
    return perturb(tree, [0.5, -1.0], seed=Key(SEED, 3), member=2)


def same_trees(found: Any, expected: Any) -> None:
    for name, values in expected.items():
        same(found[name], values)


@check
def parameters_of_every_sharding() -> None:
    for k in range(4):
        tree = {name: jax.device_put(x, sharding(*SPECS[name][k])) for name, x in PARAMETERS.items()}
        compiled, text = ran(perturbed, tree)
        assert COMMUNICATION.findall(text) == [], text
        for found in (compiled, *([perturbed(tree)] if k == 0 else [])):
            same_trees(found, PERTURBED)
            for name, x in tree.items():
                assert found[name].sharding.is_equivalent_to(x.sharding, x.ndim), (name, found[name].sharding)


@check
def parameters_are_perturbed_in_place_on_each_device() -> None:
    tree = {"w": jax.device_put(PARAMETERS["w"], sharding("x", "y")) + 0}
    before = [shard.data.unsafe_buffer_pointer() for shard in tree["w"].addressable_shards]
    found, text = ran(perturbed, tree, donate_argnums=0)
    assert " copy(" not in text
    assert before == [shard.data.unsafe_buffer_pointer() for shard in found["w"].addressable_shards]
    same(found["w"], PERTURBED["w"])


@check
def parameters_whose_axes_do_not_divide() -> None:
    def call(tree: Any) -> Any:
        constrained = jax.lax.with_sharding_constraint(perturbed(tree), {"odd": sharding("y", "x")})
        return {"odd": constrained["odd"] + 0}

    same(jax.jit(call)({"odd": PARAMETERS["odd"]})["odd"], PERTURBED["odd"])


@check
def parameters_of_explicit_sharding() -> None:
    mesh = jax.make_mesh(_shape, ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Explicit))
    with jax.set_mesh(mesh):
        tree = {name: jax.device_put(x, P(*SPECS[name][0])) for name, x in PARAMETERS.items()}
        for call in (perturbed, jax.jit(perturbed)):
            found = call(tree)
            same_trees(found, PERTURBED)
            for name, x in tree.items():
                assert jax.typeof(found[name]).sharding.spec == jax.typeof(x).sharding.spec


@check
def a_member_for_each_device() -> None:
    """Each device evaluates one member of a population in `jax.shard_map`."""

    def body(tree: Any) -> Any:
        moved = perturb(tree, 1.0, seed=SEED, member=jax.lax.axis_index(("x", "y")))
        return {name: x[None] for name, x in moved.items()}

    whole = {name: jnp.asarray(x) for name, x in PARAMETERS.items()}
    for check_vma in (True, False):
        call = jax.shard_map(body, mesh=MESH, in_specs=P(), out_specs=P(("x", "y")), check_vma=check_vma)
        found = jax.jit(call)(whole)
        for member in (0, _count - 1):
            expected = perturb(PARAMETERS, 1.0, seed=SEED, member=member)
            same_trees({name: x[member] for name, x in found.items()}, expected)


@check
def parameters_on_several_devices() -> None:
    devices = jax.devices()
    tree = {name: jax.device_put(x, devices[k % 2]) for k, (name, x) in enumerate(PARAMETERS.items())}
    found = perturbed(tree)
    same_trees(found, PERTURBED)
    assert [x.devices() for x in found.values()] == [tree[name].devices() for name in found]
    with pytest.raises(ValueError, match=r"^coefficients: expected values on the host"):
        perturb(tree, jax.device_put(np.float32(1), devices[0]), seed=SEED)


if __name__ == "__main__":
    failed = 0
    for function in CHECKS:
        try:
            function()
        except (Exception, pytest.fail.Exception):
            failed += 1
            print(f"{function.__name__}: {traceback.format_exc()}")
    sys.exit(failed)
