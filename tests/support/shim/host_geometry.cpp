// A function that computes the geometry of launches, and constants; for ctypes.
#include "cuda/geometry.h"

using namespace multisample;

extern "C" {

u32 limits[] = {kThreads,
                kShortRow,
                kTransposedThreads,
                kStagedThreads<false>,
                kStagedThreads<true>,
                kShiftedThreads,
                kShortRowThreads,
                kStagedPasses,
                kFewThreads,
                kMostFewColumns,
                kLeastRows,
                kSmallThreads,
                kWidth,
                kAntitheticWidth,
                sizeof(Launch),
                sizeof(Geometry)};

void cut(u64 size, const Launch* launches, int strided, Geometry* out) {
  for (u64 k = 0; k < size; ++k) out[k] = geometry_of(launches[k], strided != 0);
}

// Element types and operations in the order of their enumerations.
u32 types[] = {kNumber, kFloat16, kBFloat16, kFloat32, kFloat64, kInt8,  kInt16,
               kInt32,  kInt64,   kUInt8,    kUInt16,  kUInt32,  kUInt64};
u32 operations[] = {kSample, kGradient, kMoments, kPerturb};
u32 store_kinds[] = {kAligned,    kShifted,          kStaged,     kStrided,
                     kTransposed, kTransposedStaged, kFewColumns, kSmallMatrices};
}
