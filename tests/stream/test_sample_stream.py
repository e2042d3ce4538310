"""`sample` gives the bits of the stream for all shapes, windows, strides, numbers of threads and machines.

The exact reference is slow. `elementwise` is a loop over the compiled block functions, without tiles and strides;
test_normals.py compares these functions with the exact reference.
"""

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_memory
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from places import DATA
from processes import run_python
from tables import COLUMNS, DTYPES, NOISES, QUICK_KERNELS, ROWS, slow_but

import multisample
from multisample.backends.kernels.stream import arithmetic as intrinsics
from multisample.numba import normals4, normals4_f64
from reference import stream

Array = np.ndarray[Any, Any]
ToArray = Callable[[Any], Array]

fma = intrinsics.fma


def _elementwise(block: Any) -> Callable[..., None]:
    @njit
    def fill(
        out: Array, mu: Array, sigma: Array, key: int, call: int, i: int, j: int, shared: bool, mirrored: bool
    ) -> None:
        seed, offset = np.uint64(key), np.uint64(call)
        for r in range(out.shape[0]):
            row = np.uint64(0 if shared else i + r)
            for c in range(out.shape[1]):
                column = np.uint64((j + c) // 2 if mirrored else j + c)
                z = block(seed, offset, row, column >> np.uint64(2))
                normal = z[column & np.uint64(3)]
                out[r, c] = fma(sigma[r], -normal if mirrored and (j + c) % 2 == 1 else normal, mu[r])

    return fill  # type: ignore[no-any-return]


_fill = {np.float32: _elementwise(normals4), np.float64: _elementwise(normals4_f64)}


def elementwise(
    mu: Any, sigma: Any, n: int, dtype: str = "float32", *, seed: int = 0, offset: int = 0, noise: str = "independent",
    dim_offset: int = 0, sample_offset: int = 0, antithetic: bool = False,
) -> Array:  # fmt: skip
    """The expected result of `sample`, as bit patterns."""
    real = np.float64 if dtype == "float64" else np.float32
    out = np.empty((len(mu), n), real)
    vectors, words = (np.asarray(mu, real), np.asarray(sigma, real)), (np.uint64(seed), np.uint64(offset))
    _fill[real](out, *vectors, *words, dim_offset, sample_offset, noise == "shared", antithetic)
    with np.errstate(over="ignore"):
        return out.astype(DTYPES[dtype]).view(f"u{DTYPES[dtype](0).itemsize}")


def vectors(d: int, seed: int = 0) -> tuple[Array, Array]:
    """Means and standard deviations in float64."""
    return cuda_memory.vectors(d, "float64", seed)


def test_samples_equal_the_known_answers(backend: str, bits: ToArray) -> None:
    entries = json.loads((DATA / "samples_f32.json").read_text())["samples"]
    assert len(entries) == 7
    for entry in entries:
        arguments = ([float.fromhex(text) for text in entry[name]] for name in ("mu", "sigma"))
        options = {name: entry[name] for name in ("seed", "noise", "dim_offset", "sample_offset")}
        got = multisample.sample(*arguments, entry["n"], backend=backend, **options)
        expected = [[int(text, 16) for text in row] for row in entry["bits"]]
        assert bits(got).tolist() == expected, {name: entry[name] for name in ("seed", "noise", "n")}


@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "n", "seed", "dim_offset", "sample_offset"), [
    (1, 1, 0, 0, 0),
    (1, 5, 1, 0, 0),
    (7, 1, 2**32, 1, 3),
    (3, 13, 2**64 - 1, 12345, 678),
    (5, 7, 2**63 + 11, ROWS - 5, COLUMNS - 7),
    (2, 11, 4242, 2**31 - 1, 2**33 - 5),
    (17, 3, 99, 2**16, 2**32 - 1),
])  # fmt: skip
def test_samples_equal_the_exact_reference(
    backend: str, bits: ToArray, d: int, n: int, seed: int, dim_offset: int, sample_offset: int, dtype: str,
    noise: str, antithetic: bool,
) -> None:  # fmt: skip
    mu, sigma = vectors(d, seed)
    options: dict[str, Any] = {"seed": seed, "dim_offset": dim_offset, "sample_offset": sample_offset}
    options["antithetic"] = antithetic
    got = multisample.sample(mu, sigma, n, backend=backend, dtype=dtype, noise=noise, **options)
    expected = stream.sample(mu.tolist(), sigma.tolist(), n, dtype, shared=noise == "shared", **options)
    assert bits(got).tolist() == expected
    # The fast reference, which the other tests use, equals the exact reference.
    assert elementwise(mu, sigma, n, dtype, noise=noise, **options).tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_narrow_results_round_once_overflow_to_infinity_and_keep_subnormals(
    backend: str, bits: ToArray, dtype: str
) -> None:
    # From below float16's subnormals to above the largest bfloat16.
    mu = [0.0, 0.0, 1e-8, 3e-5, -1.0, 300.0, 65519.0, -7e4, 3.3e38, 0.0]
    sigma = [1e-42, 1e-7, 1e-7, 1e-5, 2.0, 50.0, 1.0, 9e3, 1e37, 0.0]
    got = multisample.sample(mu, sigma, 12, backend=backend, seed=5, dtype=dtype)
    assert bits(got).tolist() == stream.sample(mu, sigma, 12, dtype, seed=5)


