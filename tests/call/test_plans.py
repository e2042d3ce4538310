"""Plans: a call with a plan draws the same bits, and raises the same errors, as a call without a plan.

Each test makes a plan by a valid call, changes something that is not in the key, and compares with a fresh call.
"""

import contextlib
import itertools
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import launches
import ml_dtypes
import numpy as np
import pytest
import torch
from fake_backend import FakeBackend
from forks import forked, in_forks
from outcomes import contents, outcome

from multisample import Generator, Key, _libraries, _plan, sample
from multisample.backends import registry

PLANS = _plan.PLANS
D, N = 3, 4
MU, SIGMA = np.zeros(D, np.float32), np.ones(D, np.float32)
T_MU, T_SIGMA = torch.zeros(D), torch.ones(D)
OF_TORCH = {"mu": T_MU, "sigma": 1.0, "backend": "cpu"}
BACKENDS_OF_TORCH = "cpu", "torch_ext"

Call = Callable[[], Any]


@pytest.fixture(autouse=True)
def no_plans() -> Iterator[None]:
    """Register every array type of the tests, and clear the plans before and after the test."""
    sample(MU, SIGMA, 1, seed=1)
    for backend in ("cpu", "auto"):  # "auto" loads the library of torch_ext, which changes the keys of plans.
        sample(T_MU, T_SIGMA, 1, seed=1, backend=backend)
    _forget()
    yield
    _forget()


def _forget() -> None:
    PLANS.clear()


def need(backend: str) -> None:
    reasons = registry.find(backend).status().reasons
    if reasons:
        pytest.skip("; ".join(reasons))


@pytest.fixture(params=["numpy", "torch", "torch_in_python", "torch_by_cpu"])
def vectors(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """``vectors(values)``: an array of a library in host memory; `vectors.options` are options for its calls."""
    if request.param == "numpy":
        yield HostVectors(np.asarray, {})
        return
    backend = "cpu" if request.param == "torch_by_cpu" else "torch_ext"
    need(backend)
    with launches.without_builtins() if request.param == "torch_in_python" else contextlib.nullcontext():
        yield HostVectors(torch.from_numpy, {"backend": backend})


class HostVectors:
    def __init__(self, convert: Callable[[Any], Any], options: dict[str, Any]) -> None:
        self.convert, self.options = convert, options

    def __call__(self, *values: float) -> Any:
        return self.convert(np.array(values, np.float32))

    def matrix(self) -> Any:
        return self.convert(np.full((D, N), 77, np.float32))


class PlainSubclass(torch.Tensor):
    """A tensor subclass that overrides nothing."""


class ArraySubclass(np.ndarray):
    """An array subclass that overrides nothing."""


class GeneratorSubclass(Generator):
    """A generator subclass that overrides nothing."""


def check_alike(good: Call, other: Call, is_error: bool | None = None) -> Any:
    """Check that `other` has the same outcome with the plan of `good` and without plans; returns the outcome."""
    _forget()
    good()
    assert len(PLANS) == 1
    planned = outcome(other)
    _forget()
    fresh = outcome(other)
    _forget()
    assert planned == fresh
    if is_error is not None:
        assert isinstance(fresh, list) == is_error, fresh
    return fresh


def check_changed(good: dict[str, Any], changes: dict[str, Any], is_error: bool | None = None) -> Any:
    """`check_alike` of a call and one with other arguments."""
    return check_alike(lambda: sample(**good), lambda: sample(**{**good, **changes}), is_error)


def test_plans_keep_no_array_alive(vectors: Any) -> None:
    def calls() -> Iterator[tuple[Any, ...]]:
        """For each call, its arguments and its result. Dropping them must free the arrays."""
        mu, sigma, generator, out = vectors(1, 2, 3), vectors(1, 2, 3), Generator(1), vectors.matrix()
        options = vectors.options
        yield mu, sigma, generator, sample(mu, sigma, N, generator=generator, **options)
        yield mu, sample(mu, 1.5, N, **options)
        yield mu, sigma, generator, sample(mu, sigma, N, dtype="float64", generator=generator, **options)
        yield mu, sigma, sample(mu, sigma, N, out=out, **options)
        with pytest.raises(ValueError, match="sigma"):
            sample(mu, wrong := vectors(1, 2, -3), N, **options)
        yield mu, wrong
        if vectors.convert is np.asarray:
            swapped, narrow = mu.astype(">f4"), sigma.astype(np.float16)
            yield swapped, narrow, sample(swapped, narrow, N)
        elif options["backend"] == "torch_ext":
            recorded = mu.clone().requires_grad_()
            x = sample(recorded, sigma, N)
            x.sum().backward()
            negative = torch._neg_view(mu)
            yield recorded, x, negative, sample(negative, sigma, N)

    for _ in range(2):
        alive: list[weakref.ref[Any]] = []
        for call in calls():
            alive += map(weakref.ref, call)
            del call
        assert len(PLANS) >= 4
        assert [one for one in alive if one() is not None] == []


def sizes() -> dict[str, int]:
    """The lengths of all containers of all modules, and of the caches of functions."""
    found: dict[str, int] = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] != "multisample":
            continue
        for name, value in vars(module).items():
            if isinstance(value, (dict, list, set)) or type(value).__name__ == "deque":
                found[f"{module_name}.{name}"] = len(value)
            elif hasattr(value, "cache_info"):
                found[f"{module_name}.{name}"] = value.cache_info().currsize
    return {name: size for name, size in found.items() if "__" not in name and not name.endswith(".PLANS")}


