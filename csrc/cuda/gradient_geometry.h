// The geometry of a gradient: its cut into blocks and threads. The order of the sums follows from it. Both depend on
// the launch alone, never on the device.
//
// A row of the gradient is cut into segments. A block sums one segment of some rows. Its threads are divided among
// tiles: all threads of a tile sum the same few rows, and thread s of a tile (slot s) sums the groups s, s + slots, s +
// 2 slots, ... of columns. A thread computes the column part of the words once for all its rows; the row parts are in
// shared memory. Neighbouring threads read neighbouring groups or, with `across`, neighbouring dimensions.
//
// At the end, runs of neighbouring lanes in the same tile add up their sums by shuffles. Each run then has partial
// sums of the tile. If a tile has several partial sums, the block adds them up in shared memory. If rows have several
// segments, a second kernel adds up the segments.
//
// Short rows would pay much for the start of a block. If a tile is one run of lanes, a block works in several sweeps,
// each over other rows.
#pragma once

#include "cuda/geometry.h"

namespace multisample {

constexpr u32 kGradientThreads = 256;
// Turns summed in the computing type before one addition to a float64 sum.
constexpr u32 kChain = 8;

// Groups that a thread reads before it makes their noise.
MULTISAMPLE_HOST_FUNCTION constexpr u32 groups_at_once(u32 rows, bool antithetic) {
  return rows > 1 ? 1 : antithetic ? 2 : 4;
}

// How a thread reads the columns of a group.
enum Loads : u32 {
  kAtOnce,      // vectorised loads: adjacent and aligned
  kSideBySide,  // scalar loads: adjacent at any address
  kApart,       // scalar loads at any stride
};

struct GradientGeometry {
  u32 blocks, threads;
  u32 run_of_blocks;  // consecutive blocks that have the same segment (with `across`) or the same rows (without)
  u32 tiles;          // tiles per block
  u32 slots;          // threads that share the rows of a tile
  u32 lanes;          // lanes of a run: a power of two, which divides `slots`; 1 with `across`
  u32 lanes_log2;     // log2 of `lanes`
  u32 partials;       // partial sums per tile: slots / lanes
  u32 pitch;          // partial sums per block
  u32 has_partials;   // whether totals come from partial sums in shared memory; otherwise each is in a lane
  u32 parts_log2;     // log2 of the threads that add up one total
  u32 across;         // whether neighbouring threads have neighbouring dimensions, in place of groups
  u32 one_by_run;     // 2^20 / (across ? tiles : slots), rounded up: divides a thread index by multiplication and shift
  u32 rows;           // rows per thread; they are `tiles` rows apart
  u32 sweeps;         // at most `slots`; 1 if `has_partials`
  u32 turns;          // groups per thread and sweep
  u32 last_turns;     // turns of the last segment
  u32 segments;       // segments per row
  u32 skip;           // columns of the first group that come before the first column
  u32 loads;          // one of Loads
  u64 groups;         // groups per row
  i64 row_step;       // bytes between the rows of a thread
  i64 turn_step;      // bytes between the groups of a thread
  i64 sweep_step;     // bytes from the end of a sweep to the next
};

#if !defined(__CUDACC_RTC__)

// Rows per thread of a large gradient: as many as fit in registers with their elements of a group. float64 with
// independent noise is bound by arithmetic and gains nothing from more than one row.
constexpr u32 rows_at_once(u32 type, bool shared_noise, bool antithetic) {
  return type == kFloat64 && !shared_noise ? 1 : antithetic ? 2 : 4;
}

inline Loads loads_of(const Launch& call, u32 skip) {
  const i64 size = element_size(call.type), most = size == 2 && !call.antithetic ? 8 : 16;
  if (call.column_stride != size) return kApart;
  const i64 start = static_cast<i64>(reinterpret_cast<u64>(call.matrix)) - skip * size;
  if (call.origin_in_memory) return kSideBySide;
  return start % most == 0 && (call.row_stride % most == 0 || call.rows == 1) ? kAtOnce : kSideBySide;
}

// Whether threads have several rows: in large gradients, and in rows of one group.
inline bool has_many_rows(const Launch& call, const GradientGeometry& g) {
  // Threads that read the seed from memory need registers for round keys, and have none for the sums of several rows.
  if (call.origin_in_memory != 0 || call.rows < (g.across ? 512 : 48)) return false;
  // A thread with one row makes the noise of several groups at once (groups_at_once), and would waste the others.
  return g.groups == 1 || call.rows * g.groups >= (1 << 21);
}

// Turns of one loop iteration: see groups_at_once().
inline u64 unit_of(const GradientGeometry& g) { return g.rows > 1 ? 1 : 4; }

// Sets tiles and slots for threads along dimensions: enough tiles to read whole cache lines, in equal blocks.
inline void set_tiles_across(const Launch& call, GradientGeometry& g) {
  const u64 line = 128 / element_size(call.type), of_few = kGradientThreads / g.groups;
  const u64 tiles = call.rows / g.rows, most = max(line, of_few);
  g.tiles = static_cast<u32>(ceil_div(tiles, ceil_div(tiles, most)));
  g.slots = static_cast<u32>(min(kGradientThreads / g.tiles, g.groups));
}

// Lanes per run: all slots if their number is a power of two up to 32, else at most one lane per sum. With more lanes,
// shuffles take more instructions than additions in shared memory.
inline u32 lanes_of(const GradientGeometry& g) {
  if (g.across) return 1;
  const u32 power = g.slots & (~g.slots + 1), sums = 2 * g.rows;
  return (power == g.slots && power <= 32) || power < sums ? power : sums;
}

// Chooses the tiles and slots of least cost for threads along groups. Costs are eighths of a turn: 2 for the end of a
// chain, 3 for the start of a block unless many sweeps share it, and 1 for adding up partial sums. Runs of fewer than 8
// groups cost an eighth more, because they are read slowly.
inline void set_tiles_along(const Launch& call, GradientGeometry& g) {
  g.tiles = 1;
  g.slots = kGradientThreads;
  if (g.groups > 16 * kGradientThreads) return;
  // Few turns as long as there are few blocks.
  const u64 many = call.rows * g.groups / (g.rows * kGradientThreads * 2048);
  u64 most = min(max(many, 4), 16);
  while (most * kGradientThreads < g.groups) most += 4;
  for (u64 turns = 1, least = ~u64{0}; turns <= most; ++turns) {
    const u64 fewest = ceil_div(g.groups, turns);
    u64 power = 1;
    while (power < fewest) power *= 2;
    // A power of two makes a tile one run of lanes. The fewest slots leave few threads idle.
    const u64 choices[] = {power, fewest};
    for (const u64 slots : choices) {
      if (slots > kGradientThreads || (slots < 4 && turns > 1)) continue;
      const u64 tiles = min(kGradientThreads / slots, call.rows / g.rows);
      const u64 unit = unit_of(g), iterations = ceil_div(turns, unit);
      const bool has_partials = slots != power || slots > 32, is_one_sweep = has_partials || 2 * turns > many;
      u64 cost = 8 * unit * iterations + 2 * ceil_div(iterations, kChain) + 3 * is_one_sweep + has_partials;
      if (slots < 8 && turns > 1) cost += cost / 8;
      cost = ceil_div(slots * tiles, 32) * cost * 1024 / tiles;
      if (cost >= least) continue;
      least = cost;
      g.tiles = static_cast<u32>(tiles);
      g.slots = static_cast<u32>(slots);
    }
  }
}

inline u64 blocks_of_rows(const Launch& call, const GradientGeometry& g) {
  return ceil_div(call.rows, u64{g.rows} * g.tiles * g.sweeps);
}

// Sets sweeps and turns. Segments are short as long as there are few blocks; longer ones leave fewer sums to add up.
// While at least 2048 blocks remain, a block takes more sweeps, until a thread has 16 turns.
inline void set_turns(const Launch& call, GradientGeometry& g) {
  g.sweeps = 1;
  const u64 all = ceil_div(g.groups, g.slots), blocks = blocks_of_rows(call, g) * all;
  u64 turns = all;
  if (g.across || g.tiles == 1) {
    turns = max(min(max(blocks / 2048, 4), 8), min(blocks / 4096, 64));
    const u64 segments = (all + turns / 2) / turns, unit = unit_of(g);
    // With one segment, a thread has all turns.
    turns = segments < 2 ? all : (ceil_div(all, segments) + unit / 2) / unit * unit;
  } else if (g.slots == lanes_of(g)) {
    const u64 most = min(ceil_div(16, all), g.slots);
    g.sweeps = static_cast<u32>(max(min(blocks / (2048 * all), most), 1));
  }
  g.turns = static_cast<u32>(turns);
}

// Sets the fields that follow from the others.
inline void complete(const Launch& call, GradientGeometry& g) {
  g.threads = static_cast<u32>(ceil_div(g.tiles * g.slots, 32) * 32);
  g.one_by_run = static_cast<u32>(ceil_div(1 << 20, g.across ? g.tiles : g.slots));
  g.lanes = lanes_of(g);
  g.lanes_log2 = 0;
  while (1u << g.lanes_log2 < g.lanes) ++g.lanes_log2;
  g.partials = g.slots / g.lanes;
  g.pitch = g.partials * g.tiles;
  const u64 of_segment = u64{g.slots} * g.turns, row_blocks = blocks_of_rows(call, g);
  g.segments = static_cast<u32>(ceil_div(g.groups, of_segment));
  g.has_partials = g.lanes == 1 || g.partials > 1 || g.segments > 1;
  g.last_turns = static_cast<u32>(ceil_div(g.groups - (g.segments - 1) * of_segment, g.slots));
  g.blocks = static_cast<u32>(row_blocks * g.segments);
  g.run_of_blocks = g.across ? static_cast<u32>(row_blocks) : g.segments;
  const i64 width = call.antithetic ? kAntitheticWidth : kWidth;
  g.row_step = g.tiles * call.row_stride;
  g.turn_step = g.slots * call.column_stride * width;
  const u64 unit = groups_at_once(g.rows, call.antithetic);
  g.sweep_step = g.rows * g.row_step - static_cast<i64>(ceil_div(g.last_turns, unit) * unit) * g.turn_step;
  g.parts_log2 = 0;
  const u64 parts = min(kGradientThreads / (g.tiles * g.rows * 2), g.partials / 4);
  while (2u << g.parts_log2 <= parts) ++g.parts_log2;
}

inline GradientGeometry gradient_geometry(const Launch& call) {
  GradientGeometry g{};
  const u32 width = call.antithetic ? kAntitheticWidth : kWidth;
  g.skip = call.first_column_at == nullptr ? static_cast<u32>(call.first_column % width) : width - 1;
  g.groups = ceil_div(g.skip + call.columns, width);
  g.loads = loads_of(call, g.skip);
  g.across = g.loads == kApart && call.rows > 1 && call.row_stride < call.column_stride;
  g.rows = has_many_rows(call, g) ? rows_at_once(call.type, call.shared_noise, call.antithetic) : 1;
  g.across ? set_tiles_across(call, g) : set_tiles_along(call, g);
  set_turns(call, g);
  complete(call, g);
  return g;
}

// Numbers that Launch::scratch must have room for.
inline u64 scratch_size(const Launch& call, const GradientGeometry& g) {
  return g.segments > 1 ? 2 * call.rows * g.segments : 0;
}

#endif

}  // namespace multisample
