"""Launches on the CPU without `sample`: seed and window in memory, checks of values, and the bytes that are written.

`sample` passes the seed and the window by value; replayed graphs and compiled programs may pass them in memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from launches import WORDS, a_launch, head_of, stored_word, with_words_in_memory
from tables import INPUTS, QUICK_KERNELS, slow_but

from multisample.backends import registry
from multisample.backends.contract import Backend, Launcher
from multisample.backends.generic import generic_launcher
from multisample.backends.launch import HEAD, Launch, Operation
from multisample.backends.memory.host import array_at, arrays_at, inputs_at

Array = np.ndarray[Any, Any]
Values = Array | float

SOME_WORDS = [words for count in range(1, 5) for words in itertools.combinations(WORDS, count)]
MATRIX_TYPES = {"float16": np.uint16, "bfloat16": np.uint16, "float32": np.float32, "float64": np.float64}


@pytest.fixture(params=["cpu", "torch_ext"])
def host_backend(request: pytest.FixtureRequest) -> Backend:
    found = registry.find(request.param)
    if not found.status().available:
        pytest.skip(f"{request.param} cannot run here")
    found.prepare("cpu")
    return found


def bits(array: Array) -> Array:
    return array.view(f"u{array.itemsize}")


# --- Words in memory ------------------------------------------------------------------------------


@pytest.mark.parametrize("shared_noise", slow_but([False], [False, True]))
@pytest.mark.parametrize("kernel", slow_but(QUICK_KERNELS, itertools.product(MATRIX_TYPES, (False, True))))
def test_words_in_memory_give_the_bits_of_words_by_value(
    host_backend: Backend, kernel: tuple[str, bool], shared_noise: bool
) -> None:
    dtype, antithetic = kernel
    real = np.float64 if dtype == "float64" else np.float32
    # Small, with long rows, with many dimensions, and with several threads.
    for k, (d, n) in enumerate([(1, 1), (5, 7), (3, 1029), (300, 9), (200, 701)]):
        mu, sigma = np.linspace(-3, 3, d).astype(real), np.linspace(0, 2, d).astype(real)
        by_value, from_memory = (np.zeros((n, d), MATRIX_TYPES[dtype]).T for _ in range(2))
        if k % 2:
            by_value, from_memory = (np.zeros((d, n), MATRIX_TYPES[dtype]) for _ in range(2))
        draw = a_launch(
            d, n, dtype, mu=mu, sigma=sigma, matrix=by_value, seed=2**64 - 3, offset=2**63 + k,
            first_row=2**32 - d, first_column=2**33 + 5 + k, shared_noise=shared_noise, antithetic=antithetic,
        )  # fmt: skip
        host_backend.launch(draw)
        assert len(np.unique(bits(by_value))) > min(d * n, 200) // 8
        for words in SOME_WORDS[k % 2 :: 2] if d != 200 else [WORDS]:
            from_memory[...] = 0
            read, _memory = with_words_in_memory(draw._replace(matrix=from_memory.ctypes.data), *words)
            host_backend.launch(read)
            assert np.array_equal(bits(by_value), bits(from_memory)), (d, n, words)


@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("dtype", MATRIX_TYPES)
def test_gradients_read_words_from_memory(dtype: str, antithetic: bool) -> None:
    backend = registry.find("torch_ext")
    if not backend.status().available:
        pytest.skip("torch_ext cannot run here")
    real = np.float64 if dtype == "float64" else np.float32
    for (d, n), words, shared_noise in itertools.product([(5, 7), (40, 4099)], SOME_WORDS, (False, True)):
        matrix = np.linspace(-1, 1, d * n).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype).reshape(d, n)
        sums = np.zeros((2, 2, d), real)
        draw = a_launch(
            d, n, dtype, first=sums[0, 0].ctypes.data, second=sums[0, 1].ctypes.data, matrix=matrix, seed=7,
            offset=2**40, first_row=3, first_column=6, shared_noise=shared_noise, antithetic=antithetic,
            operation=Operation.gradient,
        )  # fmt: skip
        backend.launch(draw)
        moved = draw._replace(first=sums[1, 0].ctypes.data, second=sums[1, 1].ctypes.data)
        draw, _memory = with_words_in_memory(moved, *words)
        backend.launch(draw)
        assert np.array_equal(bits(sums[0]), bits(sums[1])), (d, n, words)
        assert np.count_nonzero(sums) > 3 * d


def test_words_in_memory_are_read_by_the_launch(host_backend: Backend) -> None:
    """Each launch reads the words anew; making the `Launch` reads none."""
    mu, sigma, out = np.zeros(3, np.float32), np.ones(3, np.float32), np.zeros((3, 5), np.float32)
    draw, words = with_words_in_memory(a_launch(mu=mu, sigma=sigma, matrix=out), *WORDS)
    host_backend.launch(draw)
    first = out.copy()
    words[:] = stored_word("seed", 2), 3, 4, 6
    host_backend.launch(draw)
    second = out.copy()
    host_backend.launch(a_launch(mu=mu, sigma=sigma, matrix=out, seed=2, offset=3, first_row=4, first_column=6))
    assert np.array_equal(out, second) and not np.array_equal(first, second)


# --- Launchers ------------------------------------------------------------------------------------


def launcher_of(backend: Backend, draw: Launch, *, generic: bool = False) -> Launcher:
    made: Launcher = generic_launcher(backend, draw) if generic else backend.launcher(draw)  # type: ignore[attr-defined]
    return made


def template(launch: Launch) -> Launch:
    """The launch of a plan, without the fields that differ between calls."""
    return launch._replace(**dict.fromkeys(HEAD, 0))


def moving(launcher: Launcher, launch: Launch) -> tuple[Any, ...]:
    """The arguments of `Launcher.run` after the geometry, in the launcher's form."""
    if not launcher.takes_arrays:
        return head_of(launch)
    arrays = arrays_at(launch)
    operands = [arrays.get(name) for name in HEAD[:6]]
    return *operands, *head_of(launch)[6:]


