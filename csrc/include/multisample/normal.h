// The normals of multisample.sample as functions, for your own CUDA C++ and C++ code.
//
// Compile with -I and the folder that multisample.get_include() returns, by nvcc, NVRTC, g++ or clang++, as C++17.
// `Stream` and `Normals`, and the functions of `Stream`, stay as they are until the next major version. All other names
// in these headers may change.
//
// The bits are those of multisample.sample under any options of nvcc and NVRTC, and under any -O, -march and
// -ffp-contract of a host compiler. Host code must not be compiled with -ffast-math. Your own arithmetic is compiled as
// you ask: multisample.sample computes fma(sigma, z, mu).
#pragma once

#if __cplusplus < 201703L && !(defined(_MSVC_LANG) && _MSVC_LANG >= 201703L)
#error "multisample/normal.h: needs C++17: compile with -std=c++17 or newer"
#endif

#include "../../stream/normals.h"

namespace multisample {

// The matrix z of standard normals of a seed and an offset, in float32 and in float64. Element (i, j) is a pure
// function of (seed, offset, i, j). Indices are not checked: i < 2^32, j < 2^34.
//
// seed, offset: what multisample.sample gets as seed=multisample.Key(seed, offset); seed=7 means offset 0.
// i: the row, dim_offset + dimension; 0 for noise="shared".
// j: the column, sample_offset + sample.
// g: j / 4. One block of random words gives columns 4 g to 4 g + 3, so that four normals cost little more than one.
//
// The constructor computes the keys of the seed: a dozen instructions in a kernel, or none if the host makes the Stream
// and passes it as an argument (104 bytes).
class Stream {
 public:
  MULTISAMPLE_HOST_FUNCTION explicit Stream(u64 seed, u64 offset = 0)
      : keys_(round_keys(seed, kKey1)), seed_(seed), o0_(low(offset)), o1_(high(offset)), sign_(hidden_sign()) {}

  // float32: z[i, j], bit for bit as in multisample.sample.
  MULTISAMPLE_HOST_FUNCTION float normal(u64 i, u64 j) const { return at(j, normals(pair(j, block(i, j / 4, keys_)))); }
  // z[i, 4 g] to z[i, 4 g + 3], for structured bindings: auto [z0, z1, z2, z3] = stream.normals4(i, g);
  MULTISAMPLE_HOST_FUNCTION Normals<float> normals4(u64 i, u64 g) const { return all(normals(block(i, g, keys_))); }

  // float64: the same normals, refined.
  MULTISAMPLE_HOST_FUNCTION double normal_f64(u64 i, u64 j) const {
    return at(j, normals(pair(j, block(i, j / 4, keys_)), pair(j, block(i, j / 4, fine_keys()))));
  }
  MULTISAMPLE_HOST_FUNCTION Normals<double> normals4_f64(u64 i, u64 g) const {
    return all(normals(block(i, g, keys_), block(i, g, fine_keys())));
  }

#ifdef __CUDACC__
  // As with sample(..., fast_math=True): the GPU's approximate functions, within 1e-3 of `normal`.
  MULTISAMPLE_FUNCTION float fast_normal(u64 i, u64 j) const {
    return at(j, fast_normals(pair(j, block(i, j / 4, keys_))));
  }
  MULTISAMPLE_FUNCTION Normals<float> fast_normals4(u64 i, u64 g) const { return fast_normals(block(i, g, keys_)); }
#endif

 private:
  MULTISAMPLE_HOST_FUNCTION RoundKeys fine_keys() const { return round_keys(seed_, kKey1 ^ kFloat64Key); }

  MULTISAMPLE_HOST_FUNCTION Words block(u64 i, u64 g, const RoundKeys& keys) const {
    return words(column_part(low(g), o0_, o1_, keys), row_part(low(i), o0_, keys), keys);
  }

  // The pair of words of column j, twice. The compiler drops the second pair of normals, which are not used.
  MULTISAMPLE_HOST_FUNCTION static Words pair(u64 j, const Words& w) {
    const u32 a = j & 2 ? w.w2 : w.w0, b = j & 2 ? w.w3 : w.w1;
    return {a, b, a, b};
  }

  template <class Real>
  MULTISAMPLE_HOST_FUNCTION Real at(u64 j, const Normals<Real>& z) const {
    return uncontracted(j & 1 ? z.z1 : z.z0);
  }

  template <class Real>
  MULTISAMPLE_HOST_FUNCTION Normals<Real> all(const Normals<Real>& z) const {
    return {uncontracted(z.z0), uncontracted(z.z1), uncontracted(z.z2), uncontracted(z.z3)};
  }

  // z + -0, which is z. A host compiler may contract this addition with the product that made z: no bit changes. After
  // it, no compiler can contract the product with an addition of the caller. The compiler cannot drop the addition: it
  // does not know that sign_ makes -0.
  MULTISAMPLE_HOST_FUNCTION static u32 hidden_sign() {
    u32 sign = 0x80000000u;
    asm("" : "+r"(sign));
    return sign;
  }
#ifdef __CUDA_ARCH__
  template <class Real>
  MULTISAMPLE_HOST_FUNCTION Real uncontracted(Real z) const {
    return z;
  }
#else
  MULTISAMPLE_HOST_FUNCTION float uncontracted(float z) const { return z + from_float_bits(sign_); }
  MULTISAMPLE_HOST_FUNCTION double uncontracted(double z) const {
    return z + from_float_bits(static_cast<u64>(sign_) << 32);
  }
#endif

  RoundKeys keys_;
  u64 seed_;
  u32 o0_, o1_, sign_;
};

}  // namespace multisample
