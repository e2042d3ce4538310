// The kernel for the CPU: draws any window of a call on one thread, x[i, j] = mu[i] + sigma[i] z[i, j].
//
// Compilers make full vectors of a loop over an array and of little else. So the work goes by the tile, some columns of
// a row or of several short ones: the words of a tile are made in one loop, on vectors spelled out because compilers
// miss the instruction that multiplies words; normals are made of them in another, and go straight to memory where they
// lie side by side. Tiles below each other have the same columns: what the words owe to those is made once.
#pragma once

#include <cfenv>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "call.h"
#include "narrow.h"
#include "normals.h"

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

// Blocks, each of four columns, of one row or of some rows below each other.
template <class Real>
struct Tile {
  // So many that all of it is well inside a first-level cache.
  static constexpr u64 kBlocks = 1024 / sizeof(Real);
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

  explicit Tile(const SampleCall& call)
      : o0(multisample::low(call.offset)),
        o1(multisample::high(call.offset)),
        keys(round_keys(call.seed, kKey1)),
        fine_keys(round_keys(call.seed, kKey1 ^ kFloat64Key)) {}

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

  void make_noise(u64 blocks, Real* noise) const {
    const u64 pairs = 2 * rounded_up(blocks);
    for (u64 start = 0; start < pairs; start += kPairs) {
      for (u64 k = start; k < start + kPairs; ++k) {
        const Pair<Real> z = normals(k);
        noise[2 * k] = z.first;
        noise[2 * k + 1] = z.second;
      }
    }
  }

  // Whether that many normals, at least one, from this one of the tile on fill a vector.
  static bool is_long(u64 first, u64 count) { return (count - first % 2) / 2 >= kPairs; }

  // From words to memory that lies side by side, for as many normals as `is_long` says.
  template <class Out>
  MULTISAMPLE_FUNCTION void draw_run(u64 first, u64 count, char* at, Real mu, Real sigma) const {
    const u64 last = first + count;
    Unaligned<Out>* to = reinterpret_cast<Unaligned<Out>*>(at);
    if (first % 2 != 0) (to++)->x = narrow<Out>(fma_rn(sigma, normals(first / 2).second, mu));
    const u64 begin = (first + 1) / 2, end = last / 2;
    for (u64 next = begin; next < end; next += kPairs) {
      // The last vector ends where the run does: to write some normals twice costs less than a loop for the rest.
      const u64 start = next + kPairs <= end ? next : end - kPairs;
      Unaligned<Out>* vector = to + 2 * (start - begin);
      if constexpr (sizeof(Out) == sizeof(Real)) {
        for (u64 k = 0; k < kPairs; ++k) {
          const Pair<Real> z = normals(start + k);
          vector[2 * k].x = fma_rn(sigma, z.first, mu);
          vector[2 * k + 1].x = fma_rn(sigma, z.second, mu);
        }
      } else {
        Real x[2 * kPairs];
        for (u64 k = 0; k < kPairs; ++k) {
          const Pair<Real> z = normals(start + k);
          x[2 * k] = fma_rn(sigma, z.first, mu);
          x[2 * k + 1] = fma_rn(sigma, z.second, mu);
        }
        for (u64 k = 0; k < 2 * kPairs; ++k) vector[k].x = narrow<Out>(x[k]);
      }
    }
    if (last % 2 != 0) to[last - 1 - 2 * begin].x = narrow<Out>(fma_rn(sigma, normals(end).first, mu));
  }
};

// From noise to memory of any stride.
template <class Out, class Real>
MULTISAMPLE_FUNCTION void scale_run(const Real* noise, u64 count, char* at, i64 stride, Real mu, Real sigma) {
  constexpr u64 kSpan = 64 / sizeof(Out);
  if (stride != sizeof(Out)) {
    for (u64 k = 0; k < count; ++k) {
      Unaligned<Out>* to = reinterpret_cast<Unaligned<Out>*>(at + static_cast<i64>(k) * stride);
      to->x = narrow<Out>(fma_rn(sigma, noise[k], mu));
    }
    return;
  }
  Unaligned<Out>* to = reinterpret_cast<Unaligned<Out>*>(at);
  if (count < kSpan) {
    for (u64 k = 0; k < count; ++k) to[k].x = narrow<Out>(fma_rn(sigma, noise[k], mu));
    return;
  }
  for (u64 next = 0; next < count; next += kSpan) {
    const u64 start = next + kSpan <= count ? next : count - kSpan;
    for (u64 k = start; k < start + kSpan; ++k) to[k].x = narrow<Out>(fma_rn(sigma, noise[k], mu));
  }
}

MULTISAMPLE_FUNCTION u64 min(u64 a, u64 b) { return a < b ? a : b; }

// Part of the stream and where it goes.
struct Window {
  u64 first_row, last_row, first_column, last_column;

  u64 rows() const { return last_row - first_row; }
  u64 columns() const { return last_column - first_column; }
};