@pytest.mark.parametrize("generic", [False, True], ids=["own", "generic"])
@pytest.mark.parametrize("numbers", ["neither", "mu", "sigma", "both"])
@pytest.mark.parametrize("dtype", slow_but([dtype for dtype, pairs in QUICK_KERNELS if not pairs], MATRIX_TYPES))
def test_a_launcher_draws_the_bits_of_launch_and_writes_no_other_memory(
    host_backend: Backend, dtype: str, numbers: str, generic: bool
) -> None:
    for (d, n), transposed in itertools.product(
        [(1, 7), (7, 1), (3, 5), (8, 9), (15, 40), (16, 5), (17, 2), (33, 100), (100, 33), (200, 701)], (False, True)
    ):
        mu: Values = 1.5 if numbers in ("mu", "both") else np.linspace(-3, 3, d)
        sigma: Values = 0.5 if numbers in ("sigma", "both") else np.linspace(0, 2, d).astype(np.float16)
        outs = []
        for _ in range(2):
            memory = np.full(d * n + 128, 7, MATRIX_TYPES[dtype])
            out = memory[64:-64].reshape((n, d) if transposed else (d, n))
            outs.append((memory, out.T if transposed else out))
        draw = a_launch(
            d, n, dtype, mu=mu, sigma=sigma, matrix=outs[0][1], seed=5, offset=2**50, first_row=2, first_column=3
        )
        host_backend.launch(draw)
        draw = draw._replace(matrix=outs[1][1].ctypes.data)
        launcher = launcher_of(host_backend, template(draw), generic=generic)
        arguments = moving(launcher, draw)
        geometry = launcher.geometry(arguments[3], 3) if launcher.geometry else None
        launcher.run(geometry, *arguments)
        for memory, _ in outs:
            assert (memory[:64] == 7).all() and (memory[-64:] == 7).all(), (d, n, dtype)
        assert np.array_equal(bits(outs[0][1]), bits(outs[1][1])), (d, n, dtype)
        assert not (outs[1][1] == 7).all()


# --- Values ---------------------------------------------------------------------------------------


@pytest.fixture(params=["own", "generic"])
def validity(request: pytest.FixtureRequest, host_backend: Backend) -> Callable[..., bool]:
    """``validity(mu, sigma, dtype)``: the result of the launcher's check of these vectors."""

    def is_valid(mu: Values, sigma: Values, dtype: str) -> bool:
        d = next((len(x) for x in (mu, sigma) if not isinstance(x, float)), 1)
        draw = a_launch(d, 5, dtype, mu=mu, sigma=sigma)
        launcher = launcher_of(host_backend, template(draw), generic=request.param == "generic")
        assert launcher.is_valid is not None
        vectors = inputs_at(draw).values() if launcher.takes_arrays else (draw.mu, draw.sigma)
        return bool(launcher.is_valid(*vectors, None))

    return is_valid


