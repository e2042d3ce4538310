// Scales noise and stores it: along rows at any stride, and down columns where rows are adjacent.
#pragma once

#include <cstring>

#include "cpu/elements.h"

namespace multisample {
namespace cpu {

template <u64 kColumns, u64 kPitch, u64 kBytes>
MULTISAMPLE_FUNCTION void copy_block(const char* from, char* to, i64 stride) {
  for (u64 c = 0; c < kColumns; ++c, from += kPitch, to += stride) std::memcpy(to, from, kBytes);
}

// Copies `count` columns of blocks, from column `first` on. Each column has `bytes` bytes, and the columns of a block
// are kPitch bytes apart in the source. `spare` more columns follow in the output. With `close`, a short column may
// overwrite bytes of later columns.
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
  // Later columns that the copy of a short column may overwrite.
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

// Stores value(k) for each k < count to contiguous memory.
template <class Out, class Value>
MULTISAMPLE_FUNCTION void put_run(char* at, u64 count, Value value) {
  constexpr u64 kVector = 64 / sizeof(Out);
  Unaligned<Out>* to = reinterpret_cast<Unaligned<Out>*>(at);
  if (count < kVector) {
    for (u64 k = 0; k < count; ++k) to[k].x = narrow<Out>(value(k));
    return;
  }
  const auto put_vector_at = [&](u64 start) {
    for (u64 k = start; k < start + kVector; ++k) to[k].x = narrow<Out>(value(k));
  };
  // All vectors but the first and the last are cache lines, because a store across two lines takes longer.
  put_vector_at(0);
  for (u64 next = (64 - reinterpret_cast<u64>(at) % 64) / sizeof(Out); next < count; next += kVector) {
    put_vector_at(min(next, count - kVector));
  }
}

// Scales noise and stores it at any stride.
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

// Scales one normal by kWidth elements of mu and sigma, and stores the results.
template <u64 kWidth, class Out, class Real>
MULTISAMPLE_FUNCTION void put_vector(char* at, Real noise, const Real* mu, const Real* sigma) {
  Out x[kWidth];
  for (u64 k = 0; k < kWidth; ++k) x[k] = narrow<Out>(fma_rn(sigma[k], noise, mu[k]));
  std::memcpy(at, x, sizeof x);
}

// Stores adjacent columns of at most kWidth rows, and returns their number. Each column is stored as a whole vector;
// the next store overwrites what lies past the end of the column. Stops when less of `room` is left than a vector
// needs. mu and sigma have kWidth elements.
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

// Stores columns of shared noise where rows are adjacent. mu and sigma have at least 32 elements.
template <class Out, class Real>
void scale_columns(const Real* noise, u64 count, char* at, i64 stride, u64 rows, const Real* mu, const Real* sigma) {
  constexpr u64 kWidth = 64 / sizeof(Out);
  static_assert(kWidth <= 32, "");
  const i64 bytes = static_cast<i64>(rows * sizeof(Out));
  u64 c = 0;
  if (rows >= kWidth) {
    // Four columns share each read of mu and sigma, which come from the L2 cache if there are many rows. Prefetches
    // 2 KiB ahead in each column and, near its end, in the column four further on.
    constexpr i64 kAhead = 2048;
    for (; c + 4 <= count; c += 4, at += 4 * stride) {
      const Real z0 = noise[c], z1 = noise[c + 1], z2 = noise[c + 2], z3 = noise[c + 3];
      for (u64 next = 0; next < rows; next += kWidth) {
        const u64 start = min(next, rows - kWidth);
        const i64 displacement = static_cast<i64>(start * sizeof(Out));
        const i64 ahead = displacement + kAhead < bytes ? kAhead : 4 * stride - bytes + kAhead;
        char* to = at + displacement;
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
      // Narrowing many elements at once is faster, in spite of the copy.
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

}  // namespace cpu
}  // namespace multisample
