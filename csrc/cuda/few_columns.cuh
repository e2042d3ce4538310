// The kernel with kFewColumns, for at most eight columns in a contiguous matrix.
//
// A thread draws all columns of its rows. In each pass, a warp draws neighbouring rows. The stores are coalesced: where
// dimensions are contiguous, neighbouring lanes store neighbouring elements of a column. Otherwise the rows of a warp
// are one run of memory, which the warp copies from shared memory, unless the rows of a lane fill whole stores.
//
// Up to four columns of independent noise have a loop for each number of columns, with vectors of rows and the column
// part of the words in registers. Rows behind the last whole pass of a warp, and all other calls, have a general loop.
// There, the column parts (with shared noise, the normals) are in shared memory, the same for all threads.
//
// One column may keep its noise: see Launch::results.
#pragma once

#include "cuda/stores.cuh"

namespace multisample {

// Elements of mu or sigma that are read without a multiplication or a branch: contiguous ones of the computing type, or
// a number in place of all.
template <class Real>
struct SimpleVector {
  bool is_simple;
  const Real* at;  // of element `first`; null for a number
  Real number;

  MULTISAMPLE_FUNCTION SimpleVector(const Vector& vector, u64 first) : is_simple(true), at(nullptr), number(0) {
    if (vector.type == kNumber) {
      number = rounded<Real>(vector.input.number);
    } else {
      at = static_cast<const Real*>(vector.input.data) + first;
      is_simple = vector.type == (sizeof(Real) == 4 ? kFloat32 : kFloat64) && vector.stride == sizeof(Real);
    }
  }

