// Stores of a thread's columns, one struct for each store kind: aligned rows (PutAligned, PutPaired), rows at any
// address (PutShifted for long rows, PutStaged for short ones), any stride (PutStrided). `at` is the thread's own
// address, and advances with the row. PutStaged takes the address of a pass instead, and stores several passes at a
// time.
#pragma once

#include "cuda/group.cuh"
#include "cuda/intrinsics.cuh"

namespace multisample {

// Columns `first` to `last` of a group are inside the matrix.
struct Inside {
  u32 first, last;

  Inside() = default;
  MULTISAMPLE_FUNCTION Inside(u32 first, u32 last) : first(first), last(last) {}
  MULTISAMPLE_FUNCTION Inside(u32 width, u64 group, const SampleCall& call, const Geometry& geometry) {
    const i64 columns = static_cast<i64>(call.columns), column = static_cast<i64>(width * group) - geometry.skip;
    first = column < 0 ? geometry.skip : 0;
    last = column + width <= columns ? width : column < columns ? static_cast<u32>(columns - column) : first;
  }

  MULTISAMPLE_FUNCTION bool has(u32 column) const { return column >= first && column < last; }
};

// Stores `count` elements per lane, which have more than 16 bytes. The elements of the warp are adjacent. Lane pairs
// exchange halves, so that each store of the warp fills whole sectors: a store of half a sector is slower. All lanes of
// the warp take part. `omit_first` leaves out the first store.
template <u32 count, class Out>
MULTISAMPLE_FUNCTION void put_sectors(char* at, const Out* x, bool omit_first) {
  constexpr u32 kPiece = kStore / sizeof(Out), kPieces = count / kPiece;
  using Piece = multisample::Piece<Out, kPiece>;
  const u32 lane = threadIdx.x % 32;
  const bool odd = lane % 2 != 0;
  Piece* const even_at = reinterpret_cast<Piece*>(at) + (odd ? 1 - static_cast<i32>(kPieces) : 0);
#pragma unroll
  for (u32 k = 0; k < kPieces; k += 2) {
    Piece of_even, of_odd;
#pragma unroll
    for (u32 e = 0; e < kPiece; ++e) {
      const Out sent = odd ? x[k * kPiece + e] : x[(k + 1) * kPiece + e], received = __shfl_sync(~0u, sent, lane ^ 1);
      of_even.x[e] = odd ? received : x[k * kPiece + e];
      of_odd.x[e] = odd ? x[(k + 1) * kPiece + e] : received;
    }
    if (k > 0 || !omit_first) even_at[k] = of_even;
    even_at[kPieces + k] = of_odd;
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
      *reinterpret_cast<Group*>(at) = group;
    }
  }
};

// For a whole warp in one row. The warp's first column lies `shift` elements behind an aligned address. Each lane takes
// the last `shift` columns of the previous lane by shuffle, and then has quads at aligned addresses. Lane 0 stores the
// first columns of the warp one by one, and lane 31 the last columns.
template <class Out, bool antithetic, u32 shift>
struct PutShifted {
  using Group = Elements<Out, antithetic>;
  static constexpr u32 kCount = Group::kCount;
  static constexpr int kUnroll = antithetic ? 3 : 6;
  // Elements from one aligned address to the next.
  static constexpr u32 kAlone = alignof(Quad<Out>) / sizeof(Out);
  static_assert(shift < kAlone, "");
  bool first_thread, last_thread;

  // at: where the lane's quads end; in lane 0, where its first column begins.
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

// For short rows without a gap between them. In each pass, the elements of a warp are one run of memory. The run may
// start unaligned, but equally so in every pass. The lanes put their elements into shared memory. Then they store
// the run's whole aligned pieces as vectors, and the elements at both ends one by one. `passes` passes share two
// barriers and one store instruction for the ends.
template <class Out, bool antithetic, u32 passes>
class PutStaged {
  using Group = Elements<Out, antithetic>;
  static constexpr u32 kCount = Group::kCount, kPiece = sizeof(Out) == 8 ? 2 : 4, kPieces = kCount / kPiece;
  static constexpr i64 kSize = sizeof(Out);
  using Piece = multisample::Piece<Out, kPiece>;
  // Elements of a pass in shared memory: leading padding, the run, and a place for each lane's unused elements.
  static constexpr u32 kOutside = (32 * kPieces + 1) * kPiece, kPass = kOutside + 32;
  // Maximum elements at both ends of a run.
  static constexpr u32 kEnds = 2 * (kPiece - 1);
  static_assert(passes * kEnds <= 32, "a lane stores one element of the ends");

