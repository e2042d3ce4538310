// Runs the CUDA kernels of the gradient on the CPU, block by block: reads cases from standard input, and writes results
// to standard output.
//
// A case is a `Case` and the bytes of the matrix. Its result is the geometry and the bytes of the two gradients.
#include "cases.h"
// clang-format off: the kernel needs the macros of the shim.
#include "cuda/gradient_kernel.cuh"
// clang-format on

namespace {

using namespace cases;

// A program has the kernels of one element type. Tests compile several programs in parallel.
using Element = ELEMENT;

struct Case {
  Launch call;  // the matrix's address is an offset into its memory; a word's address is nonzero if it is in memory
  u64 matrix_bytes;
  Origin origin;
  u32 rows, tiles, slots, turns, sweeps;  // fields of the geometry to change, if not 0
  u32 backwards;
};
static_assert(sizeof(Case) == sizeof(Launch) + 64, "test_gradient_sources.py packs it");

template <bool shared, bool antithetic, u32 rows, bool only_at_once, bool origin_in_memory = false>
void run(const Launch& call, const GradientGeometry& g, bool backwards) {
  const Keys<Computing<Element>> keys(call.seed);
  cuda_shim::launch(g.blocks, g.threads, backwards, [&] {
    gradient_kernel<Element, shared, antithetic, false, rows, only_at_once, origin_in_memory>(call, g, keys);
  });
}

template <bool shared, bool antithetic>
void run_rows(const Launch& call, const GradientGeometry& g, bool backwards) {
  constexpr u32 rows = rows_at_once(sizeof(Element) == 8 ? kFloat64 : kFloat32, shared, antithetic);
  if (call.origin_in_memory) {
    run<false, antithetic, 1, false, true>(call, g, backwards);
  } else if (rows == 1 || g.rows == 1) {
    run<false, antithetic, 1, false>(call, g, backwards);
  } else if (g.loads == kAtOnce) {
    run<shared, antithetic, rows, true>(call, g, backwards);
  } else {
    run<shared, antithetic, rows, false>(call, g, backwards);
  }
}

void run_all(const Launch& call, const GradientGeometry& g, bool backwards) {
  with_constants([&](auto shared, auto antithetic) { run_rows<shared, antithetic>(call, g, backwards); },
                 call.shared_noise, call.antithetic);
  if (g.segments == 1) return;
  u32 width = 32;
  while (width > 2 * call.rows) width /= 2;
  cuda_shim::launch(static_cast<u32>(ceil_div(2 * call.rows, width)), kGradientThreads, backwards,
                    [&] { add_segments_kernel<Computing<Element>>(call, g.segments, width); });
}

}  // namespace

int main() {
  for (Case one; read_case(one);) {
    Launch call = one.call;
    if (element_size(call.type) != sizeof(Element)) cuda_shim::fail("a launch for another program");
    const u64 size = call.rows * (call.type == kFloat64 ? 8 : 4);
    Memory matrix(one.matrix_bytes), mu(size), sigma(size);
    read(matrix, one.matrix_bytes);
    call.matrix = matrix.at(call.matrix);
    call.first = mu.data;
    call.second = sigma.data;
    place(call, one.origin);

    GradientGeometry geometry = gradient_geometry(call);
    if (one.rows > 0) {
      geometry.rows = one.rows;
      geometry.across ? set_tiles_across(call, geometry) : set_tiles_along(call, geometry);
      set_turns(call, geometry);
    }
    if (one.tiles > 0) geometry.tiles = one.tiles;
    if (one.slots > 0) geometry.slots = one.slots;
    if (one.turns > 0) geometry.turns = one.turns;
    if (one.sweeps > 0) geometry.sweeps = one.sweeps;
    complete(call, geometry);
    const Memory scratch(scratch_size(call, geometry) * sizeof(double));
    call.scratch = reinterpret_cast<double*>(scratch.data);
    run_all(call, geometry, one.backwards);
    write(&geometry, sizeof geometry);
    write(mu.data, size);
    write(sigma.data, size);
  }
}
