"""`weighted_moments` on every backend: exact sums, windows, determinism, other libraries' arrays, gradients, errors."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cuda_memory import ExportedByDlpack
from fake_backend import FakeBackend
from moments import exact_moments
from tables import DTYPES, NOISES, slow_but

import multisample
from multisample._plan import PLANS
from multisample.backends import registry
from multisample.backends.launch import Operation

Array = np.ndarray[Any, Any]
Place = Callable[[Array], Any]


def vectors(d: int, n: int, real: str = "float32") -> tuple[Array, Array, Array]:
    """Weights, mu and sigma."""
    draw = np.random.default_rng(d * 10007 + n)
    return tuple(x.astype(real) for x in (draw.normal(size=n), draw.normal(size=d), draw.exponential(size=d)))  # type: ignore[return-value]


@pytest.fixture
def moments_of(backend: str, place: Place) -> Callable[..., Any]:
    """``moments_of(weights, mu, sigma, **options)``: the moments of arrays in the backend's memory."""

    def moments_of(*arrays: Any, **options: Any) -> Any:
        placed = (place(x) if isinstance(x, np.ndarray) else x for x in arrays)
        return multisample.weighted_moments(*placed, backend=backend, **options)

    return moments_of


# More columns than a tile, more rows than a band, and more columns than a segment of the CPU's sums.


