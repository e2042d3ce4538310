// Tiles: the words and the normals of some Philox blocks, with SIMD vectors.
//
// One loop makes the words of a tile. Its vectors are explicit, because compilers miss the instruction that multiplies
// words. A second loop makes the normals, and stores them directly where the elements of a tile are adjacent.
#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include <cstring>

#include "cpu/elements.h"
#include "stream/normals.h"

namespace multisample {
namespace cpu {

#if defined(__AVX512F__)
constexpr u64 kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr u64 kVectorBytes = 32;
#else
constexpr u64 kVectorBytes = 16;
#endif
constexpr u64 kLanes = kVectorBytes / sizeof(u64);

// One word in the lower half of each 64-bit lane. The upper half is ignored.
struct Lanes {
  typedef u64 Vector __attribute__((vector_size(kVectorBytes)));
  Vector x;
};

MULTISAMPLE_FUNCTION Lanes operator^(Lanes a, Lanes b) { return {a.x ^ b.x}; }
MULTISAMPLE_FUNCTION Lanes operator^(Lanes a, u32 b) { return {a.x ^ static_cast<u64>(b)}; }
MULTISAMPLE_FUNCTION Lanes operator^(u32 a, Lanes b) { return b ^ a; }
MULTISAMPLE_FUNCTION Lanes operator+(Lanes a, u64 b) { return {a.x + b}; }
MULTISAMPLE_FUNCTION Lanes high(Lanes x) { return {x.x >> 32}; }
MULTISAMPLE_FUNCTION Lanes low(Lanes x) { return x; }
MULTISAMPLE_FUNCTION Lanes in_every_lane(u32 x) { return {Lanes::Vector{} + x}; }

MULTISAMPLE_FUNCTION Lanes wide_mul(u32 a, Lanes b) {
#if defined(__AVX512F__)
  // A mask of all lanes: GCC 12 warns of an uninitialised value in the intrinsic without a mask.
  return {reinterpret_cast<Lanes::Vector>(
      _mm512_maskz_mul_epu32(0xFF, reinterpret_cast<__m512i>(b.x), _mm512_set1_epi64(a)))};
#elif defined(__AVX2__)
  return {reinterpret_cast<Lanes::Vector>(_mm256_mul_epu32(reinterpret_cast<__m256i>(b.x), _mm256_set1_epi64x(a)))};
#elif defined(__SSE2__)
  return {reinterpret_cast<Lanes::Vector>(_mm_mul_epu32(reinterpret_cast<__m128i>(b.x), _mm_set1_epi64x(a)))};
#else
  return {(b.x & 0xFFFFFFFFu) * static_cast<u64>(a)};
#endif
}

// Joins two words to 64 bits in each lane.
MULTISAMPLE_FUNCTION Lanes join(Lanes upper, Lanes lower) { return {upper.x << 32 | (lower.x & 0xFFFFFFFFu)}; }

// The integer types of a radius and of an angle.
template <class Real>
struct BitsOf;
template <>
struct BitsOf<float> {
  using Radius = u32;
  using Angle = i32;
};
template <>
struct BitsOf<double> {
  using Radius = u64;
  using Angle = i64;
};

template <class Real>
struct Pair {
  Real first, second;
};

// Blocks of four normals, of one row or of several rows.
template <class Real, u64 kSize = 1024 / sizeof(Real)>
struct Tile {
  // The whole tile is well within the first-level cache.
  static constexpr u64 kBlocks = kSize;
  // Pairs of normals per loop iteration, and the multiple to which the blocks of a tile are padded. Constant lengths
  // avoid loops for a remainder.
  static constexpr u64 kPairs = 16, kRound = 8;
  static constexpr bool kFine = sizeof(Real) == 8;
  static_assert(kRound % kLanes == 0 && 2 * kRound % kPairs == 0 && kBlocks % kRound == 0, "");

  ColumnPartOf<Lanes> columns[kBlocks / kLanes], fine_columns[kFine ? kBlocks / kLanes : 1];
  Lanes rows[kBlocks / kLanes];  // relative to the tile's first row
  alignas(64) typename BitsOf<Real>::Radius radii[2 * kBlocks];
  alignas(64) typename BitsOf<Real>::Angle angles[2 * kBlocks];

  u32 o0, o1;
  RoundKeys keys, fine_keys;

  explicit Tile(const Launch& call)
      : o0(multisample::low(call.offset)),
        o1(multisample::high(call.offset)),
        keys(round_keys(call.seed, kKey1)),
        fine_keys(round_keys(call.seed, kKey1 ^ kFloat64Key)) {}

  static u64 rounded_up(u64 blocks) { return (blocks + kRound - 1) / kRound * kRound; }

