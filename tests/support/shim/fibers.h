// A grid of CUDA threads on the CPU.
//
// Every CUDA thread of a block is a fiber. The scheduler resumes one thread at a time, in ascending or descending order
// of blocks, warps and lanes. A thread runs until a barrier, or an exchange within its warp. If a needed
// barrier is missing, one of the two orders lets a thread read memory before it is written.
//
// The file that includes this one defines `fail` and `begin_block`.
#pragma once

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

struct Index {
  unsigned x, y;
};
inline Index gridDim, blockIdx, blockDim, threadIdx;

namespace fibers {

[[noreturn]] void fail(const char* message);
void begin_block();

constexpr unsigned kWarp = 32;
constexpr std::size_t kStack = 256 << 10;

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

inline std::vector<Thread> threads;
inline Place scheduler;
inline void* fake_stack;
inline const void* stack;
inline std::size_t stack_size;
inline std::function<void()> kernel;

// AddressSanitizer must know the current stack.
#ifdef __SANITIZE_ADDRESS__
inline void start_switch(void** old, const void* to, std::size_t size) {
  __sanitizer_start_switch_fiber(old, to, size);
}
inline void finish_switch(void* fake, const void** from, std::size_t* size) {
  __sanitizer_finish_switch_fiber(fake, from, size);
}
#else
inline void start_switch(void**, const void*, std::size_t) {}
inline void finish_switch(void*, const void**, std::size_t*) {}
#endif

// swapcontext takes ten times as long, since it also switches the signal mask.
[[noreturn, gnu::noinline, gnu::no_sanitize("address")]] inline void go_to(Place& place) {
  __builtin_longjmp(place, 1);
}

[[gnu::noinline, gnu::no_sanitize("address")]] inline void jump(Place& from, Place& to) {
  if (__builtin_setjmp(from) == 0) go_to(to);
}

inline void to_scheduler(Thread& thread) {
  start_switch(&thread.fake_stack, stack, stack_size);
  jump(thread.place, scheduler);
  finish_switch(thread.fake_stack, nullptr, nullptr);
}

// The fiber of one thread, for all blocks.
inline void run_thread() {
  Thread& thread = threads[threadIdx.x];
  finish_switch(nullptr, &stack, &stack_size);
  for (;;) {
    to_scheduler(thread);
    kernel();
    thread.wait = kDone;
  }
}

inline void resume(unsigned index) {
  Thread& thread = threads[index];
  threadIdx.x = index;
  start_switch(&fake_stack, thread.stack.get(), kStack);
  jump(scheduler, thread.place);
  finish_switch(fake_stack, nullptr, nullptr);
}

[[gnu::noinline, gnu::no_sanitize("address")]] inline void create_thread(unsigned index) {
  Thread& thread = threads[index];
  threadIdx.x = index;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = thread.stack.get();
  context.uc_stack.ss_size = kStack;
  makecontext(&context, run_thread, 0);
  start_switch(&fake_stack, thread.stack.get(), kStack);
  if (__builtin_setjmp(scheduler) == 0) setcontext(&context);
  finish_switch(fake_stack, nullptr, nullptr);
}

inline std::uint64_t wait_for_others(Wait wait, std::uint64_t value = 0, unsigned from = 0) {
  Thread& thread = threads[threadIdx.x];
  thread.wait = wait, thread.value = value, thread.from = from;
  to_scheduler(thread);
  return thread.value;
}

// Runs a warp until all its threads wait at a barrier of the block, or are done.
inline void run_warp(unsigned first, bool backwards) {
  Thread* const warp = &threads[first];
  for (;;) {
    for (unsigned k = 0; k < kWarp; ++k) {
      const unsigned lane = backwards ? kWarp - 1 - k : k;
      if (warp[lane].wait == kReady) resume(first + lane);
    }
    const Wait wait = warp[0].wait;
    std::uint64_t values[kWarp], all = 1;
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      threadIdx.x = first + lane;
      if (warp[lane].wait != wait) fail("diverges from its warp");
      values[lane] = warp[lane].value;
      all &= values[lane];
    }
    if (wait == kBlock || wait == kDone) return;
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      warp[lane].value = wait == kShuffle ? values[warp[lane].from % kWarp] : all;
      warp[lane].wait = kReady;
    }
  }
}

inline void run_block(bool backwards) {
  begin_block();
  for (unsigned k = 0; k < blockDim.x; ++k) threads[k].wait = kReady;
  for (;;) {
    for (unsigned k = 0; k < blockDim.x; k += kWarp) run_warp(backwards ? blockDim.x - kWarp - k : k, backwards);
    const Wait wait = threads[0].wait;
    for (unsigned k = 0; k < blockDim.x; ++k) {
      threadIdx.x = k;
      if (threads[k].wait != wait) fail("diverges from its block");
      if (wait == kBlock) threads[k].wait = kReady;
    }
    if (wait == kDone) return;
  }
}

// kernel<<<dim3(blocks, batch), threads>>>
inline void launch(unsigned blocks, unsigned batch, unsigned block_threads, bool backwards,
                   std::function<void()> of_thread) {
  if (blocks == 0 || block_threads == 0 || block_threads % kWarp != 0) fail("invalid grid");
  threads.reserve(1024);
  while (threads.size() < block_threads) {
    threads.emplace_back();
    create_thread(static_cast<unsigned>(threads.size() - 1));
  }
  kernel = std::move(of_thread);
  gridDim = {blocks, batch};
  blockDim = {block_threads, 1};
  for (unsigned k = 0; k < blocks * batch; ++k) {
    const unsigned place = backwards ? blocks * batch - 1 - k : k;
    blockIdx = {place % blocks, place / blocks};
    run_block(backwards);
  }
}

}  // namespace fibers
