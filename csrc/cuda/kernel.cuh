// The block-per-dimension kernel: x[i, j] = mu[i] + sigma[i] z[i, j], noise made in registers, each element written
// once. Where columns lie side by side in memory it is in cuda/rows.cuh, where dimensions do in cuda/columns.cuh.
#pragma once

#include "cuda/columns.cuh"
#include "cuda/rows.cuh"

namespace multisample {

template <class Out, bool shared, bool antithetic, bool fast, Stores stores>
MULTISAMPLE_FUNCTION void draw(const Draw& call, const Geometry& geometry) {
  if constexpr (stores == kTransposed) {
    draw_transposed<Out, shared, antithetic, fast>(call, geometry);
  } else if constexpr (stores == kTransposedStaged) {
    draw_transposed_staged<Out, shared, antithetic, fast>(call, geometry);
  } else {
    draw_rows<Out, shared, antithetic, fast, stores>(call, geometry);
  }
}

template <bool shared, Stores stores>
constexpr int kMostThreads = stores == kTransposed         ? kTransposedThreads
                             : stores == kTransposedStaged ? kStagedThreads<shared>
                                                           : kThreads;

// Blocks that a processor is to hold at once, if the compiler alone would choose so many that registers run out, or so
// few that it waits; else 0.
template <class Out, bool shared, bool antithetic, Stores stores>
constexpr int kBlocksAtOnce = stores == kTransposed || stores == kTransposedStaged ? 768 / kMostThreads<shared, stores>
                              : antithetic && (stores == kAligned || stores == kShifted) ? 2
                              : antithetic || stores == kShifted || sizeof(Out) == 8     ? 3
                                                                                         : 0;

template <class Out, bool shared, bool antithetic, bool fast, Stores stores, bool origin_in_memory = false>
__global__ void __launch_bounds__(kMostThreads<shared, stores>, kBlocksAtOnce<Out, shared, antithetic, stores>)
sample_kernel(const __grid_constant__ Draw call, const __grid_constant__ Geometry geometry) {
  // Numbers by value are the same for all threads to the compiler, which keeps them and the round keys out of the
  // threads' registers. So kernels that read them from memory are kernels of their own.
  if constexpr (origin_in_memory) {
    Geometry resolved = geometry;
    const Draw values = with_values(call);
    resolved.skip = static_cast<u32>(values.first_column.value % Elements<Out, antithetic>::kCount);
    draw<Out, shared, antithetic, fast, stores>(values, resolved);
  } else {
    draw<Out, shared, antithetic, fast, stores>(call, geometry);
  }
}

// Adds 1 to an offset in memory, after the kernels that read it.
__global__ void advance_kernel(u64* counter) { ++*counter; }

}  // namespace multisample
