"""An independent implementation of the stream (STREAM.md, version 1), which shares no code with the package.

It favours certainty over speed. Words are plain Python integers. Every binary floating-point
operation is computed exactly, with fractions, and rounded once; no floating-point unit rounds.

Numbers are Python floats: a float represents every binary16, bfloat16, binary32 and binary64 number
exactly, including signed zeros and infinities. ``bits`` gives their bit patterns.
"""

import functools
import math
import struct
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import mpmath

Real = Any  # an mpmath.mpf; mpmath has no type stubs
Words = tuple[int, int, int, int]

MASK32 = 0xFFFFFFFF


def philox4x32_10(counter: Words, key: tuple[int, int]) -> Words:
    """Philox4x32 with 10 rounds (Salmon et al., SC'11, doi:10.1145/2063384.2063405)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0 = 0xD2511F53 * c0
        product1 = 0xCD9E8D57 * c2
        c0, c1, c2, c3 = ((product1 >> 32) ^ c1 ^ k0, product1 & MASK32, (product0 >> 32) ^ c3 ^ k1, product0 & MASK32)
        k0 = (k0 + 0x9E3779B9) & MASK32
        k1 = (k1 + 0xBB67AE85) & MASK32
    return c0, c1, c2, c3


def _block(seed: int, offset: int, i: int, g: int, key1_tweak: int) -> Words:
    ranges = {"seed": (seed, 64), "offset": (offset, 64), "i": (i, 32), "g": (g, 32)}
    for name, (value, width) in ranges.items():
        if not 0 <= value < 2**width:
            raise ValueError(f"{name} is {value}; it must be in [0, 2**{width})")
    key = ((seed & MASK32) ^ 0x6D756C74, (seed >> 32) ^ 0x73616D70 ^ key1_tweak)
    return philox4x32_10((g, i, offset & MASK32, offset >> 32), key)


def words(seed: int, offset: int, i: int, g: int) -> Words:
    """Words w0..w3 of row i, columns 4g to 4g+3: lines "key" and "counter" of the spec."""
    return _block(seed, offset, i, g, 0)


def words64(seed: int, offset: int, i: int, g: int) -> Words:
    """Low halves l0..l3 for float64: "key word 1 additionally XORed with 0x66363474"."""
    return _block(seed, offset, i, g, 0x66363474)


def _signed(word: int, width: int) -> int:
    """Read an unsigned word as two's complement (a number that is signed already stays)."""
    half = 1 << (width - 1)
    return (word + half) % (2 * half) - half


class Format(NamedTuple):
    """A binary interchange format: digits of the significand and range of normal exponents."""

    precision: int
    min_exponent: int
    max_exponent: int


BINARY16 = Format(11, -14, 15)
BFLOAT16 = Format(8, -126, 127)
BINARY32 = Format(24, -126, 127)
BINARY64 = Format(53, -1022, 1023)

FORMATS = {"float16": BINARY16, "bfloat16": BFLOAT16, "float32": BINARY32, "float64": BINARY64}


