// The gradient of a sample: grad_mu[i] = sum_j grad[i, j] and grad_sigma[i] = sum_j grad[i, j] z[i, j]. Noise is made
// again in registers, and each element is read once.
//
// A thread adds up a few groups in the computing type, and adds that sum to a float64 sum: each element is rounded
// fewer than 16 times, however many columns there are. cuda/gradient_geometry.h sets the order of the sums.
#pragma once

#include "cuda/gradient_geometry.h"
#include "cuda/group.cuh"

namespace multisample {

// A group of one row as it is in memory. Two 16-bit elements share a register.
template <class G, u32 count, bool paired = sizeof(G) == 2>
struct alignas(16) Raw {
  G x[count];

  MULTISAMPLE_FUNCTION G operator[](u32 k) const { return x[k]; }
  MULTISAMPLE_FUNCTION void set(u32 k, G value) { x[k] = value; }
};

template <class G, u32 count>
struct alignas(2 * count) RawPairs {
  u32 x[count / 2];

  MULTISAMPLE_FUNCTION float operator[](u32 k) const { return widen(G{static_cast<u16>(x[k / 2] >> 16 * (k % 2))}); }
  MULTISAMPLE_FUNCTION void set(u32 k, G value) {
    const u32 bits = value.bits;
    x[k / 2] = k % 2 == 0 ? bits : x[k / 2] | bits << 16;
  }
};
template <class G, u32 count>
struct Raw<G, count, true> : RawPairs<G, count> {};

// A contribution to the two sums of a row.
template <class Real>
struct Contribution {
  Real mu, sigma;
};

// The contribution of one group.
template <bool antithetic, class G, u32 count, class Real>
MULTISAMPLE_FUNCTION Contribution<Real> contribution(const Raw<G, count>& g, const Normals<Real>& z) {
  const auto product = [&](Real a, Real b, Real c, Real d) {
    return fma_rn(d, z.z3, fma_rn(c, z.z2, fma_rn(b, z.z1, mul_rn(a, z.z0))));
  };
  const auto sum = [](Real a, Real b, Real c, Real d) { return add_rn(add_rn(a, b), add_rn(c, d)); };
  if constexpr (antithetic) {
    return {add_rn(sum(g[0], g[1], g[2], g[3]), sum(g[4], g[5], g[6], g[7])),
            product(sub_rn(g[0], g[1]), sub_rn(g[2], g[3]), sub_rn(g[4], g[5]), sub_rn(g[6], g[7]))};
  } else {
    return {sum(g[0], g[1], g[2], g[3]), product(g[0], g[1], g[2], g[3])};
  }
}

// The part of grad that a block sums.
struct Part {
  u64 first_row, first_group;
  u32 segment, turns;

  MULTISAMPLE_FUNCTION static Part of_block(u32 rows, const Draw& call, const GradientGeometry& geometry) {
    // Consecutive blocks read neighbouring memory.
    const u32 row_blocks = gridDim.x / geometry.segments, along = blockIdx.x / geometry.segments;
    const u32 across = blockIdx.x / row_blocks;
    Part part;
    part.segment = geometry.across ? across : blockIdx.x - along * geometry.segments;
    const u32 height = rows * geometry.tiles;
    part.first_row = static_cast<u64>(geometry.across ? blockIdx.x - across * row_blocks : along) * height;
    // The last two blocks may share rows, for which both compute the same sums.
    if (part.first_row > call.rows - height) part.first_row = call.rows - height;
    part.first_group = static_cast<u64>(part.segment) * (geometry.turns * geometry.slots);
    const u32 all = geometry.turns * geometry.slots;
    const u64 left = geometry.groups - part.first_group;
    part.turns = ((left < all ? static_cast<u32>(left) : all) + geometry.slots - 1) / geometry.slots;
    return part;
  }
};

// Reads one group in each of a thread's rows per turn.
template <class G, bool antithetic, u32 rows, bool only_at_once>
class Reader {
 public:
  static constexpr u32 kCount = antithetic ? kAntitheticWidth : kWidth;
  using Group = Raw<G, kCount>;

  // Begins with group `group` of the part, in the rows from `row` of the part on.
  MULTISAMPLE_FUNCTION Reader(const Part& part, u32 row, u32 group, const Draw& call, const GradientGeometry& geometry)
      : columns_(call.columns),
        first_column_(static_cast<i64>(part.first_group * kCount) - geometry.skip),
        column_stride_(only_at_once ? sizeof(G) : call.column_stride),
        row_step_(geometry.row_step),
        turn_step_(geometry.turn_step),
        group_(group),
        slots_(geometry.slots),
        loads_(geometry.loads) {
    at_ = static_cast<const char*>(call.matrix) + static_cast<i64>(part.first_row + row) * call.row_stride +
          (first_column_ + kCount * static_cast<i64>(group)) * column_stride_;
    // All columns of a group are inside grad, except in the first and the last group of a row. If the first column is
    // in device memory, the last group may have no column inside.
    first_whole_ = first_column_ < 0;
    const u64 end = (columns_ + geometry.skip) / kCount, whole = end < part.first_group ? 0 : end - part.first_group;
    const u32 all = geometry.turns * geometry.slots;
    whole_ = whole < first_whole_ ? 0 : (whole < all ? static_cast<u32>(whole) : all) - first_whole_;
  }

