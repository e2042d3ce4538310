// The kernel for the CPU: draws any window of a call on one thread, x[i, j] = mu[i] + sigma[i] z[i, j].
//
// Compilers vectorise loops over arrays, and little else. So the kernel works on tiles (cpu/tile.h): some columns of
// one row, or of several short rows. Tiles below each other have the same columns, and share the column part of their
// words. In layout "nd" a tile is blocks of many rows, and a vector runs down the rows. The kernel then prefetches:
// hardware misses these scattered writes.
#pragma once

#include <limits>

#include "cpu/floating_point.h"
#include "cpu/stores.h"
#include "cpu/tile.h"

namespace multisample {
namespace cpu {

// A part of the call's matrix.
struct Window {
  u64 first_row, last_row, first_column, last_column;

  u64 rows() const { return last_row - first_row; }
  u64 columns() const { return last_column - first_column; }
};

inline char* address(const Launch& call, u64 row, u64 column) {
  return static_cast<char*>(call.matrix) + static_cast<i64>(row) * call.row_stride +
         static_cast<i64>(column) * call.column_stride;
}

// Columns of one block of four normals.
inline u64 block_columns(const Launch& call) { return call.antithetic ? 8 : 4; }

// Whether a SIMD vector holds elements of several rows: more than one row, adjacent in memory.
inline bool runs_down(const Launch& call, u64 rows) { return call.row_stride == element_size(call.type) && rows > 1; }

// The blocks that have columns in a window.
struct Blocks {
  u64 columns, skip, first, count;  // `skip` columns of the first block are before the window

  // Columns of the window, from `start` on. `shift` is the position of the first one in its block.
  struct Run {
    u64 start, count, shift;
  };

  Blocks(const Launch& call, const Window& window) : columns(block_columns(call)), window_columns_(window.columns()) {
    const u64 column = call.first_column + window.first_column;
    first = column / columns;
    skip = column % columns;
    count = ceil_div(skip + window_columns_, columns);
  }

  // The columns of the `n` blocks from the window's block `k` on.
  Run run(u64 k, u64 n) const {
    const u64 start = k == 0 ? 0 : columns * k - skip;
    return {start, min(window_columns_, columns * (k + n) - skip) - start, k == 0 ? skip : 0};
  }

