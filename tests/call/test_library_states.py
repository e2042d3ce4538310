"""Global states of other libraries: a call whose plan was made in another state has the outcome of a call without."""

import contextlib
import ctypes
import functools
import itertools
import os
import platform
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from cuda_memory import ExportedByDlpack
from outcomes import outcome
from tables import slow_but

import multisample
from multisample import Key, _backends, cem, perturb, sample, weighted_moments
from multisample._arguments import UNCHECKED
from multisample._plan import PLANS

D, N = 5, 7
MU, SIGMA = np.linspace(-2, 3, D), np.linspace(0.5, 2, D)
MU_32, SIGMA_32, WEIGHTS = MU.astype(np.float32), SIGMA.astype(np.float32), np.linspace(-1, 1, N, dtype=np.float32)
T_MU, T_SIGMA, T_RECORDED = torch.tensor(MU_32), torch.tensor(SIGMA_32), torch.tensor(MU_32, requires_grad=True)

Call = Callable[[], Any]
State = Callable[[], contextlib.AbstractContextManager[Any]]


def _fresh(call: Call) -> Any:
    """The outcome of a call without plans."""
    _backends.forget()
    return outcome(call)


def check_switches(calls: dict[str, Call], states: dict[str, State], matter: bool = True) -> None:
    """Check that plans of other `states` change no outcome; without `matter`, nor do the states, and no call fails."""
    states = {"outside": contextlib.nullcontext, **states}

    def outcomes(of: Callable[[Call], Any]) -> dict[str, Any]:
        found = {}
        for state, enter in states.items():
            with enter():
                found[state] = {name: of(call) for name, call in calls.items()}
        return found

    fresh = outcomes(_fresh)
    _backends.forget()
    for _ in range(2):
        assert outcomes(outcome) == fresh
    drawn = [not isinstance(one, list) for one in fresh["outside"].values()]
    assert any(drawn) if matter else all(drawn), [one for one in fresh["outside"].values() if isinstance(one, list)]
    changed = {(state, name) for state in states for name in calls if fresh[state][name] != fresh["outside"][name]}
    assert matter or changed == set()


HOST_CALLS: dict[str, Call] = {
    "numpy": lambda: sample(MU, SIGMA, N, seed=7),
    "numpy, number": lambda: sample(0.5, SIGMA_32, N, seed=Key(7, 2), layout="nd"),
    "numpy, moments": lambda: weighted_moments(WEIGHTS, MU_32, SIGMA_32, seed=7),
    "list": lambda: sample([1.0, 2.0], 1.0, N, seed=7, dtype="float16"),
}
TORCH_CALLS: dict[str, Call] = {
    "torch": lambda: sample(T_MU, T_SIGMA, N, seed=7),
    "torch, cpu": lambda: sample(T_MU, 1.5, N, seed=7, backend="cpu", dtype="float64"),
    "torch, out": lambda: sample(T_MU, T_SIGMA, N, seed=7, out=torch.empty((D, N), dtype=torch.float32, device="cpu")),
    "torch, recorded": lambda: sample(T_RECORDED, T_SIGMA, N, seed=7),
    "torch, moments": lambda: weighted_moments(T_SIGMA, T_RECORDED[:1], 1.5, seed=7),
    "torch, empty": lambda: sample(T_MU[:0], T_SIGMA[:0], N, seed=7),
    "torch, default generator": lambda: torch.manual_seed(3) and sample(T_MU, 1.5, N),
    "torch, generator": lambda: sample(T_MU, 1.5, N, generator=torch.Generator().manual_seed(3), backend="cpu"),
}

OWN_STATES: dict[str, State] = {
    "limit_threads": lambda: multisample.limit_threads(1), "print options": lambda: np.printoptions(precision=1),
    "MULTISAMPLE_NUM_THREADS": lambda: mock.patch.dict(os.environ, MULTISAMPLE_NUM_THREADS="1"),
}  # fmt: skip


def test_settings_of_the_process() -> None:
    check_switches(HOST_CALLS | TORCH_CALLS, OWN_STATES, matter=False)


