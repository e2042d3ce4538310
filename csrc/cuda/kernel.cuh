// The block-per-dimension kernel: x[i, j] = mu[i] + sigma[i] z[i, j], noise made in registers, each element written
// once.
//
// A thread keeps its columns and goes down the dimensions, so that what the words owe to the columns alone is made once
// (and with shared noise everything is); what they owe to the dimension alone waits in shared memory, beside mu and
// sigma. See cuda/geometry.h. Where dimensions lie side by side in memory, see cuda/columns.cuh.
#pragma once

#include "cuda/columns.cuh"

namespace multisample {

// What all threads of a block need of a dimension, in as few loads as can be.
template <class Real>
struct alignas(16) Dimension {
  RowPart words;
  Real mu, sigma;
};

// How a thread's columns go to memory. `at` is an address of the thread's own, and moves with the row.

MULTISAMPLE_FUNCTION float of_thread(u32 lane, float x) { return __shfl_sync(~0u, x, lane); }
MULTISAMPLE_FUNCTION double of_thread(u32 lane, double x) { return __shfl_sync(~0u, x, lane); }

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
      const Out given = odd ? x[k * kPart + e] : x[(k + 1) * kPart + e], taken = of_thread(lane ^ 1, given);
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
    for (u32 k = 0; k < kCount; ++k) y[k] = k < shift ? of_thread_before(x[kCount - shift + k]) : x[k - shift];
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
      // Both in one instruction, as far as both have one.
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

// Draws the rows of `count` dimensions that lie one after the other, `stride` elements apart in memory.
template <class Out, bool antithetic, class Real, class Noise, class Put>
MULTISAMPLE_FUNCTION void go_down(const Dimension<Real>* dimensions, u32 count, char* at, i32 stride,
                                  const Noise& noise, const Keys<Real>& keys, const Put& put) {
#pragma unroll(sizeof(Real) == 4 ? Put::kUnroll : 1)
  for (u32 k = 0; k < count; ++k) {
    const Dimension<Real> dimension = dimensions[k];
    put(at, scaled<Out, antithetic>(dimension.mu, dimension.sigma, noise.in(dimension.words, keys)));
    at += static_cast<i64>(stride) * static_cast<i64>(sizeof(Out));
  }
}

// A thread's columns, in whatever rows it is given.
template <class Out, bool shared, bool antithetic, bool fast, Stores stores>
class Columns {
  using Real = typename Computing<Out>::Type;
  static constexpr i64 kSize = sizeof(Out);
  static constexpr u32 kCount = Elements<Out, antithetic>::kCount;
  // Whether a thread has more than it can write at once, or could write more at once than a quad.
  static constexpr bool kPairs = kCount * kSize > static_cast<i64>(sizeof(Quad<Out>)) || kSize == 8;

 public:
  // Group `group` of the row, in the rows that `row` begins of those that the block draws side by side. `stages` has
  // room for what all threads of the block make of a row.
  MULTISAMPLE_FUNCTION Columns(u64 group, u32 row, Out* stages, const Keys<Real>& keys, const Draw& call,
                               const Geometry& geometry)
      : noise_(Noise<Real, shared, fast>::of(static_cast<u32>(call.first_column.value / kCount + group),
                                             value_of(call.offset), keys)),
        row_(row) {
    const i64 columns = static_cast<i64>(call.columns), column = static_cast<i64>(kCount * group) - geometry.skip;
    first_ = column < 0 ? geometry.skip : 0;
    last_ = column + kCount <= columns ? kCount : column < columns ? static_cast<u32>(columns - column) : first_;
    if (stores != kStaged) {
      offset_ = row * call.row_stride + column * call.column_stride;
      if (row >= geometry.rows_per_pass) last_ = first_;
      if (stores == kAligned && kPairs) {
        const u32 lane = threadIdx.x % 32;
        const i64 apart = __shfl_sync(~0u, offset_, lane ^ 1) - offset_, group_size = kCount * kSize;
        paired_ = __all_sync(~0u, is_whole() && apart == (lane % 2 != 0 ? -group_size : group_size));
      }
    } else {
      // Where the thread's elements lie among those of a pass, and those of the warp.
      const u32 rows = geometry.rows_per_pass, all = rows * static_cast<u32>(columns);
      const u32 begin = row < rows ? row * static_cast<u32>(columns) + static_cast<u32>(column) + first_ : all;
      const u32 end = row < rows ? begin + (last_ - first_) : all;
      stage_ = stages + threadIdx.x / 32 * (32 * kCount);
      run_ = __shfl_sync(~0u, begin, 0);
      length_ = __shfl_sync(~0u, end, 31) - run_;
      position_ = begin - run_;
      offset_ = (run_ + threadIdx.x % 32) * kSize;
      columns_ = static_cast<u32>(columns);
      if (row >= rows) row_ = 0, last_ = first_;
    }
  }

