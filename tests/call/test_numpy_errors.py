"""No valid call obeys the caller's `numpy.seterr`: underflow and overflow of a result are values, and no errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch

import multisample
from multisample import cem, sample
from multisample._plan import PLANS

# float64 numbers that underflow and overflow in narrower types and in sums.
MU = np.array([0.0, 1e-300, 1e-40, 1e38])
SIGMA = np.array([1.0, 1e-300, 1e-40, 1e38])
WEIGHTS = np.linspace(-1e-300, 1e30, 40)


class DlpackOnly:
    def __init__(self, array: Any) -> None:
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


LIBRARIES: dict[str, Callable[[Any], Any]] = {
    "numpy": np.asarray, "list": np.ndarray.tolist, "torch": torch.from_numpy, "jax": jax.numpy.asarray,
    "dlpack": DlpackOnly,
}  # fmt: skip


def draws(library: str) -> list[Any]:
    with np.errstate(all="ignore"):  # JAX rounds to float32.
        mu, sigma, column, weights, number = map(
            LIBRARIES[library], (MU, SIGMA, SIGMA[:, None], WEIGHTS, np.array(1e-42))
        )
    dtypes = ("float32",) if library == "jax" else ("float16", "float32", "float64")
    results = []
    for dtype, layout, antithetic in itertools.product(dtypes, ("dn", "nd"), (False, True)):
        options: dict[str, Any] = {"seed": 1, "dtype": dtype, "layout": layout, "antithetic": antithetic}
        results += [
            sample(mu, sigma, 5, **options),
            sample(mu, column, 5, noise="shared", **options),
            sample(mu, 1e-300, 5, **options),
            sample(1e-42, sigma, 5, **options),
            sample(mu, number, 5, **options),
        ]
    for dtype, noise, order in itertools.product(dtypes[-2:], ("independent", "shared"), (1, 2)):
        results += multisample.weighted_moments(weights, mu, sigma, seed=1, dtype=dtype, noise=noise, order=order)  # type: ignore[arg-type]
    if library == "numpy":
        results += [sample(MU, SIGMA, 5, seed=jax.random.key(1), dtype="float32")]
        results += [sample(MU, SIGMA, 5, seed=1, dtype="float32", backend="torch_ext")]
    if library == "torch":
        results += [sample(mu, sigma, 5, seed=1, dtype="float32", backend="cpu")]
    return [np.asarray(x) for x in results]


@pytest.mark.parametrize("library", LIBRARIES)
def test_draws_and_moments(library: str) -> None:
    expected = draws(library)
    PLANS.clear()
    with np.errstate(all="raise"):
        for _ in range(2):  # Without plans, and with plans.
            for x, plain in zip(draws(library), expected, strict=True):
                assert x.tobytes() == plain.tobytes()


def test_gradients_through_jax() -> None:
    def loss(mu: Any, sigma: Any) -> Any:
        return (1e-30 * sample(mu, sigma, 5000, seed=1) ** 2).sum()

    mu, sigma = np.full(300, 1e-10, np.float32), np.full(300, 1e-5, np.float32)
    expected = jax.jit(jax.grad(loss, (0, 1)))(mu, sigma)
    with np.errstate(all="raise"):
        found = jax.jit(jax.grad(loss, (0, 1)))(mu, sigma)
    for x, plain in zip(found, expected, strict=True):
        assert np.asarray(x).tobytes() == np.asarray(plain).tobytes()


def test_wrong_values_raise_their_own_error() -> None:
    with np.errstate(all="raise"):
        for value in (np.nan, np.inf, 1e39):
            for mu in (np.array([0.0, value]), [0.0, value], torch.tensor([0.0, value], dtype=torch.float64)):
                with pytest.raises(ValueError, match=r"^mu: expected finite means, got mu\[1\]"):
                    sample(mu, 1.0, 3, dtype="float32")
            with pytest.raises(ValueError, match=r"^sigma: expected finite"):
                sample([0.0], value, 3, dtype="float32")


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
@pytest.mark.parametrize(
    "options", [{}, {"bounds": (-1e-60, 1.0)}, {"noise_floor": [1e-300] * 2}, {"smoothing": 0.5, "tol": 1e-60}]
)
def test_the_cross_entropy_method(library: str, options: dict[str, Any]) -> None:
    start = LIBRARIES[library](np.full(2, 1e-25, np.float32))

    def run() -> Any:
        result = cem.minimize(lambda x: abs(x).sum(0), start, 1e-20, 20, iterations=5, seed=1, **options)
        search: Any = cem.CEM(start, 1e-20, 20, seed=1, **options)
        search.tell(search.ask(), np.arange(20.0))
        search.state = {**search.state, "x": np.full(2, 1e-300)}
        return np.asarray(result.mu), np.asarray(search.result().x)

    expected = run()
    with np.errstate(all="raise"):
        found = run()
    for x, plain in zip(found, expected, strict=True):
        assert x.tobytes() == plain.tobytes()
