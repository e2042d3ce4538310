"""The gradient kernel in Python for the CPU: sums of any matrix, for each way in which it reads memory."""

import itertools
from typing import Any

import numpy as np
import pytest
from launches import a_launch, address_of, with_words_in_memory
from numpy.lib.stride_tricks import as_strided
from tables import DTYPES, NOISES, slow_but

import multisample
from multisample.backends.kernels.cpu.launcher import packed_function
from multisample.backends.launch import Launch, Operation, pack

Array = np.ndarray[Any, Any]

# Rows or columns in vectors; a vector that ends where the run ends; runs shorter than a vector; several tiles, parts,
# segments, and groups of 16 columns whose sums are added in float64.
SHAPES = [
    (1, 1), (3, 5), (5, 16), (2, 17), (70, 1), (65, 3), (100, 16), (40, 30), (7, 300), (3, 1030), (2, 4096), (1, 9001),
    (515, 2), (700, 33), (1030, 20), (80, 4100),
]  # fmt: skip
LAYOUTS = ("rows", "columns", "strided", "one element", "one row")


def matrix_of(layout: str, d: int, n: int, dtype: str) -> Array:
    x = np.random.default_rng(d * n).normal(size=(2 * d, 3 * n)).astype(DTYPES[dtype])
    if layout == "rows":
        return x[:d, :n].copy()
    if layout == "columns":
        return x[:d, :n].copy().T.copy().T
    if layout == "strided":
        return x[::2, ::3]
    return as_strided(x, (d, n), (0, 0) if layout == "one element" else (0, x.itemsize))


def gradients(x: Array, dtype: str, *, threads: int = 1, **fields: Any) -> tuple[Array, Array]:
    """grad_mu and grad_sigma by the kernel."""
    real = np.float64 if dtype == "float64" else np.float32
    mu, sigma = (np.full(x.shape[-2] if x.ndim == 2 else x.shape[:2], np.nan, real) for _ in range(2))
    launch = a_launch(
        *x.shape[-2:], dtype, matrix=address_of(x), strides=x.strides[-2:], operation=Operation.gradient,
        first=address_of(mu), second=address_of(sigma),
        threads=threads, **fields,
    )  # fmt: skip
    run(launch)
    return mu, sigma


def run(launch: Launch) -> None:
    assert packed_function(launch)(pack(launch)) == 0


def noise_of(x: Array, dtype: str, noise: str, antithetic: bool, dim_offset: int, sample_offset: int) -> Array:
    real = "float64" if dtype == "float64" else "float32"
    z: Array = multisample.sample(
        np.zeros(x.shape[0]), 1.0, x.shape[1], seed=1, dtype=real, noise=noise, antithetic=antithetic, backend="cpu",
        dim_offset=dim_offset, sample_offset=sample_offset,
    )  # fmt: skip
    return z.astype(np.float64)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("dtype", slow_but(["float32"], DTYPES))
def test_gradients_are_the_sums(dtype: str, noise: str, antithetic: bool, layout: str) -> None:
    rounding = 2.0**-50 if dtype == "float64" else 2.0**-21
    for (d, n), start in itertools.product(SHAPES, (0, 3)):
        x = matrix_of(layout, d, n, dtype)
        z, exact = noise_of(x, dtype, noise, antithetic, 5, start), x.astype(np.float64)
        fields = {"first_row": 5, "first_column": start, "shared_noise": noise == "shared", "antithetic": antithetic}
        mu, sigma = gradients(x, dtype, **fields)
        # The error of a sum is relative to the sum of the magnitudes.
        assert (np.abs(mu - exact.sum(1)) <= rounding * np.abs(exact).sum(1)).all(), (d, n, start)
        assert (np.abs(sigma - (exact * z).sum(1)) <= rounding * np.abs(exact * z).sum(1)).all(), (d, n, start)
        # The bits do not depend on the number of threads.
        for one, other in zip((mu, sigma), gradients(x, dtype, **fields, threads=3), strict=True):
            assert np.array_equal(one, other), (d, n, start)


@pytest.mark.parametrize("shape", [(3, 40, 7), (2, 3, 9000), (4, 90, 2)])
def test_a_batch_is_its_matrices(shape: tuple[int, int, int]) -> None:
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    keys = np.array([[5, 0], [7, 2**40], [5, 1], [2**63, 3]], np.uint64)[: len(x)]
    mu, sigma = gradients(
        x, "float32", threads=2, batch=len(x), matrix_step=x.strides[0], result_step=4 * shape[1],
        seed_at=address_of(keys), offset_at=address_of(keys) + 8, seed_step=16, offset_step=16, origin_in_memory=1,
    )  # fmt: skip
    for b, (seed, offset) in enumerate(keys.tolist()):
        alone = gradients(x[b], "float32", seed=seed, offset=offset)
        assert np.array_equal(mu[b], alone[0]) and np.array_equal(sigma[b], alone[1])


def test_the_window_may_be_in_memory() -> None:
    x = matrix_of("rows", 20, 50, "float32")
    expected = gradients(x, "float32", first_row=9, first_column=2**33 + 1, offset=3)
    mu, sigma = (np.empty(20, np.float32) for _ in range(2))
    launch = a_launch(
        20, 50, matrix=x, operation=Operation.gradient, first=address_of(mu), second=address_of(sigma), first_row=9,
        first_column=2**33 + 1, offset=3,
    )  # fmt: skip
    launch, memory = with_words_in_memory(launch, "offset", "first_row", "first_column")
    run(launch)
    assert len(memory) == 4 and np.array_equal(mu, expected[0]) and np.array_equal(sigma, expected[1])
