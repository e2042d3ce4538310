// Weighted moments. The kernel draws noise in registers, only for groups with a weight other than 0.
// cuda/moments_geometry.h sets the order of the sums.
//
// A block lists the groups of its segment with their weights and the column part of their words in shared memory, in
// the order of columns. A thread adds up a few groups in the computing type, and adds that sum to a float64 sum.
//
// Products with very large or very small weights would overflow or lose bits. A block therefore divides its weights by
// a power of two, its exponent, which is 0 if the largest weight so far is an ordinary number.
#pragma once

#include "cuda/group.cuh"
#include "cuda/intrinsics.cuh"
#include "cuda/moments_geometry.h"

namespace multisample {

template <class T>
MULTISAMPLE_FUNCTION T larger(T x, T y) {
  return x < y ? y : x;
}

// x 2^e, rounded once.
MULTISAMPLE_FUNCTION double scaled(double x, i32 e) { return scalbn(x, e); }
// The same with a branch: many GPUs multiply float64 slowly.
MULTISAMPLE_FUNCTION double scaled_unless_0(double x, i32 e) { return e == 0 ? x : scaled(x, e); }
MULTISAMPLE_FUNCTION float scaled(float x, i32 e) { return to_float(scaled(to_double(x), e)); }

// The exponent of zero, and the exponent of a block without weights. It is less than any sum of exponents.
constexpr i32 kNoExponent = -16384;

// x = fraction_of(x) 2^exponent_of(x). The fraction of a subnormal is at least 2^-52, and others are at least 1.
MULTISAMPLE_FUNCTION i32 exponent_of(double x) {
  const u64 magnitude = float_bits(x) << 1;
  const i32 field = static_cast<i32>(magnitude >> 53);
  return magnitude == 0 ? kNoExponent : (field == 0 ? 1 : field) - 1023;
}
MULTISAMPLE_FUNCTION double fraction_of(double x) { return scaled(x, -exponent_of(x)); }

// Biased exponents of weights. Weights need no scaling if the exponent of the largest weight is in [kLeast, kMost]:
// sums cannot overflow, and products of smaller weights lose less to underflow than the sum loses to rounding.
template <class Real>
struct WeightRange {
  static constexpr bool kWide = sizeof(Real) == 8;
  static constexpr u32 kShift = kWide ? 53 : 24, kBias = kWide ? 1023 : 127;
  static constexpr u32 kLeast = kBias - (kWide ? 400 : 110), kMost = kBias + (kWide ? 399 : 99);
};

// The weights of a group's four normals, in the first moment and, where they differ, in the second moment. They differ
// with antithetic noise: two columns have the same normal, with opposite signs.
template <class Real, bool antithetic>
struct alignas(16) GroupWeights {
  Real w[1 + antithetic][kWidth];

  MULTISAMPLE_FUNCTION static GroupWeights of(const Real (&w)[antithetic ? kAntitheticWidth : kWidth]) {
    if constexpr (antithetic) {
      return {{{sub_rn(w[0], w[1]), sub_rn(w[2], w[3]), sub_rn(w[4], w[5]), sub_rn(w[6], w[7])},
               {add_rn(w[0], w[1]), add_rn(w[2], w[3]), add_rn(w[4], w[5]), add_rn(w[6], w[7])}}};
    } else {
      return {{{w[0], w[1], w[2], w[3]}}};
    }
  }
  MULTISAMPLE_FUNCTION Real first(u32 k) const { return w[0][k]; }
  MULTISAMPLE_FUNCTION Real second(u32 k) const { return w[antithetic][k]; }
  MULTISAMPLE_FUNCTION void scale(i32 e) {
#pragma unroll
    for (u32 k = 0; k < kWidth; ++k) {
#pragma unroll
      for (auto& of_moment : w) of_moment[k] = scaled(of_moment[k], e);
    }
  }
};

// Sums of w z and of w z^2.
template <class Real, bool with_second>
struct MomentSums {
  Real first = 0, second = 0;

