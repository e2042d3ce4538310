// Weighted moments on the CPU: see launch.h. The groups of columns with a weight other than zero are listed once.
// Their noise is drawn a tile at a time, into a buffer that fits in a cache, and added up.
//
// The list is cut into segments of a fixed length. The order of the sums depends on the number of columns and the
// weights alone, so that any number of threads gives the same bits. A sum in the computing type has at most 16 terms
// before it is added to a float64 sum.
#pragma once

#include <vector>

#include "cpu/gradient_kernel.h"
#include "launch.h"

namespace multisample {

template <class Real>
class MomentParts {
 public:
  MomentParts(const Launch& call, u64 threads)
      : call_(call), rows_(call.shared_noise ? 1 : call.rows), with_second_(call.results > 1) {
    list_groups();
    segments_ = cpu::ceil_div(groups_.size(), kSegment);
    // Partial sums take memory. Only calls of few rows need them, to occupy all threads.
    is_split_ = call.shared_noise || (segments_ > 1 && rows_ < kFewRows);
    columns_ = is_split_ ? segments_ : 1;
    const u64 even = cpu::ceil_div(rows_ * columns_, 4 * threads);
    height_ = even < kLeastRows ? kLeastRows : cpu::min(even, kMostRows);
  }

  u64 count() const { return columns_ * cpu::ceil_div(rows_, height_); }
  // Elements of the array that `sum` and `finish` share.
  u64 partial_sums() const { return is_split_ ? columns_ * rows_ : 0; }

  void sum(u64 k, cpu::Gradients* partial_sums) const {
    const cpu::DefaultFloatingPoint guard;
    const u64 column = k % columns_, row = k / columns_ * height_, end = cpu::min(row + height_, rows_);
    std::vector<cpu::Gradients> totals(end - row);
    if (is_split_) {
      sum_segment(column, row, end, totals.data());
      for (u64 r = row; r < end; ++r) partial_sums[r * columns_ + column] = totals[r - row];
      return;
    }
    std::vector<cpu::Gradients> segment(end - row);
    for (u64 p = 0; p < segments_; ++p) {
      sum_segment(p, row, end, segment.data());
      for (u64 r = 0; r < end - row; ++r) {
        totals[r].mu += segment[r].mu;
        totals[r].sigma += segment[r].sigma;
      }
    }
    put(row, end, [&](u64 r) { return totals[r - row]; });
  }

  // Adds up the partial sums. Called after all parts are summed.
  void finish(const cpu::Gradients* partial_sums) const {
    if (!is_split_) return;
    const cpu::DefaultFloatingPoint guard;
    const auto total = [&](u64 row) {
      cpu::Gradients sum{};
      for (u64 p = 0; p < columns_; ++p) {
        sum.mu += partial_sums[row * columns_ + p].mu;
        sum.sigma += partial_sums[row * columns_ + p].sigma;
      }
      return sum;
    };
    if (call_.shared_noise) {
      const cpu::Gradients common = total(0);
      put(0, call_.rows, [&](u64) { return common; });
    } else {
      put(0, rows_, total);
    }
  }

 private:
  using Tile = cpu::Tile<Real>;
  using Vector = typename cpu::Sums<Real>::Vector;
  static constexpr u64 kSegment = 16 * Tile::kBlocks, kFewRows = 1024, kLeastRows = 16, kMostRows = 4096;

  // Lists the groups with a weight other than zero, padded to whole vectors with weights of zero.
  void list_groups() {
    const u64 width = call_.antithetic ? 8 : 4, first = call_.first_column, skip = first % width;
    const u64 columns = call_.columns, count = cpu::ceil_div(skip + columns, width);
    const cpu::DefaultFloatingPoint guard;
    constexpr u64 kChunk = 4096;
    std::vector<Real> weights(kChunk);
    for (u64 chunk = 0; chunk < count; chunk += kChunk / width) {
      const u64 groups = cpu::min(kChunk / width, count - chunk), before = chunk == 0 ? skip : 0;
      const u64 start = chunk * width + before - skip, end = cpu::min((chunk + groups) * width - skip, columns);
      std::memset(weights.data(), 0, kChunk * sizeof(Real));
      cpu::read(weights_of(call_), start, end - start, weights.data() + before);
      for (u64 g = 0; g < groups; ++g) append(static_cast<u32>(first / width + chunk + g), &weights[g * width]);
    }
    while (groups_.size() % Tile::kRound != 0) {
      groups_.push_back(0);
      first_.resize(first_.size() + 4);
      if (call_.antithetic) second_.resize(first_.size());
    }
  }

  void append(u32 group, const Real* w) {
    const u64 width = call_.antithetic ? 8 : 4;
    bool counts = false;
    for (u64 k = 0; k < width; ++k) counts |= w[k] != 0;
    if (!counts) return;
    groups_.push_back(group);
    for (u64 k = 0; k < width; ++k) weight_ += static_cast<double>(w[k]);
    if (!call_.antithetic) {
      first_.insert(first_.end(), w, w + 4);
      return;
    }
    // Columns k and k + 1 have the normals z and -z.
    for (u64 k = 0; k < 8; k += 2) {
      first_.push_back(w[k] - w[k + 1]);
      second_.push_back(w[k] + w[k + 1]);
    }
  }

