// Runs the CUDA kernel on the CPU, block by block: reads cases from standard input, and writes results to standard
// output.
//
// A case is a `Case`, the bytes of mu and sigma, and the words of a batch's second and further matrices. Its result is
// a `Result`, the bytes of the output, and the number of writes to each element.
#include "cases.h"
// clang-format off: the kernel needs the macros of the shim.
#include "cuda/advance_kernel.cuh"
#include "cuda/kernel.cuh"
// clang-format on

namespace {

using namespace cases;

// Each program has the kernels of one element type and one noise, with seed and window by value or in memory. Tests
// compile several programs in parallel.
using Element = ELEMENT;
constexpr bool kShared = SHARED;
constexpr bool kOriginInMemory = ORIGIN_IN_MEMORY;

struct Case {
  Launch call;  // addresses are offsets into the memory below; a word's address is nonzero if it is in memory
  u64 mu_bytes, sigma_bytes, out_bytes;
  Origin origin;
  u32 backwards, has_geometry;
  Geometry geometry;  // if `has_geometry`
};
static_assert(sizeof(Case) == (sizeof(Launch) + 64 + sizeof(Geometry) + 7) / 8 * 8, "test_cuda_sources.py packs it");

struct Result {
  Geometry geometry;
  u64 offset;  // after `advance`
};
static_assert(sizeof(Result) == (sizeof(Geometry) + 7) / 8 * 8 + 8, "test_cuda_sources.py unpacks it");

char* out_begin;
char* out_end;
std::vector<u8> writes;

}  // namespace

namespace multisample {

// An element that counts the writes to it.
template <class T>
struct Counted {
  T value;

  Counted() = default;
  Counted(T x) : value(x) {}
  Counted(const Counted&) = default;
  Counted& operator=(const Counted& x) {
    value = x.value;
    char* const at = reinterpret_cast<char*>(this);
    if (at >= out_begin && at < out_end) ++writes[static_cast<u64>(at - out_begin) / sizeof(T)];
    return *this;
  }
};

template <>
inline Counted<float16> narrow(float x) {
  return narrow<float16>(x);
}
template <>
inline Counted<bfloat16> narrow(float x) {
  return narrow<bfloat16>(x);
}
template <class T>
Computing<T> widen(Counted<T> x) {
  return converted<Computing<T>>(x.value);
}
template <class T>
Counted<T> shuffle_up(Counted<T> x) {
  return shuffle_up(x.value);
}

}  // namespace multisample

namespace {

template <bool antithetic, StoreKind store_kind>
void run(const Launch& call, const Geometry& g, bool backwards) {
  const u32 batch = store_kind == kSmallMatrices || call.batch == 0 ? 1 : call.batch;
  // The plain kernels take all words by value.
  constexpr bool in_memory = kOriginInMemory && store_kind != kPlain && store_kind != kPlainTransposed;
  with_version<Element, antithetic, store_kind>(g, [&](auto turns, auto usual) {
    const auto kernel =
        sample_kernel<Counted<Element>, kShared, antithetic, false, store_kind, in_memory, in_memory, turns, usual>;
    fibers::launch(g.blocks, batch, g.threads, backwards, [&] { kernel(call, g); });
  });
}

template <bool antithetic>
void run_stores(const Launch& call, const Geometry& g, bool backwards) {
  switch (g.store_kind) {
    case kAligned: return run<antithetic, kAligned>(call, g, backwards);
    case kShifted: return run<antithetic, kShifted>(call, g, backwards);
    case kStaged: return run<antithetic, kStaged>(call, g, backwards);
    case kTransposed: return run<antithetic, kTransposed>(call, g, backwards);
    case kTransposedStaged: return run<antithetic, kTransposedStaged>(call, g, backwards);
    case kFewColumns: return run<antithetic, kFewColumns>(call, g, backwards);
    case kSmallMatrices: return run<antithetic, kSmallMatrices>(call, g, backwards);
    case kPlain: return run<antithetic, kPlain>(call, g, backwards);
    case kPlainTransposed: return run<antithetic, kPlainTransposed>(call, g, backwards);
    case kFewRows: return run<antithetic, kFewRows>(call, g, backwards);
    default: return run<antithetic, kStrided>(call, g, backwards);
  }
}

}  // namespace

int main() {
  for (Case one; read_case(one);) {
    Memory mu(one.mu_bytes), sigma(one.sigma_bytes), out(one.out_bytes, 0xC3);
    read(mu, one.mu_bytes);
    read(sigma, one.sigma_bytes);
    Launch call = one.call;
    std::vector<Origin> origins(call.batch > 1 ? call.batch : 1, one.origin);
    Memory further((origins.size() - 1) * sizeof(Origin));
    read(further, (origins.size() - 1) * sizeof(Origin));
    std::memcpy(origins.data() + 1, further.data, (origins.size() - 1) * sizeof(Origin));
    if (call.mu_type != kNumber) call.mu.data = mu.at(call.mu.data);
    if (call.sigma_type != kNumber) call.sigma.data = sigma.at(call.sigma.data);
    call.matrix = out.at(call.matrix);
    place(call, origins[0]);
    const Memory scratch(scratch_bytes(call));
    convert<Computing<Element>>(call, scratch);
    if ((call.origin_in_memory != 0) != kOriginInMemory || call.shared_noise != kShared ||
        element_size(call.type) != sizeof(Element)) {
      cuda_shim::fail("a launch for another program");
    }
    out_begin = out.data;
    out_end = out.data + one.out_bytes;
    writes.assign(one.out_bytes / element_size(call.type), 0);

    Result result{};
    const Geometry& geometry = result.geometry = one.has_geometry ? one.geometry : geometry_of(call);
    const auto run_kernel = [&] {
      call.antithetic ? run_stores<true>(call, geometry, one.backwards)
                      : run_stores<false>(call, geometry, one.backwards);
    };
    // A sample of one column also keeps its noise, as a sample with mu = -0.0 and sigma = 1 draws it.
    const bool keeps_noise = geometry.store_kind == kFewColumns && call.columns == 1;
    const u64 noise_bytes = keeps_noise ? call.rows * sizeof(Element) : 0;
    const Memory kept(noise_bytes), noise(noise_bytes);
    call.results = keeps_noise, call.first = kept.data;
    run_kernel();
    if (keeps_noise) {
      call.results = 0, call.matrix = noise.data, call.row_stride = call.column_stride = sizeof(Element);
      call.mu.number = -0.0, call.sigma.number = 1, call.mu_type = call.sigma_type = kNumber;
      run_kernel();
      if (std::memcmp(kept.data, noise.data, noise_bytes) != 0) cuda_shim::fail("other noise is kept than drawn");
    }
    advance_kernel(&origins[0].offset);
    result.offset = origins[0].offset;
    write(&result, sizeof result);
    write(out.data, one.out_bytes);
    write(writes.data(), writes.size());
  }
}
