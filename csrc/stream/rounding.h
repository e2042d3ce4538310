// Widening and rounding of element types, without cuda_fp16.h, which NVRTC may lack. Every compiler and
// every GPU gives the same bits, except those of a NaN.
#pragma once

#include "arithmetic.h"

namespace multisample {

// 16-bit floating-point formats, as bit patterns.
struct float16 {
  u16 bits;
};
struct bfloat16 {
  u16 bits;
};

MULTISAMPLE_FUNCTION float widen(bfloat16 x) { return from_float_bits(static_cast<u32>(x.bits) << 16); }

MULTISAMPLE_FUNCTION float widen(float16 x) {
#ifdef __CUDACC__
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
#else
  u32 sign = static_cast<u32>(x.bits & 0x8000) << 16, magnitude = static_cast<u32>(x.bits & 0x7FFF) << 13;
  // As a float32, these bits have an exponent that is 112 too small, and a subnormal is still subnormal. One exact
  // product corrects both.
  float y = from_float_bits(magnitude) * 0x1p112f;
  bool special = magnitude >= 0x0F800000u;
  return from_float_bits((special ? magnitude | 0x7F800000u : float_bits(y)) | sign);
#endif
}

// One of two types: NVRTC has no std::conditional.
template <bool first, class First, class Second>
struct Choice {
  using Type = First;
};
template <class First, class Second>
struct Choice<false, First, Second> {
  using Type = Second;
};

// The computing type for elements of type Out.
template <class Out>
using Computing = typename Choice<sizeof(Out) == 8, double, float>::Type;

// Rounds to the computing type.
template <class Real, class From>
MULTISAMPLE_FUNCTION Real rounded(From x) {
  if constexpr (sizeof(Real) == sizeof(From)) {
    return x;
  } else if constexpr (sizeof(Real) == sizeof(float)) {
    return to_float(x);
  } else {
    return to_double(x);
  }
}

// Converts an element of mu, sigma or a weight to the computing type.
template <class Real, class T>
MULTISAMPLE_FUNCTION Real converted(T x) {
  if constexpr (__is_class(T)) {  // a type that C++ lacks
    return rounded<Real>(widen(x));
  } else if constexpr (T(0.5f) != 0) {
    return rounded<Real>(x);
  } else {
    return static_cast<Real>(x);
  }
}

// Rounds a number of the computing type to the type of an element. Narrower types have specializations.
template <class Out, class Real>
MULTISAMPLE_FUNCTION Out narrow(Real x) {
  return x;
}

#ifdef __CUDACC__
template <>
MULTISAMPLE_FUNCTION float16 narrow<float16>(float x) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return {bits};
}
#endif

template <>
MULTISAMPLE_FUNCTION bfloat16 narrow<bfloat16>(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  u16 narrowed;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrowed) : "f"(x));
  return {narrowed};
#else
  u32 bits = float_bits(x);
  // Adding just under half a unit carries into the upper half exactly when the value rounds up.
  u32 rounded = bits + 0x7FFFu + (bits >> 16 & 1);
  u32 chosen = (bits & 0x7FFFFFFFu) > 0x7F800000u ? bits | 0x00400000u : rounded;
  return {static_cast<u16>(chosen >> 16)};
#endif
}

}  // namespace multisample