def test_the_plan_cache_is_bounded_and_no_other_cache_grows(vectors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert PLANS._capacity == 1024
    monkeypatch.setattr(PLANS, "_capacity", 64)
    for n in range(3):
        sample(vectors(1, 2, 3), vectors(1, 2, 3), n, seed=1, **vectors.options)
    before = sizes()
    for n in range(100):
        sample(vectors(1, 2, 3), vectors(1, 2, 3), n, seed=1, **vectors.options)
    assert len(PLANS) == 64
    grown = {name: (before.get(name), size) for name, size in sizes().items() if size > before.get(name, 0)}
    assert not grown
    # The cache holds the newest plans.
    sample(vectors(1, 2, 3), vectors(1, 2, 3), 99, seed=1, **vectors.options)
    assert [getattr(plan, "plan", plan).shape[1] for plan in PLANS.values()] == list(range(36, 100))


def test_the_destructor_of_a_dropped_plan_may_store_another() -> None:
    cache: _plan.PlanCache[Any] = _plan.PlanCache(2)

    class Dropped:
        def __del__(self) -> None:
            cache.put("a destructor's", 1)

    cache.put("first", Dropped())
    for key in (1, 2):
        cache.put(key, key)
    assert list(cache) == ["a destructor's", 2]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_objects_with_a_changing_index_or_dtype_get_no_plan() -> None:
    class Index:
        value = N

        def __index__(self) -> int:
            return self.value

    class Typed:
        dtype: Any = np.dtype("float32")

    index, tensor = Index(), torch.tensor(N)
    for n in (index, tensor, np.array(N)):
        assert sample(MU, SIGMA, n, seed=1).shape == (D, N)
    index.value = 9
    tensor += 5
    for n in (index, tensor):
        assert sample(MU, SIGMA, n, seed=1).shape == (D, 9)
    for dtype in ("float32", "float64", "float16"):
        Typed.dtype = np.dtype(dtype)
        assert sample(MU, SIGMA, N, dtype=Typed).dtype == dtype
        for one in (Typed(), np.dtype(dtype).type(1)):
            with contextlib.suppress(TypeError):  # Some NumPy versions refuse such objects.
                assert sample(MU, SIGMA, N, dtype=one).dtype == dtype
    assert len(PLANS) == 0
    sample(MU, SIGMA, np.int64(N))
    for constant in (np.float64, float, ml_dtypes.bfloat16):
        sample(MU, SIGMA, N, dtype=constant)
    assert len(PLANS) == 4
    with pytest.raises(TypeError, match=r"^dtype: expected float16, bfloat16, float32, float64, got 1$"):
        sample(MU, SIGMA, N, dtype=1, seed=1)


def test_no_cache_grows_by_types_or_dtypes() -> None:
    """A program may make classes and dtypes without end, such as the classes of a reloaded module."""

    def call(k: int) -> None:
        array = type("Array", (np.ndarray,), {})
        tensor = type("Tensor", (torch.Tensor,), {})
        foreign = type("Foreign", (), {"__array__": lambda self, dtype=None, copy=None: MU})
        typed = type("Typed", (), {"dtype": np.dtype("float32")})
        device = type("Device", (), {"__dlpack__": MU.__dlpack__, "__dlpack_device__": MU.__dlpack_device__})
        sample(MU.view(array), SIGMA, N, seed=1, dtype=typed, out=np.empty((D, N), np.float32).view(array))
        sample(torch.from_numpy(MU).as_subclass(tensor), 1.0, N, seed=1)
        sample(foreign(), SIGMA, N, seed=1)
        sample(device(), 1.0, N, seed=1)
        for wrong in (np.dtype(f"S{k + 1}"), np.dtype([(f"x{k}", "f4")])):
            with pytest.raises(TypeError, match=r"^dtype"):
                sample(MU, SIGMA, N, seed=1, dtype=wrong)
            with pytest.raises(TypeError, match=r"^mu: expected elements"):
                sample(np.zeros(D, wrong), SIGMA, N, seed=1)

    for k in range(70):  # More than the cache of types holds.
        call(k)
    before = sizes()
    for k in range(70, 110):
        call(k)
    grown = {name: (before.get(name), size) for name, size in sizes().items() if size > before.get(name, 0)}
    assert not grown
    assert np.ndarray in _libraries.BY_TYPE
    assert len(_libraries.BY_TYPE) <= 64


def test_values_windows_seeds_and_generators_share_a_plan(vectors: Any) -> None:
    mu = vectors(1, 2, 3)
    plain: dict[str, Any] = {"mu": mu, "sigma": mu, "n": N, **vectors.options}
    groups: list[list[dict[str, Any]]] = [
        [{"sigma": x, "seed": 1} for x in (0.0, 1.5, 7.0)], [{"mu": x, "seed": 1} for x in (0, 1, -9)],
        [{"sigma": vectors(x, 1, 2)} for x in (1, 2)], [{"seed": x} for x in (0, 5, 2**64 - 1)],
        [{"seed": Key(x, x)} for x in (0, 2**63)], [{"generator": Generator(x)} for x in (0, 5)],
        [{"seed": 1, "dim_offset": x, "sample_offset": 3 * x} for x in (0, 1, 2**32 - D)],
        [{"out": vectors.matrix()} for _ in range(2)],
    ]  # fmt: skip
    if vectors.convert is not np.asarray:
        groups.append([{"generator": torch.Generator().manual_seed(x)} for x in (0, 5)])
    for group in groups:
        _forget()
        drawn = []
        for changes in group:
            drawn.append(contents(sample(**{**plain, **changes})))
            assert len(PLANS) == 1
        for changes, found in zip(group, drawn, strict=True):
            _forget()
            assert found == contents(sample(**{**plain, **changes})) or "seed" not in changes


@pytest.mark.parametrize(
    ("good", "other"),
    [
        ({"n": 10}, {"n": 10.0}), ({"n": 1}, {"n": True}), ({"n": np.int64(1)}, {"n": np.True_}),
        ({"fast_math": False}, {"fast_math": 0}), ({"antithetic": True}, {"antithetic": 1}),
        ({"validate": False}, {"validate": 0.0}), ({"sample_offset": 1}, {"sample_offset": True}),
        ({"dim_offset": 0}, {"dim_offset": False}), ({"dim_offset": 1}, {"dim_offset": 1.0}),
        ({"sample_offset": 1}, {"sample_offset": None}), ({"seed": 1}, {"seed": True}), ({"seed": 1}, {"seed": 1.0}),
        ({"seed": Key(1, 0)}, {"seed": (1.0, 0)}), ({"seed": Key(1, 0)}, {"seed": Key(True, 0)}),
        ({"seed": Key(1, 0)}, {"seed": Key(1, -1)}), ({"noise": "shared"}, {"noise": b"shared"}),
        ({"seed": 1}, {"seed": 1, "generator": Generator(1)}),
        ({"generator": Generator(1)}, {"seed": 1}), ({"generator": Generator(1)}, {"seed": Key(1, 2)}),
        ({"generator": Generator(1)}, {"generator": 1}),
        ({"generator": Generator(1)}, {"generator": Generator(1, graph_safe=True)}),
        ({"generator": GeneratorSubclass(1)},
         {"generator": GeneratorSubclass(1, graph_safe=True)}),
        ({"mu": 1}, {"mu": True}), ({"mu": 1.0}, {"mu": 10**400}), ({"sigma": 1.0}, {"sigma": -1.0}),
        ({"sigma": 1}, {"sigma": float("nan")}), ({"mu": 1.0}, {"mu": float("inf")}), ({"sigma": 1}, {"sigma": 1e300}),
        ({"seed": 1}, {"seed": -1}), ({"seed": 1}, {"seed": 2**64}), ({}, {"dim_offset": 2**32 - D + 1}),
        ({}, {"dim_offset": -1}), ({}, {"sample_offset": 2**34 - N + 1}), ({}, {"sample_offset": 2**34 + 1}),
        ({"dtype": "float32"}, {"dtype": ["float32"]}), ({"backend": "cpu"}, {"backend": ["cpu"]}),
        ({"layout": "dn"}, {"layout": None}), ({"generator": None}, {"generator": torch.Generator()}),
        ({"generator": Generator(1)}, {"generator": torch.Generator()}),
        ({**OF_TORCH, "generator": Generator(1)}, {"generator": np.random.default_rng(1)}),
        ({**OF_TORCH, "generator": torch.Generator()}, {"generator": Generator(1, graph_safe=True)}),
    ],
    ids=lambda options: re.sub(" at 0x[0-9a-fA-F]+", "", str(options)),  # Workers of pytest-xdist collect equal ids.
)  # fmt: skip
def test_equal_values_of_different_types_have_different_plans(good: dict[str, Any], other: dict[str, Any]) -> None:
    check_changed({"mu": MU, "sigma": SIGMA, "n": N, **good}, other, is_error=True)


def test_several_mistakes_raise_one_error(vectors: Any) -> None:
    """The error is the same with and without a plan."""
    good, bad = vectors(1, 2, 3), vectors(1, 2, -np.inf)
    plain: dict[str, Any] = {"mu": good, "sigma": good, "n": N, **vectors.options}
    wrong: dict[str, Any] = {"mu": bad, "sigma": bad}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"seed": 1}, {**wrong, "seed": -1}), ({"seed": 1}, {**wrong, "seed": Key(1, -1)}),
        ({}, {**wrong, "dim_offset": 2**32}),
        ({}, {**wrong, "sample_offset": -1, "dim_offset": 2**32}),
        ({"generator": Generator(1)}, {**wrong, "generator": Generator(1, graph_safe=True)}),
        ({"sigma": 1.0}, {"mu": bad, "sigma": -1.0}), ({"mu": 1.0}, {"mu": np.inf, "sigma": bad}),
    ]  # fmt: skip
    for options, (right, mistakes) in itertools.product(({}, {"out": vectors.matrix()}), cases):
        check_changed({**plain, **options, **right}, mistakes, is_error=True)


