// Launches of the kernels that all units share.
#include "cuda/advance_kernel.cuh"
#include "cuda/conversion_kernel.cuh"
#include "cuda/launch.cuh"

namespace multisample {

// Adds 1 to the offset at `offset`, in stream order.
cudaError_t advance(u64* offset, void* stream) { return launch_kernel(advance_kernel, 1, 1, stream, offset); }

// Converts vectors to the computing type of matrices of type `type`.
cudaError_t convert(const Conversions& conversions, u32 type, void* stream) {
  u64 blocks = 1;
  for (u64 k = 0; k < conversions.count; ++k) {
    blocks = max(blocks, ceil_div(conversions.each[k].elements, kConversionThreads));
  }
  const dim3 grid(static_cast<u32>(min(blocks, kMostConversionBlocks)), static_cast<u32>(conversions.count));
  const auto kernel = type == kFloat64 ? conversion_kernel<double> : conversion_kernel<float>;
  return launch_kernel(kernel, grid, kConversionThreads, stream, conversions);
}

}  // namespace multisample
