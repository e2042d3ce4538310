// Stores of a thread's columns, one struct for each way: aligned rows (PutAligned, PutPaired), rows at any address
// (PutShifted for long rows, PutStaged for short ones), any stride (PutStrided). `at` is the thread's own address, and
// advances with the row.
#pragma once

#include "cuda/group.cuh"
#include "cuda/intrinsics.cuh"

namespace multisample {

// Four adjacent elements: one vectorised store, or two for float64.
template <class Out>
struct alignas(sizeof(Out) == 2 ? 8 : 16) Quad {
  Out x[4];
};

// Bytes of the largest store of a thread.
constexpr u32 kStore = 16;

// Stores `count` adjacent elements per lane, more than one store writes. The lanes are adjacent too. Lane pairs
// exchange halves, so that each store of the warp fills whole sectors: a store of half a sector is slower. All lanes of
// the warp take part. `omit_first` leaves out the first store.
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
      const Out sent = odd ? x[k * kPart + e] : x[(k + 1) * kPart + e], received = from_lane(sent, lane ^ 1);
      of_even.x[e] = odd ? received : x[k * kPart + e];
      of_odd.x[e] = odd ? x[(k + 1) * kPart + e] : received;
    }
    if (k > 0 || !omit_first) even_at[k] = of_even;
    even_at[kParts + k] = of_odd;
  }
}

template <class Out, bool antithetic>
struct PutAligned {
  using Group = Elements<Out, antithetic>;
  static constexpr int kUnroll = 32 / Group::kCount;

  // at: the aligned address of the first column.
  MULTISAMPLE_FUNCTION void operator()(char* at, const Group& group) const {
    Quad<Out>* const to = reinterpret_cast<Quad<Out>*>(at);
#pragma unroll
    for (u32 k = 0; k < Group::kCount; k += 4) to[k / 4] = {group.x[k], group.x[k + 1], group.x[k + 2], group.x[k + 3]};
  }
};

// PutAligned for a warp in which each lane pair has adjacent groups of one row.
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
// For a whole warp in one row, whose first column lies `shift` elements behind an aligned address. Each lane takes the
// last `shift` columns of the previous lane by shuffle, and then has quads at aligned addresses. Lane 0 stores the
// first columns of the warp one by one, and lane 31 the last ones.
template <class Out, bool antithetic, u32 shift>
struct PutShifted {
  using Group = Elements<Out, antithetic>;
  static constexpr u32 kCount = Group::kCount;
  static constexpr int kUnroll = antithetic ? 3 : 6;
  // Elements from one aligned address to the next.
  static constexpr u32 kAlone = alignof(Quad<Out>) / sizeof(Out);
  static_assert(shift < kAlone, "");
  bool first_thread, last_thread;

  // at: the end of the lane's quads; for lane 0, the address of its first column.
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
      // One store instruction serves lane 0 and lane 31, where both have an element.
      const bool of_first = k < kAlone - shift, of_last = k < shift;
      const Out element = !of_last || (of_first && first_thread) ? x[k] : x[kCount - shift + k];
      if ((of_first && first_thread) || (of_last && last_thread)) reinterpret_cast<Out*>(at)[k] = element;
    }
  }
};

// For short rows: a warp's elements are contiguous, at any address, in one row or several. Shared memory makes
// the stores coalesced.
template <class Out, bool antithetic>
struct PutStaged {
  using Group = Elements<Out, antithetic>;
  static constexpr int kUnroll = 16 / Group::kCount;
  Out* stage;                  // shared memory of the warp
  u32 lane, position, length;  // lane; position of its first element in the stage; number of elements in the stage
  u32 first, last;             // range of the group's columns inside the matrix

  // at: the address of the warp's first element, plus `lane` elements.
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

// Scalar stores at any stride.
template <class Out, bool antithetic>
struct PutStrided {
  using Group = Elements<Out, antithetic>;
  static constexpr int kUnroll = 1;
  i64 stride;
  u32 first, last;  // range of the group's columns inside the matrix

  // at: the address of the first column, which may lie outside the matrix.
  MULTISAMPLE_FUNCTION void operator()(char* at, const Group& group) const {
#pragma unroll
    for (u32 k = 0; k < Group::kCount; ++k) {
      if (k >= first && k < last) *reinterpret_cast<Out*>(at + k * stride) = group.x[k];
    }
  }
};

}  // namespace multisample