@pytest.mark.parametrize("name", ["mu", "sigma"])
@pytest.mark.parametrize("layout", ["dn", "nd"])
def test_an_overlapping_out_raises_with_a_plan(vectors: Any, name: str, layout: str) -> None:
    memory = vectors.convert(np.arange(2 * D * N, dtype=np.float32))
    before, out = memory + 0, memory[: D * N].reshape((D, N) if layout == "dn" else (N, D))
    plain = {"mu": vectors(1, 2, 3), "sigma": vectors(1, 2, 3), "n": N, "seed": 1, "layout": layout, "out": out}
    apart = vectors.convert(np.zeros(40, np.float32))
    for first, step in ((0, 1), (2, 3), (D * N - 1, 1), (D * N - 1, 4)):
        part = slice(first, first + step * D, step)
        shown = check_changed({**plain, **vectors.options, name: apart[part]}, {name: memory[part]}, is_error=True)
        assert shown[0][1].startswith(f"out: expected memory of its own, got memory that {name} also uses")
        memory[...] = before
    # Adjacent memory does not overlap.
    check_changed({**plain, **vectors.options}, {name: memory[D * N : D * N + D]}, is_error=False)


def test_the_flags_and_types_of_numpy_arrays_are_checked_in_every_call() -> None:
    def new() -> Any:
        return np.full((D, N), 77, np.float32)

    plain = {"mu": MU, "sigma": SIGMA, "n": N, "seed": 1}
    again, locked = new(), new()
    locked.flags.writeable = False
    sample(**plain, out=again)
    again.flags.writeable = False  # The array is the same object as before.
    with pytest.raises(ValueError, match=r"^out: expected a writable array"):
        sample(**plain, out=again)
    raw = np.zeros(4 * D * N + 1, np.uint8)[1:].view(np.float32)
    assert not raw.flags.aligned
    read_only, column = MU.copy(), np.ones((D, 1), np.float32)
    read_only.flags.writeable = False
    for out, is_error in (
        (np.ma.masked_array(new()), True), (new().view(ArraySubclass), False), (new().view(np.matrix), False),
        (new().astype(">f4"), True), (new().tolist(), True), (np.zeros((1, N), np.float32).repeat(1), True),
        (np.broadcast_to(new()[:1], (D, N)), True), (raw.reshape(D, N), False), (locked, True),
    ):  # fmt: skip
        check_changed({**plain, "out": new()}, {"out": out}, is_error)
    check_changed(plain, {"mu": np.ma.masked_array(MU)}, is_error=True)
    check_changed(plain, {"sigma": np.ma.masked_array(SIGMA)}, is_error=True)
    for mu in (raw[:D], read_only):
        check_changed(plain, {"mu": mu}, is_error=False)
    for kind in (np.matrix, ArraySubclass):
        check_changed({**plain, "mu": column}, {"mu": column.view(kind)}, is_error=False)


