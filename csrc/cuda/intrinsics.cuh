// GPU intrinsics: shuffles between the lanes of a warp, and values hidden from the optimizer. Threads and shared memory
// of an SM.
#pragma once

#include "stream/rounding.h"

namespace multisample {

// Maximum resident threads of an SM.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 800 || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1100)
constexpr int kThreadsAtOnce = 2048;
#elif __CUDA_ARCH__ < 800
constexpr int kThreadsAtOnce = 1024;
#else
constexpr int kThreadsAtOnce = 1536;
#endif

// Whether a multiprocessor has 164 KB of shared memory or more. With 64 or 100 KB, too few blocks would fit.
#if defined(__CUDA_ARCH__) && \
    (__CUDA_ARCH__ < 800 || __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ / 100 == 12)
constexpr bool kLargeSharedMemory = false;
#else
constexpr bool kLargeSharedMemory = true;
#endif

// Minimum resident blocks per SM for __launch_bounds__: `blocks`, or as many as an SM holds. The compiler ignores a
// higher number, with a warning.
MULTISAMPLE_HOST_FUNCTION constexpr int blocks_with_room(int blocks, int threads) {
  return blocks * threads <= kThreadsAtOnce ? blocks : kThreadsAtOnce / threads;
}

// `x` of the previous lane; lane 0 gets its own. All lanes of the warp take part.
MULTISAMPLE_FUNCTION float shuffle_up(float x) { return __shfl_up_sync(~0u, x, 1); }
MULTISAMPLE_FUNCTION double shuffle_up(double x) { return __shfl_up_sync(~0u, x, 1); }
template <class T>  // of 16 bits
MULTISAMPLE_FUNCTION T shuffle_up(T x) {
  return {static_cast<u16>(__shfl_up_sync(~0u, static_cast<u32>(x.bits), 1))};
}

#ifdef __CUDACC__

// Hides an address in global memory, or a number, from the optimizer. The result stays in a register: it is not
// recomputed for each conditional store, or in each iteration of a loop. Values that depend on the result are computed
// anew: the optimizer cannot merge it with the same computation elsewhere.
template <class T>
MULTISAMPLE_FUNCTION T* opaque(T* at) {
  asm volatile("" : "+l"(at));
  __builtin_assume(__isGlobal(at));
  return at;
}
MULTISAMPLE_FUNCTION u32 opaque(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}
// The same for an address in shared memory.
template <class T>
MULTISAMPLE_FUNCTION T* opaque_shared(T* at) {
  return static_cast<T*>(__cvta_shared_to_generic(opaque(static_cast<u32>(__cvta_generic_to_shared(at)))));
}

#else

template <class T>
MULTISAMPLE_FUNCTION T* opaque(T* at) {
  return at;
}
MULTISAMPLE_FUNCTION u32 opaque(u32 x) { return x; }
template <class T>
MULTISAMPLE_FUNCTION T* opaque_shared(T* at) {
  return at;
}

#endif

// `x`, equal in all lanes of the warp, in a register that they share: threads then keep no copy of it.
MULTISAMPLE_FUNCTION u64 uniform(u64 x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return u64{__reduce_or_sync(~0u, static_cast<u32>(x >> 32))} << 32 | __reduce_or_sync(~0u, static_cast<u32>(x));
#else
  return x;
#endif
}

}  // namespace multisample
