"""The reference agrees with published and independent known answers (tests/support/data).

Its arithmetic agrees with the processor's.
"""

from __future__ import annotations

import json
import math
import random
import struct
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
from places import DATA

from reference import float64_coefficients, stream

# Worst case of the float64 transform, relative to the radius r = R / 2, from the measured errors of R
# (2.2e-16, relative) and s (2.4e-16). The first normal has the larger error: 4 |s| 2.4e-16 and one
# rounding (0.6e-16) in 2 (1/2 - s^2), 2.2e-16 in R, and the rounding of the last product (1.1e-16):
# 13.5e-16 together; 1.04e-15 was measured. The 300 known answers have fixed words, which do not
# include the worst case.
KNOWN_ANSWER_TOLERANCE_F64 = 1e-15
WORST_CASE_F64 = 1.4e-15

# The real values of the float32 normals were computed in binary64. The angle has an error of half an
# ulp of pi and of the product, 4.4e-16. Cosine, logarithm, root and last product add roundings of
# 0.6e-16 + 0.6e-16 + 1.1e-16 + 1.1e-16. Together 7.8e-16 of the radius.
KNOWN_REAL_TOLERANCE_F32 = 8e-16

# The spec's own bound on the float32 transform, relative to the radius.
WORST_CASE_F32 = 1e-6


def load(name: str, key: str) -> list[Any]:
    entries = json.loads((DATA / name).read_text())[key]
    assert isinstance(entries, list)
    return entries


def integers(texts: list[str]) -> tuple[int, ...]:
    return tuple(int(text, 16) for text in texts)


def place(entry: dict[str, Any]) -> tuple[int, int, int, int]:
    return entry["seed"], entry["offset"], entry["i"], entry["j"]


# --- Words ----------------------------------------------------------------------------------------


def test_philox_gives_the_published_words() -> None:
    entries = load("words.json", "philox4x32_10")
    assert len(entries) == 3
    for entry in entries:
        counter, key = integers(entry["counter"]), integers(entry["key"])
        got = stream.philox4x32_10(counter, key)  # type: ignore[arg-type]
        assert got == integers(entry["words"])


def test_words_of_the_stream() -> None:
    entries = load("words.json", "stream")
    assert len(entries) == 200
    for entry in entries:
        got = stream.words(entry["seed"], entry["offset"], entry["i"], entry["g"])
        assert got == integers(entry["words"]), entry


def test_words_out_of_range_raise() -> None:
    for arguments in [(2**64, 0, 0, 0), (0, -1, 0, 0), (0, 0, 2**32, 0), (0, 0, 0, 2**32)]:
        with pytest.raises(ValueError, match="must be in"):
            stream.words(*arguments)


def test_float64_words_refine_float32_words() -> None:
    for j in range(8):
        narrow = stream.pair_f32(42, 7, 3, j)
        assert tuple(word >> 32 for word in stream.pair_f64(42, 7, 3, j)) == narrow


# --- Normals and samples --------------------------------------------------------------------------


def test_transform_f32_edges() -> None:
    pairs = load("transform_f32.json", "pairs")
    assert len(pairs) == 416
    for a, b, *expected in map(integers, pairs):
        for value, pattern in zip(stream.transform_f32(a, b), expected, strict=True):
            # An exact zero may have either sign, so compare values, not bits.
            assert value == stream.from_bits(pattern, "float32"), (hex(a), hex(b))
            assert value == 0 or stream.bits(value, "float32") == pattern


def test_normals_f32() -> None:
    entries = load("normals_f32.json", "normals")
    assert len(entries) == 600
    for entry in entries:
        assert stream.normal_f32(*place(entry)) == int(entry["bits"], 16), entry
        words = stream.pair_f32(*place(entry))
        real = stream.real_transform_f32(*words)[entry["j"] % 2]
        error = abs(real - entry["real"]) / stream.real_radius_f32(words[0])
        assert error <= KNOWN_REAL_TOLERANCE_F32, entry


@mpmath.workdps(40)
def test_normals_f64() -> None:
    entries = load("normals_f64.json", "normals")
    assert len(entries) == 300
    for entry in entries:
        words = stream.pair_f64(*place(entry))
        assert words == (int(entry["A"], 16), int(entry["B"], 16)), entry
        expected = mpmath.mpf(entry["real"])
        real = stream.real_transform_f64(*words)[entry["j"] % 2]
        assert abs(real - expected) <= mpmath.mpf(10) ** -24 * abs(expected), entry
        got = mpmath.mpf(stream.from_bits(stream.normal_f64(*place(entry)), "float64"))
        error = abs(got - expected) / stream.real_radius_f64(words[0])
        assert error <= KNOWN_ANSWER_TOLERANCE_F64, entry


