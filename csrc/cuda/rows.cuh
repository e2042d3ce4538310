// The kernels with row stores: kAligned, kShifted, kStaged and kStrided.
//
// A thread keeps its columns and goes down the dimensions. It computes the column part of its words (with common noise,
// its normals) once. The row parts are in shared memory, beside mu and sigma. See cuda/geometry.h.
#pragma once

#include "cuda/stores.cuh"

namespace multisample {

// One dimension in shared memory, aligned for 16-byte loads.
template <class Real>
struct alignas(16) Dimension {
  RowPart words;
  Real mu, sigma;
};

// Draws `count` dimensions, whose rows are `stride` elements apart in the output.
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

// Columns `first` to `last` of a group are inside the matrix.
struct Inside {
  u32 first, last;

  MULTISAMPLE_FUNCTION Inside(u32 width, u64 group, const Draw& call, const Geometry& geometry) {
    const i64 columns = static_cast<i64>(call.columns), column = static_cast<i64>(width * group) - geometry.skip;
    first = column < 0 ? geometry.skip : 0;
    last = column + width <= columns ? width : column < columns ? static_cast<u32>(columns - column) : first;
  }
};

// Draws the groups of shifted rows that do not fill a warp, in the rows of a chunk. A thread has one group, and every
// step-th row.
template <class Out, bool common_noise, bool antithetic, bool fast, class Real>
MULTISAMPLE_FUNCTION void draw_rest(const Dimension<Real>* chunk, u32 rows, char* out, const Keys<Real>& keys,
                                    const Draw& call, const Geometry& geometry) {
  constexpr u32 kCount = Elements<Out, antithetic>::kCount;
  const u32 step = geometry.threads / geometry.rest, row = threadIdx.x / geometry.rest;
  const u64 group = u64{32} * geometry.warps + (threadIdx.x - row * geometry.rest);
  const Inside inside(kCount, group, call, geometry);
  if (row >= step || row >= rows || inside.first >= inside.last) return;
  const auto noise = Noise<Real, common_noise, fast>::of(static_cast<u32>(call.first_column.value / kCount + group),
                                                         value_of(call.offset), keys);
  const PutStrided<Out, antithetic> put{sizeof(Out), inside.first, inside.last};
  char* const at = out + (static_cast<i64>(kCount * group) - geometry.skip) * static_cast<i64>(sizeof(Out));
  const i64 stride = call.row_stride * (i64{1} << geometry.interleave_log2);
  for (u32 k = row; k < rows; k += step) {
    const Dimension<Real> dimension = chunk[k];
    put(at + k * stride, scaled<Out, antithetic>(dimension.mu, dimension.sigma, noise.in(dimension.words, keys)));
  }
}

// The columns of one thread.
template <class Out, bool common_noise, bool antithetic, bool fast, Stores stores>
class Columns {
  using Real = typename Computing<Out>::Type;
  static constexpr i64 kSize = sizeof(Out);
  static constexpr u32 kCount = Elements<Out, antithetic>::kCount;
  // Whether a group is larger than one vectorised store, so that PutPaired needs fewer stores or fills whole sectors.
  static constexpr bool kPairs = kCount * kSize > static_cast<i64>(sizeof(Quad<Out>)) || kSize == 8;

