"""Traced calls draw the bits of untraced ones, whichever arguments are traced: mu, sigma, the seed, the window."""

import gc
import importlib
import importlib.util
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_memory import ExportedByDlpack
from tables import ONE_OPTION

import multisample
from multisample import Generator, Key, sample, standard_normal
from multisample._plan import PLANS
from multisample._routes import jax as routes
from multisample._routes.jax import programs

D, N = 5, 13
MU = np.linspace(-2, 3, D, dtype=np.float32)
SIGMA = np.linspace(0.5, 2, D, dtype=np.float32)
BFLOAT16 = {"dtype": "bfloat16", "noise": "shared", "antithetic": True}
OPTIONS = ONE_OPTION | {"float16": {"dtype": "float16", "layout": "nd"}, "bfloat16": BFLOAT16}


def check_same(x: Any, expected: Any) -> None:
    found = np.asarray(x)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found.view(f"u{found.dtype.itemsize}"), expected.view(f"u{found.dtype.itemsize}"))


def vectors() -> tuple[Any, Any]:
    return jnp.asarray(MU), jnp.asarray(SIGMA)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_jitted_call_has_the_bits_of_the_cpu_backend(every_place: str, options: dict[str, Any]) -> None:
    @jax.jit
    def draw(mu: Any, sigma: Any, seed: Any) -> Any:
        return sample(mu, sigma, N, seed=seed, backend=every_place, **options)

    expected = sample(MU, SIGMA, N, seed=7, **options)
    check_same(draw(*vectors(), jax.random.key(7)), expected)
    check_same(draw(*vectors(), 7), expected)
    check_same(sample(*vectors(), N, seed=7, backend=every_place, **options), expected)


def test_float64_calls_have_the_bits_of_cpu(every_place: str, x64: None) -> None:
    mu, sigma = MU.astype(np.float64), SIGMA.astype(np.float64)
    draw = jax.jit(lambda mu, seed: sample(mu, sigma, N, seed=seed, backend=every_place))
    check_same(draw(jnp.asarray(mu), 2**40 + 3), sample(mu, sigma, N, seed=2**40 + 3))
    narrow = jax.jit(lambda mu: sample(mu, sigma, N, seed=1, dtype="float32", backend=every_place))
    check_same(narrow(jnp.asarray(mu)), sample(mu, sigma, N, seed=1, dtype="float32"))


def test_numbers_lists_and_numpy_arrays_mix_with_jax(jax_place: str) -> None:
    (mu, sigma), integers = vectors(), jnp.arange(D)
    large = 2**54 + 2**30 + 1  # The nearest double lies half-way between two numbers of float32.
    draws: list[tuple[Callable[[Any, Any], Any], Any]] = [
        (lambda mu, sigma: sample(mu, 0.5, N, seed=1, backend=jax_place), sample(MU, 0.5, N, seed=1)),
        (lambda mu, sigma: sample(2, sigma, N, seed=1, backend=jax_place), sample(2, SIGMA, N, seed=1)),
        (lambda mu, sigma: sample(large, sigma, N, seed=1, backend=jax_place), sample([large] * D, SIGMA, N, seed=1)),
        (lambda mu, sigma: sample(mu, SIGMA, N, seed=1, backend=jax_place), sample(MU, SIGMA, N, seed=1)),
        (lambda mu, sigma: sample(mu, [1.0] * D, N, seed=1, backend=jax_place), sample(MU, [1.0] * D, N, seed=1)),
        (lambda mu, sigma: sample(mu[:, None], sigma, N, seed=1, backend=jax_place), sample(MU, SIGMA, N, seed=1)),
        (lambda mu, sigma: sample(mu, sigma[0], N, seed=1, backend=jax_place), sample(MU, 0.5, N, seed=1)),
        (lambda mu, sigma: sample(integers, 1.0, N, seed=1, backend=jax_place), sample(np.arange(D), 1.0, N, seed=1)),
    ]
    together = jax.jit(lambda mu, sigma: [draw(mu, sigma) for draw, _ in draws])(mu, sigma)
    for (draw, expected), found in zip(draws, together, strict=True):
        check_same(found, expected)
        check_same(draw(mu, sigma), expected)


