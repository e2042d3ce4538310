// The gradient on the CPU: grad_mu[i] = sum_j grad[i, j] and grad_sigma[i] = sum_j grad[i, j] z[i, j].
//
// The noise is drawn again, a window at a time, into a buffer that fits in a cache and has the layout of grad. A row is
// cut into segments of a fixed length. The order of the sums depends on the launch alone, so that any number of threads
// gives the same bits. Float32 sums have at most 16 terms before they are added to a float64 sum.
#pragma once

#include <cstring>

#include "cpu/kernel.h"

namespace multisample {
namespace cpu {

// Columns of a segment.
constexpr u64 kSegment = 4096;
// Parallel sums, and the terms of each sum in the computing type.
constexpr u64 kSums = 16, kChain = 16;
static_assert(kSegment % (kSums * kChain) == 0, "");

template <class Real, u64 count>
struct VectorOf {
  typedef Real Type __attribute__((vector_size(count * sizeof(Real))));
};

// The two gradients of a row, or a part's contribution to them.
struct Gradients {
  double mu, sigma;
};

template <u64 count>
MULTISAMPLE_FUNCTION double added_up(const typename VectorOf<double, count>::Type& x) {
  if constexpr (count == 1) {
    return x[0];
  } else {
    typename VectorOf<double, count / 2>::Type halves[2];
    std::memcpy(halves, &x, sizeof x);
    return added_up<count / 2>(halves[0] + halves[1]);
  }
}

template <class Real>
struct Sums {
  using Vector = typename VectorOf<Real, kSums>::Type;
  Vector mu{}, sigma{};

  // Adds kSums elements, in the computing type.
  MULTISAMPLE_FUNCTION void add(const Vector& grad, const Vector& noise) {
    mu += grad;
    sigma += grad * noise;
  }

  // Adds the sums of finished chains.
  template <class Narrow>
  MULTISAMPLE_FUNCTION void add(const Sums<Narrow>& part) {
    mu += __builtin_convertvector(part.mu, Vector);
    sigma += __builtin_convertvector(part.sigma, Vector);
  }
};

// `count` adjacent elements in the computing type, then zeros.
template <class T, class Real>
MULTISAMPLE_FUNCTION typename Sums<Real>::Vector elements(const char* at, u64 count = kSums) {
  alignas(64) Real x[kSums] = {};
  for (u64 k = 0; k < count; ++k) x[k] = converted<Real>(load<T>(at + k * sizeof(T)));
  typename Sums<Real>::Vector vector;
  std::memcpy(&vector, x, sizeof x);
  return vector;
}

// The number of columns of the first Philox block that precede the call's first column. A position is a column counted
// from the start of the first block, so that windows end where blocks end.
inline u64 skipped(const Launch& call) { return call.first_column % (call.antithetic ? 8 : 4); }

inline u64 segments(const Launch& call) { return ceil_div(skipped(call) + call.columns, kSegment); }

template <class G, class Real>
class Summation {
 public:
  // Maximum rows that are summed at once.
  static constexpr u64 kRows = 4096;

  explicit Summation(const Launch& call)
      : call_(call),
        skip_(skipped(call)),
        down_(call.row_stride == sizeof(G) && call.column_stride != sizeof(G) && call.rows >= kSums) {}

  // Calls put(row, gradients) for rows [first_row, last_row). Sums positions `first` to `last`, all of one segment.
  template <class Put>
  void sum(u64 first_row, u64 last_row, u64 first, u64 last, Put put) {
    // The size of a window, whose rows share the column part of their words.
    u64 width = kSegment, height = kRows;
    if (!call_.shared_noise) {
      width = down_ ? kNoise / min(last_row - first_row, kNoise / kChain) / kChain * kChain : kNoise / kLeastRows;
      height = min(kRows, kNoise / min(width, last - first));
    }
    // Long runs of memory are read faster. Where rows are adjacent, a run is a column of up to kRows rows.
    const u64 band = down_ ? kRows : height;
    for (u64 top = first_row, rows; top < last_row; top += rows) {
      rows = min(band, last_row - top);
      std::memset(totals_.mu, 0, rows * sizeof(double));
      std::memset(totals_.sigma, 0, rows * sizeof(double));
      for (u64 begin = first, end; begin < last; begin = end) {
        end = min(begin / width * width + width, last);
        for (u64 row = 0; row < rows; row += height) {
          const Window window{top + row, min(top + row + height, top + rows), begin, end};
          if (row == 0 || !call_.shared_noise) draw(window);
          down_ ? add_down(window, row) : add_along(window, row);
        }
      }
      for (u64 k = 0; k < rows; ++k) put(top + k, Gradients{totals_.mu[k], totals_.sigma[k]});
    }
  }