  // Reads the next group. Columns outside grad give zeros.
  MULTISAMPLE_FUNCTION void read(Group* g) {
    const bool whole = group_ - first_whole_ < whole_;
    if (whole && (only_at_once || loads_ == kAtOnce)) {
#pragma unroll
      for (u32 r = 0; r < rows; ++r) g[r] = *reinterpret_cast<const Group*>(at_ + r * row_step_);
    } else if (!only_at_once && whole && loads_ == kSideBySide) {
#pragma unroll
      for (u32 r = 0; r < rows; ++r) {
#pragma unroll
        for (u32 k = 0; k < kCount; ++k) g[r].set(k, load<G>(at_ + r * row_step_ + k * sizeof(G)));
      }
    } else if (!only_at_once && whole) {
#pragma unroll
      for (u32 r = 0; r < rows; ++r) {
#pragma unroll
        for (u32 k = 0; k < kCount; ++k) g[r].set(k, load<G>(at_ + r * row_step_ + k * column_stride_));
      }
    } else {
      const i64 column = first_column_ + kCount * static_cast<i64>(group_);
#pragma unroll
      for (u32 k = 0; k < kCount; ++k) {
        const bool inside = static_cast<u64>(column + k) < columns_;
#pragma unroll
        for (u32 r = 0; r < rows; ++r) {
          g[r].set(k, inside ? load<G>(at_ + r * row_step_ + k * column_stride_) : G{});
        }
      }
    }
    at_ += turn_step_;
    group_ += slots_;
  }

