"""On a CUDA device: every word gives the known numbers, and 10^8 elements of kernels of users are those of `sample`."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda_memory import known_sums
from skip_rules import require, require_device

import multisample
from multisample.backends.native import csrc_files

require_device()

KERNELS = """
#include "stream/normals.h"

namespace multisample {

// The argument of the square root in `radius`.
SQUARED_RADIUS

}  // namespace multisample

using namespace multisample;

#define FOR_EVERY_WORD(w)                                                                            \\
  for (u64 w = blockIdx.x * static_cast<u64>(blockDim.x) + threadIdx.x; w >> 32 == 0;                \\
       w += static_cast<u64>(gridDim.x) * blockDim.x)

extern "C" __global__ void sums(u64* out) {
  u64 radii = 0, cosines = 0, sines = 0;
  FOR_EVERY_WORD(w) {
    const HalfTurns<float> turn = half_turns(static_cast<i32>(static_cast<u32>(w)));
    radii += float_bits(radius(static_cast<u32>(w)));
    cosines += float_bits(turn.cosine);
    sines += float_bits(turn.sine);
  }
  atomicAdd(out, radii);
  atomicAdd(out + 1, cosines);
  atomicAdd(out + 2, sines);
}

// Number of words whose radius differs from sqrt.rn of the same argument.
extern "C" __global__ void wrong_roots(u64* out) {
  u64 wrong = 0;
  FOR_EVERY_WORD(w) {
    float root;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(root) : "f"(squared_radius(static_cast<u32>(w))));
    wrong += float_bits(root) != float_bits(radius(static_cast<u32>(w)));
  }
  atomicAdd(out, wrong);
}

struct Difference {
  u64 nans = 0, above = 0;
  u32 largest = 0;  // bits of a nonnegative float, which have the order of the numbers

  __device__ void add(float fast, float portable) {
    const float difference = fabsf(fast - portable);
    nans += fast != fast;
    above += !(difference <= 1e-5f);
    largest = float_bits(difference) > largest ? float_bits(difference) : largest;
  }
  __device__ void put(u64* out) const {
    atomicAdd(out, nans);
    atomicAdd(out + 1, above);
    atomicMax(out + 2, static_cast<u64>(largest));
  }
};

