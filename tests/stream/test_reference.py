"""The reference agrees with real arithmetic of 40 digits."""

import math

import mpmath
import pytest

from reference import float64_coefficients, stream

# Numbers of words, bounds relative to the radius r = R / 2, and absolute bounds. Those of float32 are the spec's. For
# float64, the measured errors of R (2.2e-16, relative) and s (2.4e-16) bound the first normal, which has the larger
# error: s adds at most 9.6e-16 (4 |s| 2.4e-16), a rounding 0.6e-16, R 2.2e-16, and the last product 1.1e-16. In all
# 13.5e-16; 1.04e-15 was measured.
WORST_CASES = {stream.F32: (300, 1e-6, 5.6e-6), stream.F64: (600, 1.4e-15, math.inf)}


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
