// The gradient on the CPU: grad_mu[i] = sum_j grad[i, j] and grad_sigma[i] = sum_j grad[i, j] z[i, j].
//
// The noise is drawn again, a window at a time, to a buffer that a first-level cache holds, and laid out there as grad
// is. A row is cut into pieces of a fixed length; sums are made in an order that the shape and the layout of grad alone
// decide, so that any number of threads gives the same bits. Float32 sums are of 16 terms at most before they go on in
// float64: an error of 16 2^-24 of the sum of magnitudes at most.
#pragma once

#include "cpu_kernel.h"
#include "gradient_call.h"

namespace multisample {
namespace cpu {

// Columns of a piece, and elements of a window.
constexpr u64 kPiece = 4096;
// Sums side by side, and terms of a sum in the computing type.
constexpr u64 kSums = 16, kChain = 16;
// Rows of a window in which they lie side by side.
constexpr u64 kDownRows = 256;
static_assert(kPiece % (kSums * kChain) == 0 && kPiece % (kDownRows * kChain) == 0, "");

// The two gradients of a row, or what a piece of it contributes to them.
struct Gradients {
  double mu, sigma;
};

template <class Real>
struct Sums {
  Real mu[kSums] = {}, sigma[kSums] = {};
};

// Of elements and noise that lie side by side.
template <class G, class Real>
MULTISAMPLE_FUNCTION Gradients sum_run(const Unaligned<G>* grad, const Real* noise, u64 count) {
  Sums<double> total;
  const auto flush = [&](const Sums<Real>& part) {
    for (u64 s = 0; s < kSums; ++s) {
      total.mu[s] += static_cast<double>(part.mu[s]);
      total.sigma[s] += static_cast<double>(part.sigma[s]);
    }
  };
  const auto add = [&](Sums<Real>& part, u64 first, u64 sums) {
    for (u64 s = 0; s < sums; ++s) {
      const Real g = converted<Real>(grad[first + s].x);
      part.mu[s] += g;
      part.sigma[s] = fma_rn(g, noise[first + s], part.sigma[s]);
    }
  };
  u64 k = 0;
  for (; k + kSums * kChain <= count; k += kSums * kChain) {
    Sums<Real> part;
    for (u64 link = 0; link < kChain; ++link) add(part, k + kSums * link, kSums);
    flush(part);
  }
  Sums<Real> part;
  for (; k + kSums <= count; k += kSums) add(part, k, kSums);
  add(part, k, count - k);
  flush(part);
  for (u64 half = kSums / 2; half > 0; half /= 2) {
    for (u64 s = 0; s < half; ++s) {
      total.mu[s] += total.mu[s + half];
      total.sigma[s] += total.sigma[s + half];
    }
  }
  return {total.mu[0], total.sigma[0]};
}

// Rows [first_row, last_row) of a piece: positions [first, last), which are columns and how far the first column is in
// its block, so that windows end where blocks do.
struct Part {
  u64 first_row, last_row, first, last;
};

// How far the first column is in its block.
inline u64 skipped(const GradientCall& call) { return call.first_column % (call.antithetic ? 8 : 4); }

inline u64 pieces(const GradientCall& call) { return ceil_div(skipped(call) + call.columns, kPiece); }

// Whether windows have rows side by side, as grad has.
template <class G>
bool sums_down(const GradientCall& call) {
  return call.row_stride == sizeof(G) && call.column_stride != sizeof(G) && call.rows >= kSums;
}

template <class G, class Real>
class Summation {
 public:
  explicit Summation(const GradientCall& call) : call_(call), skip_(skipped(call)) {}

  // Gives `put` the gradients of each row of the part.
  template <class Put>
  void sum(const Part& part, Put put) {
    if (sums_down<G>(call_)) {
      for (u64 r = part.first_row; r < part.last_row; r += kDownRows) {
        sum_down({r, min(r + kDownRows, part.last_row), part.first, part.last}, put);
      }
      return;
    }
    const u64 column = part.first - skip_, columns = part.last - part.first;
    const u64 height = call_.shared ? part.last_row - part.first_row : kPiece / columns;
    for (u64 r = part.first_row; r < part.last_row; r += height) {
      const u64 last = min(r + height, part.last_row);
      draw(r, call_.shared ? r + 1 : last, column, columns, static_cast<i64>(columns * sizeof(Real)), sizeof(Real));
      for (u64 k = r; k < last; ++k) {
        put(k, sum_run(run(address(k, column), columns), noise_ + (call_.shared ? 0 : (k - r) * columns), columns));
      }
    }
  }

 private:
  template <class Put>
  void sum_down(const Part& part, Put put) {
    const u64 rows = part.last_row - part.first_row, width = kPiece / (call_.shared ? 1 : rows) / kChain * kChain;
    double mu[kDownRows] = {}, sigma[kDownRows] = {};
    Real mu_part[kDownRows] = {}, sigma_part[kDownRows] = {};
    for (u64 first = part.first, last; first < part.last; first = last) {
      last = min(first / width * width + width, part.last);
      draw(part.first_row, part.first_row + (call_.shared ? 1 : rows), first - skip_, last - first, sizeof(Real),
           static_cast<i64>((call_.shared ? 1 : rows) * sizeof(Real)));
      for (u64 p = first; p < last; ++p) {
        const Unaligned<G>* grad = reinterpret_cast<const Unaligned<G>*>(address(part.first_row, p - skip_));
        const auto add = [&](auto noise) {
          for (u64 r = 0; r < rows; ++r) {
            const Real g = converted<Real>(grad[r].x);
            mu_part[r] += g;
            sigma_part[r] = fma_rn(g, noise(r), sigma_part[r]);
          }
        };
        if (call_.shared) {
          add([z = noise_[p - first]](u64) { return z; });
        } else {
          add([z = noise_ + (p - first) * rows](u64 r) { return z[r]; });
        }
        if ((p + 1) % kChain != 0 && p + 1 < part.last) continue;
        for (u64 r = 0; r < rows; ++r) {
          mu[r] += static_cast<double>(mu_part[r]);
          sigma[r] += static_cast<double>(sigma_part[r]);
          mu_part[r] = sigma_part[r] = 0;
        }
      }
    }
    for (u64 r = 0; r < rows; ++r) put(part.first_row + r, Gradients{mu[r], sigma[r]});
  }