// With every_radius, each radius word has another angle word, so that every angle word occurs once.
extern "C" __global__ void differences(u64* out, u32 radius_word, u32 every_radius) {
  Difference first, second;
  FOR_EVERY_WORD(w) {
    const u32 word = static_cast<u32>(w);
    const u32 a = every_radius ? word : radius_word, b = every_radius ? word * 0x9E3779B1u : word;
    const Words words{a, b, a, b};
    const Normals<float> fast = fast_normals(words), portable = normals(words);
    first.add(fast.z0, portable.z0);
    second.add(fast.z3, portable.z3);
  }
  first.put(out);
  second.put(out);
}
"""


def program() -> str:
    """`KERNELS` with the current source of `radius`."""
    sources = (csrc_files.folder() / "stream/normals.h").read_text()
    (text,) = re.findall(r"^MULTISAMPLE_HOST_FUNCTION float radius\(u32 a\) \{$.*?^\}$", sources, re.S | re.M)
    assert text.count("float radius(") == text.count("return sqrt_rn(") == text.count("sqrt_rn") == 1
    text = text.replace("float radius(", "float squared_radius(").replace("return sqrt_rn(", "return (")
    return f"// {csrc_files.digest()}\n" + KERNELS.replace("SQUARED_RADIUS", text)


@pytest.fixture
def over_all_words() -> Callable[..., list[int]]:
    """``over_all_words(kernel, *arguments)``: the three results of a kernel of `KERNELS`."""
    require("cupy")
    cupy = pytest.importorskip("cupy")

    def run(kernel: str, *arguments: Any, options: tuple[str, ...] = ()) -> list[int]:
        from cuda_cpp import NVRTC_OPTIONS

        out = cupy.zeros(3, np.uint64)
        module = cupy.RawModule(code=program(), options=(*NVRTC_OPTIONS[:2], *options))  # CuPy adds the third.
        module.get_function(kernel)((2048,), (256,), (out, *arguments))
        return [int(number) for number in out.get()]

    return run


# Compiler options that a user's environment may add. They must not change any bit.
@pytest.mark.parametrize("options", [(), ("--use_fast_math",)], ids=["as it is", "use_fast_math"])
def test_all_words_give_the_known_sums(over_all_words: Callable[..., list[int]], options: tuple[str, ...]) -> None:
    assert over_all_words("sums", options=options) == known_sums()


def test_the_square_root_is_correctly_rounded_for_every_word(over_all_words: Callable[..., list[int]]) -> None:
    assert over_all_words("wrong_roots")[0] == 0


# None stands for every radius word. The numbers stand for the largest radius, a middle one and a small one, each with
# every angle word.
@pytest.mark.parametrize("radius_word", [None, 0, 2**31, 2**32 - 2**20])
def test_fast_normals_are_close_to_portable_normals(over_all_words: Any, radius_word: int | None) -> None:
    nans, above, largest = over_all_words("differences", np.uint32(radius_word or 0), np.uint32(radius_word is None))
    assert nans == 0
    assert np.uint32(largest).view(np.float32) <= 1e-3
    if radius_word in (None, 2**31):
        assert above <= 2 * 1e-5 * 2**32, above / 2**33


ROWS, COLUMNS = 1000, 102_400
"""A window of 10^8 elements, a multiple of 4 THREADS. It ends at the last row, and crosses column 2^32."""
SEED, OFFSET, FIRST_ROW, FIRST_COLUMN = 2**64 - 3, 2**63 + 5, 2**32 - ROWS, 2**32 - COLUMNS // 2
WINDOW: dict[str, Any] = {"seed": multisample.Key(SEED, OFFSET), "dim_offset": FIRST_ROW, "sample_offset": FIRST_COLUMN}
THREADS = 256
# Keeps z = -0.0, which a mean of 0.0 would turn into 0.0.
MEAN = -0.0

USER_KERNELS = r"""
#include <multisample/normal.h>

typedef unsigned long long u64;

template <class Real>
__device__ void put(Real* at, const multisample::Normals<Real>& z) {
  at[0] = z.z0, at[1] = z.z1, at[2] = z.z2, at[3] = z.z3;
}

#define ELEMENTS(name, Real, function)                                                                        \
  extern "C" __global__ void name(u64 seed, u64 offset, u64 row, u64 column, u64 columns, Real* z) {          \
    const u64 k = u64(blockIdx.x) * blockDim.x + threadIdx.x;                                                 \
    z[k] = multisample::Stream(seed, offset).function(row + k / columns, column + k % columns);              \
  }
#define GROUPS(name, Real, function)                                                                          \
  extern "C" __global__ void name(u64 seed, u64 offset, u64 row, u64 column, u64 columns, Real* z) {          \
    const u64 k = u64(blockIdx.x) * blockDim.x + threadIdx.x, groups = columns / 4;                           \
    put(z + 4 * k, multisample::Stream(seed, offset).function(row + k / groups, column / 4 + k % groups));    \
  }