@pytest.mark.parametrize("has_x64", [False, True])
def test_scalars_promote_as_in_jax(has_x64: bool, request: pytest.FixtureRequest) -> None:
    if has_x64:
        request.getfixturevalue("x64")
    twos = [np.array(2, kind) for kind in ("float16", "float32", "float64", "int32")]
    scalars = [jnp.exp(0.5), jnp.float32(2), *(x for two in twos for x in (two, two[()]))]
    for vector in ("float16", "bfloat16", "float32", *["float64"] * has_x64):
        mu = jnp.ones(D, vector)
        for scalar in scalars:
            expected = (mu * scalar).dtype
            assert sample(mu, scalar, N, seed=1).dtype == sample(scalar, mu, N, seed=1).dtype == expected
            assert jax.eval_shape(lambda mu, sigma: sample(mu, sigma, N, seed=1), mu, scalar).dtype == expected


@pytest.mark.parametrize("shape", [(0, N), (D, 0)])
def test_empty_results(shape: tuple[int, int]) -> None:
    d, n = shape
    for draw in (jax.jit(lambda mu: sample(mu, 1.0, n, seed=1)), lambda mu: sample(mu, 1.0, n, seed=1)):
        assert draw(jnp.zeros(d)).shape == shape
        assert jax.grad(lambda mu, draw=draw: draw(mu).sum())(jnp.ones(d)).shape == (d,)


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1])
def test_a_jax_key_of_an_integer_is_that_seed(jax_place: str, seed: int) -> None:
    expected = sample(MU, SIGMA, N, seed=seed)
    key = jax.random.key(seed)
    draw = jax.jit(lambda s: sample(MU, SIGMA, N, seed=s, backend=jax_place))
    for form in (key, jax.random.key_data(key), np.asarray(jax.random.key_data(key)), jax.random.PRNGKey(seed)):
        check_same(sample(*vectors(), N, seed=form, backend=jax_place), expected)
        check_same(draw(form), expected)
    alone = sample(MU, SIGMA, N, seed=key)  # With NumPy vectors too, a JAX key gives a JAX array.
    assert isinstance(alone, jax.Array)
    check_same(alone, expected)


def test_offsets_are_operands(jax_place: str) -> None:
    seed, offset = 2**63 + 5, 2**40 + 9
    expected = sample(MU, SIGMA, N, seed=Key(seed, offset))
    data = np.array([seed >> 32, seed & 0xFFFFFFFF, offset >> 32, offset & 0xFFFFFFFF], np.uint32)
    draw = jax.jit(lambda s: sample(MU, SIGMA, N, seed=s, backend=jax_place))
    check_same(draw(data), expected)
    check_same(sample(*vectors(), N, seed=Key(seed, offset), backend=jax_place), expected)
    check_same(sample(*vectors(), N, seed=data, backend=jax_place), expected)
    parts = jax.jit(lambda s, o: sample(MU, SIGMA, N, seed=Key(s, o), backend=jax_place))
    check_same(parts(data[:2], data[2:]), expected)
    check_same(parts(jax.random.key(3), 4), sample(MU, SIGMA, N, seed=Key(3, 4)))