 public:
  // The thread draws group `group` in row `row` of each pass. `stages` has room for the block's elements of one pass.
  MULTISAMPLE_FUNCTION Columns(u64 group, u32 row, Out* stages, const Keys<Real>& keys, const Draw& call,
                               const Geometry& geometry)
      : noise_(Noise<Real, common_noise, fast>::of(static_cast<u32>(call.first_column.value / kCount + group),
                                                   value_of(call.offset), keys)),
        row_(row) {
    const i64 columns = static_cast<i64>(call.columns), column = static_cast<i64>(kCount * group) - geometry.skip;
    const Inside inside(kCount, group, call, geometry);
    first_ = inside.first, last_ = inside.last;
    if (stores == kShifted && group >= u64{32} * geometry.warps) last_ = first_;
    if (stores != kStaged) {
      offset_ = row * call.row_stride + column * call.column_stride;
      if (row >= geometry.rows_per_pass) last_ = first_;
      if (stores == kAligned && kPairs) {
        const u32 lane = threadIdx.x % 32;
        const i64 apart = __shfl_sync(~0u, offset_, lane ^ 1) - offset_, group_size = kCount * kSize;
        paired_ = __all_sync(~0u, is_whole() && apart == (lane % 2 != 0 ? -group_size : group_size));
      }
    } else {
      // Positions of the lane's and of the warp's elements within a pass.
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

  // Draws a chunk of `rows` dimensions, whose first row begins at `out`.
  MULTISAMPLE_FUNCTION void draw(const Dimension<Real>* chunk, u32 rows, char* out, const Keys<Real>& keys,
                                 const Draw& call, const Geometry& geometry) const {
    const u32 step = geometry.rows_per_pass;
    const Dimension<Real>* const dimensions = chunk + row_ * geometry.pitch;
    char* const at = out + offset_;
    const i32 stride = geometry.row_step;
    if constexpr (stores == kStaged) {
      // All lanes of the warp take part. The last pass may be incomplete and end within a warp.
      const u32 passes = rows * geometry.one_by_rows >> 20, more = rows - passes * step;
      PutStaged<Out, antithetic> put{stage_, threadIdx.x % 32, position_, length_, first_, last_};
      down(dimensions, passes, at, stride, keys, put);
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
      down(dimensions, count, at, stride, keys, PutPaired<Out, antithetic>{});
    } else if (stores == kAligned && whole) {
      down(dimensions, count, at, stride, keys, PutAligned<Out, antithetic>{});
    } else if (stores == kShifted && whole) {
      const u32 thread = threadIdx.x % 32;
      const u32 shift = static_cast<u32>(reinterpret_cast<u64>(at) % alignof(Quad<Out>) / kSize);
      char* const end = thread == 0 ? at : at + (kCount - shift) * kSize;
      const bool first = thread == 0, last = thread == 31;
      switch (shift) {
        case 0:
          if (kCount * kSize > kStore) {
            down(dimensions, count, at, stride, keys, PutPaired<Out, antithetic>{});
          } else {
            down(dimensions, count, at, stride, keys, PutAligned<Out, antithetic>{});
          }
          break;
        case 1: down(dimensions, count, end, stride, keys, PutShifted<Out, antithetic, 1>{first, last}); break;
        default:
          if constexpr (kSize < 8) {
            if (shift == 2) {
              down(dimensions, count, end, stride, keys, PutShifted<Out, antithetic, 2>{first, last});
            } else {
              down(dimensions, count, end, stride, keys, PutShifted<Out, antithetic, 3>{first, last});
            }
          }
      }
    } else if (first_ < last_) {
      down(dimensions, count, at, stride, keys, PutStrided<Out, antithetic>{call.column_stride, first_, last_});
    }
  }

 private:
  // Whether all columns of the group are inside the matrix.
  MULTISAMPLE_FUNCTION bool is_whole() const { return first_ == 0 && last_ == kCount; }

  template <class Put>
  MULTISAMPLE_FUNCTION void down(const Dimension<Real>* dimensions, u32 count, char* at, i32 stride,
                                 const Keys<Real>& keys, const Put& put) const {
    go_down<Out, antithetic>(dimensions, count, at, stride, noise_, keys, put);
  }

  Noise<Real, common_noise, fast> noise_;
  i64 offset_;  // in bytes, from the first row of a chunk to the address passed to `put`
  u32 row_;
  u32 first_, last_;  // range of the group's columns inside the matrix
  bool paired_;       // whether the group is whole and each lane pair of the warp has adjacent groups
  // For kStaged; see PutStaged.
  Out* stage_;
  u32 run_, length_, position_, columns_;
};

// The dimensions of a block's band. The threads load a chunk of them at a time, and prefetch the next chunk while they
// draw one.
template <class Real>
class Dimensions {
 public:
  MULTISAMPLE_FUNCTION Dimensions(u64 first_row, u32 count, const Draw& call, const Geometry& geometry)
      : call_(call), first_row_(first_row), count_(count), chunk_(geometry.chunk), shift_(geometry.interleave_log2) {}

  // Starts to load one dimension per thread, of the chunk that begins at row `begin` of the band.
  MULTISAMPLE_FUNCTION void fetch(u32 begin) {
    const u32 k = begin + threadIdx.x;
    has_dimension_ = threadIdx.x < chunk_ && k < count_;
    if (has_dimension_) {
      const u64 row = first_row_ + (static_cast<u64>(k) << shift_);
      i_ = static_cast<u32>(call_.first_row.value + row);
      mu_ = element<Real>(call_.mu, row);
      sigma_ = element<Real>(call_.sigma, row);
    }
  }

  // Stores the loaded dimension in shared memory, for reads after the next __syncthreads(). Rows that one thread draws
  // consecutively are adjacent.
  MULTISAMPLE_FUNCTION void put(Dimension<Real>* chunk, const Keys<Real>& keys, const Geometry& geometry) const {
    if (!has_dimension_) return;
    const u32 pass = threadIdx.x * geometry.one_by_rows >> 20, row = threadIdx.x - pass * geometry.rows_per_pass;
    chunk[row * geometry.pitch + pass] = {row_part(i_, low(value_of(call_.offset)), keys.keys), mu_, sigma_};
  }

 private:
  const Draw& call_;
  u64 first_row_;
  u32 count_, chunk_, shift_, i_;
  Real mu_, sigma_;
  bool has_dimension_;
};

template <class Out, bool common_noise, bool antithetic, bool fast, Stores stores>
MULTISAMPLE_FUNCTION void draw_rows(const Draw& call, const Geometry& geometry) {
  using Real = typename Computing<Out>::Type;
  using Columns = Columns<Out, common_noise, antithetic, fast, stores>;
  __shared__ Dimension<Real> chunks[2][kChunk];
  __shared__ Out stages[stores == kStaged ? Elements<Out, antithetic>::kCount * kThreads : 1];
  // Row k of the band is first_row + (k << shift).
  const u32 band = blockIdx.x / geometry.blocks_per_band, column_block = blockIdx.x - band * geometry.blocks_per_band;
  const u32 shift = geometry.interleave_log2;
  const u64 first_row = (static_cast<u64>(band >> shift) * geometry.band_rows << shift) + (band & ((1u << shift) - 1));
  if (first_row >= call.rows) return;
  const u64 rows_left = ((call.rows - first_row - 1) >> shift) + 1;
  const u32 count = geometry.band_rows < rows_left ? geometry.band_rows : static_cast<u32>(rows_left);
  Dimensions<Real> dimensions(first_row, count, call, geometry);
  dimensions.fetch(0);

  const Keys<Real> keys(call.seed.value);
  const u32 row = threadIdx.x * geometry.one_by_groups >> 20;
  u64 group = static_cast<u64>(column_block) * geometry.steps * geometry.groups_per_pass +
              (threadIdx.x - row * geometry.groups_per_pass);
  char* out = static_cast<char*>(call.matrix) + static_cast<i64>(first_row) * call.row_stride;
  Columns columns(group, row, stages, keys, call, geometry);
  dimensions.put(chunks[0], keys, geometry);
  __syncthreads();
  for (u32 begin = 0, runs = 1, parity = 0;;) {
    const bool goes_on = count - begin > geometry.chunk;
    if (goes_on) dimensions.fetch(begin + geometry.chunk);
    const u32 rows = goes_on ? geometry.chunk : count - begin;
    columns.draw(chunks[parity], rows, out, keys, call, geometry);
    if (stores == kShifted && geometry.rest > 0 && column_block == geometry.blocks_per_band - 1 &&
        runs == geometry.steps) {
      draw_rest<Out, common_noise, antithetic, fast>(chunks[parity], rows, out, keys, call, geometry);
    }
    if (goes_on) {
      begin += geometry.chunk;
      out += geometry.chunk * (call.row_stride * (i64{1} << shift));
      parity ^= 1;
      dimensions.put(chunks[parity], keys, geometry);
      __syncthreads();
    } else if (runs < geometry.steps) {
      // A band with several runs of columns has one chunk of dimensions.
      ++runs;
      group += geometry.groups_per_pass;
      columns = Columns(group, row, stages, keys, call, geometry);
    } else {
      break;
    }
  }
}

}  // namespace multisample