@pytest.mark.parametrize("by", BACKENDS_OF_TORCH)
def test_the_flags_of_tensors_are_checked_in_every_call(by: str) -> None:
    need(by)

    def draw(mu: Any = T_MU, sigma: Any = T_SIGMA, out: Any = None) -> Any:
        return sample(mu, sigma, N, seed=1, out=out, backend=by)

    plain = {"mu": T_MU, "sigma": T_SIGMA, "n": N, "seed": 1, "backend": by}
    negative = {"mu": torch._neg_view(-torch.arange(3.0))}
    x = check_changed(plain, negative, is_error=False)
    assert x == check_changed(plain, {"mu": torch.arange(3.0)}, is_error=False)
    memory = torch.zeros(D, N)
    check_changed({**plain, "out": torch.zeros(D, N)}, {**negative, "out": memory}, is_error=False)
    check_changed({**plain, "out": memory}, {"out": torch._neg_view(torch.zeros(D, N))}, is_error=True)
    # A tensor with the negative bit shares memory with `out`.
    check_changed({**plain, "out": memory}, {"mu": torch._neg_view(memory[:, 0])}, is_error=True)

    parameter = torch.nn.Parameter(torch.zeros(D))
    needs = torch.zeros(D)
    draw(needs)
    needs.requires_grad_()  # The tensor is the same object as before.
    if by == "torch_ext":
        assert draw(needs).requires_grad
        assert draw(parameter).requires_grad
    else:
        with pytest.raises(ValueError, match=r"^mu: requires grad"):
            draw(needs)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert not draw(needs).requires_grad
    assert not draw(needs.detach()).requires_grad
    for x in (needs, parameter):
        check_changed(plain, {"mu": x})
        check_alike(torch.no_grad()(lambda: draw(x)), lambda: draw(x), is_error=by == "cpu")  # noqa: B023
        with torch.no_grad():
            check_changed(plain, {"mu": x}, is_error=False)
    out = torch.zeros(D, N)
    draw(out=out)
    out.requires_grad_()
    with pytest.raises(ValueError, match=r"^out: requires grad"):
        draw(out=out)
    with torch.no_grad():
        draw(out=out)


