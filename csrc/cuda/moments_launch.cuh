// Launches the kernels of weighted moments.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/moments_kernel.cuh"

namespace multisample {

// Launches on the current device, which must be the call's. Its scratch has room for scratch_size() numbers.
template <class Real, bool antithetic, bool fast>
cudaError_t launch_moments(const Launch& batch) {
  return for_batch(batch, 1, [](const Launch& call) {
    const MomentGeometry g = moment_geometry(call);
    const auto run = [&](auto kernel) {
      return launch_kernel(kernel, g.blocks, kMomentThreads, call.stream, call, g, Keys<Real>(call.seed));
    };
    const auto run_rows = [&](auto with_second) {
      if (call.origin_in_memory) return run(moments_kernel<Real, antithetic, fast, 1, with_second, true>);
      if constexpr (sizeof(Real) == 4) {
        if (g.rows > 1) return run(moments_kernel<Real, antithetic, fast, kMomentRows, with_second, false>);
      }
      return run(moments_kernel<Real, antithetic, fast, 1, with_second, false>);
    };
    const cudaError_t error = with_constants(run_rows, call.results > 1);
    if (error != cudaSuccess || g.finishing_blocks == 0) return error;
    return launch_kernel(finish_moments_kernel<Real>, g.finishing_blocks, kMomentThreads, call.stream, call, g);
  });
}

}  // namespace multisample
