// The kernel that converts vectors of any element type to the computing type.
#pragma once

#include "cuda/conversion.h"
#include "cuda/group.cuh"

namespace multisample {

// The blocks with blockIdx.y = k convert vector k.
template <class Real>
__global__ void conversion_kernel(const __grid_constant__ Conversions conversions) {
  const Conversion& conversion = conversions.each[blockIdx.y];
  const u64 threads = u64{gridDim.x} * kConversionThreads;
  for (u64 k = u64{blockIdx.x} * kConversionThreads + threadIdx.x; k < conversion.elements; k += threads) {
    const u64 b = k / conversion.length;
    Vector vector = conversion.from;
    vector.input.data = moved(vector.input.data, static_cast<i64>(b) * conversion.step);
    static_cast<Real*>(conversion.to)[k] = any_element<Real>(vector, k - b * conversion.length);
  }
}

}  // namespace multisample