  // The rows of a chunk of `rows` dimensions, of which `out` is the first.
  MULTISAMPLE_FUNCTION void draw(const Dimension<Real>* chunk, u32 rows, char* out, const Keys<Real>& keys,
                                 const Draw& call, const Geometry& geometry) const {
    const u32 step = geometry.rows_per_pass;
    const Dimension<Real>* const mine = chunk + row_ * geometry.pitch;
    char* const at = out + offset_;
    const i32 stride = geometry.stride;
    if (stores == kStaged) {
      // All threads of a warp together. The last pass may not be full, and then ends within a warp.
      const u32 passes = rows * geometry.one_by_rows >> 20, more = rows - passes * step;
      PutStaged<Out, antithetic> put{stage_, threadIdx.x % 32, position_, length_, first_, last_};
      down(mine, passes, at, stride, keys, put);
      if (more > 0) {
        const u32 left = more * columns_;
        put.length = left <= run_ ? 0 : left - run_ < length_ ? left - run_ : length_;
        down(chunk + (row_ < more ? row_ : 0) * geometry.pitch + passes, 1,
             at + passes * static_cast<i64>(stride) * kSize, 0, keys, put);
      }
      return;
    }
    const u32 count = step == 1 ? rows : row_ < rows ? (rows - row_ + step - 1) * geometry.one_by_rows >> 20 : 0;
    const bool whole = stores == kShifted ? __all_sync(~0u, is_whole()) : is_whole();
    if (stores == kAligned && kPairs && __all_sync(~0u, paired_ && count == __shfl_sync(~0u, count, 0))) {
      down(mine, count, at, stride, keys, PutPaired<Out, antithetic>{});
    } else if (stores == kAligned && whole) {
      down(mine, count, at, stride, keys, PutAligned<Out, antithetic>{});
    } else if (stores == kShifted && whole) {
      const u32 thread = threadIdx.x % 32;
      const u32 shift = static_cast<u32>(reinterpret_cast<u64>(at) % alignof(Quad<Out>) / kSize);
      char* const end = thread == 0 ? at : at + (kCount - shift) * kSize;
      const bool first = thread == 0, last = thread == 31;
      switch (shift) {
        case 0:
          if (kCount * kSize > kStore) {
            down(mine, count, at, stride, keys, PutPaired<Out, antithetic>{});
          } else {
            down(mine, count, at, stride, keys, PutAligned<Out, antithetic>{});
          }
          break;
        case 1: down(mine, count, end, stride, keys, PutShifted<Out, antithetic, 1>{first, last}); break;
        default:
          if constexpr (kSize < 8) {
            if (shift == 2) {
              down(mine, count, end, stride, keys, PutShifted<Out, antithetic, 2>{first, last});
            } else {
              down(mine, count, end, stride, keys, PutShifted<Out, antithetic, 3>{first, last});
            }
          }
      }
    } else if (first_ < last_) {
      down(mine, count, at, stride, keys, PutStrided<Out, antithetic>{call.column_stride, first_, last_});
    }
  }

 private:
  // Whether all of its columns are inside.
  MULTISAMPLE_FUNCTION bool is_whole() const { return first_ == 0 && last_ == kCount; }

  template <class Put>
  MULTISAMPLE_FUNCTION void down(const Dimension<Real>* dimensions, u32 count, char* at, i32 stride,
                                 const Keys<Real>& keys, const Put& put) const {
    go_down<Out, antithetic>(dimensions, count, at, stride, noise_, keys, put);
  }

  Noise<Real, shared, fast> noise_;
  i64 offset_;  // from the first row's first column to what `put` is given, in bytes
  u32 row_;
  u32 first_, last_;  // those of the columns that are inside
  bool paired_;       // all are, and threads of the warp side by side two by two
  // Of kStaged alone; see PutStaged.
  Out* stage_;
  u32 run_, length_, position_, columns_;
};

// The dimensions of a block's band, fetched by its threads a chunk at a time: while one is drawn, the next is on its
// way.
template <class Real>
class Dimensions {
 public:
  MULTISAMPLE_FUNCTION Dimensions(u64 first_row, u32 count, const Draw& call, const Geometry& geometry)
      : call_(call), first_row_(first_row), count_(count), chunk_(geometry.chunk), shift_(geometry.interleave_log2) {}

  // Begins to load the thread's own dimension of the chunk that begins at row `begin` of the band.
  MULTISAMPLE_FUNCTION void fetch(u32 begin) {
    const u32 k = begin + threadIdx.x;
    mine_ = threadIdx.x < chunk_ && k < count_;
    if (mine_) {
      const u64 row = first_row_ + (static_cast<u64>(k) << shift_);
      i_ = static_cast<u32>(call_.first_row.value + row);
      mu_ = element<Real>(call_.mu, row);
      sigma_ = element<Real>(call_.sigma, row);
    }
  }

  // Puts it where all threads of the block see it, after the next __syncthreads(): rows that one thread draws one after
  // the other lie side by side.
  MULTISAMPLE_FUNCTION void put(Dimension<Real>* chunk, const Keys<Real>& keys, const Geometry& geometry) const {
    if (!mine_) return;
    const u32 pass = threadIdx.x * geometry.one_by_rows >> 20, row = threadIdx.x - pass * geometry.rows_per_pass;
    chunk[row * geometry.pitch + pass] = {row_part(i_, low(value_of(call_.offset)), keys.keys), mu_, sigma_};
  }

