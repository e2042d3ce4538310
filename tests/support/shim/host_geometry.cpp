// Functions that compute the geometry of launches, and constants; for ctypes.
#include "cuda_shim.h"
// clang-format off: the kernels need the macros of the shim.
#include "cuda/conversion_kernel.cuh"
#include "cuda/geometry.h"
#include "cuda/group.cuh"
#include "cuda/moments_geometry.h"
#include "cuda/perturb_geometry.h"
// clang-format on

using namespace multisample;

namespace {

template <class Entry>
u64 lists(const Launch& call, u32 turns, char* out) {
  u64 count = 0;
  for_span_lists<Entry>(call, turns, 0, [&](const SpanList<Entry>& list) {
    std::memcpy(out + count++ * sizeof list, &list, sizeof list);
    return 0;
  });
  return count;
}

}  // namespace

extern "C" {

void moments_cut(const Launch* call, MomentGeometry* out) { *out = moment_geometry(*call); }
u32 turns(const Launch* call) { return perturb_turns(*call); }
u64 perturb_cut(const Launch* call, u32 turns, int strided, int wide, char* out) {
  if (wide) return strided ? lists<Wide<StridedSpan>>(*call, turns, out) : lists<Wide<Run>>(*call, turns, out);
  return strided ? lists<StridedSpan>(*call, turns, out) : lists<Run>(*call, turns, out);
}
int perturb_origin(const Launch* call) { return origin_of(*call); }
void keys(u64 seed, Keys<double>* out) { *out = Keys<double>(seed); }

void conversions(Launch* call, Conversions* out) { convert_vectors(call, out); }
void convert(const Conversions* conversions) {
  gridDim.x = 2;
  for (u32 block = 0; block < 2 * conversions->count; ++block) {
    blockIdx = {block % 2, block / 2};
    for (threadIdx.x = 0; threadIdx.x < kConversionThreads; ++threadIdx.x) conversion_kernel<float>(*conversions);
  }
}

constexpr u32 kOwnNoise = kStagedThreads<false>, kSharedNoise = kStagedThreads<true>;
u32 limits[] = {kThreads,       kShortRow,        kTransposedThreads, kOwnNoise,
                kSharedNoise,   kShiftedThreads,  kShortRowThreads,   kStagedPasses,
                kFewThreads,    kMostFewColumns,  kLeastRows,         kSmallThreads,
                kWidth,         kAntitheticWidth, kPlainThreads,      kPlainTransposedThreads,
                sizeof(Launch), sizeof(Geometry)};

void cut(u64 size, const Launch* launches, int strided, Geometry* out) {
  for (u64 k = 0; k < size; ++k) out[k] = geometry_of(launches[k], strided != 0);
}

// Operations and store kinds in the order of their enumerations.
u32 operations[] = {kSample, kGradient, kMoments, kPerturb};
u32 store_kinds[] = {kAligned,    kShifted,       kStaged, kStrided,         kTransposed, kTransposedStaged,
                     kFewColumns, kSmallMatrices, kPlain,  kPlainTransposed, kFewRows};
}