 private:
  // Elements of a window, and its minimum rows.
  static constexpr u64 kNoise = 65536 / sizeof(Real), kLeastRows = 8;

  // Draws the noise of a window, whose columns are positions.
  void draw(const Window& window) {
    const u64 rows = call_.shared_noise ? 1 : window.rows(), columns = window.columns();
    Launch sample{};
    sample.sigma.number = 1;
    sample.matrix = noise_;
    sample.row_stride = static_cast<i64>(down_ ? sizeof(Real) : columns * sizeof(Real));
    sample.column_stride = static_cast<i64>(down_ ? rows * sizeof(Real) : sizeof(Real));
    sample.rows = rows;
    sample.columns = columns;
    sample.first_row = call_.first_row + window.first_row;
    sample.first_column = call_.first_column + window.first_column - skip_;
    sample.seed = call_.seed;
    sample.offset = call_.offset;
    sample.type = sizeof(Real) == 8 ? kFloat64 : kFloat32;
    sample.shared_noise = call_.shared_noise;
    sample.antithetic = call_.antithetic;
    draw_window<Real>(sample, 0, rows, 0, columns);
  }

  // Adds the sums of a window to the totals from `first_total` on.
  void add_along(const Window& window, u64 first_total) {
    const u64 columns = window.columns();
    for (u64 r = 0; r < window.rows(); ++r) {
      const Real* const noise = noise_ + (call_.shared_noise ? 0 : r * columns);
      const char* const grad = run(address(window.first_row + r, window.first_column), columns);
      Sums<double> total;
      for (u64 chain = 0; chain < columns; chain += kSums * kChain) {
        const u64 last = min(chain + kSums * kChain, columns);
        Sums<Real> part;
        u64 k = chain;
        for (; k + kSums <= last; k += kSums) {
          // Prefetches the next row: the hardware does not predict where a row begins.
          __builtin_prefetch(grad + k * sizeof(G) + call_.row_stride);
          part.add(elements<G, Real>(grad + k * sizeof(G)), elements<Real, Real>(at(noise + k)));
        }
        if (k < last) {
          part.add(elements<G, Real>(grad + k * sizeof(G), last - k), elements<Real, Real>(at(noise + k), last - k));
        }
        total.add(part);
      }
      totals_.mu[first_total + r] += added_up<kSums>(total.mu);
      totals_.sigma[first_total + r] += added_up<kSums>(total.sigma);
    }
  }

  // The same, with vectors that run down the rows.
  void add_down(const Window& window, u64 first_total) {
    const u64 rows = window.rows(), begin = window.first_column;
    for (u64 chain = begin, last; chain < window.last_column; chain = last) {
      last = min(chain / kChain * kChain + kChain, window.last_column);
      // read(type, address) loads a vector of elements.
      const auto add = [&](u64 r, u64 count, auto read) {
        Sums<Real> part;
        for (u64 p = chain; p < last; ++p) {
          const auto grad = read(G{}, address(window.first_row + r, p));
          if (call_.shared_noise) {
            part.add(grad, typename Sums<Real>::Vector{} + noise_[p - begin]);
          } else {
            part.add(grad, read(Real{}, at(noise_ + (p - begin) * rows + r)));
          }
        }
        for (u64 k = 0; k < count; ++k) {
          totals_.mu[first_total + r + k] += static_cast<double>(part.mu[k]);
          totals_.sigma[first_total + r + k] += static_cast<double>(part.sigma[k]);
        }
      };
      u64 r = 0;
      for (; r + kSums <= rows; r += kSums) {
        add(r, kSums, [](auto type, const char* at) { return elements<decltype(type), Real>(at); });
      }
      if (r < rows) {
        add(r, rows - r, [&](auto type, const char* at) { return elements<decltype(type), Real>(at, rows - r); });
      }
    }
  }

