"""The elements of one row in one group of columns, the unit that a thread draws: ``csrc/cuda/group.cuh``.

A group has four adjacent columns, or eight if they are antithetic pairs: one Philox block makes four normals.
"""

import functools
from typing import Any

import numpy as np

from multisample.backends.element_types import MATRIX_TYPES
from multisample.backends.kernels.compilation import Function, inline
from multisample.backends.kernels.stream.arithmetic import fma, from_float_bits
from multisample.backends.kernels.stream.normals import FLOAT64_KEY, normals_f32, normals_f64
from multisample.backends.kernels.stream.rounding import WIDENING
from multisample.backends.kernels.stream.words import column_part, row_part, stream_key, words
from multisample.backends.launch import ElementType

from .geometry import ANTITHETIC_WIDTH, WIDTH
from .intrinsics import cosine, from_float16, load, log2, narrowing, sine, square_root
from .keys import KernelKey

_NUMBER, _FLOAT32 = int(ElementType.number), int(ElementType.float32)
_TO_UNIT, _TO_UNIT_HALF = np.float32(2.0**-32), np.float32(2.0**-33)
_MINUS_2_LN_2, _TO_ANGLE = np.float32(float.fromhex("-0x1.62e430p+0")), np.float32(float.fromhex("0x1.921fb6p-30"))


# --- mu, sigma and the words of a call ----------------------------------------------------------------------------


def _element(dtype: str, usual: bool) -> Function:
    """``element(vector, stride, kind, row)`` of an input that kernels for matrices of type `dtype` read.

    `kind` is its type. `vector` is an address, or the bits of one number. `usual`: vectors are contiguous.
    """
    row_of_type = MATRIX_TYPES[dtype]
    real, stored = getattr(np, row_of_type.computing), getattr(np, row_of_type.stored)
    size, real_size = row_of_type.size, np.dtype(real).itemsize
    is_narrow, widen = size < real_size, from_float16 if dtype == "float16" else WIDENING[dtype]

    @inline
    def element(vector, stride, kind, row):
        if not usual and kind == _NUMBER:
            return real(from_float_bits(vector))
        if is_narrow and kind != _FLOAT32:
            return widen(load(vector + row * (size if usual else stride), stored))
        return load(vector + row * (real_size if usual else stride), real)

    return element


@inline
def keys_of(call):
    """Both key words of the call's stream. The compiler computes the keys of all rounds from them."""
    k0, k1 = stream_key(call.seed)
    return np.uint32(k0), np.uint32(k1)


@inline
def offset_of(call):
    """The call's offset, by value or in memory."""
    return call.offset if call.offset_at == 0 else load(call.offset_at, np.uint64)


# --- Noise --------------------------------------------------------------------------------------------------------


@inline
def _columns_f32(group, offset, keys):
    return column_part(group, np.uint32(offset), np.uint32(offset >> np.uint64(32)), *keys)


@inline
def _normals_f32(columns, row, keys):
    return normals_f32(words(columns, row, *keys))


@inline
def _fast_radius(a):
    return square_root(log2(fma(np.float32(a), _TO_UNIT, _TO_UNIT_HALF)) * _MINUS_2_LN_2)


@inline
def _fast_normals(columns, row, keys):
    # PTX instructions: every compiler gives the same bits on one GPU model.
    w = words(columns, row, *keys)
    r, t = _fast_radius(w[0]), _fast_radius(w[2])
    a, b = np.float32(np.int32(w[1])) * _TO_ANGLE, np.float32(np.int32(w[3])) * _TO_ANGLE
    return r * cosine(a), r * sine(a), t * cosine(b), t * sine(b)


@inline
def _fine_keys(keys):
    """The keys of the second block of words, which refines float32 to float64."""
    return keys[0], np.uint32(keys[1] ^ FLOAT64_KEY)


@inline
def _columns_f64(group, offset, keys):
    return _columns_f32(group, offset, keys), _columns_f32(group, offset, _fine_keys(keys))


@inline
def _normals_f64(columns, row, keys):
    return normals_f64(words(columns[0], row, *keys), words(columns[1], row, *_fine_keys(keys)))


@functools.cache
def _noise(real: str, shared_noise: bool, fast: bool) -> tuple[Function, Function]:
    """The noise of a computing type, as two functions.

    ``columns = of(group, offset, keys)`` depends on the columns alone. ``in_row(columns, words, keys)`` gives the four
    normals of the row whose `row_part` is `words`.
    """
    of, in_row = _columns_f32, _fast_normals if fast else _normals_f32
    if real == "float64":
        of, in_row = _columns_f64, _normals_f64
    if not shared_noise:
        return of, in_row

    @inline
    def of_row_0(group, offset, keys):
        return in_row(of(group, offset, keys), row_part(np.uint32(0), np.uint32(offset), keys[0]), keys)

    @inline
    def in_any_row(normals, words, keys):
        return normals

    return of_row_0, in_any_row


# --- Elements -----------------------------------------------------------------------------------------------------


@inline
def _scaled(mu, sigma, z):
    return fma(sigma, z[0], mu), fma(sigma, z[1], mu), fma(sigma, z[2], mu), fma(sigma, z[3], mu)


@inline
def _scaled_pairs(mu, sigma, z):
    a, b = _scaled(mu, sigma, z), _scaled(mu, -sigma, z)
    return a[0], b[0], a[1], b[1], a[2], b[2], a[3], b[3]


def group_of(key: KernelKey, capability: tuple[int, int]) -> tuple[Any, ...]:
    """The types and functions with which the kernel `key` computes the elements of a group.

    Returns the computing type; the type of an element in memory, which is its bits if it has 16; the columns of a
    group; both functions of `_noise`; ``scaled(mu, sigma, z)``, the elements from the four normals `z`;
    `_element`; and ``narrow``, from the computing type to that of an element in memory.
    """
    row = MATRIX_TYPES[key.dtype]
    return (
        getattr(np, row.computing), getattr(np, row.stored), ANTITHETIC_WIDTH if key.antithetic else WIDTH,
        *_noise(row.computing, key.shared_noise, key.fast_math), _scaled_pairs if key.antithetic else _scaled,
        _element(key.dtype, key.usual), narrowing(key.dtype, capability),
    )  # fmt: skip
