// Random words: a pure function of seed, offset and position, so that any part of a matrix can be drawn anywhere.
//
// Philox4x32 with ten rounds (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11,
// doi:10.1145/2063384.2063405), with the keys and counters of STREAM.md: counter (g, i, o0, o1) gives columns 4 g to
// 4 g + 3 of row i. A round mixes only two of the four words, so much of the first three rounds depends on the columns
// alone, or on the row alone. A kernel that draws many rows of the same columns computes the column part once.
#pragma once

#include "arithmetic.h"

namespace multisample {

constexpr u32 kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
constexpr u32 kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
// "multsamp": separates this stream from those of other libraries with the same seed.
constexpr u32 kKey0 = 0x6D756C74u, kKey1 = 0x73616D70u;
// Key of the second block of words, which refines float32 to float64.
constexpr u32 kFloat64Key = 0x66363474u;

struct Words {
  u32 w0, w1, w2, w3;
};

struct RoundKeys {
  u32 k0[10], k1[10];
};

// Round keys of a seed. key1 is kKey1, or kKey1 ^ kFloat64Key for the block that refines float32 to float64.
MULTISAMPLE_HOST_FUNCTION RoundKeys round_keys(u64 seed, u32 key1) {
  const u32 a = static_cast<u32>(seed) ^ kKey0, b = static_cast<u32>(seed >> 32) ^ key1;
  const u32 u = kWeyl0, v = kWeyl1;
  return {{a, a + u, a + 2 * u, a + 3 * u, a + 4 * u, a + 5 * u, a + 6 * u, a + 7 * u, a + 8 * u, a + 9 * u},
          {b, b + v, b + 2 * v, b + 3 * v, b + 4 * v, b + 5 * v, b + 6 * v, b + 7 * v, b + 8 * v, b + 9 * v}};
}

MULTISAMPLE_HOST_FUNCTION u32 high(u64 x) { return static_cast<u32>(x >> 32); }
MULTISAMPLE_HOST_FUNCTION u32 low(u64 x) { return static_cast<u32>(x); }
MULTISAMPLE_HOST_FUNCTION u64 wide_mul(u32 a, u32 b) { return static_cast<u64>(a) * b; }

// The terms of rounds 1 to 3 that depend on the columns alone.
struct ColumnPart {
  u32 into_c2_of_round_2, into_c0_of_round_3, into_c2_of_round_3, c3_of_round_3;
};

// The terms of rounds 1 and 2 that depend on the row alone. They are the same for both values of key1.
struct RowPart {
  u32 into_c2_of_round_2, c3_of_round_2;
};

MULTISAMPLE_HOST_FUNCTION RowPart row_part(u32 i, u32 o0, const RoundKeys& keys) {
  u64 p = wide_mul(kMultiplier0, high(wide_mul(kMultiplier1, o0)) ^ i ^ keys.k0[0]);
  return {high(p), low(p)};
}

MULTISAMPLE_HOST_FUNCTION ColumnPart column_part(u32 g, u32 o0, u32 o1, const RoundKeys& keys) {
  u64 p0 = wide_mul(kMultiplier0, g);
  u64 p1 = wide_mul(kMultiplier1, high(p0) ^ o1 ^ keys.k1[0]);
  u64 q0 = wide_mul(kMultiplier0, high(p1) ^ low(wide_mul(kMultiplier1, o0)) ^ keys.k0[1]);
  return {low(p0) ^ keys.k1[1], low(p1) ^ keys.k0[2], high(q0) ^ keys.k1[2], low(q0)};
}

MULTISAMPLE_HOST_FUNCTION Words words(const ColumnPart& column, const RowPart& row, const RoundKeys& keys) {
  u64 p1 = wide_mul(kMultiplier1, column.into_c2_of_round_2 ^ row.into_c2_of_round_2);
  u32 c0 = high(p1) ^ column.into_c0_of_round_3, c1 = low(p1);
  u32 c2 = column.into_c2_of_round_3 ^ row.c3_of_round_2, c3 = column.c3_of_round_3;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (u32 r = 3; r < 10; ++r) {
    u64 q0 = wide_mul(kMultiplier0, c0), q1 = wide_mul(kMultiplier1, c2);
    c0 = high(q1) ^ c1 ^ keys.k0[r];
    c1 = low(q1);
    c2 = high(q0) ^ c3 ^ keys.k1[r];
    c3 = low(q0);
  }
  return {c0, c1, c2, c3};
}

}  // namespace multisample