  // Loads runs of `run` adjacent elements from element k on. Runs begin 32 * run elements apart.
  template <u32 run, u32 count>
  MULTISAMPLE_FUNCTION void load(u32 k, Real (&x)[count]) const {
    using Piece = multisample::Piece<Real, run>;
#pragma unroll
    for (u32 s = 0; s < count; s += run) {
      Piece piece;
#pragma unroll
      for (u32 e = 0; e < run; ++e) piece.x[e] = number;
      if (at != nullptr) piece = *reinterpret_cast<const Piece*>(at + k + 32 * s);
#pragma unroll
      for (u32 e = 0; e < run; ++e) x[s + e] = piece.x[e];
    }
  }
};

// Where the noise of row `first_row` is kept; null if the call keeps none.
template <class Out>
MULTISAMPLE_FUNCTION Out* kept_noise(const Launch& call, u64 first_row) {
  return call.results == 0 ? nullptr : static_cast<Out*>(call.first) + first_row;
}

// Draws `count` rows of n columns from `first_row` on, whole passes of a warp. A lane has `run` adjacent rows of every
// 32 * run. With `is_direct`, dimensions are contiguous. All vectors of a lane are aligned.
template <class Out, bool fast, u32 n, bool is_direct, u32 run>
MULTISAMPLE_FUNCTION void draw_whole_rows(const Launch& call, const Geometry& geometry, u64 first_row, u32 count,
                                          Out* stage) {
  using Real = Computing<Out>;
  constexpr u32 kOwn = kOwnRows<sizeof(Out)>, kOfWarp = 32 * kOwn;
  constexpr bool kStaged = !is_direct && run * n != kOwn;
  using Piece = multisample::Piece<Out, kOwn>;
  using Rows = multisample::Piece<Out, run>;
  const Keys<Real> keys(call.seed);
  const u64 offset = value_of(call.offset, call.offset_at);
  const auto noise = Noise<Real, false, fast>::of(static_cast<u32>(call.first_column / kWidth), offset, keys);
  const u32 lane = threadIdx.x % 32, of_lane = lane * run;
  const SimpleVector<Real> mu(mu_of(call), first_row + of_lane), sigma(sigma_of(call), first_row + of_lane);
  const i64 column_stride = call.column_stride / static_cast<i64>(sizeof(Out));
  Out* const out = static_cast<Out*>(call.matrix) + first_row * (is_direct ? 1 : n);
  Out* const kept = kept_noise<Out>(call, first_row);
  const u32 i = static_cast<u32>(call.first_row + first_row) + of_lane;
#pragma unroll 1
  for (u32 k = threadIdx.x / 32 * kOfWarp; k < count; k += geometry.rows_per_pass) {
    Real own_mu[kOwn], own_sigma[kOwn];
    mu.template load<run>(k, own_mu);
    sigma.template load<run>(k, own_sigma);
    Elements<Out, false> group[kOwn];
#pragma unroll
    for (u32 s = 0; s < kOwn; ++s) {
      const RowPart words = row_part(i + k + 32 * (s - s % run) + s % run, low(offset), keys.keys);
      const Normals<Real> z = noise.in(words, keys);
      group[s] = scaled<Out, false>(own_mu[s], own_sigma[s], z);
      if constexpr (n == 1) group[s].x[1] = narrow<Out>(z.z0);
    }
    if constexpr (is_direct) {
      const auto put_column = [&](u32 c, Out* at) {
        // opaque: otherwise, the compiler computes the address of each element, and finds no vectors.
        Rows* const to = reinterpret_cast<Rows*>(opaque(at));
#pragma unroll
        for (u32 s = 0; s < kOwn; s += run) {
          Rows rows;
#pragma unroll
          for (u32 r = 0; r < run; ++r) rows.x[r] = group[s + r].x[c];
          to[32 * s / run] = rows;
        }
      };
      Out* at = out + (k + of_lane);
#pragma unroll
      for (u32 c = 0; c < n; ++c, at += column_stride) put_column(c, at);
      if (n == 1 && kept != nullptr) put_column(1, kept + (k + of_lane));
    } else {
      Piece* const whole = reinterpret_cast<Piece*>(out + k * n);
      Piece* const pieces = kStaged ? reinterpret_cast<Piece*>(stage) : whole;
      constexpr u32 kPieces = run * n / kOwn;
#pragma unroll
      for (u32 s = 0; s < kOwn; s += run) {
#pragma unroll
        for (u32 p = 0; p < kPieces; ++p) {
          Piece piece;
#pragma unroll
          for (u32 e = 0; e < kOwn; ++e) piece.x[e] = group[s + (kOwn * p + e) / n].x[(kOwn * p + e) % n];
          pieces[(32 * s / run + lane) * kPieces + p] = piece;
        }
      }
      if constexpr (kStaged) {
        __syncwarp();
#pragma unroll
        for (u32 p = 0; p < n; ++p) whole[32 * p + lane] = pieces[32 * p + lane];
        __syncwarp();
      }
    }
  }
}

// Draws the rows of the block from row `from` of its band on, for any call. In one pass, a lane has rows lane, lane +
// 32, ... of its warp's rows.
template <class Out, bool shared_noise, bool antithetic, bool fast>
MULTISAMPLE_FUNCTION void draw_any_rows(const Launch& call, const Geometry& geometry, u64 first_row, u32 from,
                                        u32 band_rows, Out* stage) {
  using Real = Computing<Out>;
  using Group = Elements<Out, antithetic>;
  using GroupNoise = Noise<Real, shared_noise, fast>;
  constexpr u32 width = Group::kCount, kPerNormal = width / 4, kOwn = kOwnRows<sizeof(Out)>, kOfWarp = 32 * kOwn;
  __shared__ GroupNoise noises[2];
  const Keys<Real> keys(call.seed);
  const u64 offset = value_of(call.offset, call.offset_at);
  if (threadIdx.x < 2) {
    const u32 group = static_cast<u32>(call.first_column / width) + threadIdx.x;
    noises[threadIdx.x] = GroupNoise::of(group, offset, keys);
  }
  __syncthreads();

  const u32 lane = threadIdx.x % 32, columns = static_cast<u32>(call.columns);
  const bool is_direct = call.row_stride == sizeof(Out);
  const SimpleVector<Real> mu(mu_of(call), first_row + lane), sigma(sigma_of(call), first_row + lane);
  const bool is_simple = mu.is_simple && sigma.is_simple;
  const i64 column_stride = call.column_stride / static_cast<i64>(sizeof(Out));
  Out* const out = static_cast<Out*>(call.matrix) + first_row * (is_direct ? 1 : call.columns);
  Out* const kept = kept_noise<Out>(call, first_row);
#pragma unroll 1
  for (u32 k = from + threadIdx.x / 32 * kOfWarp; k < band_rows; k += geometry.rows_per_pass) {
    const u32 left = band_rows - k;  // rows from the warp's first one to the end of the band
    const u32 i = static_cast<u32>(call.first_row + first_row) + lane + k;
    Out* const at = is_direct ? out + k + lane : nullptr;              // null if the stores go through shared memory
    Out* const kept_at = kept == nullptr ? nullptr : kept + k + lane;  // null if the call keeps no noise
    Real own_mu[kOwn], own_sigma[kOwn];
    if (is_simple && left >= kOfWarp) {
      mu.template load<1>(k, own_mu);
      sigma.template load<1>(k, own_sigma);
    } else {
      // Rows past the end have the elements of the last row.
      u64 rows[kOwn];
#pragma unroll
      for (u32 s = 0; s < kOwn; ++s) rows[s] = min(first_row + lane + k + 32 * s, call.rows - 1);
      load_elements<Out>(mu_of(call), rows, own_mu);
      load_elements<Out>(sigma_of(call), rows, own_sigma);
    }
#pragma unroll 1
    for (u32 begin = 0; begin < columns; begin += width) {
      const GroupNoise noise = noises[begin / width];
      // Draws the first `normals` normals of the group.
      const auto draw = [&](auto normals) {
        constexpr u32 count = normals * kPerNormal;
        Group group[kOwn];
#pragma unroll
        for (u32 s = 0; s < kOwn; ++s) {
          const Normals<Real> z = noise.in(row_part(i + 32 * s, low(offset), keys.keys), keys);
          group[s] = scaled<Out, antithetic>(own_mu[s], own_sigma[s], z);
          if (normals == 1 && kept_at != nullptr && 32 * s + lane < left) kept_at[32 * s] = narrow<Out>(z.z0);
        }
        // Of the columns drawn, only the last mirrored one may be behind the end.
        const auto exists = [&](u32 c) { return !antithetic || c + 1 < count || begin + c < columns; };
        const auto put_columns = [&](bool whole) {
#pragma unroll
          for (u32 c = 0; c < count; ++c) {
            Out* const column = at + (begin + c) * column_stride;
#pragma unroll
            for (u32 s = 0; s < kOwn; ++s) {
              if (exists(c) && (whole || 32 * s + lane < left)) column[32 * s] = group[s].x[c];
            }
          }
        };
        // Puts the columns into shared memory, `at_once` of them per store.
        const auto put_rows = [&](auto at_once) {
          constexpr u32 n = at_once * sizeof(Out) > kStore ? at_once / 2 : at_once;
          if constexpr (count % n == 0) {
#pragma unroll
            for (u32 s = 0; s < kOwn; ++s) {
              Out* const row = stage + (32 * s + lane) * columns + begin;
#pragma unroll
              for (u32 c = 0; c < count; c += n) {
                Piece<Out, n> piece;
#pragma unroll
                for (u32 e = 0; e < n; ++e) piece.x[e] = group[s].x[c + e];
                if (n > 1 || exists(c)) *reinterpret_cast<Piece<Out, n>*>(row + c) = piece;
              }
            }
          }
        };
        // With an even number of columns, stores of single elements would have bank conflicts.
        if (at != nullptr) {
          left < kOfWarp ? put_columns(false) : put_columns(true);
        } else if (columns % 4 == 0) {
          put_rows(Constant<4u>{});
        } else if (columns % 2 == 0) {
          put_rows(Constant<2u>{});
        } else {
          put_rows(Constant<1u>{});
        }
      };
      switch ((columns - begin + kPerNormal - 1) / kPerNormal) {
        case 1: draw(Constant<1u>{}); break;
        case 2: draw(Constant<2u>{}); break;
        case 3: draw(Constant<3u>{}); break;
        default: draw(Constant<4u>{});
      }
    }
    if (is_direct) continue;
    // The warp copies its rows from shared memory.
    using Piece = multisample::Piece<Out, kOwn>;
    Out* const to = out + k * columns;
    __syncwarp();
    if (left >= kOfWarp && reinterpret_cast<u64>(to) % sizeof(Piece) == 0) {
#pragma unroll
      for (u32 p = 0; p < kMostFewColumns; ++p) {
        if (p < columns)
          reinterpret_cast<Piece*>(to)[32 * p + lane] = reinterpret_cast<const Piece*>(stage)[32 * p + lane];
      }
    } else {
      const u32 elements = (left < kOfWarp ? left : kOfWarp) * columns;
#pragma unroll 1
      for (u32 e = lane; e < elements; e += 32) to[e] = stage[e];
    }
    __syncwarp();
  }
}

template <class Out, bool shared_noise, bool antithetic, bool fast>
MULTISAMPLE_FUNCTION void draw_few_columns(const Launch& call, const Geometry& geometry) {
  using Real = Computing<Out>;
  constexpr u32 kOwn = kOwnRows<sizeof(Out)>, kOfWarp = 32 * kOwn;
  __shared__ alignas(kStore) Out stages[kFewThreads / 32][kOfWarp * kMostFewColumns];
  Out* const stage = stages[threadIdx.x / 32];
  const u64 first_row = static_cast<u64>(blockIdx.x) * geometry.band_rows, rows_left = call.rows - first_row;
  const u32 band_rows = rows_left < geometry.band_rows ? static_cast<u32>(rows_left) : geometry.band_rows;
  if constexpr (shared_noise || antithetic || sizeof(Out) == 8) {
    draw_any_rows<Out, shared_noise, antithetic, fast>(call, geometry, first_row, 0, band_rows, stage);
  } else {
    const bool is_direct = call.row_stride == sizeof(Out);
    const SimpleVector<Real> mu(mu_of(call), 0), sigma(sigma_of(call), 0);
    const u64 of_vectors = reinterpret_cast<u64>(mu.at) | reinterpret_cast<u64>(sigma.at);
    const u64 stride = is_direct && call.columns > 1 ? static_cast<u64>(call.column_stride) : 0;
    const bool is_aligned = (reinterpret_cast<u64>(call.matrix) | stride) % (kOwn * sizeof(Out)) == 0 &&
                            of_vectors % (kOwn * sizeof(Real)) == 0;
    const bool has_loop = call.columns <= 4 && mu.is_simple && sigma.is_simple && (is_direct || is_aligned);
    const u32 whole = has_loop ? band_rows - band_rows % kOfWarp : 0;
    if (whole < band_rows) {
      draw_any_rows<Out, false, false, fast>(call, geometry, first_row, whole, band_rows, stage);
    }
    if (whole == 0) return;
    const auto draw = [&](auto columns) {
      constexpr u32 n = columns;
      // One column is contiguous in both directions.
      if (n > 1 && !is_direct) {
        draw_whole_rows<Out, fast, n, false, kOwn % n == 0 ? kOwn / n : kOwn>(call, geometry, first_row, whole, stage);
      } else if (is_aligned) {
        draw_whole_rows<Out, fast, n, true, kOwn>(call, geometry, first_row, whole, stage);
      } else {
        draw_whole_rows<Out, fast, n, true, 1>(call, geometry, first_row, whole, stage);
      }
    };
    switch (call.columns) {
      case 1: draw(Constant<1u>{}); break;
      case 2: draw(Constant<2u>{}); break;
      case 3: draw(Constant<3u>{}); break;
      default: draw(Constant<4u>{});
    }
  }
}

}  // namespace multisample