@contextlib.contextmanager
def _set(setter: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


RAISING: dict[str, State] = {"raise": lambda: np.errstate(all="raise")}
# The arguments of C's fesetround: up, down, towards zero.
_MODES = (0x800, 0x400, 0xC00) if platform.machine() == "x86_64" else (0x400000, 0x800000, 0xC00000)
_FLOATS: dict[str, State] = {
    # PyTorch sets the modes of inputs and of results.
    "flush": lambda: _set(torch.set_flush_denormal, True, False),
    **{
        f"round {mode:#x}": lambda mode=mode: _set(ctypes.CDLL(None).fesetround, mode, 0)  # type: ignore[misc]
        for mode in _MODES
    },
}
# float64 numbers that underflow and overflow in narrower types and in sums.
EXTREME = np.array([0.0, 1e-300, 1e-40, 1e38])
TINY = np.array([1e-310, 1e-40, 0.1])
INTEGERS = np.array([2**24 + 1, 2**24 + 3, -(2**62) - 2**38 - 1, 5])  # float32 rounds them.
EXTREME_WEIGHTS = np.linspace(-1e-300, 1e30, 40)
LIBRARIES: dict[str, Callable[[Any], Any]] = {
    "numpy": np.asarray, "list": np.ndarray.tolist, "torch": torch.from_numpy, "dlpack": ExportedByDlpack,
    "jax": lambda x: pytest.importorskip("jax").numpy.asarray(x),
}  # fmt: skip


def _extreme_calls(library: str) -> dict[str, Call]:
    with np.errstate(all="ignore"):  # JAX rounds to float32.
        arrays = EXTREME, abs(EXTREME[:, None]), EXTREME_WEIGHTS, np.array(1e-42)
        mu, column, weights, number = map(LIBRARIES[library], arrays)
    dtypes = ["float32"] if library == "jax" else ["float16", "float32", "float64"]
    pairs = [(mu, mu), (mu, column), (mu, 1e-300), (1e-42, mu), (mu, number)]
    calls: dict[str, Call] = {}
    for dtype, (k, pair) in itertools.product(dtypes, enumerate(pairs)):
        options: Any = {"seed": 1, "dtype": dtype, "layout": ("dn", "nd")[k % 2]}
        options["noise"] = "shared" if pair[1] is column else "independent"
        calls[f"{k}, {options}"] = lambda pair=pair, options=options: sample(*pair, 5, **options)
    for dtype, order in itertools.product(dtypes[-2:], (1, 2)):
        options = {"seed": 1, "dtype": dtype, "order": order}
        calls[f"moments, {options}"] = lambda options=options: weighted_moments(weights, mu, mu, **options)
    if library in ("numpy", "torch"):
        other = "torch_ext" if library == "numpy" else "cpu"
        calls[other] = lambda: sample(mu, abs(mu), 5, seed=1, dtype="float32", backend=other)
        integers, *typed = (LIBRARIES[library](x) for x in (INTEGERS, TINY, TINY.astype(np.float32)))
        calls["integers"] = lambda: sample(integers, 0.0, 3, seed=1, dtype="float32", backend=other)
        for x, dtype in itertools.product(typed, ("float32", "float64")):
            options = {"seed": 1, "dtype": dtype, "backend": "cpu"}
            calls[f"{x.dtype} to {dtype}"] = lambda x=x, options=options: sample(x, x, 3, **options)
        calls["moments, integers"] = lambda: weighted_moments(integers[:4], mu, 0.1, seed=1, dtype="float32")
    if library in ("numpy", "torch", "jax"):
        wide = LIBRARIES[library](np.zeros(3, "float32" if library == "jax" else "float64"))
        narrow = LIBRARIES[library](np.zeros(3, np.float32))
        vectors = EXTREME, EXTREME.tolist(), TINY.astype(np.float32), LIBRARIES[library](TINY.astype(np.float32))
        for p, (k, c) in itertools.product((wide, narrow), enumerate((1e-310, 1e-40, 0.1, *vectors))):
            calls[f"perturb {p.dtype}, {k}"] = lambda p=p, c=c: perturb(p, c, seed=1)
    if library == "torch":
        leaf, scalar = torch.from_numpy(TINY).requires_grad_(), np.float32(1e-40)
        calls["recorded batch"] = lambda: sample(leaf, 1e-40, 3, seed=[1, 2], dtype="float32")
        calls["recorded moments"] = lambda: weighted_moments(weights, leaf, 1e-40, seed=1, dtype="float32")
        unchecked: Any = {"seed": 1, "dtype": "float32", "validate": UNCHECKED, "backend": "cpu"}
        calls["unchecked"] = lambda: sample(mu, scalar, 3, **unchecked)
        calls["vmap"] = lambda: torch.func.vmap(lambda x: sample(x, 1e-40, 3, seed=1, dtype="float32"))(mu[None])
    if library == "jax":
        key = pytest.importorskip("jax").random.key(1)
        calls["a key"] = lambda: sample(EXTREME, EXTREME, 5, seed=key, dtype="float32")
    return calls


@pytest.mark.parametrize("library", slow_but(["numpy", "list", "torch", "dlpack"], LIBRARIES))
def test_extreme_numbers_do_not_depend_on_numpys_error_state_or_on_floating_point_settings(library: str) -> None:
    check_switches(_extreme_calls(library), RAISING | _FLOATS, matter=False)


def test_checks_of_values_do_not_depend_on_floating_point_settings() -> None:
    tiny = np.array([0.0, -1e-310])
    calls = {
        f"{x}, {dtype}": lambda x=x, dtype=dtype: sample(np.zeros(2), x, 3, seed=1, dtype=dtype)
        for x in (-1e-310, -1e-45, tiny, tiny.tolist(), tiny.astype("f4") - np.float32(1e-45), 2.0**128 - 2.0**103)
        for dtype in ("float32", "float64")
    }
    calls["torch"] = lambda: sample(torch.zeros(2).double(), -1e-310, 3, seed=1)
    calls["torch, validate"] = lambda: sample(torch.zeros(2).double(), torch.tensor(tiny), 3, seed=1, validate=True)
    check_switches(calls, _FLOATS)
    expected = {name: outcome(call) for name, call in calls.items()}
    for enter in _FLOATS.values():
        with enter():
            found = {name: outcome(call) for name, call in calls.items()}
        assert {name for name in calls if found[name] != expected[name]} == set()


@pytest.mark.parametrize("library", slow_but(["numpy", "torch"], ["numpy", "torch", "jax"]))
def test_gradients_and_searches_ignore_the_numpy_error_state(library: str) -> None:
    def search(**options: Any) -> Any:
        start = LIBRARIES[library](np.full(2, 1e-25, np.float32))
        result = cem.minimize(lambda x: abs(x).sum(0), start, 1e-20, 20, iterations=2, seed=1, **options)
        search: Any = cem.CEM(start, 1e-20, 20, seed=1, **options)
        search.tell(search.ask(), np.arange(20.0))
        search.state = {**search.state, "x": np.full(2, 1e-300)}
        return result.mu, search.result().x

    limits = {"bounds": (-1e-60, 1.0), "noise_floor": [1e-300] * 2, "smoothing": 0.5, "tol": 1e-60}
    calls: dict[str, Call] = {"plain": search, "limits": lambda: search(**limits)}
    if library == "jax":
        jax = pytest.importorskip("jax")
        mu, sigma = np.full(300, 1e-10, np.float32), np.full(300, 1e-5, np.float32)
        gradient = jax.grad(lambda mu, sigma: (1e-30 * sample(mu, sigma, 5000, seed=1) ** 2).sum(), (0, 1))
        calls["gradient"] = lambda: jax.jit(gradient)(mu, sigma)
    check_switches(calls, RAISING, matter=False)


def test_wrong_values_raise_their_own_error_under_any_numpy_error_state() -> None:
    with np.errstate(all="raise"):
        for value in (np.nan, np.inf, 1e39):
            for mu in (np.array([0.0, value]), [0.0, value], torch.tensor([0.0, value], dtype=torch.float64)):
                with pytest.raises(ValueError, match=r"^mu: expected finite means, got mu\[1\]"):
                    sample(mu, 1.0, 3, dtype="float32")
            with pytest.raises(ValueError, match=r"^sigma: expected finite"):
                sample([0.0], value, 3, dtype="float32")


TORCH_STATES: dict[str, State] = {
    "default dtype": lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
    "default device": lambda: torch.device("meta"),
    "deterministic": lambda: _set(torch.use_deterministic_algorithms, True, False),
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "threads": lambda: _set(torch.set_num_threads, 1, torch.get_num_threads()),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "forward-mode AD": torch.autograd.forward_ad.dual_level,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_settings_of_pytorch() -> None:
    check_switches(TORCH_CALLS | HOST_CALLS, TORCH_STATES)


def test_subnormal_numbers_are_kept_on_threads_in_flush_mode() -> None:
    sigma, gradient = torch.full((400,), 3e-38), torch.full((3, 8), 1e-40)

    def drawn(backend: str) -> list[bytes]:
        found = [sample(torch.zeros(400), sigma, 20_000, seed=7, backend=backend)]  # By several threads.
        if backend == "torch_ext":
            leaves = torch.zeros(3, requires_grad=True), torch.ones(3, requires_grad=True)
            found += torch.autograd.grad(sample(*leaves, 8, seed=7), leaves, gradient)
            assert found[-1].view(torch.uint8).any()
        return [x.view(torch.uint8).numpy().tobytes() for x in found]

    for backend in ("cpu", "torch_ext"):
        expected = drawn(backend)
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor does not flush subnormal numbers")
        try:
            found = drawn(backend)
        finally:
            torch.set_flush_denormal(False)
        assert found == expected


def _jax_calls() -> dict[str, Call]:
    import jax
    import jax.numpy as jnp

    mu, sigma, seed, data = jnp.asarray(MU_32), jnp.asarray(SIGMA_32), jax.random.key(7), jax.random.PRNGKey(7)
    with jax.enable_x64(True):
        wide = jnp.asarray(MU)
    return {
        "a key": lambda: sample(MU, SIGMA, N, seed=seed),
        "a key, float64": lambda: sample(MU_32, SIGMA_32, N, seed=seed, dtype="float64"),
        "key data": lambda: sample(MU_32, 1.5, N, seed=data),
        "a Key of arrays": lambda: sample(MU_32, SIGMA_32, N, seed=Key(data, 0)),
        "arrays": lambda: sample(mu, sigma, N, seed=7, dim_offset=2),
        "arrays, float64": lambda: sample(mu, sigma, N, seed=7, dtype="float64"),
        "wide": lambda: sample(wide, sigma, N, seed=seed),
        "mixed": lambda: sample(mu, SIGMA, N, seed=7, validate=True),
        "moments, a key": lambda: weighted_moments(WEIGHTS, MU_32, SIGMA_32, seed=seed),
        "moments, arrays": lambda: weighted_moments(jnp.asarray(WEIGHTS), mu, SIGMA, seed=7),
    }


def _jax_config(name: str, value: Any) -> Any:
    import jax

    return _set(lambda x: jax.config.update(name, x), value, getattr(jax.config, name))


# Each function takes the module jax, and returns the context of a state.
JAX_STATES: dict[str, Callable[[Any], Any]] = {
    "enable_x64": lambda jax: jax.enable_x64(True),
    "jit disabled": lambda jax: jax.disable_jit(),
    "strict promotion": lambda jax: jax.numpy_dtype_promotion("strict"),
    "key reuse": lambda jax: jax.debug_key_reuse(True),
    "leak checks": lambda jax: jax.checking_leaks(),
}
MORE_JAX_STATES: dict[str, Callable[[Any], Any]] = {
    "x64 by config": lambda jax: _jax_config("jax_enable_x64", True),
    "default device": lambda jax: jax.default_device(jax.devices("cpu")[-1]),
    "default key type": lambda jax: _jax_config("jax_default_prng_impl", "rbg"),
    "partitionable keys": lambda jax: jax.threefry_partitionable(False),
    "custom keys": lambda jax: _jax_config("jax_enable_custom_prng", True),
    "NaN checks": lambda jax: jax.debug_nans(True),
    "rank promotion": lambda jax: jax.numpy_rank_promotion("raise"),
}


@pytest.mark.parametrize("states", [JAX_STATES, pytest.param(MORE_JAX_STATES, marks=pytest.mark.slow)])
def test_settings_of_jax(states: Any) -> None:
    jax = pytest.importorskip("jax")
    check_switches(_jax_calls(), {name: functools.partial(state, jax) for name, state in states.items()})


KINDS = "multisample_sample", "multisample_gradient", "multisample_moments"


def test_calls_with_a_jax_key_have_one_plan_which_no_trace_uses() -> None:
    jax = pytest.importorskip("jax")
    sample(MU_32, SIGMA_32, N, seed=jax.random.key(1), validate=True)
    PLANS.clear()
    for seed in range(4):
        sample(MU_32, SIGMA_32, N, seed=jax.random.key(seed), validate=True)
    assert len(PLANS) == 1
    key = jax.random.key(7)
    with pytest.raises(ValueError, match=r"^validate: expected False where JAX traces"):
        jax.jit(lambda: sample(MU_32, SIGMA_32, N, seed=key, validate=True))()


@pytest.mark.parametrize("kind", slow_but(["multisample_sample"], KINDS))
def test_a_program_traced_with_other_types_raises(kind: str) -> None:
    """Handlers would read float32 operands as float64."""
    jax = pytest.importorskip("jax")
    from jax.extend.core import jaxpr_as_fun

    functions: dict[str, Call] = {
        "multisample_sample": lambda: jax.make_jaxpr(lambda mu: sample(mu, SIGMA, N, seed=7))(MU),
        "multisample_gradient": lambda: jax.make_jaxpr(jax.grad(lambda x: sample(MU, x, N, seed=7).sum()))(SIGMA),
        "multisample_moments": lambda: jax.make_jaxpr(lambda mu: weighted_moments(WEIGHTS, mu, SIGMA, seed=7))(MU),
    }
    with jax.enable_x64(True):
        program = functions[kind]()
        expected = jaxpr_as_fun(program)(SIGMA)
    (equation,) = [equation for equation in program.eqns if equation.primitive.name == kind]
    avals = [x.aval for x in equation.invars]
    operands = [np.ones(x.shape, "float32" if x.dtype == "float64" else x.dtype) for x in avals]
    with pytest.raises(TypeError, match=r"^jax_enable_x64: expected the setting with which"):
        equation.primitive.bind(*operands, **equation.params)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(jaxpr_as_fun(program)(SIGMA)[0], expected[0])
