"""The stream in Triton kernels, on NVIDIA GPUs and in Triton's interpreter: float32 normals for blocks of indices.

Element ``z[i, j]`` of the matrix of standard normals is a function of ``(seed, offset, i, j)``. These functions return
it with the bits that `multisample.sample` has by default (not those of ``fast_math=True``), so that a kernel need not
read noise from memory.

Triton may fuse a multiplication with an addition, here or in the caller (``enable_fp_fusion``). So every product is an
instruction of its own that compilers do not fuse. With ``TRITON_INTERPRET=1``, kernels run on the CPU, with equal bits.
"""

from __future__ import annotations

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    raise ImportError("multisample.triton needs Triton: pip install triton") from error

from multisample.backends.kernels.stream.normals import C32, L32, LE32, S32
from multisample.backends.kernels.stream.words import KEY_0, KEY_1

__all__ = ["normal", "normals4"]

# Triton reads only those globals that are constexpr.
_KEYS = tl.constexpr(int(KEY_1) << 32 | int(KEY_0))
_L, _S, _C = (tl.constexpr(tuple(map(float, coefficients))) for coefficients in (L32, S32, C32))
_LE = tl.constexpr(float(LE32))
# The bits of 2/3, and the mask of a float's sign and exponent.
_TWO_THIRDS, _EXPONENT = tl.constexpr(0x3F2AAAAB), tl.constexpr(-0x00800000)
# The bits of the largest float32 below 1, minus those of 2/3.
_BELOW_ONE = tl.constexpr(0x3F7FFFFF - 0x3F2AAAAB)
_TO_UNIT, _TO_UNIT_HALF, _TO_HALF_TURNS = tl.constexpr(2.0**-32), tl.constexpr(2.0**-33), tl.constexpr(2.0**-31)


@triton.jit
def _product(x, y):
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=r,r,r", [x, y], tl.float32, is_pure=True, pack=1)


@triton.jit
def _negated(x):
    # Some versions of Triton compile -x to 0 - x.
    return tl.inline_asm_elementwise("neg.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def _sqrt(x):
    # Correctly rounded for every squared radius that a word can produce. This avoids the slow path of sqrt.rn.f32.
    y = tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)
    g = _product(x, y)
    return tl.fma(_product(y, 0.5), tl.fma(_negated(g), g, x), g)


@triton.jit
def _wide_product(x, multiplier):
    # One instruction; tl.philox computes the same words with two.
    multiplier = tl.cast(multiplier, tl.uint32)
    return tl.inline_asm_elementwise(
        "mul.wide.u32 $0, $1, $2;", "=l,r,r", [x, multiplier], tl.uint64, is_pure=True, pack=1
    )


_fma = tl.fma

if type(_product).__name__ == "InterpretedFunction":
    # Triton's interpreter has no assembly, and its fma rounds twice. It does not fuse other operations.
    _L, _S, _C = (coefficients.value for coefficients in (_L, _S, _C))

    @triton.jit
    def _product(x, y):
        return x * y

    @triton.jit
    def _negated(x):
        return x * -1.0

    @triton.jit
    def _sqrt(x):
        return tl.sqrt_rn(x)

    @triton.jit
    def _wide_product(x, multiplier):
        return x.to(tl.uint64) * multiplier

    @triton.jit
    def _fma(x, y, z):
        # The product is exact in float64. Round the sum to odd, so that rounding to float32 is the only rounding.
        product = x.to(tl.float64) * y
        total = product + z
        added = total - product
        error = (product - (total - added)) + (z - added)
        bits = total.to(tl.int64, bitcast=True)
        odd = tl.where((error > 0) == (total > 0), bits + 1, bits - 1)
        bits = tl.where((error != 0) & ((bits & 1) == 0), odd, bits)
        return bits.to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def _horner(coefficients: tl.constexpr, x):
    p = _fma(x, coefficients[0], coefficients[1])
    for k in tl.static_range(2, len(coefficients)):
        p = _fma(p, x, coefficients[k])
    return p


