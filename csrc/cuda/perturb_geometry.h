// The geometry of perturb: its cut into kernels, and of each kernel into blocks. A kernel takes its spans in its
// parameters. It needs no memory for them, so CUDA graphs can capture it. backends/kernels/cuda/perturb_geometry.py
// computes the same geometry.
//
// A block perturbs groups of one span. The groups of a span are counted row by row.
#pragma once

#include "cuda/geometry.h"

namespace multisample {

constexpr u32 kPerturbThreads = 256;
// Groups of a thread in one turn, for elements of `size` bytes: their loads are in flight together, and they share the
// reads of the members. One member needs no such reads, and fewer registers allow more threads per SM.
MULTISAMPLE_HOST_FUNCTION constexpr u32 own_groups(u32 size, bool one_member) {
  return size == 8 ? 1 : !one_member ? 4 : size == 2 ? 2 : 1;
}
// Maximum turns of a block, and maximum rows that a thread draws in all its turns: starting a block costs as much as
// about one row of one turn.
constexpr u64 kMostTurns = 8, kMostTurnRows = 32;
// Maximum groups of a block.
constexpr u32 kMostGroups = kMostTurns * 4 * kPerturbThreads;
// Minimum blocks of a large launch.
constexpr u64 kPerturbBlocks = 4096;

// A span of adjacent elements.
struct Run {
  const char* source;
  char* target;
  i64 first, width;
  u32 id;
  u32 block;  // the first block of the span
};

// Any other span.
struct StridedSpan {
  const char* source;
  char* target;
  i64 first, rows, width, jump;
  i64 source_row, source_stride, target_row, target_stride;
  u32 id;
  u32 block;  // the first block of the span
};

// A span of a population or with a factor: see `Span`.
template <class Entry>
struct Wide : Entry {
  i64 source_step, target_step;
  Factor factor;
};
static_assert(sizeof(Wide<StridedSpan>) == sizeof(Span), "a Span with `block` in the high half of `id`");

// Where a kernel of perturb finds its seed, offset and first row. Kernels of the last two kinds take wide spans.
enum KeyOrigin : u32 {
  kInParameters,
  kInMemory,
  kOfBatch,  // in memory, for each matrix of a batch; the grid's y axis counts these
  kOfRows,   // the seed and the offset in memory, for each row
};

// The spans of kernels of a kind.
template <class Entry, KeyOrigin origin>
using EntryOf = typename Choice<origin >= kOfBatch, Wide<Entry>, Entry>::Type;

// CUDA's limit for the parameters of a kernel, and the size of those besides the spans, in bytes.
constexpr u32 kMostParameters = 4096, kOtherParameters = sizeof(Launch) + 160;

// The spans of one kernel.
template <class Entry>
struct SpanList {
  static constexpr u32 kMost = (kMostParameters - kOtherParameters - 16) / sizeof(Entry);
  u32 count;
  u32 turns;  // of a block
  u32 blocks, unused;
  Entry spans[kMost];  // in the order of their blocks
};

// Maximum groups of a row. Rows may begin at different places of a group.
MULTISAMPLE_HOST_FUNCTION u64 groups_of_row(const StridedSpan& span) {
  const bool same = span.rows == 1 || span.jump % kWidth == 0;
  return static_cast<u64>((same ? span.first % kWidth : kWidth - 1) + span.width + kWidth - 1) / kWidth;
}
MULTISAMPLE_HOST_FUNCTION u64 groups_of(const Run& span) {
  return static_cast<u64>(span.first % kWidth + span.width + kWidth - 1) / kWidth;
}
MULTISAMPLE_HOST_FUNCTION u64 groups_of(const StridedSpan& span) {
  return static_cast<u64>(span.rows) * groups_of_row(span);
}

#if !defined(__CUDACC_RTC__)

// Converts a span to a `Run` or a `StridedSpan`. Returns whether it is one.
inline bool convert(const StridedSpan& span, i64 size, Run& run) {
  const i64 row = span.width * size;
  const bool adjacent = span.width == 1 || (span.source_stride == size && span.target_stride == size);
  run = {span.source, span.target, span.first, span.rows * span.width, span.id, 0};
  return adjacent && (span.rows == 1 || (span.jump == span.width && span.source_row == row && span.target_row == row));
}
inline bool convert(const StridedSpan& span, i64 size, StridedSpan& strided) {
  strided = span;
  Run run;
  return !convert(span, size, run);
}
template <class Entry>
bool convert(const Wide<StridedSpan>& span, i64 size, Wide<Entry>& wide) {
  wide.source_step = span.source_step;
  wide.target_step = span.target_step;
  wide.factor = span.factor;
  return convert(span, size, static_cast<Entry&>(wide));
}

// The kind of kernels that run the call.
inline KeyOrigin origin_of(const Launch& call) {
  if (call.shared_noise) return kOfRows;
  bool wide = call.batch > 1 || call.sigma_type != kNumber;
  const Span* const spans = static_cast<const Span*>(call.matrix);
  for (u64 k = 0; k < call.spans && !wide; ++k) wide = spans[k].factor.number != 1;
  return wide ? kOfBatch : call.origin_in_memory ? kInMemory : kInParameters;
}

inline u32 own_groups(const Launch& call) { return own_groups(element_size(call.type), call.rows == 1); }

// Turns of the blocks of a launch.
inline u32 perturb_turns(const Launch& call) {
  const Span* const spans = static_cast<const Span*>(call.matrix);
  u64 elements = 0;
  for (u64 k = 0; k < call.spans; ++k) elements += static_cast<u64>(spans[k].rows * spans[k].width);
  elements *= max(call.batch, 1);
  const u64 turns = elements / (kWidth * own_groups(call) * kPerturbThreads * kPerturbBlocks);
  return static_cast<u32>(max(min(turns, min(kMostTurnRows / max(call.rows, 1), kMostTurns)), 1));
}

// Calls function(list) for the kernels that perturb the spans of this kind, until it returns an error.
template <class Entry, class Error, class Function>
Error for_span_lists(const Launch& call, u32 turns, Error error, const Function& function) {
  const u32 size = element_size(call.type);
  const u64 groups = u64{turns} * own_groups(call) * kPerturbThreads;
  SpanList<Entry> list{};
  list.turns = turns;
  for (u64 k = 0; k < call.spans && error == Error{}; ++k) {
    Wide<StridedSpan> span;
    __builtin_memcpy(&span, static_cast<const Span*>(call.matrix) + k, sizeof span);
    Entry entry;
    if (!convert(span, size, entry)) continue;
    if (list.count == SpanList<Entry>::kMost) {
      error = function(list);
      list.count = list.blocks = 0;
    }
    entry.block = list.blocks;
    list.blocks += static_cast<u32>(ceil_div(groups_of(entry), groups));
    list.spans[list.count++] = entry;
  }
  return error == Error{} && list.count > 0 ? function(list) : error;
}

#endif

}  // namespace multisample
