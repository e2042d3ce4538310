// The kernel with kSmallMatrices, for batches of matrices that have fewer groups than a block has threads.
//
// A block draws several neighbouring matrices, and a thread one group of some rows of one matrix. Every matrix has its
// own seed, so threads share nothing: each computes its round keys, and the block has no barrier.
#pragma once

#include "cuda/stores.cuh"

namespace multisample {

template <class Out, bool shared_noise, bool antithetic, bool fast>
MULTISAMPLE_FUNCTION void draw_small_matrices(const Launch& call, const Geometry& geometry) {
  using Real = Computing<Out>;
  constexpr u32 width = Elements<Out, antithetic>::kCount;
  // Division by multiplication and shift: see `Geometry`.
  const u32 row_of_block = threadIdx.x * geometry.one_by_groups >> 20;
  const u32 group = threadIdx.x - row_of_block * geometry.groups_per_pass;
  const u32 matrix_of_block = row_of_block * geometry.one_by_rows >> 20;
  const u32 first_row = row_of_block - matrix_of_block * geometry.rows_per_pass;
  const u64 b = static_cast<u64>(blockIdx.x) * geometry.matrices + matrix_of_block;
  if (matrix_of_block >= geometry.matrices || b >= call.batch) return;
  const Launch matrix = with_values(matrix_of_batch(call, b));
  Geometry resolved = geometry;
  resolved.skip = static_cast<u32>(matrix.first_column % width);
  const Inside inside(width, group, matrix, resolved);
  if (inside.first >= inside.last) return;

  const Keys<Real> keys(matrix.seed);
  const u32 group_of_noise = static_cast<u32>(matrix.first_column / width) + group;
  const auto noise = Noise<Real, shared_noise, fast>::of(group_of_noise, matrix.offset, keys);
  const i64 column = static_cast<i64>(width * group) - resolved.skip;
  char* const first = static_cast<char*>(matrix.matrix) + column * matrix.column_stride;
  const bool is_adjacent = inside.first == 0 && inside.last == width && matrix.column_stride == sizeof(Out);
#pragma unroll 1
  for (u32 row = first_row; row < matrix.rows; row += geometry.rows_per_pass) {
    const Real mu = element<Out>(mu_of(matrix), row), sigma = element<Out>(sigma_of(matrix), row);
    const RowPart words = row_part(static_cast<u32>(matrix.first_row + row), low(matrix.offset), keys.keys);
    const auto elements = scaled<Out, antithetic>(mu, sigma, noise.in(words, keys));
    char* const at = first + row * matrix.row_stride;
    if (is_adjacent && reinterpret_cast<u64>(at) % alignof(Quad<Out>) == 0) {
      PutAligned<Out, antithetic>{}(at, elements);
    } else {
      PutStrided<Out, antithetic>{matrix.column_stride, inside}(at, elements);
    }
  }
}

}  // namespace multisample