  template <bool antithetic>
  MULTISAMPLE_FUNCTION void add(const GroupWeights<Real, antithetic>& w, const Normals<Real>& normals) {
    const Real z[] = {normals.z0, normals.z1, normals.z2, normals.z3};
#pragma unroll
    for (u32 k = 0; k < kWidth; ++k) {
      first = fma_rn(w.first(k), z[k], first);
      if (with_second) second = fma_rn(w.second(k), mul_rn(z[k], z[k]), second);
    }
  }
  MULTISAMPLE_FUNCTION void scale(i32 e) {
    first = scaled(first, e);
    if (with_second) second = scaled(second, e);
  }
};

// Stores one element of a result, whose type is Real or narrower.
template <class Real>
MULTISAMPLE_FUNCTION void put_moment(void* to, u64 row, double x, u32 result_type) {
  const Real number = rounded<Real>(x);
  switch (result_type) {
#define MULTISAMPLE_ROW(name, type, size, numpy, torch)                             \
  case k##name:                                                                     \
    if constexpr (size < sizeof(Real) && sizeof(Computing<type>) == sizeof(Real)) { \
      static_cast<type*>(to)[row] = narrow<type>(number);                           \
      return;                                                                       \
    }                                                                               \
    break;
    MULTISAMPLE_MATRIX_TYPES(MULTISAMPLE_ROW)
#undef MULTISAMPLE_ROW
  }
  static_cast<Real*>(to)[row] = number;
}

// (sigma first + weight mu) 2^e. No intermediate result overflows, and only negligible ones underflow.
MULTISAMPLE_FUNCTION double first_moment(double sigma, double first, double weight, double mu, i32 e) {
  const i32 of_noise = exponent_of(sigma) + exponent_of(first), of_mean = exponent_of(weight) + exponent_of(mu);
  const i32 most = larger(of_noise, of_mean);
  const double mean = scaled(mul_rn(fraction_of(weight), fraction_of(mu)), of_mean - most);
  return scaled(fma_rn(scaled(fraction_of(sigma), of_noise - most), fraction_of(first), mean), most + e);
}

// sigma^2 second 2^e, likewise.
MULTISAMPLE_FUNCTION double second_moment(double sigma, double second, i32 e) {
  const double fraction = fraction_of(sigma);
  return scaled(mul_rn(mul_rn(fraction, fraction), fraction_of(second)),
                2 * exponent_of(sigma) + exponent_of(second) + e);
}

// Element `k` of a vector of the computing type or of a 16-bit type, or a number.
template <class Real>
MULTISAMPLE_FUNCTION Real readable_element(const Vector& vector, u64 k) {
  if (sizeof(Real) == 4 && vector.type == kFloat16) return element<float16>(vector, k);
  if (sizeof(Real) == 4 && vector.type == kBFloat16) return element<bfloat16>(vector, k);
  return element<Real>(vector, k);
}

// Stores the moments of a row, from the sums of w, w z and w z^2. If Real is double, the sums lack the factor 2^e.
template <class Real>
MULTISAMPLE_FUNCTION void put_moments(const Launch& call, u64 row, double weight, double first, double second, i32 e) {
  const double mu = rounded<double>(readable_element<Real>(mu_of(call), row));
  const double sigma = rounded<double>(readable_element<Real>(sigma_of(call), row));
  // In float64, products of float32 numbers neither overflow nor underflow.
  const bool is_direct =
      sizeof(Real) == 4 || (e == 0 && sigma >= 0x1p-400 && sigma <= 0x1p400 && mu >= -0x1p400 && mu <= 0x1p400);
  put_moment<Real>(call.first, row,
                   is_direct ? fma_rn(sigma, first, mul_rn(weight, mu)) : first_moment(sigma, first, weight, mu, e),
                   call.type);
  if (call.results > 1) {
    put_moment<Real>(call.second, row,
                     is_direct ? mul_rn(mul_rn(sigma, sigma), second) : second_moment(sigma, second, e), call.type);
  }
}

// The list of a block's groups in shared memory.
template <class Real, bool antithetic, bool fast>
struct MomentList {
  static constexpr u32 kFill = kMomentFill<Real>, kColumns = antithetic ? kAntitheticWidth : kWidth;
  using GroupNoise = Noise<Real, false, fast>;
  using Weights = GroupWeights<Real, antithetic>;

  GroupNoise* columns;
  Weights* weights;
  u32* counts;  // of each warp
  u32 count;
  i32 exponent;  // Listed weights have been divided by 2^exponent. kNoExponent: no weight has been listed.

