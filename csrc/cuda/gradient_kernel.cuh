// The gradient of a sample: grad_mu[i] = sum_j grad[i, j] and grad_sigma[i] = sum_j grad[i, j] z[i, j]. Noise is made
// again in registers, and each element is read once.
//
// A thread adds up a few groups in the computing type, and adds that sum to a float64 sum: each element is rounded
// fewer than 16 times, however many columns there are. cuda/gradient_geometry.h sets the order of the sums.
#pragma once

#include "cuda/gradient_geometry.h"
#include "cuda/group.cuh"
#include "cuda/intrinsics.cuh"

namespace multisample {

// A group of one row as it is in memory. Two 16-bit elements share a register.
template <class G, u32 count, bool paired = sizeof(G) == 2>
struct alignas(16) Raw {
  G x[count];

  MULTISAMPLE_FUNCTION G operator[](u32 k) const { return x[k]; }
  MULTISAMPLE_FUNCTION void set(u32 k, G value) { x[k] = value; }
};

template <class G, u32 count>
struct alignas(2 * count) Raw<G, count, true> {
  u32 x[count / 2];

  MULTISAMPLE_FUNCTION float operator[](u32 k) const { return widen(G{static_cast<u16>(x[k / 2] >> 16 * (k % 2))}); }
  MULTISAMPLE_FUNCTION void set(u32 k, G value) {
    const u32 bits = value.bits;
    x[k / 2] = k % 2 == 0 ? bits : x[k / 2] | bits << 16;
  }
};

// A contribution to the two sums of a row.
template <class Real>
struct Contribution {
  Real mu, sigma;

  MULTISAMPLE_FUNCTION void add(const Contribution& x) { mu = add_rn(mu, x.mu), sigma = add_rn(sigma, x.sigma); }
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

// Reads one group in each of a thread's rows per turn.
template <class G, bool antithetic, u32 rows, bool only_at_once>
class Reader {
 public:
  static constexpr u32 kCount = antithetic ? kAntitheticWidth : kWidth;
  using Group = Raw<G, kCount>;

  // Begins with group `slot` of the segment that begins with group `first_group`, in the rows from `row` on.
  MULTISAMPLE_FUNCTION Reader(u64 row, u64 first_group, u32 slot, const Launch& call, const GradientGeometry& geometry)
      : call_(call),
        geometry_(geometry),
        first_column_(static_cast<i64>(first_group * kCount) - geometry.skip),
        column_stride_(only_at_once ? sizeof(G) : call.column_stride),
        group_(slot) {
    at_ = static_cast<const char*>(call.matrix) + static_cast<i64>(row) * call.row_stride +
          (first_column_ + kCount * static_cast<i64>(slot)) * column_stride_;
    // All columns of a group are inside grad, except in the first and the last group of a row. If the host
    // does not know first_column, the last group may have no column inside.
    first_whole_ = first_column_ < 0;
    const u64 end = (call.columns + geometry.skip) / kCount, whole = end < first_group ? 0 : end - first_group;
    const u32 all = geometry.turns * geometry.slots;
    whole_ = opaque(whole < first_whole_ ? 0 : (whole < all ? static_cast<u32>(whole) : all) - first_whole_);
  }

  // Reads the next group. Columns outside grad give zeros.
  MULTISAMPLE_FUNCTION void read(Group* g) {
    const i64 row_step = geometry_.row_step;
    const bool whole = group_ - first_whole_ < whole_;
    if (whole && (only_at_once || geometry_.loads == kAtOnce)) {
#pragma unroll
      for (u32 r = 0; r < rows; ++r) g[r] = *reinterpret_cast<const Group*>(at_ + r * row_step);
    } else if (!only_at_once && whole && geometry_.loads == kSideBySide) {
#pragma unroll
      for (u32 r = 0; r < rows; ++r) {
#pragma unroll
        for (u32 k = 0; k < kCount; ++k) g[r].set(k, load<G>(at_ + r * row_step + k * sizeof(G)));
      }
    } else if (!only_at_once && whole) {
#pragma unroll
      for (u32 r = 0; r < rows; ++r) {
#pragma unroll
        for (u32 k = 0; k < kCount; ++k) g[r].set(k, load<G>(at_ + r * row_step + k * column_stride_));
      }
    } else {
      const i64 column = first_column_ + kCount * static_cast<i64>(group_);
#pragma unroll
      for (u32 r = 0; r < rows; ++r) g[r] = Group{};
      // Many threads have no group in the last turn.
      if (column < static_cast<i64>(call_.columns)) {
#pragma unroll
        for (u32 k = 0; k < kCount; ++k) {
          if (static_cast<u64>(column + k) < call_.columns) {
#pragma unroll
            for (u32 r = 0; r < rows; ++r) g[r].set(k, load<G>(at_ + r * row_step + k * column_stride_));
          }
        }
      }
    }
    at_ += geometry_.turn_step;
    group_ += geometry_.slots;
  }

