"""Conversions between float32 and 16-bit formats, without conversion instructions.

Some targets lack these: compute capability 7.5 has none for bfloat16, and LLVM calls a library that may be missing. So
integer and float32 operations convert: one rounding, to nearest even, with subnormals.
"""

import numpy as np

from multisample.backends.kernels.compilation import inline

from .arithmetic import float_bits, from_float_bits, like
from .vectors import converted, select

_SIGN = np.int32(-0x80000000)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)


@inline
def unchanged(x):
    """`x` itself: float32 and float64 need no conversion."""
    return x


@inline
def to_bfloat16(x: np.float32) -> np.uint16:
    """The bits of the bfloat16 nearest to `x`."""
    bits = float_bits(x)
    # Adding just under half a unit carries into the upper half exactly when the value rounds up.
    rounded = like(bits + np.int32(0x7FFF) + (bits >> np.int32(16) & np.int32(1)), bits)
    quiet_nan = like(bits | np.int32(0x00400000), bits)
    chosen = select(like(bits & _MAGNITUDE, bits) > _INFINITY, quiet_nan, rounded)
    return converted(like(chosen >> np.int32(16), bits), np.uint16)


@inline
def from_bfloat16(bits: np.uint16) -> np.float32:
    """The value of a bfloat16."""
    wide = converted(bits, np.int32)
    return from_float_bits(like(wide << np.int32(16), wide))


@inline
def to_float16(x: np.float32) -> np.uint16:
    """The bits of the float16 nearest to `x`; from 65520 on that is infinity."""
    bits = float_bits(x)
    sign = like(bits & _SIGN, bits)
    magnitude = like(bits ^ sign, bits)
    # From 2^-14 on: rebias the exponent from 127 to 15 and round the lowest 13 bits away.
    odd = magnitude >> np.int32(13) & np.int32(1)
    normal = like(like(magnitude - np.int32(112 << 23) + np.int32(0xFFF) + odd, bits) >> np.int32(13), bits)
    # Below: adding 1/2 lets the float32 addition round at 2^-24, the spacing of float16's subnormals.
    shifted = float_bits(from_float_bits(magnitude) + np.float32(0.5))
    subnormal = like(shifted - np.int32(0x3F000000), bits)
    overflow = select(magnitude > _INFINITY, like(np.int32(0x7E00), bits), like(np.int32(0x7C00), bits))
    half = select(np.int32(113 << 23) > magnitude, subnormal, normal)
    half = select(magnitude > np.int32(0x477FEFFF), overflow, half)
    return converted(like(sign >> np.int32(16) | half, bits), np.uint16)


@inline
def from_float16(bits: np.uint16) -> np.float32:
    """The value of a float16."""
    wide = converted(bits, np.int32)
    high = like(wide << np.int32(16), wide)
    sign = like(high & _SIGN, high)
    magnitude = like(like(high & _MAGNITUDE, high) >> np.int32(3), high)
    # As a float32, these bits have an exponent that is 112 too small, and a subnormal is still subnormal. One exact
    # product corrects both.
    scaled = float_bits(from_float_bits(magnitude) * np.float32(2.0**112))
    value = select(magnitude > np.int32(0x0F7FFFFF), like(magnitude | _INFINITY, high), scaled)
    return from_float_bits(like(value | sign, high))


NARROWING = {"float16": to_float16, "bfloat16": to_bfloat16, "float32": unchanged, "float64": unchanged}
"""Functions from the computing type to an element of a matrix, by the name of the element type."""

WIDENING = {"float16": from_float16, "bfloat16": from_bfloat16, "float32": unchanged, "float64": unchanged}
"""Functions from an element to its value as a number, by the name of the element type."""
