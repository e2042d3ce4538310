// Runs the CUDA kernels of perturb on the CPU, block by block: reads cases from standard input, and writes results to
// standard output.
//
// A case is a `Case`, the spans, the weights, and the memory with the parameters. Its result is the memory.
#include "cases.h"
// clang-format off: the kernel needs the macros of the shim.
#include "cuda/perturb_kernel.cuh"
// clang-format on

#include <vector>

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

template <class Entry>
void run(const Launch& call, u32 turns, bool backwards) {
  const Keys<typename Computing<Out>::Type> keys(call.seed);
  for_span_lists<Entry>(call, turns, 0, [&](const SpanList<Entry>& list) {
    const auto kernel = [&](auto one_member, auto in_memory) {
      cuda_shim::launch(list.blocks, kPerturbThreads, backwards,
                        [&] { perturb_kernel<Out, false, one_member, Entry, in_memory>(call, list, keys); });
    };
    with_constants(kernel, call.rows == 1, call.origin_in_memory);
    return 0;
  });
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
    if (call.weights_type != kNumber) call.weights.data = weights.data;
    place(call, one.origin);
    run<Run>(call, static_cast<u32>(one.turns), one.backwards);
    run<StridedSpan>(call, static_cast<u32>(one.turns), one.backwards);
    write(memory.data, one.memory_bytes);
  }
}
