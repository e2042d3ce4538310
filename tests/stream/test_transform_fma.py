"""Without fused multiply-adds, the transforms of float32 use float64: the second rounding changes no bit."""

import ctypes
import platform
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
from cuda_cpp import compile_cpp, requires_gxx
from numba import njit
from tables import slow_but

from multisample.backends.kernels.stream import arithmetic, normals

Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have the instruction")

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
    return lambda *arrays: loaded.transform(len(arrays[0]), *[x.ctypes.data_as(ctypes.c_void_p) for x in arrays])


@pytest.fixture
def numba_transform(monkeypatch: pytest.MonkeyPatch) -> Transform:
    """The transforms in Numba without the instruction."""
    monkeypatch.setattr(arithmetic, "_has_feature", lambda context, builder, name: False)
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


def words_by_float(step: int) -> Iterator[Array]:
    """A word for every `step`-th float32 that words convert to, unsigned and signed."""
    positive = [np.arange(0, 1 << 24, step)]
    positive += [np.arange(1 << 23 + k, 1 << 24 + k, step << k) for k in range(1, 9)]
    for words in positive:
        yield words.astype(np.uint32)
        yield (-words).astype(np.uint32)
    yield np.array([0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 0x80000001], np.uint32)


@requires_gxx
@pytest.mark.parametrize("step", slow_but([1001], [1001, 1]))
def test_transforms_of_words(fused_transform: Transform, numba_transform: Transform, step: int) -> None:
    for piece in words_by_float(step):
        results = [[np.empty(len(piece), np.float32) for _ in range(3)] for _ in range(2)]
        numba_transform(piece, *results[0])
        fused_transform(piece, *results[1])
        for got, expected in zip(*results, strict=True):
            numbers = ~np.isnan(expected)
            assert np.array_equal(np.isnan(got), ~numbers)
            assert np.array_equal(got[numbers].view("u4"), expected[numbers].view("u4"))