  // Goes back to group `slot`, in the rows of the next sweep.
  MULTISAMPLE_FUNCTION void go_down(u32 slot) {
    at_ += geometry_.sweep_step;
    group_ = slot;
  }

 private:
  const Launch& call_;
  const GradientGeometry& geometry_;
  const i64 first_column_, column_stride_;
  const char* at_;
  u32 group_, first_whole_, whole_;
};

// Adds up sums of the lanes that share a tile: put(k, total) gets a lane's k-th total. In each step, two lanes exchange
// halves of their sums. When one sum per lane is left, the lanes add these up in float64.
template <u32 step, u32 count, class Real, class Put>
MULTISAMPLE_FUNCTION void add_lanes(const Real (&sums)[count], u32 lanes, const Put& put) {
  if constexpr (count == 1) {
    double total = rounded<double>(sums[0]);
#pragma unroll
    for (u32 further = step; further < 32; further *= 2) {
      if (further < lanes) total += __shfl_xor_sync(~0u, total, further);
    }
    put(0, total);
  } else if (step == lanes) {
#pragma unroll
    for (u32 k = 0; k < count; ++k) put(k, rounded<double>(sums[k]));
  } else {
    constexpr u32 half = count / 2;
    const bool upper = (threadIdx.x & step) != 0;
    Real kept[half];
#pragma unroll
    for (u32 k = 0; k < half; ++k) {
      const Real passed_on = upper ? sums[k] : sums[k + half];
      kept[k] = add_rn(upper ? sums[k + half] : sums[k], __shfl_xor_sync(~0u, passed_on, step));
    }
    add_lanes<2 * step>(kept, lanes, put);
  }
}

// Adds up the partial sums of each tile: put(k, total) gets sum k / tiles of tile k % tiles. All threads of the block
// take part.
template <class Put>
MULTISAMPLE_FUNCTION void add_partials(double* sums, u32 count, const GradientGeometry& geometry, const Put& put) {
  const u32 parts = 1u << geometry.parts_log2, partial_step = geometry.across ? geometry.tiles : 1;
  // Adds up partial sums `first`, `first` + `step`, ... up to `end`.
  const auto sum = [&](u32 k, u32 first, u32 step, u32 end) {
    // The partial sums of a tile are adjacent; with `across`, they are `tiles` elements apart.
    const u32 tile = geometry.across ? k % geometry.tiles : 0;
    double* const x = &sums[(k - tile) * geometry.partials + tile];
    double total = x[first * partial_step];
#pragma unroll 4
    for (u32 partial = first + step; partial < end; partial += step) total += x[partial * partial_step];
    return x[first * partial_step] = total;
  };
  __syncthreads();
  if (parts > 1) {
    for (u32 k = threadIdx.x; k < count * parts; k += blockDim.x) sum(k / parts, k % parts, parts, geometry.partials);
    __syncthreads();
  }
  for (u32 k = threadIdx.x; k < count; k += blockDim.x) put(k, sum(k, 0, 1, parts > 1 ? parts : geometry.partials));
}

// Minimum blocks per multiprocessor, for __launch_bounds__.
template <class G, u32 rows, bool only_at_once>
constexpr int kGradientBlocks = sizeof(G) == 8              ? 2
                                : rows > 1 && !only_at_once ? 3
                                                            : 4;

template <class G, bool shared_noise, bool antithetic, bool fast, u32 rows, bool only_at_once>
MULTISAMPLE_FUNCTION void sum_gradient(const Launch& call, const GradientGeometry& geometry,
                                       const Keys<Computing<G>>& keys) {
  using Real = Computing<G>;
  using Reader = Reader<G, antithetic, rows, only_at_once>;
  using Noise = Noise<Real, shared_noise, fast>;
  constexpr u32 kGroups = groups_at_once(rows, antithetic);
  // Partial sum p of sum s is at s * geometry.pitch + p. The sums for mu come before the sums for sigma.
  __shared__ double sums[2 * rows * kGradientThreads];
  // Volatile, because the compiler would load all row parts into registers, which then spill.
  __shared__ volatile u64 row_words[rows][kGradientThreads];
  // Consecutive blocks read neighbouring memory.
  const u32 run_of_blocks = blockIdx.x / geometry.run_of_blocks;
  const u32 block_of_run = blockIdx.x - run_of_blocks * geometry.run_of_blocks;
  const u32 segment = geometry.across ? run_of_blocks : block_of_run, height = rows * geometry.tiles;
  const u64 all_rows = height * geometry.sweeps, row_block = geometry.across ? block_of_run : run_of_blocks;
  // The last two blocks may have rows in common. Both blocks compute the same sums of these rows.
  const u64 first_row = min(row_block * all_rows, call.rows - all_rows);
  const u64 segment_begin = static_cast<u64>(segment) * (geometry.turns * geometry.slots);
  const u32 turns = segment + 1 < geometry.segments ? geometry.turns : geometry.last_turns;
  const u64 offset = value_of(call.offset, call.offset_at);
  const u32 run = threadIdx.x * geometry.one_by_run >> 20;
  const u32 rest = threadIdx.x - run * (geometry.across ? geometry.tiles : geometry.slots);
  u32 tile = geometry.across ? rest : run, slot = geometry.across ? run : rest;
  // Threads that are left over repeat the work of others, because they take part in shuffles.
  const bool is_left_over = tile >= geometry.tiles || slot >= geometry.slots;
  if (tile >= geometry.tiles) tile = geometry.tiles - 1;
  if (slot >= geometry.slots) slot = geometry.slots - 1;
  tile = opaque(tile), slot = opaque(slot);
  // Slot s stores the row parts of sweep s: there are at most as many sweeps as slots.
  if (slot < geometry.sweeps && !is_left_over) {
#pragma unroll
    for (u32 r = 0; r < rows; ++r) {
      const u32 row = slot * height + r * geometry.tiles + tile;
      const u32 i = call.shared_noise ? 0 : static_cast<u32>(call.first_row + first_row) + row;
      const RowPart words = row_part(i, low(offset), keys.keys);
      row_words[r][slot * geometry.tiles + tile] = u64{words.into_c2_of_round_2} << 32 | words.c3_of_round_2;
    }
  }
  __syncthreads();
  // The totals that add_lanes() gives to a lane: `count` of them, from number `first` on.
  u32 first = 0, count = 2 * rows, step = 1;
  for (; step < geometry.lanes && count > 1; step *= 2) {
    count /= 2;
    if (threadIdx.x & step) first += count;
  }
  // Each total is in several lanes of the run if there are more lanes than totals. One of these lanes stores the total.
  if ((threadIdx.x & (geometry.lanes - 1)) >= step || is_left_over) count = 0;
  double* const own_sums = &sums[first * geometry.pitch + (threadIdx.x >> geometry.lanes_log2)];
  Real* own_totals =
      static_cast<Real*>(first < rows ? call.first : call.second) + first_row + (first % rows * geometry.tiles + tile);
  Reader reader(first_row + tile, segment_begin, slot, call, geometry);
  const u32 first_group = static_cast<u32>(call.first_column / Reader::kCount + segment_begin) + slot;
  u32 group = first_group, turn = 0, words_at = tile;
  Noise noise = Noise::of(group, offset, keys);
  for (u32 sweep = 0; sweep < geometry.sweeps;) {
    const bool is_first = turn == 0;
    const u32 end = turns - turn < kChain * kGroups ? turns : turn + kChain * kGroups;
    // The sums of mu, then those of sigma.
    Real totals[2 * rows] = {};
#pragma unroll 1
    do {
      typename Reader::Group g[kGroups][rows];
#pragma unroll
      for (u32 k = 0; k < kGroups; ++k) reader.read(g[k]);
      Contribution<Real> more[kGroups][rows];
#pragma unroll
      for (u32 k = 0; k < kGroups; ++k) {
        // A thread with one turn has the same columns in all sweeps.
        if (kGroups > 1 || turns > 1) noise = Noise::of(group, offset, keys);
        group += geometry.slots;
#pragma unroll
        for (u32 r = 0; r < rows; ++r) {
          const u64 words = shared_noise ? 0 : row_words[r][words_at];
          more[k][r] = contribution<antithetic>(g[k][r], noise.in({high(words), low(words)}, keys));
        }
      }
#pragma unroll
      for (u32 r = 0; r < rows; ++r) {
#pragma unroll
        for (u32 apart = 1; apart < kGroups; apart *= 2) {
#pragma unroll
          for (u32 k = 0; k < kGroups; k += 2 * apart) more[k][r].add(more[k + apart][r]);
        }
        totals[r] = add_rn(totals[r], more[0][r].mu);
        totals[rows + r] = add_rn(totals[rows + r], more[0][r].sigma);
      }
      turn += kGroups;
    } while (turn < end);
    add_lanes<1>(totals, geometry.lanes, [&](u32 k, double total) {
      if (k < count) own_sums[k * geometry.pitch] = is_first ? total : own_sums[k * geometry.pitch] + total;
    });
    if (turn < turns) continue;
    if (!geometry.has_partials) {
#pragma unroll 1
      for (u32 k = 0; k < count * geometry.tiles; k += geometry.tiles) {
        own_totals[k] = rounded<Real>(own_sums[k]);
      }
    }
    ++sweep;
    turn = 0;
    group = first_group;
    words_at += geometry.tiles;
    own_totals += height;
    reader.go_down(slot);
  }
  if (!geometry.has_partials) return;
  add_partials(sums, 2 * height, geometry, [&](u32 k, double total) {
    const bool is_sigma = k >= height;
    const u64 row = first_row + (is_sigma ? k - height : k);
    if (geometry.segments > 1) {
      call.scratch[2 * (segment * call.rows + row) + is_sigma] = total;
    } else {
      static_cast<Real*>(is_sigma ? call.second : call.first)[row] = rounded<Real>(total);
    }
  });
}

template <class G, bool shared_noise, bool antithetic, bool fast, u32 rows, bool only_at_once, bool origin_in_memory>
__global__ void __launch_bounds__(kGradientThreads, kGradientBlocks<G, rows, only_at_once>) gradient_kernel(
    const __grid_constant__ Launch call, const __grid_constant__ GradientGeometry geometry,
    const __grid_constant__ Keys<Computing<G>> keys) {
  if constexpr (origin_in_memory) {
    GradientGeometry resolved = geometry;
    const Launch values = with_values(call);
    resolved.skip = static_cast<u32>(values.first_column % (antithetic ? kAntitheticWidth : kWidth));
    const Keys<Computing<G>> own_keys(values.seed);
    sum_gradient<G, shared_noise, antithetic, fast, rows, only_at_once>(values, resolved, own_keys);
  } else {
    sum_gradient<G, shared_noise, antithetic, fast, rows, only_at_once>(call, geometry, keys);
  }
}

// Adds up the segments of the rows. A block has `width` sums, a power of two.
template <class Real>
__global__ void __launch_bounds__(kGradientThreads) add_segments_kernel(const __grid_constant__ Launch call,
                                                                        u32 segments, u32 width) {
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
    static_cast<Real*>(k % 2 == 0 ? call.first : call.second)[k / 2] = rounded<Real>(sums[threadIdx.x]);
  }
}

}  // namespace multisample
