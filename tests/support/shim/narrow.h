// The CPU's rounding to float16, which only tests need: the kernels for the CPU are compiled by Numba.
#pragma once

#include "stream/rounding.h"

namespace multisample {

template <>
inline float16 narrow<float16>(float x) {
  return {reinterpret_bits<u16>(static_cast<_Float16>(x))};
}

}  // namespace multisample