@pytest.mark.parametrize("offset", [0, 2**40 + 3])
def test_words_on_a_device_are_words_of_a_call(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_gpu_of", lambda vectors: jax.devices("cpu")[0])
    for seed in (7, 2**64 - 3, 2**64 - 3, 7, 7, 7):  # Words of the call before are copied, others are bytes.
        window = {"seed": Key(seed, offset), "dim_offset": offset % 2**20, "sample_offset": offset % 1000}
        check_same(sample(*vectors(), N, **window), sample(MU, SIGMA, N, **window))


def test_on_a_gpu_the_bytes_of_a_seed_are_copied_once(gpus: list[Any]) -> None:
    mu, sigma = jax.device_put(vectors(), gpus[-1])
    for seed in (7, 8, 7):  # The first is copied, the others are bytes.
        sample(mu, sigma, N, seed=seed)
    for seed in (7, 7 << 32):
        with jax.transfer_guard_host_to_device("disallow_explicit"):
            x = sample(mu, sigma, N, seed=seed)
        assert x.devices() == {gpus[-1]}
        check_same(x, sample(MU, SIGMA, N, seed=seed))


def test_windows_are_operands(jax_place: str, x64: None) -> None:
    @jax.jit
    def draw(row: Any, column: Any) -> Any:
        return sample(MU, SIGMA, N, seed=3, dim_offset=row, sample_offset=column, backend=jax_place)

    for row, column in [(0, 0), (1, 2), (2**32 - D, 5), (4, 2**32 + 3), (2**31 + 1, 2**34 - N)]:
        expected = sample(MU, SIGMA, N, seed=3, dim_offset=row, sample_offset=column)
        check_same(draw(row, column), expected)
        check_same(draw(np.uint64(row), np.int64(column)), expected)
        both = sample(jnp.asarray(MU), SIGMA, N, seed=3, dim_offset=row, sample_offset=column, backend=jax_place)
        check_same(both, expected)


def test_a_new_seed_or_window_compiles_nothing() -> None:
    @jax.jit
    def draw(mu: Any, seed: Any, offset: Any, row: Any) -> Any:
        return sample(mu, 1.0, N, seed=Key(seed, offset), dim_offset=row)

    for i in range(4):
        draw(jnp.asarray(MU), jax.random.key(i), i, i)
    assert draw._cache_size() == 1
    for row in range(4):  # The calls make a plan, and its programs: without offsets, with them, and on a GPU of bytes.
        sample(*vectors(), N, seed=0, dim_offset=row)
    before = len(programs.PROGRAMS)
    for i in range(1, 5):
        sample(*vectors(), N, seed=Key(i, 2**63 + i), dim_offset=i, sample_offset=2**33)
    assert len(programs.PROGRAMS) == before


def test_a_program_has_one_custom_call_and_nothing_of_the_size_of_the_matrix() -> None:
    draw = jax.jit(lambda mu, sigma, key: sample(mu, sigma, 1000, seed=key))
    compiled = draw.lower(*vectors(), jax.random.key(0)).compile()
    text = compiled.as_text()
    assert text.count(" custom-call(") == 1
    assert 'custom_call_target="multisample_sample"' in text
    assert compiled.memory_analysis().temp_size_in_bytes < 1000


def test_eager_calls_of_one_signature_have_one_plan() -> None:
    mu, sigma = vectors()
    PLANS.clear()
    for seed in (1, Key(2, 3), 2**64 - 1, 2**40):
        found = sample(mu, sigma, N, seed=seed, sample_offset=2)
        check_same(found, sample(MU, SIGMA, N, seed=seed, sample_offset=2))
    ours = [plan for plan in PLANS.values() if type(plan).__module__ == "multisample._routes.jax"]
    assert len(ours) == 2  # One for int seeds, one for `Key` seeds.
    # A plan of eager calls is not for calls that are traced.
    check_same(jax.jit(lambda: sample(mu, sigma, N, seed=5))(), sample(MU, SIGMA, N, seed=5))
    with pytest.raises(ValueError, match=r"^seed: .*2\*\*64"):
        sample(mu, sigma, N, seed=2**64, sample_offset=2)
    with jax.default_device(jax.devices("cpu")[0]):  # Values in a GPU's memory are not checked.
        negative = jnp.asarray(-SIGMA)
        with pytest.raises(ValueError, match=r"^sigma: .*-0\.5"):
            sample(jnp.asarray(MU), negative, N, seed=1, sample_offset=2)
    jax.jit(lambda mu: sample(mu, sigma, N, seed=5).sum())(mu).block_until_ready()
    with jax.disable_jit():
        check_same(sample(mu, sigma, N, seed=5), sample(MU, SIGMA, N, seed=5))


def test_the_programs_of_eager_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA holds about 1.5 MB for each program, whether the call has a plan or not."""
    mu, sigma = vectors()
    programs.PROGRAMS.clear()
    assert 100e6 < programs.PROGRAMS._capacity * 1.6e6 < 300e6
    monkeypatch.setattr(programs.PROGRAMS, "_capacity", 1)

    gc.collect()
    gc.freeze()  # The collections below then visit this test's objects alone.

    def live() -> int:
        gc.collect()
        live = jax.devices("cpu")[0].client.live_executables()
        return sum(x.hlo_modules()[0].name in ("jit_draw", "jit_bind") for x in live)

    calls: list[Callable[[int], Any]] = [
        lambda n: sample(mu, sigma, n, seed=7),
        lambda n: sample(mu, sigma, n, seed=7, sample_offset=n % 2),
        lambda n: sample(list(MU), 1.5, n, seed=jax.random.key(7)),
        lambda n: multisample.weighted_moments(np.ones(n, np.float32), mu, sigma, seed=7)[0],
        lambda n: sample(jnp.asarray(np.ones((n, 1), np.float32)), 1.0, 3, seed=7),
        lambda n: jax.grad(lambda mu: sample(mu, sigma, n, seed=7)[0, 0])(mu),
    ]
    with jax.default_device(jax.devices("cpu")[0]):
        for call in calls:
            first = np.asarray(call(1))
            for _ in range(2):
                call(2)
            assert live() == len(programs.PROGRAMS) == 1
            check_same(call(1), first)


def test_without_a_seed_eager_calls_follow_our_generators() -> None:
    multisample.manual_seed(3)
    for i in range(2):
        check_same(sample(*vectors(), N), sample(MU, SIGMA, N, seed=Key(3, i)))
    generator = Generator(4)
    check_same(sample(*vectors(), N, generator=generator), sample(MU, SIGMA, N, seed=4))
    assert generator.offset == 1
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"^generator: .*torch\.Generator"):
        sample(*vectors(), N, generator=torch.Generator())


def test_a_graph_safe_generator_is_for_a_gpu() -> None:
    generator, safe = Generator(5), Generator(5, graph_safe=True)
    with jax.default_device(jax.devices("cpu")[0]):
        for _ in range(2):  # The second call finds the plan of calls with generators.
            sample(*vectors(), N, generator=generator)
            with pytest.raises(ValueError, match=r"^generator: expected arrays on a CUDA device"):
                sample(*vectors(), N, generator=safe, dtype=jnp.float32)
        with pytest.raises(ValueError, match=r"^generator: .*JAX key"):
            jax.jit(lambda: sample(*vectors(), N, generator=safe))()


def test_on_a_gpu_a_graph_safe_generator_counts_on_the_device(gpus: list[Any]) -> None:
    with jax.default_device(gpus[0]):
        generator = Generator(5, graph_safe=True)
        for i in range(3):
            check_same(sample(*vectors(), N, generator=generator), sample(MU, SIGMA, N, seed=Key(5, i)))
            sample(*vectors(), N, generator=Generator(1))  # One plan serves all generators.


def test_an_eager_call_with_wrong_values_in_host_memory_fails_and_takes_no_offset() -> None:
    generator = Generator(4)
    with jax.default_device(jax.devices("cpu")[0]):  # Values in a GPU's memory are not checked.
        wrong: list[dict[str, Any]] = [{"sigma": jnp.asarray([-1.0] * D)}, {"dim_offset": 2**32}]
        wrong += [{"mu": jnp.asarray([0.0, bad, 0.0, 0.0, 0.0])} for bad in (np.nan, np.inf, -np.inf)]
        for changes in wrong:
            with pytest.raises(ValueError, match=r"^(sigma: .*-1|dim_offset: |mu: .*mu\[1\])"):
                sample(**{"mu": jnp.asarray(MU), "sigma": jnp.asarray(SIGMA), **changes}, n=N, generator=generator)
    assert generator.offset == 0


def test_validate_checks_values_in_any_memory(jax_place: str) -> None:
    with pytest.raises(ValueError, match=r"^sigma: .*sigma\[2\] = -1"):
        sample(jnp.zeros(3), jnp.asarray([1.0, 1.0, -1.0]), N, seed=1, validate=True, backend=jax_place)


def test_programs_run_on_several_threads_at_once() -> None:
    draw = jax.jit(lambda key: sample(np.zeros(300, np.float32), 1.0, 2000, seed=key))
    small = jax.jit(lambda key: sample(MU, SIGMA, N, seed=key))
    expected = [np.asarray(draw(i)) for i in range(8)]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(20):
            x = draw(i)
            small(i).block_until_ready()
            if not np.array_equal(np.asarray(x.block_until_ready()), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert wrong == []


@pytest.mark.parametrize("shape", [(3, 5), (400, 20_000)])
def test_subnormal_numbers_are_kept_by_the_threads_of_xla(shape: tuple[int, int]) -> None:
    """XLA's own threads flush subnormal numbers."""
    mu, sigma = np.zeros(shape[0], np.float32), np.full(shape[0], 3e-38, np.float32)
    normals = sample(mu, 1.0, shape[1], seed=7)
    drawn = np.asarray(jax.jit(lambda sigma: sample(mu, sigma, shape[1], seed=7))(sigma))
    assert (drawn == normals.astype(np.float64) * sigma[0].astype(np.float64)).mean() < 1  # Some products are rounded.
    np.testing.assert_array_equal(drawn.view(np.uint32), (normals * sigma[:, None]).view(np.uint32))


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, lambda f: jax.grad(lambda x: f(x).sum())])
@pytest.mark.parametrize("constant", [True, False])
def test_a_traced_call_without_a_seed_raises_with_advice(transform: Any, constant: bool) -> None:
    generator = Generator(1)
    multisample.manual_seed(1)
    x = jnp.zeros((3, D)) if transform is jax.vmap else jnp.zeros(D)
    for options in ({}, {"generator": generator}):

        def call(mu: Any, options: Any = options) -> Any:
            return sample(MU if constant else mu, 1.0, N, **options) + mu.sum()

        with pytest.raises(ValueError, match=r"^(seed|generator): .*JAX key"):
            transform(call)(x)
    assert generator.offset == 0
    check_same(sample(MU, SIGMA, N), sample(MU, SIGMA, N, seed=1))


