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

template <class Out, bool fast, bool one_member, bool origin_in_memory>
cudaError_t launch_spans(const Launch& call) {
  const u32 turns = perturb_turns(call);
  const cudaError_t error = launch_span_lists<Out, fast, one_member, Run, origin_in_memory>(call, turns, cudaSuccess);
  return launch_span_lists<Out, fast, one_member, StridedSpan, origin_in_memory>(call, turns, error);
}

template <class Out, bool fast, bool one_member>
cudaError_t launch_members(const Launch& call) {
  return call.origin_in_memory ? launch_spans<Out, fast, one_member, true>(call)
                               : launch_spans<Out, fast, one_member, false>(call);
}

template <class Out, bool fast>
cudaError_t launch_perturb_transform(const Launch& call) {
  return call.rows == 1 ? launch_members<Out, fast, true>(call) : launch_members<Out, fast, false>(call);
}

// Launches on the current device, which must be the call's. The call has at least one row.
inline cudaError_t launch_perturb(const Launch& call) {
  return with_matrix_type(call.type, [&](auto type) {
    using Out = typename decltype(type)::Type;
    // float64 has no fast transform.
    if constexpr (sizeof(Out) == 8) {
      return launch_perturb_transform<Out, false>(call);
    } else {
      return call.fast_math ? launch_perturb_transform<Out, true>(call) : launch_perturb_transform<Out, false>(call);
    }
  });
}

}  // namespace multisample
