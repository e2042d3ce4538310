// What one backward launch is told: plain numbers and addresses.
#pragma once

#include "call.h"

namespace multisample {

// grad_mu[r] = sum over c < columns of grad[r, c], and grad_sigma[r] = that of grad[r, c] z[first_row + r, first_column
// + c], for r < rows, z being the noise that a SampleCall of the same fields draws.
struct GradientCall {
  const void* grad;
  i64 row_stride, column_stride;  // of grad, in bytes; any, also 0
  void *grad_mu, *grad_sigma;     // of the computing type, side by side
  u64 rows, columns;              // at least 1
  u64 first_row, first_column;
  double* partial_sums;  // room for those of a row's segments, if there are several
  u64 seed, offset;
  u64* counter;  // where the kernel runs, and then it holds the offset; or null
  u32 type;      // of grad
  u32 shared, antithetic, fast_math;
};

}  // namespace multisample
