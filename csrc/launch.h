// One launch as plain numbers and addresses. Every layer passes this struct. backends/launch.py packs its bytes.
#pragma once

#include "element_types.h"

namespace multisample {

// z is the noise, and w are the weights; sums are over all columns c.
enum Operation : u32 {
  kSample,    // matrix[r, c] = mu[r] + sigma[r] z[r, c]
  kGradient,  // first[r] = sum of matrix[r, c], and second[r] = sum of matrix[r, c] z[r, c]
  kMoments,   // first[r] = sum of w[c] (mu[r] + sigma[r] z[r, c]), and second[r] = sum of w[c] (sigma[r] z[r, c])^2
  // target[e] = factor source[e] + sum of w[r] z[r, e], for the elements e of each `Span`: one product, then fused
  // multiply-adds in the order of the rows, all in the computing type, and one rounding.
  kPerturb,
};

// The format of a seed or an offset in memory: 64 bits; two words of 32 bits, the high half first, as in the data of
// JAX's keys; or the lowest 32, 16 or 8 bits, where all higher bits are 0.
enum WordFormat : u32 { kWhole, kHighFirst, kBits32, kBits16, kBits8 };

// An operand. If its type is kNumber, the operand is `number`; else `data` is the address of the first element.
union Input {
  const void* data;
  double number;
};

// Rows and columns of the noise.
enum Limit : u64 { kMaxRows = u64{1} << 32, kMaxColumns = u64{1} << 34 };

// `Launch` has a head, the values of a call, and a tail, the same for all calls of a plan. SampleCall has the last
// fields of the head and the first of the tail. The plain kernels take these fields alone: a small call waits for each
// line of the constant cache that its kernel reads.
struct SampleCall {
  // Of the head: 8 bytes each.
  const u64* offset_at;  // the address of the offset in memory; null if the field below has the offset
  Input mu, sigma;       // of `rows` elements; for kPerturb, sigma may be the vector of factors: see `Span::factor`
  void* matrix;          // for kPerturb the first `Span`, in host memory
  u64 seed, offset;
  u64 first_row, first_column;  // first_row + rows <= kMaxRows, first_column + columns <= kMaxColumns
  // Of the tail. Strides are in bytes.
  i64 mu_stride, sigma_stride;
  i64 row_stride, column_stride;  // for kSample multiples of the element size; the matrix's elements do not overlap
  u64 rows, columns;  // at least 1, but kPerturb may have no rows; kPerturb has as many columns as its spans' elements
  u32 mu_type, sigma_type;
};

// The other fields of the head.
struct LaunchHead {
  Input weights;         // of `columns` elements; for kPerturb of `rows` elements
  void *first, *second;  // `rows` contiguous results: of type `type` for kMoments, else of its computing type
  // Addresses of numbers in memory that the kernel can read; null if a field of SampleCall has the number.
  const u64* seed_at;
  const u64 *first_row_at, *first_column_at;
  double* scratch;  // on CUDA: room for converted vectors and partial sums, see scratch_of()
  void* stream;     // of the device
  u64 threads;      // on the CPU: the maximum number of threads, or 0 for no limit
};

// z[r, c] is the noise of row first_row + r (of row 0 with shared noise) and column first_column + c. With antithetic
// noise, columns of z come in pairs z, -z. An operation ignores the fields that it does not need.
struct Launch : LaunchHead, SampleCall {
  u32 weights_type;
  u32 type;  // of the matrix's elements, or of the moments
  i64 weights_stride;
  // Bytes from one matrix of a batch to the next; 0 for shared operands.
  i64 mu_step, sigma_step, weights_step, matrix_step, result_step, seed_step, offset_step;
  i64 origin_step;  // of first_row_at and first_column_at
  u64 spans;        // how many `Span`s kPerturb has
  u32 operation;
  // kMoments: how many moments, 1 or 2.
  // kSample: 1 for a call of torch_ext that stores its noise in `first` too; else 0. A call with 1 has one column,
  // contiguous operands and no batch. On CUDA devices, its store kind is kFewColumns.
  // kGradient: 1 for a call of torch_ext on CUDA that stores only the sum with noise, in `first`. Other calls store
  // both sums, and have 0 or 2. A call with 1 has one column and no batch.
  u32 results;
  u32 shared_noise;  // whether every row has the noise of row 0; for kPerturb, whether each row r has a seed and an
                     // offset of its own, number r in memory, and all rows have the index first_row
  u32 antithetic;
  u32 fast_math;         // on CUDA devices, for types of at most 32 bits
  i32 device;            // CUDA's ordinal; -1 for host memory
  u32 batch;             // how many matrices; 0 means 1
  u32 origin_in_memory;  // whether a kernel reads the seed, the first row or the first column from memory; 1 for a
                         // batch
  u32 word_formats;      // the `WordFormat` of the seed in memory, and in the next 8 bits that of the offset
  u32 column_phase;      // if first_column is in memory: 1 + first_column % 8, or 0 if unknown
};

// A number; or, if sigma is a vector, the index of its element, which has the computing type.
union Factor {
  double number;
  u64 index;
};

// Elements of one parameter, which kPerturb reads and writes: `rows` runs of `width` elements. Element w of run r is
// element e = first + r jump + w of the parameter, and column e of the noise. The offset of a span's noise is that of
// the launch plus id * 2^32. Strides are in bytes, multiples of the element size.
struct Span {
  const void* source;
  void* target;     // may be `source`; the elements of a target do not overlap
  i64 first;        // 0 <= e < 2^34
  i64 rows, width;  // at least 1
  i64 jump;
  i64 source_row, source_stride;  // from one run to the next, and from one element of a run to the next
  i64 target_row, target_stride;
  u64 id;                        // less than 2^32
  i64 source_step, target_step;  // from one matrix of a batch to the next
  Factor factor;
};

// An input with its stride in bytes and its type.
struct Vector {
  Input input;
  i64 stride;
  u32 type;
};

MULTISAMPLE_HOST_FUNCTION Vector mu_of(const SampleCall& call) { return {call.mu, call.mu_stride, call.mu_type}; }
MULTISAMPLE_HOST_FUNCTION Vector sigma_of(const SampleCall& call) {
  return {call.sigma, call.sigma_stride, call.sigma_type};
}
MULTISAMPLE_HOST_FUNCTION Vector weights_of(const Launch& call) {
  return {call.weights, call.weights_stride, call.weights_type};
}

MULTISAMPLE_HOST_FUNCTION u64 min(u64 a, u64 b) { return a < b ? a : b; }
MULTISAMPLE_HOST_FUNCTION u64 max(u64 a, u64 b) { return a < b ? b : a; }
MULTISAMPLE_HOST_FUNCTION u64 ceil_div(u64 a, u64 b) { return (a + b - 1) / b; }

// The number at address `at`; `value` if the address is null.
MULTISAMPLE_HOST_FUNCTION u64 value_of(u64 value, const u64* at) { return at == nullptr ? value : *at; }

template <class T>
MULTISAMPLE_HOST_FUNCTION T* moved(T* at, i64 bytes) {
  return reinterpret_cast<T*>(reinterpret_cast<i64>(at) + bytes);
}

// Matrix b of a batch.
MULTISAMPLE_HOST_FUNCTION Launch matrix_of_batch(Launch call, u64 b) {
  const i64 count = static_cast<i64>(b);
  call.mu.data = moved(call.mu.data, count * call.mu_step);
  call.sigma.data = moved(call.sigma.data, count * call.sigma_step);
  call.weights.data = moved(call.weights.data, count * call.weights_step);
  call.matrix = moved(call.matrix, count * call.matrix_step);
  call.first = moved(call.first, count * call.result_step);
  call.second = moved(call.second, count * call.result_step);
  call.seed_at = moved(call.seed_at, count * call.seed_step);
  call.offset_at = moved(call.offset_at, count * call.offset_step);
  call.first_row_at = moved(call.first_row_at, count * call.origin_step);
  call.first_column_at = moved(call.first_column_at, count * call.origin_step);
  return call;
}

// The word at address `at`; `value` if the address is null.
MULTISAMPLE_HOST_FUNCTION u64 word_of(u64 value, const void* at, u32 format) {
  if (at == nullptr) return value;
  const u32* const halves = static_cast<const u32*>(at);
  switch (format) {
    case kWhole: return *static_cast<const u64*>(at);
    case kHighFirst: return u64{halves[0]} << 32 | halves[1];
    case kBits32: return *halves;
    case kBits16: return *static_cast<const unsigned short*>(at);
    default: return *static_cast<const unsigned char*>(at);
  }
}

// The call with its words read from memory into the fields of their values.
MULTISAMPLE_HOST_FUNCTION Launch with_values(Launch call) {
  call.seed = word_of(call.seed, call.seed_at, call.word_formats & 0xFF);
  call.offset = word_of(call.offset, call.offset_at, call.word_formats >> 8);
  call.first_row = value_of(call.first_row, call.first_row_at);
  call.first_column = value_of(call.first_column, call.first_column_at);
  call.seed_at = call.offset_at = call.first_row_at = call.first_column_at = nullptr;
  return call;
}

#if !defined(__CUDACC_RTC__)

// Replaces the stride of a single row or column, which no element needs, by the stride of a contiguous matrix.
inline Launch with_regular_strides(Launch call) {
  const i64 size = element_size(call.type);
  if (call.columns == 1) call.column_stride = size;
  if (call.rows == 1) call.row_stride = static_cast<i64>(call.columns) * size;
  return call;
}

#endif

}  // namespace multisample