  // Sets `width` blocks for each row, from block `first` of the stream on.
  void set_columns(u64 first, u64 width, u64 row_count) {
    const u64 vectors = rounded_up(width * row_count) / kLanes;
    Lanes block{}, row{};
    for (u64 lane = 1; lane < kLanes; ++lane) block.x[lane] = lane;
    for (u64 k = 0; k < vectors; ++k) {
      if (row_count > 1) {
        // Lanes beyond the end of a row begin the next row.
        for (u64 lane = 0; lane < kLanes; ++lane) {
          for (; block.x[lane] >= width; ++row.x[lane]) block.x[lane] -= width;
        }
        rows[k] = row;
      }
      columns[k] = column_part<Lanes>(block + first, o0, o1, keys);
      if (kFine) fine_columns[k] = column_part<Lanes>(block + first, o0, o1, fine_keys);
      block = block + kLanes;
    }
  }

  template <class RowParts>
  MULTISAMPLE_FUNCTION void draw_words(u64 blocks, RowParts row_parts) {
    const u64 vectors = rounded_up(blocks) / kLanes;
    for (u64 k = 0; k < vectors; ++k) {
      const auto row = row_parts(k);
      WordsOf<Lanes> w = words(columns[k], row, keys);
      if constexpr (kFine) {
        WordsOf<Lanes> f = words(fine_columns[k], row, fine_keys);
        const Lanes r0 = join(w.w0, f.w0), r1 = join(w.w2, f.w2), a0 = join(w.w1, f.w1), a1 = join(w.w3, f.w3);
        for (u64 lane = 0; lane < kLanes; ++lane) {
          const u64 pair = 2 * (kLanes * k + lane);
          radii[pair] = r0.x[lane];
          radii[pair + 1] = r1.x[lane];
          angles[pair] = static_cast<i64>(a0.x[lane]);
          angles[pair + 1] = static_cast<i64>(a1.x[lane]);
        }
      } else {
        const Lanes r = join(w.w2, w.w0), a = join(w.w3, w.w1);
        std::memcpy(radii + 2 * kLanes * k, &r, sizeof r);
        std::memcpy(angles + 2 * kLanes * k, &a, sizeof a);
      }
    }
  }

  // Draws the words of `row_count` rows of the stream from `first_row` on.
  void draw_words(u64 first_row, u64 width, u64 row_count) {
    const u32 row = static_cast<u32>(first_row);
    if (row_count == 1) {
      const RowPart part = row_part(row, o0, keys);
      draw_words(width, [&](u64) { return part; });
    } else {
      draw_words(width * row_count, [&](u64 k) { return row_part<Lanes>(rows[k] + row, o0, keys); });
    }
  }

  MULTISAMPLE_FUNCTION Pair<Real> normals(u64 pair) const {
    const Real r = radius(radii[pair]);
    const HalfTurns<Real> t = half_turns(angles[pair]);
    return {mul_rn(r, t.cosine), mul_rn(r, t.sine)};
  }

  // Stores the normals in the order of columns. With kMirrored, -z follows each z.
  template <bool kMirrored>
  void make_noise(u64 blocks, Real* noise) const {
    const u64 pairs = 2 * rounded_up(blocks);
    for (u64 start = 0; start < pairs; start += kPairs) {
      for (u64 k = start; k < start + kPairs; ++k) {
        const Pair<Real> z = normals(k);
        if constexpr (kMirrored) {
          noise[4 * k] = z.first;
          noise[4 * k + 1] = negated(z.first);
          noise[4 * k + 2] = z.second;
          noise[4 * k + 3] = negated(z.second);
        } else {
          noise[2 * k] = z.first;
          noise[2 * k + 1] = z.second;
        }
      }
    }
  }

  // Columns of a pair of normals.
  template <bool kMirrored>
  static constexpr u64 kColumns = kMirrored ? 4 : 2;

  // Calls put(column, x) for each column of a pair of normals.
  template <bool kMirrored, class Put>
  MULTISAMPLE_FUNCTION void draw_pair(u64 pair, Real mu, Real sigma, Put put) const {
    const Pair<Real> z = normals(pair);
    put(0, fma_rn(sigma, z.first, mu));
    if constexpr (kMirrored) put(1, fma_rn(sigma, negated(z.first), mu));
    put(kColumns<kMirrored> / 2, fma_rn(sigma, z.second, mu));
    if constexpr (kMirrored) put(3, fma_rn(sigma, negated(z.second), mu));
  }

