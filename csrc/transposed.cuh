// The kernel where dimensions lie side by side in memory, as with layout "nd".
//
// Dimensions and columns change places: a thread keeps some dimensions, with their mu and sigma, and goes along the
// columns; what the words owe to those alone (with shared noise, all the noise) waits in shared memory. A block makes
// some groups of columns at a time, of its tile of dimensions. Half a sector takes longer to write than all of it:
// where sectors begin with a thread's dimensions, it writes them at once; where rows of the output begin anywhere, what
// the block has made goes through shared memory, where it lies as it does in the output. See geometry.h.
#pragma once

#include "group.cuh"

namespace multisample {

// The dimensions that a thread keeps.
template <class Out, bool shared, bool antithetic, bool fast>
struct KeptDimensions {
  using Real = typename Computing<Out>::Type;
  using Group = Elements<Out, antithetic>;
  using GroupNoise = Noise<Real, shared, fast>;
  static constexpr u32 kCount = kSlots<sizeof(Out), antithetic>;

  Real mu[kCount], sigma[kCount];
  RowPart words[kCount];
  u32 turn[kCount];  // of which of the groups of a pass
  u32 lane[kCount];  // which of the tile's dimensions
  bool any;

  MULTISAMPLE_FUNCTION KeptDimensions(u64 first_row, u32 rows, const Keys<Real>& keys, const SampleCall& call,
                                      const Geometry& geometry) {
#pragma unroll
    for (u32 s = 0; s < kCount; ++s) {
      const u32 position = geometry.direct ? threadIdx.x * kCount + s : threadIdx.x + s * blockDim.x;
      turn[s] = position / geometry.lanes;
      lane[s] = position - turn[s] * geometry.lanes;
      if (turn[s] >= geometry.rows_per_pass || lane[s] >= rows) {
        // There is none. To do the same twice costs less than to do nothing.
        if (s == 0) {
          any = false;
          return;
        }
        turn[s] = turn[0], lane[s] = lane[0];
      }
      const u64 row = first_row + lane[s];
      mu[s] = element<Real>(call.mu, row);
      sigma[s] = element<Real>(call.sigma, row);
      words[s] = row_part(static_cast<u32>(call.first_row + row), low(offset_of(call)), keys.keys);
    }
    any = true;
  }

  // What dimension `s` has in a pass, whose groups begin at `pass`.
  MULTISAMPLE_FUNCTION Group drawn(u32 s, const GroupNoise* pass, const Keys<Real>& keys) const {
    return scaled<Out, antithetic>(mu[s], sigma[s], pass[turn[s]].in(words[s], keys));
  }
};

// Elements that a thread takes from the stage at once, as many as it stores at once.
template <class Out>
struct Piece {
  static constexpr u32 kCount = alignof(Quad<Out>) / sizeof(Out);
  struct alignas(alignof(Quad<Out>)) Type {
    Out x[kCount];
  };

