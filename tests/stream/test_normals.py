"""From words to normals: both against known answers, the exact reference and real arithmetic."""

import importlib.resources
import json
import math
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mpmath
import numpy as np
import pytest
from numba import njit
from places import DATA
from stream_code import Array, Code
from tables import DTYPES, NARROW

from multisample.backends.kernels.cuda import group
from multisample.backends.kernels.stream import arithmetic as intrinsics
from multisample.backends.kernels.stream import normals
from reference import float64_coefficients, stream

float_bits = intrinsics.float_bits
radius_f32, half_turns_f32 = normals.radius_f32, normals.half_turns_f32


# An error bound in units of the radius, which is R / 2. The errors are 2.2e-16 in R (relative) and 2.4e-16 in s
# (STREAM.md). An error of s changes 2 fma(-s, s, 0.5) by 4 |s| times as much, at most 9.6e-16. The rounding of the fma
# adds 0.6e-16, and the rounding of the last product adds 1.1e-16. The sum is 13.5e-16. In the second normal, 2 s c, the
# errors of s and c together count at most 2 sqrt(2) times, which is less.
ERROR_F64_BY_RADIUS = 1.4e-15


def load(name: str, key: str) -> Any:
    return json.loads((DATA / name).read_text())[key]


def places(entries: list[dict[str, Any]]) -> list[Array]:
    return [np.array([entry[name] for entry in entries], np.uint64) for name in ("seed", "offset", "i", "j")]


def random_words(size: int, seed: int, width: int) -> Array:
    return np.random.default_rng(seed).integers(2**width, size=size, dtype=np.uint64, endpoint=False)