  // Whether columns [first, first + count) of the tile fill a vector. `count` is at least one.
  template <bool kMirrored>
  static bool is_long(u64 first, u64 count) {
    constexpr u64 kOf = kColumns<kMirrored>;
    return (first + count) / kOf >= ceil_div(first, kOf) + kPairs;
  }

  // Draws contiguous elements from the tile's words. Requires is_long(first, count).
  template <class Out, bool kMirrored>
  MULTISAMPLE_FUNCTION void draw_run(u64 first, u64 count, char* at, Real mu, Real sigma) const {
    constexpr u64 kOf = kColumns<kMirrored>;
    const u64 last = first + count, begin = ceil_div(first, kOf), end = last / kOf;
    Unaligned<Out>* to = reinterpret_cast<Unaligned<Out>*>(at);
    const auto draw_part = [&](u64 from, u64 until) {
      Real x[kOf];
      if (from < until) draw_pair<kMirrored>(from / kOf, mu, sigma, [&](u64 c, Real value) { x[c] = value; });
      for (u64 c = from; c < until; ++c) to[c - first].x = narrow<Out>(x[c % kOf]);
    };
    draw_part(first, kOf * begin);
    for (u64 next = begin; next < end; next += kPairs) {
      // The last vector ends where the run ends. Storing some elements twice is faster than a loop for the remainder.
      const u64 start = next + kPairs <= end ? next : end - kPairs;
      Unaligned<Out>* vector = to + (kOf * start - first);
      if constexpr (sizeof(Out) == sizeof(Real)) {
        for (u64 k = 0; k < kPairs; ++k) {
          draw_pair<kMirrored>(start + k, mu, sigma, [&](u64 c, Real value) { vector[kOf * k + c].x = value; });
        }
      } else {
        Real x[kOf * kPairs];
        for (u64 k = 0; k < kPairs; ++k) {
          draw_pair<kMirrored>(start + k, mu, sigma, [&](u64 c, Real value) { x[kOf * k + c] = value; });
        }
        for (u64 k = 0; k < kOf * kPairs; ++k) vector[k].x = narrow<Out>(x[k]);
      }
    }
    draw_part(kOf * end, last);
  }
};

// A tile whose vectors run down the rows. A place of the tile is one row of one block: first all rows of the first
// block, then all rows of the next.
template <class Real>
struct TileDown : Tile<Real, 256> {
  using Base = Tile<Real, 256>;
  using Base::kBlocks, Base::kFine, Base::o0, Base::o1;
  // Places per 64-bit lane, and places per iteration. Float32 joins the 32-bit words of two neighbouring places in each
  // lane.
  static constexpr u64 kStep = kFine ? 1 : 2, kPlaces = kStep * kLanes;
  static_assert(kBlocks % kPlaces == 0, "");

  struct PlaceVector {
    RowPartOf<Lanes> rows;
    Lanes blocks;  // relative to the tile's first block
  };
  PlaceVector vectors[kBlocks / kLanes];

  // A vector of the output: its first place, and its displacement in bytes.
  struct VectorPlace {
    u64 place;
    i64 displacement;
  };
  VectorPlace output[2 * kBlocks / kPlaces];
  u64 vector_count = 0, run_places = 0, run_count = 0;

  using Base::Base;

  static u64 whole_vectors(u64 places) { return ceil_div(places, kPlaces) * kPlaces; }

  // The number of rows that fill vectors: all rows, if padding the last vector wastes at most 1/16.
  static u64 rows_in_vectors(u64 rows) {
    return whole_vectors(rows) - rows <= rows / 16 ? rows : rows / kPlaces * kPlaces;
  }

  // Sets the rows of a tile of `places` places, whose blocks have `row_count` rows from `first_row` on.
  void set_rows(u64 first_row, u64 row_count, u64 places) {
    Lanes rows[kBlocks / kLanes];
    u64 row = 0, block = 0;
    for (u64 place = 0; place < whole_vectors(places); ++place) {
      const u64 vector = place / kPlaces * kStep + place % kStep, lane = place % kPlaces / kStep;
      rows[vector].x[lane] = first_row + row;
      vectors[vector].blocks.x[lane] = block;
      if (++row == row_count) {
        row = 0;
        ++block;
      }
    }
    for (u64 k = 0; k < whole_vectors(places) / kLanes; ++k) vectors[k].rows = row_part<Lanes>(rows[k], o0, this->keys);
  }

  // Lays out the places in the output: `count` runs of `places` places (at least kPlaces), `stride` bytes apart. It
  // does nothing if `places` and `count` are those of the previous call; `stride` and `size` must then be the same too.
  void set_runs(u64 places, u64 count, i64 stride, u64 size) {
    if (places == run_places && count == run_count) return;
    run_places = places;
    run_count = count;
    vector_count = 0;
    for (u64 run = 0; run < count; ++run) {
      for (u64 next = 0; next < places; next += kPlaces) {
        // The last vector ends where the run ends: see draw_run().
        const u64 start = min(next, places - kPlaces);
        output[vector_count++] = {run * places + start,
                                  static_cast<i64>(run) * stride + static_cast<i64>(start * size)};
      }
    }
  }

