// The store kind of a call, which selects its kernel, and the geometry: its cut into blocks and threads. The twin is
// backends/kernels/cuda/geometry.py. The numbers drawn do not depend on the geometry.
//
// A group is the columns of one Philox block: four, or eight with antithetic noise.
//
// Row stores: a block draws a band of dimensions in a tile of columns. A thread keeps one group and goes down the band.
// Short rows share a pass of the block, so that every thread has a group. Long rows are split over blocks. If there are
// few dimensions, a thread also draws further groups of its rows.
//
// Transposed stores, where dimensions are contiguous: a block draws a tile of dimensions in a band of groups. A thread
// keeps a few dimensions and goes along the band.
//
// The files of the other kernels describe their cuts.
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
  kTransposedStaged,  // coalesced stores through shared memory, for few dimensions in a contiguous matrix whose pieces
                      // are not aligned
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
// Dimensions per thread: of one piece with kTransposed and kPlainTransposed, of one pass with kFewColumns.
template <u32 size>
constexpr u32 kOwnRows = size == 8 ? 2 : 4;
// Maximum threads of a block with row stores: one pass has room for the 256 groups of 1024 columns, and one more warp.
constexpr u32 kThreads = 288;
// Maximum threads of a block with kShifted: groups that do not fill a warp need no warp of their own.
constexpr u32 kShiftedThreads = 256;
// Maximum passes of kStaged that share barriers.
constexpr u32 kStagedPasses = 4;
// Maximum threads of a block with kTransposed.
constexpr u32 kTransposedThreads = 128;
// Threads of a block with kTransposedStaged. A thread does little work with shared noise, so a block has more threads.
template <bool shared_noise>
constexpr u32 kStagedThreads = shared_noise ? 256 : 128;
// Threads of a block with kFewColumns.
constexpr u32 kFewThreads = 128;
// Threads of a block with kPlainTransposed.
constexpr u32 kPlainTransposedThreads = 64;
// Versions of the plain kernels. kPlain: one row of a thread, kPlainTurns rows, or, if a pass has one row,
// kOneRowTurns. kPlainTransposed: one group of a thread; in usual calls also two; or kManyTurns, for any other number.
constexpr u32 kPlainTurns = 4, kOneRowTurns = 8, kManyTurns = 3;
// kSmallMatrices: maximum rows of a thread, and the number of threads that keeps every SM busy. The first row of a
// thread is expensive, so threads have several rows if the call has more groups than kBusyThreads.
constexpr u32 kMostSmallRows = 8, kBusyThreads = 1 << 17;
// Maximum groups per pass of kTransposed if a pass has several blocks.
constexpr u32 kMostGroupsPerPass = 16;
// Maximum passes of a block with transposed stores, unless the grid would exceed 2^30 blocks.
constexpr u32 kMostPasses = 32;
// Maximum threads of a block whose passes have several short rows.
constexpr u32 kShortRowThreads = 2 * kShortRow;
// Room for a chunk in shared memory: a dimension of each thread, and a dimension of padding for each row of a pass.
constexpr u32 kChunk = kThreads + kShortRow;

// Dimensions per thread with kTransposedStaged.
template <u32 size, bool antithetic>
constexpr u32 kStagedOwnRows = kOwnRows<size> / (antithetic ? 2 : 1);

