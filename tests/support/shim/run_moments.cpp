// Runs the CUDA kernels of weighted moments on the CPU, block by block: reads cases from standard input, and writes
// results to standard output.
//
// A case is a `Case`, the weights, mu and sigma. Its result is the geometry and the bytes of the two moments.
#include "cuda_shim.h"
// clang-format off: the kernel needs the macros of the shim.
#include "cuda/moments_kernel.cuh"
// clang-format on

namespace {

using namespace multisample;

// A program has the kernels of one computing type.
using Real = ELEMENT;

struct Case {
  Moments moments;  // `second` is not null if it is asked for; a word's address is not null if it is in memory
  u64 weight_bytes, vector_bytes;
  u64 seed, offset, first_row, first_column;  // values of the words in memory
  MomentGeometry geometry;                    // instead of the usual one, if it has blocks
  u64 backwards;
};
static_assert(sizeof(Case) == sizeof(Moments) + sizeof(MomentGeometry) + 56, "test_moments_kernels.py packs it");

// Memory with the alignment of CUDA allocators and exactly the requested size.
struct Memory {
  char* data = nullptr;
  explicit Memory(u64 size) {
    if (posix_memalign(reinterpret_cast<void**>(&data), 256, size) != 0) cuda_shim::fail("no memory");
    std::memset(data, 0xFF, size);  // NaNs
  }
  ~Memory() { std::free(data); }
  Memory(const Memory&) = delete;
};

template <bool antithetic, u32 rows, bool with_second, bool origin_in_memory>
void run(const Moments& call, const MomentGeometry& g, bool backwards) {
  const Keys<Real> keys(call.draw.seed.value);
  cuda_shim::launch(g.blocks, kMomentThreads, backwards, [&] {
    moments_kernel<Real, antithetic, false, rows, with_second, origin_in_memory>(call, g, keys);
  });
  if (g.finishing_blocks == 0) return;
  cuda_shim::launch(g.finishing_blocks, kMomentThreads, backwards, [&] { finish_moments_kernel<Real>(call, g); });
}

template <bool antithetic, bool with_second>
void run_rows(const Moments& call, const MomentGeometry& g, bool backwards) {
  if (has_origin_in_memory(call.draw)) {
    run<antithetic, 1, with_second, true>(call, g, backwards);
  } else if (sizeof(Real) == 4 && g.rows > 1) {
    run<antithetic, sizeof(Real) == 4 ? kMomentRows : 1, with_second, false>(call, g, backwards);
  } else {
    run<antithetic, 1, with_second, false>(call, g, backwards);
  }
}

template <bool antithetic>
void run_order(const Moments& call, const MomentGeometry& g, bool backwards) {
  call.second == nullptr ? run_rows<antithetic, false>(call, g, backwards)
                         : run_rows<antithetic, true>(call, g, backwards);
}

void place(Word& word, const u64& memory) {
  if (word.at != nullptr) word.at = &memory;
}

bool read(void* to, u64 size) { return size == 0 || std::fread(to, size, 1, stdin) == 1; }

void write(const void* from, u64 size) {
  if (std::fwrite(from, size, 1, stdout) != 1) cuda_shim::fail("cannot write");
}

}  // namespace

int main() {
  for (Case one; read(&one, sizeof one);) {
    Moments call = one.moments;
    const u64 size = call.draw.rows * element_size(call.draw.type);
    Memory weights(one.weight_bytes), mu(one.vector_bytes), sigma(one.vector_bytes), first(size), second(size);
    if (!read(weights.data, one.weight_bytes) || !read(mu.data, one.vector_bytes) ||
        !read(sigma.data, one.vector_bytes)) {
      cuda_shim::fail("the input ends early");
    }
    call.weights.data = weights.data;
    call.draw.mu.data = mu.data;
    call.draw.sigma.data = sigma.data;
    call.first = first.data;
    if (call.second != nullptr) call.second = second.data;
    place(call.draw.seed, one.seed);
    place(call.draw.offset, one.offset);
    place(call.draw.first_row, one.first_row);
    place(call.draw.first_column, one.first_column);

    MomentGeometry geometry = moment_geometry(call.draw);
    write(&geometry, sizeof geometry);
    if (one.geometry.blocks > 0) geometry = one.geometry;
    const Memory scratch(scratch_size(call, geometry) * sizeof(double));
    call.draw.scratch = reinterpret_cast<double*>(scratch.data);
    call.draw.antithetic ? run_order<true>(call, geometry, one.backwards)
                         : run_order<false>(call, geometry, one.backwards);
    write(first.data, size);
    write(second.data, size);
    std::fflush(stdout);  // The next case may end the program.
  }
}
