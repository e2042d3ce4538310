// Kernels read numbers, vectors of the computing type and, if that is float32, vectors of 16-bit types. Vectors of
// other types, e.g. integers, are first converted into scratch memory. backends/conversion.py is the twin for the
// driver.
#pragma once

#include "launch.h"

namespace multisample {

// Converts the vectors of all matrices of a batch.
struct Conversion {
  Vector from;  // of the first matrix
  i64 step;     // bytes from the vector of a matrix to the next
  u64 length;   // elements of a vector
  u64 all;      // elements of all vectors
  void* to;     // contiguous, of the computing type
};

static_assert(sizeof(Conversion) == 56, "backends/conversion.py packs these bytes");

// Threads of a block, and maximum blocks.
constexpr u32 kConversionThreads = 256, kMostConversionBlocks = 4096;

#if !defined(__CUDACC_RTC__)

inline bool is_readable(u32 type, u32 computing) {
  return type == kNumber || type == computing || (computing == kFloat32 && (type == kFloat16 || type == kBFloat16));
}

// Calls convert(conversion) for each vector that kernels cannot read, and replaces the vector by its conversion in
// `scratch`. Returns how many float64 numbers the conversions take.
template <class Convert>
inline u64 convert_vectors(Launch* call, double* scratch, const Convert& convert) {
  const u32 computing = computing_type(call->type);
  const i64 size = element_size(computing);
  u64 taken = 0;
  const auto read = [&](Input* input, i64* stride, i64* step, u32* type, u64 length) {
    if (is_readable(*type, computing)) return;
    const u64 all = *step == 0 ? length : length * max(call->batch, 1);
    const Conversion conversion{{*input, *stride, *type}, *step, length, all, scratch + taken};
    convert(conversion);
    input->data = conversion.to;
    *stride = size, *type = computing;
    if (*step != 0) *step = static_cast<i64>(length) * size;
    taken += ceil_div(all * size, 16) * 2;  // Some kernels load 16 bytes at once.
  };
  read(&call->mu, &call->mu_stride, &call->mu_step, &call->mu_type, call->rows);
  read(&call->sigma, &call->sigma_stride, &call->sigma_step, &call->sigma_type, call->rows);
  read(&call->weights, &call->weights_stride, &call->weights_step, &call->weights_type,
       call->operation == kPerturb ? call->rows : call->columns);
  return taken;
}

#endif

}  // namespace multisample