def test_calls_with_a_seed_and_numpy_arrays_are_constants_of_a_trace() -> None:
    found = []
    jax.jit(lambda: found.append(sample(MU, SIGMA, N, seed=7)))()
    check_same(found[0], sample(MU, SIGMA, N, seed=7))


@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"seed": 2**64}, ValueError, r"^seed: .*2\*\*64"),
    ({"seed": Key(1, -1)}, ValueError, r"^seed\.offset: .*-1"),
    ({"seed": 1, "dim_offset": 2**32}, ValueError, r"^dim_offset: .*2\*\*32"),
    ({"seed": 1, "sample_offset": 2**34}, ValueError, r"^n: .*2\*\*34"),
    ({"seed": 1, "dim_offset": 1.0}, TypeError, r"^dim_offset: .*float"),
    ({"seed": 1, "n": -1}, ValueError, r"^n: .*-1"),
    ({"seed": 1, "noise": "common"}, ValueError, r"^noise: .*common"),
    ({"seed": 1, "dtype": "int32"}, TypeError, r"^dtype: .*int32"),
    ({"seed": 1, "dtype": "float64"}, TypeError, r"^dtype: .*jax_enable_x64"),
    ({"seed": 1, "mu": np.zeros(D)}, TypeError, r"^dtype: .*jax_enable_x64.* mu is float64"),
    ({"seed": 1, "out": np.zeros((D, N), np.float32)}, TypeError, r"^out: .*immutable"),
    ({"seed": 1, "backend": 7}, TypeError, r"^backend: .*7"),
    ({"seed": 1, "backend": "cupy"}, (ValueError, multisample.BackendUnavailableError), r"^backend: 'cupy'"),
    ({"seed": 1, "mu": np.zeros((D, 2), np.float32)}, ValueError, r"^mu, sigma: .*\(5, 2\)"),
    ({"seed": 1, "mu": np.zeros(D + 1, np.float32)}, ValueError, r"^sigma: .*6, got 5"),
    ({"seed": 1, "mu": float("nan")}, ValueError, r"^mu: .*nan"),
    ({"seed": 1, "mu": np.zeros(D, bool)}, TypeError, r"^mu: .*bool"),
])  # fmt: skip
def test_wrong_arguments_are_named(jitted: bool, arguments: dict[str, Any], error: Any, message: str) -> None:
    def call(sigma: Any) -> Any:
        return sample(**{"mu": jnp.asarray(MU), "n": N, **arguments}, sigma=sigma)

    with jax.default_device(jax.devices("cpu")[0]), pytest.raises(error, match=message):
        (jax.jit(call) if jitted else call)(jnp.asarray(SIGMA))