struct Geometry {
  // The fields of the plain kernels come first, adjacent in the constant cache: see `SampleCall`.
  u32 groups_per_pass;  // groups that a block draws at once
  u32 one_by_groups;    // 2^20 / groups_per_pass, rounded up: divides a thread index by multiplication and shift
  u32 rows_per_pass;    // row stores, kFewColumns: rows that a block draws at once; kSmallMatrices: rows of each matrix
                        // that a block draws at once
  u32 blocks_per_band;  // blocks that share a band
  u32 skip;             // columns of the first group that precede the window; if the index of the first column is in
                        // device memory, the largest possible number
  u32 pieces;           // transposed stores: pieces per column, one per thread; kTransposedStaged: dimensions
  u32 turns;            // kPlain: rows of a thread; kPlainTransposed, kFewRows: groups of a thread
  u32 usual;            // kPlain, kPlainTransposed: see is_usual()
  // For n < 2^31, n one_by_units >> units_shift is n / blocks_per_band with kPlain and kFewRows, and n / pieces with
  // kPlainTransposed.
  u32 one_by_units, units_shift;
  u32 store_kind;       // one of StoreKind
  u32 one_by_rows;      // 2^20 / rows_per_pass, rounded up
  u32 chunk;            // rows (row stores) or groups that a block prepares at once in shared memory: whole passes
  u32 pitch;            // entries of a chunk from one row of a pass to the next; odd, which avoids bank conflicts
  u32 band_rows;        // row stores, kFewColumns: rows of a block
  u32 interleave_log2;  // row stores: a band has every 2^interleave_log2-th pass
  u32 steps;            // row stores: tiles of groups_per_pass groups that a block draws, one after another
  i32 row_step;         // row stores: elements between consecutive rows of a thread; 0 if a thread has one row
  u32 overlap;          // kTransposed: lanes of a warp that repeat the previous warp's work, as sources of the shuffle
  i32 column_step;      // kTransposed: elements between columns
  u32 band_groups;      // transposed stores: groups of a block
  u32 warps;            // kShifted: warps that the groups of a row fill
  u32 rest;             // kShifted: the remaining groups, which the last block of a band draws last
  u32 matrices;         // kSmallMatrices: matrices of a block; else 0, and the grid's y axis counts the matrices
  u32 blocks, threads;
};

static_assert(sizeof(Geometry) == 104, "backends/kernels/cuda/geometry.py packs these bytes");

// n / blocks_per_band, or n / pieces: see `Geometry`.
MULTISAMPLE_FUNCTION u32 quotient(u32 n, const Geometry& geometry) {
  return static_cast<u32>(static_cast<u64>(n) * geometry.one_by_units >> geometry.units_shift);
}

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

