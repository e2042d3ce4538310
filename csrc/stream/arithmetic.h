// Arithmetic for nvcc, NVRTC (which has no standard library) and C++ compilers for the CPU. Every operation below is
// one IEEE 754 operation, rounded to nearest even, and never contracted: on the GPU it is inline PTX or an intrinsic.
// On the CPU, -ffp-contract=off forbids contraction in our libraries. In other code, a compiler could contract only the
// product that makes a normal, with an addition of the caller. include/multisample/normal.h prevents that. Only
// `transform_fma` of floats, on processors without FMA, rounds twice. Its product is exact, so that contraction changes
// nothing.
#pragma once

#if !defined(__CUDA_ARCH__) && (defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__))
#error "multisample: -ffast-math, -fassociative-math and -freciprocal-math change the bits of host code"
#endif

#ifdef __CUDACC__
#define MULTISAMPLE_FUNCTION __device__ __forceinline__
#define MULTISAMPLE_HOST_FUNCTION __host__ MULTISAMPLE_FUNCTION
#else
#define MULTISAMPLE_FUNCTION inline __attribute__((always_inline))
#define MULTISAMPLE_HOST_FUNCTION MULTISAMPLE_FUNCTION
#endif

namespace multisample {

using i8 = signed char;
using i16 = short;
using i32 = int;
using i64 = long long;
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8 && sizeof(void*) == 8, "");

// nvcc compiles a function for the host and for the device, which this macro tells apart.
#ifdef __CUDA_ARCH__

// Inline PTX, because the intrinsics flush subnormal numbers under -ftz=true, which CuPy passes to every compiler.
MULTISAMPLE_HOST_FUNCTION float fma_rn(float a, float b, float c) {
  float x;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(x) : "f"(a), "f"(b), "f"(c));
  return x;
}
MULTISAMPLE_HOST_FUNCTION float mul_rn(float a, float b) {
  float x;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
}
MULTISAMPLE_HOST_FUNCTION float add_rn(float a, float b) {
  float x;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
}
MULTISAMPLE_HOST_FUNCTION float sub_rn(float a, float b) {
  float x;
  asm("sub.rn.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
}
MULTISAMPLE_HOST_FUNCTION float negated(float a) {
  float x;
  asm("neg.f32 %0, %1;" : "=f"(x) : "f"(a));
  return x;
}
MULTISAMPLE_HOST_FUNCTION double negated(double a) { return -a; }
MULTISAMPLE_HOST_FUNCTION float to_float(double a) {
  float x;
  asm("cvt.rn.f32.f64 %0, %1;" : "=f"(x) : "d"(a));
  return x;
}
MULTISAMPLE_HOST_FUNCTION double to_double(float a) {
  double x;
  asm("cvt.f64.f32 %0, %1;" : "=d"(x) : "f"(a));
  return x;
}
MULTISAMPLE_HOST_FUNCTION double fma_rn(double a, double b, double c) { return __fma_rn(a, b, c); }
MULTISAMPLE_HOST_FUNCTION double mul_rn(double a, double b) { return __dmul_rn(a, b); }
MULTISAMPLE_HOST_FUNCTION double add_rn(double a, double b) { return __dadd_rn(a, b); }
MULTISAMPLE_HOST_FUNCTION double sub_rn(double a, double b) { return __dsub_rn(a, b); }
MULTISAMPLE_HOST_FUNCTION double sqrt_rn(double x) { return __dsqrt_rn(x); }

MULTISAMPLE_FUNCTION float rsqrt_approx(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Rounds correctly for the square of every radius that a word gives. It omits the slow path that sqrt.rn.f32 has for
// subnormals.
MULTISAMPLE_HOST_FUNCTION float sqrt_rn(float x) {
  float y = rsqrt_approx(x);
  float g = mul_rn(x, y);
  float h = mul_rn(y, 0.5f);
  return fma_rn(h, fma_rn(negated(g), g, x), g);
}

MULTISAMPLE_HOST_FUNCTION u32 float_bits(float x) { return __float_as_uint(x); }
MULTISAMPLE_HOST_FUNCTION float from_float_bits(u32 x) { return __uint_as_float(x); }
MULTISAMPLE_HOST_FUNCTION u64 float_bits(double x) { return static_cast<u64>(__double_as_longlong(x)); }
MULTISAMPLE_HOST_FUNCTION double from_float_bits(u64 x) { return __longlong_as_double(static_cast<i64>(x)); }

#else

template <class To, class From>
MULTISAMPLE_HOST_FUNCTION To reinterpret_bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "");
  To y;
  __builtin_memcpy(&y, &x, sizeof y);
  return y;
}
MULTISAMPLE_HOST_FUNCTION u32 float_bits(float x) { return reinterpret_bits<u32>(x); }
MULTISAMPLE_HOST_FUNCTION float from_float_bits(u32 x) { return reinterpret_bits<float>(x); }
MULTISAMPLE_HOST_FUNCTION u64 float_bits(double x) { return reinterpret_bits<u64>(x); }
MULTISAMPLE_HOST_FUNCTION double from_float_bits(u64 x) { return reinterpret_bits<double>(x); }