  // Draws the words of each place. The words of a place's second pair follow those of its first pair by kBlocks.
  template <class WordsOfVector>
  MULTISAMPLE_FUNCTION void draw_words(u64 places, WordsOfVector words_of) {
    for (u64 place = 0; place < places; place += kPlaces) {
      const u64 vector = place / kLanes;
      const WordsOf<Lanes> w = words_of(vector, this->keys);
      const WordsOf<Lanes> v = kFine ? words_of(vector, this->fine_keys) : words_of(vector + 1, this->keys);
      const auto put = [&](auto* to, Lanes a, Lanes b) {
        const Lanes joined = kFine ? join(a, b) : join(b, a);
        std::memcpy(to + place, &joined, sizeof joined);
      };
      put(this->radii, w.w0, v.w0);
      put(this->angles, w.w1, v.w1);
      put(this->radii + kBlocks, w.w2, v.w2);
      put(this->angles + kBlocks, w.w3, v.w3);
    }
  }

  // Draws the words of block `first_block` and the following blocks, for the rows of set_rows().
  void draw_words(u64 first_block, u64 places) {
    draw_words(places, [&](u64 vector, const RoundKeys& keys) {
      const auto column = column_part<Lanes>(vectors[vector].blocks + first_block, o0, o1, keys);
      return words(column, vectors[vector].rows, keys);
    });
  }

  // Draws the words of one block, for any rows.
  void draw_words_of_one(u64 block, u64 first_row, u64 row_count) {
    const auto column_of = [&](const RoundKeys& keys) {
      const ColumnPart part = column_part(static_cast<u32>(block), o0, o1, keys);
      return ColumnPartOf<Lanes>{in_every_lane(part.into_c2_of_round_2), in_every_lane(part.into_c0_of_round_3),
                                 in_every_lane(part.into_c2_of_round_3), in_every_lane(part.c3_of_round_3)};
    };
    const auto column = column_of(this->keys), fine = column_of(kFine ? this->fine_keys : this->keys);
    Lanes row{};
    for (u64 lane = 0; lane < kLanes; ++lane) row.x[lane] = first_row + kStep * lane;
    draw_words(row_count, [&](u64 vector, const RoundKeys& keys) {
      const auto rows = row_part<Lanes>(row + (vector / kStep * kPlaces + vector % kStep), o0, this->keys);
      return words(&keys == &this->keys ? column : fine, rows, keys);
    });
  }

  // The output of the next tile, for prefetching. Displacements in it are `spread` times those in this tile's output.
  struct Next {
    const char* at;
    i64 spread, column_stride;
  };

  // Draws the columns of pairs [first_pair, last_pair) of a block from the tile's words to the runs of set_runs(). `at`
  // is the address of the block's first column.
  template <class Out, bool kMirrored>
  MULTISAMPLE_FUNCTION void draw_runs(char* at, i64 column_stride, const Next& next, const Real* mu, const Real* sigma,
                                      u64 first_pair = 0, u64 last_pair = 2) const {
    constexpr u64 kOf = Base::template kColumns<kMirrored>;
    for (u64 k = 0; k < vector_count; ++k) {
      const VectorPlace vector = output[k];
      const i64 skipped = static_cast<i64>(kOf * first_pair);
      char* to = at + vector.displacement + skipped * column_stride;
      const char* ahead = next.at + vector.displacement * next.spread + skipped * next.column_stride;
      for (u64 pair = first_pair; pair < last_pair; ++pair) {
        Real x[kOf * kPlaces];
        for (u64 p = 0; p < kPlaces; ++p) {
          const u64 place = vector.place + p;
          this->template draw_pair<kMirrored>(pair * kBlocks + place, mu[place], sigma[place],
                                              [&](u64 c, Real value) { x[kPlaces * c + p] = value; });
        }
        Out narrowed[kOf * kPlaces];
        for (u64 p = 0; p < kOf * kPlaces; ++p) narrowed[p] = narrow<Out>(x[p]);
        for (u64 c = 0; c < kOf; ++c, to += column_stride, ahead += next.column_stride) {
          __builtin_prefetch(ahead, 1);
          std::memcpy(to, narrowed + kPlaces * c, sizeof(Out) * kPlaces);
        }
      }
    }
  }
};

}  // namespace cpu
}  // namespace multisample
