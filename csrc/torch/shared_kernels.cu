// Launches of the kernels that all units share.
#include "cuda/advance_kernel.cuh"
#include "cuda/conversion_kernel.cuh"
#include "cuda/launch.cuh"

namespace multisample {

// Adds 1 to the offset at `offset`, in stream order.
cudaError_t advance(u64* offset, void* stream) { return launch_kernel(advance_kernel, 1, 1, stream, offset); }

// Converts vectors to the computing type of matrices of type `type`.
cudaError_t convert(const Conversion& conversion, u32 type, void* stream) {
  const u32 blocks = static_cast<u32>(min(ceil_div(conversion.all, kConversionThreads), kMostConversionBlocks));
  const auto kernel = type == kFloat64 ? conversion_kernel<double> : conversion_kernel<float>;
  return launch_kernel(kernel, blocks, kConversionThreads, stream, conversion);
}

}  // namespace multisample
