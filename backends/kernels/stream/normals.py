"""Standard normals from words, by operations of IEEE 754, so that they have the same bits everywhere.

The Box-Muller transform of STREAM.md with polynomials in place of library functions: only additions,
multiplications, fused multiply-adds, square roots and conversions, each correctly rounded, in the order written.
Nothing may be contracted or reassociated: never compile this with ``fastmath``.
"""

from __future__ import annotations

import numpy as np

from multisample.backends.kernels.compilation import inline

from .arithmetic import float_bits, from_float_bits, horner, like, minimum, product, sqrt, to_real, transform_fma
from .words import word

FLOAT64_KEY = np.uint64(0x66363474)
"""XORed into the second key word for the block that refines float32 to float64."""


def _f32(literals: str) -> tuple[np.float32, ...]:
    return tuple(np.float32(float.fromhex(literal)) for literal in literals.split())


def _f64(literals: str) -> tuple[np.float64, ...]:
    return tuple(np.float64(float.fromhex(literal)) for literal in literals.split())


# R = 2 sqrt(-2 ln u) = sqrt(-8 ln u); L is -8 ln(1 + f) / f. LE, the factor of the exponent, is -8 ln 2 / 2^23 (2^52
# for float64), because the exponent is still shifted. S and C are sin and cos of (pi / 2) y, as polynomials in y^2.
# multisample/triton.py reads those of float32.
L32 = _f32(
    "0x1.3ab066p+0 -0x1.5e6fdap+0 0x1.504890p+0 -0x1.956702p+0"
    " 0x1.0013fap+1 -0x1.55618ap+1 0x1.ffffd6p+1 -0x1.fffffap+2"
)
(LE32,) = _f32("-0x1.62e430p-21")
S32 = _f32("0x1.3c4b2cp-13 -0x1.3232fap-8 0x1.46676ep-4 -0x1.4abbb6p-1 0x1.921fb4p+0")
C32 = _f32("0x1.c2b9a6p-11 -0x1.55041ap-6 0x1.03bdaap-2 -0x1.3bd3b0p+0 0x1.000000p+0")

# Derived by tests/support/reference/float64_coefficients.py.
L64 = _f64(
    "0x1.62bd204bc581cp-1 -0x1.6b3d2b009ccdcp-1 0x1.75051d34ad805p-2 -0x1.95b0683003410p-2"
    " 0x1.05f7923b08ae0p-1 -0x1.163d9c867621bp-1 0x1.240d2b1787129p-1 -0x1.3aa95ab6613f6p-1"
    " 0x1.555c8ea50386fp-1 -0x1.74624cbe9c486p-1 0x1.99995b6e873bcp-1 -0x1.c71c4a8c0361ap-1"
    " 0x1.0000009ea359dp+0 -0x1.24924977d8d52p+0 0x1.55555553a1926p+0 -0x1.99999998ecb51p+0"
    " 0x1.0000000001068p+1 -0x1.5555555555930p+1 0x1.ffffffffffffbp+1 -0x1.0000000000000p+3"
)
(LE64,) = _f64("-0x1.62e42fefa39efp-50")
S64 = _f64(
    "0x1.8d539c15d9c78p-38 -0x1.6ef2a489bf608p-31 0x1.e8efa99059688p-25 -0x1.e3074002ed07ap-19"
    " 0x1.507834679cf6bp-13 -0x1.32d2cce5e020ep-8 0x1.466bc67759f09p-4 -0x1.4abbce625be38p-1"
    " 0x1.921fb54442d18p+0"
)
C64 = _f64(
    "0x1.16540fab4bfdcp-34 -0x1.b69367629ce5dp-28 0x1.f9d2489ceabdep-22 -0x1.a6d1efa85da23p-16"
    " 0x1.e1f50680e342bp-11 -0x1.55d3c7e3bf6cfp-6 0x1.03c1f081b599ap-2 -0x1.3bd3cc9be45dcp+0"
    " 0x1.0000000000000p+0"
)

_log_f32, _sine_f32, _cosine_f32 = map(horner, (L32, S32, C32))
_log_f64, _sine_f64, _cosine_f64 = map(horner, (L64, S64, C64))