  // The largest `x` of the block's threads. All of them take part.
  MULTISAMPLE_FUNCTION u32 largest_of_block(u32 x) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
      x = larger(x, __shfl_sync(~0u, x, lane ^ step));
    }
    __syncthreads();
    if (lane == 0) counts[threadIdx.x / 32] = x;
    __syncthreads();
    for (u32 k = 0; k < kMomentThreads / 32; ++k) x = larger(x, counts[k]);
    return x;
  }

  // Reads the weights of groups [begin, min(end, begin + kFill)), and lists the groups with a nonzero weight. May raise
  // the exponent. Returns the sum of this thread's scaled weights. All threads of the block take part.
  MULTISAMPLE_FUNCTION double fill(u64 begin, u64 end, u64 offset, const Keys<Real>& keys, const Launch& call,
                                   const MomentGeometry& geometry) {
    const u64 group = begin + threadIdx.x;
    Real w[kColumns];
    auto largest = float_bits(Real{0});  // the largest of the weights' bits, without their signs
#pragma unroll
    for (u32 k = 0; k < kColumns; ++k) {
      const u64 column = group * kColumns + k - geometry.skip;  // Wraps before the first column.
      const bool inside = threadIdx.x < kFill && group < end && column < call.columns;
      w[k] = inside ? readable_element<Real>(weights_of(call), column) : Real{0};
      const auto magnitude = float_bits(w[k]) << 1;
      largest = larger(largest, magnitude);
    }
    // Three counts of threads in one number, 10 bits each: threads with a nonzero weight, with a weight of at least
    // kLeast, and with a weight above kMost.
    using Range = WeightRange<Real>;
    const u32 field = static_cast<u32>(largest >> Range::kShift);
    const u32 counts_here = u32{largest != 0} | u32{field >= Range::kLeast} << 10 | u32{field > Range::kMost} << 20;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 before = counts_here;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
      const u32 other = __shfl_sync(~0u, before, lane < step ? lane : lane - step);
      if (lane >= step) before += other;
    }
    if (lane == 31) counts[warp] = before;
    before -= counts_here;
    __syncthreads();
    u32 all = 0;
#pragma unroll
    for (u32 k = 0; k < kMomentThreads / 32; ++k) {
      if (k < warp) before += counts[k];
      all += counts[k];
    }
    const u32 listed = all % 1024;
    before %= 1024;
    if (listed > 0) {
      const bool is_ordinary = all >> 10 != 0 && all >> 20 == 0;
      const i32 needed = is_ordinary ? 0 : static_cast<i32>(largest_of_block(field) + 1 - Range::kBias);
      if (needed > exponent) {
        for (u32 k = threadIdx.x; k < count; k += kMomentThreads) weights[k].scale(exponent - needed);
        exponent = needed;
      }
      if (exponent != 0) {
        for (u32 k = 0; k < kColumns; ++k) w[k] = scaled(w[k], -exponent);
      }
    }
    if (largest != 0) {
      const u64 first_group = call.first_column / kColumns;
      columns[count + before] = GroupNoise::of(static_cast<u32>(first_group + group), offset, keys);
      weights[count + before] = Weights::of(w);
    }
    count += listed;
    __syncthreads();
    double sum = 0;
#pragma unroll
    for (u32 k = 0; k < kColumns; ++k) sum += rounded<double>(w[k]);
    return sum;
  }
};

// Adds the listed groups of a slot, for some rows. A sum in the computing type has at most kMomentChain groups.
template <class List, class Real, bool with_second, u32 rows>
MULTISAMPLE_FUNCTION void add_listed(const List& list, u32 slot, u32 slots, const RowPart (&parts)[rows],
                                     const Keys<Real>& keys, MomentSums<double, with_second> (&totals)[rows]) {
  u32 k = slot < slots ? slot : list.count;
  while (k < list.count) {
    const u32 chain = k + kMomentChain * slots, end = chain < list.count ? chain : list.count;
    MomentSums<Real, with_second> part[rows];
#pragma unroll 1
    for (; k < end; k += slots) {
      const auto noise = list.columns[k];
      const auto w = list.weights[k];
#pragma unroll
      for (u32 r = 0; r < rows; ++r) part[r].add(w, noise.in(parts[r], keys));
    }
#pragma unroll
    for (u32 r = 0; r < rows; ++r) {
      totals[r].first += rounded<double>(part[r].first);
      if (with_second) totals[r].second += rounded<double>(part[r].second);
    }
  }
}