@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize(("seed", "message"), [
    (lambda: jax.random.key(0, impl="rbg"), r"^seed: .*64 bits.*128 bits"),
    (lambda: jax.random.split(jax.random.key(0), (3, 2)), r"^seed: expected a JAX key.*\(3, 2\).*vmap"),
    (lambda: jnp.zeros(3, jnp.uint32), r"^seed: expected key data .*\(3,\)"),
    (lambda: jnp.zeros((2, 3), jnp.int32), r"^seed: expected an array .*\(2, 3\)"),
    (lambda: jnp.float32(1), r"^seed: .*float"),
    (lambda: Key(1, jax.random.key(0)), r"^seed\.offset: .*JAX key"),
])  # fmt: skip
def test_wrong_keys_are_named(jitted: bool, seed: Callable[[], Any], message: str) -> None:
    def call(seed: Any) -> Any:
        return sample(MU, SIGMA, N, seed=seed)

    with pytest.raises((TypeError, ValueError), match=message):
        (jax.jit(call) if jitted else call)(seed())


def test_arguments_that_cannot_be_traced_raise() -> None:
    mu, sigma = vectors()
    with pytest.raises(TypeError, match=r"^n: .*static"):
        jax.jit(lambda n: sample(mu, sigma, n, seed=1))(N)
    with pytest.raises(ValueError, match=r"^validate: "):
        jax.jit(lambda mu: sample(mu, sigma, N, seed=1, validate=True))(mu)
    with pytest.raises(TypeError, match=r"^out: .*JAX"):
        jax.jit(lambda out: sample(mu, sigma, N, seed=1, out=out))(jnp.zeros((D, N)))
    with pytest.raises(TypeError, match=r"^dim_offset: .*float32"):
        jax.jit(lambda row: sample(mu, sigma, N, seed=1, dim_offset=row))(1.5)
    with pytest.raises(TypeError, match=r"^sample_offset: .*\[2\]"):
        jax.jit(lambda row: sample(mu, sigma, N, seed=1, sample_offset=row))(jnp.zeros(2, int))


