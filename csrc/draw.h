// One launch as plain numbers and addresses. Every layer passes this struct. backends/draw.py packs the same bytes.
#pragma once

#include "element_types.h"

namespace multisample {

enum Operation : u32 {
  kSample,    // reads mu and sigma, writes the matrix: x[r, c] = mu[r] + sigma[r] z[r, c]
  kGradient,  // reads the matrix g, writes mu[r] = sum over c of g[r, c], and sigma[r] = sum over c of g[r, c] z[r, c]
};

// mu or sigma. kGradient writes contiguous vectors of the computing type.
struct Vector {
  void* data;
  i64 stride;     // in bytes
  double number;  // if the type is kNumber
  u32 type, unused;
};

// A number: `value`, or if `at` is not null the number at `at`, in memory that the kernel can read.
struct Word {
  u64 value;
  const u64* at;
};

// Operands with an element for each matrix of a batch, one after another in memory: a vector, a seed, or the three
// numbers offset, first_row and first_column.
enum Batched : u32 { kBatchedMu = 1, kBatchedSigma = 2, kBatchedSeed = 4, kBatchedOffsets = 8 };

// z[r, c] is the noise of row first_row + r (of row 0 with common noise) and column first_column + c. With antithetic
// noise, columns of z come in pairs z, -z.
struct Draw {
  Vector mu, sigma;
  void* matrix;
  i64 row_stride, column_stride;  // in bytes; for kSample multiples of the element size
  u64 rows, columns;              // at least 1
  Word seed;                      // in memory its high half is first, as in JAX's keys
  Word offset;
  Word first_row, first_column;  // first_row + rows <= 2^32, first_column + columns <= 2^34
  double* scratch;               // kGradient on CUDA: room for partial sums, see cuda/gradient_geometry.h
  void* stream;                  // of the device
  u32 type;                      // of the matrix's elements
  u32 operation;
  u32 common_noise;  // whether every row has the noise of row 0
  u32 antithetic;
  u32 fast_math;  // on CUDA devices, for types of at most 32 bits
  i32 device;     // CUDA's ordinal; -1 for host memory
  u32 threads;    // on the CPU: at most this many, or 0 for no limit
  // A batch needs its words in memory. Its matrices are contiguous and lie one after another; 0 counts as 1.
  u32 batch;
  u32 batched;       // flags of `Batched`
  u32 column_phase;  // where first_column is in memory: 1 + first_column % 8, or 0 if that is not known
};

static_assert(sizeof(Vector) == 32 && sizeof(Word) == 16 && sizeof(Draw) == 224, "backends/draw.py packs these bytes");

MULTISAMPLE_HOST_FUNCTION u64 value_of(const Word& word) { return word.at == nullptr ? word.value : *word.at; }

// Matrix b of a batch; `size` is that of an element.
MULTISAMPLE_HOST_FUNCTION Draw matrix_of_batch(Draw call, u64 b, u64 size) {
  const u64 in_mu = call.batched & kBatchedMu ? b : 0, in_sigma = call.batched & kBatchedSigma ? b : 0;
  const u64 in_seed = call.batched & kBatchedSeed ? b : 0, in_offsets = call.batched & kBatchedOffsets ? 3 * b : 0;
  call.mu.data = static_cast<char*>(call.mu.data) + static_cast<i64>(in_mu * call.rows) * call.mu.stride;
  call.sigma.data = static_cast<char*>(call.sigma.data) + static_cast<i64>(in_sigma * call.rows) * call.sigma.stride;
  call.matrix = static_cast<char*>(call.matrix) + b * call.rows * call.columns * size;
  if (call.seed.at != nullptr) call.seed.at += in_seed;
  if (call.offset.at != nullptr) call.offset.at += in_offsets;
  if (call.first_row.at != nullptr) call.first_row.at += in_offsets;
  if (call.first_column.at != nullptr) call.first_column.at += in_offsets;
  return call;
}

// The same call, with every word read from memory.
MULTISAMPLE_HOST_FUNCTION Draw with_values(Draw call) {
  const u64 seed = value_of(call.seed);
  call.seed = {call.seed.at == nullptr ? seed : seed << 32 | seed >> 32, nullptr};
  call.offset = {value_of(call.offset), nullptr};
  call.first_row = {value_of(call.first_row), nullptr};
  call.first_column = {value_of(call.first_column), nullptr};
  return call;
}

#if !defined(__CUDACC_RTC__)

// The same call, with the stride of a contiguous matrix where one row or one column makes the stride irrelevant.
inline Draw with_regular_strides(Draw call) {
  const i64 size = element_size(call.type);
  if (call.columns == 1) call.column_stride = size;
  if (call.rows == 1) call.row_stride = static_cast<i64>(call.columns) * size;
  return call;
}

// Whether the seed, the first row or the first column is in memory.
inline bool has_origin_in_memory(const Draw& call) {
  return call.seed.at != nullptr || call.first_row.at != nullptr || call.first_column.at != nullptr;
}

#endif

}  // namespace multisample
