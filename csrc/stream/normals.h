// Standard normals from words: the Box-Muller transform of STREAM.md, with polynomials in place of library functions.
//
// All operations are fixed by IEEE 754 and run in the order written, so that the bits are the same on every machine.
// Only the `fast` functions use the GPU's approximations.
#pragma once

#include "words.h"

namespace multisample {

// Half the cosine and half the sine of an angle.
template <class Real>
struct HalfTurns {
  Real cosine, sine;
};

// The normals of columns 4 g to 4 g + 3.
template <class Real>
struct Normals {
  Real z0, z1, z2, z3;
};

template <class Real>
MULTISAMPLE_HOST_FUNCTION Real horner(Real, Real p) {
  return p;
}
template <class Real, class... Rest>
MULTISAMPLE_HOST_FUNCTION Real horner(Real x, Real p, Real k, Rest... rest) {
  return horner(x, fma_rn(p, x, k), rest...);
}

// Twice the radius, 2 sqrt(-2 ln u), for u in [2^-33, 1 - 2^-24] made from the word a.
MULTISAMPLE_HOST_FUNCTION float radius(u32 a) {
  constexpr i32 kTwoThirds = 0x3F2AAAAB, kBelowOne = 0x3F7FFFFF, kExponent = -0x00800000;
  float u = fma_rn(static_cast<float>(a), 0x1p-32f, 0x1p-33f);
  // Positive floats are ordered like their bit patterns: min(u, 1 - 2^-24) is an integer minimum, which some GPUs fuse
  // with the subtraction.
  i32 x = static_cast<i32>(float_bits(u)) - kTwoThirds;
  x = x < kBelowOne - kTwoThirds ? x : kBelowOne - kTwoThirds;
  i32 e = x & kExponent;
  float f = sub_rn(from_float_bits(static_cast<u32>(x - e + kTwoThirds)), 1.0f);
  // The polynomial is -8 ln(1 + f) / f. The factor of e is -8 ln 2 / 2^23, because e is the exponent times 2^23.
  float l = horner(f, 0x1.3ab066p+0f, -0x1.5e6fdap+0f, 0x1.504890p+0f, -0x1.956702p+0f, 0x1.0013fap+1f, -0x1.55618ap+1f,
                   0x1.ffffd6p+1f, -0x1.fffffap+2f);
  return sqrt_rn(fma_rn(static_cast<float>(e), -0x1.62e430p-21f, mul_rn(l, f)));
}

// Half the cosine and half the sine of the angle pi b / 2^31, in [-pi, pi).
MULTISAMPLE_HOST_FUNCTION HalfTurns<float> half_turns(i32 b) {
  float y = mul_rn(static_cast<float>(b), 0x1p-31f);
  float q = mul_rn(y, y);
  // sin and cos of (pi / 2) y, as polynomials in y^2.
  float s = mul_rn(horner(q, 0x1.3c4b2cp-13f, -0x1.3232fap-8f, 0x1.46676ep-4f, -0x1.4abbb6p-1f, 0x1.921fb4p+0f), y);
  float c = horner(q, 0x1.c2b9a6p-11f, -0x1.55041ap-6f, 0x1.03bdaap-2f, -0x1.3bd3b0p+0f, 0x1.000000p+0f);
  return {fma_rn(negated(s), s, 0.5f), mul_rn(s, c)};
}

// x as a double, rounded once.
#if defined(__x86_64__) && !defined(__CUDA_ARCH__) && !defined(__AVX512DQ__)
// AVX2 and SSE2 cannot convert 64-bit integers. Each 32-bit half is placed in the low bits of a large double. This and
// the subtraction of the large double are exact: only the sum of the halves rounds.
MULTISAMPLE_HOST_FUNCTION double to_double(u64 x) {
  double upper = from_float_bits(x >> 32 | 0x4530000000000000) - (0x1p84 + 0x1p52);
  return upper + from_float_bits((x & 0xFFFFFFFF) | 0x4330000000000000);
}
MULTISAMPLE_HOST_FUNCTION double to_double(i64 x) {
  u64 shifted = static_cast<u64>(x) ^ 0x8000000000000000;
  double upper = from_float_bits(shifted >> 32 | 0x4530000000000000) - (0x1p84 + 0x1p63 + 0x1p52);
  return upper + from_float_bits((shifted & 0xFFFFFFFF) | 0x4330000000000000);
}
#else
MULTISAMPLE_HOST_FUNCTION double to_double(u64 x) { return static_cast<double>(x); }
MULTISAMPLE_HOST_FUNCTION double to_double(i64 x) { return static_cast<double>(x); }
#endif

// Twice the radius, for u in [2^-65, 1 - 2^-53] made from the 64 bits a.
MULTISAMPLE_HOST_FUNCTION double radius(u64 a) {
  constexpr i64 kTwoThirds = 0x3FE5555555555555, kBelowOne = 0x3FEFFFFFFFFFFFFF, kExponent = -0x0010000000000000;
  double u = fma_rn(to_double(a), 0x1p-64, 0x1p-65);
  i64 x = static_cast<i64>(float_bits(u)) - kTwoThirds;
  x = x < kBelowOne - kTwoThirds ? x : kBelowOne - kTwoThirds;
  i64 e = x & kExponent;
  double f = sub_rn(from_float_bits(static_cast<u64>(x - e + kTwoThirds)), 1.0);
  // tests/support/reference/float64_coefficients.py derives the coefficients of this and the next function.
  double l = horner(f, 0x1.62bd204bc581cp-1, -0x1.6b3d2b009ccdcp-1, 0x1.75051d34ad805p-2, -0x1.95b0683003410p-2,
                    0x1.05f7923b08ae0p-1, -0x1.163d9c867621bp-1, 0x1.240d2b1787129p-1, -0x1.3aa95ab6613f6p-1,
                    0x1.555c8ea50386fp-1, -0x1.74624cbe9c486p-1, 0x1.99995b6e873bcp-1, -0x1.c71c4a8c0361ap-1,
                    0x1.0000009ea359dp+0, -0x1.24924977d8d52p+0, 0x1.55555553a1926p+0, -0x1.99999998ecb51p+0,
                    0x1.0000000001068p+1, -0x1.5555555555930p+1, 0x1.ffffffffffffbp+1, -0x1.0000000000000p+3);
  return sqrt_rn(fma_rn(to_double(e), -0x1.62e42fefa39efp-50, mul_rn(l, f)));
}

// Half the cosine and half the sine of the angle pi b / 2^63, in [-pi, pi).
MULTISAMPLE_HOST_FUNCTION HalfTurns<double> half_turns(i64 b) {
  double y = mul_rn(to_double(b), 0x1p-63);
  double q = mul_rn(y, y);
  double s = mul_rn(horner(q, 0x1.8d539c15d9c78p-38, -0x1.6ef2a489bf608p-31, 0x1.e8efa99059688p-25,
                           -0x1.e3074002ed07ap-19, 0x1.507834679cf6bp-13, -0x1.32d2cce5e020ep-8, 0x1.466bc67759f09p-4,
                           -0x1.4abbce625be38p-1, 0x1.921fb54442d18p+0),
                    y);
  double c = horner(q, 0x1.16540fab4bfdcp-34, -0x1.b69367629ce5dp-28, 0x1.f9d2489ceabdep-22, -0x1.a6d1efa85da23p-16,
                    0x1.e1f50680e342bp-11, -0x1.55d3c7e3bf6cfp-6, 0x1.03c1f081b599ap-2, -0x1.3bd3cc9be45dcp+0,
                    0x1.0000000000000p+0);
  return {fma_rn(negated(s), s, 0.5), mul_rn(s, c)};
}

MULTISAMPLE_HOST_FUNCTION Normals<float> normals(const Words& w) {
  float r = radius(w.w0), t = radius(w.w2);
  HalfTurns<float> a = half_turns(static_cast<i32>(w.w1)), b = half_turns(static_cast<i32>(w.w3));
  return {mul_rn(r, a.cosine), mul_rn(r, a.sine), mul_rn(t, b.cosine), mul_rn(t, b.sine)};
}

// The float32 normals of `w`, refined to float64 by the words `fine` of the second block.
MULTISAMPLE_HOST_FUNCTION Normals<double> normals(const Words& w, const Words& fine) {
  double r = radius(static_cast<u64>(w.w0) << 32 | fine.w0), t = radius(static_cast<u64>(w.w2) << 32 | fine.w2);
  HalfTurns<double> a = half_turns(static_cast<i64>(static_cast<u64>(w.w1) << 32 | fine.w1));
  HalfTurns<double> b = half_turns(static_cast<i64>(static_cast<u64>(w.w3) << 32 | fine.w3));
  return {mul_rn(r, a.cosine), mul_rn(r, a.sine), mul_rn(t, b.cosine), mul_rn(t, b.sine)};
}

#ifdef __CUDACC__

// sqrt(-2 ln u) by PTX instructions: every compiler gives the same bits on one GPU model.
MULTISAMPLE_FUNCTION float fast_radius(u32 a) {
  float u = fma_rn(static_cast<float>(a), 0x1p-32f, 0x1p-33f), l, r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(l) : "f"(u));
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(mul_rn(l, -0x1.62e430p+0f)));
  return r;
}

MULTISAMPLE_FUNCTION Normals<float> fast_normals(const Words& w) {
  float r = fast_radius(w.w0), t = fast_radius(w.w2);
  float a = mul_rn(static_cast<float>(static_cast<i32>(w.w1)), 0x1.921fb6p-30f);
  float b = mul_rn(static_cast<float>(static_cast<i32>(w.w3)), 0x1.921fb6p-30f);
  float cos_a, sin_a, cos_b, sin_b;
  asm("cos.approx.ftz.f32 %0, %1;" : "=f"(cos_a) : "f"(a));
  asm("sin.approx.ftz.f32 %0, %1;" : "=f"(sin_a) : "f"(a));
  asm("cos.approx.ftz.f32 %0, %1;" : "=f"(cos_b) : "f"(b));
  asm("sin.approx.ftz.f32 %0, %1;" : "=f"(sin_b) : "f"(b));
  return {mul_rn(r, cos_a), mul_rn(r, sin_a), mul_rn(t, cos_b), mul_rn(t, sin_b)};
}

#endif

}  // namespace multisample