template <class Real, bool antithetic, bool fast, u32 rows, bool with_second>
MULTISAMPLE_FUNCTION void sum_moments(const Launch& call, const MomentGeometry& geometry, const Keys<Real>& keys) {
  using List = MomentList<Real, antithetic, fast>;
  constexpr u32 kOrder = with_second ? 2 : 1;
  __shared__ typename List::GroupNoise columns[2 * List::kFill];
  __shared__ typename List::Weights weights[2 * List::kFill];
  __shared__ u32 counts[kMomentThreads / 32];
  __shared__ double sums[kOrder * rows][kMomentThreads];
  __shared__ double weight_sums[kMomentThreads];
  const u32 sweep_block = blockIdx.x / geometry.segments, segment = blockIdx.x - sweep_block * geometry.segments;
  const u32 slot = threadIdx.x / geometry.team, lane = threadIdx.x - slot * geometry.team;
  const u64 all_rows = call.shared_noise ? 1 : call.rows, length = geometry.turns * geometry.slots;
  const u64 first_group = segment * length, groups_left = geometry.groups - first_group;
  const u64 last_group = first_group + (groups_left < length ? groups_left : length);
  const u64 offset = value_of(call.offset, call.offset_at);
  List list{columns, weights, counts, 0, kNoExponent};
  double weight_sum = 0;
  for (u32 sweep = 0; sweep < geometry.sweeps; ++sweep) {
    const u64 tile = static_cast<u64>(sweep_block) * geometry.sweeps + sweep;
    const u64 first_row = tile * (rows * geometry.team) + lane;
    if (first_row - lane >= all_rows) break;
    RowPart parts[rows];
    MomentSums<double, with_second> totals[rows];
#pragma unroll
    for (u32 r = 0; r < rows; ++r) {
      const u64 i = call.shared_noise ? 0 : call.first_row + first_row + r * geometry.team;
      parts[r] = row_part(static_cast<u32>(i), low(offset), keys.keys);
    }
    // If there are several sweeps, the first sweep fills the list for all sweeps.
    u64 next = sweep == 0 ? first_group : last_group;
    do {
      if (sweep == 0) {
        list.count = 0;
        do {
          const i32 exponent = list.exponent;
          const double more = list.fill(next, last_group, offset, keys, call, geometry);
          if (exponent != list.exponent && exponent != kNoExponent) {
            weight_sum = scaled(weight_sum, exponent - list.exponent);
            for (u32 r = 0; r < rows; ++r) totals[r].scale(exponent - list.exponent);
          }
          weight_sum += more;
          next += List::kFill;
        } while (next < last_group && list.count <= List::kFill);
      }
      add_listed(list, slot, geometry.slots, parts, keys, totals);
      if (next < last_group) __syncthreads();
    } while (next < last_group);

#pragma unroll
    for (u32 r = 0; r < rows; ++r) {
      sums[kOrder * r][threadIdx.x] = totals[r].first;
      if (with_second) sums[kOrder * r + 1][threadIdx.x] = totals[r].second;
    }
    if (sweep == 0) weight_sums[threadIdx.x] = weight_sum;
    for (u32 half = kMomentThreads / 2; half > 0; half /= 2) {
      if (sweep > 0 && half >= geometry.slots) continue;
      __syncthreads();
      if (sweep == 0 && threadIdx.x < half) weight_sums[threadIdx.x] += weight_sums[threadIdx.x + half];
      if (slot < half && slot + half < geometry.slots) {
#pragma unroll
        for (u32 k = 0; k < kOrder * rows; ++k) sums[k][threadIdx.x] += sums[k][threadIdx.x + half * geometry.team];
      }
    }
    __syncthreads();
    const u64 sums_of_segment = kOrder * all_rows;
    // Sums of float32 terms stay in the range of float64: the scaling of their weights is undone.
    const i32 undone = sizeof(Real) == 8 || list.exponent == kNoExponent ? 0 : list.exponent;
    const double weight = scaled_unless_0(weight_sums[0], undone);
    if (tile == 0 && threadIdx.x == 0 && geometry.finishing_blocks > 0) {
      double* const to = call.scratch + geometry.segments * sums_of_segment + 2 * segment;
      to[0] = weight;
      to[1] = list.exponent;
    }
    if (slot > 0) continue;
#pragma unroll
    for (u32 r = 0; r < rows; ++r) {
      const u64 row = first_row + r * geometry.team;
      if (row >= all_rows) continue;
      const double first = scaled_unless_0(sums[kOrder * r][threadIdx.x], undone);
      const double second = with_second ? scaled_unless_0(sums[kOrder * r + kOrder - 1][threadIdx.x], undone) : 0;
      if (geometry.finishing_blocks == 0) {
        put_moments<Real>(call, row, weight, first, second, list.exponent);
      } else {
        double* const to = call.scratch + segment * sums_of_segment + kOrder * row;
        to[0] = first;
        if (with_second) to[1] = second;
      }
    }
  }
}

