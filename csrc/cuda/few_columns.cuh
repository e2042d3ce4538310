// The kernel with kFewColumns, for at most eight columns in a contiguous matrix.
//
// A thread draws all columns of its rows. The column parts of the words (with shared noise, the normals) are the same
// for all threads, and are in shared memory. In each pass, a warp draws neighbouring rows, and the lanes load
// neighbouring elements of mu and sigma. The stores are coalesced too: where dimensions are contiguous, neighbouring
// lanes store neighbouring elements of a column. Otherwise the rows of a warp are one run of memory, which the warp
// copies from shared memory.
#pragma once

#include "cuda/stores.cuh"

namespace multisample {

// The rows of one lane in one pass: each 32nd of the rows of its warp.
template <class Out, bool antithetic>
struct LaneRows {
  using Real = typename Computing<Out>::Type;
  using Group = Elements<Out, antithetic>;
  static constexpr u32 kOwnRows = multisample::kOwnRows<sizeof(Out)>, kOfWarp = 32 * kOwnRows;
  static constexpr u32 kPerNormal = Group::kCount / 4;

  u32 lane, columns;
  u32 left;           // rows from the warp's first one to the end of the band
  u32 i;              // the lane's first row, in the endless matrix
  Out* at;            // the same in the matrix; null if the stores go through shared memory
  i64 column_stride;  // in elements
  Out* stage;         // the warp's first row in shared memory
  Real mu[kOwnRows], sigma[kOwnRows];

  // Loads mu and sigma; the arguments address the lane's first elements.
  MULTISAMPLE_FUNCTION void load(const Real* mu_at, const Real* sigma_at) {
#pragma unroll
    for (u32 s = 0; s < kOwnRows; ++s) mu[s] = mu_at[32 * s], sigma[s] = sigma_at[32 * s];
  }

  // Loads elements `first`, `first` + 32, ... of mu and sigma. The last element is padding behind the end.
  MULTISAMPLE_FUNCTION void load(const Launch& call, u64 first) {
    u64 rows[kOwnRows];
#pragma unroll
    for (u32 s = 0; s < kOwnRows; ++s) rows[s] = first + 32 * s < call.rows ? first + 32 * s : call.rows - 1;
    load_elements(mu_of(call), rows, mu);
    load_elements(sigma_of(call), rows, sigma);
  }

  // Draws the first `normals` normals of the group that begins with column `begin`.
  template <u32 normals, class GroupNoise>
  MULTISAMPLE_FUNCTION void draw(u32 begin, const GroupNoise& noise, u32 offset, const Keys<Real>& keys) const {
    constexpr u32 count = normals * kPerNormal;
    Group group[kOwnRows];
#pragma unroll
    for (u32 s = 0; s < kOwnRows; ++s) {
      group[s] = scaled<Out, antithetic>(mu[s], sigma[s], noise.in(row_part(i + 32 * s, offset, keys.keys), keys));
    }
    const auto put_columns = [&](bool whole) {
#pragma unroll
      for (u32 c = 0; c < count; ++c) {
        Out* const column = at + (begin + c) * column_stride;
#pragma unroll
        for (u32 s = 0; s < kOwnRows; ++s) {
          if (exists<count>(begin, c) && (whole || 32 * s + lane < left)) column[32 * s] = group[s].x[c];
        }
      }
    };
    if (at != nullptr) {
      left < kOfWarp ? put_columns(false) : put_columns(true);
      return;
    }
    // Where the number of columns is even, single stores have bank conflicts.
    if (columns % 4 == 0) {
      put_rows<count, 4>(begin, group);
    } else if (columns % 2 == 0) {
      put_rows<count, 2>(begin, group);
    } else {
      put_rows<count, 1>(begin, group);
    }
  }

  // Copies the warp's rows from shared memory to `out`. All lanes of the warp take part.
  MULTISAMPLE_FUNCTION void copy(Out* out) const {
    struct alignas(kOwnRows * sizeof(Out)) Piece {
      Out x[kOwnRows];
    };
    __syncwarp();
    if (left >= kOfWarp && reinterpret_cast<u64>(out) % sizeof(Piece) == 0) {
      const Piece* const from = reinterpret_cast<const Piece*>(stage) + lane;
      Piece* const to = reinterpret_cast<Piece*>(out) + lane;
#pragma unroll
      for (u32 k = 0; k < kMostFewColumns; ++k) {
        if (k < columns) to[32 * k] = from[32 * k];
      }
    } else {
      const u32 rows = left < kOfWarp ? left : kOfWarp;
#pragma unroll 1
      for (u32 e = lane; e < rows * columns; e += 32) out[e] = stage[e];
    }
    __syncwarp();
  }