def edge_words() -> Array:
    """Words at changes of the rounding, the sign, the quadrant, the exponent of u and the clamp."""
    edges = {0, 2**32 - 1, 2**33 // 3, 2**33 // 6, 2**33 // 12, 3 * 2**30, 5 * 2**29, 7 * 2**29}
    edges |= {2**k for k in range(32)} | {2**32 - 2**k for k in range(32)}
    near = {(edge + step) % 2**32 for edge in edges for step in range(-3, 4)}
    return np.array(sorted(near), np.uint32)


def test_transform_f32_gives_the_known_answers_at_edges(code: Code) -> None:
    pairs = np.array([[int(text, 16) for text in pair] for pair in load("transform_f32.json", "pairs")], np.uint32)
    assert pairs.shape == (416, 4)
    got, expected = code.transform["float32"](pairs[:, 0], pairs[:, 1]), pairs[:, 2:].copy().view(np.float32)
    # An exact zero may carry either sign.
    same = (got.view(np.uint32) == pairs[:, 2:]) | ((got == 0) & (expected == 0))
    assert same.all(), pairs[~same.all(1)]


@njit(nogil=True)
def sums_of_bits(start: int, stop: int) -> tuple[Any, ...]:
    """For words in [start, stop): sums of the bits of R and of both half turns."""
    radii = cosines = sines = np.uint64(0)
    # Integers only: LLVM vectorises them.
    for w in range(np.uint64(start), np.uint64(stop)):
        cosine, sine = half_turns_f32(np.int32(w))
        radii += np.uint64(np.uint32(float_bits(radius_f32(np.uint32(w)))))
        cosines += np.uint64(np.uint32(float_bits(cosine)))
        sines += np.uint64(np.uint32(float_bits(sine)))
    return radii, cosines, sines


@pytest.mark.slow
def test_all_words_give_the_known_sums() -> None:
    known, step = load("transform_f32.json", "sums_over_all_words"), 2**28
    with ThreadPoolExecutor(2) as pool:
        starts = range(0, 2**32, step)
        parts = list(pool.map(sums_of_bits, starts, (start + step for start in starts)))
    for column, name in enumerate(("R", "fma_minus_s_s_half", "s_times_c")):
        total = sum(int(part[column]) for part in parts) % 2**64
        assert total == int(known[name], 16), (name, hex(total))


def test_transform_f32_equals_the_exact_reference(code: Code) -> None:
    edges, draw = edge_words(), np.random.default_rng(1).choice
    a = np.concatenate((draw(edges, 300), random_words(300, 2, 32).astype(np.uint32)))
    b = np.concatenate((draw(edges, 300), random_words(300, 3, 32).astype(np.uint32)))
    for pair, got in zip(zip(a.tolist(), b.tolist(), strict=True), code.transform["float32"](a, b), strict=True):
        expected = [stream.bits(value, "float32") for value in stream.transform(*pair, stream.F32)]
        assert got.view(np.uint32).tolist() == expected, pair


def words_f64() -> Iterator[tuple[int, int]]:
    """Some hundred unsigned pairs: random words and edge words."""
    some = random.Random(12).sample(list(float64_coefficients.measurement_words(600)), 500)
    yield from ((a, b % 2**64) for a, b in some)


@pytest.mark.parametrize(("width", "contract"), [(32, stream.F32), (64, stream.F64)])
def test_coefficients_equal_those_of_the_contract(width: int, contract: stream.Transform) -> None:
    # Compare the coefficients: the last bit of a high power's coefficient changes one float64 normal in billions.
    for name in ("L", "LE", "S", "C"):
        assert getattr(normals, f"{name}{width}") == getattr(contract, name), name


def test_fast_math_in_python_has_the_constants_of_the_contract() -> None:
    text = (importlib.resources.files("multisample") / "STREAM.md").read_text()
    section = re.split(r"^### fast_math.*$", text, flags=re.M)[1].split("\n## ")[0].split("\n### ")[0]
    numbers = [float.fromhex(number) for number in re.findall(r"-?0x[01]\.[0-9a-f]+p[+-]\d+", section)]
    assert numbers == [group._MINUS_2_LN_2, group._TO_ANGLE]
    assert (group._TO_UNIT, group._TO_UNIT_HALF) == (2.0**-32, 2.0**-33)


def test_transform_f64_equals_the_exact_reference(code: Code) -> None:
    pairs = list(words_f64())
    a, b = np.array(pairs, np.uint64).T
    for pair, got in zip(pairs, code.transform["float64"](a, b), strict=True):
        expected = [stream.bits(value, "float64") for value in stream.transform(*pair, stream.F64)]
        assert got.view(np.uint64).tolist() == expected, pair


def test_the_normals_of_the_smallest_uniforms_are_the_bounds_of_readme(code: Code) -> None:
    zero = np.zeros(1, np.uint64)
    largest = {dtype: np.abs(code.transform[dtype](zero, zero)).max() for dtype in ("float32", "float64")}
    assert largest["float32"] <= np.float32(6.7638)
    assert largest["float64"] == pytest.approx(math.sqrt(-2 * math.log(2.0**-65)), rel=ERROR_F64_BY_RADIUS)
    assert largest["float64"] < 9.495


def test_normals_f32_equal_the_known_answers(code: Code) -> None:
    entries = load("normals_f32.json", "normals")
    assert len(entries) == 600
    got = code.normals["float32"](*places(entries)).view(np.uint32)
    assert got.tolist() == [int(entry["bits"], 16) for entry in entries]


@mpmath.workdps(40)
def test_normals_f64_equal_the_known_answers(code: Code) -> None:
    entries = load("normals_f64.json", "normals")
    assert len(entries) == 300
    for entry, got in zip(entries, code.normals["float64"](*places(entries)).tolist(), strict=True):
        radius = stream.real_radius(int(entry["A"], 16), stream.F64)
        assert abs(got - mpmath.mpf(entry["real"])) <= ERROR_F64_BY_RADIUS * radius, entry


def test_normals_equal_the_reference_at_edges_of_the_counter(code: Code) -> None:
    draw = random.Random(16)
    rows, columns = [0, 1, 2**32 - 1, 2**31], [0, 1, 2, 3, 4, 2**33 - 1, 2**33 + 6, 2**34 - 1]
    full = [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1]
    fields = {"seed": full, "offset": full, "i": rows, "j": columns}
    entries = [{name: draw.choice(values) for name, values in fields.items()} for _ in range(200)]
    narrow_bits = code.normals["float32"](*places(entries)).view(np.uint32).tolist()
    wide_bits = code.normals["float64"](*places(entries)).view(np.uint64).tolist()
    for entry, got32, got64 in zip(entries, narrow_bits, wide_bits, strict=True):
        assert got32 == stream.normal(**entry, k=stream.F32), entry
        assert got64 == stream.normal(**entry, k=stream.F64), entry


def assert_narrows(code: Code, dtype: str, x: Array) -> None:
    """Check for the bits of NumPy's cast, an independent implementation; a NaN becomes quiet."""
    got = code.narrow[dtype](x)
    with np.errstate(all="ignore"):
        expected = x.astype(DTYPES[dtype]).view(np.uint16)
    upper = (x.view(np.uint32) >> 16).astype(np.uint16)
    quiet = upper | 0x0040 if dtype == "bfloat16" else upper & 0x8000 | 0x7E00
    expected = np.where(np.isnan(x), quiet, expected)
    wrong = np.flatnonzero(got != expected)
    assert wrong.size == 0, [(hex(x.view(np.uint32)[k]), hex(got[k]), hex(expected[k])) for k in wrong[:5]]


def all_values(dtype: str) -> Array:
    with np.errstate(invalid="ignore"):
        return np.arange(2**16).astype(np.uint16).view(DTYPES[dtype]).astype(np.float32)


@pytest.mark.parametrize("dtype", NARROW)
def test_widening_keeps_every_number(code: Code, dtype: str) -> None:
    got, expected = code.widen[dtype](np.arange(2**16)), all_values(dtype)
    number = ~np.isnan(expected)
    assert np.array_equal(got[number].view(np.uint32), expected[number].view(np.uint32))
    assert np.isnan(got[~number]).all()


@pytest.mark.parametrize("dtype", NARROW)
def test_narrowing_rounds_to_nearest_with_ties_to_even(code: Code, dtype: str) -> None:
    values = np.sort(all_values(dtype))
    values = np.unique(values[np.isfinite(values)].astype(np.float64))
    # The midpoint after the largest number is the first number that rounds to infinity.
    last = 2 * values[-1] - values[-2]
    values = np.concatenate(([-last], values, [last]))
    middles = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    assert np.array_equal(middles, (values[1:] + values[:-1]) / 2)  # exact in float32
    infinity = np.float32(np.inf)
    for x in (middles, np.nextafter(middles, infinity), np.nextafter(middles, -infinity)):
        assert_narrows(code, dtype, x)
    top = code.narrow[dtype](np.array([np.nextafter(middles[-1], np.float32(0)), middles[-1]]))
    largest = 0x7BFF if dtype == "float16" else 0x7F7F
    assert top.tolist() == [largest, largest + 1]


@pytest.mark.parametrize("dtype", NARROW)
def test_narrowing_of_every_number_random_bit_patterns_and_normals(code: Code, dtype: str) -> None:
    assert_narrows(code, dtype, all_values(dtype))
    patterns = random_words(1 << 20, 17, 32).astype(np.uint32)
    assert_narrows(code, dtype, patterns.view(np.float32))
    # Few random patterns are in float16's range, so add exponents from 2^-27 to 2^17.
    inside = (patterns & np.uint32(0x807FFFFF)) | (random_words(1 << 20, 18, 32) % 44 + 100 << 23).astype(np.uint32)
    assert_narrows(code, dtype, inside.view(np.float32))
    assert_narrows(code, dtype, np.random.default_rng(19).standard_normal(1 << 20, np.float32))


def with_random_upper_halves(values: Array) -> Array:
    return values | np.random.default_rng(1).integers(2**32, size=values.shape, dtype=np.uint64) << np.uint64(32)


def test_words_equal_the_published_words(code: Code) -> None:
    entries = load("words.json", "philox4x32_10")
    assert len(entries) == 3
    named = [[entry[name] for entry in entries] for name in ("counter", "key", "words")]
    counters, keys, expected = (np.array([[int(x, 16) for x in row] for row in rows], np.uint64) for rows in named)
    c, (k0, k1) = counters.T, keys.T
    # The stream's key is the seed, XORed with "multsamp".
    seeds = (k0 ^ np.uint64(0x6D756C74)) | (k1 ^ np.uint64(0x73616D70)) << np.uint64(32)
    offsets = c[2] | c[3] << np.uint64(32)
    got = code.words(seeds, offsets, with_random_upper_halves(c[1]), with_random_upper_halves(c[0]))
    assert np.array_equal(got, expected)


# For each type: how many words are tried; the largest error relative to the radius; the largest error. STREAM.md gives
# the bounds of float32.
WORST_CASES = {stream.F32: (300, 1e-6, 5.6e-6), stream.F64: (600, ERROR_F64_BY_RADIUS, math.inf)}


@pytest.mark.slow
def test_float64_literals_equal_the_derived_coefficients() -> None:
    derived = float64_coefficients.derive()
    literal = stream.F64.L, stream.F64.LE, stream.F64.S, stream.F64.C
    assert derived == literal
    errors = float64_coefficients.truncation_errors(derived)
    assert set(errors) == {"L", "S", "C"}
    assert all(0 < error < 2**-54 for error in errors.values()), errors


@pytest.mark.parametrize("kind", WORST_CASES, ids=lambda kind: kind.dtype)
@mpmath.workdps(40)
def test_transforms_against_real_arithmetic(kind: stream.Transform) -> None:
    count, by_radius, absolute = WORST_CASES[kind]
    for a64, b64 in float64_coefficients.measurement_words(count):
        a, b = (a64, b64) if kind is stream.F64 else (a64 >> 32, b64 >> 32)
        radius = stream.real_radius(a, kind)
        for value, real in zip(stream.transform(a, b, kind), stream.real_transform(a, b, kind), strict=True):
            assert abs(value - real) <= min(by_radius * radius, absolute), (hex(a), b)
