// Launches the sampling kernel of a call.
#pragma once

#include "cuda/kernel.cuh"
#include "cuda/launch.cuh"

namespace multisample {

// Launches on the current device, which must be the call's. The call has at least one row and one column.
template <class Out, bool shared_noise, bool antithetic, bool fast>
cudaError_t launch_sample(const Launch& call) {
  Geometry g = geometry_of(call);
  // These kernels can read the seed, the offset and the window from memory. With kFewRows and kStrided, they also draw
  // calls that pass all of these by value.
  const auto run_general = [&] {
    const auto kernel = g.store_kind == kAligned   ? sample_kernel<Out, shared_noise, antithetic, fast, kAligned, true>
                        : g.store_kind == kFewRows ? sample_kernel<Out, shared_noise, antithetic, fast, kFewRows, true>
                                                   : sample_kernel<Out, shared_noise, antithetic, fast, kStrided, true>;
    return for_batch(call, kMostBatch, [&](const Launch& part) {
      return launch_kernel(kernel, dim3(g.blocks, part.batch), g.threads, part.stream, part, g);
    });
  };
  if (call.origin_in_memory && g.store_kind != kSmallMatrices) {
    const bool same_alignment = call.batch <= 1 || call.matrix_step % 32 == 0;
    if (g.store_kind != kAligned || !same_alignment) g = geometry_of(call, true);
    return run_general();
  }
  const auto run = [&](auto kind) {
    return with_version<Out, antithetic, kind>(g, [&](auto turns, auto usual) {
      constexpr bool of_batch = kind == kSmallMatrices;
      const auto kernel = sample_kernel<Out, shared_noise, antithetic, fast, kind, of_batch, of_batch, turns, usual>;
      return launch_kernel(kernel, g.blocks, g.threads, call.stream, call, g);
    });
  };
  switch (g.store_kind) {
    case kAligned: return run(Constant<kAligned>{});
    case kShifted: return run(Constant<kShifted>{});
    case kStaged: return run(Constant<kStaged>{});
    case kTransposed: return run(Constant<kTransposed>{});
    case kTransposedStaged: return run(Constant<kTransposedStaged>{});
    case kFewColumns: return run(Constant<kFewColumns>{});
    case kSmallMatrices: return run(Constant<kSmallMatrices>{});
    case kPlain: return run(Constant<kPlain>{});
    case kPlainTransposed: return run(Constant<kPlainTransposed>{});
    default: return run_general();
  }
}

}  // namespace multisample
