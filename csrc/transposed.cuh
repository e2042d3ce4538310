// The kernel where dimensions lie side by side in memory, as with layout "nd": neighbouring threads write neighbouring
// dimensions.
//
// Dimensions and columns change places: a thread keeps its dimension, mu and sigma, and goes along the columns; what
// the words owe to those alone (with shared noise, all the noise) waits in shared memory. See geometry.h.
#pragma once

#include "group.cuh"

namespace multisample {

// A thread's dimension, in whatever groups of columns it is given.
template <class Out, bool shared, bool antithetic, bool fast>
class DimensionOfThread {
  using Real = typename Computing<Out>::Type;
  using Group = Elements<Out, antithetic>;
  using GroupNoise = Noise<Real, shared, fast>;
  static constexpr i64 kSize = sizeof(Out);

 public:
  // Dimension `row` of the call, if there is one, in the groups that group `turn` begins of those drawn side by side.
  MULTISAMPLE_FUNCTION DimensionOfThread(u64 row, u32 turn, u64 offset, const Keys<Real>& keys, const SampleCall& call,
                                         const Geometry& geometry)
      : row_(row), turn_(turn), exists_(row < call.rows && turn < geometry.rows_per_pass) {
    if (!exists_) return;
    mu_ = element<Real>(call.mu, row);
    sigma_ = element<Real>(call.sigma, row);
    words_ = row_part(static_cast<u32>(call.first_row + row), low(offset), keys.keys);
  }

  // The groups of a chunk, of which the first is group `first` of the call's `groups`.
  MULTISAMPLE_FUNCTION void draw(const GroupNoise* chunk, u64 first, u32 count, u64 groups, const Keys<Real>& keys,
                                 const SampleCall& call, const Geometry& geometry) const {
    if (!exists_ || turn_ >= count) return;
    const u32 step = geometry.rows_per_pass;
    const u32 turns = step == 1 ? count : (count - turn_ + step - 1) * geometry.one_by_rows >> 20;
    const u64 last = first + turn_ + (turns - 1) * step;
    const GroupNoise* const mine = chunk + turn_ * geometry.pitch;
    const i64 stride = call.column_stride, column = static_cast<i64>(Group::kCount * (first + turn_)) - geometry.skip;
    char* const out = static_cast<char*>(call.out) + static_cast<i64>(row_) * kSize + column * stride;
    // Only the first and the last group of all may be cut.
    const bool first_is_cut = column < 0;
    const bool last_is_cut = last == groups - 1 && (geometry.skip + call.columns) % Group::kCount != 0;
    const u32 begin = first_is_cut ? 1 : 0, end = last_is_cut ? turns - 1 : turns;
    const i64 step_bytes = static_cast<i64>(geometry.stride) * kSize;
    char* at = out + begin * step_bytes;
#pragma unroll(sizeof(Real) == 4 ? (antithetic ? 2 : 4) : 1)
    for (u32 k = begin; k < end; ++k) {
      const Group group = drawn(mine[k], keys);
#pragma unroll
      for (u32 c = 0; c < Group::kCount; ++c) *reinterpret_cast<Out*>(at + c * stride) = group.x[c];
      at += step_bytes;
    }
    if (first_is_cut) put_cut(out, drawn(mine[0], keys), column, call);
    if (last_is_cut && end >= begin) {
      put_cut(out + end * step_bytes, drawn(mine[end], keys), static_cast<i64>(Group::kCount * last) - geometry.skip,
              call);
    }
  }

 private:
  MULTISAMPLE_FUNCTION Group drawn(const GroupNoise& noise, const Keys<Real>& keys) const {
    return scaled<Out, antithetic>(mu_, sigma_, noise.in(words_, keys));
  }

  // Those of a group's columns that are the call's; `at` is the address of the first, be it one of them or not.
  MULTISAMPLE_FUNCTION static void put_cut(char* at, const Group& group, i64 column, const SampleCall& call) {
#pragma unroll
    for (u32 c = 0; c < Group::kCount; ++c) {
      const i64 inside = column + c;
      if (inside >= 0 && inside < static_cast<i64>(call.columns)) {
        *reinterpret_cast<Out*>(at + c * call.column_stride) = group.x[c];
      }
    }
  }

  u64 row_;
  u32 turn_;
  bool exists_;
  Real mu_, sigma_;
  RowPart words_;
};

template <class Out, bool shared, bool antithetic, bool fast>
MULTISAMPLE_FUNCTION void draw_transposed(const SampleCall& call, const Geometry& geometry) {
  using Real = typename Computing<Out>::Type;
  using GroupNoise = Noise<Real, shared, fast>;
  constexpr u32 width = Elements<Out, antithetic>::kCount;
  __shared__ GroupNoise chunks[2][kChunk];
  const u32 band = blockIdx.x / geometry.column_blocks, row_block = blockIdx.x - band * geometry.column_blocks;
  const u64 first = static_cast<u64>(band) * geometry.band_rows;
  const u64 groups = (geometry.skip + call.columns + width - 1) / width, left = groups - first;
  const u32 count = geometry.band_rows < left ? geometry.band_rows : static_cast<u32>(left);
  const u64 offset = offset_of(call);
  const Keys<Real> keys(call.seed);
  // Each thread makes one, where all threads of the block see it after the next __syncthreads(): groups that one thread
  // draws one after the other lie side by side.
  const auto make = [&](GroupNoise* chunk, u32 begin) {
    const u32 k = begin + threadIdx.x;
    if (threadIdx.x >= geometry.chunk || k >= count) return;
    const u32 pass = threadIdx.x * geometry.one_by_rows >> 20, turn = threadIdx.x - pass * geometry.rows_per_pass;
    chunk[turn * geometry.pitch + pass] =
        GroupNoise::of(static_cast<u32>(call.first_column / width + first + k), offset, keys);
  };

  const u32 turn = threadIdx.x * geometry.one_by_lanes >> 20;
  u64 row = static_cast<u64>(row_block) * geometry.steps * geometry.lanes + (threadIdx.x - turn * geometry.lanes);
  DimensionOfThread<Out, shared, antithetic, fast> dimension(row, turn, offset, keys, call, geometry);
  make(chunks[0], 0);
  __syncthreads();
  for (u32 begin = 0, runs = 1, parity = 0;;) {
    const bool goes_on = count - begin > geometry.chunk;
    dimension.draw(chunks[parity], first + begin, goes_on ? geometry.chunk : count - begin, groups, keys, call,
                   geometry);
    if (goes_on) {
      begin += geometry.chunk;
      parity ^= 1;
      make(chunks[parity], begin);
      __syncthreads();
    } else if (runs < geometry.steps) {
      // Where there are more dimensions for the block, its groups are only one chunk.
      ++runs;
      row += geometry.lanes;
      dimension = DimensionOfThread<Out, shared, antithetic, fast>(row, turn, offset, keys, call, geometry);
    } else {
      break;
    }
  }
}

}  // namespace multisample