 private:
  u64 window_columns_;
};

template <class Out, class Real, bool kMirrored>
__attribute__((noinline)) void draw_independent(const Launch& call, const Window& window) {
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
      read(mu_of(call), r, rows, mu);
      read(sigma_of(call), r, rows, sigma);
      tile.draw_words(call.first_row + r, part, rows);
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

// The next share of `left`: at most `most`, and such that the last share is not small.
inline u64 share(u64 left, u64 most) { return left <= most ? left : min(most, ceil_div(left, 2)); }

// Some adjacent rows of a window, with independent noise.
template <class Out, class Real, bool kMirrored>
class Strip {
 public:
  using Down = TileDown<Real>;
  static constexpr u64 kBlocks = Down::kBlocks, kColumns = 2 * Down::template kColumns<kMirrored>;
  // Long runs of memory are written faster, but what the tiles share must fit in the second-level cache.
  static constexpr u64 kMostRows = 16 * kBlocks;

  Strip(const Launch& call, const Window& window) : call_(call), window_(window), blocks_(call, window), tile_(call) {}

  u64 blocks() const { return blocks_.count; }

  // Sets at most kMostRows rows. `early` says that the copy of a short column may overwrite the elements after it,
  // which are drawn later.
  void set_rows(u64 first, u64 count, bool early) {
    first_ = first;
    rows_ = count;
    early_ = early;
    tile_blocks_ = count < kBlocks ? min(kBlocks / count, blocks_.count) : 1;
    read(mu_of(call_), first, count, mu_);
    read(sigma_of(call_), first, count, sigma_);
    // mu and sigma repeat for every block of a tile. Further repeats pad the last vector.
    for (u64 k = count; k < tile_blocks_ * count + Down::kPlaces; ++k) {
      mu_[k] = mu_[k - count];
      sigma_[k] = sigma_[k - count];
    }
    if (tile_blocks_ > 1) tile_.set_rows(call_.first_row + first, count, tile_blocks_ * count);
  }

  // Draws blocks `begin` to `end` of the window. Prefetches the output that is `ahead` blocks further on; if `ahead` is
  // 0, that of the next tile.
  void draw(u64 begin, u64 end, u64 ahead) {
    for (u64 t = begin, part; t < end; t += part) {
      part = min(tile_blocks_, end - t);
      for (u64 r = 0, rows; r < rows_; r += rows) {
        rows = share(rows_ - r, kBlocks);
        if (tile_blocks_ > 1) {
          tile_.draw_words(blocks_.first + t, part * rows);
        } else {
          tile_.draw_words_of_one(blocks_.first + t, call_.first_row + first_ + r, rows);
        }
        put(t, part, r, rows, ahead);
      }
    }
  }

 private:
  // Stores some blocks and rows, from the words of the tile.
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
    // Here a vector has rows of several blocks, or a block has columns outside the window: columns go through a buffer.
    constexpr u64 kPitch = kBlocks * sizeof(Out);
    tile_.set_runs(Down::whole_vectors(part * rows), 1, 0, sizeof(Out));
    if (stride != static_cast<i64>(bytes)) next = columns_;
    // Few columns may need only one pair of normals of their block.
    constexpr u64 kOf = kColumns / 2;
    const u64 first_pair = part == 1 ? run.shift / kOf : 0,
              last_pair = part == 1 ? ceil_div(run.shift + run.count, kOf) : 2;
    tile_.template draw_runs<Out, kMirrored>(columns_, kPitch, {next, kColumns, Down::kPlaces * sizeof(Out)}, mu_ + r,
                                             sigma_ + r, first_pair, last_pair);
    const u64 spare = window_.columns() - run.start - run.count;
    const bool close = early_ && stride == static_cast<i64>(window_.rows() * sizeof(Out));
    copy_columns<kColumns, kPitch>(columns_, bytes, run.shift, run.count, spare, at, stride, close);
  }

  const Launch& call_;
  const Window& window_;
  const Blocks blocks_;
  u64 first_ = 0, rows_ = 0, tile_blocks_ = 0;
  bool early_ = false;
  Down tile_;
  Real mu_[kMostRows + Down::kPlaces], sigma_[kMostRows + Down::kPlaces];
  alignas(64) char columns_[kColumns * kBlocks * sizeof(Out) + 64];
};

// Independent noise where rows are adjacent in memory.
template <class Out, class Real, bool kMirrored>
__attribute__((noinline)) void draw_down(const Launch& call, const Window& window) {
  using Rows = Strip<Out, Real, kMirrored>;
  Rows whole(call, window), rest(call, window);
  for (u64 top = window.first_row, rows; top < window.last_row; top += rows) {
    rows = share(window.last_row - top, Rows::kMostRows);
    const u64 most = Rows::Down::rows_in_vectors(rows), blocks = whole.blocks();
    const bool both = most > 0 && most < rows, all = rows == window.rows();
    if (most > 0) whole.set_rows(top, most, all && !both);
    if (most < rows) rest.set_rows(top + most, rows - most, all);
    // Alternates between `rest` and `whole`. Each draws as many blocks at a time as fit into the first-level cache.
    const u64 some = both ? 16384 / (Rows::kColumns * rows * sizeof(Out)) + 1 : blocks;
    for (u64 b = 0; b < blocks; b += some) {
      const u64 end = min(b + some, blocks), ahead = both ? some : 0;
      if (most < rows) rest.draw(b, end, ahead);
      if (most > 0) whole.draw(b, end, ahead);
    }
  }
}

// Shared noise: one row of noise for all rows of the window.
template <class Out, class Real, bool kMirrored>
__attribute__((noinline)) void draw_shared(const Launch& call, const Window& window) {
  constexpr u64 kBlocks = Tile<Real>::kBlocks, kChunk = 64 * kBlocks;
  // Long runs of memory are written faster, and the second-level cache has room for them.
  constexpr u64 kNoise = 64 * kBlocks;
  Tile<Real> tile(call);
  alignas(64) Real noise[kNoise];
  Real mu[kChunk], sigma[kChunk];
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
    for (u64 r = window.first_row; r < window.last_row; r += kChunk) {
      const u64 rows = min(kChunk, window.last_row - r);
      read(mu_of(call), r, rows, mu);
      read(sigma_of(call), r, rows, sigma);
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
void draw(const Launch& call, const Window& window) {
  if (call.shared_noise) {
    draw_shared<Out, Real, kMirrored>(call, window);
  } else if (runs_down(call, window.rows())) {
    draw_down<Out, Real, kMirrored>(call, window);
  } else {
    draw_independent<Out, Real, kMirrored>(call, window);
  }
}

template <class Out, class Real>
void draw(const Launch& call, const Window& window) {
  if (call.antithetic) {
    draw<Out, Real, true>(call, window);
  } else {
    draw<Out, Real, false>(call, window);
  }
}

}  // namespace cpu

// Draws rows [first_row, last_row) and columns [first_column, last_column) of a call, at least one of each. All its
// memory is host memory, at any address and stride. Seed, offset, first row and first column are values, not addresses.
template <class Out>
void draw_window(const Launch& call, u64 first_row, u64 last_row, u64 first_column, u64 last_column) {
  const cpu::DefaultFloatingPoint guard;
  const cpu::Window window{first_row, last_row, first_column, last_column};
  cpu::draw<Out, typename Computing<Out>::Type>(call, window);
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
    // An integer of the size of Real: compilers do not vectorise a sum of bools.
    typename BitsOf<Real>::Radius invalid = 0;
    for (u64 k = 0; k < length; ++k) invalid |= x[k] >= least && x[k] <= most ? 0 : 1;
    if (invalid != 0) return false;
  }
  return true;
}

template <class Real>
bool has_valid_inputs(const Launch& call) {
  return is_finite_from<Real>(mu_of(call), call.rows, -std::numeric_limits<Real>::max()) &&
         is_finite_from<Real>(sigma_of(call), call.rows, 0) &&
         (call.operation != kMoments ||
          is_finite_from<Real>(weights_of(call), call.columns, -std::numeric_limits<Real>::max()));
}

// Whether all of mu, and of the weights of moments, is finite, and all of sigma finite and not negative, in the
// computing type.
inline bool has_valid_inputs(const Launch& call) {
  const DefaultFloatingPoint guard;
  for (u64 b = 0; b < (call.batch == 0 ? 1 : call.batch); ++b) {
    const Launch one = matrix_of_batch(call, b);
    if (!(call.type == kFloat64 ? has_valid_inputs<double>(one) : has_valid_inputs<float>(one))) return false;
  }
  return true;
}

}  // namespace cpu
}  // namespace multisample
