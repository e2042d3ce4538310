// The kernels where dimensions lie side by side in memory, as with layout "nd".
//
// Dimensions and columns change places: a thread keeps some dimensions, with their mu and sigma, and goes along the
// columns; what the words owe to those alone (with shared noise, all the noise) waits in shared memory. A block makes
// some groups of columns at a time, a pass.
//
// kTransposed: dimensions that are side by side are written at once. Where a row of the output begins somewhere between
// two aligned addresses, a thread takes those at its start from the thread before: the first of a warp does nothing
// else. kTransposedStaged: short rows that begin anywhere but lie one behind the other, through shared memory, where a
// pass lies as it does in the output. See geometry.h.
#pragma once

#include "group.cuh"

namespace multisample {

MULTISAMPLE_FUNCTION float of_thread_before(float x) { return __shfl_up_sync(~0u, x, 1); }
MULTISAMPLE_FUNCTION double of_thread_before(double x) { return __shfl_up_sync(~0u, x, 1); }
MULTISAMPLE_FUNCTION float16 of_thread_before(float16 x) {
  return {static_cast<u16>(__shfl_up_sync(~0u, static_cast<u32>(x.bits), 1))};
}
MULTISAMPLE_FUNCTION bfloat16 of_thread_before(bfloat16 x) {
  return {static_cast<u16>(__shfl_up_sync(~0u, static_cast<u32>(x.bits), 1))};
}

// A dimension that a thread keeps.
template <class Real>
struct Kept {
  Real mu, sigma;
  RowPart words;

  MULTISAMPLE_FUNCTION static Kept of(u64 row, const Keys<Real>& keys, const SampleCall& call) {
    return {element<Real>(call.mu, row), element<Real>(call.sigma, row),
            row_part(static_cast<u32>(call.first_row + row), low(offset_of(call)), keys.keys)};
  }
};

// The groups of columns of a block.
template <class GroupNoise, u32 width>
struct Band {
  u64 first_group;
  u32 count;    // groups
  u32 turns;    // of them in a pass
  i64 columns;  // from the band's first group on; inside are those from `skipped` to it
  u32 skipped;
  u32 first_whole, whole;  // passes that begin with these groups have all their columns inside

  MULTISAMPLE_FUNCTION Band(u32 band, const SampleCall& call, const Geometry& geometry)
      : first_group(static_cast<u64>(band) * geometry.band_rows), turns(geometry.rows_per_pass) {
    columns = static_cast<i64>(geometry.skip + call.columns - first_group * width);
    const u64 left = static_cast<u64>(columns + width - 1) / width;
    count = geometry.band_rows < left ? geometry.band_rows : static_cast<u32>(left);
    skipped = band == 0 ? geometry.skip : 0;
    first_whole = skipped > 0 ? turns : 0;
    const u64 inside = static_cast<u64>(columns) / width;
    whole = inside < first_whole + turns           ? 0
            : inside - turns - first_whole < count ? static_cast<u32>(inside - turns) - first_whole + 1
                                                   : count;
  }

  // The address of the first group's first column, be it inside or not.
  MULTISAMPLE_FUNCTION char* address(const SampleCall& call, const Geometry& geometry) const {
    return static_cast<char*>(call.out) + (static_cast<i64>(first_group * width) - geometry.skip) * call.column_stride;
  }

  // Whether all columns of the pass that begins with group `k` are inside.
  MULTISAMPLE_FUNCTION bool has_whole(u32 k) const { return k - first_whole < whole; }

  // Of `k` alone, a group of a pass: all bits of `slots` that belong to a column inside.
  template <u32 slots>
  MULTISAMPLE_FUNCTION u32 inside(u32 k) const {
    const i64 column = static_cast<i64>(k) * width;
    u32 bits = 0;
#pragma unroll
    for (u32 c = 0; c < width; ++c) {
      if (column + c >= skipped && column + c < columns) bits |= ((1u << slots) - 1) << c * slots;
    }
    return bits;
  }

