// The store kind of a call, which selects its kernel. backends/kernels/cuda/kernel_choice.py is the twin.
#pragma once

#include "launch.h"

namespace multisample {

// How a thread stores its elements.
enum StoreKind : u32 {
  kAligned,  // vectorised stores: all rows are aligned
  kShifted,  // vectorised stores at aligned addresses, after columns are shuffled from the previous lane; scalar stores
             // of the groups that do not fill a warp
  kStaged,   // vectorised stores at aligned addresses, through shared memory, for short rows without a gap between
            // them. If the index of the first column is in device memory, a group could lie outside the matrix, so such
            // a call has another kind.
  kStrided,  // scalar stores at any stride
  // Transposed stores, where dimensions are contiguous:
  kTransposed,        // vectorised stores; if addresses are not aligned, dimensions are shuffled from the previous lane
  kTransposedStaged,  // coalesced stores through shared memory, for few dimensions in a contiguous matrix
  // Whole rows, or whole matrices:
  kFewColumns,     // for few columns in a contiguous matrix, in either layout: each thread draws whole rows. Coalesced
                   // stores, some of them through shared memory
  kSmallMatrices,  // for a batch of matrices whose groups fit into a block, one per thread: vectorised stores where a
                   // group is aligned, else scalar stores at any stride
  // Kernels without shared memory, from here on.
  kPlain,            // vectorised stores where a group is aligned, else scalar stores at any stride
  kPlainTransposed,  // where dimensions are contiguous: vectorised stores where a piece is aligned, else scalar stores
  kFewRows,          // for few rows, of any length: vectorised stores in aligned rows, else scalar stores at any stride
};

// Columns of a group.
constexpr u32 kWidth = 4, kAntitheticWidth = 8;
// Rows of at most this many groups share the passes of a block.
constexpr u32 kShortRow = 128;
// kTransposed needs a column stride of fewer elements than this: the eight columns of a group then span
// less than 2^31 elements.
constexpr u64 kFarApart = u64{1} << 28;
// kFewColumns: maximum columns, and minimum rows. A thread draws several rows, so with fewer rows SMs are idle, and
// other kernels are faster.
constexpr u32 kMostFewColumns = 8, kLeastRows = 1 << 16;
// kFewRows: maximum rows.
constexpr u32 kMostFewRows = 2;
// kSmallMatrices: maximum threads of a block.
constexpr u32 kSmallThreads = 256;
// Maximum threads of a block with kPlain.
constexpr u32 kPlainThreads = 128;
// Dimensions per thread: of a piece with kTransposed and kPlainTransposed, of a pass with kFewColumns.
template <u32 size>
constexpr u32 kOwnRows = size == 8 ? 2 : 4;

#if !defined(__CUDACC_RTC__)

inline u32 own_rows_of(u32 size) { return size == 8 ? kOwnRows<8> : kOwnRows<4>; }

// Whether dimensions are contiguous and columns are not.
inline bool is_transposed(const Launch& call, i64 size) {
  return call.row_stride == size && call.column_stride != size && call.rows > 1;
}

// Elements from one column to the next.
inline u64 elements_apart(const Launch& call, i64 size) {
  return static_cast<u64>(call.column_stride < 0 ? -call.column_stride : call.column_stride) / size;
}

// Whether kFewColumns draws the matrix.
inline bool has_few_columns(const Launch& call, i64 skip, i64 size) {
  if (call.columns > kMostFewColumns || call.rows < kLeastRows) return false;
  if (skip != 0 || call.column_stride % size != 0 || reinterpret_cast<u64>(call.matrix) % size != 0) return false;
  return call.row_stride == size ||
         (call.column_stride == size && call.row_stride == static_cast<i64>(call.columns) * size);
}

// Whether kFewRows draws the matrix, unless kPlain does.
inline bool has_few_rows(const Launch& call, i64 size) {
  return call.rows == 1 || (call.rows <= kMostFewRows && call.column_stride == size);
}

// Whether dimensions form whole pieces at aligned addresses.
inline bool has_aligned_pieces(const Launch& call, u64 size) {
  const u64 own_rows = own_rows_of(static_cast<u32>(size));
  const u64 bits = reinterpret_cast<u64>(call.matrix) | static_cast<u64>(call.column_stride);
  return call.rows % own_rows == 0 && bits % (own_rows * size) == 0;
}

// Whether mu and sigma are contiguous vectors, and all groups (transposed: pieces too) are whole and aligned. Plain
// kernels then have neither branches nor selects.
inline bool is_usual(const Launch& call, i64 skip) {
  const i64 size = element_size(call.type), width = call.antithetic ? kAntitheticWidth : kWidth;
  const auto is_contiguous = [&](u32 type, i64 stride) { return type != kNumber && stride == element_size(type); };
  if (!is_contiguous(call.mu_type, call.mu_stride) || !is_contiguous(call.sigma_type, call.sigma_stride)) return false;
  if (skip != 0 || call.columns % width != 0) return false;
  if (is_transposed(call, size)) return has_aligned_pieces(call, size);
  const u64 bits = reinterpret_cast<u64>(call.matrix) | static_cast<u64>(call.row_stride);
  return call.column_stride == size && bits % (size == 2 ? 8 : 16) == 0;
}

// Maximum groups of all rows with kPlain. With more, another kernel is faster, as measured on an H200; or indices are
// too short.
inline u64 most_plain_groups(const Launch& call, bool usual, u64 groups) {
  const bool shared = call.shared_noise, antithetic = call.antithetic;
  const u32 size = element_size(call.type);
  // Indices of groups and rows have 32 bits, and indices of columns have a sign.
  const u64 indexed = call.columns < 1 << 30 ? u64{1} << 31 : 0;
  const bool few = has_few_rows(call, size);
  if (few || !usual) return size == 8 || shared || antithetic ? 1 << 16 : few ? 1 << 18 : 3 << 18;
  if (size == 8) return shared || antithetic ? 1 << 16 : indexed;
  if (antithetic && size == 2) return shared ? indexed : 1 << 21;
  if (antithetic) return shared || call.fast_math ? 1 << 18 : 3 << 17;
  if (shared) return size == 2 ? 1 << 22 : 1 << 23;
  return groups > kPlainThreads / 2 ? 1 << 22 : 3 << 18;
}

// Whether a plain kernel is the fastest.
inline bool is_plain(const Launch& call, i64 skip, u64 groups) {
  const u32 size = element_size(call.type);
  if (call.origin_in_memory || call.batch > 1) return false;
  const bool usual = is_usual(call, skip);
  const u64 all = groups * call.rows;
  if (!is_transposed(call, size)) return all <= most_plain_groups(call, usual, groups);
  if (has_aligned_pieces(call, size)) {
    // A thread index has 31 bits, and a thread has at least two rows. A larger call needs one of two conditions, as
    // measured on an H200. With costly noise the call is usual: branches would cost more than they save. With other
    // noise the matrix has 512 columns: with fewer, memory is the limit, and kTransposed is faster.
    const bool costly = !call.shared_noise && !call.antithetic && !(call.fast_math && size < 8);
    const u64 most = (costly ? usual : call.columns >= 512) ? (u64{1} << 32) - 1 : 1 << 21;
    return all <= most && call.columns < 1 << 30;
  }
  return call.rows >= 32 && all <= (size == 8 ? 1 << 16 : 1 << 18);
}

inline StoreKind store_kind_of(const Launch& call, i64 skip, u64 groups, bool strided) {
  const i64 size = element_size(call.type), quad = size == 2 && !call.antithetic ? 8 : 16;
  if (strided && !has_few_rows(call, size)) return kStrided;
  if (has_few_columns(call, skip, size)) return kFewColumns;
  if (is_plain(call, skip, groups)) return is_transposed(call, size) ? kPlainTransposed : kPlain;
  if (has_few_rows(call, size)) return kFewRows;
  const bool fixed_skip = call.first_column_at == nullptr;
  if (call.column_stride != size) {
    const bool reaches = elements_apart(call, size) < kFarApart && call.rows < kFarApart;
    return is_transposed(call, size) && call.column_stride % size == 0 && reaches ? kTransposed : kStrided;
  }
  const i64 start = static_cast<i64>(reinterpret_cast<u64>(call.matrix)) - skip * size;
  if (fixed_skip && start % quad == 0 && call.row_stride % quad == 0) return kAligned;
  if (start % size != 0 || call.row_stride % size != 0) return kStrided;
  if (groups > kShortRow) return kShifted;
  const bool side_by_side = call.row_stride == static_cast<i64>(call.columns) * size;
  return side_by_side && fixed_skip ? kStaged : kStrided;
}

// Whether a matrix of this size fits into a block of kSmallMatrices, wherever it begins within a group.
inline bool is_small(const Launch& call) {
  const u64 width = call.antithetic ? kAntitheticWidth : kWidth;
  return call.rows * ceil_div(width - 1 + call.columns, width) <= kSmallThreads;
}

#endif

}  // namespace multisample
