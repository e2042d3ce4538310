// The torch_ext backend on the CPU: the kernel on PyTorch's threads, as an operator and as a C function.
//
// Only PyTorch's stable ABI is used, so that one binary serves every version from the one it was built for on.
#include <pthread.h>

#include <atomic>
#include <exception>
#include <string>

#include "cpu_kernel.h"
#include "torch_call.h"

namespace multisample {
namespace {

// Normals for each thread at the least, 0.1 ms: to wake one takes a good part of that.
constexpr u64 kShare = 1 << 18;
// What a shared normal costs next to one that is made, as a shift: to scale and to write it.
constexpr u64 kSharedCost = 3;
// Normals of one window: long enough to hide the cost of handing it out, short enough to even out threads. Shared ones
// cost less.
constexpr u64 kWindow = 1 << 18, kSharedWindow = 1 << 20, kLeastWindow = 1 << 14;
// Rows of a window have in common what their columns take, with shared noise all of it: better many than long ones.
constexpr u64 kWindowColumns = 1 << 13;
// And those of its columns have mu and sigma in common, next to which a shared normal costs little: better wide than
// tall ones.
constexpr u64 kSharedRows = 1 << 14;

using cpu::ceil_div;
u64 smaller(u64 a, u64 b) { return a < b ? a : b; }
u64 larger(u64 a, u64 b) { return a < b ? b : a; }

// How a call is cut into windows, none of which makes part of a block that another makes too.
class Windows {
 public:
  Windows(const SampleCall& call, u64 threads)
      : call_(call), block_(cpu::block_columns(call)), skip_(call.first_column % block_) {
    const u64 most = call.shared ? kSharedWindow : kWindow, pieces = threads == 1 ? 1 : 4 * threads;
    const u64 size = smaller(most, larger(kLeastWindow, call.rows * call.columns / pieces));
    if (cpu::runs_down(call, call.rows)) {
      // Whole columns are one stretch of memory.
      const u64 rows = call.shared ? smaller(size / block_, kSharedRows) : size / block_;
      rows_ = ceil_div(call.rows, ceil_div(call.rows, rows));
      columns_ = ceil_div(size / rows_, block_) * block_;
    } else {
      const u64 cuts = call.columns / larger(kWindowColumns, size / call.rows);
      columns_ = ceil_div(ceil_div(skip_ + call.columns, larger(1, cuts)), block_) * block_;
      rows_ = larger(1, size / smaller(columns_, call.columns));
    }
    across_ = ceil_div(skip_ + call.columns, columns_);
    count_ = across_ * ceil_div(call.rows, rows_);
  }

  u64 count() const { return count_; }

  void draw(u64 k) const {
    const u64 row = k / across_ * rows_, column = k % across_ * columns_;
    draw_window(call_, row, smaller(row + rows_, call_.rows), column == 0 ? 0 : column - skip_,
                smaller(column + columns_ - skip_, call_.columns));
  }

 private:
  const SampleCall& call_;
  u64 block_, skip_, rows_, columns_, across_, count_;
};

// A forked child has none of its parent's threads, and OpenMP, which PyTorch's are, would wait for them for ever.
std::atomic<bool> forked{false};
[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, [] { forked = true; });

u64 available_threads() { return forked ? 1 : torch::stable::get_num_threads(); }

void launch(const SampleCall& call) {
  const u64 normals = call.rows * call.columns;
  const u64 work = call.shared ? call.columns + (normals >> kSharedCost) : normals;
  const u64 threads = work <= kShare ? 1 : smaller(available_threads(), ceil_div(work, kShare));
  const Windows windows(call, threads);
  if (threads == 1) {
    for (u64 k = 0; k < windows.count(); ++k) windows.draw(k);
    return;
  }
  // Threads begin far apart: side by side, each would page in and clear the same fresh memory for itself.
  const u64 stride = ceil_div(windows.count(), threads);
  std::atomic<u64> next{0};
  torch::stable::parallel_for(0, static_cast<int64_t>(threads), 1, [&](int64_t, int64_t) {
    for (u64 turn; (turn = next.fetch_add(1, std::memory_order_relaxed)) < stride * threads;) {
      const u64 k = turn % threads * stride + turn / threads;
      if (k < windows.count()) windows.draw(k);
    }
  });
}

thread_local std::string last_error;

void sample_(const torch::stable::Tensor& out, const torch::stable::Tensor& mu, const torch::stable::Tensor& sigma,
             int64_t seed, int64_t offset, int64_t dim_offset, int64_t sample_offset, bool shared, bool fast_math,
             bool antithetic) {
  const SampleCall call =
      checked_call(out, mu, sigma, seed, offset, dim_offset, sample_offset, shared, fast_math, antithetic);
  if (call.rows > 0 && call.columns > 0) launch(call);
}

}  // namespace
}  // namespace multisample

// Draws what the call describes, all of it in host memory. Other than 0: multisample_last_error says why it failed.
extern "C" __attribute__((visibility("default"))) int multisample_launch_cpu(const multisample::SampleCall* call) {
  try {
    multisample::launch(*call);
    return 0;
  } catch (const std::exception& error) {
    multisample::last_error = error.what();
  } catch (...) {
    multisample::last_error = "unknown exception";
  }
  return 1;
}

// What went wrong last on this thread; valid until the next call on it.
extern "C" __attribute__((visibility("default"))) const char* multisample_last_error() {
  return multisample::last_error.c_str();
}

STABLE_TORCH_LIBRARY(multisample, m) {
  // seed and offset: the bits of an unsigned integer.
  m.def(
      "sample_(Tensor(a!) out, Tensor mu, Tensor sigma, *, int seed, int offset=0, int dim_offset=0, "
      "int sample_offset=0, bool shared=False, bool fast_math=False, bool antithetic=False) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(multisample, CPU, m) { m.impl("sample_", TORCH_BOX(&multisample::sample_)); }
