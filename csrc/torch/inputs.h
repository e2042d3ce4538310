// Reads mu, sigma and weights from host memory, and checks their values.
#pragma once

#if defined(__SSE2__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

#include <limits>

#include "launch.h"

namespace multisample {

// Sets IEEE 754's default rounding and subnormals, which the thread may have changed (torch.set_flush_denormal does),
// and restores the thread's settings on exit.
class DefaultFloatingPoint {
 public:
  DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
#if defined(__SSE2__)
  // fesetenv also sets the x87 unit, which the kernels do not use. That takes as long as ten normals.
  DefaultFloatingPoint() { _mm_setcsr(0x1f80); }
  ~DefaultFloatingPoint() { _mm_setcsr(saved_); }

 private:
  const unsigned saved_ = _mm_getcsr();
#else
  DefaultFloatingPoint() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatingPoint() { std::fesetenv(&saved_); }

 private:
  std::fenv_t saved_;
#endif
};

// An element at any address.
template <class T>
struct __attribute__((packed, may_alias)) Unaligned {
  T x;
};

template <class T, class Real>
inline void read_as(const Vector& from, u64 first, u64 count, Real* to) {
  const char* at = static_cast<const char*>(from.input.data) + static_cast<i64>(first) * from.stride;
  const auto element = [at](i64 bytes) { return reinterpret_cast<const Unaligned<T>*>(at + bytes)->x; };
  if (from.stride == sizeof(T)) {  // A constant stride gives a vector loop.
    for (u64 k = 0; k < count; ++k) to[k] = converted<Real>(element(static_cast<i64>(k * sizeof(T))));
    return;
  }
  for (u64 k = 0; k < count; ++k) to[k] = converted<Real>(element(static_cast<i64>(k) * from.stride));
}

// Reads elements, rounded to the computing type.
template <class Real>
inline void read(const Vector& from, u64 first, u64 count, Real* to) {
  switch (from.type) {
    case kNumber:
      for (u64 k = 0; k < count; ++k) to[k] = static_cast<Real>(from.input.number);
      break;
#define MULTISAMPLE_ROW(name, type, size, numpy, torch) \
  case k##name: return read_as<type>(from, first, count, to);
      MULTISAMPLE_ELEMENT_TYPES(MULTISAMPLE_ROW, MULTISAMPLE_ROW)
#undef MULTISAMPLE_ROW
  }
}

template <class Real>
bool is_finite_from(const Vector& vector, u64 count, Real least) {
  constexpr u64 kChunk = 256;
  constexpr Real most = std::numeric_limits<Real>::max();
  Real x[kChunk];
  for (u64 first = 0; first < count; first += kChunk) {
    const u64 length = min(count - first, kChunk);
    read(vector, first, length, x);
    // An integer of the size of Real, because compilers do not vectorise a sum of bools. GCC vectorises the loop over
    // floats with & only; doubles are faster with &&.
    decltype(float_bits(least)) invalid = 0;
    for (u64 k = 0; k < length; ++k) {
      const bool is_valid = sizeof(Real) == 4 ? (x[k] >= least) & (x[k] <= most) : x[k] >= least && x[k] <= most;
      invalid |= is_valid ? 0 : 1;
    }
    if (invalid != 0) return false;
  }
  return true;
}

template <class Real>
bool has_valid_inputs(const Launch& call) {
  return is_finite_from<Real>(mu_of(call), call.rows, -std::numeric_limits<Real>::max()) &&
         is_finite_from<Real>(sigma_of(call), call.rows, 0) &&
         (call.operation != kMoments ||
          is_finite_from<Real>(weights_of(call), call.columns, -std::numeric_limits<Real>::max()));
}

// Whether all of mu, and of the weights of moments, is finite, and all of sigma finite and not negative, in the
// computing type.
inline bool has_valid_inputs(const Launch& call) {
  const DefaultFloatingPoint guard;
  const bool are_shared = call.mu_step == 0 && call.sigma_step == 0 && call.weights_step == 0;
  for (u64 b = 0; b < (are_shared ? 1 : max(call.batch, 1)); ++b) {
    const Launch one = matrix_of_batch(call, b);
    if (!(call.type == kFloat64 ? has_valid_inputs<double>(one) : has_valid_inputs<float>(one))) return false;
  }
  return true;
}

}  // namespace multisample
