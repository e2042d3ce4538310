// What C++ reads in the bytes of calls, and how it cuts them; for ctypes.
#include <initializer_list>

#include "geometry.h"

using namespace multisample;

extern "C" {

u32 limits[] = {kThreads, kShortRow,        kTransposedThreads, kStagedThreads<false>, kStagedThreads<true>,
                kWidth,   kAntitheticWidth, sizeof(SampleCall), sizeof(Geometry)};

void cut(u64 size, const SampleCall* calls, Geometry* out) {
  for (u64 k = 0; k < size; ++k) out[k] = geometry_of(calls[k]);
}

// The fields of a call, in their order; numbers by their bits.
void fields(const SampleCall* call, u64* out) {
  for (const Vector* vector : {&call->mu, &call->sigma}) {
    *out++ = reinterpret_cast<u64>(vector->data);
    *out++ = static_cast<u64>(vector->stride);
    *out++ = float_bits(vector->number);
    *out++ = vector->type;
  }
  *out++ = reinterpret_cast<u64>(call->out);
  *out++ = static_cast<u64>(call->row_stride);
  *out++ = static_cast<u64>(call->column_stride);
  for (u64 field : {call->rows, call->columns, call->first_row, call->first_column, call->seed, call->offset,
                    reinterpret_cast<u64>(call->counter)}) {
    *out++ = field;
  }
  for (u32 field : {call->type, call->shared, call->antithetic, call->fast_math, static_cast<u32>(call->device)}) {
    *out++ = field;
  }
  *out++ = reinterpret_cast<u64>(call->stream);
}

// Element types in the order of the enumeration.
u32 types[] = {kNumber, kFloat16, kBFloat16, kFloat32, kFloat64, kInt8,  kInt16,
               kInt32,  kInt64,   kUInt8,    kUInt16,  kUInt32,  kUInt64};
u32 stores[] = {kAligned, kShifted, kStaged, kStrided, kTransposed, kTransposedStaged};
}