def test_samples_f32() -> None:
    entries = load("samples_f32.json", "samples")
    assert len(entries) == 7
    for entry in entries:
        got = stream.sample(
            [float.fromhex(text) for text in entry["mu"]],
            [float.fromhex(text) for text in entry["sigma"]],
            entry["n"],
            "float32",
            seed=entry["seed"],
            shared=entry["noise"] == "shared",
            dim_offset=entry["dim_offset"],
            sample_offset=entry["sample_offset"],
        )
        assert got == [list(integers(row)) for row in entry["bits"]]


def test_narrow_samples_round_the_float32_sample_once() -> None:
    # Means from below float16's subnormals to above its largest number.
    mu = [0.0, 1e-8, 3e-5, -1.0, 300.0, 65519.0, -7e4, 3.3e38]
    sigma = [1e-7, 1e-7, 1e-5, 2.0, 50.0, 1.0, 9e3, 1e37]
    wide = np.array(stream.sample(mu, sigma, 24, "float32", seed=5), dtype=np.uint32)
    half = np.array(stream.sample(mu, sigma, 24, "float16", seed=5), dtype=np.uint16)
    with np.errstate(over="ignore"):
        assert np.array_equal(half, wide.view(np.float32).astype(np.float16).view(np.uint16))
    brain = np.array(stream.sample(mu, sigma, 24, "bfloat16", seed=5), dtype=np.uint32)
    assert np.array_equal(brain, (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16)
    assert np.isinf(half.view(np.float16)).any()
    assert np.isinf((brain << 16).view(np.float32)).any()


def test_signs_of_zero_in_samples() -> None:
    # fma(0, z, mu): a zero result is negative only if both 0 * z and mu are.
    z = stream.from_bits(stream.normal_f32(0, 0, 0, 0), "float32")
    sign = math.copysign(1.0, z)
    assert stream.sample([0.0], [0.0], 1) == [[0]]
    assert stream.sample([-0.0], [math.copysign(0.0, sign)], 1) == [[0]]
    assert stream.sample([-0.0], [math.copysign(0.0, -sign)], 1) == [[0x80000000]]


# --- Float64 coefficients -------------------------------------------------------------------------


@pytest.mark.slow
def test_float64_literals_equal_the_derived_coefficients() -> None:
    derived = float64_coefficients.derive()
    literal = stream.F64.L, stream.F64.LE, stream.F64.S, stream.F64.C
    assert derived == literal
    errors = float64_coefficients.truncation_errors(derived)
    assert set(errors) == {"L", "S", "C"}
    assert all(0 < error < 2**-54 for error in errors.values()), errors


@mpmath.workdps(40)
def test_transform_f64_against_real_arithmetic() -> None:
    for a, b in float64_coefficients.measurement_words(600):
        got = stream.transform_f64(a, b)
        radius = stream.real_radius_f64(a)
        for value, real in zip(got, stream.real_transform_f64(a, b), strict=True):
            assert abs(value - real) <= WORST_CASE_F64 * radius, (hex(a), b)


@mpmath.workdps(40)
def test_transform_f32_against_real_arithmetic() -> None:
    for a64, b64 in float64_coefficients.measurement_words(300):
        a, b = a64 >> 32, b64 >> 32
        radius = stream.real_radius_f32(a)
        got, reals = stream.transform_f32(a, b), stream.real_transform_f32(a, b)
        for value, real in zip(got, reals, strict=True):
            assert abs(value - real) <= WORST_CASE_F32 * radius, (hex(a), b)


# --- Exact arithmetic and the processor's arithmetic ----------------------------------------------


def binary32_patterns(count: int, seed: int) -> list[float]:
    """Finite binary32 numbers with uniform bit patterns, which include subnormal and huge numbers."""
    draw = random.Random(seed).getrandbits
    patterns = (draw(32) for _ in range(count))
    values = (struct.unpack("<f", struct.pack("<I", pattern))[0] for pattern in patterns)
    return [value for value in values if math.isfinite(value)]


def same(got: float, expected: float) -> bool:
    """Whether two numbers are equal, including the sign of zeros."""
    return got == expected and math.copysign(1.0, got) == math.copysign(1.0, expected)


def test_binary32_operations() -> None:
    xs, ys = binary32_patterns(2000, 1), binary32_patterns(2000, 2)
    with np.errstate(all="ignore"):
        for x, y in zip(xs, ys, strict=False):
            a, b = np.float32(x), np.float32(y)
            assert same(stream.mul(x, y, stream.BINARY32), float(a * b)), (x, y)
            assert same(stream.add(x, y, stream.BINARY32), float(a + b)), (x, y)
            near = np.float32(x * (1 + y / 2**126))  # sums that cancel, or nearly
            assert same(stream.add(x, -float(near), stream.BINARY32), float(a - near)), (x, y)
            root = stream.sqrt(abs(x), stream.BINARY32)
            assert same(root, float(np.sqrt(abs(a)))), x


def test_binary64_operations() -> None:
    draw = random.Random(3).getrandbits
    for _ in range(2000):
        x, y = (struct.unpack("<d", struct.pack("<Q", draw(64)))[0] for _ in range(2))
        if math.isfinite(x) and math.isfinite(y):
            assert same(stream.mul(x, y, stream.BINARY64), x * y), (x, y)
            assert same(stream.add(x, y, stream.BINARY64), x + y), (x, y)
            assert same(stream.sqrt(abs(x), stream.BINARY64), math.sqrt(abs(x))), x


@pytest.mark.parametrize("width", [1, 24, 25, 26, 31, 32, 33, 53, 54, 55, 63, 64])
def test_integer_conversion(width: int) -> None:
    draw = random.Random(width).getrandbits
    edges = [2**width - 1, 2 ** (width - 1), 2 ** (width - 1) + 1]
    for integer in edges + [draw(width) for _ in range(50)]:
        for value in (integer, -integer):
            assert same(stream.convert(value, stream.BINARY64), float(value))
            # NumPy converts 64-bit integers to binary32 in one rounding.
            if -(2**63) <= value < 2**63:
                expected = float(np.int64(value).astype(np.float32))
                assert same(stream.convert(value, stream.BINARY32), expected)


def test_fma_rounds_once() -> None:
    x = 1 + 2.0**-23
    # x * x = 1 + 2^-22 + 2^-46: the last bit is lost unless the product is exact.
    assert stream.fma(x, x, -(1 + 2.0**-22), stream.BINARY32) == 2.0**-46
    x = 1 + 2.0**-52
    assert stream.fma(x, x, -(1 + 2.0**-51), stream.BINARY64) == 2.0**-104
    # Double rounding through binary64 would give the tie 1 + 2^-24, which rounds to 1.
    assert stream.fma(1.0, 1 + 2.0**-23, 2.0**-80, stream.BINARY32) == 1 + 2.0**-23
    assert stream.fma(2.0**-12, 2.0**-12, 1.0, stream.BINARY32) == 1.0
    assert stream.fma(2.0**-12, 2.0**-12 * (1 + 2.0**-23), 1.0, stream.BINARY32) == 1 + 2.0**-23


def test_fma_signs_and_infinities() -> None:
    assert same(stream.fma(-1.0, 0.0, 0.0, stream.BINARY32), 0.0)
    assert same(stream.fma(-1.0, 0.0, -0.0, stream.BINARY32), -0.0)
    assert same(stream.fma(-1.0, 1.0, 1.0, stream.BINARY32), 0.0)
    assert same(stream.fma(-(2.0**-100), 2.0**-100, 0.0, stream.BINARY32), -0.0)
    assert same(stream.mul(-1.0, 0.0, stream.BINARY32), -0.0)
    assert stream.fma(2.0**127, 2.0, 0.0, stream.BINARY32) == math.inf
    assert stream.fma(2.0**127, 2.0, -(2.0**127), stream.BINARY32) == 2.0**127
    assert stream.fma(1e300, 1e300, -math.inf, stream.BINARY64) == -math.inf
    assert math.isnan(stream.fma(math.inf, 1.0, -math.inf, stream.BINARY64))


def test_rounding_to_narrow_formats() -> None:
    cases = [
        (65504 + 15.99, "float16", 0x7BFF),  # the largest number
        (65520.0, "float16", 0x7C00),  # the tie with infinity
        (2.0**-25, "float16", 0x0000),  # the tie with zero
        (-(2.0**-25), "float16", 0x8000),
        (2.0**-25 * 1.001, "float16", 0x0001),
        (3 * 2.0**-25, "float16", 0x0002),  # the tie between subnormals 1 and 2
        (1 + 2.0**-11, "float16", 0x3C00),
        (1 + 3 * 2.0**-11, "float16", 0x3C02),
        (1 + 2.0**-8, "bfloat16", 0x3F80),
        (1 + 3 * 2.0**-8, "bfloat16", 0x3F82),
        (2.0**-134, "bfloat16", 0x0000),
        (3 * 2.0**-134, "bfloat16", 0x0002),
        (2.0**128 - 2.0**119, "bfloat16", 0x7F80),
    ]
    for value, dtype, pattern in cases:
        rounded = stream.round_to(Fraction(value), stream.FORMATS[dtype])
        assert stream.bits(rounded, dtype) == pattern, (value, dtype)
    for pattern in range(0, 0x10000, 7):
        for dtype in ("float16", "bfloat16"):
            value = stream.from_bits(pattern, dtype)
            if math.isfinite(value):
                assert stream.bits(value, dtype) == pattern