@pytest.mark.parametrize("by", BACKENDS_OF_TORCH)
def test_inference_tensors_have_equal_outcomes_with_a_plan(by: str) -> None:
    need(by)

    def draw(out: Any = None, mu: Any = T_MU) -> Any:
        return sample(mu, T_SIGMA, N, generator=generator, out=out, backend=by)

    generator = Generator(3)
    with torch.inference_mode():
        kept, frozen = torch.full((D, N), 77.0), torch.zeros(D)
        draw(kept)
        assert draw().is_inference()
    before, offset = kept.clone(), generator.offset
    shown = check_alike(lambda: draw(torch.zeros(D, N)), lambda: draw(kept), is_error=True)
    assert shown[0][1].startswith("out: expected a writable tensor")
    assert generator.offset == offset + 1
    assert torch.equal(kept, before)
    assert not draw(mu=frozen).is_inference()


@pytest.mark.parametrize("by", BACKENDS_OF_TORCH)
@pytest.mark.parametrize("place", ["mu", "sigma", "out"])
@pytest.mark.parametrize("kind", ["freed", "zero", "functional", "dead vmap", "dead grad"])
def test_tensors_without_memory_raise(by: str, place: str, kind: str) -> None:
    need(by)
    plain: dict[str, Any] = {"mu": torch.zeros(D), "sigma": torch.ones(D), "n": N, "seed": 1, "backend": by}
    if place == "out":
        plain["out"] = torch.zeros(D, N)
    shape = plain[place].shape
    kept: list[Any] = []
    with torch.no_grad():
        if kind == "freed":
            x = torch.ones(shape)
            x.untyped_storage().resize_(0)
        elif kind == "zero":
            x = torch._efficientzerotensor(shape)
        elif kind == "functional":
            x = torch._to_functional_tensor(torch.ones(shape))
        elif kind == "dead vmap":
            torch.func.vmap(lambda x: kept.append(x) or x)(torch.ones(2, *shape))
            (x,) = kept
        else:
            torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(torch.ones(shape))
            x = kept[0]
        # NumPy can read a tensor of torch.func.grad.
        is_error = None if (kind, by) == ("dead grad", "cpu") else True
        check_changed(plain, {place: x}, is_error)


