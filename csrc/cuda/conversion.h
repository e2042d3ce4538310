// Kernels read mu, sigma and weights of few types: numbers, the computing type, and Launch::type. A vector of another
// type, e.g. of integers, is first converted: the kernel reads a copy in scratch memory. The twin of this file is
// backends/kernels/cuda/conversion.py.
#pragma once

#include "launch.h"

namespace multisample {

// A vector to convert. In a batch, each matrix may have its own vector; one conversion serves all of them.
struct Conversion {
  Vector from;   // of the first matrix
  i64 step;      // bytes from the vector of a matrix to the next
  u64 length;    // elements of a vector
  u64 elements;  // of all vectors
  void* to;      // contiguous, of the computing type
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

// Points the call to copies of the vectors that kernels cannot read. The copies begin at call->scratch, which moves
// behind the copies. Returns the size of the copies, in float64 numbers.
inline u64 convert_vectors(Launch* call, Conversions* conversions) {
  const u32 computing = computing_type(call->type);
  const i64 size = element_size(computing);
  u64 taken = 0;
  conversions->count = 0;
  const auto convert = [&](Input* input, i64* stride, i64* step, u32* type, u64 length) {
    const u64 elements = *step == 0 ? length : length * max(call->batch, 1);
    if (*type == kNumber || *type == computing || *type == call->type || elements == 0) return;
    double* const to = call->scratch + taken;
    conversions->each[conversions->count++] = {{*input, *stride, *type}, *step, length, elements, to};
    input->data = to;
    *stride = size, *type = computing;
    if (*step != 0) *step = static_cast<i64>(length) * size;
    taken += ceil_div(elements * size, 16) * 2;  // Some kernels load 16 bytes at once.
  };
  // With kPerturb, sigma may be the vector of factors, which has the computing type.
  convert(&call->mu, &call->mu_stride, &call->mu_step, &call->mu_type, call->rows);
  convert(&call->sigma, &call->sigma_stride, &call->sigma_step, &call->sigma_type, call->rows);
  convert(&call->weights, &call->weights_stride, &call->weights_step, &call->weights_type,
          call->operation == kPerturb ? call->rows : call->columns);
  call->scratch += taken;
  return taken;
}

#endif

}  // namespace multisample