  // Puts the noise of the groups from `begin` on into `chunk`, as many as there is room for, and of those behind them
  // that a pass which is not full reads; returns how many. All threads of the block together.
  template <class Real>
  MULTISAMPLE_FUNCTION u32 fill(GroupNoise* chunk, u32 begin, const Keys<Real>& keys, const SampleCall& call,
                                const Geometry& geometry) const {
    const u32 groups = count - begin < geometry.chunk ? count - begin : geometry.chunk;
    if (begin > 0) __syncthreads();
    if (threadIdx.x < geometry.chunk && threadIdx.x + 1 < groups + turns) {
      const u64 group = call.first_column / width + first_group + begin + threadIdx.x;
      chunk[threadIdx.x] = GroupNoise::of(static_cast<u32>(group), offset_of(call), keys);
    }
    __syncthreads();
    return groups;
  }
};

// What a thread writes at once of each column, of its dimensions and of those of the thread before.
template <class Out, bool antithetic>
struct Pieces {
  using Real = typename Computing<Out>::Type;
  static constexpr u32 kSlots = multisample::kSlots<sizeof(Out), antithetic>;
  static constexpr u32 kColumns = Elements<Out, antithetic>::kCount, kPerNormal = kColumns / 4;
  struct alignas(kSlots * sizeof(Out)) Piece {
    Out x[kSlots];
  };

  Real mu[2 * kSlots - 1], sigma[2 * kSlots - 1];  // of the last ones of the thread before, and of its own
  Piece piece[kColumns];

  // Makes the pieces of the thread's normals, all but of column 0 `delta` elements further back than that of the column
  // before, modulo the elements of a piece, and that of column 0 `first` elements. All threads of the warp together.
  template <u32 first, u32 delta>
  MULTISAMPLE_FUNCTION void make(const Normals<Real>* z) {
#pragma unroll
    for (u32 k = 0; k < 4; ++k) {
      Real of_both[2 * kSlots - 1];
      const u32 shift_0 = (first + k * kPerNormal * delta) % kSlots, shift_1 = (shift_0 + delta) % kSlots;
      const u32 most = kPerNormal == 1 || shift_0 > shift_1 ? shift_0 : shift_1;
#pragma unroll
      for (u32 s = 0; s < kSlots; ++s) of_both[kSlots - 1 + s] = normal(z[s], k);
#pragma unroll
      for (u32 s = 1; s <= most; ++s) of_both[kSlots - 1 - s] = of_thread_before(normal(z[kSlots - s], k));
#pragma unroll
      for (u32 c = 0; c < kPerNormal; ++c) {
        const u32 shift = c == 0 ? shift_0 : shift_1;
#pragma unroll
        for (u32 e = 0; e < kSlots; ++e) {
          const u32 at = kSlots - 1 + e - shift;
          piece[kPerNormal * k + c].x[e] =
              narrow<Out>(fma_rn(c == 0 ? sigma[at] : negated(sigma[at]), of_both[at], mu[at]));
        }
      }
    }
  }

  // The same for what is known only when the kernel runs, 4 * first + delta.
  MULTISAMPLE_FUNCTION void make(const Normals<Real>* z, u32 shifts) {
    switch (shifts) {
      default: return make<0, 0>(z);
      case 1: return make<0 % kSlots, 1 % kSlots>(z);
      case 2: return make<0 % kSlots, 2 % kSlots>(z);
      case 3: return make<0 % kSlots, 3 % kSlots>(z);
      case 4: return make<1 % kSlots, 0 % kSlots>(z);
      case 5: return make<1 % kSlots, 1 % kSlots>(z);
      case 6: return make<1 % kSlots, 2 % kSlots>(z);
      case 7: return make<1 % kSlots, 3 % kSlots>(z);
      case 8: return make<2 % kSlots, 0 % kSlots>(z);
      case 9: return make<2 % kSlots, 1 % kSlots>(z);
      case 10: return make<2 % kSlots, 2 % kSlots>(z);
      case 11: return make<2 % kSlots, 3 % kSlots>(z);
      case 12: return make<3 % kSlots, 0 % kSlots>(z);
      case 13: return make<3 % kSlots, 1 % kSlots>(z);
      case 14: return make<3 % kSlots, 2 % kSlots>(z);
      case 15: return make<3 % kSlots, 3 % kSlots>(z);
    }
  }

