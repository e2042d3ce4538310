// Launches the kernels that perturb model parameters.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/perturb_kernel.cuh"

namespace multisample {

template <class Out, bool fast, bool one_member, class Entry, bool origin_in_memory>
cudaError_t launch_span_lists(const Launch& call, u32 turns, cudaError_t error) {
  const Keys<typename Computing<Out>::Type> keys(call.seed);
  return for_span_lists<Entry>(call, turns, error, [&](const SpanList<Entry>& list) {
    return launch_kernel(perturb_kernel<Out, fast, one_member, Entry, origin_in_memory>, list.blocks, kPerturbThreads,
                         call.stream, call, list, keys);
  });
}

// Launches on the current device, which must be the call's. The call has at least one row.
template <class Out, bool fast>
cudaError_t launch_perturb(const Launch& call) {
  const u32 turns = perturb_turns(call);
  const auto launch = [&](auto one_member, auto in_memory) {
    const cudaError_t error = launch_span_lists<Out, fast, one_member, Run, in_memory>(call, turns, cudaSuccess);
    return launch_span_lists<Out, fast, one_member, StridedSpan, in_memory>(call, turns, error);
  };
  return with_constants(launch, call.rows == 1, call.origin_in_memory);
}

}  // namespace multisample