def test_signs_of_zero_follow_from_the_fused_multiply_add(backend: str, bits: ToArray) -> None:
    mu, sigma = [0.0, -0.0, -0.0, 0.0], [0.0, 0.0, -0.0, -0.0]
    got = bits(multisample.sample(mu, sigma, 40, backend=backend, seed=8))
    assert got.tolist() == stream.sample(mu, sigma, 40, seed=8)
    assert set(got[1].tolist()) == {0, 0x80000000}


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "n"), [(0, 0), (0, 1), (0, 700), (1, 0), (900, 0)])
def test_zero_dimensions_or_samples_give_an_empty_result(
    backend: str, to_numpy: ToArray, d: int, n: int, dtype: str, noise: str
) -> None:
    for window in ({}, {"dim_offset": ROWS - d, "sample_offset": COLUMNS - n}):
        options = window | {"seed": 1, "dtype": dtype, "noise": noise}
        got = multisample.sample(np.zeros(d), np.ones(d), n, backend=backend, **options)
        assert to_numpy(got).shape == (d, n)


SHAPES = {
    # Rows of one or two columns, whose kernels skip normals; rows shorter than two vectors, which are gathered; rows
    # that share a tile of 256 groups, or are slightly too long for it; several tiles; several threads; odd lengths.
    "dn": [
        *itertools.product(range(16, 23), (1, 2)), (2500, 1), (2501, 2),
        (1, 1), (1, 2), (2, 3), (3, 4), (1, 15), (2, 16), (3, 17), (700, 1), (257, 3), (300, 4), (86, 11), (129, 30),
        (2, 511), (3, 512), (2, 513), (5, 1019), (2, 1024), (1, 1025), (3, 2047), (1, 4099), (100, 1001), (70, 1030),
        (4000, 33), (1, 70001), (65537, 2), (3, 50001),
    ],
    # SIMD vectors extend over rows. Up to 256 rows, several groups share a tile, and short columns are gathered. More
    # rows are drawn in strips and chunks. Some shapes need several threads, or have partial groups at both ends.
    "nd": [
        *((d, n) for d in (1, 2, 15, 16, 17, 31, 32, 33, 47, 129, 257) for n in range(1, 10)),
        (2, 1501), (3, 700), (5, 333), (8, 301), (9, 260), (12, 200), (18, 301), (21, 150), (24, 90), (34, 131),
        (39, 70), (49, 101), (52, 99), (64, 100), (128, 131), (255, 5), (256, 7), (300, 70),
        (511, 2), (513, 9), (2049, 5), (4096, 1), (4097, 13), (8209, 3),
        (65551, 2), (90000, 9), (33, 9001), (700, 601),
    ],
}  # fmt: skip
QUICK_KINDS = [*itertools.product(["dn"], DTYPES), ("nd", "float32")]