 private:
  const Draw& call_;
  u64 first_row_;
  u32 count_, chunk_, shift_, i_;
  Real mu_, sigma_;
  bool mine_;
};

template <class Out, bool shared, bool antithetic, bool fast, Stores stores>
MULTISAMPLE_FUNCTION void draw_rows(const Draw& call, const Geometry& geometry) {
  using Real = typename Computing<Out>::Type;
  using Columns = Columns<Out, shared, antithetic, fast, stores>;
  __shared__ Dimension<Real> chunks[2][kChunk];
  __shared__ Out stages[stores == kStaged ? Elements<Out, antithetic>::kCount * kThreads : 1];
  // Row k of the band is first_row + (k << shift).
  const u32 band = blockIdx.x / geometry.column_blocks, column_block = blockIdx.x - band * geometry.column_blocks;
  const u32 shift = geometry.interleave_log2;
  const u64 first_row = (static_cast<u64>(band >> shift) * geometry.band_rows << shift) + (band & ((1u << shift) - 1));
  if (first_row >= call.rows) return;
  const u64 rows_left = ((call.rows - first_row - 1) >> shift) + 1;
  const u32 count = geometry.band_rows < rows_left ? geometry.band_rows : static_cast<u32>(rows_left);
  Dimensions<Real> dimensions(first_row, count, call, geometry);
  dimensions.fetch(0);

  const Keys<Real> keys(call.seed.value);
  const u32 row = threadIdx.x * geometry.one_by_lanes >> 20;
  u64 group = static_cast<u64>(column_block) * geometry.steps * geometry.lanes + (threadIdx.x - row * geometry.lanes);
  char* out = static_cast<char*>(call.matrix) + static_cast<i64>(first_row) * call.row_stride;
  Columns columns(group, row, stages, keys, call, geometry);
  dimensions.put(chunks[0], keys, geometry);
  __syncthreads();
  for (u32 begin = 0, runs = 1, parity = 0;;) {
    const bool goes_on = count - begin > geometry.chunk;
    if (goes_on) dimensions.fetch(begin + geometry.chunk);
    columns.draw(chunks[parity], goes_on ? geometry.chunk : count - begin, out, keys, call, geometry);
    if (goes_on) {
      begin += geometry.chunk;
      out += geometry.chunk * (call.row_stride * (i64{1} << shift));
      parity ^= 1;
      dimensions.put(chunks[parity], keys, geometry);
      __syncthreads();
    } else if (runs < geometry.steps) {
      // Where there are more columns for the block, its dimensions are only one chunk.
      ++runs;
      group += geometry.lanes;
      columns = Columns(group, row, stages, keys, call, geometry);
    } else {
      break;
    }
  }
}

template <class Out, bool shared, bool antithetic, bool fast, Stores stores>
MULTISAMPLE_FUNCTION void draw(const Draw& call, const Geometry& geometry) {
  if constexpr (stores == kTransposed) {
    draw_transposed<Out, shared, antithetic, fast>(call, geometry);
  } else if constexpr (stores == kTransposedStaged) {
    draw_transposed_staged<Out, shared, antithetic, fast>(call, geometry);
  } else {
    draw_rows<Out, shared, antithetic, fast, stores>(call, geometry);
  }
}

template <bool shared, Stores stores>
constexpr int kMostThreads = stores == kTransposed         ? kTransposedThreads
                             : stores == kTransposedStaged ? kStagedThreads<shared>
                                                           : kThreads;

// Blocks that a processor is to hold at once, if the compiler alone would choose so many that registers run out, or so
// few that it waits; else 0.
template <class Out, bool shared, bool antithetic, Stores stores>
constexpr int kBlocksAtOnce = stores == kTransposed || stores == kTransposedStaged ? 768 / kMostThreads<shared, stores>
                              : antithetic && (stores == kAligned || stores == kShifted) ? 2
                              : antithetic || stores == kShifted || sizeof(Out) == 8     ? 3
                                                                                         : 0;

template <class Out, bool shared, bool antithetic, bool fast, Stores stores, bool origin_in_memory = false>
__global__ void __launch_bounds__(kMostThreads<shared, stores>, kBlocksAtOnce<Out, shared, antithetic, stores>)
sample_kernel(const __grid_constant__ Draw call, const __grid_constant__ Geometry geometry) {
  // Numbers by value are the same for all threads to the compiler, which keeps them and the round keys out of the
  // threads' registers. So kernels that read them from memory are kernels of their own.
  if constexpr (origin_in_memory) {
    Geometry resolved = geometry;
    const Draw values = with_values(call);
    resolved.skip = static_cast<u32>(values.first_column.value % Elements<Out, antithetic>::kCount);
    draw<Out, shared, antithetic, fast, stores>(values, resolved);
  } else {
    draw<Out, shared, antithetic, fast, stores>(call, geometry);
  }
}

// Adds 1 to an offset in memory, after the kernels that read it.
__global__ void advance_kernel(u64* counter) { ++*counter; }

}  // namespace multisample
