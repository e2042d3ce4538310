// The kernel that converts a vector of any element type to the computing type.
#pragma once

#include "cuda/conversion.h"
#include "cuda/group.cuh"

namespace multisample {

template <class Real>
__global__ void conversion_kernel(const __grid_constant__ Conversion conversion) {
  const u64 threads = u64{gridDim.x} * kConversionThreads;
  for (u64 k = u64{blockIdx.x} * kConversionThreads + threadIdx.x; k < conversion.all; k += threads) {
    const u64 b = k / conversion.length;
    const char* const vector =
        static_cast<const char*>(conversion.from.input.data) + static_cast<i64>(b) * conversion.step;
    const char* const at = vector + static_cast<i64>(k - b * conversion.length) * conversion.from.stride;
    Real* const to = static_cast<Real*>(conversion.to) + k;
    switch (conversion.from.type) {
#define MULTISAMPLE_ROW(name, type, size, numpy, torch) \
  case k##name: *to = converted<Real>(load<type>(at)); break;
      MULTISAMPLE_ELEMENT_TYPES(MULTISAMPLE_ROW, MULTISAMPLE_ROW)
#undef MULTISAMPLE_ROW
    }
  }
}

}  // namespace multisample
