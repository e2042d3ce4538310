// Launches the kernels that a gradient needs.
#pragma once

#include <cuda_runtime.h>

#include "gradient_kernel.cuh"

namespace multisample {

// A gradient on its way to a kernel.
struct GradientLaunch {
  const GradientCall& call;
  const GradientGeometry& geometry;
  cudaStream_t stream;
};

template <class G, bool shared, bool antithetic, bool fast, u32 rows, bool only_at_once>
void launch_gradient_kernel(const GradientLaunch& launch) {
  const Keys<typename Computing<G>::Type> keys(launch.call.seed);
  gradient_kernel<G, shared, antithetic, fast, rows, only_at_once>
      <<<launch.geometry.blocks, launch.geometry.threads, 0, launch.stream>>>(launch.call, launch.geometry, keys);
}

template <class G, bool shared, bool antithetic, bool fast>
void launch_gradient_rows(const GradientLaunch& launch) {
  constexpr u32 rows = rows_at_once(sizeof(G) == 8 ? kFloat64 : kFloat32, shared, antithetic);
  if constexpr (rows > 1) {
    if (launch.geometry.rows > 1) {
      return launch.geometry.loads == kAtOnce
                 ? launch_gradient_kernel<G, shared, antithetic, fast, rows, true>(launch)
                 : launch_gradient_kernel<G, shared, antithetic, fast, rows, false>(launch);
    }
  }
  // One row makes no use of it that others have the same noise.
  launch_gradient_kernel<G, false, antithetic, fast, 1, false>(launch);
}

template <class G, bool antithetic, bool fast>
void launch_gradient_noise(const GradientLaunch& launch) {
  launch.call.shared ? launch_gradient_rows<G, true, antithetic, fast>(launch)
                     : launch_gradient_rows<G, false, antithetic, fast>(launch);
}

template <class G, bool fast>
void launch_gradient_pairs(const GradientLaunch& launch) {
  launch.call.antithetic ? launch_gradient_noise<G, true, fast>(launch) : launch_gradient_noise<G, false, fast>(launch);
}

template <class G>
void launch_gradient_transform(const GradientLaunch& launch) {
  launch.call.fast_math ? launch_gradient_pairs<G, true>(launch) : launch_gradient_pairs<G, false>(launch);
}

template <class Real>
void add_segments(const GradientLaunch& launch) {
  const u64 sums = 2 * launch.call.rows;
  u32 width = 32;
  while (width > sums) width /= 2;
  add_segments_kernel<Real><<<static_cast<u32>(ceil_div(sums, width)), kGradientThreads, 0, launch.stream>>>(
      launch.call, launch.geometry.segments, width);
}

// On the device that is current; `geometry` is that of the call, and its `partial_sums` have the room that they need.
inline cudaError_t launch_gradient(const GradientCall& call, const GradientGeometry& geometry, void* stream) {
  const GradientLaunch launch{call, geometry, static_cast<cudaStream_t>(stream)};
  switch (call.type) {
    case kFloat16: launch_gradient_transform<float16>(launch); break;
    case kBFloat16: launch_gradient_transform<bfloat16>(launch); break;
    case kFloat32: launch_gradient_transform<float>(launch); break;
    default: launch_gradient_pairs<double, false>(launch);
  }
  if (geometry.segments > 1) call.type == kFloat64 ? add_segments<double>(launch) : add_segments<float>(launch);
  return cudaGetLastError();
}

}  // namespace multisample