LENGTHS = (1, 2, 15, 16, 17, 255, 256, 257, 1000)
STRIDES: dict[str, Callable[[Array], Array]] = {
    "contiguous": lambda x: x.copy(),
    "every third": lambda x: np.repeat(x, 3)[::3],
    "reversed": lambda x: x[::-1].copy()[::-1],
    "unaligned": lambda x: np.frombuffer(bytearray(b"\1" + x.tobytes()), x.dtype, len(x), 1),
}


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("dtype", slow_but(["float32", "float64"], MATRIX_TYPES))
def test_one_invalid_value_at_any_position_is_found(validity: Callable[..., bool], dtype: str, strides: str) -> None:
    laid_out = STRIDES[strides]
    for d, kind in itertools.product(LENGTHS, (np.float32, np.float64)):
        mu, sigma = np.linspace(-3, 3, d).astype(kind), np.linspace(0, 2, d).astype(kind)
        largest = np.float32(3.4028235e38)
        mu[d // 2], sigma[d // 2] = -largest, largest
        sigma[0] = -0.0
        assert validity(laid_out(mu), laid_out(sigma), dtype), (d, kind)
        for place, wrong in itertools.product({0, d // 3, d - 1}, (math.nan, math.inf, -math.inf)):
            bad = mu.copy()
            bad[place] = wrong
            assert not validity(laid_out(bad), laid_out(sigma), dtype), (d, kind, place, wrong)
        for place, wrong in itertools.product({0, d // 3, d - 1}, (math.nan, math.inf, -math.inf, -1.0, -1e-45)):
            bad = sigma.copy()
            bad[place] = wrong
            assert not validity(laid_out(mu), laid_out(bad), dtype), (d, kind, place, wrong)
        # float32 rounds this number to minus 0, which is valid.
        bad = sigma.copy()
        bad[-1] = -1e-50
        assert validity(laid_out(mu), laid_out(bad), dtype) == (bad[-1] == 0 or dtype != "float64"), (d, kind)
        assert validity(laid_out(np.full(d, -0.0, kind)), laid_out(np.full(d, -0.0, kind)), dtype)


@pytest.mark.parametrize("kind", INPUTS, ids=lambda kind: kind.name)
def test_values_of_every_type_are_checked(validity: Callable[..., bool], kind: np.dtype[Any]) -> None:
    for d in (1, 20, 300):
        zeros, ones = np.zeros(d, kind), np.ones(d, kind)
        if kind.kind in "iu":
            low, high = np.iinfo(kind).min, np.iinfo(kind).max
        else:
            low, high = ml_dtypes.finfo(kind).min, ml_dtypes.finfo(kind).max
        # The largest float64 numbers are infinite as float32.
        for dtype in ("float64",) if kind == np.float64 else ("float32", "float64", "float16"):
            assert validity(np.full(d, low, kind), ones, dtype) and validity(np.full(d, high, kind), ones, dtype)
            assert validity(zeros, np.full(d, high, kind), dtype) and validity(zeros, zeros, dtype)
            assert validity(zeros, np.full(d, low, kind), dtype) == (kind.kind == "u")
            for place in (0, d - 1):
                if kind.kind != "u":
                    bad = ones.copy()
                    bad[place] = -1
                    assert validity(bad, ones, dtype) and not validity(zeros, bad, dtype)
                if kind.kind not in "iu":
                    for wrong in (math.nan, math.inf, -math.inf):
                        bad = ones.copy()
                        bad[place] = wrong
                        assert not validity(bad, ones, dtype) and not validity(zeros, bad, dtype)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_values_too_large_for_float32_are_invalid(validity: Callable[..., bool], dtype: str) -> None:
    for d, wrong in itertools.product((1, 40), (1e39, 3.4028236e38)):
        zeros, ones, bad = np.zeros(d), np.ones(d), np.ones(d)
        bad[-1] = wrong
        assert validity(bad, ones, "float64") and validity(zeros, bad, "float64")
        assert not validity(bad, ones, dtype) and not validity(zeros, bad, dtype)
        assert not validity(-bad, ones, dtype)


@pytest.mark.parametrize("dtype", slow_but(["float32", "float64"], MATRIX_TYPES))
def test_with_a_number_only_the_vector_is_checked(validity: Callable[..., bool], dtype: str) -> None:
    for d in (1, 40):
        values, bad = np.full(d, 1.5, np.float32), np.full(d, 1.5, np.float32)
        bad[-1] = math.nan
        assert validity(2.5, values, dtype) and not validity(2.5, bad, dtype)
        assert validity(values, 0.0, dtype) and not validity(bad, 0.0, dtype)
        assert validity(-values, 2.5, dtype) and not validity(2.5, -values, dtype)
    assert validity(2.5, 0.5, dtype)


def test_arrays_of_a_draw_share_its_memory() -> None:
    matrix = np.arange(15, dtype=np.float32).reshape(5, 3)[::-1].T
    draw = a_launch(3, 5, mu=2.5, sigma=np.arange(3, dtype=np.int16)[::-1], matrix=matrix)
    mu, sigma, found = arrays_at(draw).values()
    assert (mu.tolist(), sigma.tolist(), found.tolist()) == ([2.5] * 3, [2, 1, 0], matrix.tolist())
    assert mu.dtype == sigma.dtype == np.float32
    found[0, 0] = -1
    assert matrix[0, 0] == -1
    assert array_at(draw.matrix, (3,), (draw.row_stride,), "float32").tolist() == matrix[:, 0].tolist()
