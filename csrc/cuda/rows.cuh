// The kernels with row stores: kAligned, kShifted, kStaged and kStrided.
//
// A thread keeps its columns and goes down the dimensions. It computes the column part of its words (with shared noise,
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

// Draws the `rest` groups of kShifted, which do not fill a warp, in the rows of a chunk. A thread draws one group, in
// every step-th row.
template <class Out, bool shared_noise, bool antithetic, bool fast, class Real>
MULTISAMPLE_FUNCTION void draw_rest(const Dimension<Real>* chunk, u32 rows, char* out, const Keys<Real>& keys,
                                    const SampleCall& call, const Geometry& geometry) {
  constexpr u32 kCount = Elements<Out, antithetic>::kCount;
  const u32 step = geometry.threads / geometry.rest, row = threadIdx.x / geometry.rest;
  const u64 group = u64{32} * geometry.warps + (threadIdx.x - row * geometry.rest);
  const Inside inside(kCount, group, call, geometry);
  if (row >= step || row >= rows || inside.first >= inside.last) return;
  const auto noise = Noise<Real, shared_noise, fast>::of(static_cast<u32>(call.first_column / kCount + group),
                                                         value_of(call.offset, call.offset_at), keys);
  const PutStrided<Out, antithetic> put{sizeof(Out), inside};
  char* const at = out + (static_cast<i64>(kCount * group) - geometry.skip) * static_cast<i64>(sizeof(Out));
  const i64 stride = call.row_stride * (i64{1} << geometry.interleave_log2);
  for (u32 k = row; k < rows; k += step) {
    const Dimension<Real> dimension = chunk[k];
    put(at + k * stride, scaled<Out, antithetic>(dimension.mu, dimension.sigma, noise.in(dimension.words, keys)));
  }
}

// The group of columns that one thread draws, in its rows.
template <class Out, bool shared_noise, bool antithetic, bool fast, StoreKind store_kind>
class ThreadGroup {
  using Real = Computing<Out>;
  static constexpr i64 kSize = sizeof(Out);
  static constexpr u32 kCount = Elements<Out, antithetic>::kCount;
  // Whether a group is larger than a quad, or of float64, whose quad is two stores. PutPaired then needs fewer stores
  // or fills whole sectors.
  static constexpr bool kPairs = kCount * kSize > static_cast<i64>(sizeof(Quad<Out>)) || kSize == 8;
  // Whether several passes share barriers, which saves instructions and takes registers and shared memory. It pays only
  // where a pass has one store and memory is not the limit.
  static constexpr bool kManyPasses = !shared_noise && !antithetic && kSize < 8 && kLargeSharedMemory;
  using Staged = PutStaged<Out, antithetic, kManyPasses ? kStagedPasses : 1>;

 public:
  // Elements in shared memory that the stores of a block need.
  static constexpr u32 kStages = store_kind == kStaged ? kShortRowThreads / 32 * Staged::kRoom : 1;