 private:
  MULTISAMPLE_FUNCTION static Real normal(const Normals<Real>& z, u32 k) {
    return k == 0 ? z.z0 : k == 1 ? z.z1 : k == 2 ? z.z2 : z.z3;
  }
};

// The passes of a chunk.
template <bool handed, class Out, bool antithetic, class Real, class GroupNoise, class Band>
MULTISAMPLE_FUNCTION void go_along(Pieces<Out, antithetic>& made, const RowPart* words, const GroupNoise* chunk,
                                   u32 begin, u32 turn, u32 groups, u32 shifts, u32 inside, Out*& at, const i32* to,
                                   i32 step, const Band& band, const Keys<Real>& keys) {
  using Made = Pieces<Out, antithetic>;
  constexpr u32 width = Made::kColumns, slots = Made::kSlots, all = (1u << width * slots) - 1;
#pragma unroll 1
  for (u32 k = 0; k < groups; k += band.turns) {
    const GroupNoise noise = chunk[k + turn];
    Normals<Real> z[slots];
#pragma unroll
    for (u32 s = 0; s < slots; ++s) z[s] = noise.in(words[s], keys);
    if (handed) {
      made.make(z, shifts);
    } else {
      made.template make<0, 0>(z);
    }
    const bool is_whole = band.has_whole(begin + k);
    if (is_whole && inside == all) {
#pragma unroll
      for (u32 c = 0; c < width; ++c) *reinterpret_cast<typename Made::Piece*>(at + to[c]) = made.piece[c];
    } else if (inside != 0) {
      const u32 written = is_whole ? inside : inside & band.template inside<slots>(begin + k + turn);
#pragma unroll
      for (u32 c = 0; c < width; ++c) {
        Out* const of_column = hidden(at + to[c]);
#pragma unroll
        for (u32 s = 0; s < slots; ++s) {
          if (written >> (c * slots + s) & 1) of_column[s] = made.piece[c].x[s];
        }
      }
    }
    at += step;
  }
}

template <class Out, bool shared, bool antithetic, bool fast>
MULTISAMPLE_FUNCTION void draw_transposed(const SampleCall& call, const Geometry& geometry) {
  using Real = typename Computing<Out>::Type;
  using GroupNoise = Noise<Real, shared, fast>;
  using Made = Pieces<Out, antithetic>;
  constexpr u32 width = Made::kColumns, slots = Made::kSlots;
  __shared__ GroupNoise chunk[kTransposedThreads];
  const u32 band_index = blockIdx.x / geometry.column_blocks;
  const u32 tile = blockIdx.x - band_index * geometry.column_blocks;
  const Band<GroupNoise, width> band(band_index, call, geometry);
  const Keys<Real> keys(call.seed);

  // Pieces of the thread: of all groups of a pass, one behind the other. Those of two warps overlap in one thread if
  // dimensions are handed over; the one before the first piece is none.
  const u32 overlap = geometry.overlap, thread = threadIdx.x;
  const u32 pieces_of_tile = (32 - overlap) * (blockDim.x / 32);
  const i32 position = static_cast<i32>(tile * pieces_of_tile + thread - overlap * (thread / 32 + 1));
  const u32 turn_of_it = position < 0 ? 0 : static_cast<u32>(position) / geometry.lanes;
  const bool exists = position >= 0 && turn_of_it < band.turns;
  const u32 turn = exists ? turn_of_it : 0;
  const i64 first = (position - static_cast<i64>(turn) * geometry.lanes) * slots, rows = static_cast<i64>(call.rows);
  Made made;
  RowPart words[slots];
#pragma unroll
  for (u32 s = 0; s < slots; ++s) {
    const i64 row = first + s;
    const Kept<Real> kept = Kept<Real>::of(static_cast<u64>(row < 0 ? 0 : row < rows ? row : rows - 1), keys, call);
    made.mu[slots - 1 + s] = kept.mu, made.sigma[slots - 1 + s] = kept.sigma, words[s] = kept.words;
  }
#pragma unroll
  for (u32 s = 0; s + 1 < slots; ++s) {
    made.mu[s] = of_thread_before(made.mu[slots + s]), made.sigma[s] = of_thread_before(made.sigma[slots + s]);
  }

  // How many elements a row begins behind an aligned address: the same in all groups.
  const i32 stride = geometry.stride, step = static_cast<i32>(band.turns * width) * stride;
  const u64 begin_of_0 = reinterpret_cast<u64>(call.out) - geometry.skip * static_cast<u64>(call.column_stride);
  const u32 shift = begin_of_0 / sizeof(Out) % slots, delta = static_cast<u32>(stride) % slots;
  const u32 shifts = overlap == 0 ? 0 : 4 * shift + delta;
  Out* at = reinterpret_cast<Out*>(band.address(call, geometry)) + first +
            static_cast<i64>(static_cast<i32>(turn * width)) * stride;
  i32 to[width];
  // Which elements of the thread's pieces are inside the rows.
  u32 inside = 0;
#pragma unroll
  for (u32 c = 0; c < width; ++c) {
    const i32 back = overlap == 0 ? 0 : static_cast<i32>((shift + c * delta) % slots);
    to[c] = static_cast<i32>(c) * stride - back;
#pragma unroll
    for (u32 s = 0; s < slots; ++s) {
      const i64 row = first - back + s;
      inside |= (exists && thread % 32 >= overlap && row >= 0 && row < rows ? 1u : 0u) << (c * slots + s);
    }
  }

  for (u32 begin = 0; begin < band.count; begin += geometry.chunk) {
    const u32 groups = band.fill(chunk, begin, keys, call, geometry);
    if (overlap == 0) {
      go_along<false>(made, words, chunk, begin, turn, groups, shifts, inside, at, to, step, band, keys);
    } else {
      go_along<true>(made, words, chunk, begin, turn, groups, shifts, inside, at, to, step, band, keys);
    }
  }
}

template <class Out, bool shared, bool antithetic, bool fast>
MULTISAMPLE_FUNCTION void draw_transposed_staged(const SampleCall& call, const Geometry& geometry) {
  using Real = typename Computing<Out>::Type;
  using Group = Elements<Out, antithetic>;
  using GroupNoise = Noise<Real, shared, fast>;
  constexpr u32 width = Group::kCount, slots = kSlots<sizeof(Out), antithetic>;
  // What a thread takes from the stage at once, and how often, at most.
  struct alignas(alignof(Quad<Out>)) Part {
    Out x[alignof(Quad<Out>) / sizeof(Out)];
  };
  constexpr u32 kStagedThreads = multisample::kStagedThreads<shared>;
  constexpr u32 kParts = slots * width * sizeof(Out) / sizeof(Part);
  __shared__ GroupNoise chunk[kStagedThreads];
  __shared__ Part stages[2][kStagedThreads * kParts];
  const Band<GroupNoise, width> band(blockIdx.x, call, geometry);
  const Keys<Real> keys(call.seed);
  const u32 rows = static_cast<u32>(call.rows), row_size = rows * sizeof(Out);

  Kept<Real> kept[slots];
  u32 turn[slots], place[slots];
#pragma unroll
  for (u32 s = 0; s < slots; ++s) {
    const u32 position = threadIdx.x + s * kStagedThreads;
    turn[s] = position / rows;
    u32 row = position - turn[s] * rows;
    // There is none. To do the same twice costs less than to do nothing.
    if (turn[s] >= band.turns) turn[s] = turn[0], row = threadIdx.x - turn[0] * rows;
    place[s] = (turn[s] * width * rows + row) * sizeof(Out);
    kept[s] = Kept<Real>::of(row, keys, call);
  }

  Out* out = reinterpret_cast<Out*>(band.address(call, geometry));
  const u32 step = band.turns * width * rows, parts = step * sizeof(Out) / sizeof(Part);
  const bool aligned = reinterpret_cast<u64>(out) % sizeof(Part) == 0;
  u32 parity = 0;
  for (u32 begin = 0; begin < band.count; begin += geometry.chunk) {
    const u32 groups = band.fill(chunk, begin, keys, call, geometry);
    for (u32 k = 0; k < groups; k += band.turns) {
      // The next pass goes to the other stage: nobody writes to this one before all have come to the next barrier.
      char* const stage = reinterpret_cast<char*>(stages[parity]);
      parity ^= 1;
#pragma unroll
      for (u32 s = 0; s < slots; ++s) {
        const Normals<Real> z = chunk[k + turn[s]].in(kept[s].words, keys);
        const Group group = scaled<Out, antithetic>(kept[s].mu, kept[s].sigma, z);
#pragma unroll
        for (u32 c = 0; c < width; ++c) *reinterpret_cast<Out*>(stage + (place[s] + c * row_size)) = group.x[c];
      }
      __syncthreads();
      if (aligned && band.has_whole(begin + k)) {
        const Part* const from = reinterpret_cast<const Part*>(stage) + threadIdx.x;
        Part* const to = reinterpret_cast<Part*>(out) + threadIdx.x;
#pragma unroll
        for (u32 j = 0; j < kParts; ++j) {
          if (threadIdx.x + j * kStagedThreads < parts) to[j * kStagedThreads] = from[j * kStagedThreads];
        }
      } else {
        const i64 left = band.columns - static_cast<i64>(begin + k) * width;
        const u32 last = left < band.turns * width ? static_cast<u32>(left) * rows : step;
        for (u32 e = (begin + k == 0 ? band.skipped : 0) * rows + threadIdx.x; e < last; e += kStagedThreads) {
          out[e] = reinterpret_cast<const Out*>(stage)[e];
        }
      }
      out += step;
    }
  }
}

}  // namespace multisample