 private:
  const u64 columns_;
  const i64 first_column_, column_stride_, row_step_, turn_step_;
  const char* at_;
  u32 group_, first_whole_, whole_;
  const u32 slots_, loads_;
};

// Sums per array of shared memory. An odd pitch puts the sums of a thread in different banks.
constexpr u32 kSumsPitch = kGradientThreads + 1;

// Adds up the sums of all slots, and stores the totals. All threads of the block take part.
template <class Real, u32 rows>
MULTISAMPLE_FUNCTION void add_up(double (&sums)[2 * rows][kSumsPitch], const Part& part, const Draw& call,
                                 const GradientGeometry& geometry) {
  const u32 parts = 1u << geometry.parts_log2, count = geometry.tiles * (2 * rows);
  const u32 slot_step = geometry.across ? geometry.tiles : 1, tile_step = geometry.across ? 1 : geometry.slots;
  // Adds sum `k` of slots `first`, `first` + `step`, ... up to `end`.
  const auto sum = [&](u32 k, u32 first, u32 step, u32 end) {
    double* const x = &sums[k % (2 * rows)][k / (2 * rows) * tile_step];
    double total = x[first * slot_step];
#pragma unroll 4
    for (u32 slot = first + step; slot < end; slot += step) total += x[slot * slot_step];
    return x[first * slot_step] = total;
  };
  if (parts > 1) {
    for (u32 k = threadIdx.x; k < count * parts; k += blockDim.x) {
      sum(k / parts, k % parts, parts, geometry.slots);
    }
    __syncthreads();
  }
  for (u32 k = threadIdx.x; k < count; k += blockDim.x) {
    const double total = sum(k, 0, 1, parts > 1 ? parts : geometry.slots);
    const u64 row = part.first_row + k / (2 * rows) + k % (2 * rows) / 2 * geometry.tiles;
    if (geometry.segments > 1) {
      call.scratch[2 * (part.segment * call.rows + row) + k % 2] = total;
    } else {
      static_cast<Real*>(k % 2 == 0 ? call.mu.data : call.sigma.data)[row] = rounded<Real>(total);
    }
  }
}

// Minimum blocks per multiprocessor, for __launch_bounds__.
template <class G, u32 rows, bool only_at_once>
constexpr int kGradientBlocks = sizeof(G) == 8              ? 2
                                : rows > 1 && !only_at_once ? 3
                                                            : 4;

template <class G, bool common_noise, bool antithetic, bool fast, u32 rows, bool only_at_once>
MULTISAMPLE_FUNCTION void sum_gradient(const Draw& call, const GradientGeometry& geometry,
                                       const Keys<typename Computing<G>::Type>& keys) {
  using Real = typename Computing<G>::Type;
  using Reader = Reader<G, antithetic, rows, only_at_once>;
  constexpr u32 kGroups = kGroupsAtOnce<rows, antithetic>;
  __shared__ double sums[2 * rows][kSumsPitch];
  // Volatile, because the compiler would load all row parts into registers, which then spill.
  __shared__ volatile u64 row_words[rows][kGradientThreads];
  const Part part = Part::of_block(rows, call, geometry);
  const u64 offset = value_of(call.offset);
  for (u32 k = threadIdx.x; k < rows * geometry.tiles; k += blockDim.x) {
    const u32 i = call.common_noise ? 0 : static_cast<u32>(call.first_row.value + part.first_row) + k;
    const RowPart words = row_part(i, low(offset), keys.keys);
    row_words[k / geometry.tiles][k % geometry.tiles] =
        static_cast<u64>(words.into_c2_of_round_2) << 32 | words.c3_of_round_2;
  }
  const u32 run = threadIdx.x * geometry.one_by_run >> 20;
  const u32 rest = threadIdx.x - run * (geometry.across ? geometry.tiles : geometry.slots);
  const u32 tile = geometry.across ? rest : run, slot = geometry.across ? run : rest;
  __syncthreads();
  if (tile < geometry.tiles && slot < geometry.slots) {
    Reader reader(part, tile, slot, call, geometry);
    u32 group = static_cast<u32>(call.first_column.value / Reader::kCount + part.first_group) + slot;
    for (u32 turn = 0; turn < part.turns;) {
      const bool is_first = turn == 0;
      const u32 end = part.turns - turn < kChain ? part.turns : turn + kChain;
      Contribution<Real> total[rows] = {};
#pragma unroll 1
      for (; turn < end; turn += kGroups) {
        typename Reader::Group g[kGroups][rows];
#pragma unroll
        for (u32 k = 0; k < kGroups; ++k) reader.read(g[k]);
#pragma unroll
        for (u32 k = 0; k < kGroups; ++k) {
          const auto noise = Noise<Real, common_noise, fast>::of(group, offset, keys);
          group += geometry.slots;
#pragma unroll
          for (u32 r = 0; r < rows; ++r) {
            const u64 words = common_noise ? 0 : row_words[r][tile];
            const auto more = contribution<antithetic>(g[k][r], noise.in({high(words), low(words)}, keys));
            total[r] = {add_rn(total[r].mu, more.mu), add_rn(total[r].sigma, more.sigma)};
          }
        }
      }
#pragma unroll
      for (u32 r = 0; r < rows; ++r) {
        double* const mu = &sums[2 * r][threadIdx.x];
        double* const sigma = &sums[2 * r + 1][threadIdx.x];
        *mu = (is_first ? 0 : *mu) + rounded<double>(total[r].mu);
        *sigma = (is_first ? 0 : *sigma) + rounded<double>(total[r].sigma);
      }
    }
  }
  __syncthreads();
  add_up<Real, rows>(sums, part, call, geometry);
}

template <class G, bool common_noise, bool antithetic, bool fast, u32 rows, bool only_at_once, bool origin_in_memory>
__global__ void __launch_bounds__(kGradientThreads, kGradientBlocks<G, rows, only_at_once>) gradient_kernel(
    const __grid_constant__ Draw call, const __grid_constant__ GradientGeometry geometry,
    const __grid_constant__ Keys<typename Computing<G>::Type> keys) {
  if constexpr (origin_in_memory) {
    GradientGeometry resolved = geometry;
    const Draw values = with_values(call);
    resolved.skip = static_cast<u32>(values.first_column.value % (antithetic ? kAntitheticWidth : kWidth));
    const Keys<typename Computing<G>::Type> own_keys(values.seed.value);
    sum_gradient<G, common_noise, antithetic, fast, rows, only_at_once>(values, resolved, own_keys);
  } else {
    sum_gradient<G, common_noise, antithetic, fast, rows, only_at_once>(call, geometry, keys);
  }
}

// Adds up the segments of the rows. A block has `width` sums, a power of two.
template <class Real>
__global__ void __launch_bounds__(kGradientThreads) add_segments_kernel(const __grid_constant__ Draw call, u32 segments,
                                                                        u32 width) {
  __shared__ double sums[kGradientThreads];
  const u64 count = 2 * call.rows, k = static_cast<u64>(blockIdx.x) * width + threadIdx.x % width;
  const u32 part = threadIdx.x / width, parts = kGradientThreads / width;
  double total = 0;
  if (k < count) {
#pragma unroll 8
    for (u32 segment = part; segment < segments; segment += parts) total += call.scratch[segment * count + k];
  }
  sums[threadIdx.x] = total;
  for (u32 half = parts / 2; half > 0; half /= 2) {
    __syncthreads();
    if (part < half) sums[threadIdx.x] += sums[threadIdx.x + half * width];
  }
  if (part == 0 && k < count) {
    static_cast<Real*>(k % 2 == 0 ? call.mu.data : call.sigma.data)[k / 2] = rounded<Real>(sums[threadIdx.x]);
  }
}

}  // namespace multisample
