// One launch of weighted moments. Every layer passes this struct. backends/moments.py packs the same bytes.
#pragma once

#include "draw.h"

namespace multisample {

// With w[c] the weights: first[r] = sum over c of w[c] (mu[r] + sigma[r] z[r, c]), and second[r] = sum over c of
// w[c] (sigma[r] z[r, c])^2. `draw` says which noise z is, and `draw.type` is the type of both results.
struct Moments {
  Draw draw;  // its matrix, strides and batch are not used; scratch has room for the partial sums of a CUDA device
  Vector weights;
  void *first, *second;  // contiguous, of draw.rows elements; `second` is null if it is not asked for
};

static_assert(sizeof(Moments) == 272, "backends/moments.py packs these bytes");

}  // namespace multisample