inline char* address(const SampleCall& call, u64 row, u64 column) {
  return static_cast<char*>(call.out) + static_cast<i64>(row) * call.row_stride +
         static_cast<i64>(column) * call.column_stride;
}

template <class Out, class Real>
__attribute__((noinline)) void draw_independent(const SampleCall& call, const Window& window) {
  constexpr u64 kBlocks = Tile<Real>::kBlocks;
  Tile<Real> tile(call);
  alignas(64) Real noise[4 * kBlocks];
  Real mu[kBlocks], sigma[kBlocks];
  const u64 column = call.first_column + window.first_column, skip = column % 4;
  const u64 row_blocks = (skip + window.columns() + 3) / 4;
  const u64 tile_rows = row_blocks > kBlocks ? 1 : min(kBlocks / row_blocks, window.rows());
  // Long rows are divided evenly.
  const u64 tiles = (row_blocks + kBlocks - 1) / kBlocks;
  const u64 width = tiles == 1 ? row_blocks : Tile<Real>::rounded_up((row_blocks + tiles - 1) / tiles);
  for (u64 t = 0; t < row_blocks; t += width) {
    const u64 blocks = min(width, row_blocks - t);
    // Columns of the window that the tile has, and how far in it they begin.
    const u64 start = t == 0 ? 0 : 4 * t - skip, shift = t == 0 ? skip : 0;
    const u64 count = min(window.columns(), 4 * (t + blocks) - skip) - start;
    const bool direct = call.column_stride == sizeof(Out) && Tile<Real>::is_long(shift, count);
    tile.set_columns(column / 4 + t, blocks, tile_rows);
    for (u64 r = window.first_row; r < window.last_row; r += tile_rows) {
      const u64 rows = min(tile_rows, window.last_row - r);
      read(call.mu, r, rows, mu);
      read(call.sigma, r, rows, sigma);
      tile.draw_words(call.first_row + r, blocks, rows);
      char* at = address(call, r, window.first_column + start);
      u64 place = shift;
      if (direct) {
        for (u64 k = 0; k < rows; ++k, at += call.row_stride, place += 4 * blocks) {
          tile.template draw_run<Out>(place, count, at, mu[k], sigma[k]);
        }
      } else {
        tile.make_noise(blocks * rows, noise);
        for (u64 k = 0; k < rows; ++k, at += call.row_stride, place += 4 * blocks) {
          scale_run<Out>(noise + place, count, at, call.column_stride, mu[k], sigma[k]);
        }
      }
    }
  }
}

// One row of noise for all rows of the window.
template <class Out, class Real>
__attribute__((noinline)) void draw_shared(const SampleCall& call, const Window& window) {
  constexpr u64 kBlocks = Tile<Real>::kBlocks, kBatch = 64;
  // Memory likes to be written in long runs, and the second-level cache still has room.
  constexpr u64 kNoise = 16 * kBlocks;
  Tile<Real> tile(call);
  alignas(64) Real noise[4 * kNoise];
  Real mu[kBatch], sigma[kBatch];
  const u64 column = call.first_column + window.first_column, skip = column % 4;
  const u64 row_blocks = (skip + window.columns() + 3) / 4;
  for (u64 t = 0; t < row_blocks; t += kNoise) {
    const u64 blocks = min(kNoise, row_blocks - t);
    for (u64 b = 0; b < blocks; b += kBlocks) {
      const u64 part = min(kBlocks, blocks - b);
      tile.set_columns(column / 4 + t + b, part, 1);
      tile.draw_words(0, part, 1);
      tile.make_noise(part, noise + 4 * b);
    }
    const u64 start = t == 0 ? 0 : 4 * t - skip, shift = t == 0 ? skip : 0;
    const u64 count = min(window.columns(), 4 * (t + blocks) - skip) - start;
    for (u64 r = window.first_row; r < window.last_row; r += kBatch) {
      const u64 rows = min(kBatch, window.last_row - r);
      read(call.mu, r, rows, mu);
      read(call.sigma, r, rows, sigma);
      char* at = address(call, r, window.first_column + start);
      for (u64 k = 0; k < rows; ++k, at += call.row_stride) {
        scale_run<Out>(noise + shift, count, at, call.column_stride, mu[k], sigma[k]);
      }
    }
  }
}

template <class Out, class Real>
void draw(const SampleCall& call, const Window& window) {
  if (call.shared) {
    draw_shared<Out, Real>(call, window);
  } else {
    draw_independent<Out, Real>(call, window);
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
// Everything it names is in host memory, at any address and stride.
inline void draw_window(const SampleCall& call, u64 first_row, u64 last_row, u64 first_column, u64 last_column) {
  const cpu::DefaultFloatingPoint guard;
  const cpu::Window window{first_row, last_row, first_column, last_column};
  switch (call.type) {
    case kFloat16: cpu::draw<float16, float>(call, window); break;
    case kBFloat16: cpu::draw<bfloat16, float>(call, window); break;
    case kFloat32: cpu::draw<float, float>(call, window); break;
    default: cpu::draw<double, double>(call, window);
  }
}

}  // namespace multisample
