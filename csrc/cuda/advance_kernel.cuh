// The kernel that advances an offset in memory.
#pragma once

#include "stream/words.h"

namespace multisample {

// Adds 1 to an offset in memory. It is launched after the kernels that read the offset.
__global__ void advance_kernel(u64* counter) { ++*counter; }

}  // namespace multisample
