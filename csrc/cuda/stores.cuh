// How the columns that a thread draws go to memory, row by row, as the geometry's `stores` says: aligned rows
// (PutAligned, PutPaired), rows at any address (PutShifted for long ones, PutStaged for short ones), and elements at
// any distance (PutStrided). `at` is an address of the thread's own, and moves with the row.
#pragma once

#include "cuda/group.cuh"
#include "cuda/intrinsics.cuh"

namespace multisample {

// Four elements next to each other, written at once, or in the case of float64 in two halves.
template <class Out>
struct alignas(sizeof(Out) == 2 ? 8 : 16) Quad {
  Out x[4];
};

// What a store writes at most.
constexpr u32 kStore = 16;

// `count` elements of a thread, more than a store writes, beside those of the thread before and of the next. Each
// thread of a pair writes half of every sector that either has, since half a sector takes longer than all of it. All
// threads of the warp together. The first store is left out if `omit_first`.
template <u32 count, class Out>
MULTISAMPLE_FUNCTION void put_sectors(char* at, const Out* x, bool omit_first) {
  constexpr u32 kPart = kStore / sizeof(Out), kParts = count / kPart;
  struct alignas(kStore) Part {
    Out x[kPart];
  };
  const u32 lane = threadIdx.x % 32;
  const bool odd = lane % 2 != 0;
  Part* const even_at = reinterpret_cast<Part*>(at) + (odd ? 1 - static_cast<i32>(kParts) : 0);
#pragma unroll
  for (u32 k = 0; k < kParts; k += 2) {
    Part of_even, of_odd;
#pragma unroll
    for (u32 e = 0; e < kPart; ++e) {
      const Out given = odd ? x[k * kPart + e] : x[(k + 1) * kPart + e], taken = from_lane(given, lane ^ 1);
      of_even.x[e] = odd ? taken : x[k * kPart + e];
      of_odd.x[e] = odd ? x[(k + 1) * kPart + e] : taken;
    }
    if (k > 0 || !omit_first) even_at[k] = of_even;
    even_at[kParts + k] = of_odd;
  }
}

template <class Out, bool antithetic>
struct PutAligned {
  using Group = Elements<Out, antithetic>;
  static constexpr int kUnroll = 32 / Group::kCount;

  // at: that of the first column, aligned.
  MULTISAMPLE_FUNCTION void operator()(char* at, const Group& group) const {
    Quad<Out>* const to = reinterpret_cast<Quad<Out>*>(at);
#pragma unroll
    for (u32 k = 0; k < Group::kCount; k += 4) to[k / 4] = {group.x[k], group.x[k + 1], group.x[k + 2], group.x[k + 3]};
  }
};

// The same for a warp whose threads are side by side, an even one and an odd one in the same row.
template <class Out, bool antithetic>
struct PutPaired {
  using Group = Elements<Out, antithetic>;
  static constexpr int kUnroll = PutAligned<Out, antithetic>::kUnroll;

  MULTISAMPLE_FUNCTION void operator()(char* at, const Group& group) const {
    if constexpr (sizeof(Group) > kStore) {
      put_sectors<Group::kCount>(at, group.x, false);
    } else {
      struct alignas(sizeof(Group)) Whole {
        Group group;
      };
      *reinterpret_cast<Whole*>(at) = {group};
    }
  }
};

// The columns of a whole warp, whose first lies `shift` elements behind an aligned address. A thread's first aligned
// quad begins with the last `shift` columns of the thread before. The first thread is left with its other columns,
// which it writes one by one, and the last thread likewise with its last ones.
template <class Out, bool antithetic, u32 shift>
struct PutShifted {
  using Group = Elements<Out, antithetic>;
  static constexpr u32 kCount = Group::kCount;
  static constexpr int kUnroll = antithetic ? 3 : 6;
  // Elements between aligned addresses, in the first of which the first thread has a gap.
  static constexpr u32 kAlone = alignof(Quad<Out>) / sizeof(Out);
  static_assert(shift < kAlone, "");
  bool first_thread, last_thread;

  // at: the end of the thread's quads; for the first thread, that of its first column.
  MULTISAMPLE_FUNCTION void operator()(char* at, const Group& group) const {
    const Out* const x = group.x;
    Out y[kCount];
#pragma unroll
    for (u32 k = 0; k < kCount; ++k) y[k] = k < shift ? shuffle_up(x[kCount - shift + k]) : x[k - shift];
    if constexpr (kCount == 4 && sizeof(Out) <= 4) {
      if (!first_thread) reinterpret_cast<Quad<Out>*>(at)[-1] = {y[0], y[1], y[2], y[3]};
    } else {
      char* const begin = at - (first_thread ? shift : kCount) * sizeof(Out);
      if constexpr (sizeof(Group) > kStore) {
        put_sectors<kCount>(begin, y, first_thread);
      } else {
        Quad<Out>* const quads = reinterpret_cast<Quad<Out>*>(begin);
        if (!first_thread) quads[0] = {y[0], y[1], y[2], y[3]};
        quads[1] = {y[4], y[5], y[6], y[7]};
      }
    }
#pragma unroll
    for (u32 k = 0; k < (2 * shift < kAlone ? kAlone - shift : shift); ++k) {
      // One store instruction writes an element of the first and of the last thread, where both have one.
      const bool of_first = k < kAlone - shift, of_last = k < shift;
      const Out element = !of_last || (of_first && first_thread) ? x[k] : x[kCount - shift + k];
      if ((of_first && first_thread) || (of_last && last_thread)) reinterpret_cast<Out*>(at)[k] = element;
    }
  }
};

// What the threads of a warp have made, elements side by side at any address, in one row or several: through shared
// memory, so that neighbouring threads write neighbouring elements.
template <class Out, bool antithetic>
struct PutStaged {
  using Group = Elements<Out, antithetic>;
  static constexpr int kUnroll = 16 / Group::kCount;
  Out* stage;                  // the warp's
  u32 lane, position, length;  // of the thread in the warp; of its first element, and of all of them
  u32 first, last;             // those of its columns that are inside

  // at: that of the warp's first element, and as many elements on as there are threads before.
  MULTISAMPLE_FUNCTION void operator()(char* at, const Group& group) const {
#pragma unroll
    for (u32 k = 0; k < Group::kCount; ++k) {
      if (k >= first && k < last) stage[position - first + k] = group.x[k];
    }
    __syncwarp();
#pragma unroll
    for (u32 k = 0; k < Group::kCount; ++k) {
      if (32 * k + lane < length) reinterpret_cast<Out*>(at)[32 * k] = stage[32 * k + lane];
    }
    __syncwarp();
  }
};

// At any distance from each other.
template <class Out, bool antithetic>
struct PutStrided {
  using Group = Elements<Out, antithetic>;
  static constexpr int kUnroll = 1;
  i64 stride;
  u32 first, last;  // those of the columns that are inside

  // at: that of the first column, be it inside or not.
  MULTISAMPLE_FUNCTION void operator()(char* at, const Group& group) const {
#pragma unroll
    for (u32 k = 0; k < Group::kCount; ++k) {
      if (k >= first && k < last) *reinterpret_cast<Out*>(at + k * stride) = group.x[k];
    }
  }
};

}  // namespace multisample