  // The thread draws group `group` in row `row` of each pass. The first pass begins at `out`.
  MULTISAMPLE_FUNCTION ThreadGroup(u64 group, u32 row, const char* out, Out* stages, const Keys<Real>& keys,
                                   const SampleCall& call, const Geometry& geometry)
      : noise_(Noise<Real, shared_noise, fast>::of(static_cast<u32>(call.first_column / kCount + group),
                                                   value_of(call.offset, call.offset_at), keys)),
        row_(row),
        inside_(kCount, group, call, geometry) {
    const i64 columns = static_cast<i64>(call.columns), column = static_cast<i64>(kCount * group) - geometry.skip;
    if (store_kind == kShifted && group >= u64{32} * geometry.warps) inside_.last = inside_.first;
    if (store_kind != kStaged) {
      displacement_ = row * call.row_stride + column * call.column_stride;
      if (row >= geometry.rows_per_pass) inside_.last = inside_.first;
      if (store_kind == kAligned && kPairs) {
        const u32 lane = threadIdx.x % 32;
        const i64 apart = __shfl_sync(~0u, displacement_, lane ^ 1) - displacement_, group_size = kCount * kSize;
        paired_ = __all_sync(~0u, is_whole() && apart == (lane % 2 != 0 ? -group_size : group_size));
      }
    } else {
      // Positions of the lane's and of the warp's elements within a pass.
      const u32 rows = geometry.rows_per_pass, all = rows * static_cast<u32>(columns);
      const u32 begin = row < rows ? row * static_cast<u32>(columns) + static_cast<u32>(column) + inside_.first : all;
      const u32 end = row < rows ? begin + (inside_.last - inside_.first) : all;
      const u32 run = __shfl_sync(~0u, begin, 0), length = __shfl_sync(~0u, end, 31) - run;
      if (row >= rows) row_ = 0, inside_.last = inside_.first;
      staged_ = Staged(stages, out, run, length, begin - run, inside_, geometry.row_step);
    }
  }

  // Draws a chunk of `rows` dimensions, whose first row begins at `out`.
  MULTISAMPLE_FUNCTION void draw(const Dimension<Real>* chunk, u32 rows, char* out, const Keys<Real>& keys,
                                 const SampleCall& call, const Geometry& geometry) const {
    const u32 step = geometry.rows_per_pass;
    const Dimension<Real>* const dimensions = chunk + row_ * geometry.pitch;
    if constexpr (store_kind == kStaged) return draw_staged(dimensions, rows, out, keys, call, geometry);
    char* const at = out + displacement_;
    const i32 stride = geometry.row_step;
    const u32 count = step == 1 ? rows : row_ < rows ? (rows - row_ + step - 1) * geometry.one_by_rows >> 20 : 0;
    const bool whole = store_kind == kShifted ? __all_sync(~0u, is_whole()) : is_whole();
    if (store_kind == kAligned && kPairs && __all_sync(~0u, paired_ && count == __shfl_sync(~0u, count, 0))) {
      down(dimensions, count, at, stride, keys, PutPaired<Out, antithetic>{});
    } else if (store_kind == kAligned && whole) {
      down(dimensions, count, at, stride, keys, PutAligned<Out, antithetic>{});
    } else if (store_kind == kShifted && whole) {
      const u32 lane = threadIdx.x % 32;
      const u32 shift = static_cast<u32>(reinterpret_cast<u64>(at) % alignof(Quad<Out>) / kSize);
      const auto down_shifted = [&](auto by) {
        char* const end = lane == 0 ? at : at + (kCount - by) * kSize;
        down(dimensions, count, end, stride, keys, PutShifted<Out, antithetic, by>{lane == 0, lane == 31});
      };
      if (shift == 0 && kCount * kSize > kStore) {
        down(dimensions, count, at, stride, keys, PutPaired<Out, antithetic>{});
      } else if (shift == 0) {
        down(dimensions, count, at, stride, keys, PutAligned<Out, antithetic>{});
      } else if (shift == 1) {
        down_shifted(Constant<1u>{});
      } else if constexpr (kSize < 8) {
        shift == 2 ? down_shifted(Constant<2u>{}) : down_shifted(Constant<3u>{});
      }
    } else if (inside_.first < inside_.last) {
      down(dimensions, count, at, stride, keys, PutStrided<Out, antithetic>{call.column_stride, inside_});
    }
  }

 private:
  // Whether all columns of the group are inside the matrix.
  MULTISAMPLE_FUNCTION bool is_whole() const { return inside_.first == 0 && inside_.last == kCount; }

