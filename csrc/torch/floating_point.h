// The floating-point settings of a thread while it reads inputs.
#pragma once

#if defined(__SSE2__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace multisample {
// Sets IEEE 754's default rounding and subnormals, which the thread may have changed (torch.set_flush_denormal does),
// and restores the thread's settings on exit.
class DefaultFloatingPoint {
 public:
  DefaultFloatingPoint() {
#if defined(__SSE2__)
    // fesetenv also sets the x87 unit, which the kernels do not use. That takes as long as ten normals.
    saved_ = _mm_getcsr();
    _mm_setcsr(0x1f80);
#else
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
#endif
  }
  DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;

#if defined(__SSE2__)
  ~DefaultFloatingPoint() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
  ~DefaultFloatingPoint() { std::fesetenv(&saved_); }

 private:
  std::fenv_t saved_;
#endif
};

}  // namespace multisample
