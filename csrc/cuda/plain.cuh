// The plain kernels, kPlain and kPlainTransposed: the block-per-dimension idea, with mu, sigma, words and normals in
// registers. They draw calls of usual size, and large calls of some kinds. is_plain() bounds rows, columns and groups,
// so that indices of 32 bits suffice.
#pragma once

#include "cuda/stores.cuh"

namespace multisample {

// A block draws some groups of some rows. A thread keeps its group and goes down `turns` rows. `usual`: see is_usual().
template <class Out, bool shared_noise, bool antithetic, bool fast, u32 turns, bool usual>
MULTISAMPLE_FUNCTION void draw_plain_rows(const SampleCall& call, const Geometry& geometry) {
  static_assert(turns > 0, "see with_version");
  using Real = Computing<Out>;
  constexpr u32 width = Elements<Out, antithetic>::kCount;
  // Whether a pass of a block has one row. All threads of the block then have the same row.
  constexpr bool one_row = turns == kOneRowTurns;
  const u32 band = quotient(blockIdx.x, geometry), tile = blockIdx.x - band * geometry.blocks_per_band;
  const u32 row_of_pass = one_row ? 0 : threadIdx.x * geometry.one_by_groups >> 20;
  const u32 apart = one_row ? 1 : geometry.rows_per_pass;
  const u32 group = tile * geometry.groups_per_pass + (threadIdx.x - row_of_pass * geometry.groups_per_pass);
  const u32 rows = static_cast<u32>(call.rows), skip = usual ? 0 : geometry.skip, column = width * group;
  const u32 columns = static_cast<u32>(call.columns) + skip, begin = band * (turns * apart) + row_of_pass;
  if (row_of_pass >= apart || column >= columns || begin >= rows) return;
  const i64 stride = usual ? sizeof(Out) : call.column_stride;
  // Draws the rows `first`, first + apart, ...
  const auto draw = [&](u32 first, auto count) {
    // All loads come first: the thread then waits for memory once.
    Real mu[count], sigma[count];
    u64 valid[count];
#pragma unroll
    for (u32 k = 0; k < count; ++k) {
      const u32 row = first + k * apart;
      valid[k] = one_row || count == 1 || row < rows ? row : rows - 1;
    }
    load_elements<Out, usual>(mu_of(call), valid, mu);
    load_elements<Out, usual>(sigma_of(call), valid, sigma);
    const Keys<Real> keys(call.seed);
    const u64 offset = value_of(call.offset, call.offset_at);
    const auto noise =
        Noise<Real, shared_noise, fast>::of(static_cast<u32>(call.first_column / width) + group, offset, keys);
    char* at = static_cast<char*>(call.matrix) + first * call.row_stride +
               (static_cast<i32>(column) - static_cast<i32>(skip)) * stride;
    const i64 step = apart * call.row_stride;
    // The columns of the group that are inside the matrix.
    const Inside inside(group == 0 ? skip : 0, columns - column < width ? columns - column : width);
    const bool adjacent = inside.first == 0 && inside.last == width && stride == sizeof(Out);
    const bool aligned = adjacent && (reinterpret_cast<u64>(at) | static_cast<u64>(step)) % alignof(Quad<Out>) == 0;
#pragma unroll
    for (u32 k = 0; k < count; ++k, at += step) {
      const u32 row = first + k * apart;
      if (!one_row && k > 0 && row >= rows) return;
      const RowPart words = row_part(static_cast<u32>(call.first_row) + row, low(offset), keys.keys);
      const auto elements = scaled<Out, antithetic>(mu[k], sigma[k], noise.in(words, keys));
      if (usual || aligned) {
        PutAligned<Out, antithetic>{}(at, elements);
      } else if (adjacent) {
        PutStrided<Out, antithetic>{sizeof(Out), Inside(0, width)}(at, elements);
      } else {
        PutStrided<Out, antithetic>{stride, inside}(at, elements);
      }
    }
  };
  if (!one_row || rows - begin >= turns) {
    draw(begin, Constant<turns>{});
  } else if constexpr (one_row) {
#pragma unroll 1
    for (u32 row = begin; row < rows; ++row) draw(row, Constant<1u>{});
  }
}

// A thread keeps the neighbouring dimensions of a piece, and draws `turns` adjacent groups of columns. With kManyTurns,
// geometry.turns is the number of groups. `usual`: see is_usual().
template <class Out, bool shared_noise, bool antithetic, bool fast, u32 turns, bool usual>
MULTISAMPLE_FUNCTION void draw_plain_pieces(const SampleCall& call, const Geometry& geometry) {
  static_assert(turns > 0, "see with_version");
  using Real = Computing<Out>;
  using Group = Elements<Out, antithetic>;
  constexpr u32 width = Group::kCount, own_rows = kOwnRows<sizeof(Out)>;
  using Piece = multisample::Piece<Out, own_rows>;
  const u32 thread = blockIdx.x * kPlainTransposedThreads + threadIdx.x;
  const u32 turn = quotient(thread, geometry), first_row = (thread - turn * geometry.pieces) * own_rows;
  const u32 all_turns = turns < kManyTurns ? turns : geometry.turns;
  u32 group = turn * all_turns;
  const i32 columns = static_cast<i32>(call.columns), skip = usual ? 0 : static_cast<i32>(geometry.skip);
  i32 column = static_cast<i32>(width * group) - skip;
  if (column >= columns) return;
  const u32 left = static_cast<u32>(call.rows) - first_row, count = usual || left >= own_rows ? own_rows : left;
  const Keys<Real> keys(call.seed);
  const u64 offset = value_of(call.offset, call.offset_at);
  Real mu[own_rows], sigma[own_rows];
  u64 valid[own_rows];
#pragma unroll
  for (u32 r = 0; r < own_rows; ++r) valid[r] = first_row + (r < count ? r : 0);
  load_elements<Out, usual>(mu_of(call), valid, mu);
  load_elements<Out, usual>(sigma_of(call), valid, sigma);
  RowPart words[own_rows];
#pragma unroll
  for (u32 r = 0; r < own_rows; ++r) {
    words[r] = row_part(static_cast<u32>(call.first_row) + first_row + r, low(offset), keys.keys);
  }
  const i64 stride = call.column_stride;
  char* at = static_cast<char*>(call.matrix) + first_row * sizeof(Out) + column * stride;
  const u64 bits = reinterpret_cast<u64>(at) | static_cast<u64>(stride);
  const bool aligned = usual || (count == own_rows && bits % sizeof(Piece) == 0);
#pragma unroll(turns < kManyTurns ? turns : 1)
  for (u32 k = 0; k < all_turns; ++k, ++group, column += width) {
    if (k > 0 && column >= columns) return;
    const auto noise =
        Noise<Real, shared_noise, fast>::of(static_cast<u32>(call.first_column / width) + group, offset, keys);
    Group elements[own_rows];
#pragma unroll
    for (u32 r = 0; r < own_rows; ++r) {
      elements[r] = scaled<Out, antithetic>(mu[r], sigma[r], noise.in(words[r], keys));
    }
    // opaque: otherwise, the compiler computes the address of each column anew.
    char* to = opaque(at);
    at += width * stride;
#pragma unroll
    for (u32 c = 0; c < width; ++c, to += stride) {
      if (!usual && (column + static_cast<i32>(c) < 0 || column + static_cast<i32>(c) >= columns)) continue;
      if (aligned) {
        Piece made;
#pragma unroll
        for (u32 r = 0; r < own_rows; ++r) made.x[r] = elements[r].x[c];
        *reinterpret_cast<Piece*>(to) = made;
      } else {
#pragma unroll
        for (u32 r = 0; r < own_rows; ++r) {
          if (r < count) reinterpret_cast<Out*>(to)[r] = elements[r].x[c];
        }
      }
    }
  }
}

}  // namespace multisample
