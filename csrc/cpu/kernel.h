// The kernel for the CPU: draws any window of a call on one thread, x[i, j] = mu[i] + sigma[i] z[i, j].
//
// Compilers make full vectors of a loop over an array and of little else. So the work goes by the tile, some columns of
// a row or of several short ones: the words of a tile are made in one loop, on vectors spelled out because compilers
// miss the instruction that multiplies words; normals are made of them in another, and go straight to memory where they
// lie side by side. Tiles below each other have the same columns: what the words owe to those is made once. Where rows
// are what lies side by side, as in a transposed result, a tile is blocks of many rows, and a vector runs down them; it
// writes to many places in turn, more than the processor foresees, which is why it is told of them in advance.
#pragma once

#include <cfenv>
#include <limits>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "draw.h"
#include "stream/normals.h"
#include "stream/rounding.h"

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

MULTISAMPLE_FUNCTION u64 min(u64 a, u64 b) { return a < b ? a : b; }
MULTISAMPLE_FUNCTION u64 ceil_div(u64 a, u64 b) { return (a + b - 1) / b; }

// Words side by side, each in the lower half of its 64-bit lane; what is in the upper half does not matter.
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
  // All lanes, with a mask that goes away again: GCC 12 warns of an uninitialised value in the intrinsic without one.
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

// Lane by lane, 64 bits of two words.
MULTISAMPLE_FUNCTION Lanes join(Lanes upper, Lanes lower) { return {upper.x << 32 | (lower.x & 0xFFFFFFFFu)}; }

// An element of memory at any address.
template <class T>
struct __attribute__((packed, may_alias)) Unaligned {
  T x;
};

template <class T>
MULTISAMPLE_FUNCTION T load(const char* at) {
  return reinterpret_cast<const Unaligned<T>*>(at)->x;
}

template <class Real, class T>
MULTISAMPLE_FUNCTION Real converted(T x) {
  return static_cast<Real>(x);
}
template <class Real>
MULTISAMPLE_FUNCTION Real converted(float16 x) {
  return widen(x);
}
template <class Real>
MULTISAMPLE_FUNCTION Real converted(bfloat16 x) {
  return widen(x);
}

template <class T, class Real>
inline void read_as(const Vector& from, u64 first, u64 count, Real* to) {
  const char* at = static_cast<const char*>(from.data) + static_cast<i64>(first) * from.stride;
  for (u64 k = 0; k < count; ++k) to[k] = converted<Real>(load<T>(at + static_cast<i64>(k) * from.stride));
}

// Elements of mu or sigma, rounded to the computing type.
template <class Real>
inline void read(const Vector& from, u64 first, u64 count, Real* to) {
  switch (from.type) {
    case kNumber:
      for (u64 k = 0; k < count; ++k) to[k] = static_cast<Real>(from.number);
      break;
    case kFloat16: read_as<float16>(from, first, count, to); break;
    case kBFloat16: read_as<bfloat16>(from, first, count, to); break;
    case kFloat32: read_as<float>(from, first, count, to); break;
    case kFloat64: read_as<double>(from, first, count, to); break;
    case kInt8: read_as<i8>(from, first, count, to); break;
    case kInt16: read_as<i16>(from, first, count, to); break;
    case kInt32: read_as<i32>(from, first, count, to); break;
    case kInt64: read_as<i64>(from, first, count, to); break;
    case kUInt8: read_as<u8>(from, first, count, to); break;
    case kUInt16: read_as<u16>(from, first, count, to); break;
    case kUInt32: read_as<u32>(from, first, count, to); break;
    default: read_as<u64>(from, first, count, to);
  }
}

// The words that two normals are made of: those of the radius and of the angle.
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

// Blocks, each of four normals, of one row or of some rows below each other.
template <class Real, u64 kSize = 1024 / sizeof(Real)>
struct Tile {
  // So many that all of it is well inside a first-level cache.
  static constexpr u64 kBlocks = kSize;
  // Pairs of normals that a loop makes at once, and what the blocks of a tile are filled up to: whole vectors, and
  // constants, without which there would be loops for what is left over.
  static constexpr u64 kPairs = 16, kRound = 8;
  static constexpr bool kFine = sizeof(Real) == 8;
  static_assert(kRound % kLanes == 0 && 2 * kRound % kPairs == 0 && kBlocks % kRound == 0, "");