@triton.jit
def _radius(a):
    """Twice the radius, 2 sqrt(-2 ln u), of the words `a`."""
    u = _fma(a.to(tl.float32), _TO_UNIT, _TO_UNIT_HALF)
    x = tl.minimum(u.to(tl.int32, bitcast=True) - _TWO_THIRDS, _BELOW_ONE)
    e = x & _EXPONENT
    f = (x - e + _TWO_THIRDS).to(tl.float32, bitcast=True) - 1.0
    return _sqrt(_fma(e.to(tl.float32), _LE, _product(_horner(_L, f), f)))


@triton.jit
def _half_turns(b):
    """Half the cosine and half the sine of the angles pi b / 2^31 of the words `b`."""
    y = _product(b.to(tl.int32, bitcast=True).to(tl.float32), _TO_HALF_TURNS)
    q = _product(y, y)
    s = _product(_horner(_S, q), y)
    return _fma(_negated(s), s, 0.5), _product(s, _horner(_C, q))


@triton.jit
def _words(seed, offset, i, g):
    seed, offset = tl.cast(seed, tl.uint64) ^ _KEYS, tl.cast(offset, tl.uint64)
    c0, c1, c2, c3 = tl.cast(g, tl.uint32), tl.cast(i, tl.uint32), offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        p0, p1 = _wide_product(c0, 0xD2511F53), _wide_product(c2, 0xCD9E8D57)
        c0, c2 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = p1.to(tl.uint32), p0.to(tl.uint32)
        # Triton's debug mode would report the overflow.
        k0, k1 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False), tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def normal(seed, offset, i, j):
    """The float32 normals ``z[i, j]`` of blocks of indices.

    Parameters
    ----------
    seed, offset : int
        64-bit parts of the `Key` passed to `sample` as ``seed=``. In `sample`, ``seed=7`` means offset 0.
    i : block of integers, or int
        Rows, ``dim_offset`` + dimension, less than 2**32; 0 for ``noise="shared"``. Not checked.
    j : block of integers, or int
        Columns, ``sample_offset`` + sample, less than 2**34 (as int64). Not checked. `i` and `j` are broadcast.

    Returns
    -------
    block of float32

    Examples
    --------
    >>> import triton
    >>> import triton.language as tl
    >>> import multisample
    >>> @triton.jit
    ... def diffuse(x, n, seed, step, BLOCK: tl.constexpr):
    ...     j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ...     moved = tl.load(x + j, j < n) + multisample.triton.normal(seed, 0, step, j)
    ...     tl.store(x + j, moved, j < n)
    """
    w0, w1, w2, w3 = _words(seed, offset, i, j >> 2)
    second = (j & 2) != 0
    cosine, sine = _half_turns(tl.where(second, w3, w1))
    return _product(_radius(tl.where(second, w2, w0)), tl.where((j & 1) != 0, sine, cosine))


@triton.jit
def normals4(seed, offset, i, g):
    """The float32 normals of rows `i` in columns ``4 g`` to ``4 g + 3``, for less than the price of two.

    Parameters
    ----------
    seed, offset, i : int or block of integers
        As for `normal`.
    g : block of integers, or int
        ``j // 4``, less than 2**32. Not checked. `i` and `g` are broadcast.

    Returns
    -------
    tuple of four blocks of float32

    Examples
    --------
    >>> import triton
    >>> import triton.language as tl
    >>> import multisample
    >>> @triton.jit
    ... def fill(x, n, seed, BLOCK: tl.constexpr):
    ...     g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ...     z0, z1, z2, z3 = multisample.triton.normals4(seed, 0, 0, g)
    ...     z = tl.join(tl.join(z0, z2), tl.join(z1, z3)).reshape(4 * BLOCK)
    ...     j = tl.program_id(0) * 4 * BLOCK + tl.arange(0, 4 * BLOCK)
    ...     tl.store(x + j, z, j < n)
    """
    w0, w1, w2, w3 = _words(seed, offset, i, g)
    r, t = _radius(w0), _radius(w2)
    c, s = _half_turns(w1)
    d, v = _half_turns(w3)
    return _product(r, c), _product(r, s), _product(t, d), _product(t, v)
