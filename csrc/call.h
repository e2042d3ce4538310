// What one launch is told: plain numbers and addresses. backends/sample_call.py packs the same bytes.
#pragma once

#include "platform.h"

namespace multisample {

// Element types of mu, sigma and out. The first stands for one number in place of a vector.
enum ElementType : u32 {
  kNumber,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUInt8,
  kUInt16,
  kUInt32,
  kUInt64,
};

// mu or sigma.
struct Vector {
  const void* data;
  i64 stride;     // in bytes
  double number;  // for kNumber
  u32 type, unused;
};

// out[r, c] = mu[r] + sigma[r] z[first_row + r, first_column + c] for r < rows and c < columns, in which the columns of
// z come in pairs z, -z if they are `antithetic`.
struct SampleCall {
  Vector mu, sigma;
  void* out;
  i64 row_stride, column_stride;  // of out, in bytes; multiples of its element size
  u64 rows, columns;              // at least 1
  u64 first_row, first_column;    // first_row + rows <= 2^32, first_column + columns <= 2^34
  u64 seed, offset;
  u64* counter;    // in device memory, and then it holds the offset; or null
  u32 type;        // of out
  u32 shared;      // whether every row takes the noise of row 0
  u32 antithetic;  // whether column 2 c + 1 is the mirror of column 2 c
  u32 fast_math;   // heeded on CUDA devices, for types of at most 32 bits
  i32 device;      // CUDA's ordinal
  u32 unused;
  void* stream;  // of that device
};

static_assert(sizeof(Vector) == 32 && sizeof(SampleCall) == 176, "backends/sample_call.py packs these bytes");

}  // namespace multisample
