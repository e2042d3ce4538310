"""The reference agrees with real numbers of 40 digits, and these with independent answers (tests/support/data).

test_normals.py and test_sample_stream.py compare the compiled code with the reference, bit for bit.
"""

from __future__ import annotations

import json
from typing import Any

import mpmath
import pytest
from places import DATA

from reference import float64_coefficients, stream

# Worst case of the float64 transform, relative to the radius r = R / 2, from the measured errors of R
# (2.2e-16, relative) and s (2.4e-16). The first normal has the larger error: s adds at
# most 9.6e-16 (4 |s| 2.4e-16), a rounding 0.6e-16, R 2.2e-16, and the last product 1.1e-16. Together
# 13.5e-16; 1.04e-15 was measured. The 300 known answers do not include the worst case.
KNOWN_ANSWER_TOLERANCE_F64 = 1e-15
WORST_CASE_F64 = 1.4e-15

# The real values of the float32 normals were computed in binary64. The error of the angle is 4.4e-16:
# half an ulp of pi and half an ulp of the product. Cosine, logarithm, root and last product add roundings of
# 0.6e-16 + 0.6e-16 + 1.1e-16 + 1.1e-16. Together 7.8e-16 of the radius.
KNOWN_REAL_TOLERANCE_F32 = 8e-16

# The spec's own bound on the float32 transform, relative to the radius.
WORST_CASE_F32 = 1e-6


def load(name: str, key: str) -> list[Any]:
    entries = json.loads((DATA / name).read_text())[key]
    assert isinstance(entries, list)
    return entries


def place(entry: dict[str, Any]) -> tuple[int, int, int, int]:
    return entry["seed"], entry["offset"], entry["i"], entry["j"]


# --- Words ----------------------------------------------------------------------------------------


def test_float64_words_refine_float32_words() -> None:
    for j in range(8):
        narrow = stream.pair(42, 7, 3, j, stream.F32)
        assert tuple(word >> 32 for word in stream.pair(42, 7, 3, j, stream.F64)) == narrow


# --- Normals and samples --------------------------------------------------------------------------


def test_normals_f32() -> None:
    entries = load("normals_f32.json", "normals")
    assert len(entries) == 600
    for entry in entries:
        words = stream.pair(*place(entry), stream.F32)
        real = stream.real_transform(*words, stream.F32)[entry["j"] % 2]
        error = abs(real - entry["real"]) / stream.real_radius(words[0], stream.F32)
        assert error <= KNOWN_REAL_TOLERANCE_F32, entry


@mpmath.workdps(40)
def test_normals_f64() -> None:
    entries = load("normals_f64.json", "normals")
    assert len(entries) == 300
    for entry in entries:
        words = stream.pair(*place(entry), stream.F64)
        assert words == (int(entry["A"], 16), int(entry["B"], 16)), entry
        expected = mpmath.mpf(entry["real"])
        real = stream.real_transform(*words, stream.F64)[entry["j"] % 2]
        assert abs(real - expected) <= mpmath.mpf(10) ** -24 * abs(expected), entry
        got = mpmath.mpf(stream.from_bits(stream.normal(*place(entry), stream.F64), "float64"))
        error = abs(got - expected) / stream.real_radius(words[0], stream.F64)
        assert error <= KNOWN_ANSWER_TOLERANCE_F64, entry


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
        got = stream.transform(a, b, stream.F64)
        radius = stream.real_radius(a, stream.F64)
        for value, real in zip(got, stream.real_transform(a, b, stream.F64), strict=True):
            assert abs(value - real) <= WORST_CASE_F64 * radius, (hex(a), b)


@mpmath.workdps(40)
def test_transform_f32_against_real_arithmetic() -> None:
    for a64, b64 in float64_coefficients.measurement_words(300):
        a, b = a64 >> 32, b64 >> 32
        radius = stream.real_radius(a, stream.F32)
        got, reals = stream.transform(a, b, stream.F32), stream.real_transform(a, b, stream.F32)
        for value, real in zip(got, reals, strict=True):
            assert abs(value - real) <= WORST_CASE_F32 * radius, (hex(a), b)
