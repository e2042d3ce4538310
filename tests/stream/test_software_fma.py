"""Fused multiply-adds for processors without the instruction: same bits as those of the C library."""

from __future__ import annotations

import ctypes
import ctypes.util
import itertools
import platform
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numba import njit
from numba.extending import intrinsic
from tables import slow_but

from multisample.backends.kernels.cpu import intrinsics
from multisample.backends.kernels.stream import arithmetic, normals

Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have the instruction")

TYPES = ("float32", "float64")


def by_library(*operands: Array) -> Array:
    """The multiply-adds of the C library."""
    is_double, result = operands[0].itemsize == 8, np.empty_like(operands[0])
    function = getattr(ctypes.CDLL(ctypes.util.find_library("m")), "fma" if is_double else "fmaf")
    function.restype = ctypes.c_double if is_double else ctypes.c_float
    function.argtypes = [function.restype] * 3

    @njit
    def fill(x: Array, y: Array, z: Array, to: Array) -> None:
        for k in range(len(to)):
            to[k] = function(x[k], y[k], z[k])

    fill(*operands, result)
    return result


def unusual(dtype: str, count: int = 20_000) -> tuple[Array, ...]:
    """Operands at which an emulation may fail."""
    random, info = np.random.default_rng(2), np.finfo(dtype)
    digits, sign = info.nmant + 1, random.choice([-1.0, 1.0], count)

    def scaled(low: int, high: int) -> Array:
        with np.errstate(over="ignore"):
            return np.ldexp(np.asarray(random.normal(size=count), dtype), random.integers(low, high, count))

    x, y = scaled(-3, 3), scaled(-3, 3)
    # Products of `digits` + 1 bits that end in 1: each is halfway between two numbers.
    odd = 2 * random.integers(2 ** (digits // 2 - 1), 2 ** (digits // 2), (2, count)) + 1
    middle = odd.astype(dtype)
    tiny = np.ldexp(np.asarray(sign, dtype), random.integers(info.minexp, -digits, count))
    special = [0.0, 1.0, info.smallest_subnormal, info.smallest_normal, info.max, 2.0**-digits, np.inf]
    special = [np.array([*special, *(-value for value in special), np.nan], dtype)] * 3
    small, large = (info.minexp // 2 - 9, info.minexp // 2 + 9), (info.maxexp // 2 - 3, info.maxexp // 2)
    anything = info.minexp, info.maxexp
    cases = [
        (scaled(-20, 20), scaled(-20, 20), scaled(-40, 40)),
        (scaled(*anything), scaled(*anything), scaled(*anything)),
        (scaled(*small), scaled(*small), scaled(info.minexp - digits, info.minexp + 9)),
        (scaled(*large), scaled(*large), scaled(info.maxexp - 4, info.maxexp)),
        (x, y, -x * y),
        (x, y, np.nextafter(-x * y, tiny)),
        (middle[0], middle[1], tiny),
        (middle[0], middle[1], np.ldexp(tiny, -info.minexp // 2)),
        (middle[0], middle[1], np.zeros(count, dtype)),
        tuple(np.array(list(itertools.product(*special))).T),
    ]
    return tuple(np.ascontiguousarray(np.concatenate(parts), dtype) for parts in zip(*cases, strict=True))


def assert_same_bits(got: Array, expected: Array) -> None:
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.isnan(got), ~numbers)
    word = f"u{expected.itemsize}"
    assert np.array_equal(got[numbers].view(word), expected[numbers].view(word))


@pytest.fixture
def no_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "_has_fma", lambda context, builder: False)


@pytest.mark.parametrize("dtype", TYPES)
def test_numba(no_instruction: None, dtype: str) -> None:
    operands = unusual(dtype)
    result = np.empty_like(operands[0])

    @njit
    def fused(x: Array, y: Array, z: Array, to: Array) -> None:
        for k in range(len(to)):
            to[k] = arithmetic.fma(x[k], y[k], z[k])

    fused(*operands, result)
    assert_same_bits(result, by_library(*operands))


@intrinsic
def zero(typingctx: Any, x: Any, y: Any, z: Any) -> Any:
    return x(x, x, x), lambda context, builder, signature, args: args[0].type(0.0)


def test_numba_leaves_no_usual_numbers_to_the_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "_library_fma", zero)
    # Operands like those of the transforms.
    x, y, z = np.random.default_rng(1).normal(size=(3, 1000))
    x[::7] = y[::11] = 0
    assert np.all(np.vectorize(njit(arithmetic._fma_in_parts))(x, y, z) != 0)


@pytest.mark.parametrize("dtype", TYPES)
def test_numba_vectors(no_instruction: None, dtype: str) -> None:
    operands = unusual(dtype)

    @njit
    def fused(x: Array, y: Array, z: Array, to: Array) -> None:
        for k in range(0, len(to) - 7, 8):
            u, v = intrinsics.load_vector(x, k, 8), intrinsics.load_vector(y, k, 8)
            intrinsics.store_vector(to, k, arithmetic.fma(u, v, intrinsics.load_vector(z, k, 8)))

    result = np.zeros_like(operands[0])
    fused(*operands, result)
    whole = len(result) // 8 * 8
    assert_same_bits(result[:whole], by_library(*operands)[:whole])


# --- Transforms -----------------------------------------------------------------------------------


def transform_compiled() -> tuple[Any, bool]:
    """A compiled function that fills three arrays with the radii and half turns of words; whether it has LLVM's FMA."""
    # Compiled anew, because other tests share the compiled originals.
    radius, half_turns = njit(normals.radius_f32.py_func), njit(normals.half_turns_f32.py_func)

    @njit
    def transform(words: Array, radii: Array, cosines: Array, sines: Array) -> None:
        for k in range(len(words)):
            radii[k] = radius(words[k])
            cosines[k], sines[k] = half_turns(np.int32(words[k]))

    transform(*(np.zeros(1, dtype) for dtype in (np.uint32, np.float32, np.float32, np.float32)))
    code = [*radius.inspect_llvm().values(), *half_turns.inspect_llvm().values()]
    return transform, any("llvm.fma" in text for text in code)


def words_by_float(step: int) -> Iterator[Array]:
    """A word for each float32 that words convert to, unsigned and signed, or for every `step`-th."""
    positive = [np.arange(0, 1 << 24, step)]
    positive += [np.arange(1 << 23 + k, 1 << 24 + k, step << k) for k in range(1, 9)]
    for words in positive:
        yield words.astype(np.uint32)
        yield (-words).astype(np.uint32)
    yield np.array([0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 0x80000001], np.uint32)


@pytest.mark.parametrize("step", slow_but([1001], [1001, 1]))
def test_transforms_keep_their_bits(step: int) -> None:
    """Without the instruction, float32 transforms compute in float64: the second rounding changes no bit.

    test_normals.py compares the transforms with the reference.
    """
    usual, _ = transform_compiled()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arithmetic, "_has_fma", lambda context, builder: False)
        without, has_fma = transform_compiled()
    assert not has_fma
    for words in words_by_float(step):
        results = np.empty((2, 3, len(words)), np.float32)
        usual(words, *results[0])
        without(words, *results[1])
        assert_same_bits(results[1], results[0])