def test_a_gradient_without_memory_is_zero() -> None:
    need("torch_ext")
    mu = torch.ones(D, requires_grad=True)
    for _ in range(2):
        sample(mu, T_SIGMA, N, seed=1).backward(torch._efficientzerotensor((D, N)))
        assert torch.equal(mu.grad, torch.zeros(D))


def test_plans_are_bypassed_for_tensor_subclasses() -> None:
    need("torch_ext")
    seen = []

    class Wrapped(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*[T_MU if isinstance(x, cls) else x for x in args], **(kwargs or {}))

    plain = {"mu": T_MU, "sigma": T_SIGMA, "n": N, "seed": 1}
    for mu in (T_MU.as_subclass(PlainSubclass), torch.nn.Parameter(T_MU, requires_grad=False)):
        check_changed(plain, {"mu": mu}, is_error=False)
    for mu in (T_MU.to_sparse(), T_MU.to("meta")):
        check_changed(plain, {"mu": mu}, is_error=True)
    sample(**plain)
    for _ in range(2):
        sample(torch.Tensor._make_wrapper_subclass(Wrapped, T_MU.shape), T_SIGMA, N, seed=1)
    assert seen.count("multisample.sample.default") == 2


@forked
def test_a_forked_child_has_no_plans_and_draws_the_same(vectors: Any) -> None:
    def draw() -> str:
        return repr(contents(sample(vectors(1, 2, 3), vectors(1, 2, 3), N, seed=1, **vectors.options)))

    expected = draw()
    assert in_forks(lambda: [len(PLANS), draw(), len(PLANS), draw()]) == [[0, expected, 1, expected]]
    assert len(PLANS) == 1
    assert draw() == expected


def test_strides_are_part_of_a_key(registered: Callable[[Any], Any]) -> None:
    """Backends without launchers get addresses and strides only."""
    registered(FakeBackend("delegating"))
    x = np.arange(12, dtype=np.float32)

    def draw(mu: Any, sigma: Any = SIGMA, out: Any = None) -> Any:
        return sample(mu, sigma, N, seed=1, out=out, backend="delegating")

    for other in (x[:6:2], x[2::-1], np.broadcast_to(x[3:4], 3), x[1:4]):
        check_alike(lambda: draw(x[:3]), lambda: draw(other), is_error=False)  # noqa: B023
        check_alike(lambda: draw(x[:3], x[:3]), lambda: draw(x[:3], other), is_error=False)  # noqa: B023
        assert (draw(other) == sample(other, SIGMA, N, seed=1)).all()
    new = np.zeros((D, N), np.float32)
    for out in (np.zeros((N, D), np.float32).T, np.zeros((D, 2 * N), np.float32)[:, ::2]):
        check_alike(lambda: draw(x[:3], out=new), lambda: draw(x[:3], out=out), is_error=False)  # noqa: B023


def test_threads_share_plans() -> None:
    libraries = ["numpy"] if registry.find("torch_ext").status().reasons else ["numpy", "torch"]
    signatures = list(itertools.product(libraries, (1, 3, 8), (2, 9, 33), ("float32", "float64")))

    def draw(signature: tuple[str, int, int, str], seed: int) -> Any:
        library, d, n, kind = signature
        convert: Any = torch.from_numpy if library == "torch" else np.asarray
        return contents(sample(convert(np.arange(d, dtype=kind)), convert(np.ones(d, np.float32)), n, seed=seed))

    expected = {(signature, seed): draw(signature, seed) for signature in signatures for seed in range(4)}
    barrier = threading.Barrier(8)

    def work(first: int) -> None:
        barrier.wait()
        for count in range(150):
            signature, seed = signatures[(first * 5 + count) % len(signatures)], (first + count) % 4
            if count % 50 == first:
                PLANS.clear()
            assert draw(signature, seed) == expected[signature, seed]

    _forget()
    with ThreadPoolExecutor(8) as executor:
        list(executor.map(work, range(8)))
    assert len(PLANS) <= len(signatures)