#if defined(MULTISAMPLE_SOFTWARE_FMA) && defined(__x86_64__) && !defined(__FMA__)

// FMA for processors without the instruction, where the C library takes 60 ns for a float and 170 ns for a double.

// The product is exact in double. The sum is rounded to odd: toward zero, and if that is inexact, the last bit
// becomes 1. It then rounds to float as the exact sum would (Boldo and Melquiond, "Emulation of FMA and correctly
// rounded sums: proved algorithms using rounding to odd", IEEE Transactions on Computers 57(4), 2008,
// doi:10.1109/TC.2007.70819). There is no branch, so that compilers vectorise it.
MULTISAMPLE_HOST_FUNCTION float fma_rn(float a, float b, float c) {
  const double p = static_cast<double>(a) * b, s = p + c, t = s - p, error = (p - (s - t)) + (c - t);
  // The error of an infinite sum is NaN, which is not > 0.
  const u64 inexact = float_bits(error * error > 0 ? from_float_bits(u64{1}) : 0.0);
  const u64 is_too_large = (float_bits(s) ^ float_bits(error)) >> 63;
  return static_cast<float>(from_float_bits((float_bits(s) - (inexact & is_too_large)) | inexact));
}

// The product is p + q, and the sum of p and c is s + t, both without error (Dekker, "A floating-point technique for
// extending the available precision", Numerische Mathematik 18, 1971, doi:10.1007/BF01397083). So only the rounding of
// rest = q + t can make the result wrong. Its error is at most 2^-53 |rest|, which matters only if a b + c is almost
// halfway between two doubles. `is_right` tests whether `result` plus a slightly enlarged `distance` rounds to
// `result`. (Where p and c cancel, t is 0, and `rest` has no error.) If `is_right` is false, the C library computes the
// result. It also computes zeros, whose sign may be wrong here; products so small that q may be inexact; and overflows,
// where q or `distance` is NaN.
MULTISAMPLE_HOST_FUNCTION double fma_rn(double a, double b, double c) {
  const double p = a * b, s = p + c, c0 = s - p, t = (p - (s - c0)) + (c - c0);
  const double a0 = a * 0x1.0000002p+27, b0 = b * 0x1.0000002p+27;
  const double a1 = a0 - (a0 - a), b1 = b0 - (b0 - b), a2 = a - a1, b2 = b - b1;
  const double q = ((a1 * b1 - p) + a1 * b2 + a2 * b1) + a2 * b2;
  const double rest = q + t, result = s + rest, distance = rest - (result - s);
  const bool is_exact = (__builtin_fabs(p) > 0x1p-900) | (a == 0) | (b == 0);
  const bool is_right = is_exact & (result != 0) & (result + distance * (1 + 0x1p-50) == result);
  return __builtin_expect(is_right, 1) ? result : __builtin_fma(a, b, c);
}

// Rounds twice, to double and to float. For every float that a random word converts to, one rounding gives the same
// bits: tests/stream/test_software_fma.py tries them all.
MULTISAMPLE_HOST_FUNCTION float transform_fma(float a, float b, float c) {
  return static_cast<float>(static_cast<double>(a) * b + c);
}

#else
MULTISAMPLE_HOST_FUNCTION float fma_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
MULTISAMPLE_HOST_FUNCTION double fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
#endif

MULTISAMPLE_HOST_FUNCTION float mul_rn(float a, float b) { return a * b; }
MULTISAMPLE_HOST_FUNCTION float add_rn(float a, float b) { return a + b; }
MULTISAMPLE_HOST_FUNCTION float sub_rn(float a, float b) { return a - b; }
MULTISAMPLE_HOST_FUNCTION float sqrt_rn(float x) { return __builtin_sqrtf(x); }
MULTISAMPLE_HOST_FUNCTION float to_float(double a) { return static_cast<float>(a); }
MULTISAMPLE_HOST_FUNCTION double to_double(float a) { return a; }
MULTISAMPLE_HOST_FUNCTION float negated(float a) { return -a; }
MULTISAMPLE_HOST_FUNCTION double negated(double a) { return -a; }
MULTISAMPLE_HOST_FUNCTION double mul_rn(double a, double b) { return a * b; }
MULTISAMPLE_HOST_FUNCTION double add_rn(double a, double b) { return a + b; }
MULTISAMPLE_HOST_FUNCTION double sub_rn(double a, double b) { return a - b; }
MULTISAMPLE_HOST_FUNCTION double sqrt_rn(double x) { return __builtin_sqrt(x); }

#endif

// Computes fma_rn where words become normals. An overload replaces it where a faster function gives the same bits.
template <class Real>
MULTISAMPLE_HOST_FUNCTION Real transform_fma(Real a, Real b, Real c) {
  return fma_rn(a, b, c);
}

}  // namespace multisample