@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(("layout", "dtype"), slow_but(QUICK_KINDS, itertools.product(SHAPES, DTYPES), several=True))
def test_every_shape_equals_the_elementwise_reference(
    backend: str, to_numpy: ToArray, bits: ToArray, layout: Any, dtype: str, noise: str, antithetic: bool
) -> None:
    for d, n in SHAPES[layout]:
        mu, sigma = vectors(d, n)
        begins = (3, 1 + (d + n) % 7), (0, 0), (ROWS - d, COLUMNS - n)
        windows = [{"dim_offset": i, "sample_offset": j} for i, j in begins]
        # Large matrices are for the division among threads.
        for window in windows if d * n < 60_000 else windows[:1]:
            options: dict[str, Any] = {"seed": 21, "noise": noise, "antithetic": antithetic, **window}
            got = multisample.sample(mu, sigma, n, backend=backend, dtype=dtype, layout=layout, **options)
            assert to_numpy(got).flags.c_contiguous
            expected = elementwise(mu, sigma, n, dtype, **options)
            assert np.array_equal(bits(got), expected.T if layout == "nd" else expected), (d, n, window)


seeds = st.integers(0, 2**64 - 1)
noises = st.sampled_from(NOISES)
# Lengths at which the algorithm changes, and arbitrary lengths.
lengths = st.one_of(st.integers(0, 40), st.integers(500, 530), st.integers(1010, 1040), st.integers(0, 3000))


@st.composite
def parts(draw: st.DrawFn, limit: int) -> tuple[int, int]:
    """Pairs with 0 <= start <= stop <= limit."""
    start = draw(st.integers(0, limit))
    return start, draw(st.integers(start, limit))


def starts(limit: int, length: int) -> st.SearchStrategy[int]:
    """Offsets of a window of this length: 0, near powers of two, and the largest."""
    last = limit - length
    powers = st.integers(0, limit.bit_length()).map(lambda exponent: min(1 << exponent, last))
    near = st.tuples(powers, st.integers(-5, 5)).map(lambda pair: min(max(sum(pair), 0), last))
    return st.one_of(st.integers(0, 8), near, st.integers(0, last), st.just(last))


@pytest.mark.filterwarnings("ignore:.*Grid size")  # Numba copies a slice by a kernel of its own.
@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=15)
@given(seed=seeds, noise=noises, d=st.integers(1, 40), n=lengths, layout=st.sampled_from(["dn", "nd"]), data=st.data())
def test_a_window_of_a_window_equals_its_slice(
    backend: str, bits: ToArray, seed: int, dtype: str, noise: str, d: int, n: int, antithetic: bool, layout: Any,
    data: st.DataObject,
) -> None:  # fmt: skip
    mu, sigma = vectors(d, n)
    i, j = data.draw(starts(ROWS, d), "first row"), data.draw(starts(COLUMNS, n), "first column")
    (a, b), (p, q) = data.draw(parts(d), "rows"), data.draw(parts(n), "columns")
    options: dict[str, Any] = {"seed": seed, "dtype": dtype, "noise": noise, "antithetic": antithetic}

    def draw(a: int, b: int, p: int, q: int) -> Array:
        call = {"layout": layout, "dim_offset": i + a, "sample_offset": j + p, **options}
        x = bits(multisample.sample(mu[a:b], sigma[a:b], q - p, backend=backend, **call))
        return x if layout == "dn" else x.T

    outer = draw(0, d, 0, n)
    assert np.array_equal(draw(a, b, p, q), outer[a:b, p:q])
    expected = elementwise(mu, sigma, n, dim_offset=i, sample_offset=j, **options)
    assert np.array_equal(outer, expected)


