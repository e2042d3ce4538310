// Advances an offset in device memory.
#include "cuda/advance_kernel.cuh"
#include "cuda/launch.cuh"

namespace multisample {

// Adds 1 to the offset at `offset`, in stream order.
cudaError_t advance(u64* offset, void* stream) { return launch_kernel(advance_kernel, 1, 1, stream, offset); }

}  // namespace multisample
