// The CUDA names that our kernels use, for a C++ compiler, so that the kernels run on the CPU.
//
// Every CUDA thread of a block is a fiber, which runs until it must wait for other threads: at a barrier, or in an
// exchange within its warp. Warps, and the threads of a warp, run one after the other, in ascending or descending
// order, and each runs as far as it can. So a missing barrier makes a thread read garbage. __CUDACC__ is not defined,
// so stream/arithmetic.h selects its CPU functions.
#pragma once

#include <sanitizer/common_interface_defs.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "stream/normals.h"

#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

struct Index {
  unsigned x, y;
};
inline Index gridDim, blockIdx, blockDim, threadIdx;

namespace cuda_shim {

[[noreturn]] inline void fail(const char* message) {
  std::fprintf(stderr, "block %u, thread %u: %s\n", blockIdx.x, threadIdx.x, message);
  std::abort();
}

constexpr unsigned kWarp = 32;
constexpr std::size_t kStack = 128 << 10;

enum Wait { kReady, kBlock, kWarpBarrier, kShuffle, kVote, kDone };

using Place = void* [5];  // where a fiber continues

struct Thread {
  Place place;
  std::unique_ptr<char[]> stack{new char[kStack]};
  void* fake_stack;
  Wait wait;
  std::uint64_t value;  // the lane's value before a shuffle, then the received value
  unsigned from;        // source lane of the shuffle
};

struct Fibers {
  std::vector<Thread> threads;
  Place scheduler;
  void* fake_stack;
  const void* stack;
  std::size_t stack_size;
  std::function<void()> kernel;
};
inline Fibers fibers;

// Shared memory is on the heap, where AddressSanitizer checks its bounds.
inline std::vector<std::pair<void*, std::size_t>> shared_memory;

// The shared memory of declaration `id` in the program, of type T. The tests replace `__shared__` by this function.
template <class T, int id>
T& shared() {
  static T* const memory = [] {
    void* const allocated = std::malloc(sizeof(T));
    shared_memory.emplace_back(allocated, sizeof(T));
    std::memset(allocated, 0xA5, sizeof(T));
    return static_cast<T*>(allocated);
  }();
  return *memory;
}

// swapcontext takes ten times as long, since it also switches the signal mask.
[[noreturn, gnu::noinline, gnu::no_sanitize("address")]] inline void go_to(Place& place) {
  __builtin_longjmp(place, 1);
}

[[gnu::noinline, gnu::no_sanitize("address")]] inline void jump(Place& from, Place& to) {
  if (__builtin_setjmp(from) == 0) go_to(to);
}

inline void to_scheduler(Thread& thread) {
  __sanitizer_start_switch_fiber(&thread.fake_stack, fibers.stack, fibers.stack_size);
  jump(thread.place, fibers.scheduler);
  __sanitizer_finish_switch_fiber(thread.fake_stack, nullptr, nullptr);
}

// The fiber of one thread, for all blocks.
inline void run_thread() {
  Thread& thread = fibers.threads[threadIdx.x];
  __sanitizer_finish_switch_fiber(nullptr, &fibers.stack, &fibers.stack_size);
  for (;;) {
    to_scheduler(thread);
    fibers.kernel();
    thread.wait = kDone;
  }
}

inline void resume(unsigned index) {
  Thread& thread = fibers.threads[index];
  threadIdx.x = index;
  __sanitizer_start_switch_fiber(&fibers.fake_stack, thread.stack.get(), kStack);
  jump(fibers.scheduler, thread.place);
  __sanitizer_finish_switch_fiber(fibers.fake_stack, nullptr, nullptr);
}

[[gnu::noinline, gnu::no_sanitize("address")]] inline void create_thread(unsigned index) {
  Thread& thread = fibers.threads[index];
  threadIdx.x = index;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = thread.stack.get();
  context.uc_stack.ss_size = kStack;
  makecontext(&context, run_thread, 0);
  __sanitizer_start_switch_fiber(&fibers.fake_stack, thread.stack.get(), kStack);
  if (__builtin_setjmp(fibers.scheduler) == 0) setcontext(&context);
  __sanitizer_finish_switch_fiber(fibers.fake_stack, nullptr, nullptr);
}

inline std::uint64_t wait_for_others(Wait wait, std::uint64_t value = 0, unsigned from = 0) {
  Thread& thread = fibers.threads[threadIdx.x];
  thread.wait = wait, thread.value = value, thread.from = from;
  to_scheduler(thread);
  return thread.value;
}

// Runs a warp until all its threads wait at a barrier of the block, or are done.
inline void run_warp(Thread* warp, unsigned first, bool backwards) {
  for (;;) {
    for (unsigned k = 0; k < kWarp; ++k) {
      const unsigned lane = backwards ? kWarp - 1 - k : k;
      if (warp[lane].wait == kReady) resume(first + lane);
    }
    const Wait wait = warp[0].wait;
    std::uint64_t values[kWarp], all = 1;
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if (warp[lane].wait != wait) fail("threads of a warp wait at different barriers");
      values[lane] = warp[lane].value;
      all &= values[lane];
    }
    if (wait == kBlock || wait == kDone) return;
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      warp[lane].value = wait == kShuffle ? values[warp[lane].from] : all;
      warp[lane].wait = kReady;
    }
  }
}