def exported(draw: Callable[..., Any], x: Any, *arguments: Any) -> Any:
    """The result of an exported program that knows the length of `x` only when it runs."""
    length = jax.export.symbolic_shape("b")
    allowed = [jax.export.DisabledSafetyCheck.custom_call(f"multisample_{name}") for name in ("sample", "gradient")]
    program = jax.export.export(jax.jit(draw), platforms=["cpu"], disabled_checks=allowed)
    return program(jax.ShapeDtypeStruct((*length, *x.shape[1:]), x.dtype), *arguments).call(x, *arguments)


LENGTHS: dict[str, Callable[..., Any]] = {
    "d": lambda x, key: sample(x, 1.0, N, seed=key),
    "d of both, nd": lambda x, key: sample(x, jnp.exp(x)[:, None], N, seed=key, layout="nd", dim_offset=3),
    "n": lambda x, key: sample(MU, SIGMA, x.shape[0] + 2, seed=key, sample_offset=5),
    "d and n": lambda x, key: sample(x, 1.0, x.shape[0], seed=key),
    "seeds": lambda x, key: sample(x, 1.0, N, seed=[1, 2]),
    "gradient": lambda x, key: jax.grad(lambda x: (sample(x, 1.0, N, seed=key) ** 2).sum())(x),
    "vmap": lambda x, key: jax.vmap(lambda mu: sample(mu[None], 1.0, N, seed=key))(x),
}