  static const char* at(const Real* noise) { return reinterpret_cast<const char*>(noise); }

  const char* address(u64 row, u64 position) const {
    return static_cast<const char*>(call_.matrix) + static_cast<i64>(row) * call_.row_stride +
           static_cast<i64>(position - skip_) * call_.column_stride;
  }

  // The elements of a row as a contiguous array: `first` itself, or a copy if they are not adjacent.
  const char* run(const char* first, u64 columns) {
    if (call_.column_stride == sizeof(G)) return first;
    for (u64 c = 0; c < columns; ++c) copy_[c] = load<G>(first + static_cast<i64>(c) * call_.column_stride);
    return reinterpret_cast<const char*>(copy_);
  }

  const Launch& call_;
  const u64 skip_;
  const bool down_;
  struct {
    alignas(64) double mu[kRows], sigma[kRows];
  } totals_;
  alignas(64) Real noise_[kNoise];
  G copy_[kSegment];
};

}  // namespace cpu

// Cuts a gradient into parts, which are summed in any order on any threads. The number of threads decides only how many
// rows a part has.
class GradientParts {
 public:
  GradientParts(const Launch& call, u64 threads) : call_(call), segments_(cpu::segments(call)) {
    const u64 least = kLeastPart / min(call.columns, cpu::kSegment);
    const u64 even = ceil_div(call.rows * segments_, 4 * threads);
    rows_ = min(even < least ? least : even, kMostRows);
    if (rows_ < kLeastRows) rows_ = kLeastRows;
  }

  u64 count() const { return segments_ * ceil_div(call_.rows, rows_); }
  // Elements of the array that `sum` and `finish` share.
  u64 partial_sums() const { return segments_ == 1 ? 0 : segments_ * call_.rows; }

  // Sums part k of a gradient whose elements have the type G.
  template <class G>
  void sum(u64 k, cpu::Gradients* partial_sums) const {
    const cpu::DefaultFloatingPoint guard;
    const u64 segment = k % segments_, row = k / segments_ * rows_, skip = cpu::skipped(call_);
    const u64 first = segment == 0 ? skip : segment * cpu::kSegment;
    const u64 last = min((segment + 1) * cpu::kSegment, skip + call_.columns);
    cpu::Summation<G, typename Computing<G>::Type> summation(call_);
    summation.sum(row, min(row + rows_, call_.rows), first, last, [&](u64 r, const cpu::Gradients& gradients) {
      if (segments_ == 1) {
        put(r, gradients);
      } else {
        partial_sums[r * segments_ + segment] = gradients;
      }
    });
  }

  // Adds up the partial sums. Called after all parts are summed.
  void finish(const cpu::Gradients* partial_sums) const {
    if (segments_ == 1) return;
    for (u64 row = 0; row < call_.rows; ++row) {
      cpu::Gradients total{};
      for (u64 segment = 0; segment < segments_; ++segment) {
        total.mu += partial_sums[row * segments_ + segment].mu;
        total.sigma += partial_sums[row * segments_ + segment].sigma;
      }
      put(row, total);
    }
  }

 private:
  // A part has enough elements to hide the cost of its scheduling, and enough rows to share the column parts of words.
  static constexpr u64 kLeastPart = 1 << 16, kLeastRows = 64, kMostRows = 4096;

  void put(u64 row, const cpu::Gradients& gradients) const {
    if (call_.type == kFloat64) {
      static_cast<double*>(call_.first)[row] = gradients.mu;
      static_cast<double*>(call_.second)[row] = gradients.sigma;
    } else {
      static_cast<float*>(call_.first)[row] = to_float(gradients.mu);
      static_cast<float*>(call_.second)[row] = to_float(gradients.sigma);
    }
  }

  const Launch& call_;
  u64 segments_, rows_;
};

// GradientParts::sum as a function.
template <class G>
void sum_part(const GradientParts& parts, u64 k, cpu::Gradients* partial_sums) {
  parts.sum<G>(k, partial_sums);
}

}  // namespace multisample