 public:
  static constexpr u32 kPasses = passes;
  // Elements of a warp in shared memory.
  static constexpr u32 kRoom = passes * kPass;

  PutStaged() = default;

  // `pass`: the address of a pass. The warp's run has `length` elements from element `run` of the pass on. The lane's
  // group begins at element `position` of the run, and has the columns `inside`. Passes are `stride` elements apart.
  MULTISAMPLE_FUNCTION PutStaged(Out* stages, const char* pass, u32 run, u32 length, u32 position, Inside inside,
                                 i32 stride) {
    const u32 lane = threadIdx.x % 32, shift = static_cast<u32>(reinterpret_cast<u64>(pass) / kSize + run) % kPiece;
    const auto is_whole = [&](u32 piece) { return piece * kPiece >= shift && (piece + 1) * kPiece <= shift + length; };
    Out* const stage = stages + threadIdx.x / 32 * kRoom;
#pragma unroll
    for (u32 k = 0; k < kCount; ++k) {
      own_[k] = opaque_shared(stage + (inside.has(k) ? shift + position + k - inside.first : kOutside + lane));
    }
    pieces_ = 0;
#pragma unroll
    for (u32 k = 0; k < kPieces; ++k) pieces_ |= static_cast<u32>(is_whole(32 * k + lane)) << k;
    pieces_ = opaque(pieces_);
    piece_ = reinterpret_cast<Piece*>(opaque_shared(stage + lane * kPiece));
    to_piece_ = (static_cast<i64>(run + lane * kPiece) - shift) * kSize;
    // The first elements of the run, then the last elements.
    const u32 n = lane % kEnds, end = shift + (n < kEnds / 2 ? n : length - 1 - (n - kEnds / 2));
    end_pass_ = opaque(n < length && !is_whole(end / kPiece) ? lane / kEnds : passes);
    end_ = opaque_shared(stage + (end_pass_ * kPass + end));
    to_end_ = (static_cast<i64>(end_pass_) * stride + run + end - shift) * kSize;
  }

  // Puts the lane's elements of a pass into shared memory.
  MULTISAMPLE_FUNCTION void put(u32 pass, const Group& group) const {
#pragma unroll
    for (u32 k = 0; k < kCount; ++k) own_[k][pass * kPass] = group.x[k];
  }

  // Stores `count` passes, the first at `out`, the others `stride` elements apart. All lanes of the warp take part.
  MULTISAMPLE_FUNCTION void store(u32 count, char* out, i32 stride) const {
    __syncwarp();
#pragma unroll
    for (u32 k = 0; k < kPieces; ++k) {
      if ((pieces_ >> k & 1) != 0) {
        char* at = out + to_piece_;
#pragma unroll
        for (u32 pass = 0; pass < count; ++pass, at += stride * kSize) {
          reinterpret_cast<Piece*>(at)[32 * k] = piece_[pass * (kPass / kPiece) + 32 * k];
        }
      }
    }
    if (end_pass_ < count) *reinterpret_cast<Out*>(out + to_end_) = *end_;
    __syncwarp();
  }

 private:
  // Addresses in shared memory. own_ and piece_ point into the first pass, and end_ points into pass end_pass_.
  Out* own_[kCount];
  Piece* piece_;
  Out* end_;
  u32 pieces_;             // bit k: whether the run has all of the lane's piece k
  u32 end_pass_;           // pass of the lane's element of the ends; not less than `passes` if it has none
  i64 to_piece_, to_end_;  // bytes from the first pass's address to the lane's piece 0 and to its end
};

// Scalar stores at any stride.
template <class Out, bool antithetic>
struct PutStrided {
  using Group = Elements<Out, antithetic>;
  static constexpr int kUnroll = 1;
  i64 stride;
  Inside inside;

  // at: the address of the first column, which may lie outside the matrix.
  MULTISAMPLE_FUNCTION void operator()(char* at, const Group& group) const {
#pragma unroll
    for (u32 k = 0; k < Group::kCount; ++k) {
      if (inside.has(k)) *reinterpret_cast<Out*>(at + k * stride) = group.x[k];
    }
  }
};

}  // namespace multisample
