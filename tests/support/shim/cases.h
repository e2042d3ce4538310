// Cases for the programs that run CUDA kernels on the CPU: read from standard input, with results on standard output.
#pragma once

#include "cuda_shim.h"
// clang-format off: the kernels need the macros of the shim.
#include "cuda/conversion_kernel.cuh"
// clang-format on

namespace cases {

using namespace multisample;

// Memory with the alignment of CUDA allocators and exactly the requested size. The default garbage is NaNs.
struct Memory {
  char* data = nullptr;
  explicit Memory(u64 size, int garbage = 0xFF) {
    if (posix_memalign(reinterpret_cast<void**>(&data), 256, size) != 0) cuda_shim::fail("no memory");
    std::memset(data, garbage, size);
  }
  ~Memory() { std::free(data); }
  Memory(const Memory&) = delete;
  char* at(const void* offset) const { return data + reinterpret_cast<u64>(offset); }
};

// Values of a launch's words. A non-null address in a case means: the kernel reads this word from memory. `place` sets
// the real address.
struct Origin {
  u64 seed, offset, first_row, first_column;
};

inline void place(Launch& launch, const Origin& origin) {
  if (launch.seed_at != nullptr) launch.seed_at = &origin.seed;
  if (launch.offset_at != nullptr) launch.offset_at = &origin.offset;
  if (launch.first_row_at != nullptr) launch.first_row_at = &origin.first_row;
  if (launch.first_column_at != nullptr) launch.first_column_at = &origin.first_column;
}

template <class Case>
bool read_case(Case& one) {
  std::fflush(stdout);  // This case may end the program.
  return std::fread(&one, sizeof one, 1, stdin) == 1;
}

inline void read(const Memory& to, u64 size) {
  if (size != 0 && std::fread(to.data, size, 1, stdin) != 1) cuda_shim::fail("the input ends early");
}

inline void write(const void* from, u64 size) {
  if (std::fwrite(from, size, 1, stdout) != 1) cuda_shim::fail("cannot write");
}

// Bytes of scratch memory that a call needs for its conversions and for `more` float64 numbers.
inline u64 scratch_bytes(Launch call, u64 more = 0) {
  Conversions conversions;
  return (convert_vectors(&call, &conversions) + more) * sizeof(double);
}

// Converts the vectors that the kernels of a call cannot read. Afterwards, call.scratch points behind the copies.
template <class Real>
void convert(Launch& call, const Memory& scratch) {
  Conversions conversions;
  call.scratch = reinterpret_cast<double*>(scratch.data);
  if (convert_vectors(&call, &conversions) == 0) return;
  const u32 count = static_cast<u32>(conversions.count);
  fibers::launch(2, count, kConversionThreads, false, [&] { conversion_kernel<Real>(conversions); });
}

}  // namespace cases
