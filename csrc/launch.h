// One launch as plain numbers and addresses. Every layer passes this struct. backends/launch.py packs the same bytes.
#pragma once

#include "element_types.h"

namespace multisample {

// z is the noise, and w are the weights; sums are over all columns c.
enum Operation : u32 {
  kSample,    // matrix[r, c] = mu[r] + sigma[r] z[r, c]
  kGradient,  // first[r] = sum of matrix[r, c], and second[r] = sum of matrix[r, c] z[r, c]
  kMoments,   // first[r] = sum of w[c] (mu[r] + sigma[r] z[r, c]), and second[r] = sum of w[c] (sigma[r] z[r, c])^2
};

// Operands with an element for each matrix of a batch, one after another in memory: a vector, a seed, or the three
// numbers offset, first_row and first_column.
enum Batched : u32 { kBatchedMu = 1, kBatchedSigma = 2, kBatchedSeed = 4, kBatchedOffsets = 8 };

// The address of the first element of a vector, or one number in place of all elements if its type is kNumber.
union Input {
  const void* data;
  double number;
};

// z[r, c] is the noise of row first_row + r (of row 0 with shared noise) and column first_column + c. With antithetic
// noise, columns of z come in pairs z, -z. An operation ignores the fields that it does not need.
struct Launch {
  // The head: values of a call, of 8 bytes each.
  Input mu, sigma;  // of `rows` elements
  Input weights;    // of `columns` elements
  void* matrix;
  void *first, *second;  // `rows` contiguous results: moments of type `type`, sums of a gradient of its computing type
  u64 seed, offset;
  u64 first_row, first_column;  // first_row + rows <= 2^32, first_column + columns <= 2^34
  // Where these numbers are in memory that the kernel can read; null if the fields above count.
  const u64* seed_at;  // its high half is first, as in JAX's keys
  const u64* offset_at;
  const u64 *first_row_at, *first_column_at;
  double* scratch;  // on CUDA: room for partial sums, see scratch_size()
  void* stream;     // of the device
  u64 threads;      // on the CPU: at most this many, or 0 for no limit
  // The tail: the same for all calls of a plan. Strides are in bytes.
  i64 mu_stride, sigma_stride, weights_stride;
  i64 row_stride, column_stride;  // for kSample multiples of the element size
  u64 rows, columns;              // at least 1
  u32 mu_type, sigma_type, weights_type;
  u32 type;  // of the matrix's elements, or of the moments
  u32 operation;
  u32 results;       // how many moments, 1 or 2
  u32 shared_noise;  // whether every row has the noise of row 0
  u32 antithetic;
  u32 fast_math;  // on CUDA devices, for types of at most 32 bits
  i32 device;     // CUDA's ordinal; -1 for host memory
  // A batch needs its words in memory. Its matrices, and the results of a gradient, are contiguous and lie one after
  // another; 0 counts as 1.
  u32 batch;
  u32 batched;       // flags of `Batched`
  u32 column_phase;  // where first_column is in memory: 1 + first_column % 8, or 0 if that is not known
  u32 unused;
};

// An input with its stride in bytes and its type.
struct Vector {
  Input input;
  i64 stride;
  u32 type;
};

MULTISAMPLE_HOST_FUNCTION Vector mu_of(const Launch& call) { return {call.mu, call.mu_stride, call.mu_type}; }
MULTISAMPLE_HOST_FUNCTION Vector sigma_of(const Launch& call) {
  return {call.sigma, call.sigma_stride, call.sigma_type};
}
MULTISAMPLE_HOST_FUNCTION Vector weights_of(const Launch& call) {
  return {call.weights, call.weights_stride, call.weights_type};
}

// The number at `at`; `value` if that is null.
MULTISAMPLE_HOST_FUNCTION u64 value_of(u64 value, const u64* at) { return at == nullptr ? value : *at; }

// Matrix b of a batch; `size` is that of an element.
MULTISAMPLE_HOST_FUNCTION Launch matrix_of_batch(Launch call, u64 b, u64 size) {
  const auto moved = [](const void* at, u64 bytes) {
    return const_cast<char*>(static_cast<const char*>(at)) + static_cast<i64>(bytes);
  };
  const u64 in_mu = call.batched & kBatchedMu ? b : 0, in_sigma = call.batched & kBatchedSigma ? b : 0;
  const u64 in_seed = call.batched & kBatchedSeed ? b : 0, in_offsets = call.batched & kBatchedOffsets ? 3 * b : 0;
  call.mu.data = moved(call.mu.data, in_mu * call.rows * call.mu_stride);
  call.sigma.data = moved(call.sigma.data, in_sigma * call.rows * call.sigma_stride);
  call.matrix = moved(call.matrix, b * call.rows * call.columns * size);
  const u64 of_results = b * call.rows * (call.operation == kGradient && size < 4 ? 4 : size);
  call.first = moved(call.first, of_results);
  call.second = moved(call.second, of_results);
  if (call.seed_at != nullptr) call.seed_at += in_seed;
  if (call.offset_at != nullptr) call.offset_at += in_offsets;
  if (call.first_row_at != nullptr) call.first_row_at += in_offsets;
  if (call.first_column_at != nullptr) call.first_column_at += in_offsets;
  return call;
}

// The same call, with every word read from memory.
MULTISAMPLE_HOST_FUNCTION Launch with_values(Launch call) {
  const u64 seed = value_of(call.seed, call.seed_at);
  call.seed = call.seed_at == nullptr ? seed : seed << 32 | seed >> 32;
  call.offset = value_of(call.offset, call.offset_at);
  call.first_row = value_of(call.first_row, call.first_row_at);
  call.first_column = value_of(call.first_column, call.first_column_at);
  call.seed_at = call.offset_at = call.first_row_at = call.first_column_at = nullptr;
  return call;
}

#if !defined(__CUDACC_RTC__)

// The same call, with the stride of a contiguous matrix where one row or one column makes the stride irrelevant.
inline Launch with_regular_strides(Launch call) {
  const i64 size = element_size(call.type);
  if (call.columns == 1) call.column_stride = size;
  if (call.rows == 1) call.row_stride = static_cast<i64>(call.columns) * size;
  return call;
}

// Whether the seed, the first row or the first column is in memory.
inline bool has_origin_in_memory(const Launch& call) {
  return call.seed_at != nullptr || call.first_row_at != nullptr || call.first_column_at != nullptr;
}

#endif

}  // namespace multisample
