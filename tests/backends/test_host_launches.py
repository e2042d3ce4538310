"""Launches on the CPU without `sample`: seed and window in memory, checks of values, and the bytes that are written."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from launches import WORDS, a_launch, head_of, with_words_in_memory
from tables import INPUTS, QUICK_KERNELS, slow_but

from multisample.backends import registry
from multisample.backends.contract import Backend, Launcher
from multisample.backends.generic import generic_launcher
from multisample.backends.kernels.cpu import calls
from multisample.backends.kernels.cpu.launcher import packed_function
from multisample.backends.launch import HEAD, Launch, pack
from multisample.backends.memory.host import array_at, arrays_at, inputs_at

Array = np.ndarray[Any, Any]
Values = Array | float

SOME_WORDS = [words for count in range(1, 5) for words in itertools.combinations(WORDS, count)]
MATRIX_TYPES = {"float16": np.uint16, "bfloat16": np.uint16, "float32": np.float32, "float64": np.float64}


def available(name: str) -> Backend:
    backend = registry.find(name)
    if not backend.status().available:
        pytest.skip(f"{name} cannot run here")
    backend.prepare("cpu")
    return backend


def bits(array: Array) -> Array:
    return array.view(f"u{array.itemsize}")


@pytest.mark.parametrize("shared_noise", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 700), (700, 1)])
def test_kernels_of_both_directions_draw_the_same_bits(rows: int, columns: int, shared_noise: bool) -> None:
    """JAX may have the kernel of one direction alone, before it knows that there is one row or one column."""
    mu, x = np.linspace(-3, 3, rows, dtype=np.float32), np.zeros((rows, columns), np.float32)
    sigma = mu * mu
    launch = a_launch(rows, columns, mu=mu, sigma=sigma, matrix=x, shared_noise=shared_noise)
    run, drawn = packed_function(launch), []
    in_python: Any = calls._place_of
    for down in (False, True):
        place = in_python.py_func(launch.type, shared_noise, False, down)
        calls.function_address(launch._replace(rows=2, row_stride=4 if down else 8))
        kernels, calls._kernels[place ^ 1], x[...] = calls._kernels.copy(), 0, 0
        try:
            assert calls._kernels[place] != 0 and run(pack(launch)) == 0
        finally:
            calls._kernels[:] = kernels
        drawn.append(x.copy())
    assert np.array_equal(*map(bits, drawn)) and drawn[0].any()


@pytest.mark.parametrize("shared_noise", slow_but([False], [False, True]))
@pytest.mark.parametrize("kernel", slow_but(QUICK_KERNELS, itertools.product(MATRIX_TYPES, (False, True))))
@pytest.mark.parametrize("name", ["cpu", "torch_ext"])
def test_words_in_memory_give_the_bits_of_words_by_value(name: str, kernel: Any, shared_noise: bool) -> None:
    backend = available(name)
    dtype, antithetic = kernel
    real = np.float64 if dtype == "float64" else np.float32
    # Small, with long rows, with many dimensions, and with several threads.
    for k, (d, n) in enumerate([(1, 1), (5, 7), (3, 1029), (300, 9), (200, 701)]):
        mu, sigma = np.linspace(-3, 3, d).astype(real), np.linspace(0, 2, d).astype(real)
        by_value, from_memory = (np.zeros((n, d), MATRIX_TYPES[dtype]).T for _ in range(2))
        if k % 2:
            by_value, from_memory = (np.zeros((d, n), MATRIX_TYPES[dtype]) for _ in range(2))
        words = {"seed": 2**64 - 3, "offset": 2**63 + k, "first_row": 2**32 - d, "first_column": 2**33 + 5 + k}
        options = {"shared_noise": shared_noise, "antithetic": antithetic, **words}
        draw = a_launch(d, n, dtype, mu=mu, sigma=sigma, matrix=by_value, **options)
        backend.launch(draw)
        assert len(np.unique(bits(by_value))) > min(d * n, 200) // 8
        for words in SOME_WORDS[k % 2 :: 2] if d != 200 else [WORDS]:
            from_memory[...] = 0
            read, _memory = with_words_in_memory(draw._replace(matrix=from_memory.ctypes.data), *words)
            backend.launch(read)
            assert np.array_equal(bits(by_value), bits(from_memory)), (d, n, words)


def launchers(name: str) -> Callable[[Launch], Launcher]:
    """A launcher of a backend for launches that differ from the given one in the fields `HEAD` only."""
    backend: Any = available("cpu" if name == "generic" else name)
    make = functools.partial(generic_launcher, backend) if name == "generic" else backend.launcher
    return lambda launch: make(launch._replace(**dict.fromkeys(HEAD, 0)))


@pytest.fixture(params=["cpu", "torch_ext", "generic"])
def launcher_of(request: pytest.FixtureRequest) -> Callable[[Launch], Launcher]:
    return launchers(request.param)


def moving(launcher: Launcher, launch: Launch) -> tuple[Any, ...]:
    """The arguments of `Launcher.run` after the geometry, in the launcher's form."""
    if not launcher.takes_arrays:
        return head_of(launch)
    arrays = arrays_at(launch)
    operands = [arrays.get(name) for name in ("mu", "sigma", "weights", "matrix", "first", "second")]
    return *operands, *head_of(launch)[6:]