// Maximum groups of all rows with kPlain. With more, another kernel is faster, as measured on an H200; or indices of
// groups and rows, which have 32 bits, are too short.
inline u64 most_plain_groups(const Launch& call, bool usual, u64 groups) {
  const bool shared = call.shared_noise, antithetic = call.antithetic;
  const u32 size = element_size(call.type);
  constexpr u64 indexed = u64{1} << 31;
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
  // Indices of columns have 32 bits and a sign.
  if (call.origin_in_memory || call.batch > 1 || call.columns >= 1 << 30) return false;
  const bool usual = is_usual(call, skip);
  const u64 all = groups * call.rows;
  if (!is_transposed(call, size)) return all <= most_plain_groups(call, usual, groups);
  if (has_aligned_pieces(call, size)) {
    // A thread index has 31 bits, and a thread has at least two rows. A larger call needs one of two conditions, as
    // measured on an H200. With costly noise the call is usual: branches would cost more than they save. With other
    // noise the matrix has 512 columns: with fewer, memory is the limit, and kTransposed is faster.
    const bool costly = !call.shared_noise && !call.antithetic && !(call.fast_math && size < 8);
    return all <= ((costly ? usual : call.columns >= 512) ? (u64{1} << 32) - 1 : 1 << 21);
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

// Whether noise takes less time than its stores.
inline bool is_cheap(const Launch& call) { return call.shared_noise || (call.fast_math && call.type == kFloat32); }

// Maximum passes of a block in a large launch. A block is slow to start, so many passes are good. Where memory is the
// limit, blocks drift apart, and few passes are better: a cache line that two blocks share then stays in the cache
// until both have written to it.
inline u64 most_passes(const Launch& call, u32 store_kind, bool whole_sectors) {
  if (store_kind == kTransposedStaged) {
    return !is_cheap(call) ? kMostPasses : call.antithetic ? 4 : call.shared_noise ? 2 : 16;
  }
  if (call.antithetic) return call.shared_noise ? 1 : 2;
  return call.shared_noise ? 2 : is_cheap(call) && !whole_sectors ? 8 : kMostPasses;
}

inline Geometry transposed_geometry(const Launch& call, Geometry g, u64 groups) {
  const u32 size = element_size(call.type);
  const u32 own_rows = own_rows_of(size);
  const u64 bits = reinterpret_cast<u64>(call.matrix) | static_cast<u64>(call.column_stride);
  // A pass has at most 1/264 of the groups, so that every processor gets blocks.
  const u64 enough = ceil_div(groups, 264);
  const u32 staged = call.shared_noise ? kStagedThreads<true> : kStagedThreads<false>;
  const u64 room = staged * (call.antithetic ? own_rows / 2 : own_rows), most_groups = room / call.rows;
  u64 tiles = 1, per_pass = 1;
  const bool cheap = is_cheap(call);
  const bool side_by_side = call.column_stride == static_cast<i64>(call.rows) * size;
  // Where arithmetic is the limit, kTransposed is faster than kTransposedStaged with few groups in a pass.
  const bool fits = most_groups > (call.shared_noise || call.antithetic ? 0 : cheap ? 1 : 3);
  if (!has_aligned_pieces(call, size) && side_by_side && fits) {
    g.store_kind = kTransposedStaged;
    g.pieces = static_cast<u32>(call.rows);
    g.threads = staged;
    per_pass = min(min(enough, most_groups), staged);
  } else {
    // The first piece may begin before the column, and the last may end behind it. Where columns differ in alignment,
    // the piece of a thread begins up to own_rows - 1 dimensions earlier than it does in the group's first column.
    const u64 start = reinterpret_cast<u64>(call.matrix) - g.skip * static_cast<u64>(call.column_stride);
    const bool same_alignment = static_cast<u64>(call.column_stride) / size % own_rows == 0;
    const u64 shift = same_alignment || call.first_column_at == nullptr ? start / size % own_rows : own_rows - 1;
    g.overlap = same_alignment ? 0 : 1;
    g.pieces = static_cast<u32>(ceil_div(shift + call.rows + (same_alignment ? 0 : own_rows - 1), own_rows));
    const u64 of_warp = 32 - g.overlap, most = kTransposedThreads / 32;
    u64 warps = 0;
    for (u64 t = 1; t <= kMostGroupsPerPass || t * g.pieces <= most * of_warp; ++t) {
      if (t > 1 && elements_apart(call, size) * t >= kFarApart) break;
      // More groups per pass must save more than 2 % of the warps per group.
      const u64 all = ceil_div(t * g.pieces, of_warp), blocks = ceil_div(all, most), of_block = ceil_div(all, blocks);
      if (t > 1 && (t > enough * blocks || 50 * blocks * of_block * per_pass >= 49 * warps * t)) continue;
      per_pass = t, tiles = blocks, warps = blocks * of_block;
      g.threads = static_cast<u32>(32 * of_block);
    }
    g.column_step = static_cast<i32>(call.column_stride / size);
  }
  g.groups_per_pass = static_cast<u32>(per_pass);
  g.chunk = g.threads / g.groups_per_pass * g.groups_per_pass;
  const u64 all = ceil_div(groups, g.groups_per_pass);
  const u64 most = all <= kMostPasses ? kMostPasses : most_passes(call, g.store_kind, bits % 32 == 0);
  // The grid has at most 2^30 blocks.
  const u64 least = ceil_div(all * tiles, u64{1} << 30);
  const u64 wanted = max(min(ceil_div(all * tiles, 1024), 8), all * tiles / 2048);
  const u64 passes = max(min(wanted, most), least);
  g.band_groups = static_cast<u32>(passes * g.groups_per_pass);
  g.blocks_per_band = static_cast<u32>(tiles);
  g.blocks = static_cast<u32>(ceil_div(all, passes) * tiles);
  return g;
}

inline Geometry few_columns_geometry(const Launch& call, Geometry g) {
  g.threads = kFewThreads;
  g.rows_per_pass = kFewThreads * own_rows_of(element_size(call.type));
  // Starting a block takes less time than a pass, and several thousand blocks keep every processor busy to the end.
  // Where memory is the limit, few passes are better: blocks then write close to each other. Measured on an H200.
  constexpr u64 kMost[kMostFewColumns] = {8, 6, 6, 3, 2, 2, 2, 2},
                kMostIfCheap[kMostFewColumns] = {8, 3, 2, 1, 1, 1, 1, 1};
  const u64 most = (is_cheap(call) ? kMostIfCheap : kMost)[call.columns - 1];
  const u64 all = ceil_div(call.rows, g.rows_per_pass);
  const u64 passes = min(max(all / 4096, 1), most);
  g.band_rows = static_cast<u32>(passes * g.rows_per_pass);
  g.blocks_per_band = 1;
  g.blocks = static_cast<u32>(ceil_div(all, passes));
  return g;
}

inline Geometry small_matrices_geometry(const Launch& call, u64 groups) {
  Geometry g{};
  g.store_kind = kSmallMatrices;
  const u64 turns = min(max(call.batch * call.rows * groups / kBusyThreads, 1), kMostSmallRows);
  const u64 rows = ceil_div(call.rows, turns);
  g.matrices = static_cast<u32>(min(kSmallThreads / (rows * groups), call.batch));
  g.threads = static_cast<u32>(ceil_div(g.matrices * rows * groups, 32) * 32);
  g.groups_per_pass = static_cast<u32>(groups);
  g.one_by_groups = static_cast<u32>(ceil_div(1 << 20, groups));
  g.rows_per_pass = static_cast<u32>(rows);
  g.one_by_rows = static_cast<u32>(ceil_div(1 << 20, rows));
  g.blocks = static_cast<u32>(ceil_div(call.batch, g.matrices));
  return g;
}

inline void set_units(Geometry& g, u64 units) {
  g.units_shift = 31;
  while (u64{1} << (g.units_shift - 31) < units) ++g.units_shift;
  g.one_by_units = static_cast<u32>(ceil_div(u64{1} << g.units_shift, units));
}

// The turns were measured on an H200. A kernel for a fixed number of turns is faster than a loop.
inline Geometry plain_geometry(const Launch& call, Geometry g, u64 groups) {
  const u64 all = groups * call.rows;
  const u32 size = element_size(call.type);
  const bool independent = !call.shared_noise && !call.antithetic;
  u64 units;
  g.usual = is_usual(call, g.skip);
  g.turns = 1;
  if (g.store_kind == kPlainTransposed) {
    units = ceil_div(call.rows, own_rows_of(size));
    g.pieces = static_cast<u32>(units);
    g.threads = kPlainTransposedThreads;
    // Where memory is the limit, few turns are better. A thread of an antithetic call stores twice as much.
    if (is_cheap(call) || call.antithetic) {
      if (independent && all >= 1 << 24) g.turns = 4;
    } else if (all >= 1 << 18) {
      g.turns = static_cast<u32>(min(max(all >> 20, 2), 8));
    }
    g.blocks = static_cast<u32>(ceil_div(units * ceil_div(groups, g.turns), g.threads));
  } else {
    const u64 tiles = ceil_div(groups, kPlainThreads);
    g.groups_per_pass = static_cast<u32>(tiles == 1 ? groups : ceil_div(ceil_div(groups, tiles), 32) * 32);
    g.one_by_groups = static_cast<u32>(ceil_div(1 << 20, g.groups_per_pass));
    g.rows_per_pass = static_cast<u32>(min(kPlainThreads / g.groups_per_pass, call.rows));
    g.threads = static_cast<u32>(ceil_div(g.groups_per_pass * g.rows_per_pass, 32) * 32);
    units = ceil_div(groups, g.groups_per_pass);
    g.blocks_per_band = static_cast<u32>(units);
    // Where memory is the limit, a thread has one row, as measured.
    const bool stores_much = call.antithetic ? size >= 4 : call.shared_noise && size == 8;
    if (all >= 1 << 16 && !stores_much) g.turns = kPlainTurns;
    const u64 many = is_cheap(call) ? 1 << 20 : 1 << 18;
    const bool one_row = g.usual && g.rows_per_pass == 1 && call.rows >= kOneRowTurns;
    if (all >= many && one_row && size < 8 && !call.antithetic) g.turns = kOneRowTurns;
    g.blocks = static_cast<u32>(ceil_div(ceil_div(call.rows, g.rows_per_pass), g.turns) * units);
  }
  set_units(g, units);
  return g;
}

// Calls run(turns, usual) with the version of a plain kernel for a geometry, which `Geometry.version` in Python returns
// too; run(0, false) for other kernels.
template <class Out, bool antithetic, StoreKind store_kind, class Run>
auto with_version(const Geometry& g, const Run& run) {
  constexpr bool in_pieces = store_kind == kPlainTransposed;
  // The turns, apart from 1, that only usual calls have. Antithetic calls and calls of float64 with kPlain have none.
  constexpr u32 usual_turns = in_pieces ? 2 : sizeof(Out) < 8 && !antithetic ? kOneRowTurns : kPlainTurns;
  const auto run_turns = [&](auto usual) {
    if (g.turns == 1) return run(Constant<1u>{}, usual);
    if constexpr (usual) {
      if (g.turns == usual_turns) return run(Constant<usual_turns>{}, usual);
    }
    return run(Constant<in_pieces ? kManyTurns : kPlainTurns>{}, usual);
  };
  if constexpr (in_pieces || store_kind == kPlain) {
    return with_constants(run_turns, g.usual != 0);
  } else {
    return run(Constant<0u>{}, Constant<false>{});
  }
}

// A thread computes the row's part of the words once for all its turns, so many turns are good: measured on an H200.
// But only whole blocks have vectorised stores, so a block is no longer than a row.
inline Geometry few_rows_geometry(const Launch& call, Geometry g, u64 groups) {
  g.threads = kPlainThreads;
  const u64 most = min(max(groups / g.threads, 1), 16);
  g.turns = static_cast<u32>(min(max(groups * call.rows * max(call.batch, 1) >> 16, 1), most));
  g.blocks_per_band = static_cast<u32>(ceil_div(groups, g.threads * g.turns));
  g.blocks = static_cast<u32>(g.blocks_per_band * call.rows);
  set_units(g, g.blocks_per_band);
  return g;
}

// `strided` forces kStrided, which supports every stride, unless kFewRows draws the matrix.
inline Geometry geometry_of(const Launch& call, bool strided = false) {
  Geometry g{};
  const u32 width = call.antithetic ? kAntitheticWidth : kWidth;
  g.skip = call.first_column_at == nullptr ? static_cast<u32>(call.first_column % width) : width - 1;
  const u64 groups = ceil_div(g.skip + call.columns, width);
  if (call.batch > 1 && is_small(call)) return small_matrices_geometry(call, groups);
  g.store_kind = store_kind_of(call, g.skip, groups, strided);
  if (g.store_kind == kPlain || g.store_kind == kPlainTransposed) return plain_geometry(call, g, groups);
  if (g.store_kind == kFewRows) return few_rows_geometry(call, g, groups);
  if (g.store_kind == kFewColumns) return few_columns_geometry(call, g);
  if (g.store_kind == kTransposed) return transposed_geometry(call, g, groups);
  if (g.store_kind == kShifted) {
    g.warps = static_cast<u32>(groups / 32), g.rest = static_cast<u32>(groups % 32);
    // The groups that do not fill a warp get a warp of their own if they are many and the block has room for the warp.
    // Antithetic rows always have such a warp: otherwise the end of a row may leave the cache before its last sector is
    // complete. Short calls always have it too: a thread then has one group.
    const bool many = g.rest > 8 && groups - g.rest != kShiftedThreads;
    if (many || call.antithetic || call.rows * ceil_div(groups, kShiftedThreads) <= 512) {
      g.warps += g.rest > 0;
      g.rest = 0;
    }
  }
  // Long rows are cut into tiles.
  const u64 tiled = groups - g.rest, most_per_pass = g.store_kind == kShifted ? kShiftedThreads : kThreads;
  const u64 tiles = tiled <= most_per_pass ? 1 : ceil_div(tiled, 2 * kShortRow);
  g.groups_per_pass = static_cast<u32>(tiles == 1 ? tiled : ceil_div(ceil_div(tiled, tiles), 32) * 32);
  g.one_by_groups = static_cast<u32>(ceil_div(1 << 20, g.groups_per_pass));
  const bool one_row = g.store_kind == kShifted || g.groups_per_pass > kShortRow;
  g.rows_per_pass = static_cast<u32>(one_row ? 1 : min(kShortRowThreads / g.groups_per_pass, call.rows));
  g.threads = static_cast<u32>(ceil_div(g.groups_per_pass * g.rows_per_pass, 32) * 32);
  g.one_by_rows = static_cast<u32>(ceil_div(1 << 20, g.rows_per_pass));
  u32 in_chunk = g.threads / g.rows_per_pass;
  if (g.store_kind == kStaged && in_chunk > kStagedPasses) in_chunk -= in_chunk % kStagedPasses;
  g.chunk = in_chunk * g.rows_per_pass;
  g.pitch = g.threads / g.rows_per_pass | 1;

  // `turns`: groups per thread, one below the other. The first group is expensive, so many turns are good as long as
  // there are enough blocks. A short call needs a few hundred blocks. A long call needs thousands, so that no processor
  // waits long for the last block. Where memory is the limit, few turns are better: blocks then write close to each
  // other.
  const u64 rows = ceil_div(call.rows, g.rows_per_pass), all = rows * tiles * max(call.batch, 1);
  const bool cheap = is_cheap(call);
  u64 most_turns = g.store_kind == kAligned ? 128 : 32;
  if (call.shared_noise || (cheap && g.store_kind == kAligned && g.rows_per_pass > 1)) {
    most_turns = 8;
  } else if (cheap) {
    most_turns = g.store_kind == kAligned && tiles > 1 ? 32 : 16;
  }
  const u64 turns = min(max(min(ceil_div(all, 512), 32), all / 2048), most_turns);
  u64 passes = min(turns, rows);
  if (passes > 1 && (g.store_kind == kShifted || g.store_kind == kStaged)) {
    // All passes of a band have the same alignment.
    while (call.row_stride * g.rows_per_pass * (i64{1} << g.interleave_log2) % 16 != 0) ++g.interleave_log2;
    // Bands of at most one pass need no interleaving.
    if (rows <= u64{1} << g.interleave_log2) passes = 1, g.interleave_log2 = 0;
  } else if (cheap && g.store_kind == kAligned && g.groups_per_pass > kShortRow && tiles == 1 && turns == most_turns &&
             rows >= 8 * passes) {
    // With eight interleaved bands, concurrent blocks write neighbouring rows. A matrix of a batch may have too few
    // rows for eight bands.
    g.interleave_log2 = 3;
  }
  i64 stride = call.row_stride / element_size(call.type) * g.rows_per_pass * (i64{1} << g.interleave_log2);
  if (stride != static_cast<i32>(stride)) {
    // The distance between rows exceeds an i32: one row per band.
    stride = 0;
    passes = 1;
    g.interleave_log2 = 0;
  }
  g.row_step = static_cast<i32>(stride);
  // With fewer passes than turns, a thread draws groups of further tiles.
  const u64 steps = min(turns / passes, tiles);
  g.band_rows = static_cast<u32>(passes * g.rows_per_pass);
  g.steps = static_cast<u32>(steps);
  g.blocks_per_band = static_cast<u32>(ceil_div(tiled, steps * g.groups_per_pass));
  const u64 bands = ceil_div(ceil_div(rows, passes), u64{1} << g.interleave_log2) << g.interleave_log2;
  g.blocks = static_cast<u32>(bands * g.blocks_per_band);
  return g;
}

#endif

}  // namespace multisample