inline void run_block(unsigned threads, bool backwards) {
  for (auto& [memory, size] : shared_memory) std::memset(memory, 0xA5, size);
  for (unsigned k = 0; k < threads; ++k) fibers.threads[k].wait = kReady;
  for (;;) {
    for (unsigned k = 0; k < threads; k += kWarp) {
      const unsigned first = backwards ? threads - kWarp - k : k;
      run_warp(&fibers.threads[first], first, backwards);
    }
    const Wait wait = fibers.threads[0].wait;
    for (unsigned k = 0; k < threads; ++k) {
      if (fibers.threads[k].wait != wait) fail("some threads of the block wait at a barrier, and others are done");
      if (wait == kBlock) fibers.threads[k].wait = kReady;
    }
    if (wait == kDone) return;
  }
}

// kernel<<<blocks, threads>>>
inline void launch(unsigned blocks, unsigned threads, bool backwards, std::function<void()> kernel) {
  if (blocks == 0 || threads == 0 || threads % kWarp != 0) fail("invalid grid");
  fibers.threads.reserve(1024);
  while (fibers.threads.size() < threads) {
    fibers.threads.emplace_back();
    create_thread(static_cast<unsigned>(fibers.threads.size() - 1));
  }
  fibers.kernel = std::move(kernel);
  gridDim.x = blocks;
  blockDim.x = threads;
  for (unsigned k = 0; k < blocks; ++k) {
    blockIdx.x = backwards ? blocks - 1 - k : k;
    run_block(threads, backwards);
  }
}

template <class T>
T exchange(unsigned mask, T x, unsigned from) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles exchange 4 or 8 bytes");
  if (mask != ~0u) fail("a mask of some lanes");
  std::uint64_t value = 0;
  std::memcpy(&value, &x, sizeof x);
  value = wait_for_others(kShuffle, value, from);
  std::memcpy(&x, &value, sizeof x);
  return x;
}

}  // namespace cuda_shim

inline void __syncthreads() { cuda_shim::wait_for_others(cuda_shim::kBlock); }
inline void __syncwarp() { cuda_shim::wait_for_others(cuda_shim::kWarpBarrier); }
inline int __all_sync(unsigned mask, int predicate) {
  if (mask != ~0u) cuda_shim::fail("a mask of some lanes");
  return static_cast<int>(cuda_shim::wait_for_others(cuda_shim::kVote, predicate != 0));
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

// Deliberately different from a GPU, whose result cannot be computed here, so that an unintended use is detected.
inline Normals<float> fast_normals(const Words&) { return {1e30f, 1e30f, 1e30f, 1e30f}; }

}  // namespace multisample