  // How many elements this address is behind one where a piece may begin.
  MULTISAMPLE_FUNCTION static u32 phase(const char* at) {
    return static_cast<u32>(reinterpret_cast<u64>(at) / sizeof(Out) % kCount);
  }
};

// All threads of the block together write `count` elements side by side to `to`, from the stage, where they begin as
// far behind a place where a piece may begin.
template <class Out>
MULTISAMPLE_FUNCTION void write_run(const Out* from, char* to, u32 count) {
  using Type = typename Piece<Out>::Type;
  constexpr u32 kCount = Piece<Out>::kCount;
  const u32 before = Piece<Out>::phase(to), end = before + count, last = end / kCount, thread = threadIdx.x;
  const Out* const source = from - before;
  Out* const target = reinterpret_cast<Out*>(to) - before;
#pragma unroll 4
  for (u32 k = thread + (before > 0); k < last; k += blockDim.x) {
    reinterpret_cast<Type*>(target)[k] = reinterpret_cast<const Type*>(source)[k];
  }
  // What is left at either end.
  if (before > 0 && thread >= before && thread < kCount && thread < end) target[thread] = source[thread];
  if (thread < end % kCount && (last > 0 || before == 0))
    target[last * kCount + thread] = source[last * kCount + thread];
}

template <class Out, bool shared, bool antithetic, bool fast>
MULTISAMPLE_FUNCTION void draw_transposed(const SampleCall& call, const Geometry& geometry) {
  using Real = typename Computing<Out>::Type;
  using Dimensions = KeptDimensions<Out, shared, antithetic, fast>;
  using Group = typename Dimensions::Group;
  using GroupNoise = typename Dimensions::GroupNoise;
  constexpr u32 width = Group::kCount, slots = Dimensions::kCount;
  constexpr i64 size = sizeof(Out);
  __shared__ GroupNoise chunk[kThreads];
  __shared__ Quad<Out> stages[2][kThreads * slots * width / 4 + 1];
  const u32 band = blockIdx.x / geometry.column_blocks, tile = blockIdx.x - band * geometry.column_blocks;
  const u64 first_group = static_cast<u64>(band) * geometry.band_rows;
  const u64 groups_left = (geometry.skip + call.columns + width - 1) / width - first_group;
  const u32 count = geometry.band_rows < groups_left ? geometry.band_rows : static_cast<u32>(groups_left);
  const u64 first_row = static_cast<u64>(tile) * geometry.lanes, rows_left = call.rows - first_row;
  const u32 rows = geometry.lanes < rows_left ? geometry.lanes : static_cast<u32>(rows_left);
  const u32 turns = geometry.rows_per_pass, columns_of_pass = turns * width;
  const Keys<Real> keys(call.seed);
  const Dimensions dimensions(first_row, rows, keys, call, geometry);

  // The first group's first column, be it inside or not, and its address.
  const i64 stride = call.column_stride, step = columns_of_pass * stride;
  i64 column = static_cast<i64>(first_group * width) - geometry.skip;
  char* out = static_cast<char*>(call.out) + static_cast<i64>(first_row) * size + column * stride;
  // Whether a pass is one run of elements, or one for each of its columns.
  const bool side_by_side = geometry.column_blocks == 1 && stride == static_cast<i64>(rows) * size;

  // A pass whose columns are all inside, written by each thread at once.
  const i64 of_thread = dimensions.turn[0] * width * stride + dimensions.lane[0] * size;
  const auto draw = [&](const GroupNoise* pass, char* at) {
    struct alignas(slots * sizeof(Out)) Row {
      Out x[slots];
    };
    Row row[width];
#pragma unroll
    for (u32 s = 0; s < slots; ++s) {
      const Group group = dimensions.drawn(s, pass, keys);
#pragma unroll
      for (u32 c = 0; c < width; ++c) row[c].x[s] = group.x[c];
    }
#pragma unroll
    for (u32 c = 0; c < width; ++c, at += stride) *reinterpret_cast<Row*>(at) = row[c];
  };

  // Any pass, through shared memory. The next one goes to the other stage: nobody writes to this one before all have
  // come to the next barrier.
  u32 parity = 0;
  const auto draw_staged = [&](const GroupNoise* pass) {
    Out* const stage = stages[parity][0].x;
    parity ^= 1;
    const auto phase = [&](u32 c) { return Piece<Out>::phase(out + (side_by_side ? 0 : c * stride)); };
    if (dimensions.any) {
#pragma unroll
      for (u32 s = 0; s < slots; ++s) {
        Out* const place = stage + dimensions.turn[s] * width * geometry.pitch + dimensions.lane[s];
        const Group group = dimensions.drawn(s, pass, keys);
#pragma unroll
        for (u32 c = 0; c < width; ++c) place[c * geometry.pitch + phase(c)] = group.x[c];
      }
    }
    __syncthreads();
    const u32 first = column < 0 ? geometry.skip : 0;
    const i64 left = static_cast<i64>(call.columns) - column;
    const u32 last = left < columns_of_pass ? static_cast<u32>(left) : columns_of_pass;
    if (side_by_side) {
      write_run(stage + phase(0) + first * rows, out + first * stride, (last - first) * rows);
    } else {
      for (u32 c = first; c < last; ++c) write_run(stage + c * geometry.pitch + phase(c), out + c * stride, rows);
    }
  };

  for (u32 begin = 0; begin < count; begin += geometry.chunk) {
    const u32 groups = count - begin < geometry.chunk ? count - begin : geometry.chunk;
    if (begin > 0) __syncthreads();
    if (threadIdx.x < groups) {
      const u64 group = call.first_column / width + first_group + begin + threadIdx.x;
      chunk[threadIdx.x] = GroupNoise::of(static_cast<u32>(group), offset_of(call), keys);
    }
    __syncthreads();
    for (u32 k = 0; k < groups;) {
      if (geometry.direct && column >= 0) {
        // As long as all columns are inside.
        const i64 left = static_cast<i64>(call.columns) - column;
        u32 passes = (groups - k) / turns;
        if (left < static_cast<i64>(passes) * columns_of_pass) passes = static_cast<u32>(left) / columns_of_pass;
        if (dimensions.any) {
          char* at = out + of_thread;
          for (u32 p = 0; p < passes; ++p, at += step) draw(chunk + k + p * turns, at);
        }
        out += passes * step;
        k += passes * turns;
        column += static_cast<i64>(passes) * columns_of_pass;
        if (k >= groups) break;
      }
      draw_staged(chunk + k);
      k += turns;
      column += columns_of_pass;
      out += step;
    }
  }
}

}  // namespace multisample
