// Runs the CUDA kernels of weighted moments on the CPU, block by block: reads cases from standard input, and writes
// results to standard output.
//
// A case is a `Case`, the weights, mu and sigma. Its result is the geometry and the bytes of the two moments.
#include "cases.h"
// clang-format off: the kernel needs the macros of the shim.
#include "cuda/moments_kernel.cuh"
// clang-format on

namespace {

using namespace cases;

// A program has the kernels of one computing type.
using Real = ELEMENT;

struct Case {
  Launch launch;  // a word's address is not null if it is in memory
  u64 weight_bytes, vector_bytes;
  Origin origin;
  MomentGeometry geometry;  // instead of the usual one, if it has blocks
  u64 backwards;
};
static_assert(sizeof(Case) == sizeof(Launch) + sizeof(MomentGeometry) + 56, "test_moments_kernels.py packs it");

template <bool antithetic, u32 rows, bool with_second, bool origin_in_memory>
void run(const Launch& call, const MomentGeometry& g, bool backwards) {
  const Keys<Real> keys(call.seed);
  cuda_shim::launch(g.blocks, kMomentThreads, backwards, [&] {
    moments_kernel<Real, antithetic, false, rows, with_second, origin_in_memory>(call, g, keys);
  });
  if (g.finishing_blocks == 0) return;
  cuda_shim::launch(g.finishing_blocks, kMomentThreads, backwards, [&] { finish_moments_kernel<Real>(call, g); });
}

void run_all(const Launch& call, const MomentGeometry& g, bool backwards) {
  const auto run_rows = [&](auto antithetic, auto with_second) {
    constexpr u32 rows = sizeof(Real) == 4 ? kMomentRows : 1;
    if (call.origin_in_memory) {
      run<antithetic, 1, with_second, true>(call, g, backwards);
    } else if (g.rows > 1) {
      run<antithetic, rows, with_second, false>(call, g, backwards);
    } else {
      run<antithetic, 1, with_second, false>(call, g, backwards);
    }
  };
  with_constants(run_rows, call.antithetic, call.results > 1);
}

}  // namespace

int main() {
  for (Case one; read_case(one);) {
    Launch call = one.launch;
    const u64 size = call.rows * element_size(call.type);
    Memory weights(one.weight_bytes), mu(one.vector_bytes), sigma(one.vector_bytes), first(size), second(size);
    read(weights, one.weight_bytes);
    read(mu, one.vector_bytes);
    read(sigma, one.vector_bytes);
    call.weights.data = weights.data;
    call.mu.data = mu.data;
    call.sigma.data = sigma.data;
    call.first = first.data;
    call.second = second.data;
    place(call, one.origin);

    MomentGeometry geometry = moment_geometry(call);
    write(&geometry, sizeof geometry);
    if (one.geometry.blocks > 0) geometry = one.geometry;
    const Memory scratch(scratch_bytes(call, scratch_size(call, geometry)));
    convert<Real>(call, scratch);
    run_all(call, geometry, one.backwards);
    write(first.data, size);
    write(second.data, size);
  }
}
