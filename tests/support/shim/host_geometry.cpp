// Functions that read the bytes of a draw in C++, and compute its geometry; for ctypes.
#include <initializer_list>

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
                kWidth,
                kAntitheticWidth,
                sizeof(Draw),
                sizeof(Geometry)};

void cut(u64 size, const Draw* draws, int strided, Geometry* out) {
  for (u64 k = 0; k < size; ++k) out[k] = geometry_of(draws[k], strided != 0);
}

// The fields of a draw in their order, with floating-point numbers as bits.
void fields(const Draw* draw, u64* out) {
  for (const Vector* vector : {&draw->mu, &draw->sigma}) {
    *out++ = reinterpret_cast<u64>(vector->data);
    *out++ = static_cast<u64>(vector->stride);
    *out++ = float_bits(vector->number);
    *out++ = vector->type;
  }
  *out++ = reinterpret_cast<u64>(draw->matrix);
  *out++ = static_cast<u64>(draw->row_stride);
  *out++ = static_cast<u64>(draw->column_stride);
  *out++ = draw->rows;
  *out++ = draw->columns;
  for (const Word* word : {&draw->seed, &draw->offset, &draw->first_row, &draw->first_column}) {
    *out++ = word->value;
    *out++ = reinterpret_cast<u64>(word->at);
  }
  *out++ = reinterpret_cast<u64>(draw->scratch);
  *out++ = reinterpret_cast<u64>(draw->stream);
  for (u32 field : {draw->type, draw->operation, draw->common_noise, draw->antithetic, draw->fast_math}) {
    *out++ = field;
  }
  *out++ = static_cast<u64>(static_cast<i64>(draw->device));
  for (u32 field : {draw->threads, draw->batch, draw->batched, draw->column_phase}) *out++ = field;
}

// Element types and operations in the order of their enumerations.
u32 types[] = {kNumber, kFloat16, kBFloat16, kFloat32, kFloat64, kInt8,  kInt16,
               kInt32,  kInt64,   kUInt8,    kUInt16,  kUInt32,  kUInt64};
u32 operations[] = {kSample, kGradient};
u32 stores[] = {kAligned, kShifted, kStaged, kStrided, kTransposed, kTransposedStaged};
}
