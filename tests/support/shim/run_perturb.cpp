// Runs the CUDA kernels of perturb on the CPU, block by block: reads cases from standard input, and writes results to
// standard output.
//
// A case is a `Case`, the spans, the weights, and the memory with the parameters. Its result is the memory.
#include "cases.h"
// clang-format off: the kernel needs the macros of the shim.
#include "cuda/perturb_kernel.cuh"
// clang-format on

namespace {

using namespace cases;

// A program has the kernels of one type of parameters.
using Out = ELEMENT;

struct Case {
  Launch launch;  // a word's address is not null if it is in memory; addresses of spans are displacements in the memory
  u64 weight_bytes, memory_bytes;
  Origin origin;
  u64 turns, backwards;
};
static_assert(sizeof(Case) == sizeof(Launch) + 64, "perturb_cases.py packs it");

template <class Kind, KeyOrigin origin, bool one_member>
void run_kind(const Launch& call, u32 turns, bool backwards) {
  using Entry = EntryOf<Kind, origin>;
  const Keys<Computing<Out>> keys(call.seed);
  for_span_lists<Entry>(call, turns, 0, [&](const SpanList<Entry>& list) {
    fibers::launch(list.blocks, static_cast<u32>(max(call.batch, 1)), kPerturbThreads, backwards,
                   [&] { perturb_kernel<Out, false, one_member, Kind, origin>(call, list, keys); });
    return 0;
  });
}

template <class Kind>
void run(const Launch& call, u32 turns, bool backwards) {
  const KeyOrigin origin = origin_of(call);
  if (origin == kOfRows) return run_kind<Kind, kOfRows, false>(call, turns, backwards);
  const auto kernel = [&](auto one_member) {
    if (origin == kOfBatch) return run_kind<Kind, kOfBatch, one_member>(call, turns, backwards);
    if (origin == kInMemory) return run_kind<Kind, kInMemory, one_member>(call, turns, backwards);
    return run_kind<Kind, kInParameters, one_member>(call, turns, backwards);
  };
  with_constants(kernel, call.rows == 1);
}

}  // namespace

int main() {
  for (Case one; read_case(one);) {
    Launch call = one.launch;
    std::vector<Span> spans(call.spans);
    if (std::fread(spans.data(), sizeof(Span), spans.size(), stdin) != spans.size()) cuda_shim::fail("no spans");
    Memory weights(one.weight_bytes), memory(one.memory_bytes);
    read(weights, one.weight_bytes);
    read(memory, one.memory_bytes);
    for (Span& span : spans) {
      span.source = memory.at(span.source);
      span.target = memory.at(span.target);
    }
    call.matrix = spans.data();
    // Addresses of inputs are displacements too.
    if (call.weights_type != kNumber) call.weights.data = weights.at(call.weights.data);
    if (call.sigma_type != kNumber) call.sigma.data = weights.at(call.sigma.data);
    if (call.batch > 0 || call.shared_noise) {
      for (const u64** at : {&call.seed_at, &call.offset_at, &call.first_row_at, &call.first_column_at}) {
        if (*at != nullptr) *at = reinterpret_cast<const u64*>(weights.at(*at));
      }
    } else {
      place(call, one.origin);
    }
    const Memory scratch(scratch_bytes(call));
    convert<Computing<Out>>(call, scratch);
    run<Run>(call, static_cast<u32>(one.turns), one.backwards);
    run<StridedSpan>(call, static_cast<u32>(one.turns), one.backwards);
    write(memory.data, one.memory_bytes);
  }
}
