// How a call is cut into blocks and threads; backends/kernels/cuda/geometry.py does the same sums. The numbers drawn
// cannot depend on it.
//
// A block draws a band of dimensions by a run of columns. Each thread keeps a group of columns, those of one block of
// the stream: four, or eight of antithetic pairs. It goes down the band. Short rows share a pass of the block, so that
// its threads always have a group each; long rows are split over blocks; and where there are too few dimensions to go
// down, a thread goes on to other columns.
//
// Where dimensions lie side by side in memory, a block has a tile of dimensions instead, as many as its threads can
// keep, and goes along a band of groups.
#pragma once

#include "draw.h"

namespace multisample {

// How the columns of a thread go to memory.
enum Stores : u32 {
  kAligned,  // four at once, at an address that allows it
  kShifted,  // the same, from a column of the thread before on
  kStaged,   // with those of the warp's other threads, which lie beside them, in one row or several; every group has
             // columns inside, so only if the first column is known
  kStrided,  // one by one, at any distance
  // Where dimensions lie side by side:
  kTransposed,        // some of them at once, if need be from one of the thread before on
  kTransposedStaged,  // through shared memory, all that the block has made of short rows one behind the other
};

// The most threads of a block: a row of 1024 columns, and a few more, in one piece.
constexpr u32 kThreads = 288;
// Those of kTransposed, and all that a block of kTransposedStaged has: more where shared noise leaves them little to
// do.
constexpr u32 kTransposedThreads = 128;
template <bool shared>
constexpr u32 kStagedThreads = shared ? 256 : 128;
// The most groups of a pass of kTransposed, if that is more than one block draws.
constexpr u32 kMostTurns = 16;
// The most passes of a block of kTransposed or kTransposedStaged.
constexpr u32 kMostPasses = 32;
// Elements from column to column that kTransposed does not reach: a pass of one group would have 2^31.
constexpr u64 kFarApart = u64{1} << 28;
// Columns of a group.
constexpr u32 kWidth = 4, kAntitheticWidth = 8;
// The most groups of a row that shares the passes of a block with other rows.
constexpr u32 kShortRow = 128;
// Room for a chunk of dimensions: as many as there are threads, and one more for each row of a pass if there are
// several passes.
constexpr u32 kChunk = kThreads + kShortRow;

// Dimensions that a thread of kTransposed keeps, and one of kTransposedStaged.
template <u32 size>
constexpr u32 kSlots = size == 8 ? 2 : 4;
template <u32 size, bool antithetic>
constexpr u32 kStagedSlots = kSlots<size> / (antithetic ? 2 : 1);

// Row stores (the first four) go down bands of rows; kTransposed and kTransposedStaged go along bands of groups.
struct Geometry {
  u32 blocks, threads;
  u32 groups_per_pass;  // groups that a block draws side by side
  u32 one_by_groups;    // 2^20 / groups_per_pass, rounded up: exact enough to divide the index of a thread
  u32 rows_per_pass;    // of row stores: rows that a block draws side by side
  u32 one_by_rows;      // 2^20 / rows_per_pass, rounded up
  u32 chunk;            // rows, or else groups, that a block prepares together in shared memory; whole passes
  u32 pitch;            // from row to row of a pass in a chunk; odd, so that threads of a warp do not meet in one bank
  u32 band_rows;        // of row stores: rows of a block
  u32 interleave_log2;  // bands take turns: row k of a band is 2^interleave_log2 rows after its row k - 1
  u32 steps;            // of row stores: runs of groups_per_pass that a block draws
  u32 blocks_per_band;  // blocks that share a band
  u32 skip;             // columns of the first group before the first column; the most that there can be, if the first
                        // column is in device memory
  u32 stores;           // one of Stores
  u32 pieces;           // of kTransposed: pieces of a column, one for each thread; of kTransposedStaged: dimensions
  i32 row_step;         // of row stores: from row to row of a thread, in elements of out; 0 if a thread has one row
  u32 overlap;          // of kTransposed: threads of a warp that do what the warp before also does, to hand it over
  i32 column_step;      // of kTransposed: from column to column, in elements of out
  u32 band_groups;      // of kTransposed and kTransposedStaged: groups of a block
};

static_assert(sizeof(Geometry) == 76, "backends/kernels/cuda/geometry.py packs these bytes");

#if !defined(__CUDACC_RTC__)

inline u64 elements_apart(const Draw& call, i64 size) {
  return static_cast<u64>(call.column_stride < 0 ? -call.column_stride : call.column_stride) / size;
}

inline Stores stores_of(const Draw& call, i64 skip, u64 groups, bool strided) {
  if (strided) return kStrided;
  const i64 size = element_size(call.type), quad = size == 2 && !call.antithetic ? 8 : 16;
  const bool knows_skip = call.first_column.at == nullptr;
  if (call.column_stride != size) {
    const bool reaches = elements_apart(call, size) < kFarApart && call.rows < kFarApart;
    return call.row_stride == size && call.column_stride % size == 0 && call.rows > 1 && reaches ? kTransposed
                                                                                                 : kStrided;
  }
  const i64 start = static_cast<i64>(reinterpret_cast<u64>(call.matrix)) - skip * size;
  if (knows_skip && start % quad == 0 && (call.row_stride % quad == 0 || call.rows == 1)) return kAligned;
  if (start % size != 0 || call.row_stride % size != 0) return kStrided;
  if (groups > kShortRow) return kShifted;
  const bool side_by_side = call.rows == 1 || call.row_stride == static_cast<i64>(call.columns) * size;
  return side_by_side && knows_skip ? kStaged : kStrided;
}

inline u64 ceil_div(u64 a, u64 b) { return (a + b - 1) / b; }

inline bool is_cheap(const Draw& call) { return call.common_noise || (call.fast_math && call.type != kFloat64); }

// Passes of a block, if they are many in all. It is slow to begin, and so has many; but where memory is what takes the
// time, few: blocks do not keep step, and of a line that two of them write in part, either part must come before the
// other one has left the cache.
inline u64 most_passes(const Draw& call, u32 stores, bool whole_sectors) {
  if (stores == kTransposedStaged) {
    return !is_cheap(call) ? kMostPasses : call.antithetic ? 4 : call.common_noise ? 2 : 16;
  }
  if (call.antithetic) return call.common_noise ? 1 : 2;
  return call.common_noise ? 2 : is_cheap(call) && !whole_sectors ? 8 : kMostPasses;
}

inline Geometry transposed_geometry(const Draw& call, Geometry g, u64 groups) {
  const u32 size = element_size(call.type);
  const u32 slots = size == 8 ? kSlots<8> : kSlots<4>;
  const u64 bits = reinterpret_cast<u64>(call.matrix) | static_cast<u64>(call.column_stride);
  const bool aligned = bits % (slots * size) == 0 && call.rows % slots == 0;
  // As many groups at once as there is room for, but blocks for all processors.
  const u64 enough = ceil_div(groups, 264);
  const u32 staged = call.common_noise ? kStagedThreads<true> : kStagedThreads<false>;
  const u64 room = staged * (call.antithetic ? slots / 2 : slots), most_turns = room / call.rows;
  u64 tiles = 1, turns = 1;
  const bool cheap = is_cheap(call);
  // Half a sector takes longer to write than all of it, which counts where little else takes time.
  const bool bounded = aligned && (bits % 32 == 0 || !(call.common_noise || (cheap && call.antithetic)));
  const bool side_by_side = call.column_stride == static_cast<i64>(call.rows) * size;
  // Where the transform is what takes the time, rows of which the room holds few are drawn faster in pieces.
  const bool fits = most_turns > (call.common_noise || call.antithetic ? 0 : cheap ? 1 : 3);
  if (!bounded && side_by_side && fits) {
    g.stores = kTransposedStaged;
    g.pieces = static_cast<u32>(call.rows);
    g.threads = staged;
    turns = enough < most_turns ? enough : most_turns;
    if (turns > staged) turns = staged;
  } else {
    // Pieces of a row: the first may begin before it, and the last end behind it; where columns are not aligned alike,
    // that of another column begins before that of the group's first.
    const u64 start = reinterpret_cast<u64>(call.matrix) - g.skip * static_cast<u64>(call.column_stride);
    const bool alike = static_cast<u64>(call.column_stride) / size % slots == 0;
    const u64 shift = alike || call.first_column.at == nullptr ? start / size % slots : slots - 1;
    g.overlap = alike ? 0 : 1;
    g.pieces = static_cast<u32>(ceil_div(shift + call.rows + (alike ? 0 : slots - 1), slots));
    const u64 of_warp = 32 - g.overlap, most = kTransposedThreads / 32;
    u64 warps = 0;
    for (u64 t = 1; t <= kMostTurns || t * g.pieces <= most * of_warp; ++t) {
      if (t > 1 && elements_apart(call, size) * t >= kFarApart) break;
      // So many that few threads have nothing to do, but not one more for less than a fiftieth of them.
      const u64 all = ceil_div(t * g.pieces, of_warp), blocks = ceil_div(all, most), of_block = ceil_div(all, blocks);
      if (t > 1 && (t > enough * blocks || 50 * blocks * of_block * turns >= 49 * warps * t)) continue;
      turns = t, tiles = blocks, warps = blocks * of_block;
      g.threads = static_cast<u32>(32 * of_block);
    }
    g.column_step = static_cast<i32>(call.column_stride / size);
  }
  g.groups_per_pass = static_cast<u32>(turns);
  g.chunk = g.threads / g.groups_per_pass * g.groups_per_pass;
  const u64 all = ceil_div(groups, g.groups_per_pass);
  u64 passes = ceil_div(all * tiles, 1024);
  if (passes > 8) passes = 8;
  if (passes < all * tiles / 2048) passes = all * tiles / 2048;
  const u64 most = all <= kMostPasses ? kMostPasses : most_passes(call, g.stores, bits % 32 == 0);
  // But no more blocks than a launch can have.
  const u64 least = ceil_div(all * tiles, u64{1} << 30);
  if (passes > most) passes = most;
  if (passes < least) passes = least;
  g.band_groups = static_cast<u32>(passes * g.groups_per_pass);
  g.blocks_per_band = static_cast<u32>(tiles);
  g.blocks = static_cast<u32>(ceil_div(all, passes) * tiles);
  return g;
}

// With `strided`, for kernels that write elements one by one, wherever they are.
inline Geometry geometry_of(const Draw& call, bool strided = false) {
  Geometry g{};
  const u32 width = call.antithetic ? kAntitheticWidth : kWidth;
  g.skip = call.first_column.at == nullptr ? static_cast<u32>(call.first_column.value % width) : width - 1;
  const u64 groups = ceil_div(g.skip + call.columns, width);
  g.stores = stores_of(call, g.skip, groups, strided);
  if (g.stores == kTransposed) return transposed_geometry(call, g, groups);
  // Runs of columns, each for one row of threads.
  const u64 tiles = groups <= kThreads ? 1 : ceil_div(groups, 2 * kShortRow);
  g.groups_per_pass = static_cast<u32>(tiles == 1 ? groups : ceil_div(ceil_div(groups, tiles), 32) * 32);
  g.one_by_groups = static_cast<u32>(ceil_div(1 << 20, g.groups_per_pass));
  g.rows_per_pass = g.groups_per_pass > kShortRow ? 1 : 2 * kShortRow / g.groups_per_pass;
  if (g.rows_per_pass > call.rows) g.rows_per_pass = static_cast<u32>(call.rows);
  g.threads = static_cast<u32>(ceil_div(g.groups_per_pass * g.rows_per_pass, 32) * 32);
  g.one_by_rows = static_cast<u32>(ceil_div(1 << 20, g.rows_per_pass));
  g.chunk = g.threads / g.rows_per_pass * g.rows_per_pass;
  g.pitch = g.threads / g.rows_per_pass | 1;

  // How many groups a thread draws, one below the other. The first is dear: many are good, as long as there are blocks
  // enough, a few hundred for a short call, and for a long one so many that no processor waits long for the last. Where
  // memory is what takes the time, fewer are better: then blocks write close to each other.
  const u64 rows = ceil_div(call.rows, g.rows_per_pass);
  const bool cheap = is_cheap(call);
  u64 most = g.stores == kAligned ? 128 : 32;
  if (call.common_noise || (cheap && g.stores == kAligned && g.rows_per_pass > 1)) {
    most = 8;
  } else if (cheap) {
    most = g.stores == kAligned && tiles > 1 ? 32 : 16;
  }
  u64 turns = ceil_div(rows * tiles, 512);
  if (turns > 32) turns = 32;
  if (turns < rows * tiles / 2048) turns = rows * tiles / 2048;
  if (turns > most) turns = most;
  if (g.stores == kShifted) {
    // So that all rows of a band are aligned alike.
    while (call.row_stride * (i64{1} << g.interleave_log2) % 16 != 0) ++g.interleave_log2;
  } else if (cheap && g.stores == kAligned && g.groups_per_pass > kShortRow && tiles == 1 && turns == most) {
    // So that blocks write next to each other, as they do where rows are long.
    g.interleave_log2 = 3;
  }
  i64 stride = call.row_stride / element_size(call.type) * g.rows_per_pass * (i64{1} << g.interleave_log2);
  u64 passes = turns < rows ? turns : rows;
  if (stride != static_cast<i32>(stride)) {
    // Rows of gigabytes: one for each band.
    stride = 0;
    passes = 1;
    g.interleave_log2 = 0;
  }
  g.row_step = static_cast<i32>(stride);
  // Where there are fewer dimensions than turns, the thread goes on to other columns.
  u64 steps = turns / passes;
  if (steps > tiles) steps = tiles;
  g.band_rows = static_cast<u32>(passes * g.rows_per_pass);
  g.steps = static_cast<u32>(steps);
  g.blocks_per_band = static_cast<u32>(ceil_div(groups, steps * g.groups_per_pass));
  const u64 bands = ceil_div(ceil_div(rows, passes), u64{1} << g.interleave_log2) << g.interleave_log2;
  g.blocks = static_cast<u32>(bands * g.blocks_per_band);
  return g;
}

#endif

}  // namespace multisample
