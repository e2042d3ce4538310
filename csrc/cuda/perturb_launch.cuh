// Launches the kernels that perturb model parameters.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/perturb_kernel.cuh"

namespace multisample {

// Moves the addresses of a list to matrix b of a batch.
template <class Entry>
void move_to(SpanList<Entry>&, u64) {}
template <class Entry>
void move_to(SpanList<Wide<Entry>>& list, u64 b) {
  for (u32 k = 0; k < list.count; ++k) {
    Wide<Entry>& span = list.spans[k];
    span.source = moved(span.source, static_cast<i64>(b) * span.source_step);
    span.target = moved(span.target, static_cast<i64>(b) * span.target_step);
  }
}

template <class Out, bool fast, bool one_member, class Kind, KeyOrigin origin>
cudaError_t launch_span_lists(const Launch& call, u32 turns, cudaError_t error) {
  using Entry = EntryOf<Kind, origin>;
  const Keys<Computing<Out>> keys(call.seed);
  return for_span_lists<Entry>(call, turns, error, [&](const SpanList<Entry>& list) {
    u64 b = 0;
    return for_batch(call, kMostBatch, [&](const Launch& part) {
      SpanList<Entry> own = list;
      move_to(own, b);
      b += part.batch;
      return launch_kernel(perturb_kernel<Out, fast, one_member, Kind, origin>, dim3(list.blocks, part.batch),
                           kPerturbThreads, call.stream, part, own, keys);
    });
  });
}

template <class Out, bool fast, bool one_member, KeyOrigin origin>
cudaError_t launch_all_spans(const Launch& call) {
  const u32 turns = perturb_turns(call);
  const cudaError_t error = launch_span_lists<Out, fast, one_member, Run, origin>(call, turns, cudaSuccess);
  return launch_span_lists<Out, fast, one_member, StridedSpan, origin>(call, turns, error);
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
