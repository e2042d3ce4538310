// How a call is divided among PyTorch's threads: kernels/cpu/thread_windows.py says why its windows are smaller.
#pragma once

#include "cpu/kernel.h"

namespace multisample {
namespace cpu {

// The work of one thread in normals: 28 us. OpenMP hands work to a thread in less than half of that.
constexpr u64 kThreadWork = 1 << 16;
// A shared normal is only scaled and stored, at 1 / 2^kSharedCost of the cost of an independent one.
constexpr u64 kSharedCost = 3;
// Normals of one window: enough to hide the cost of scheduling it, few enough to balance the threads. Shared normals
// cost less.
constexpr u64 kWindow = 1 << 18, kSharedWindow = 1 << 20, kLeastWindow = 1 << 14;
// Minimum columns of a window. Its rows share the column part of their words, or the normals of shared noise, so that
// many rows are better than long rows.
constexpr u64 kWindowColumns = 1 << 13;
// Maximum rows of a window of shared noise where rows are adjacent. Its columns share the reads of mu and sigma, so
// that many columns are better than long columns.
constexpr u64 kSharedRows = 1 << 14;

// How many threads a call has work for.
inline u64 most_threads(const Launch& call) {
  const u64 normals = call.rows * call.columns;
  return max(1, ceil_div(call.shared_noise ? call.columns + (normals >> kSharedCost) : normals, kThreadWork));
}

// Cuts a call into windows, at the boundaries of blocks.
class Windows {
 public:
  Windows(const Launch& call, u64 threads)
      : call_(call), block_(block_columns(call)), skip_(call.first_column % block_) {
    const u64 most = call.shared_noise ? kSharedWindow : kWindow, parts = threads == 1 ? 1 : 4 * threads;
    const u64 size = min(most, max(kLeastWindow, call.rows * call.columns / parts));
    if (runs_down(call, call.rows)) {
      // Whole columns are contiguous in memory.
      const u64 rows = call.shared_noise ? min(size / block_, kSharedRows) : size / block_;
      rows_ = ceil_div(call.rows, ceil_div(call.rows, rows));
      columns_ = ceil_div(size / rows_, block_) * block_;
    } else {
      const u64 cuts = call.columns / max(kWindowColumns, size / call.rows);
      columns_ = ceil_div(ceil_div(skip_ + call.columns, max(1, cuts)), block_) * block_;
      rows_ = max(1, size / min(columns_, call.columns));
    }
    across_ = ceil_div(skip_ + call.columns, columns_);
    count_ = across_ * ceil_div(call.rows, rows_);
  }

  u64 count() const { return count_; }

  // Calls draw(call, first_row, last_row, first_column, last_column) for window k.
  template <class Draw>
  void draw(u64 k, const Draw& draw) const {
    const u64 row = k / across_ * rows_, column = k % across_ * columns_;
    draw(call_, row, min(row + rows_, call_.rows), column == 0 ? 0 : column - skip_,
         min(column + columns_ - skip_, call_.columns));
  }

 private:
  const Launch& call_;
  u64 block_, skip_, rows_, columns_, across_, count_;
};

}  // namespace cpu
}  // namespace multisample
