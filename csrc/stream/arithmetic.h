// Arithmetic for nvcc, NVRTC (which has no standard library) and C++ compilers for the CPU. Every operation below is
// one IEEE 754 operation, rounded to nearest even, and never contracted: on the GPU it is inline PTX or an intrinsic.
// On the CPU, a compiler could contract only the product that makes a normal, with an addition of the caller.
// include/multisample/normal.h prevents that.
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

MULTISAMPLE_HOST_FUNCTION float fma_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
MULTISAMPLE_HOST_FUNCTION double fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }

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

}  // namespace multisample