  // Sums one segment of the list in rows [row, end).
  void sum_segment(u64 segment, u64 row, u64 end, cpu::Gradients* sums) const {
    const u64 last = cpu::min((segment + 1) * kSegment, groups_.size());
    for (u64 r = row; r < end; ++r) sums[r - row] = {};
    Tile tile(call_);
    for (u64 begin = segment * kSegment; begin < last; begin += Tile::kBlocks) {
      const u64 width = cpu::min(Tile::kBlocks, last - begin);
      // A short list makes a tile of several rows.
      const u64 most = cpu::min(Tile::kBlocks / width, end - row);
      set_columns(tile, begin, width, most);
      for (u64 r = row; r < end; r += most) {
        add_rows(tile, begin, width, r, cpu::min(most, end - r), sums + (r - row));
      }
    }
  }

  void set_columns(Tile& tile, u64 begin, u64 width, u64 rows) const {
    for (u64 k = 0; k < width * rows / cpu::kLanes; ++k) {
      cpu::Lanes block{};
      for (u64 lane = 0; lane < cpu::kLanes; ++lane) block.x[lane] = groups_[begin + (k * cpu::kLanes + lane) % width];
      tile.columns[k] = column_part<cpu::Lanes>(block, tile.o0, tile.o1, tile.keys);
      if (Tile::kFine) tile.fine_columns[k] = column_part<cpu::Lanes>(block, tile.o0, tile.o1, tile.fine_keys);
    }
  }

  void add_rows(Tile& tile, u64 begin, u64 width, u64 row, u64 rows, cpu::Gradients* sums) const {
    alignas(64) Real noise[4 * Tile::kBlocks];
    RowPart parts[Tile::kBlocks / Tile::kRound];
    for (u64 r = 0; r < rows; ++r) {
      const u64 i = call_.shared_noise ? 0 : call_.first_row + row + r;
      parts[r] = row_part(static_cast<u32>(i), tile.o0, tile.keys);
    }
    if (rows == 1) {
      const RowPart part = parts[0];
      tile.draw_words(width, [&](u64) { return part; });
    } else {
      tile.draw_words(width * rows, [&](u64 k) { return parts[k * cpu::kLanes / width]; });
    }
    tile.template make_noise<false>(width * rows, noise);
    const Real* const first = &first_[4 * begin];
    const Real* const second = call_.antithetic ? &second_[4 * begin] : first;
    for (u64 r = 0; r < rows; ++r) {
      const Real* const z = noise + 4 * width * r;
      with_second_ ? add_products<true>(z, first, second, 4 * width, sums[r])
                   : add_products<false>(z, first, second, 4 * width, sums[r]);
    }
  }

  // Adds the sum of first[k] z[k] to sums.mu, and that of second[k] z[k]^2 to sums.sigma. kSums divides `count`.
  template <bool with_second>
  static void add_products(const Real* z, const Real* first, const Real* second, u64 count, cpu::Gradients& sums) {
    cpu::Sums<double> total;
    for (u64 chain = 0; chain < count; chain += cpu::kSums * cpu::kChain) {
      const u64 last = cpu::min(chain + cpu::kSums * cpu::kChain, count);
      cpu::Sums<Real> part;
      for (u64 k = chain; k < last; k += cpu::kSums) {
        const Vector x = vector_at(z + k);
        part.mu += vector_at(first + k) * x;
        if (with_second) part.sigma += vector_at(second + k) * (x * x);
      }
      total.add(part);
    }
    sums.mu += cpu::added_up<cpu::kSums>(total.mu);
    if (with_second) sums.sigma += cpu::added_up<cpu::kSums>(total.sigma);
  }

  static MULTISAMPLE_FUNCTION Vector vector_at(const Real* at) {
    Vector x;
    std::memcpy(&x, at, sizeof x);
    return x;
  }

  // Stores the moments of rows [row, end), whose sums are sums_of(row).
  template <class SumsOf>
  void put(u64 row, u64 end, SumsOf sums_of) const {
    constexpr u64 kChunk = 256;
    Real mu[kChunk], sigma[kChunk];
    for (u64 first = row; first < end; first += kChunk) {
      const u64 count = cpu::min(kChunk, end - first);
      cpu::read(mu_of(call_), first, count, mu);
      cpu::read(sigma_of(call_), first, count, sigma);
      for (u64 k = 0; k < count; ++k) {
        const cpu::Gradients sums = sums_of(first + k);
        const double m = static_cast<double>(mu[k]), s = static_cast<double>(sigma[k]);
        put(call_.first, first + k, fma_rn(s, sums.mu, weight_ * m));
        if (with_second_) put(call_.second, first + k, s * s * sums.sigma);
      }
    }
  }

  void put(void* to, u64 row, double x) const {
    with_matrix_type(call_.type, [&](auto type) {
      using Out = typename decltype(type)::Type;
      static_cast<Out*>(to)[row] = narrow<Out>(rounded<typename Computing<Out>::Type>(x));
    });
  }

  const Launch& call_;
  const u64 rows_;  // with different noise
  const bool with_second_;
  std::vector<u32> groups_;
  std::vector<Real> first_, second_;  // four for each group; `second_` with antithetic noise only
  double weight_ = 0;
  u64 segments_, columns_, height_;
  bool is_split_;
};

}  // namespace multisample