 private:
  // Of the first `count` columns of a group, only the last mirrored one may be behind the end.
  template <u32 count>
  MULTISAMPLE_FUNCTION bool exists(u32 begin, u32 c) const {
    return !antithetic || c + 1 < count || begin + c < columns;
  }

  // Puts the first `count` columns of a group into shared memory, with one store for each `at_once` of them.
  template <u32 count, u32 at_once>
  MULTISAMPLE_FUNCTION void put_rows(u32 begin, const Group (&group)[kOwnRows]) const {
    if constexpr (at_once * sizeof(Out) > kStore) {
      put_rows<count, at_once / 2>(begin, group);
    } else if constexpr (count % at_once == 0) {
      struct alignas(at_once * sizeof(Out)) Piece {
        Out x[at_once];
      };
#pragma unroll
      for (u32 s = 0; s < kOwnRows; ++s) {
        Out* const row = stage + (32 * s + lane) * columns + begin;
#pragma unroll
        for (u32 c = 0; c < count; c += at_once) {
          Piece piece;
#pragma unroll
          for (u32 e = 0; e < at_once; ++e) piece.x[e] = group[s].x[c + e];
          if (at_once > 1 || exists<count>(begin, c)) *reinterpret_cast<Piece*>(row + c) = piece;
        }
      }
    }
  }
};

template <class Out, bool shared_noise, bool antithetic, bool fast>
MULTISAMPLE_FUNCTION void draw_few_columns(const Launch& call, const Geometry& geometry) {
  using Rows = LaneRows<Out, antithetic>;
  using Real = typename Rows::Real;
  using GroupNoise = Noise<Real, shared_noise, fast>;
  constexpr u32 width = Rows::Group::kCount, of_warp = Rows::kOfWarp;
  __shared__ GroupNoise noises[2];
  struct alignas(kStore) Stage {
    Out x[of_warp * kMostFewColumns];
  };
  __shared__ Stage stages[kFewThreads / 32];
  const Keys<Real> keys(call.seed);
  const u64 offset = value_of(call.offset, call.offset_at);
  if (threadIdx.x < 2) {
    const u32 group = static_cast<u32>(call.first_column / width) + threadIdx.x;
    noises[threadIdx.x] = GroupNoise::of(group, offset, keys);
  }
  __syncthreads();

  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u64 first_row = static_cast<u64>(blockIdx.x) * geometry.band_rows;
  const u64 rows_left = call.rows - first_row;
  const u32 band_rows = rows_left < geometry.band_rows ? static_cast<u32>(rows_left) : geometry.band_rows;
  const bool is_direct = call.row_stride == sizeof(Out);
  // Contiguous vectors of the computing type are read without a multiplication.
  const auto address = [&](const Vector& vector) -> const Real* {
    if (vector.type != (sizeof(Real) == 4 ? kFloat32 : kFloat64) || vector.stride != sizeof(Real)) return nullptr;
    return static_cast<const Real*>(vector.input.data) + first_row + lane;
  };
  const Real *const mu = address(mu_of(call)), *const sigma = address(sigma_of(call));
  const bool is_usual = mu != nullptr && sigma != nullptr;
  Out* const out = static_cast<Out*>(call.matrix) + first_row * (is_direct ? 1 : call.columns);

  Rows rows;
  rows.lane = lane;
  rows.columns = static_cast<u32>(call.columns);
  rows.column_stride = call.column_stride / static_cast<i64>(sizeof(Out));
  rows.stage = stages[warp].x;
#pragma unroll 1
  for (u32 k = warp * of_warp; k < band_rows; k += geometry.rows_per_pass) {
    rows.left = band_rows - k;
    rows.i = static_cast<u32>(call.first_row + first_row) + lane + k;
    rows.at = is_direct ? out + k + lane : nullptr;
    if (is_usual && rows.left >= of_warp) {
      rows.load(mu + k, sigma + k);
    } else {
      rows.load(call, first_row + lane + k);
    }
#pragma unroll 1
    for (u32 begin = 0; begin < rows.columns; begin += width) {
      const GroupNoise noise = noises[begin / width];
      switch ((rows.columns - begin + Rows::kPerNormal - 1) / Rows::kPerNormal) {
        case 1: rows.template draw<1>(begin, noise, low(offset), keys); break;
        case 2: rows.template draw<2>(begin, noise, low(offset), keys); break;
        case 3: rows.template draw<3>(begin, noise, low(offset), keys); break;
        default: rows.template draw<4>(begin, noise, low(offset), keys);
      }
    }
    if (!is_direct) rows.copy(out + k * rows.columns);
  }
}

}  // namespace multisample