ELEMENTS(normal, float, normal)
ELEMENTS(normal_f64, double, normal_f64)
ELEMENTS(fast_normal, float, fast_normal)
GROUPS(normals4, float, normals4)
GROUPS(normals4_f64, double, normals4_f64)
GROUPS(fast_normals4, float, fast_normals4)
"""


@pytest.fixture
def cupy() -> Any:
    require("cupy")
    import cupy

    return cupy


@pytest.fixture
def torch() -> Any:
    require("torch_ext")
    import torch

    return torch


@pytest.mark.parametrize("options", [(), ("--use_fast_math",)], ids=["plain", "use_fast_math"])
@pytest.mark.parametrize("kernel", ["normal", "normals4", "normal_f64", "normals4_f64", "fast_normal", "fast_normals4"])
def test_nvrtc(cupy: Any, kernel: str, options: tuple[str, ...]) -> None:
    module = cupy.RawModule(code=USER_KERNELS, options=("-std=c++17", f"-I{multisample.get_include()}", *options))
    dtype, fast = ("float64" if "f64" in kernel else "float32"), kernel.startswith("fast")
    mean = cupy.full(ROWS, MEAN, dtype)
    x = multisample.sample(mean, 1.0, COLUMNS, backend="cupy", dtype=dtype, fast_math=fast, **WINDOW)
    z = cupy.empty_like(x)
    arguments = *map(np.uint64, (SEED, OFFSET, FIRST_ROW, FIRST_COLUMN, COLUMNS)), z
    blocks = z.size // (4 if "4" in kernel.removesuffix("_f64") else 1) // THREADS
    module.get_function(kernel)((blocks,), (THREADS,), arguments)
    integer = "u8" if dtype == "float64" else "u4"
    assert bool((z.view(integer) == x.view(integer)).all())


@pytest.fixture
def cuda() -> Any:
    require("numba")
    from numba import cuda

    return cuda


@pytest.mark.parametrize("fastmath", [False, True])
@pytest.mark.parametrize("name", ["normal", "normals4", "normal_f64", "normals4_f64"])
def test_numba(cuda: Any, name: str, fastmath: bool) -> None:
    function = getattr(multisample.numba, name)

    def elements(seed, offset, row, column, columns, z):  # type: ignore[no-untyped-def]
        k = cuda.grid(1)
        z[k] = function(seed, offset, row + k // columns, column + k % columns)

    def groups(seed, offset, row, column, columns, z):  # type: ignore[no-untyped-def]
        k = cuda.grid(1)
        per_row = columns // 4
        z0, z1, z2, z3 = function(seed, offset, row + k // per_row, column // 4 + k % per_row)
        z[4 * k] = z0
        z[4 * k + 1] = z1
        z[4 * k + 2] = z2
        z[4 * k + 3] = z3

    dtype = np.dtype("float64" if "f64" in name else "float32")
    kernel = cuda.jit(groups if "4" in name.removesuffix("_f64") else elements, fastmath=fastmath)
    z = cuda.device_array(ROWS * COLUMNS, dtype)
    blocks = z.size // (4 if "4" in name.removesuffix("_f64") else 1) // THREADS
    kernel[blocks, THREADS](np.uint64(SEED), np.uint64(OFFSET), FIRST_ROW, FIRST_COLUMN, COLUMNS, z)
    mean = cuda.to_device(np.full(ROWS, MEAN, dtype))
    x = multisample.sample(mean, 1.0, COLUMNS, backend="numba", dtype=dtype.name, **WINDOW)
    integer = f"u{dtype.itemsize}"
    assert np.array_equal(z.copy_to_host().view(integer), x.copy_to_host().view(integer).ravel())


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
def test_triton(torch: Any, fused: bool) -> None:
    pytest.importorskip("triton")
    import triton_kernels

    x = multisample.sample(torch.full((ROWS,), MEAN, device="cuda"), 1.0, COLUMNS, backend="torch_ext", **WINDOW)
    for kernel, per_program in ((triton_kernels.elements, 1024), (triton_kernels.groups, 4 * 1024)):
        z = torch.empty_like(x)
        place, grid = (SEED, OFFSET, FIRST_ROW, FIRST_COLUMN, COLUMNS), (ROWS, -(-COLUMNS // per_program))
        kernel[grid](*place, z, 1024, enable_fp_fusion=fused)
        assert torch.equal(z.view(torch.int32), x.view(torch.int32))
        # A fused addition would have other bits.
        shifted = torch.empty_like(x)
        kernel[grid](*place, shifted, 1024, 0.7, enable_fp_fusion=fused)
        assert torch.equal(shifted.view(torch.int32), (x + np.float32(0.7)).view(torch.int32))
