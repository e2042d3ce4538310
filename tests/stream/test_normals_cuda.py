"""The normals on a CUDA device: every word gives the known numbers, and `fast_math` stays near them."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda_memory import known_sums
from skip_rules import require, require_device

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
    found = re.findall(
        r"^MULTISAMPLE_HOST_FUNCTION float radius\(u32 a\) \{$.*?^\}$", sources, re.DOTALL | re.MULTILINE
    )
    assert len(found) == 1
    (text,) = found
    assert text.count("float radius(") == text.count("return sqrt_rn(") == text.count("sqrt_rn") == 1
    text = text.replace("float radius(", "float squared_radius(").replace("return sqrt_rn(", "return (")
    return f"// {csrc_files.digest()}\n" + KERNELS.replace("SQUARED_RADIUS", text)


@pytest.fixture
def over_all_words() -> Callable[..., list[int]]:
    """``over_all_words(kernel, *arguments)``: the three results of a kernel of `KERNELS`."""
    require("cupy")
    cupy = pytest.importorskip("cupy")

    def run(kernel: str, *arguments: Any, options: tuple[str, ...] = ()) -> list[int]:
        from multisample.backends.nvrtc import OPTIONS

        out = cupy.zeros(3, np.uint64)
        module = cupy.RawModule(code=program(), options=(*OPTIONS, *options))
        module.get_function(kernel)((2048,), (256,), (out, *arguments))
        return [int(number) for number in out.get()]

    return run


# Compiler options that a user's environment may add. They must not change any bit.
@pytest.mark.parametrize("options", [(), ("--use_fast_math",)], ids=["as it is", "use_fast_math"])
def test_all_words_give_the_known_sums(over_all_words: Callable[..., list[int]], options: tuple[str, ...]) -> None:
    assert over_all_words("sums", options=options) == known_sums()


def test_the_square_root_is_correctly_rounded_for_every_word(over_all_words: Callable[..., list[int]]) -> None:
    assert over_all_words("wrong_roots")[0] == 0


def largest_of(bits: int) -> float:
    return float(np.array([bits], np.uint32).view(np.float32)[0])


# None stands for every radius word. The numbers stand for the largest radius, a middle one and a small one, each with
# every angle word.
@pytest.mark.parametrize("radius_word", [None, 0, 2**31, 2**32 - 2**20])
def test_fast_normals_are_close_to_portable_normals(over_all_words: Any, radius_word: int | None) -> None:
    nans, above, largest = over_all_words("differences", np.uint32(radius_word or 0), np.uint32(radius_word is None))
    assert nans == 0
    assert largest_of(largest) <= 1e-3
    if radius_word in (None, 2**31):
        assert above <= 2 * 1e-5 * 2**32, above / 2**33