def round_to(value: Fraction, fmt: Format) -> float:
    """Round once, to nearest, ties to even, or to infinity. A zero has the number's sign."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1  # now 2^exponent <= magnitude < 2^(exponent + 1)
    quantum = Fraction(2) ** (max(exponent, fmt.min_exponent) - (fmt.precision - 1))
    rounded = round(magnitude / quantum) * quantum  # Python rounds halves to even, exactly
    overflow = rounded >= Fraction(2) ** (fmt.max_exponent + 1)
    result = math.inf if overflow else float(rounded)  # exact: binary64 holds every format
    return -result if value < 0 else result


def fma(x: float, y: float, z: float, fmt: Format) -> float:
    """Compute x * y + z, rounded once."""
    if not (math.isfinite(x) and math.isfinite(y) and math.isfinite(z)):
        # Infinity or NaN by IEEE rules, without rounding. A finite product must not overflow.
        return z if math.isfinite(x) and math.isfinite(y) else x * y + z
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    if exact == 0 and (x == 0 or y == 0):
        return x * y + z  # only zeros, whose signs determine the sign of the result
    return round_to(exact, fmt)


def mul(x: float, y: float, fmt: Format) -> float:
    """Compute x * y."""
    # Adding the zero of the product's sign keeps that sign.
    return fma(x, y, math.copysign(0.0, math.copysign(1.0, x) * math.copysign(1.0, y)), fmt)


def add(x: float, y: float, fmt: Format) -> float:
    """Compute x + y."""
    return fma(x, 1.0, y, fmt)


def sqrt(x: float, fmt: Format) -> float:
    """Compute the square root of a number >= 0, correctly rounded."""
    if x == 0 or math.isinf(x):
        return x
    exact = Fraction(x)
    # In units of 2^unit the root has at least precision + 2 binary digits before the point. One more
    # digit (the sticky bit) stands for the rest, which is enough to decide ties.
    half_exponent = (exact.numerator.bit_length() - exact.denominator.bit_length()) // 2
    unit = half_exponent - fmt.precision - 4
    scaled = exact / Fraction(4) ** unit
    whole = math.isqrt(math.floor(scaled))
    sticky = 0 if whole * whole == scaled else 1
    return round_to(Fraction(2 * whole + sticky, 2) * Fraction(2) ** unit, fmt)


def convert(integer: int, fmt: Format) -> float:
    """Convert an integer: f32(...) and f64(...) of the spec."""
    return round_to(Fraction(integer), fmt)


def horner(coefficients: Sequence[float], x: float, fmt: Format) -> float:
    """Evaluate a polynomial: "starts with K[0] and repeats p = fma(p, x, K[k])"."""
    p = coefficients[0]
    for coefficient in coefficients[1:]:
        p = fma(p, x, coefficient, fmt)
    return p


def bits(value: float, dtype: str) -> int:
    """Bit pattern of a number that the dtype holds exactly."""
    if dtype == "bfloat16":
        return bits(value, "float32") >> 16  # the upper half of binary32
    pack, read = {"float16": ("<e", "<H"), "float32": ("<f", "<I"), "float64": ("<d", "<Q")}[dtype]
    return int(struct.unpack(read, struct.pack(pack, value))[0])


def from_bits(pattern: int, dtype: str) -> float:
    """Return the number of a bit pattern: float(...) of the spec."""
    if dtype == "bfloat16":
        return from_bits(pattern << 16, "float32")
    pack, read = {"float16": ("<H", "<e"), "float32": ("<I", "<f"), "float64": ("<Q", "<d")}[dtype]
    return float(struct.unpack(read, struct.pack(pack, pattern))[0])


def _hex(literals: str) -> tuple[float, ...]:
    return tuple(map(float.fromhex, literals.split()))


class Transform(NamedTuple):
    """The parameters in which the binary32 and the binary64 transform differ."""

    dtype: str
    fmt: Format
    word: int  # width of the words and of the format
    mantissa: int  # width of the mantissa field
    two_thirds: int  # bit pattern at which the exponent of u changes
    L: tuple[float, ...]
    LE: float
    S: tuple[float, ...]
    C: tuple[float, ...]


F32 = Transform(
    dtype="float32",
    fmt=BINARY32,
    word=32,
    mantissa=23,
    two_thirds=0x3F2AAAAB,
    L=_hex("""
        0x1.3ab066p+0 -0x1.5e6fdap+0 0x1.504890p+0 -0x1.956702p+0 0x1.0013fap+1 -0x1.55618ap+1
        0x1.ffffd6p+1 -0x1.fffffap+2
    """),
    LE=float.fromhex("-0x1.62e430p-21"),
    S=_hex("""
        0x1.3c4b2cp-13 -0x1.3232fap-8 0x1.46676ep-4 -0x1.4abbb6p-1 0x1.921fb4p+0
    """),
    C=_hex("""
        0x1.c2b9a6p-11 -0x1.55041ap-6 0x1.03bdaap-2 -0x1.3bd3b0p+0 0x1.000000p+0
    """),
)

# L, LE, S and C were derived by float64_coefficients.py beside this file.
F64 = Transform(
    dtype="float64",
    fmt=BINARY64,
    word=64,
    mantissa=52,
    two_thirds=0x3FE5555555555555,
    L=_hex("""
        0x1.62bd204bc581cp-1 -0x1.6b3d2b009ccdcp-1 0x1.75051d34ad805p-2 -0x1.95b0683003410p-2
        0x1.05f7923b08ae0p-1 -0x1.163d9c867621bp-1 0x1.240d2b1787129p-1 -0x1.3aa95ab6613f6p-1
        0x1.555c8ea50386fp-1 -0x1.74624cbe9c486p-1 0x1.99995b6e873bcp-1 -0x1.c71c4a8c0361ap-1
        0x1.0000009ea359dp+0 -0x1.24924977d8d52p+0 0x1.55555553a1926p+0 -0x1.99999998ecb51p+0
        0x1.0000000001068p+1 -0x1.5555555555930p+1 0x1.ffffffffffffbp+1 -0x1.0000000000000p+3
    """),
    LE=float.fromhex("-0x1.62e42fefa39efp-50"),
    S=_hex("""
        0x1.8d539c15d9c78p-38 -0x1.6ef2a489bf608p-31 0x1.e8efa99059688p-25 -0x1.e3074002ed07ap-19
        0x1.507834679cf6bp-13 -0x1.32d2cce5e020ep-8 0x1.466bc67759f09p-4 -0x1.4abbce625be38p-1
        0x1.921fb54442d18p+0
    """),
    C=_hex("""
        0x1.16540fab4bfdcp-34 -0x1.b69367629ce5dp-28 0x1.f9d2489ceabdep-22 -0x1.a6d1efa85da23p-16
        0x1.e1f50680e342bp-11 -0x1.55d3c7e3bf6cfp-6 0x1.03c1f081b599ap-2 -0x1.3bd3cc9be45dcp+0
        0x1.0000000000000p+0
    """),
)


def _uniform(a: int, k: Transform) -> float:
    """Line "u = min(fma(f(a), 2^-w, 2^-(w+1)), 1 - 2^-p)": in [2^-(w+1), 1 - 2^-p]."""
    u = fma(convert(a, k.fmt), 2.0**-k.word, 2.0 ** -(k.word + 1), k.fmt)
    return min(u, 1 - 2.0**-k.fmt.precision)


def _radius(a: int, k: Transform) -> float:
    """Lines "e", "f" and "R" of the spec: R = 2 sqrt(-2 ln u)."""
    u_bits = bits(_uniform(a, k), k.dtype)
    # Python integers act like endless two's complement: & with a negative mask keeps the sign.
    e = (u_bits - k.two_thirds) & -(1 << k.mantissa)
    f = add(from_bits(u_bits - e, k.dtype), -1.0, k.fmt)
    log_f = mul(horner(k.L, f, k.fmt), f, k.fmt)
    return sqrt(fma(convert(e, k.fmt), k.LE, log_f, k.fmt), k.fmt)


def pair(seed: int, offset: int, i: int, j: int, k: Transform) -> tuple[int, int]:
    """Radius word and angle word, unsigned, of the pair of column j. For float64 they have 64 bits, with `w` on top."""
    w = words(seed, offset, i, j // 4)
    if k is F64:
        low = words64(seed, offset, i, j // 4)
        w = tuple((high << 32) | rest for high, rest in zip(w, low, strict=True))
    return (w[0], w[1]) if j % 4 < 2 else (w[2], w[3])


@functools.lru_cache(maxsize=4096)  # two neighbouring columns share one evaluation
def transform(a: int, b: int, k: Transform) -> tuple[float, float]:
    """Normals of a pair of words, for the even and the odd column. `b` is unsigned, or signed as the spec reads it."""
    radius = _radius(a, k)
    # Line "y = f(b) * 2^-(w-1);  q = y * y"
    y = mul(convert(_signed(b, k.word), k.fmt), 2.0 ** -(k.word - 1), k.fmt)
    q = mul(y, y, k.fmt)
    # Line "s = horner(S, q) * y;  c = horner(C, q)"
    s = mul(horner(k.S, q, k.fmt), y, k.fmt)
    c = horner(k.C, q, k.fmt)
    # Line "first = R * fma(-s, s, 0.5);  second = R * (s * c)"
    first = mul(radius, fma(-s, s, 0.5, k.fmt), k.fmt)
    second = mul(radius, mul(s, c, k.fmt), k.fmt)
    return first, second


def normal(seed: int, offset: int, i: int, j: int, k: Transform) -> int:
    """Bit pattern of the normal z[i, j]."""
    return bits(_normal(seed, offset, i, j, k), k.dtype)


def _normal(seed: int, offset: int, i: int, j: int, k: Transform) -> float:
    return transform(*pair(seed, offset, i, j, k), k)[j % 2]


def _compute(value: float, fmt: Format) -> float:
    """Round `value` to `fmt`, keeping the sign of a zero."""
    return value if value == 0 or not math.isfinite(value) else round_to(Fraction(value), fmt)


def sample(
    mu: Sequence[float], sigma: Sequence[float], n: int, dtype: str = "float32", seed: int = 0, offset: int = 0,
    shared: bool = False, dim_offset: int = 0, sample_offset: int = 0, antithetic: bool = False,
) -> list[list[int]]:  # fmt: skip
    """The bit patterns of a sample: x[i, j] = fma(sigma[i], z[i, j], mu[i]).

    mu and sigma are rounded to the computing type first: float64 for float64, else float32. With `shared`, every row
    has the noise of row 0; with `antithetic`, z'[i, j] = (-1)^j z[i, j // 2] is in place of z[i, j].
    """
    k = F64 if dtype == "float64" else F32
    rows = []
    for row, (mean, deviation) in enumerate(zip(mu, sigma, strict=True)):
        m, d = _compute(mean, k.fmt), _compute(deviation, k.fmt)
        i = 0 if shared else dim_offset + row
        line = []
        for j in range(sample_offset, sample_offset + n):
            z = _normal(seed, offset, i, j // 2, k) * (-1) ** j if antithetic else _normal(seed, offset, i, j, k)
            x = fma(d, z, m, k.fmt)
            line.append(bits(_compute(x, FORMATS[dtype]), dtype))
        rows.append(line)
    return rows


DIGITS = 40


def real_radius(a: int, k: Transform) -> Real:
    """sqrt(-2 ln u) to 40 digits, u being the binary32 or binary64 number of the spec."""
    with mpmath.workdps(DIGITS):
        return mpmath.sqrt(-2 * mpmath.log(mpmath.mpf(_uniform(a, k))))


def real_transform(a: int, b: int, k: Transform) -> tuple[Real, Real]:
    """The normals of a pair of words in real arithmetic, to 40 digits, from the number u of the spec on."""
    with mpmath.workdps(DIGITS):
        radius, angle = real_radius(a, k), _signed(b, k.word)
        # The spec's real line has t = pi * b * 2^-31; for float64 it starts at y.
        half_turns = mpmath.mpf(convert(angle, BINARY64) if k is F64 else angle) / 2 ** (k.word - 1)
        return radius * mpmath.cospi(half_turns), radius * mpmath.sinpi(half_turns)
