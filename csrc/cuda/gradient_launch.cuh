// Launches the kernels of a gradient.
#pragma once

#include "cuda/gradient_kernel.cuh"
#include "cuda/launch.cuh"

namespace multisample {

// Launches on the current device, which must be the call's. `scratch` has room for scratch_size() numbers.
template <class G, bool antithetic, bool fast>
cudaError_t launch_gradient(const Launch& batch) {
  return for_batch(with_regular_strides(batch), 1, [](const Launch& call) {
    const GradientGeometry g = gradient_geometry(call);
    const auto run = [&](auto kernel) {
      return launch_kernel(kernel, g.blocks, g.threads, call.stream, call, g, Keys<Computing<G>>(call.seed));
    };
    const auto run_rows = [&](auto shared_noise) {
      constexpr u32 rows = rows_at_once(sizeof(G) == 8 ? kFloat64 : kFloat32, shared_noise, antithetic);
      if constexpr (rows > 1) {
        if (g.rows > 1) {
          return g.loads == kAtOnce ? run(gradient_kernel<G, shared_noise, antithetic, fast, rows, true, false>)
                                    : run(gradient_kernel<G, shared_noise, antithetic, fast, rows, false, false>);
        }
      }
      // With one row per thread, the kernel of independent noise serves shared noise too.
      return call.origin_in_memory ? run(gradient_kernel<G, false, antithetic, fast, 1, false, true>)
                                   : run(gradient_kernel<G, false, antithetic, fast, 1, false, false>);
    };
    const cudaError_t error = with_constants(run_rows, call.shared_noise != 0);
    if (error != cudaSuccess || g.segments == 1) return error;
    const u64 sums = 2 * call.rows;
    u32 width = 32;
    while (width > sums) width /= 2;
    return launch_kernel(add_segments_kernel<Computing<G>>, static_cast<u32>(ceil_div(sums, width)), kGradientThreads,
                         call.stream, call, g.segments, width);
  });
}

}  // namespace multisample
