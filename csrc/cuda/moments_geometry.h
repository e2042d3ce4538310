// The geometry of weighted moments: their cut into blocks and threads. The order of the sums follows from it.
// Both depend on the launch alone, never on the device.
// backends/kernels/cuda/moments_geometry.py computes the same geometry.
//
// Columns are cut into segments, and rows into tiles. A block sums one segment in one tile, or in several tiles if the
// segment is short. The threads of one slot form a team, and each has rows of its own. The segment lists its groups
// with a weight other than zero; slot s sums entries s, s + slots, ... At the end, the block adds up its slots. If
// there are several segments, a second kernel adds them up.
#pragma once

#include "cuda/geometry.h"
#include "launch.h"

namespace multisample {

constexpr u32 kMomentThreads = 256;
// Rows of a thread in large calls in float32: they share the reads of the list.
constexpr u32 kMomentRows = 4;
// The cut suits the processors of an H100 or H200: each gets 4 to 8 blocks of a large call, and holds 3 or 4 at once.
constexpr u32 kProcessors = 132, kLeastShare = 4, kMostShare = 8;
// Starting a block and adding up its slots costs about this many turns.
constexpr u32 kStartTurns = 2;
// Groups that a thread adds up in the computing type, before it adds their sum to a float64 sum.
constexpr u32 kMomentChain = 8;
// Groups that a block adds to its list at once; the list has room for twice as many.
template <class Real>
constexpr u32 kMomentFill = sizeof(Real) == 8 ? 128 : 256;

struct MomentGeometry {
  u32 blocks;
  u32 rows;              // rows per thread, 1 or kMomentRows; they are `team` rows apart
  u32 team;              // threads of a slot
  u32 slots;             // threads that share the rows of a tile
  u32 sweeps;            // tiles that a block sums, one after another
  u32 skip;              // columns of the first group that come before the first column
  u32 segments;          // segments per row
  u32 finishing_blocks;  // blocks of the second kernel; 0 if the first kernel has the sums of whole rows, and finishes
                         // them
  u32 width;             // rows that a block of the second kernel finishes at once: a power of two
  u32 unused;
  u64 groups;  // groups per row
  u64 turns;   // groups of a segment per slot, if no weight is zero
};

static_assert(sizeof(MomentGeometry) == 56, "backends/kernels/cuda/moments_geometry.py packs these bytes");

#if !defined(__CUDACC_RTC__)

// Rows that have noise of their own.
inline u64 noise_rows(const Launch& call) { return call.shared_noise ? 1 : call.rows; }

inline MomentGeometry moment_geometry(const Launch& call) {
  MomentGeometry g{};
  const bool wide = call.type == kFloat64;
  const u32 width = call.antithetic ? kAntitheticWidth : kWidth;
  // The first column is unknown on the host: reserve the largest skip.
  g.skip = call.first_column_at == nullptr ? static_cast<u32>(call.first_column % width) : width - 1;
  g.groups = ceil_div(g.skip + call.columns, width);
  const u64 rows = noise_rows(call);
  // Threads that read the seed from memory need registers for keys.
  const bool many = rows >= 16 && g.groups >= ceil_div(1 << 22, rows);
  g.rows = many && !wide && call.origin_in_memory == 0 ? kMomentRows : 1;
  // Few slots leave few sums to add up, and many rows share the work of the list. A tile gets fewer rows only to make
  // more blocks, and only if each thread keeps enough turns.
  const u64 least = g.rows > 1 ? 32 : 8;
  u64 team = kMomentThreads, tiles = ceil_div(rows, g.rows * team);
  while (team > least && tiles < 4096 && (team >= rows || g.groups >= (tiles < 256 ? 2048 : 8192) / team)) {
    team /= 2;
    tiles = ceil_div(rows, g.rows * team);
  }
  team = ceil_div(rows, g.rows * tiles);
  g.team = static_cast<u32>(team);
  g.slots = static_cast<u32>(min(kMomentThreads / team, g.groups));
  tiles = ceil_div(rows, g.rows * team);
  // Minimises the time of the busiest SM, over segments of at least 8 turns. A cut into fewer, longer blocks must save
  // 5 %, because these share an SM less evenly.
  const u64 all = ceil_div(g.groups, g.slots);
  g.turns = all;
  u64 least_time = ~u64{0} / 20;
  for (u64 share = kMostShare; share >= kLeastShare; --share) {
    const u64 segments = min(share * kProcessors / tiles, all / 8);
    if (segments < 2 || (tiles >= 256 && all < 64)) continue;
    const u64 turns = ceil_div(all, segments), blocks = ceil_div(all, turns) * tiles;
    const u64 time = ceil_div(blocks, kProcessors) * (turns + kStartTurns);
    if (21 * time >= 20 * least_time) continue;
    least_time = time;
    g.turns = turns;
  }
  g.segments = static_cast<u32>(ceil_div(all, g.turns));
  // The list of a short segment serves several tiles.
  const u64 fill = wide ? kMomentFill<double> : kMomentFill<float>;
  const u64 sweeps = g.segments == 1 && g.groups <= fill ? tiles / 8192 : 1;
  g.sweeps = static_cast<u32>(min(max(sweeps, 1), 16));
  g.blocks = static_cast<u32>(ceil_div(tiles, g.sweeps) * g.segments);
  if (g.segments == 1 && !call.shared_noise) return g;
  // With shared noise, every block of the second kernel adds up the same sums.
  g.width = call.shared_noise ? 1 : 32;
  while (g.width > rows) g.width /= 2;
  const u64 finishing = ceil_div(call.rows, call.shared_noise ? kMomentThreads : g.width);
  g.finishing_blocks = static_cast<u32>(call.shared_noise ? min(finishing, 1024) : finishing);
  return g;
}

// Numbers that Launch::scratch must have room for: for each segment, its sums of both moments and of the weights, and
// the power of two by which its weights were divided.
inline u64 scratch_size(const Launch& call, const MomentGeometry& g) {
  return g.finishing_blocks == 0 ? 0 : g.segments * (noise_rows(call) * call.results + 2);
}

#endif

}  // namespace multisample