  void draw(u64 first_row, u64 last_row, u64 column, u64 columns, i64 row_stride, i64 column_stride) {
    SampleCall sample{};
    sample.sigma.number = 1;
    sample.out = noise_;
    sample.row_stride = row_stride;
    sample.column_stride = column_stride;
    sample.rows = last_row - first_row;
    sample.columns = columns;
    sample.first_row = call_.first_row + first_row;
    sample.first_column = call_.first_column + column;
    sample.seed = call_.seed;
    sample.offset = call_.offset;
    sample.type = sizeof(Real) == 8 ? kFloat64 : kFloat32;
    sample.shared = call_.shared;
    sample.antithetic = call_.antithetic;
    draw_window(sample, 0, sample.rows, 0, columns);
  }

  const char* address(u64 row, u64 column) const {
    return static_cast<const char*>(call_.grad) + static_cast<i64>(row) * call_.row_stride +
           static_cast<i64>(column) * call_.column_stride;
  }

  // Elements of a row that lie side by side, if need be in a copy.
  const Unaligned<G>* run(const char* at, u64 columns) {
    if (call_.column_stride == sizeof(G)) return reinterpret_cast<const Unaligned<G>*>(at);
    for (u64 c = 0; c < columns; ++c) {
      copy_[c] = reinterpret_cast<const Unaligned<G>*>(at + static_cast<i64>(c) * call_.column_stride)[0];
    }
    return copy_;
  }

  const GradientCall& call_;
  u64 skip_;
  alignas(64) Real noise_[kPiece];
  Unaligned<G> copy_[kPiece];
};

}  // namespace cpu

// How a gradient is made in parts, in any order and on any threads.
class GradientParts {
 public:
  explicit GradientParts(const GradientCall& call) : call_(call), pieces_(cpu::pieces(call)) {
    // Rows have in common what their columns take, with shared noise all of it.
    const u64 size = call.shared ? kSharedPart : kPart, columns = cpu::min(call.columns, cpu::kPiece);
    rows_ = cpu::ceil_div(cpu::ceil_div(size, columns), cpu::kDownRows) * cpu::kDownRows;
    if (columns * cpu::kDownRows > size) rows_ = cpu::ceil_div(size, columns);
  }

  u64 count() const { return pieces_ * cpu::ceil_div(call_.rows, rows_); }
  // Of memory that `sum` and `finish` share.
  u64 partial_sums() const { return pieces_ == 1 ? 0 : pieces_ * call_.rows; }

  void sum(u64 k, cpu::Gradients* partial_sums) const {
    switch (call_.type) {
      case kFloat16: return sum_as<float16, float>(k, partial_sums);
      case kBFloat16: return sum_as<bfloat16, float>(k, partial_sums);
      case kFloat32: return sum_as<float, float>(k, partial_sums);
      default: return sum_as<double, double>(k, partial_sums);
    }
  }

  // When all parts are there.
  void finish(const cpu::Gradients* partial_sums) const {
    if (pieces_ == 1) return;
    for (u64 row = 0; row < call_.rows; ++row) {
      cpu::Gradients total{};
      for (u64 piece = 0; piece < pieces_; ++piece) {
        total.mu += partial_sums[row * pieces_ + piece].mu;
        total.sigma += partial_sums[row * pieces_ + piece].sigma;
      }
      put(row, total);
    }
  }

 private:
  // Elements of a part: enough to hide the cost of handing it out, few enough to even out threads.
  static constexpr u64 kPart = 1 << 16, kSharedPart = 1 << 19;

  template <class G, class Real>
  __attribute__((noinline)) void sum_as(u64 k, cpu::Gradients* partial_sums) const {
    const cpu::DefaultFloatingPoint guard;
    const u64 piece = k % pieces_, row = k / pieces_ * rows_, skip = cpu::skipped(call_);
    const cpu::Part part{row, cpu::min(row + rows_, call_.rows), piece == 0 ? skip : piece * cpu::kPiece,
                         cpu::min((piece + 1) * cpu::kPiece, skip + call_.columns)};
    cpu::Summation<G, Real>(call_).sum(part, [&](u64 r, const cpu::Gradients& gradients) {
      if (pieces_ == 1) {
        put(r, gradients);
      } else {
        partial_sums[r * pieces_ + piece] = gradients;
      }
    });
  }

  void put(u64 row, const cpu::Gradients& gradients) const {
    if (call_.type == kFloat64) {
      static_cast<double*>(call_.grad_mu)[row] = gradients.mu;
      static_cast<double*>(call_.grad_sigma)[row] = gradients.sigma;
    } else {
      static_cast<float*>(call_.grad_mu)[row] = to_float(gradients.mu);
      static_cast<float*>(call_.grad_sigma)[row] = to_float(gradients.sigma);
    }
  }

  const GradientCall& call_;
  u64 pieces_, rows_;
};

}  // namespace multisample
