// The CUDA names that our kernels use, for a C++ compiler, so that the kernels run on the CPU, as fibers.h explains.
// __CUDACC__ is not defined, so stream/arithmetic.h selects its CPU functions.
#pragma once

#include "fibers.h"
#include "narrow.h"
#include "stream/normals.h"

#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

namespace fibers {

[[noreturn]] inline void fail(const char* message) {
  std::fprintf(stderr, "block %u, thread %u: %s\n", blockIdx.x, threadIdx.x, message);
  std::abort();
}

// Shared memory is on the heap, where AddressSanitizer checks its bounds.
inline std::vector<std::pair<void*, std::size_t>> shared_memory;

inline void begin_block() {
  for (auto& [memory, size] : shared_memory) std::memset(memory, 0xA5, size);
}

}  // namespace fibers

namespace cuda_shim {

using fibers::fail, fibers::kWarp;

// The shared memory of declaration `id` in the program, of type T. The tests replace `__shared__` by this function.
template <class T, int id>
T& shared() {
  static T* const memory = [] {
    void* const allocated = std::malloc(sizeof(T));
    fibers::shared_memory.emplace_back(allocated, sizeof(T));
    std::memset(allocated, 0xA5, sizeof(T));
    return static_cast<T*>(allocated);
  }();
  return *memory;
}

// kernel<<<blocks, threads>>>
inline void launch(unsigned blocks, unsigned threads, bool backwards, std::function<void()> kernel) {
  fibers::launch(blocks, 1, threads, backwards, std::move(kernel));
}

template <class T>
T exchange(unsigned mask, T x, unsigned from) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles exchange 4 or 8 bytes");
  if (mask != ~0u) fail("a mask of some lanes");
  std::uint64_t value = 0;
  std::memcpy(&value, &x, sizeof x);
  value = fibers::wait_for_others(fibers::kShuffle, value, from);
  std::memcpy(static_cast<void*>(&x), &value, sizeof x);
  return x;
}

}  // namespace cuda_shim

inline void __syncthreads() { fibers::wait_for_others(fibers::kBlock); }
inline void __syncwarp() { fibers::wait_for_others(fibers::kWarpBarrier); }
inline int __all_sync(unsigned mask, int predicate) {
  if (mask != ~0u) cuda_shim::fail("a mask of some lanes");
  return static_cast<int>(fibers::wait_for_others(fibers::kVote, predicate != 0));
}
template <class T>
T __shfl_sync(unsigned mask, T x, unsigned lane) {
  return cuda_shim::exchange(mask, x, lane % cuda_shim::kWarp);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, unsigned bits) {
  return cuda_shim::exchange(mask, x, (threadIdx.x ^ bits) % cuda_shim::kWarp);
}
template <class T>
T __shfl_up_sync(unsigned mask, T x, unsigned delta) {
  const unsigned lane = threadIdx.x % cuda_shim::kWarp;
  return cuda_shim::exchange(mask, x, lane < delta ? lane : lane - delta);
}

namespace multisample {

// The CPU cannot compute a GPU's fast normals. These values are absurd, so that a test that uses them fails.
inline Normals<float> fast_normals(const Words&) { return {1e30f, 1e30f, 1e30f, 1e30f}; }

}  // namespace multisample