_ONE32, _HALF32 = _f32("0x1p+0 0x1p-1")
_ONE64, _HALF64 = _f64("0x1p+0 0x1p-1")
_TO_UNIT32, _TO_UNIT_HALF32, _TO_HALF_TURNS32 = _f32("0x1p-32 0x1p-33 0x1p-31")
_TO_UNIT64, _TO_UNIT_HALF64, _TO_HALF_TURNS64 = _f64("0x1p-64 0x1p-65 0x1p-63")
# Bit patterns as integers: 2/3, the mask of the exponent, and the distance from 2/3 to the largest u.
_TWO_THIRDS32, _EXPONENT32 = np.int32(0x3F2AAAAB), np.int32(-0x00800000)
_BELOW_ONE32 = np.int32(0x3F7FFFFF - _TWO_THIRDS32)
_TWO_THIRDS64, _EXPONENT64 = np.int64(0x3FE5555555555555), np.int64(-0x0010000000000000)
_BELOW_ONE64 = np.int64(0x3FEFFFFFFFFFFFFF - _TWO_THIRDS64)
_SHIFT = np.uint64(32)


@inline
def radius_f32(a: np.uint32) -> np.float32:
    """Twice the radius, ``2 sqrt(-2 ln u)``, for ``u`` in [2^-33, 1 - 2^-24] made from the word `a`."""
    u = transform_fma(to_real(a), _TO_UNIT32, _TO_UNIT_HALF32)
    bits = float_bits(u)
    # Positive floats are ordered like their bit patterns: min(u, 1 - 2^-24) is an integer minimum, which some GPUs fuse
    # with the subtraction.
    x = minimum(like(bits - _TWO_THIRDS32, bits), _BELOW_ONE32)
    e = like(x & _EXPONENT32, x)
    f = from_float_bits(like(x - e + _TWO_THIRDS32, x)) - _ONE32
    return sqrt(transform_fma(to_real(e), LE32, _log_f32(f) * f))


@inline
def half_turns_f32(b: np.int32) -> tuple[np.float32, np.float32]:
    """Half the cosine and half the sine of the angle ``pi b / 2^31``, in [-pi, pi)."""
    y = to_real(b) * _TO_HALF_TURNS32
    q = y * y
    s = _sine_f32(q) * y
    c = _cosine_f32(q)
    return transform_fma(-s, s, _HALF32), s * c


@inline
def radius_f64(a: np.uint64) -> np.float64:
    """Twice the radius, ``2 sqrt(-2 ln u)``, for ``u`` in [2^-65, 1 - 2^-53] made from the 64 bits `a`."""
    u = transform_fma(to_real(a), _TO_UNIT64, _TO_UNIT_HALF64)
    x = minimum(float_bits(u) - _TWO_THIRDS64, _BELOW_ONE64)
    e = x & _EXPONENT64
    f = from_float_bits(x - e + _TWO_THIRDS64) - _ONE64
    return sqrt(transform_fma(to_real(e), LE64, _log_f64(f) * f))


@inline
def half_turns_f64(b: np.int64) -> tuple[np.float64, np.float64]:
    """Half the cosine and half the sine of the angle ``pi b / 2^63``, in [-pi, pi)."""
    y = to_real(b) * _TO_HALF_TURNS64
    q = y * y
    s = _sine_f64(q) * y
    c = _cosine_f64(q)
    return transform_fma(-s, s, _HALF64), s * c


@inline
def normals_f32(w):
    """The float32 normals of columns ``4 g`` to ``4 g + 3`` from the four words of their block."""
    r, t = radius_f32(np.uint32(w[0])), radius_f32(np.uint32(w[2]))
    c, s = half_turns_f32(np.int32(w[1]))
    d, v = half_turns_f32(np.int32(w[3]))
    return product(r, c), product(r, s), product(t, d), product(t, v)


@inline
def normals_f64(w, fine):
    """The normals of `normals_f32`, refined to float64 by the words `fine` of the second block."""
    r, t = radius_f64(_joined(w[0], fine[0])), radius_f64(_joined(w[2], fine[2]))
    c, s = half_turns_f64(np.int64(_joined(w[1], fine[1])))
    d, v = half_turns_f64(np.int64(_joined(w[3], fine[3])))
    return product(r, c), product(r, s), product(t, d), product(t, v)


@inline
def _joined(high, low):
    return np.uint64(high) << _SHIFT | word(low)
