// Runs the CUDA kernels of the gradient on the CPU, block by block: cases from the standard input, results to the
// standard output.
//
// A case is a `Case`, then the bytes of grad; its result is the geometry, and the bytes of the two gradients.
#include "cuda_shim.h"
#include "gradient_kernel.cuh"

namespace {

using namespace multisample;

struct Case {
  GradientCall call;  // with an offset into grad's memory for its address; of a counter, only whether there is one
  u64 grad_bytes;
  u64 counter;                    // what it holds
  u32 rows, tiles, slots, turns;  // of the geometry, where they are not 0
  u32 backwards, unused;
};
static_assert(sizeof(Case) == sizeof(GradientCall) + 40, "test_gradient_sources.py packs it");

// Memory as from a CUDA allocator, but no byte longer than asked for.
struct Memory {
  char* data = nullptr;
  explicit Memory(u64 size) {
    if (posix_memalign(reinterpret_cast<void**>(&data), 256, size) != 0) cuda_shim::fail("no memory");
    std::memset(data, 0xFF, size);  // NaNs
  }
  ~Memory() { std::free(data); }
  Memory(const Memory&) = delete;
};

template <class G, bool shared, bool antithetic, u32 rows, bool only_at_once>
void run(const GradientCall& call, const GradientGeometry& g, bool backwards) {
  const Keys<typename Computing<G>::Type> keys(call.seed);
  cuda_shim::launch(g.blocks, g.threads, backwards,
                    [&] { gradient_kernel<G, shared, antithetic, false, rows, only_at_once>(call, g, keys); });
}

template <class G, bool shared, bool antithetic>
void run_rows(const GradientCall& call, const GradientGeometry& g, bool backwards) {
  constexpr u32 rows = rows_at_once(sizeof(G) == 8 ? kFloat64 : kFloat32, shared, antithetic);
  if (rows == 1 || g.rows == 1) {
    run<G, false, antithetic, 1, false>(call, g, backwards);
  } else if (g.loads == kAtOnce) {
    run<G, shared, antithetic, rows, true>(call, g, backwards);
  } else {
    run<G, shared, antithetic, rows, false>(call, g, backwards);
  }
}

template <class G>
void run_noise(const GradientCall& call, const GradientGeometry& g, bool backwards) {
  if (call.antithetic) {
    call.shared ? run_rows<G, true, true>(call, g, backwards) : run_rows<G, false, true>(call, g, backwards);
  } else {
    call.shared ? run_rows<G, true, false>(call, g, backwards) : run_rows<G, false, false>(call, g, backwards);
  }
  if (g.segments == 1) return;
  using Real = typename Computing<G>::Type;
  u32 width = 32;
  while (width > 2 * call.rows) width /= 2;
  cuda_shim::launch(static_cast<u32>(ceil_div(2 * call.rows, width)), kGradientThreads, backwards,
                    [&] { add_segments_kernel<Real>(call, g.segments, width); });
}

bool read(void* to, u64 size) { return size == 0 || std::fread(to, size, 1, stdin) == 1; }

void write(const void* from, u64 size) {
  if (std::fwrite(from, size, 1, stdout) != 1) cuda_shim::fail("cannot write");
}

}  // namespace

int main() {
  for (Case one; read(&one, sizeof one);) {
    GradientCall call = one.call;
    const u64 size = call.rows * (call.type == kFloat64 ? 8 : 4);
    Memory grad(one.grad_bytes), mu(size), sigma(size);
    if (!read(grad.data, one.grad_bytes)) cuda_shim::fail("the input ends early");
    call.grad = grad.data + reinterpret_cast<u64>(call.grad);
    call.grad_mu = mu.data;
    call.grad_sigma = sigma.data;
    if (call.counter != nullptr) call.counter = &one.counter;

    GradientGeometry geometry = gradient_geometry(call);
    if (one.rows > 0) {
      geometry.rows = one.rows;
      geometry.across ? set_tiles_across(call, geometry) : set_tiles_along(call, geometry);
      set_turns(call, geometry);
    }
    if (one.tiles > 0) geometry.tiles = one.tiles;
    if (one.slots > 0) geometry.slots = one.slots;
    if (one.turns > 0) geometry.turns = one.turns;
    complete(call, geometry);
    const Memory partial_sums(partial_sums_of(call, geometry) * sizeof(double));
    call.partial_sums = reinterpret_cast<double*>(partial_sums.data);
    switch (call.type) {
      case kFloat16: run_noise<float16>(call, geometry, one.backwards); break;
      case kBFloat16: run_noise<bfloat16>(call, geometry, one.backwards); break;
      case kFloat32: run_noise<float>(call, geometry, one.backwards); break;
      default: run_noise<double>(call, geometry, one.backwards);
    }
    write(&geometry, sizeof geometry);
    write(mu.data, size);
    write(sigma.data, size);
    std::fflush(stdout);  // Whatever the next case does.
  }
}
