// The kernel with kFewRows, for one or two rows of any length. It keeps everything in registers.
//
// Going down, a thread would have one or two rows, and share little between them. Here, a thread keeps one row and goes
// along its groups.
#pragma once

#include "cuda/stores.cuh"

namespace multisample {

// A block draws adjacent groups of one row. A thread keeps mu, sigma and the row's part of the words.
template <class Out, bool shared_noise, bool antithetic, bool fast>
MULTISAMPLE_FUNCTION void draw_few_rows(const SampleCall& call, const Geometry& geometry) {
  using Real = Computing<Out>;
  using Group = Elements<Out, antithetic>;
  constexpr u32 width = Group::kCount;
  const Keys<Real> keys(call.seed);
  const u64 offset = value_of(call.offset, call.offset_at), groups_of_block = u64{geometry.turns} * kPlainThreads;
  const u32 row = quotient(blockIdx.x, geometry);
  const u64 first_group = (blockIdx.x - row * geometry.blocks_per_band) * groups_of_block;
  const Real mu = element<Out>(mu_of(call), row), sigma = element<Out>(sigma_of(call), row);
  const RowPart words = row_part(static_cast<u32>(call.first_row) + row, low(offset), keys.keys);
  u64 group = first_group + threadIdx.x;
  const auto elements = [&] {
    const u32 group_of_stream = static_cast<u32>(call.first_column / width + group);
    const auto noise = Noise<Real, shared_noise, fast>::of(group_of_stream, offset, keys);
    return scaled<Out, antithetic>(mu, sigma, noise.in(words, keys));
  };
  const i64 column = static_cast<i64>(width * first_group) - geometry.skip, stride = call.column_stride;
  char* at = static_cast<char*>(call.matrix) + row * call.row_stride + (column + width * threadIdx.x) * stride;
  const bool is_whole =
      column >= 0 && column + static_cast<i64>(width * groups_of_block) <= static_cast<i64>(call.columns);
  if (is_whole && stride == sizeof(Out) && reinterpret_cast<u64>(at) % alignof(Group) == 0) {
#pragma unroll(sizeof(Real) == 4 && !antithetic ? 4 : 1)
    for (u32 k = 0; k < geometry.turns; ++k, group += kPlainThreads) {
      PutPaired<Out, antithetic>{}(at, elements());
      at += width * kPlainThreads * sizeof(Out);
    }
  } else {
#pragma unroll 1
    for (u32 k = 0; k < geometry.turns; ++k, group += kPlainThreads) {
      const Inside inside(width, group, call, geometry);
      if (inside.first < inside.last) PutStrided<Out, antithetic>{stride, inside}(at, elements());
      at += static_cast<i64>(width * kPlainThreads) * stride;
    }
  }
}

}  // namespace multisample
