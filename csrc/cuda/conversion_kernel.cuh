// The kernel that converts vectors of any element type to the computing type.
#pragma once

#include "cuda/conversion.h"
#include "cuda/group.cuh"

namespace multisample {

// The grid's y axis counts the conversions.
template <class Real>
__global__ void conversion_kernel(const __grid_constant__ Conversions conversions) {
  const Conversion& own = conversions.each[blockIdx.y];
  const u64 threads = u64{gridDim.x} * kConversionThreads;
  for (u64 k = u64{blockIdx.x} * kConversionThreads + threadIdx.x; k < own.all; k += threads) {
    const u64 b = k / own.length;
    const char* const vector = static_cast<const char*>(own.from.input.data) + static_cast<i64>(b) * own.step;
    const char* const at = vector + static_cast<i64>(k - b * own.length) * own.from.stride;
    Real* const to = static_cast<Real*>(own.to) + k;
    switch (own.from.type) {
#define MULTISAMPLE_ROW(name, type, size, numpy, torch) \
  case k##name: *to = converted<Real>(load<type>(at)); break;
      MULTISAMPLE_ELEMENT_TYPES(MULTISAMPLE_ROW, MULTISAMPLE_ROW)
#undef MULTISAMPLE_ROW
    }
  }
}

}  // namespace multisample
