// The kernels with everything in registers. kPlain and kPlainTransposed are the block-per-dimension idea, and the
// fastest kernels for calls of usual size; kPlainTransposed also for large calls whose pieces are aligned. The kernels
// for other large calls share work between threads. `is_plain` limits the size of a call, so that numbers of rows,
// columns and groups fit into 32 bits.
#pragma once

#include "cuda/stores.cuh"

namespace multisample {

// Loads the elements `rows` of mu or sigma: a vector of the computing type or, unless `vectors`, one number.
template <bool vectors, class Real, u32 count>
MULTISAMPLE_FUNCTION void load_usual(const Vector& vector, const u32 (&rows)[count], Real (&x)[count]) {
#pragma unroll
  for (u32 r = 0; r < count; ++r) {
    x[r] = vectors || vector.type != kNumber
               ? load<Real>(static_cast<const char*>(vector.input.data) + rows[r] * vector.stride)
               : rounded<Real>(vector.input.number);
  }
}

// A block draws some groups of some rows. A thread keeps its group and goes down `turns` rows.
template <class Out, bool shared_noise, bool antithetic, bool fast, bool vectors>
MULTISAMPLE_FUNCTION void draw_plain_rows(const Launch& call, const Geometry& geometry) {
  using Real = typename Computing<Out>::Type;
  constexpr u32 width = Elements<Out, antithetic>::kCount, kAtOnce = sizeof(Real) == 4 ? 4 : 1;
  const u32 band = quotient(blockIdx.x, geometry), tile = blockIdx.x - band * geometry.blocks_per_band;
  const u32 row_of_pass = threadIdx.x * geometry.one_by_groups >> 20, apart = geometry.rows_per_pass;
  const u32 group = tile * geometry.groups_per_pass + (threadIdx.x - row_of_pass * geometry.groups_per_pass);
  const u32 rows = static_cast<u32>(call.rows), columns = static_cast<u32>(call.columns) + geometry.skip;
  // Columns [first, last) of the group are inside the matrix.
  const u32 first = group == 0 ? geometry.skip : 0, column = width * group;
  const u32 last = columns - column < width ? columns - column : width;
  u32 row = band * (geometry.turns * apart) + row_of_pass;
  if (row_of_pass >= apart || column >= columns) return;
  const Keys<Real> keys(call.seed);
  const u64 offset = value_of(call.offset, call.offset_at);
  const auto noise =
      Noise<Real, shared_noise, fast>::of(static_cast<u32>(call.first_column / width) + group, offset, keys);
  const i64 step = apart * call.row_stride;
  char* at = static_cast<char*>(call.matrix) + row * call.row_stride +
             (static_cast<i32>(column) - static_cast<i32>(geometry.skip)) * call.column_stride;
  const bool adjacent = first == 0 && last == width && call.column_stride == sizeof(Out);
  const bool aligned = adjacent && (reinterpret_cast<u64>(at) | static_cast<u64>(step)) % alignof(Quad<Out>) == 0;
#pragma unroll 1
  for (u32 k = 0; k < geometry.turns && row < rows; k += kAtOnce) {
    // All loads come first: the thread then waits for memory once.
    u32 valid[kAtOnce];
    Real mu[kAtOnce], sigma[kAtOnce];
#pragma unroll
    for (u32 r = 0; r < kAtOnce; ++r) valid[r] = row + r * apart < rows ? row + r * apart : row;
    load_usual<vectors>(mu_of(call), valid, mu);
    load_usual<vectors>(sigma_of(call), valid, sigma);
#pragma unroll
    for (u32 r = 0; r < kAtOnce; ++r, row += apart, at += step) {
      if (row >= rows || k + r >= geometry.turns) return;
      const RowPart words = row_part(static_cast<u32>(call.first_row) + row, low(offset), keys.keys);
      const auto elements = scaled<Out, antithetic>(mu[r], sigma[r], noise.in(words, keys));
      if (aligned) {
        PutAligned<Out, antithetic>{}(at, elements);
      } else if (adjacent) {
        PutStrided<Out, antithetic>{sizeof(Out), Inside(0, width)}(at, elements);
      } else {
        PutStrided<Out, antithetic>{call.column_stride, Inside(first, last)}(at, elements);
      }
    }
  }
}

// With two vectors, the code has no select between a vector and a number. The select takes 0.2 us.
template <class Out, bool shared_noise, bool antithetic, bool fast>
MULTISAMPLE_FUNCTION void draw_plain(const Launch& call, const Geometry& geometry) {
  if (call.mu_type != kNumber && call.sigma_type != kNumber) {
    draw_plain_rows<Out, shared_noise, antithetic, fast, true>(call, geometry);
  } else {
    draw_plain_rows<Out, shared_noise, antithetic, fast, false>(call, geometry);
  }
}

// A thread keeps the neighbouring dimensions of a piece, and draws `turns` adjacent groups of columns.
template <class Out, bool shared_noise, bool antithetic, bool fast>
MULTISAMPLE_FUNCTION void draw_plain_transposed(const Launch& call, const Geometry& geometry) {
  using Real = typename Computing<Out>::Type;
  using Group = Elements<Out, antithetic>;
  constexpr u32 width = Group::kCount, own_rows = kOwnRows<sizeof(Out)>;
  struct alignas(own_rows * sizeof(Out)) Piece {
    Out x[own_rows];
  };
  const u32 thread = blockIdx.x * kPlainTransposedThreads + threadIdx.x;
  const u32 turn = quotient(thread, geometry), first_row = (thread - turn * geometry.pieces) * own_rows;
  u32 group = turn * geometry.turns;
  const i32 columns = static_cast<i32>(call.columns), skip = static_cast<i32>(geometry.skip);
  i32 column = static_cast<i32>(width * group) - skip;
  if (column >= columns) return;
  const u32 left = static_cast<u32>(call.rows) - first_row, count = left < own_rows ? left : own_rows;
  u32 rows[own_rows];
  Real mu[own_rows], sigma[own_rows];
  RowPart words[own_rows];
#pragma unroll
  for (u32 r = 0; r < own_rows; ++r) rows[r] = first_row + (r < count ? r : 0);
  load_usual<false>(mu_of(call), rows, mu);
  load_usual<false>(sigma_of(call), rows, sigma);
  const Keys<Real> keys(call.seed);
  const u64 offset = value_of(call.offset, call.offset_at);
#pragma unroll
  for (u32 r = 0; r < own_rows; ++r) {
    words[r] = row_part(static_cast<u32>(call.first_row) + rows[r], low(offset), keys.keys);
  }
  const i64 stride = call.column_stride;
  char* at = static_cast<char*>(call.matrix) + first_row * sizeof(Out) + column * stride;
  const auto draw_group = [&](const auto& put) {
    const auto noise =
        Noise<Real, shared_noise, fast>::of(static_cast<u32>(call.first_column / width) + group++, offset, keys);
    Group elements[own_rows];
#pragma unroll
    for (u32 r = 0; r < own_rows; ++r) {
      elements[r] = scaled<Out, antithetic>(mu[r], sigma[r], noise.in(words[r], keys));
    }
    char* to = opaque(at);
    at += width * stride;
#pragma unroll
    for (u32 c = 0; c < width; ++c, to += stride) put(reinterpret_cast<Out*>(to), static_cast<i32>(c), elements);
    column += width;
  };
  const i32 after = column + static_cast<i32>(geometry.turns * width), end = after < columns ? after : columns;
  if (count == own_rows && (reinterpret_cast<u64>(at) | static_cast<u64>(stride)) % sizeof(Piece) == 0 && column >= 0) {
#pragma unroll 1
    while (column + static_cast<i32>(width) <= end) {
      draw_group([](Out* to, i32 c, const Group* elements) {
        Piece made;
#pragma unroll
        for (u32 r = 0; r < own_rows; ++r) made.x[r] = elements[r].x[c];
        *reinterpret_cast<Piece*>(to) = made;
      });
    }
  }
#pragma unroll 1
  while (column < end) {
    draw_group([&](Out* to, i32 c, const Group* elements) {
      if (column + c < 0 || column + c >= columns) return;
#pragma unroll
      for (u32 r = 0; r < own_rows; ++r) {
        if (r < count) to[r] = elements[r].x[c];
      }
    });
  }
}

}  // namespace multisample