def unaligned(x: Array) -> Array:
    """A copy of `x` at an odd address."""
    memory = bytearray(x.nbytes + 1)
    result: Array = np.frombuffer(memory, x.dtype, x.size, offset=1).reshape(x.shape)
    result[...] = x
    assert x.size == 0 or not result.flags.aligned
    return result


INPUT_LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "contiguous": lambda x: x,
    "every third": lambda x: np.repeat(x, 3)[::3],
    "reversed": lambda x: x[::-1].copy()[::-1],
    "every second, reversed": lambda x: np.repeat(x[::-1], 2)[::-2],
    "column (d, 1)": lambda x: x[:, None],
    "column of a matrix": lambda x: np.stack((x * 0 - 1, x, x * 0 - 1), 1)[:, 1:2],
    "column of a Fortran matrix": lambda x: np.asfortranarray(np.stack((x, x), 1))[:, :1],
    "unaligned": unaligned,
    "unaligned, reversed": lambda x: unaligned(x[::-1])[::-1],
    "swapped bytes": lambda x: x.astype(x.dtype.newbyteorder()),
    "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype),
}


@pytest.mark.parametrize("layout", INPUT_LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_of_any_strides_give_the_same_bits(backend: str, bits: ToArray, layout: str, dtype: str) -> None:
    for d, n in [(5, 13), (3, 700), (300, 6)]:
        mu, sigma = vectors(d, n)
        expected = elementwise(mu, sigma, n, dtype, seed=9)
        for real in (np.float32, np.float64):
            if real is np.float32 and dtype == "float64":
                continue  # Rounding to float32 changes the means.
            m, s = mu.astype(real), sigma.astype(real)
            for a, b in ((INPUT_LAYOUTS[layout](m), INPUT_LAYOUTS[layout](s)), (m, INPUT_LAYOUTS[layout](s))):
                got = multisample.sample(a, b, n, backend=backend, seed=9, dtype=dtype)
                assert np.array_equal(bits(got), expected), (d, n, real)
                # Also without options.
                if real == DTYPES[dtype]:
                    got = multisample.sample(a, b, n, backend=backend, seed=9)
                    assert np.array_equal(bits(got), expected), (d, n, real)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_and_zero_strides_apply_to_every_dimension(backend: str, bits: ToArray, dtype: str, noise: str) -> None:
    for d, n in [(5, 13), (3, 700), (300, 6)]:
        mu, sigma = vectors(d, n)
        same = np.broadcast_to(np.float64(0.75), (d,))
        assert same.strides == (0,)
        options: dict[str, Any] = {"seed": 10, "noise": noise}
        for a, b in ((mu, 0.75), (mu, same), (0.75, sigma), (same, sigma), (same, same), (same[:, None], 0.75)):
            full = [np.full(d, x) if np.ndim(x) == 0 else np.ravel(x) for x in (a, b)]
            got = multisample.sample(a, b, n, backend=backend, dtype=dtype, **options)
            assert np.array_equal(bits(got), elementwise(*full, n, dtype, **options)), (d, n)


def lists(values: Array) -> list[float]:
    return list(values.tolist())


@pytest.mark.parametrize("dtype", DTYPES)
def test_lists_and_narrow_and_integer_inputs_are_rounded_to_the_computing_type(
    backend: str, bits: ToArray, dtype: str
) -> None:
    mu, sigma = vectors(6, 1)
    got = multisample.sample(lists(mu), lists(sigma), 20, backend=backend, seed=12, dtype=dtype)
    assert np.array_equal(bits(got), elementwise(mu, sigma, 20, dtype, seed=12))
    for kind in (np.float16, ml_dtypes.bfloat16, np.int8, np.uint16, np.int64):
        with np.errstate(invalid="ignore"):
            m, s = (np.clip(x, 0, 100).astype(kind) for x in (mu, sigma))
        got = multisample.sample(m, s, 20, backend=backend, seed=12, dtype=dtype)
        expected = elementwise(m.astype(np.float64), s.astype(np.float64), 20, dtype, seed=12)
        assert np.array_equal(bits(got), expected), kind


# Shape of the base array for a result of shape (d, n), and a function that makes the result's view of it.
OUTS: dict[str, tuple[Callable[[int, int], tuple[int, ...]], Callable[[Any, int, int], Any]]] = {
    "C": (lambda d, n: (d, n), lambda base, d, n: base),
    "Fortran": (lambda d, n: (n, d), lambda base, d, n: base.T),
    "every second column": (lambda d, n: (d, 2 * n), lambda base, d, n: base[:, ::2]),
    "every third row": (lambda d, n: (3 * d, n), lambda base, d, n: base[1::3]),
    "inside a larger array": (lambda d, n: (d + 5, n + 7), lambda base, d, n: base[2 : 2 + d, 3 : 3 + n]),
    "inside a larger Fortran array": (lambda d, n: (n + 7, d + 5), lambda base, d, n: base.T[2 : 2 + d, 3 : 3 + n]),
    "part of a stack": (lambda d, n: (d, 3, n), lambda base, d, n: base[:, 1]),
    "reversed columns": (lambda d, n: (d, n), lambda base, d, n: base[:, ::-1]),
    "reversed rows": (lambda d, n: (d, n), lambda base, d, n: base[::-1]),
    "reversed, every second of both": (lambda d, n: (2 * d, 2 * n), lambda base, d, n: base[::-2, ::-2]),
}


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("strides", OUTS)
@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize(("layout", "dtype"), QUICK_KINDS)
def test_out_with_any_strides_gets_equal_bits_and_no_other_memory_changes(
    backend: str, place: Callable[[Array], Any], view_of: Callable[[Any, Array, Callable[[Any], Any]], Any],
    bits: ToArray, strides: str, layout: str, dtype: str, noise: str, antithetic: bool,
) -> None:  # fmt: skip
    shape, view = OUTS[strides]
    for d, n in [(0, 3), (1, 1), (5, 37), (3, 700), (33, 70), (400, 9), (2, 1500), (37, 1801), (300, 13)]:
        mu, sigma = vectors(d, n)
        rows, columns = (n, d) if layout == "nd" else (d, n)
        poisoned = np.full(shape(rows, columns), 0x5A, np.uint8).astype(DTYPES[dtype])
        options: dict[str, Any] = {"seed": 13, "noise": noise, "dim_offset": 2, "sample_offset": 3}
        options["antithetic"] = antithetic
        samples = elementwise(mu, sigma, n, dtype, **options)
        expected = bits(poisoned.copy())
        view(expected, rows, columns)[...] = samples.T if layout == "nd" else samples

        base = place(poisoned)
        try:
            out = view_of(base, poisoned, functools.partial(view, d=rows, n=columns))
        except ValueError:
            pytest.skip("this backend's library has no such view")
        options |= {"dtype": dtype, "layout": layout, "backend": backend}
        assert multisample.sample(place(mu), place(sigma), n, out=out, **options) is out
        assert np.array_equal(bits(base), expected), (d, n, antithetic)


@pytest.mark.parametrize("dtype", slow_but([dtype for dtype, pairs in QUICK_KERNELS if not pairs], DTYPES))
def test_unaligned_out_gets_the_same_bits(dtype: str, bits: ToArray) -> None:
    for d, n in [(5, 37), (3, 700), (4, 4096), (30, 3001)]:
        mu, sigma = vectors(d, n)
        for noise in NOISES:
            expected = elementwise(mu, sigma, n, dtype, seed=14, noise=noise)
            for out in (unaligned(np.zeros((d, n), DTYPES[dtype])), unaligned(np.zeros((n, d), DTYPES[dtype])).T):
                multisample.sample(mu, sigma, n, backend="cpu", seed=14, dtype=dtype, noise=noise, out=out)
                assert np.array_equal(bits(out.copy()), expected), (d, n, noise)


@pytest.mark.parametrize("dtype", DTYPES)
def test_calls_of_a_generator_use_consecutive_offsets(backend: str, bits: ToArray, dtype: str) -> None:
    mu, sigma = vectors(2)
    generator = multisample.Generator(2**40 + 77)
    for offset in (0, 1, 2, 2**32 - 1, 2**32, 2**63, 2**64 - 2):
        if generator.offset != offset:
            generator.state = {**generator.state, "offset": offset}
        got = multisample.sample(mu, sigma, 9, backend=backend, dtype=dtype, generator=generator)
        expected = stream.sample(mu.tolist(), sigma.tolist(), 9, dtype, seed=2**40 + 77, offset=offset)
        assert bits(got).tolist() == expected, offset
        assert generator.offset == offset + 1


@pytest.mark.parametrize("layout", ["dn", "nd"])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("kernel", slow_but(QUICK_KERNELS, itertools.product(DTYPES, (False, True))))
@pytest.mark.parametrize(("d", "n"), [(700, 1500), (3, 200001), (100003, 11)])
def test_the_matrix_does_not_depend_on_the_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, bits: ToArray, d: int, n: int, kernel: tuple[str, bool], noise: str, layout: Any
) -> None:
    dtype, antithetic = kernel
    mu, sigma = vectors(d)

    def draw(a: int, b: int, p: int, q: int) -> Array:
        options = {"dtype": dtype, "noise": noise, "layout": layout, "antithetic": antithetic, "backend": "cpu"}
        x = multisample.sample(mu[a:b], sigma[a:b], q - p, seed=15, dim_offset=a, sample_offset=1 + p, **options)
        return bits(x if layout == "dn" else x.T)

    monkeypatch.setenv("MULTISAMPLE_NUM_THREADS", "1")
    alone = draw(0, d, 0, n)
    for threads in ("2", "7", ""):
        monkeypatch.setenv("MULTISAMPLE_NUM_THREADS", threads)
        assert np.array_equal(draw(0, d, 0, n), alone), threads
    a, b, p, q = d // 3, d // 3 + min(d, 7), n // 5, n - n // 7
    assert np.array_equal(draw(a, min(b, d), p, q), alone[a : min(b, d), p:q])


