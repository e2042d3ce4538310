// Launches the kernels that perturb model parameters.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/perturb_kernel.cuh"

namespace multisample {

template <class Out, bool fast, bool one_member, KeyOrigin origin>
cudaError_t launch_all_spans(const Launch& call) {
  const u32 turns = perturb_turns(call);
  const Keys<Computing<Out>> keys(call.seed);
  const auto launch = [&](auto kind, cudaError_t earlier) {
    using Kind = typename decltype(kind)::Type;
    using Entry = EntryOf<Kind, origin>;
    return for_span_lists<Entry>(call, turns, earlier, [&](const SpanList<Entry>& list) {
      u32 b = 0;
      return for_batch(call, kMostBatch, [&](const Launch& part) {
        SpanList<Entry> own = list;
        for (u32 k = 0; k < own.count; ++k) {
          static_cast<Kind&>(own.spans[k]) = span_of_batch<Kind>(list.spans[k], b);
        }
        b += part.batch;
        return launch_kernel(perturb_kernel<Out, fast, one_member, Kind, origin>, dim3(list.blocks, part.batch),
                             kPerturbThreads, call.stream, part, own, keys);
      });
    });
  };
  return launch(TypeOf<StridedSpan>{}, launch(TypeOf<Run>{}, cudaSuccess));
}

// Launches on the current device, which must be the call's.
template <class Out, bool fast>
cudaError_t launch_perturb(const Launch& call) {
  const KeyOrigin origin = origin_of(call);
  if (origin == kOfRows) return launch_all_spans<Out, fast, false, kOfRows>(call);
  const auto launch = [&](auto one_member) {
    if (origin == kOfBatch) return launch_all_spans<Out, fast, one_member, kOfBatch>(call);
    if (origin == kInMemory) return launch_all_spans<Out, fast, one_member, kInMemory>(call);
    return launch_all_spans<Out, fast, one_member, kInParameters>(call);
  };
  return with_constants(launch, call.rows == 1);
}

}  // namespace multisample
