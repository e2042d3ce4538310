// Launches the kernels of a gradient.
#pragma once

#include "cuda/gradient_kernel.cuh"
#include "cuda/launch.cuh"

namespace multisample {

// The arguments of the launchers below.
struct GradientLaunch {
  const Launch& call;
  const GradientGeometry& geometry;
};

template <class G, bool shared_noise, bool antithetic, bool fast, u32 rows, bool only_at_once,
          bool origin_in_memory = false>
cudaError_t launch_gradient_kernel(const GradientLaunch& launch) {
  const Keys<typename Computing<G>::Type> keys(launch.call.seed);
  return launch_kernel(gradient_kernel<G, shared_noise, antithetic, fast, rows, only_at_once, origin_in_memory>,
                       launch.geometry.blocks, launch.geometry.threads, launch.call.stream, launch.call,
                       launch.geometry, keys);
}

template <class G, bool shared_noise, bool antithetic, bool fast>
cudaError_t launch_gradient_rows(const GradientLaunch& launch) {
  constexpr u32 rows = rows_at_once(sizeof(G) == 8 ? kFloat64 : kFloat32, shared_noise, antithetic);
  if constexpr (rows > 1) {
    if (launch.geometry.rows > 1) {
      return launch.geometry.loads == kAtOnce
                 ? launch_gradient_kernel<G, shared_noise, antithetic, fast, rows, true>(launch)
                 : launch_gradient_kernel<G, shared_noise, antithetic, fast, rows, false>(launch);
    }
  }
  // With one row per thread, the kernel of independent noise serves shared noise too.
  return launch.call.origin_in_memory ? launch_gradient_kernel<G, false, antithetic, fast, 1, false, true>(launch)
                                      : launch_gradient_kernel<G, false, antithetic, fast, 1, false>(launch);
}

template <class G, bool antithetic, bool fast>
cudaError_t launch_gradient_noise(const GradientLaunch& launch) {
  return launch.call.shared_noise ? launch_gradient_rows<G, true, antithetic, fast>(launch)
                                  : launch_gradient_rows<G, false, antithetic, fast>(launch);
}

template <class G, bool fast>
cudaError_t launch_gradient_antithetic(const GradientLaunch& launch) {
  return launch.call.antithetic ? launch_gradient_noise<G, true, fast>(launch)
                                : launch_gradient_noise<G, false, fast>(launch);
}

template <class G>
cudaError_t launch_gradient_transform(const GradientLaunch& launch) {
  // float64 has no fast transform.
  if constexpr (sizeof(G) == 8) {
    return launch_gradient_antithetic<G, false>(launch);
  } else {
    return launch.call.fast_math ? launch_gradient_antithetic<G, true>(launch)
                                 : launch_gradient_antithetic<G, false>(launch);
  }
}

template <class Real>
cudaError_t add_segments(const GradientLaunch& launch) {
  const u64 sums = 2 * launch.call.rows;
  u32 width = 32;
  while (width > sums) width /= 2;
  return launch_kernel(add_segments_kernel<Real>, static_cast<u32>(ceil_div(sums, width)), kGradientThreads,
                       launch.call.stream, launch.call, launch.geometry.segments, width);
}

// Launches on the current device, which must be the call's. `scratch` has room for scratch_size() numbers.
inline cudaError_t launch_gradient(const Launch& call) {
  const GradientGeometry geometry = gradient_geometry(call);
  const GradientLaunch launch{call, geometry};
  const cudaError_t error = with_matrix_type(
      call.type, [&](auto type) { return launch_gradient_transform<typename decltype(type)::Type>(launch); });
  if (error != cudaSuccess || geometry.segments == 1) return error;
  return call.type == kFloat64 ? add_segments<double>(launch) : add_segments<float>(launch);
}

}  // namespace multisample