def machine_digests() -> dict[str, list[str]]:
    """Digests of samples of several shapes, computed here and in a process that compiles for a simpler processor."""
    import hashlib

    result: dict[str, list[str]] = {}
    for dtype in ("float32", "float64"):
        result[dtype] = []
        for d, n in [(1, 1), (3, 5), (3, 300), (300, 7), (2, 2049), (1, 70001), (2, 513)]:
            for noise in ("independent", "shared"):
                mu, sigma = np.linspace(-3, 3, d), np.linspace(0.5, 2, d)
                x = multisample.sample(mu, sigma, n, backend="cpu", seed=16, sample_offset=1, dtype=dtype, noise=noise)
                result[dtype].append(hashlib.sha256(x.tobytes()).hexdigest())
    return result


PLAIN_MACHINE = """
import json
import sys
sys.path.insert(0, sys.argv[1])
import test_sample_stream
print(json.dumps([test_sample_stream.machine_digests(), test_sample_stream.special_instructions_or_calls()]))
"""


def special_instructions_or_calls() -> list[str]:
    """Which of FMA instructions, 256-bit vectors and calls of fmaf appear in the code that Numba compiles here."""
    elementwise([0.0], [1.0], 4)
    code = "".join(_fill[np.float32].inspect_asm().values())  # type: ignore[attr-defined]
    return [name for name in ("vfmadd", "%ymm", "fmaf") if name in code]


@pytest.mark.slow
def test_code_without_avx_and_fma_gives_equal_bits(tmp_path: Path) -> None:
    # Several threads would need more kernels.
    machine = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "MULTISAMPLE_NUM_THREADS": "1"}
    place = str(Path(__file__).parent)
    done = run_python("-c", PLAIN_MACHINE, place, MULTISAMPLE_CACHE_DIR=str(tmp_path), **machine)
    digests, special = json.loads(done.stdout)
    assert special == ["fmaf"]
    assert digests == machine_digests()
