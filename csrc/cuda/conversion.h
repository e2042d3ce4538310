// Kernels read numbers, and vectors of the computing type or of the type of the matrix or the results. Vectors of other
// types, e.g. integers, are first converted into scratch memory. backends/kernels/cuda/conversion.py is the twin.
#pragma once

#include "launch.h"

namespace multisample {

// The vectors of all matrices of a batch.
struct Conversion {
  Vector from;  // of the first matrix
  i64 step;     // bytes from the vector of a matrix to the next
  u64 length;   // elements of a vector
  u64 all;      // elements of all vectors
  void* to;     // contiguous, of the computing type
};

// The conversions of a launch: at most those of mu, sigma and weights.
struct Conversions {
  Conversion each[3];
  u64 count;
};

static_assert(sizeof(Conversions) == 176, "backends/kernels/cuda/conversion.py packs these bytes");

// Threads of a block, and maximum blocks of a conversion.
constexpr u32 kConversionThreads = 256, kMostConversionBlocks = 4096;

#if !defined(__CUDACC_RTC__)

inline bool is_readable(u32 type, const Launch& call) {
  return type == kNumber || type == computing_type(call.type) || type == call.type;
}

// Replaces the vectors that kernels cannot read by conversions at call->scratch, which moves behind them. Returns how
// many float64 numbers the conversions take.
inline u64 convert_vectors(Launch* call, Conversions* conversions) {
  const u32 computing = computing_type(call->type);
  const i64 size = element_size(computing);
  u64 taken = 0;
  conversions->count = 0;
  const auto read = [&](Input* input, i64* stride, i64* step, u32* type, u64 length) {
    if (is_readable(*type, *call)) return;
    const u64 all = *step == 0 ? length : length * max(call->batch, 1);
    double* const to = call->scratch + taken;
    conversions->each[conversions->count++] = {{*input, *stride, *type}, *step, length, all, to};
    input->data = to;
    *stride = size, *type = computing;
    if (*step != 0) *step = static_cast<i64>(length) * size;
    taken += ceil_div(all * size, 16) * 2;  // Some kernels load 16 bytes at once.
  };
  read(&call->mu, &call->mu_stride, &call->mu_step, &call->mu_type, call->rows);
  read(&call->sigma, &call->sigma_stride, &call->sigma_step, &call->sigma_type, call->rows);
  read(&call->weights, &call->weights_stride, &call->weights_step, &call->weights_type,
       call->operation == kPerturb ? call->rows : call->columns);
  call->scratch += taken;
  return taken;
}

#endif

}  // namespace multisample