  ColumnPartOf<Lanes> columns[kBlocks / kLanes], fine_columns[kFine ? kBlocks / kLanes : 1];
  Lanes rows[kBlocks / kLanes];  // counted from the first of the tile
  alignas(64) typename BitsOf<Real>::Radius radii[2 * kBlocks];
  alignas(64) typename BitsOf<Real>::Angle angles[2 * kBlocks];

  u32 o0, o1;
  RoundKeys keys, fine_keys;

  explicit Tile(const Draw& call)
      : o0(multisample::low(call.offset.value)),
        o1(multisample::high(call.offset.value)),
        keys(round_keys(call.seed.value, kKey1)),
        fine_keys(round_keys(call.seed.value, kKey1 ^ kFloat64Key)) {}

  static u64 rounded_up(u64 blocks) { return (blocks + kRound - 1) / kRound * kRound; }

  // For `width` blocks of each row, of which the first is block `first` of the stream.
  void set_columns(u64 first, u64 width, u64 row_count) {
    const u64 groups = rounded_up(width * row_count) / kLanes;
    Lanes block{}, row{};
    for (u64 lane = 1; lane < kLanes; ++lane) block.x[lane] = lane;
    for (u64 k = 0; k < groups; ++k) {
      if (row_count > 1) {
        // Lanes that have come to the end of a row begin the next.
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
    const u64 groups = rounded_up(blocks) / kLanes;
    for (u64 k = 0; k < groups; ++k) {
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

  // The words of `row_count` rows of the stream from `first_row` on.
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

  // Column by column; each is followed by its mirror if that is asked for.
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

  // Of how many columns a pair of normals is.
  template <bool kMirrored>
  static constexpr u64 kColumns = kMirrored ? 4 : 2;

  // What a pair of normals comes to, by the column.
  template <bool kMirrored, class Put>
  MULTISAMPLE_FUNCTION void draw_pair(u64 pair, Real mu, Real sigma, Put put) const {
    const Pair<Real> z = normals(pair);
    put(0, fma_rn(sigma, z.first, mu));
    if constexpr (kMirrored) put(1, fma_rn(sigma, negated(z.first), mu));
    put(kColumns<kMirrored> / 2, fma_rn(sigma, z.second, mu));
    if constexpr (kMirrored) put(3, fma_rn(sigma, negated(z.second), mu));
  }

  // Whether that many columns, at least one, from this one of the tile on fill a vector.
  template <bool kMirrored>
  static bool is_long(u64 first, u64 count) {
    constexpr u64 kOf = kColumns<kMirrored>;
    return (first + count) / kOf >= ceil_div(first, kOf) + kPairs;
  }

  // From words to memory that lies side by side, for as many columns as `is_long` says.
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
      // The last vector ends where the run does: to write some normals twice costs less than a loop for the rest.
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

// The same for blocks of rows below each other, of which a vector has the same columns. A place of the tile is a row of
// one of its blocks: first come all rows of the first, then all rows of the next.
template <class Real>
struct TileDown : Tile<Real, 256> {
  using Base = Tile<Real, 256>;
  using Base::kBlocks, Base::kFine, Base::o0, Base::o1;
  // What loops make at once: words of 32 bits are joined lane by lane, those of one place with those of the next.
  static constexpr u64 kStep = kFine ? 1 : 2, kPlaces = kStep * kLanes;
  static_assert(kBlocks % kPlaces == 0, "");

  struct Group {
    RowPartOf<Lanes> rows;
    Lanes blocks;  // counted from the first of the tile
  };
  Group groups[kBlocks / kLanes];

  // A vector: its first place, and how many bytes from where the tile goes that goes.
  struct Span {
    u64 place;
    i64 offset;
  };
  Span spans[2 * kBlocks / kPlaces];
  u64 span_count = 0, run_places = 0, run_count = 0;

  using Base::Base;

  static u64 whole_vectors(u64 places) { return ceil_div(places, kPlaces) * kPlaces; }

  // How many of so many rows fill vectors by themselves: all, if little of the last is left empty.
  static u64 filling(u64 rows) { return whole_vectors(rows) - rows <= rows / 16 ? rows : rows / kPlaces * kPlaces; }

  // The tile is of blocks of `row_count` rows, and has so many places.
  void set_rows(u64 first_row, u64 row_count, u64 places) {
    Lanes rows[kBlocks / kLanes];
    u64 row = 0, block = 0;
    for (u64 place = 0; place < whole_vectors(places); ++place) {
      const u64 group = place / kPlaces * kStep + place % kStep, lane = place % kPlaces / kStep;
      rows[group].x[lane] = first_row + row;
      groups[group].blocks.x[lane] = block;
      if (++row == row_count) {
        row = 0;
        ++block;
      }
    }
    for (u64 k = 0; k < whole_vectors(places) / kLanes; ++k) groups[k].rows = row_part<Lanes>(rows[k], o0, this->keys);
  }

  // The places go to memory in runs of `places`, at least kPlaces, each `stride` bytes after the one before. Stride and
  // size are the same at every call of which places and count are.
  void set_runs(u64 places, u64 count, i64 stride, u64 size) {
    if (places == run_places && count == run_count) return;
    run_places = places;
    run_count = count;
    span_count = 0;
    for (u64 run = 0; run < count; ++run) {
      for (u64 next = 0; next < places; next += kPlaces) {
        // The last vector ends where the run does: to write some normals twice costs less than a loop for the rest.
        const u64 start = min(next, places - kPlaces);
        spans[span_count++] = {run * places + start, static_cast<i64>(run) * stride + static_cast<i64>(start * size)};
      }
    }
  }

  // The words of the first pairs of all places, and from kBlocks on those of the second.
  template <class WordsOfGroup>
  MULTISAMPLE_FUNCTION void draw_words(u64 places, WordsOfGroup words_of) {
    for (u64 place = 0; place < places; place += kPlaces) {
      const u64 group = place / kLanes;
      const WordsOf<Lanes> w = words_of(group, this->keys);
      const WordsOf<Lanes> v = kFine ? words_of(group, this->fine_keys) : words_of(group + 1, this->keys);
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

  // Of block `first_block` and those that follow, for the rows that were set.
  void draw_words(u64 first_block, u64 places) {
    draw_words(places, [&](u64 group, const RoundKeys& keys) {
      const auto column = column_part<Lanes>(groups[group].blocks + first_block, o0, o1, keys);
      return words(column, groups[group].rows, keys);
    });
  }

  // Of one block, for any rows.
  void draw_words_of_one(u64 block, u64 first_row, u64 row_count) {
    const auto column_of = [&](const RoundKeys& keys) {
      const ColumnPart part = column_part(static_cast<u32>(block), o0, o1, keys);
      return ColumnPartOf<Lanes>{in_every_lane(part.into_c2_of_round_2), in_every_lane(part.into_c0_of_round_3),
                                 in_every_lane(part.into_c2_of_round_3), in_every_lane(part.c3_of_round_3)};
    };
    const auto column = column_of(this->keys), fine = column_of(kFine ? this->fine_keys : this->keys);
    Lanes row{};
    for (u64 lane = 0; lane < kLanes; ++lane) row.x[lane] = first_row + kStep * lane;
    draw_words(row_count, [&](u64 group, const RoundKeys& keys) {
      const auto rows = row_part<Lanes>(row + (group / kStep * kPlaces + group % kStep), o0, this->keys);
      return words(&keys == &this->keys ? column : fine, rows, keys);
    });
  }

  // Where the next tile goes, span by span and column by column.
  struct Next {
    const char* at;
    i64 spread, column_stride;  // offsets of spans are as many times as large
  };

  // From words to memory, the runs that were set, of each column of a block.
  template <class Out, bool kMirrored>
  MULTISAMPLE_FUNCTION void draw_runs(char* at, i64 column_stride, const Next& next, const Real* mu,
                                      const Real* sigma) const {
    constexpr u64 kOf = Base::template kColumns<kMirrored>;
    for (u64 k = 0; k < span_count; ++k) {
      const Span span = spans[k];
      char* to = at + span.offset;
      const char* ahead = next.at + span.offset * next.spread;
      for (u64 pair = 0; pair < 2; ++pair) {
        Real x[kOf * kPlaces];
        for (u64 p = 0; p < kPlaces; ++p) {
          const u64 place = span.place + p;
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

// So many bytes of each column of a block.
template <u64 kColumns, u64 kPitch, u64 kBytes>
MULTISAMPLE_FUNCTION void copy_block(const char* from, char* to, i64 stride) {
  for (u64 c = 0; c < kColumns; ++c, from += kPitch, to += stride) std::memcpy(to, from, kBytes);
}

// Columns of blocks that have `bytes` in each, from column `first` on: `count` of them, after which `spare` come later.
// Those of a block lie kPitch bytes apart. Where they are `close`, short ones may write over those that come later.
template <u64 kColumns, u64 kPitch>
void copy_columns(const char* from, u64 bytes, u64 first, u64 count, u64 spare, char* to, i64 stride, bool close) {
  u64 next = 0;
  const auto copy_next = [&] {
    const u64 block = (first + next) / kColumns, column = (first + next) % kColumns;
    std::memcpy(to + static_cast<i64>(next) * stride, from + block * bytes + column * kPitch, bytes);
    ++next;
  };
  while (next < count && (first + next) % kColumns != 0) copy_next();
  const u64 whole = bytes / 64 * 64, rest = bytes - whole;
  const u64 size = rest <= 16 ? 16 : rest <= 32 ? 32 : 64, start = bytes < size ? 0 : bytes - size;
  // How many columns more short ones write over.
  const u64 beyond = bytes >= size ? 0 : close ? ceil_div(size - bytes, static_cast<u64>(stride)) : count + spare;
  for (; next + kColumns <= count && next + kColumns + beyond <= count + spare; next += kColumns) {
    const char* block = from + (first + next) / kColumns * bytes;
    char* at = to + static_cast<i64>(next) * stride;
    for (u64 k = 0; k < whole; k += 64) copy_block<kColumns, kPitch, 64>(block + k, at + k, stride);
    if (rest == 0) continue;
    switch (size) {
      case 16: copy_block<kColumns, kPitch, 16>(block + start, at + start, stride); break;
      case 32: copy_block<kColumns, kPitch, 32>(block + start, at + start, stride); break;
      default: copy_block<kColumns, kPitch, 64>(block + start, at + start, stride);
    }
  }
  while (next < count) copy_next();
}

// What `value` says of each place, to memory that lies side by side.
template <class Out, class Value>
MULTISAMPLE_FUNCTION void put_run(char* at, u64 count, Value value) {
  constexpr u64 kSpan = 64 / sizeof(Out);
  Unaligned<Out>* to = reinterpret_cast<Unaligned<Out>*>(at);
  if (count < kSpan) {
    for (u64 k = 0; k < count; ++k) to[k].x = narrow<Out>(value(k));
    return;
  }
  for (u64 next = 0; next < count; next += kSpan) {
    const u64 start = next + kSpan <= count ? next : count - kSpan;
    for (u64 k = start; k < start + kSpan; ++k) to[k].x = narrow<Out>(value(k));
  }
}

// From noise to memory of any stride.
template <class Out, class Real>
MULTISAMPLE_FUNCTION void scale_run(const Real* noise, u64 count, char* at, i64 stride, Real mu, Real sigma) {
  if (stride == sizeof(Out)) {
    put_run<Out>(at, count, [&](u64 k) { return fma_rn(sigma, noise[k], mu); });
    return;
  }
  for (u64 k = 0; k < count; ++k) {
    Unaligned<Out>* to = reinterpret_cast<Unaligned<Out>*>(at + static_cast<i64>(k) * stride);
    to->x = narrow<Out>(fma_rn(sigma, noise[k], mu));
  }
}

// Part of the stream and where it goes.
struct Window {
  u64 first_row, last_row, first_column, last_column;

  u64 rows() const { return last_row - first_row; }
  u64 columns() const { return last_column - first_column; }
};

inline char* address(const Draw& call, u64 row, u64 column) {
  return static_cast<char*>(call.matrix) + static_cast<i64>(row) * call.row_stride +
         static_cast<i64>(column) * call.column_stride;
}

// Columns that a block of four normals serves.
inline u64 block_columns(const Draw& call) { return call.antithetic ? 8 : 4; }

// Whether so many rows of the call are to be drawn with vectors that run down them: they lie side by side.
inline bool runs_down(const Draw& call, u64 rows) {
  const i64 size = call.type == kFloat64 ? 8 : call.type == kFloat32 ? 4 : 2;
  return call.row_stride == size && rows > 1;
}

// The blocks of which a window has columns.
struct Blocks {
  u64 columns, skip, first, count;  // `skip` columns of the first are not the window's

  // Columns of the window, and how far in their blocks they begin.
  struct Run {
    u64 start, count, shift;
  };

  Blocks(const Draw& call, const Window& window) : columns(block_columns(call)), window_columns_(window.columns()) {
    const u64 column = call.first_column.value + window.first_column;
    first = column / columns;
    skip = column % columns;
    count = ceil_div(skip + window_columns_, columns);
  }

  // Those of the `n` blocks from the window's block `k` on.
  Run run(u64 k, u64 n) const {
    const u64 start = k == 0 ? 0 : columns * k - skip;
    return {start, min(window_columns_, columns * (k + n) - skip) - start, k == 0 ? skip : 0};
  }

 private:
  u64 window_columns_;
};

template <class Out, class Real, bool kMirrored>
__attribute__((noinline)) void draw_independent(const Draw& call, const Window& window) {
  constexpr u64 kBlocks = Tile<Real>::kBlocks;
  Tile<Real> tile(call);
  alignas(64) Real noise[8 * kBlocks];
  Real mu[kBlocks], sigma[kBlocks];
  const Blocks blocks(call, window);
  const u64 tile_rows = blocks.count > kBlocks ? 1 : min(kBlocks / blocks.count, window.rows());
  // Long rows are divided evenly.
  const u64 tiles = ceil_div(blocks.count, kBlocks);
  const u64 width = tiles == 1 ? blocks.count : Tile<Real>::rounded_up(ceil_div(blocks.count, tiles));
  for (u64 t = 0; t < blocks.count; t += width) {
    const u64 part = min(width, blocks.count - t), pitch = blocks.columns * part;
    const Blocks::Run run = blocks.run(t, part);
    const bool direct =
        call.column_stride == sizeof(Out) && Tile<Real>::template is_long<kMirrored>(run.shift, run.count);
    tile.set_columns(blocks.first + t, part, tile_rows);
    for (u64 r = window.first_row; r < window.last_row; r += tile_rows) {
      const u64 rows = min(tile_rows, window.last_row - r);
      read(call.mu, r, rows, mu);
      read(call.sigma, r, rows, sigma);
      tile.draw_words(call.first_row.value + r, part, rows);
      char* at = address(call, r, window.first_column + run.start);
      u64 place = run.shift;
      if (direct) {
        for (u64 k = 0; k < rows; ++k, at += call.row_stride, place += pitch) {
          tile.template draw_run<Out, kMirrored>(place, run.count, at, mu[k], sigma[k]);
        }
      } else {
        tile.template make_noise<kMirrored>(part * rows, noise);
        for (u64 k = 0; k < rows; ++k, at += call.row_stride, place += pitch) {
          scale_run<Out>(noise + place, run.count, at, call.column_stride, mu[k], sigma[k]);
        }
      }
    }
  }
}

// How many of `left` to take at once: `most`, or less, so that the last are not few.
inline u64 share(u64 left, u64 most) { return left <= most ? left : min(most, ceil_div(left, 2)); }

// Some rows of a window, which lie side by side, with independent noise.
template <class Out, class Real, bool kMirrored>
class Strip {
 public:
  using Down = TileDown<Real>;
  static constexpr u64 kBlocks = Down::kBlocks, kColumns = 2 * Down::template kColumns<kMirrored>;
  // Memory likes to be written in long runs: of many tiles, of which the second-level cache holds what they share.
  static constexpr u64 kMostRows = 16 * kBlocks;

  Strip(const Draw& call, const Window& window) : call_(call), window_(window), blocks_(call, window), tile_(call) {}

  u64 blocks() const { return blocks_.count; }

  // At most kMostRows. Where they are `early`, nothing has been drawn in columns that follow, and few rows may leave
  // wrong values there.
  void set_rows(u64 first, u64 count, bool early) {
    first_ = first;
    rows_ = count;
    early_ = early;
    tile_blocks_ = count < kBlocks ? min(kBlocks / count, blocks_.count) : 1;
    read(call_.mu, first, count, mu_);
    read(call_.sigma, first, count, sigma_);
    // For every place of a tile, and to fill the last vector.
    for (u64 k = count; k < tile_blocks_ * count + Down::kPlaces; ++k) {
      mu_[k] = mu_[k - count];
      sigma_[k] = sigma_[k - count];
    }
    if (tile_blocks_ > 1) tile_.set_rows(call_.first_row.value + first, count, tile_blocks_ * count);
  }

  // Blocks of the window, in turn. So many blocks `ahead` is where the next ones go, or if it is 0, after the last one.
  void draw(u64 begin, u64 end, u64 ahead) {
    for (u64 t = begin, part; t < end; t += part) {
      part = min(tile_blocks_, end - t);
      for (u64 r = 0, rows; r < rows_; r += rows) {
        rows = share(rows_ - r, kBlocks);
        if (tile_blocks_ > 1) {
          tile_.draw_words(blocks_.first + t, part * rows);
        } else {
          tile_.draw_words_of_one(blocks_.first + t, call_.first_row.value + first_ + r, rows);
        }
        put(t, part, r, rows, ahead);
      }
    }
  }

 private:
  // The words of some blocks and rows to memory.
  void put(u64 t, u64 part, u64 r, u64 rows, u64 ahead) {
    const Blocks::Run run = blocks_.run(t, part);
    const u64 column = window_.first_column + run.start, bytes = rows * sizeof(Out);
    const i64 stride = call_.column_stride;
    char* at = address(call_, first_ + r, column);
    const char* next = at + static_cast<i64>(ahead * kColumns) * stride;
    if (ahead == 0) next = r + rows < rows_ ? at + bytes : address(call_, first_, column + run.count);
    if (rows >= Down::kPlaces && run.count == kColumns * part) {
      tile_.set_runs(rows, part, static_cast<i64>(kColumns) * stride, sizeof(Out));
      tile_.template draw_runs<Out, kMirrored>(at, stride, {next, 1, stride}, mu_ + r, sigma_ + r);
      return;
    }
    // Short rows share vectors, and not every column may be the window's: to memory in a second step.
    constexpr u64 kPitch = kBlocks * sizeof(Out);
    tile_.set_runs(Down::whole_vectors(part * rows), 1, 0, sizeof(Out));
    if (stride != static_cast<i64>(bytes)) next = columns_;
    tile_.template draw_runs<Out, kMirrored>(columns_, kPitch, {next, kColumns, Down::kPlaces * sizeof(Out)}, mu_ + r,
                                             sigma_ + r);
    const u64 spare = window_.columns() - run.start - run.count;
    const bool close = early_ && stride == static_cast<i64>(window_.rows() * sizeof(Out));
    copy_columns<kColumns, kPitch>(columns_, bytes, run.shift, run.count, spare, at, stride, close);
  }

  const Draw& call_;
  const Window& window_;
  const Blocks blocks_;
  u64 first_ = 0, rows_ = 0, tile_blocks_ = 0;
  bool early_ = false;
  Down tile_;
  Real mu_[kMostRows + Down::kPlaces], sigma_[kMostRows + Down::kPlaces];
  alignas(64) char columns_[kColumns * kBlocks * sizeof(Out) + 64];
};

// Independent noise where rows lie side by side.
template <class Out, class Real, bool kMirrored>
__attribute__((noinline)) void draw_down(const Draw& call, const Window& window) {
  using Rows = Strip<Out, Real, kMirrored>;
  Rows filling(call, window), others(call, window);
  for (u64 top = window.first_row, rows; top < window.last_row; top += rows) {
    rows = share(window.last_row - top, Rows::kMostRows);
    const u64 most = Rows::Down::filling(rows), blocks = filling.blocks();
    const bool both = most > 0 && most < rows, all = rows == window.rows();
    if (most > 0) filling.set_rows(top, most, all && !both);
    if (most < rows) others.set_rows(top + most, rows - most, all);
    // Both in turn, the others first, for as many blocks as a first-level cache has room for.
    const u64 some = both ? 16384 / (Rows::kColumns * rows * sizeof(Out)) + 1 : blocks;
    for (u64 b = 0; b < blocks; b += some) {
      const u64 end = min(b + some, blocks), ahead = both ? some : 0;
      if (most < rows) others.draw(b, end, ahead);
      if (most > 0) filling.draw(b, end, ahead);
    }
  }
}

// As many places as a vector of mu and sigma has, from noise to memory.
template <u64 kWidth, class Out, class Real>
MULTISAMPLE_FUNCTION void put_vector(char* at, Real noise, const Real* mu, const Real* sigma) {
  Out x[kWidth];
  for (u64 k = 0; k < kWidth; ++k) x[k] = narrow<Out>(fma_rn(sigma[k], noise, mu[k]));
  std::memcpy(at, x, sizeof x);
}

// Columns of at most kWidth rows, one after the other, to memory of which only `room` bytes may be written to: all or
// most of them, and how many. What is written beyond a column, the next one overwrites. There are kWidth of mu and
// sigma.
template <u64 kWidth, class Real>
u64 scale_short_columns(const Real* noise, u64 count, char* at, u64 room, u64 rows, const Real* mu, const Real* sigma) {
  if constexpr (kWidth > 4) {
    if (rows <= kWidth / 2) return scale_short_columns<kWidth / 2>(noise, count, at, room, rows, mu, sigma);
  }
  const u64 bytes = rows * sizeof(Real), width = kWidth * sizeof(Real);
  const u64 all = room < width ? 0 : min(count, (room - width) / bytes + 1);
  Real m[kWidth], s[kWidth];
  for (u64 k = 0; k < kWidth; ++k) {
    m[k] = mu[k];
    s[k] = sigma[k];
  }
  for (u64 c = 0; c < all; ++c, at += bytes) put_vector<kWidth, Real>(at, noise[c], m, s);
  return all;
}

// Columns of shared noise where rows lie side by side, for some of them: of mu and sigma there are 32 at least.
template <class Out, class Real>
void scale_columns(const Real* noise, u64 count, char* at, i64 stride, u64 rows, const Real* mu, const Real* sigma) {
  constexpr u64 kWidth = 64 / sizeof(Out);
  static_assert(kWidth <= 32, "");
  const i64 bytes = static_cast<i64>(rows * sizeof(Out));
  u64 c = 0;
  if (rows >= kWidth) {
    // Four at once, because mu and sigma of many rows come from the second-level cache each time. The processor is told
    // of what comes 2 KiB later in each, or so far into the column that follows the four.
    constexpr i64 kAhead = 2048;
    for (; c + 4 <= count; c += 4, at += 4 * stride) {
      const Real z0 = noise[c], z1 = noise[c + 1], z2 = noise[c + 2], z3 = noise[c + 3];
      for (u64 next = 0; next < rows; next += kWidth) {
        const u64 start = min(next, rows - kWidth);
        const i64 offset = static_cast<i64>(start * sizeof(Out));
        const i64 ahead = offset + kAhead < bytes ? kAhead : 4 * stride - bytes + kAhead;
        char* to = at + offset;
        const auto put = [&](Real noise_of_column) {
          __builtin_prefetch(to + ahead, 1);
          put_vector<kWidth, Out>(to, noise_of_column, mu + start, sigma + start);
          to += stride;
        };
        put(z0);
        put(z1);
        put(z2);
        put(z3);
      }
    }
  } else if (stride == bytes) {
    if constexpr (sizeof(Out) == sizeof(Real)) {
      c = scale_short_columns<kWidth>(noise, count, at, count * rows * sizeof(Real), rows, mu, sigma);
      at += static_cast<i64>(c) * stride;
    } else {
      // To narrow many normals at once is worth a detour.
      constexpr u64 kNormals = 1024;
      Real x[kNormals + kWidth];
      for (u64 n; c < count; c += n, at += static_cast<i64>(n) * stride) {
        n = min(count - c, kNormals / rows);
        scale_short_columns<kWidth>(noise + c, n, reinterpret_cast<char*>(x), sizeof x, rows, mu, sigma);
        put_run<Out>(at, n * rows, [&](u64 k) { return x[k]; });
      }
    }
  }
  for (; c < count; ++c, at += stride) {
    const Real of_column = noise[c];
    put_run<Out>(at, rows, [&](u64 k) { return fma_rn(sigma[k], of_column, mu[k]); });
  }
}

// One row of noise for all rows of the window.
template <class Out, class Real, bool kMirrored>
__attribute__((noinline)) void draw_shared(const Draw& call, const Window& window) {
  constexpr u64 kBlocks = Tile<Real>::kBlocks, kBatch = 64 * kBlocks;
  // Memory likes to be written in long runs, and the second-level cache still has room.
  constexpr u64 kNoise = 64 * kBlocks;
  Tile<Real> tile(call);
  alignas(64) Real noise[kNoise];
  Real mu[kBatch], sigma[kBatch];
  const Blocks blocks(call, window);
  const bool down = runs_down(call, window.rows());
  const u64 width = kNoise / blocks.columns;
  for (u64 t = 0; t < blocks.count; t += width) {
    const u64 last = min(t + width, blocks.count);
    for (u64 b = t; b < last; b += kBlocks) {
      const u64 part = min(kBlocks, last - b);
      tile.set_columns(blocks.first + b, part, 1);
      tile.draw_words(0, part, 1);
      tile.template make_noise<kMirrored>(part, noise + blocks.columns * (b - t));
    }
    const Blocks::Run run = blocks.run(t, last - t);
    const Real* z = noise + run.shift;
    for (u64 r = window.first_row; r < window.last_row; r += kBatch) {
      const u64 rows = min(kBatch, window.last_row - r);
      read(call.mu, r, rows, mu);
      read(call.sigma, r, rows, sigma);
      char* at = address(call, r, window.first_column + run.start);
      if (down) {
        for (u64 k = rows; k < 32; ++k) mu[k] = sigma[k] = 0;
        scale_columns<Out>(z, run.count, at, call.column_stride, rows, mu, sigma);
      } else {
        for (u64 k = 0; k < rows; ++k, at += call.row_stride) {
          scale_run<Out>(z, run.count, at, call.column_stride, mu[k], sigma[k]);
        }
      }
    }
  }
}

template <class Out, class Real, bool kMirrored>
void draw(const Draw& call, const Window& window) {
  if (call.common_noise) {
    draw_shared<Out, Real, kMirrored>(call, window);
  } else if (runs_down(call, window.rows())) {
    draw_down<Out, Real, kMirrored>(call, window);
  } else {
    draw_independent<Out, Real, kMirrored>(call, window);
  }
}

template <class Out, class Real>
void draw(const Draw& call, const Window& window) {
  if (call.antithetic) {
    draw<Out, Real, true>(call, window);
  } else {
    draw<Out, Real, false>(call, window);
  }
}

// IEEE 754's own rounding and subnormals, whatever the thread has set (torch.set_flush_denormal sets it for one).
class DefaultFloatingPoint {
 public:
  DefaultFloatingPoint() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatingPoint() { std::fesetenv(&saved_); }
  DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
  DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;

 private:
  std::fenv_t saved_;
};

}  // namespace cpu

// Rows [first_row, last_row) and columns [first_column, last_column) of what the call describes, at least one of each.
// Everything it names is in host memory, at any address and stride; words come by value.
inline void draw_window(const Draw& call, u64 first_row, u64 last_row, u64 first_column, u64 last_column) {
  const cpu::DefaultFloatingPoint guard;
  const cpu::Window window{first_row, last_row, first_column, last_column};
  switch (call.type) {
    case kFloat16: cpu::draw<float16, float>(call, window); break;
    case kBFloat16: cpu::draw<bfloat16, float>(call, window); break;
    case kFloat32: cpu::draw<float, float>(call, window); break;
    default: cpu::draw<double, double>(call, window);
  }
}

namespace cpu {

template <class Real>
bool is_finite_from(const Vector& vector, u64 count, Real least) {
  constexpr u64 kChunk = 256;
  constexpr Real most = std::numeric_limits<Real>::max();
  Real x[kChunk];
  for (u64 first = 0; first < count; first += kChunk) {
    const u64 length = count - first < kChunk ? count - first : kChunk;
    read(vector, first, length, x);
    bool valid = true;
    for (u64 k = 0; k < length; ++k) valid &= x[k] >= least && x[k] <= most;
    if (!valid) return false;
  }
  return true;
}

template <class Real>
bool has_valid_inputs(const Draw& call) {
  return is_finite_from<Real>(call.mu, call.rows, -std::numeric_limits<Real>::max()) &&
         is_finite_from<Real>(call.sigma, call.rows, 0);
}

// Whether all of mu is finite, and all of sigma finite and not negative, in the computing type.
inline bool has_valid_inputs(const Draw& call) {
  const DefaultFloatingPoint guard;
  return call.type == kFloat64 ? has_valid_inputs<double>(call) : has_valid_inputs<float>(call);
}

}  // namespace cpu
}  // namespace multisample