// Minimum blocks per multiprocessor, for __launch_bounds__: more blocks spill registers.
template <class Real, u32 rows, bool with_second>
constexpr int kMomentBlocks = sizeof(Real) == 8         ? 2
                              : rows > 1 && with_second ? 3
                                                        : 4;

template <class Real, bool antithetic, bool fast, u32 rows, bool with_second, bool origin_in_memory>
__global__ void __launch_bounds__(kMomentThreads, (kMomentBlocks<Real, rows, with_second>)) moments_kernel(
    const __grid_constant__ Launch call, const __grid_constant__ MomentGeometry geometry,
    const __grid_constant__ Keys<Real> keys) {
  // See sample_kernel: numbers passed by value are uniform to the compiler. Round keys are arguments too. Otherwise the
  // loop would compute some of them anew in each turn.
  if constexpr (origin_in_memory) {
    const Launch values = with_values(call);
    MomentGeometry resolved = geometry;
    resolved.skip = static_cast<u32>(values.first_column % (antithetic ? kAntitheticWidth : kWidth));
    const Keys<Real> own_keys(values.seed);
    sum_moments<Real, antithetic, fast, rows, with_second>(values, resolved, own_keys);
  } else {
    sum_moments<Real, antithetic, fast, rows, with_second>(call, geometry, keys);
  }
}

// Adds up the segments, and stores the moments.
template <class Real>
__global__ void __launch_bounds__(kMomentThreads) finish_moments_kernel(
    const __grid_constant__ Launch call, const __grid_constant__ MomentGeometry geometry) {
  __shared__ double sums[3][kMomentThreads];
  const u32 order = call.results, segments = geometry.segments, width = geometry.width;
  const u64 all_rows = call.shared_noise ? 1 : call.rows;
  const u64 first_row = call.shared_noise ? 0 : static_cast<u64>(blockIdx.x) * width;
  const u64 row = first_row + threadIdx.x % width;
  // For each segment, the sum of its weights and its exponent.
  const double* const weights = call.scratch + order * segments * all_rows;
  i32 exponent = 0;
  if constexpr (sizeof(Real) == 8) {
    double largest = kNoExponent;
    for (u32 segment = threadIdx.x; segment < segments; segment += kMomentThreads) {
      largest = larger(largest, weights[2 * segment + 1]);
    }
    sums[0][threadIdx.x] = largest;
    for (u32 half = kMomentThreads / 2; half > 0; half /= 2) {
      __syncthreads();
      if (threadIdx.x < half) sums[0][threadIdx.x] = larger(sums[0][threadIdx.x], sums[0][threadIdx.x + half]);
    }
    __syncthreads();
    exponent = static_cast<i32>(sums[0][0]);
    __syncthreads();
  }
  const auto of_segment = [&](double x, u32 segment) {
    return sizeof(Real) == 8 ? scaled(x, static_cast<i32>(weights[2 * segment + 1]) - exponent) : x;
  };
  double first = 0, second = 0, weight = 0;
  if (row < all_rows) {
#pragma unroll 4
    for (u32 segment = threadIdx.x / width; segment < segments; segment += kMomentThreads / width) {
      const double* const of_row = call.scratch + order * (segment * all_rows + row);
      first += of_segment(of_row[0], segment);
      if (order == 2) second += of_segment(of_row[1], segment);
    }
  }
  for (u32 segment = threadIdx.x; segment < segments; segment += kMomentThreads) {
    weight += of_segment(weights[2 * segment], segment);
  }
  sums[0][threadIdx.x] = first;
  sums[1][threadIdx.x] = second;
  sums[2][threadIdx.x] = weight;
  for (u32 half = kMomentThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x >= half) continue;
    for (u32 k = half >= width ? 0 : 2; k < 3; ++k) sums[k][threadIdx.x] += sums[k][threadIdx.x + half];
  }
  __syncthreads();
  if (call.shared_noise) {
    for (u64 r = static_cast<u64>(blockIdx.x) * kMomentThreads + threadIdx.x; r < call.rows;
         r += static_cast<u64>(gridDim.x) * kMomentThreads) {
      put_moments<Real>(call, r, sums[2][0], sums[0][0], sums[1][0], exponent);
    }
  } else if (threadIdx.x < width && row < all_rows) {
    put_moments<Real>(call, row, sums[2][0], sums[0][threadIdx.x], sums[1][threadIdx.x], exponent);
  }
}

}  // namespace multisample