@pytest.mark.parametrize("draw", LENGTHS.values(), ids=LENGTHS)
def test_lengths_of_an_exported_program_may_be_unknown(draw: Callable[..., Any]) -> None:
    with jax.default_device(jax.devices("cpu")[0]):
        x, key = jnp.linspace(-1, 1, 6), jnp.array([1, 2], jnp.uint32)
        check_same(exported(draw, x, key), np.asarray(draw(x, key)))


def test_unknown_lengths_that_cannot_be_traced_are_named() -> None:
    x = jnp.zeros(6)
    with pytest.raises(TypeError, match=r"^weights: expected a length that is known while JAX traces, got b"):
        exported(lambda weights: multisample.weighted_moments(weights, MU, 1.0, seed=1), x)
    with pytest.raises(TypeError, match=r"^parameters\['w'\]: expected a shape that is known .*, got \(b, 2\)"):
        exported(lambda w: multisample.perturb({"w": w}, 0.1, seed=1), jnp.zeros((6, 2)))


def test_other_platforms_are_refused_when_the_program_is_made() -> None:
    draw = jax.jit(lambda mu: sample(mu, 1.0, N, seed=1))
    for platform in ("tpu", "rocm"):
        with pytest.raises(ValueError, match=r"^mu, sigma: .*cpu and cuda.*another platform"):
            draw.trace(jnp.asarray(MU)).lower(lowering_platforms=(platform,))


def test_a_window_out_of_range_is_an_error_of_the_program(x64: None) -> None:
    @jax.jit
    def draw(row: Any, column: Any) -> Any:
        return sample(MU, SIGMA, N, seed=1, dim_offset=row, sample_offset=column)

    wrong = (2**32 - D + 1, 0), (np.array([0, 2**32 - 1]), 0), (0, 2**34 - N + 1)
    for (row, column), name in zip(wrong, ("dim_offset", "dim_offset", "sample_offset"), strict=True):
        function = jax.vmap(draw, (0, None)) if np.ndim(row) else draw
        error = pytest.raises(jax.errors.JaxRuntimeError, match=rf"{name}: expected {name} \+ . <= 2\*\*3[24]")
        with jax.default_device(jax.devices("cpu")[0]), error:
            function(row, column).block_until_ready()
    check_same(draw(0, 0), sample(MU, SIGMA, N, seed=1))


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
        ((key, (3, -1)), ValueError, r"^shape\[1\]: expected 0 <="),
        ((key, 3, int), TypeError, "^dtype: expected float16"),
    ):
        with pytest.raises(error, match=message):
            multisample.jax.normal(*arguments)
