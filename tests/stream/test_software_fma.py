"""Fused multiply-adds for processors without the instruction: same bits as those of the C library."""

from __future__ import annotations

import ctypes
import itertools
import platform
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
from cuda_cpp import compile_cpp, requires_gxx
from numba import njit
from numba.extending import intrinsic

from multisample.backends.kernels.cpu import intrinsics
from multisample.backends.kernels.stream import arithmetic, normals

Array = np.ndarray[Any, Any]
Function = Callable[[Array, Array, Array], Array]

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have the instruction")

TYPES = ("float32", "float64")

CODE = r"""
#include <math.h>

extern "C" {
void library_float32(unsigned n, const float* x, const float* y, const float* z, float* to) {
  for (unsigned k = 0; k < n; ++k) to[k] = fmaf(x[k], y[k], z[k]);
}
void library_float64(unsigned n, const double* x, const double* y, const double* z, double* to) {
  for (unsigned k = 0; k < n; ++k) to[k] = fma(x[k], y[k], z[k]);
}
}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("fma")
    (folder / "fma.cpp").write_text(CODE)
    compile_cpp("-O3", "-shared", "-fPIC", folder / "fma.cpp", "-o", folder / "fma.so")
    return ctypes.CDLL(str(folder / "fma.so"))


def function(compiled: ctypes.CDLL, name: str, dtype: str) -> Function:
    def call(*operands: Array) -> Array:
        result = np.empty_like(operands[0])
        arrays = [array.ctypes.data_as(ctypes.c_void_p) for array in (*operands, result)]
        getattr(compiled, f"{name}_{dtype}")(len(result), *arrays)
        return result

    return call


def usual(dtype: str, count: int = 100_000) -> tuple[Array, ...]:
    """Operands like those of the transforms."""
    random = np.random.default_rng(1)
    x, y, z = (np.asarray(random.normal(size=count), dtype) for _ in range(3))
    x[::7] = y[::11] = 0
    return x, y, z


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


def fused(x: Array, y: Array, z: Array, result: Array) -> None:
    for k in range(len(result)):
        result[k] = arithmetic.fma(x[k], y[k], z[k])


@pytest.mark.parametrize("dtype", TYPES)
@requires_gxx
def test_numba(compiled: ctypes.CDLL, no_instruction: None, dtype: str) -> None:
    operands = unusual(dtype)
    result = np.empty_like(operands[0])
    njit(fused)(*operands, result)
    assert_same_bits(result, function(compiled, "library", dtype)(*operands))


@intrinsic
def zero(typingctx: Any, x: Any, y: Any, z: Any) -> Any:
    return x(x, x, x), lambda context, builder, signature, args: args[0].type(0.0)


def test_numba_leaves_no_usual_numbers_to_the_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "_library_fma", zero)
    x, y, z = (array[:1000] for array in usual("float64"))
    fused = np.vectorize(njit(arithmetic._fma_in_parts))
    assert np.all(fused(x, y, z) != 0)


@pytest.mark.parametrize("dtype", TYPES)
@requires_gxx
def test_numba_vectors(compiled: ctypes.CDLL, no_instruction: None, dtype: str) -> None:
    operands = unusual(dtype)

    @njit
    def fused(x: Array, y: Array, z: Array, to: Array) -> None:
        for k in range(0, len(to) - 7, 8):
            u, v, w = (
                intrinsics.load_vector(x, k, 8),
                intrinsics.load_vector(y, k, 8),
                intrinsics.load_vector(z, k, 8),
            )
            intrinsics.store_vector(to, k, arithmetic.fma(u, v, w))

    result = np.zeros_like(operands[0])
    fused(*operands, result)
    whole = len(result) // 8 * 8
    assert_same_bits(result[:whole], function(compiled, "library", dtype)(*operands)[:whole])


# The transforms of words. Without the instruction, those of float32 compute multiply-adds in float64: the second
# rounding changes no bit.

TRANSFORMS = r"""
#include "stream/normals.h"

using namespace multisample;

extern "C" void transform(u32 n, const u32* words, float* radii, float* cosines, float* sines) {
  for (u32 k = 0; k < n; ++k) {
    radii[k] = radius(words[k]);
    const HalfTurns<float> turns = half_turns(static_cast<i32>(words[k]));
    cosines[k] = turns.cosine, sines[k] = turns.sine;
  }
}
"""
Transform = Callable[[Array, Array, Array, Array], None]


@pytest.fixture(scope="module")
def fused_transform(tmp_path_factory: pytest.TempPathFactory) -> Transform:
    """The transforms in C++."""
    folder = tmp_path_factory.mktemp("transforms")
    (folder / "transforms.cpp").write_text(TRANSFORMS)
    options = "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"
    compile_cpp(*options, folder / "transforms.cpp", "-o", folder / "transforms.so")
    loaded = ctypes.CDLL(str(folder / "transforms.so"))

    def call(*arrays: Array) -> None:
        loaded.transform(len(arrays[0]), *[array.ctypes.data_as(ctypes.c_void_p) for array in arrays])

    return call


@pytest.fixture
def numba_transform(no_instruction: None) -> Transform:
    """The transforms in Numba without the instruction."""
    # Compiled anew, because other tests share the compiled originals.
    radius, half_turns = njit(normals.radius_f32.py_func), njit(normals.half_turns_f32.py_func)

    def transform(words: Array, radii: Array, cosines: Array, sines: Array) -> None:
        for k in range(len(words)):
            radii[k] = radius(words[k])
            cosines[k], sines[k] = half_turns(np.int32(words[k]))

    compiled: Any = njit(transform)
    compiled(*(np.zeros(1, dtype) for dtype in (np.uint32, np.float32, np.float32, np.float32)))
    for function in radius, half_turns:
        assert not any("llvm.fma" in code for code in function.inspect_llvm().values())
    return cast("Transform", compiled)


def words_by_float(step: int = 1) -> Iterator[Array]:
    """A word for each float32 that words convert to, unsigned and signed; or for every `step`-th."""
    positive = [np.arange(0, 1 << 24, step)]
    positive += [np.arange(1 << 23 + k, 1 << 24 + k, step << k) for k in range(1, 9)]
    for words in positive:
        yield words.astype(np.uint32)
        yield (-words).astype(np.uint32)
    yield np.array([0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 0x80000001], np.uint32)


def assert_same_transforms(one: Transform, other: Transform, words: Iterator[Array]) -> None:
    for piece in words:
        results = [[np.empty(len(piece), np.float32) for _ in range(3)] for _ in range(2)]
        one(piece, *results[0])
        other(piece, *results[1])
        for got, expected in zip(*results, strict=True):
            assert_same_bits(got, expected)


@requires_gxx
def test_transforms_of_some_words(fused_transform: Transform, numba_transform: Transform) -> None:
    assert_same_transforms(numba_transform, fused_transform, words_by_float(1001))


@pytest.mark.slow
@requires_gxx
def test_transforms_of_every_word(fused_transform: Transform, numba_transform: Transform) -> None:
    assert_same_transforms(numba_transform, fused_transform, words_by_float())
