// Rounding to float16 on the CPU, which only tests need: the kernels for the CPU are compiled by Numba. A NaN has the
// bits that Numba's functions give.
#pragma once

#include "stream/rounding.h"

namespace multisample {

template <>
inline float16 narrow<float16>(float x) {
  const u32 nan = (float_bits(x) >> 16 & 0x8000) | 0x7E00;
  return {x == x ? reinterpret_bits<u16>(static_cast<_Float16>(x)) : static_cast<u16>(nan)};
}

}  // namespace multisample
