"""Standard normals from words, by operations of IEEE 754, so that they have the same bits everywhere.

The Box-Muller transform of STREAM.md with polynomials in place of library functions: only additions,
multiplications, fused multiply-adds, square roots and conversions, each correctly rounded, in the order written.
Nothing may be contracted or reassociated: never compile this with ``fastmath``.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from multisample.backends.kernels.compilation import inline

from .arithmetic import float_bits, from_float_bits, horner, like, product, sqrt, to_real, transform_fma
from .vectors import select
from .words import word

FLOAT64_KEY = np.uint64(0x66363474)
"""XORed into the second key word for the block that refines float32 to float64."""


def _numbers(real: Any, literals: str) -> tuple[Any, ...]:
    return tuple(real(float.fromhex(literal)) for literal in literals.split())


_f32, _f64 = functools.partial(_numbers, np.float32), functools.partial(_numbers, np.float64)

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

_SHIFT = np.uint64(32)


def _transform(real: Any, le: Any, *coefficients: tuple[Any, ...]) -> tuple[Callable[..., Any], ...]:
    """``radius(a)`` and ``half_turns(b)``, for unsigned and signed integers of as many bits as `real`.

    ``radius(a)`` is twice the radius, ``2 sqrt(-2 ln u)``. u, made from the word `a`, is in [2^-33, 1 - 2^-24] for
    float32, and in [2^-65, 1 - 2^-53] for float64. ``half_turns(b)`` is half the cosine and half the sine of the angle
    ``pi b / 2^31``, for float64 ``pi b / 2^63``, in [-pi, pi).
    """
    log, sine, cosine = map(horner, coefficients)
    bits = np.finfo(real).bits
    one, half, to_unit, to_unit_half, to_half_turns = map(
        real, (1, 0.5, 2.0**-bits, 0.5 ** (bits + 1), 0.5 ** (bits - 1))
    )
    # Bit patterns as integers: 2/3, the mask of the exponent, and the distance from 2/3 to the largest u.
    two_thirds, least, most = np.array([2 / 3, np.finfo(real).tiny, np.nextafter(one, half)], real).view(
        f"i{bits // 8}"
    )
    exponent, below_one = -least, most - two_thirds

    @inline
    def radius(a):
        u = transform_fma(to_real(a), to_unit, to_unit_half)
        word = float_bits(u)
        # Positive floats are ordered like their bit patterns: a minimum of u is an integer minimum, which some GPUs
        # fuse with the subtraction.
        x = like(word - two_thirds, word)
        x = select(x > below_one, like(below_one, x), x)
        e = like(x & exponent, x)
        f = from_float_bits(like(x - e + two_thirds, x)) - one
        return sqrt(transform_fma(to_real(e), le, log(f) * f))

    @inline
    def half_turns(b):
        y = to_real(b) * to_half_turns
        q = y * y
        s = sine(q) * y
        c = cosine(q)
        return transform_fma(-s, s, half), s * c

    return radius, half_turns


radius_f32, half_turns_f32 = _transform(np.float32, LE32, L32, S32, C32)
radius_f64, half_turns_f64 = _transform(np.float64, LE64, L64, S64, C64)


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