  // Draws `count` dimensions, whose rows are `stride` elements apart in the output.
  template <class Put>
  MULTISAMPLE_FUNCTION void down(const Dimension<Real>* dimensions, u32 count, char* at, i32 stride,
                                 const Keys<Real>& keys, const Put& put) const {
#pragma unroll(sizeof(Real) == 4 ? Put::kUnroll : 1)
    for (u32 k = 0; k < count; ++k) {
      const Dimension<Real> dimension = dimensions[k];
      put(at, scaled<Out, antithetic>(dimension.mu, dimension.sigma, noise_.in(dimension.words, keys)));
      at += stride * kSize;
    }
  }

  // As draw(), for kStaged. All lanes of the warp take part.
  MULTISAMPLE_FUNCTION void draw_staged(const Dimension<Real>* dimensions, u32 rows, char* out, const Keys<Real>& keys,
                                        const SampleCall& call, const Geometry& geometry) const {
    constexpr u32 kPasses = Staged::kPasses;
    const u32 step = geometry.rows_per_pass, passes = rows * geometry.one_by_rows >> 20, more = rows - passes * step;
    const i64 stride = geometry.row_step * kSize;
    const auto elements = [&](const Dimension<Real>& of) {
      return scaled<Out, antithetic>(of.mu, of.sigma, noise_.in(of.words, keys));
    };
    const Dimension<Real>* dimension = opaque_shared(dimensions);
    u32 k = 0;
#pragma unroll 1
    for (; k + kPasses <= passes; k += kPasses) {
      // All loads come first: the compiler moves no load across a store to shared memory.
      Dimension<Real> of[kPasses];
#pragma unroll
      for (u32 pass = 0; pass < kPasses; ++pass) of[pass] = *dimension++;
#pragma unroll
      for (u32 pass = 0; pass < kPasses; ++pass) staged_.put(pass, elements(of[pass]));
      staged_.store(kPasses, out, geometry.row_step);
      out += kPasses * stride;
    }
#pragma unroll 1
    for (; kPasses > 1 && k < passes; ++k) {
      staged_.put(0, elements(*dimension++));
      staged_.store(1, out, geometry.row_step);
      out += stride;
    }
    if (more > 0) {
      // The last pass of the matrix has fewer rows. With opaque(), the compiler recomputes the thread's place here and
      // keeps no register for it.
      const u32 thread = opaque(threadIdx.x), row = thread * geometry.one_by_groups >> 20;
      const u32 group = thread - row * geometry.groups_per_pass;
      if (row >= more) return;
      const i64 column = static_cast<i64>(kCount * group) - geometry.skip;
      const PutStrided<Out, antithetic> put{kSize, Inside(kCount, group, call, geometry)};
      put(out + row * call.row_stride + column * kSize, elements(*dimension));
    }
  }

  Noise<Real, shared_noise, fast> noise_;
  i64 displacement_;  // in bytes, from the first row of a chunk to the address passed to `put`; not for kStaged
  u32 row_;
  Inside inside_;
  bool paired_;    // whether the group is whole and each lane pair of the warp has adjacent groups
  Staged staged_;  // for kStaged
};