@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("dtype", slow_but(["float32", "float64"], DTYPES))
def test_moments_are_those_of_the_sample(
    moments_of: Any, to_numpy: Any, dtype: str, noise: Any, antithetic: bool
) -> None:
    for k, (d, n) in enumerate([(0, 3), (1, 1), (3, 5), (10, 100), (20, 1100), (1030, 40), (3, 70_000)]):
        w, mu, sigma = vectors(d, n, "float64" if dtype == "float64" else "float32")
        w[(np.arange(n) // 3) % (k + 1) > 0] = 0
        options: dict[str, Any] = {"seed": multisample.Key(9, k), "noise": noise, "antithetic": antithetic}
        options |= {"dim_offset": 7 * k, "sample_offset": 5 * k}
        moments = moments_of(w, mu, sigma, dtype=dtype, **options)
        got = [to_numpy(x) for x in moments]
        if dtype == "bfloat16" and got[0].dtype == np.uint16:
            got = [x.view(DTYPES[dtype]) for x in got]
        assert all(x.dtype == DTYPES[dtype] for x in got)
        exact_moments(w, mu, sigma, dtype, **options).check(*got)
        (first,) = moments_of(w, mu, sigma, dtype=dtype, order=1, **options)
        assert to_numpy(first).tobytes() == to_numpy(moments[0]).tobytes()


# Powers of two for weights, and for mu and sigma. Products overflow or lose bits, but the moments are normal numbers.
SCALES = {
    "float32": [(124, -60), (-140, 70), (-149, 100), (100, -110), (-120, 0), (-40, 70), (60, -90)],
    "float64": [(1020, -500), (-1060, 530), (-1074, 999), (999, -999), (-970, 0), (-40, 515), (0, -511), (900, -950)],
}


@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_moments_in_range_need_no_terms_in_range(moments_of: Any, to_numpy: Any, dtype: str, antithetic: bool) -> None:
    options: dict[str, Any] = {"seed": 5, "antithetic": antithetic}
    for (a, b), (d, n) in itertools.product(SCALES[dtype], [(3, 5), (20, 1100)]):
        w, mu, sigma = vectors(d, n, dtype)
        w, mu, sigma = np.ldexp(w, a), np.ldexp(mu, b), np.ldexp(sigma, b)
        w[np.isinf(w)] = np.finfo(dtype).max
        exact = exact_moments(w, mu, sigma, dtype, **options)
        exact.check(*map(to_numpy, moments_of(w, mu, sigma, **options)))
        # The weights almost cancel, and mu is far smaller than sigma: the noise decides the first moment.
        w[1::2] = -w[: 2 * (n // 2) : 2]
        exact = exact_moments(w, np.ldexp(mu, -20), sigma, dtype, **options)
        exact.check(*map(to_numpy, moments_of(w, np.ldexp(mu, -20), sigma, **options)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_powers_of_two_of_weights_change_no_bits(moments_of: Any, to_numpy: Any, dtype: str) -> None:
    w, mu, sigma = vectors(20, 1100, dtype)
    plain = [to_numpy(x) for x in moments_of(w, mu, sigma, seed=5)]
    for power in (-90, -100, 105, 115) if dtype == "float32" else (-950, -990, 950, 1010):
        got = moments_of(np.ldexp(w, power), mu, sigma, seed=5)
        for x, y in zip(got, plain, strict=True):
            assert to_numpy(x).tobytes() == np.ldexp(y, power).tobytes()


def equal_bits(bits: Any, some: Any, others: Any) -> bool:
    return all((bits(a) == bits(b)).all() for a, b in zip(some, others, strict=True))


def test_groups_without_weight_are_left_out(moments_of: Any, to_numpy: Any, bits: Any) -> None:
    w, mu, sigma = vectors(50, 20_000)
    elites, one = w.copy(), np.zeros_like(w)
    elites[np.random.default_rng(5).random(w.size) > 0.1] = 0
    one[12_345] = 1.5
    for weights in (elites, one):
        got = moments_of(weights, mu, sigma, seed=3)
        exact_moments(weights, mu, sigma, seed=3).check(*map(to_numpy, got))
    # With one nonzero weight, the sums equal those of its group alone.
    assert equal_bits(bits, got, moments_of(one[12_344:12_348], mu, sigma, seed=3, sample_offset=12_344))
    for noise in NOISES:
        assert all((to_numpy(x) == 0).all() for x in moments_of(0 * one, mu, sigma, seed=3, noise=noise))


@pytest.mark.parametrize("antithetic", [False, True])
def test_moments_of_windows_add_up(moments_of: Any, to_numpy: Any, antithetic: bool) -> None:
    d, n = 30, 5000
    w, mu, sigma = vectors(d, n)
    exact = exact_moments(w, mu, sigma, seed=4, antithetic=antithetic)
    for cut in (1, 4, 1003, 2048, 4999):
        call = {"seed": 4, "antithetic": antithetic}
        parts = [moments_of(w[:cut], mu, sigma, **call), moments_of(w[cut:], mu, sigma, sample_offset=cut, **call)]
        exact.check(*(to_numpy(a).astype(np.float64) + to_numpy(b) for a, b in zip(*parts, strict=True)))
    # Rows are independent of each other.
    whole = moments_of(w, mu, sigma, seed=4)
    rows = moments_of(w, mu[11:], sigma[11:], seed=4, dim_offset=11)
    for a, b in zip(whole, rows, strict=True):
        assert np.allclose(to_numpy(a)[11:], to_numpy(b), rtol=1e-4, atol=1e-3)


def test_equal_calls_have_equal_bits_with_any_number_of_threads(moments_of: Any, bits: Any) -> None:
    for (d, n), noise in itertools.product(((10, 3), (3, 70_000), (2000, 20_000), (3000, 100)), NOISES):
        first, second = (moments_of(*vectors(d, n), seed=11, noise=noise) for _ in range(2))
        with multisample.limit_threads(1):
            third = moments_of(*vectors(d, n), seed=11, noise=noise)
        assert equal_bits(bits, first, second) and equal_bits(bits, first, third)


def test_numbers_and_columns_and_strides(moments_of: Any, place: Place, view_of: Any, to_numpy: Any) -> None:
    w, mu, sigma = vectors(20, 60)
    host = np.ascontiguousarray(np.stack([w, w], 1))
    strided = view_of(place(host), host, lambda x: x[:, 0])
    exact_moments(w, mu, 0.5, seed=1).check(*map(to_numpy, moments_of(strided, mu, 0.5, seed=1)))
    exact_moments(w, -2.0, sigma, seed=1).check(*map(to_numpy, moments_of(w, -2, sigma[:, None].copy(), seed=1)))


def test_a_weight_of_nan_on_a_device_reaches_every_sum(
    backend: str, place: Place, moments_of: Any, to_numpy: Any
) -> None:
    device = str(getattr(place(np.ones(1)), "device", "cuda"))
    if registry.find(backend).device_kinds == ("cpu",) or "cuda" not in device:
        pytest.skip("values in host memory are checked")
    w, mu, sigma = vectors(30, 500)
    w[:] = 0
    w[77] = math.nan
    got = moments_of(w, mu, sigma, seed=1)
    assert all(np.isnan(to_numpy(x)).all() for x in got)


def test_lists_and_arrays_of_unknown_libraries(bits: Any) -> None:
    first, second = multisample.weighted_moments([1, 2.5, 0], [1.0, 2.0], 1.0, seed=3)
    assert first.dtype == second.dtype == np.float32
    exact_moments([1, 2.5, 0], [1.0, 2.0], 1.0, seed=3).check(first, second)
    arrays = vectors(5, 50)
    foreign = multisample.weighted_moments(*map(ExportedByDlpack, arrays), seed=1)
    assert equal_bits(bits, foreign, multisample.weighted_moments(*arrays, seed=1))


W, MU, SIGMA = vectors(4, 9)
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"weights": np.ones((3, 3), np.float32)}, ValueError, r"weights: expected shape \(n,\)"),
    ({"weights": np.ones(0, np.float32)}, ValueError, r"weights: expected shape \(n,\), n being at least 1"),
    ({"weights": 1.0}, TypeError, "weights: expected an array"),
    ({"weights": np.array([1, math.nan, 2])}, ValueError, r"weights: expected finite weights, got weights\[1\]"),
    ({"weights": [1.0, math.inf]}, ValueError, r"weights: expected finite weights, got weights\[1\]"),
    ({"weights": np.ones(3, complex)}, TypeError, "weights: expected elements of type"),
    ({"mu": MU[:3]}, ValueError, "sigma: expected as many elements as mu"),
    ({"mu": 0.0, "sigma": 1.0}, TypeError, "mu, sigma: expected at least one array"),
    ({"order": 3}, ValueError, "order: expected 1 or 2, got 3"),
    ({"order": 2.0}, TypeError, "order: expected an integer"),
    ({"seed": None}, TypeError, "seed: expected an integer"),
    ({"antithetic": 0}, TypeError, "antithetic: expected True or False"),
    ({"dim_offset": 2**32 - 3}, ValueError, "dim_offset: expected"),
    ({"sample_offset": 2**34 - 8}, ValueError, "n: expected sample_offset"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=[str(k) for k in range(len(WRONG))])
def test_wrong_arguments_are_named(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"weights": W, "mu": MU, "sigma": SIGMA, "seed": 1}
    PLANS.clear()
    for _ in range(2):  # The second call comes after one that has a plan.
        with pytest.raises(error, match=message):
            multisample.weighted_moments(**{**arguments, **changes})
        multisample.weighted_moments(**arguments)


def test_a_backend_without_moments_is_refused(registered: Callable[[Any], Any]) -> None:
    registered(FakeBackend("samples")).operations = (Operation.sample,)
    with pytest.raises(ValueError, match="backend: 'samples' cannot run the operation moments"):
        multisample.weighted_moments(W, MU, SIGMA, seed=1, backend="samples")


def test_libraries_are_not_mixed() -> None:
    for arrays in ((W, torch.tensor(MU), torch.tensor(SIGMA)), (torch.tensor(W), MU, SIGMA)):
        with pytest.raises(TypeError, match="mu, sigma, weights: expected arrays of one library, got a"):
            multisample.weighted_moments(*arrays, seed=1)


def test_a_gradient_has_the_shape_and_the_type_of_its_argument(torch_device: str) -> None:
    mean = torch.zeros(6, 1, dtype=torch.float64, device=torch_device, requires_grad=True)
    weights = torch.ones(40, device=torch_device)
    (first,) = multisample.weighted_moments(weights, mean, 1.0, order=1, seed=1, dtype="float32")
    assert first.shape == (6,) and first.dtype is weights.dtype
    first.sum().backward()
    assert mean.grad.shape == (6, 1) and (mean.grad == 40).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_gradients_are_recorded_with_every_backend(backend: str, place: Place, dtype: str) -> None:
    w, mu, sigma = vectors(6, 40, "float64" if dtype == "float64" else "float32")
    options: dict[str, Any] = {"seed": 3, "antithetic": True, "sample_offset": 2}
    device = "cuda" if registry.find(backend).device_kinds == ("cuda",) or torch.cuda.is_available() else "cpu"
    device = "cpu" if backend == "cpu" else device
    weights = torch.tensor(w, device=device)
    mean, deviation = (torch.tensor(x, device=device, requires_grad=True) for x in (mu, sigma))
    moments = multisample.weighted_moments(weights, mean, deviation, backend=backend, dtype=dtype, **options)
    exact = exact_moments(w, mu, sigma, dtype, **options)
    exact.check(*(x.detach().cpu().numpy() for x in moments))
    (moments[0].sum() + moments[1].sum()).backward()
    np.testing.assert_allclose(mean.grad.cpu(), np.full(6, w.sum()), rtol=1e-3)
    slope = (exact.first - w.sum() * mu + 2 * exact.second) / sigma
    np.testing.assert_allclose(deviation.grad.cpu(), slope.astype(np.float64), rtol=1e-3, atol=1e-3)
    if device == "cpu":
        with pytest.raises(ValueError, match="weights: expected finite weights"):
            multisample.weighted_moments(weights * math.nan, mean, deviation, seed=3, backend=backend)


def test_gradients_of_weights_and_traces_of_pytorch_are_refused() -> None:
    weights = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match="weights: require grad, but gradients flow to mu and sigma only"):
        multisample.weighted_moments(weights, torch.zeros(2), 1.0, seed=1)
    with torch.no_grad():
        multisample.weighted_moments(weights, torch.zeros(2), 1.0, seed=1)
    with pytest.raises(ValueError, match="weights: require grad, but gradients flow to mu and sigma only"):
        torch.func.grad(lambda w: multisample.weighted_moments(w, torch.zeros(2), 1.0, seed=1)[0].sum())(torch.ones(3))


# The compiler uses PyTorch's own deprecated functions.
@pytest.mark.filterwarnings("ignore:::torch")
@pytest.mark.slow
def test_a_compiled_function_breaks_its_graph(torch_device: str) -> None:
    weights, mu = torch.ones(12, device=torch_device), torch.zeros(5, device=torch_device)

    def step(mu: Any) -> Any:
        return mu + multisample.weighted_moments(weights, mu, 1.0, seed=1)[0] * 2

    assert torch.equal(torch.compile(step, backend="eager")(mu), step(mu))
