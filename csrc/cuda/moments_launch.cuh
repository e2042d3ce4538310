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

template <class Real, bool antithetic, bool fast>
cudaError_t launch_moment_order(const Launch& call, const MomentGeometry& g) {
  return call.results == 1 ? launch_moment_rows<Real, antithetic, fast, false>(call, g)
                           : launch_moment_rows<Real, antithetic, fast, true>(call, g);
}

template <class Real, bool fast>
cudaError_t launch_moment_antithetic(const Launch& call, const MomentGeometry& g) {
  return call.antithetic ? launch_moment_order<Real, true, fast>(call, g)
                         : launch_moment_order<Real, false, fast>(call, g);
}

// Launches on the current device, which must be the call's. Its scratch has room for scratch_size() numbers.
inline cudaError_t launch_moments(const Launch& call) {
  const MomentGeometry g = moment_geometry(call);
  const bool wide = call.type == kFloat64;
  // float64 has no fast transform.
  const cudaError_t error = wide             ? launch_moment_antithetic<double, false>(call, g)
                            : call.fast_math ? launch_moment_antithetic<float, true>(call, g)
                                             : launch_moment_antithetic<float, false>(call, g);
  if (error != cudaSuccess || g.finishing_blocks == 0) return error;
  return launch_kernel(wide ? finish_moments_kernel<double> : finish_moments_kernel<float>, g.finishing_blocks,
                       kMomentThreads, call.stream, call, g);
}

}  // namespace multisample
