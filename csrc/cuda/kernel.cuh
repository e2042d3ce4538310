// The block-per-dimension kernel: x[i, j] = mu[i] + sigma[i] z[i, j]. Noise is made in registers, and each element is
// written once. cuda/plain.cuh has the idea, and the kernels of most calls. For large calls, cuda/rows.cuh has the
// kernels with row stores, and cuda/transposed.cuh the kernels with transposed stores. cuda/few_columns.cuh,
// cuda/few_rows.cuh and cuda/small_matrices.cuh have the kernels for matrices of these shapes.
#pragma once

#include "cuda/few_columns.cuh"
#include "cuda/few_rows.cuh"
#include "cuda/plain.cuh"
#include "cuda/rows.cuh"
#include "cuda/small_matrices.cuh"
#include "cuda/transposed.cuh"

namespace multisample {

template <class Out, bool shared_noise, bool antithetic, bool fast, StoreKind store_kind, u32 turns, bool usual,
          class Call>
MULTISAMPLE_FUNCTION void draw(const Call& call, const Geometry& geometry) {
  if constexpr (store_kind == kTransposed) {
    draw_transposed<Out, shared_noise, antithetic, fast>(call, geometry);
  } else if constexpr (store_kind == kTransposedStaged) {
    draw_transposed_staged<Out, shared_noise, antithetic, fast>(call, geometry);
  } else if constexpr (store_kind == kPlain) {
    draw_plain_rows<Out, shared_noise, antithetic, fast, turns, usual>(call, geometry);
  } else if constexpr (store_kind == kPlainTransposed) {
    draw_plain_pieces<Out, shared_noise, antithetic, fast, turns, usual>(call, geometry);
  } else if constexpr (store_kind == kFewRows) {
    draw_few_rows<Out, shared_noise, antithetic, fast>(call, geometry);
  } else if constexpr (store_kind == kFewColumns) {
    draw_few_columns<Out, shared_noise, antithetic, fast>(call, geometry);
  } else {
    draw_rows<Out, shared_noise, antithetic, fast, store_kind>(call, geometry);
  }
}

template <bool shared_noise, StoreKind store_kind>
constexpr int kMostThreads = store_kind == kTransposed                        ? kTransposedThreads
                             : store_kind == kTransposedStaged                ? kStagedThreads<shared_noise>
                             : store_kind == kFewColumns                      ? kFewThreads
                             : store_kind == kSmallMatrices                   ? kSmallThreads
                             : store_kind == kPlain || store_kind == kFewRows ? kPlainThreads
                             : store_kind == kPlainTransposed                 ? kPlainTransposedThreads
                             : store_kind == kShifted                         ? kShiftedThreads
                             : store_kind == kStaged                          ? kShortRowThreads
                                                                              : kThreads;

// Minimum blocks per multiprocessor for __launch_bounds__, where the compiler's own choice spills registers or lowers
// occupancy; else 0. In the plain kernels, fewer registers would make the compiler move the loads of mu and sigma
// behind the noise.
template <class Out, bool shared_noise, bool antithetic, StoreKind store_kind>
constexpr int kBlocksAtOnce =
    store_kind == kTransposed || store_kind == kTransposedStaged       ? 768 / kMostThreads<shared_noise, store_kind>
    : antithetic && (store_kind == kAligned || store_kind == kShifted) ? 2
    : store_kind == kFewColumns && !shared_noise && !antithetic && sizeof(Out) <= 4 ? (sizeof(Out) == 4 ? 8 : 7)
    : store_kind == kFewColumns && sizeof(Out) == 2                                 ? 0
    : store_kind == kFewColumns             ? (antithetic || sizeof(Out) == 8 ? 5 : 0)
    : store_kind == kPlainTransposed        ? 16
    : store_kind == kPlain                  ? blocks_with_room(sizeof(Out) == 8 ? 6
                                                               : antithetic     ? 8
                                                                                : 12,
                                                               kPlainThreads)
    : store_kind >= kSmallMatrices          ? 0
    : antithetic || sizeof(Out) == 8        ? 3
    : store_kind == kShifted                ? (shared_noise ? 3 : 4)
    : store_kind == kStaged && shared_noise ? 4
                                            : 0;

// What a kernel takes: see `SampleCall`.
template <StoreKind store_kind>
using CallOf = typename Choice<store_kind == kPlain || store_kind == kPlainTransposed, SampleCall, Launch>::Type;

template <class Out, bool shared_noise, bool antithetic, bool fast, StoreKind store_kind, bool origin_in_memory = false,
          bool batched = origin_in_memory, u32 turns = 0, bool usual = false>
__global__ void __launch_bounds__(kMostThreads<shared_noise, store_kind>,
                                  (kBlocksAtOnce<Out, shared_noise, antithetic, store_kind>))
sample_kernel(const __grid_constant__ CallOf<store_kind> call, const __grid_constant__ Geometry geometry) {
  // Numbers passed by value are uniform to the compiler, which keeps them and the round keys out of the threads'
  // registers. Numbers read from memory are not uniform, so kernels that read them are separate instances. Kernels that
  // draw batches, a matrix for each index of the grid's y axis, are separate too, because they compute addresses.
  if constexpr (store_kind == kSmallMatrices) {
    draw_small_matrices<Out, shared_noise, antithetic, fast>(call, geometry);
  } else if constexpr (origin_in_memory) {
    Geometry resolved = geometry;
    Launch values = with_values(batched ? matrix_of_batch(call, blockIdx.y) : call);
    values.seed = uniform(values.seed);
    values.offset = uniform(values.offset);
    values.first_row = uniform(values.first_row);
    values.first_column = uniform(values.first_column);
    resolved.skip = static_cast<u32>(values.first_column % Elements<Out, antithetic>::kCount);
    draw<Out, shared_noise, antithetic, fast, store_kind, turns, usual>(values, resolved);
  } else {
    draw<Out, shared_noise, antithetic, fast, store_kind, turns, usual>(call, geometry);
  }
}

}  // namespace multisample