@pytest.mark.parametrize("numbers", ["neither", "mu", "sigma", "both"])
@pytest.mark.parametrize("dtype", slow_but([dtype for dtype, pairs in QUICK_KERNELS if not pairs], MATRIX_TYPES))
def test_a_launcher_draws_the_bits_of_launch_and_writes_no_other_memory(
    launcher_of: Callable[[Launch], Launcher], dtype: str, numbers: str
) -> None:
    shapes = (1, 7), (7, 1), (3, 5), (8, 9), (15, 40), (16, 5), (17, 2), (33, 100), (100, 33), (200, 701)
    for (d, n), transposed in itertools.product(shapes, (False, True)):
        mu: Values = 1.5 if numbers in ("mu", "both") else np.linspace(-3, 3, d)
        sigma: Values = 0.5 if numbers in ("sigma", "both") else np.linspace(0, 2, d).astype(np.float16)
        outs = []
        for _ in range(2):
            memory = np.full(d * n + 128, 7, MATRIX_TYPES[dtype])
            out = memory[64:-64].reshape((n, d) if transposed else (d, n))
            outs.append((memory, out.T if transposed else out))
        words = {"seed": 5, "offset": 2**50, "first_row": 2, "first_column": 3}
        draw = a_launch(d, n, dtype, mu=mu, sigma=sigma, matrix=outs[0][1], **words)
        registry.find("cpu").launch(draw)
        draw = draw._replace(matrix=outs[1][1].ctypes.data)
        launcher = launcher_of(draw)
        arguments = moving(launcher, draw)
        geometry = launcher.geometry(arguments[3], 3) if launcher.geometry else None
        launcher.run(geometry, *arguments)
        for memory, _ in outs:
            assert (memory[:64] == 7).all() and (memory[-64:] == 7).all(), (d, n, dtype)
        assert np.array_equal(bits(outs[0][1]), bits(outs[1][1])), (d, n, dtype)
        assert not (outs[1][1] == 7).all()


@pytest.fixture(params=["cpu", "torch_ext"])
def validity(request: pytest.FixtureRequest) -> Callable[..., bool]:
    """``validity(mu, sigma, dtype)``: the result of the launcher's check of these vectors."""
    launcher_of = launchers(request.param)

    def is_valid(mu: Values, sigma: Values, dtype: str) -> bool:
        d = next((len(x) for x in (mu, sigma) if not isinstance(x, float)), 1)
        draw = a_launch(d, 5, dtype, mu=mu, sigma=sigma)
        launcher = launcher_of(draw)
        assert launcher.is_valid is not None
        vectors = inputs_at(draw).values() if launcher.takes_arrays else (draw.mu, draw.sigma)
        return bool(launcher.is_valid(*vectors, None))

    return is_valid


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
    for d, kind in itertools.product((1, 2, 15, 16, 17, 255, 256, 257, 1000), (np.float32, np.float64)):
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
        if kind is np.float64:
            bad[-1] = 3.4028236e38  # float32 rounds it to infinity.
            for large in (bad, -bad):
                assert validity(laid_out(large), laid_out(sigma), dtype) == (dtype == "float64"), d
            assert validity(laid_out(mu), laid_out(bad), dtype) == (dtype == "float64"), d


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


@pytest.mark.parametrize("dtype", slow_but(["float32", "float64"], MATRIX_TYPES))
def test_the_vector_beside_a_number_is_checked(validity: Callable[..., bool], dtype: str) -> None:
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