template <class Out, bool shared_noise, bool antithetic, bool fast, StoreKind store_kind>
MULTISAMPLE_FUNCTION void draw_rows(const SampleCall& call, const Geometry& geometry) {
  using Real = Computing<Out>;
  using ThreadGroup = ThreadGroup<Out, shared_noise, antithetic, fast, store_kind>;
  __shared__ Dimension<Real> chunks[2][kChunk];
  __shared__ alignas(kStore) Out stages[ThreadGroup::kStages];
  // Pass k of the band begins k << shift passes after first_row.
  const u32 band = blockIdx.x / geometry.blocks_per_band, column_block = blockIdx.x - band * geometry.blocks_per_band;
  const u32 shift = geometry.interleave_log2;
  const u32 step = geometry.rows_per_pass;
  const u64 first_row =
      (static_cast<u64>(band >> shift) * geometry.band_rows << shift) + (band & ((1u << shift) - 1)) * step;
  if (first_row >= call.rows) return;
  u32 count = geometry.band_rows;
  const u64 rows_left = call.rows - first_row;
  if (store_kind != kStaged) {
    // An interleaved pass has one row here: no division.
    const u64 in_band = ((rows_left - 1) >> shift) + 1;
    if (in_band < count) count = static_cast<u32>(in_band);
  } else if (rows_left < static_cast<u64>(count) << shift) {
    const u32 left = static_cast<u32>(rows_left), passes = left / (step << shift),
              more = left - passes * (step << shift);
    count = passes * step + (more < step ? more : step);
  }
  // The dimensions come in chunks. While the threads of a block draw one chunk, they load the next, one dimension each.
  // The lambdas compute the thread's place in a pass at each use, since variables would take registers.
  const auto pass = [&] { return threadIdx.x * geometry.one_by_rows >> 20; };
  const auto row_of_pass = [&] { return threadIdx.x - pass() * geometry.rows_per_pass; };
  bool has_dimension;
  u32 i;
  Real mu, sigma;
  // Starts to load the thread's dimension of the chunk that begins at row `begin` of the band.
  const auto fetch = [&](u32 begin) {
    has_dimension = threadIdx.x < geometry.chunk && begin + threadIdx.x < count;
    if (!has_dimension) return;
    // Only kStaged interleaves passes of several rows.
    const u32 beside = store_kind == kStaged ? row_of_pass() : 0;
    const u64 row = first_row + (static_cast<u64>(begin + threadIdx.x - beside) << shift) + beside;
    i = static_cast<u32>(call.first_row + row);
    // Without the jump table of any_element(), nvcc 13.0 keeps the round keys in the threads' registers, and kAligned
    // takes 2 to 6 % longer.
    mu = any_element<Real>(mu_of(call), row);
    sigma = any_element<Real>(sigma_of(call), row);
  };
  fetch(0);
  const Keys<Real> keys(call.seed);
  // Stores the loaded dimension in shared memory, for reads after the next __syncthreads(). Rows that one thread draws
  // consecutively are adjacent.
  const auto put = [&](Dimension<Real>* chunk) {
    if (!has_dimension) return;
    const RowPart words = row_part(i, low(value_of(call.offset, call.offset_at)), keys.keys);
    chunk[row_of_pass() * geometry.pitch + pass()] = {words, mu, sigma};
  };
  const u32 row = threadIdx.x * geometry.one_by_groups >> 20;
  u64 group = static_cast<u64>(column_block) * geometry.steps * geometry.groups_per_pass +
              (threadIdx.x - row * geometry.groups_per_pass);
  char* out = static_cast<char*>(call.matrix) + static_cast<i64>(first_row) * call.row_stride;
  ThreadGroup columns(group, row, out, stages, keys, call, geometry);
  put(chunks[0]);
  __syncthreads();
  for (u32 begin = 0, tiles = 1, parity = 0;;) {
    const bool goes_on = count - begin > geometry.chunk;
    if (goes_on) fetch(begin + geometry.chunk);
    const u32 rows = goes_on ? geometry.chunk : count - begin;
    columns.draw(chunks[parity], rows, out, keys, call, geometry);
    if (store_kind == kShifted && geometry.rest > 0 && column_block == geometry.blocks_per_band - 1 &&
        tiles == geometry.steps) {
      draw_rest<Out, shared_noise, antithetic, fast>(chunks[parity], rows, out, keys, call, geometry);
    }
    if (goes_on) {
      begin += geometry.chunk;
      out += geometry.chunk * (call.row_stride * (i64{1} << shift));
      parity ^= 1;
      put(chunks[parity]);
      __syncthreads();
    } else if (tiles < geometry.steps) {
      // A band with several tiles has one chunk of dimensions.
      ++tiles;
      group += geometry.groups_per_pass;
      columns = ThreadGroup(group, row, out, stages, keys, call, geometry);
    } else {
      break;
    }
  }
}

}  // namespace multisample
