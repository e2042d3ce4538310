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
  Draw draw;  // the matrix's address is an offset into its memory; a word's address is nonzero if it is in memory
  u64 matrix_bytes;
  Origin origin;
  u32 rows, tiles, slots, turns, passes;  // fields of the geometry to change, if not 0
  u32 backwards;
};
static_assert(sizeof(Case) == sizeof(Draw) + 64, "test_gradient_sources.py packs it");

template <class G, bool shared, bool antithetic, u32 rows, bool only_at_once, bool origin_in_memory = false>
void run(const Draw& draw, const GradientGeometry& g, bool backwards) {
  const Keys<typename Computing<G>::Type> keys(draw.seed.value);
  cuda_shim::launch(g.blocks, g.threads, backwards, [&] {
    gradient_kernel<G, shared, antithetic, false, rows, only_at_once, origin_in_memory>(draw, g, keys);
  });
}

template <class G, bool shared, bool antithetic>
void run_rows(const Draw& draw, const GradientGeometry& g, bool backwards) {
  constexpr u32 rows = rows_at_once(sizeof(G) == 8 ? kFloat64 : kFloat32, shared, antithetic);
  if (has_origin_in_memory(draw)) {
    run<G, false, antithetic, 1, false, true>(draw, g, backwards);
  } else if (rows == 1 || g.rows == 1) {
    run<G, false, antithetic, 1, false>(draw, g, backwards);
  } else if (g.loads == kAtOnce) {
    run<G, shared, antithetic, rows, true>(draw, g, backwards);
  } else {
    run<G, shared, antithetic, rows, false>(draw, g, backwards);
  }
}

template <class G>
void run_noise(const Draw& draw, const GradientGeometry& g, bool backwards) {
  if (draw.antithetic) {
    draw.common_noise ? run_rows<G, true, true>(draw, g, backwards) : run_rows<G, false, true>(draw, g, backwards);
  } else {
    draw.common_noise ? run_rows<G, true, false>(draw, g, backwards) : run_rows<G, false, false>(draw, g, backwards);
  }
  if (g.segments == 1) return;
  using Real = typename Computing<G>::Type;
  u32 width = 32;
  while (width > 2 * draw.rows) width /= 2;
  cuda_shim::launch(static_cast<u32>(ceil_div(2 * draw.rows, width)), kGradientThreads, backwards,
                    [&] { add_segments_kernel<Real>(draw, g.segments, width); });
}

}  // namespace

int main() {
  for (Case one; read_case(one);) {
    Draw draw = one.draw;
    if (element_size(draw.type) != sizeof(Element)) cuda_shim::fail("a draw for another program");
    const u64 size = draw.rows * (draw.type == kFloat64 ? 8 : 4);
    Memory matrix(one.matrix_bytes), mu(size), sigma(size);
    read(matrix, one.matrix_bytes);
    draw.matrix = matrix.at(draw.matrix);
    draw.mu.data = mu.data;
    draw.sigma.data = sigma.data;
    place(draw, one.origin);

    GradientGeometry geometry = gradient_geometry(draw);
    if (one.rows > 0) {
      geometry.rows = one.rows;
      geometry.across ? set_tiles_across(draw, geometry) : set_tiles_along(draw, geometry);
      set_turns(draw, geometry);
    }
    if (one.tiles > 0) geometry.tiles = one.tiles;
    if (one.slots > 0) geometry.slots = one.slots;
    if (one.turns > 0) geometry.turns = one.turns;
    if (one.passes > 0) geometry.passes = one.passes;
    complete(draw, geometry);
    const Memory scratch(scratch_size(draw, geometry) * sizeof(double));
    draw.scratch = reinterpret_cast<double*>(scratch.data);
    run_noise<Element>(draw, geometry, one.backwards);
    write(&geometry, sizeof geometry);
    write(mu.data, size);
    write(sigma.data, size);
  }
}
