// Launches the kernels of weighted moments.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/moments_kernel.cuh"

namespace multisample {

template <class Real, bool antithetic, bool fast, bool with_second>
cudaError_t launch_moment_rows(const Launch& call, const MomentGeometry& g) {
  const auto run = [&](auto kernel) {
    return launch_kernel(kernel, g.blocks, kMomentThreads, call.stream, call, g, Keys<Real>(call.seed));
  };
  if (call.origin_in_memory) return run(moments_kernel<Real, antithetic, fast, 1, with_second, true>);
  if constexpr (sizeof(Real) == 4) {
    if (g.rows > 1) return run(moments_kernel<Real, antithetic, fast, kMomentRows, with_second, false>);
  }
  return run(moments_kernel<Real, antithetic, fast, 1, with_second, false>);
}

template <class Real>
cudaError_t launch_moments_in(const Launch& call) {
  const MomentGeometry g = moment_geometry(call);
  const auto launch = [&](auto antithetic, auto fast_math, auto with_second) {
    constexpr bool fast = fast_math && has_fast<Real>;
    return launch_moment_rows<Real, antithetic, fast, with_second>(call, g);
  };
  const cudaError_t error = with_constants(launch, call.antithetic, call.fast_math, call.results > 1);
  if (error != cudaSuccess || g.finishing_blocks == 0) return error;
  return launch_kernel(finish_moments_kernel<Real>, g.finishing_blocks, kMomentThreads, call.stream, call, g);
}

// Launches on the current device, which must be the call's. Its scratch has room for scratch_size() numbers.
inline cudaError_t launch_moments(const Launch& call) {
  return call.type == kFloat64 ? launch_moments_in<double>(call) : launch_moments_in<float>(call);
}

}  // namespace multisample
