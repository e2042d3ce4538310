// Normal noise added to model parameters on the CPU: see launch.h. The elements of a tile are read and written once,
// whatever the number of rows: they stay in the first-level cache while the noise of each row is added.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/kernel.h"

namespace multisample {

// Cuts the elements of all spans into parts of a few tiles.
template <class Out>
class PerturbParts {
 public:
  using Real = typename Computing<Out>::Type;

  explicit PerturbParts(const Launch& call)
      : call_(call), spans_(static_cast<const Span*>(call.matrix)), weights_(call.rows), ends_(call.spans) {
    const cpu::DefaultFloatingPoint guard;
    cpu::read(weights_of(call), 0, call.rows, weights_.data());
    u64 end = 0;
    for (u64 k = 0; k < call.spans; ++k) ends_[k] = end += elements(spans_[k]);
  }

  u64 count() const { return cpu::ceil_div(call_.columns, kPart); }

  void add(u64 part) const {
    const cpu::DefaultFloatingPoint guard;
    const u64 end = cpu::min((part + 1) * kPart, call_.columns);
    for (u64 next = part * kPart; next < end;) {
      const u64 k = static_cast<u64>(std::upper_bound(ends_.begin(), ends_.end(), next) - ends_.begin());
      const u64 begin = ends_[k] - elements(spans_[k]), last = cpu::min(end, ends_[k]);
      add(spans_[k], next - begin, last - begin);
      next = last;
    }
  }

 private:
  using Tile = cpu::Tile<Real>;
  static constexpr u64 kPart = 1 << 15, kMost = 4 * Tile::kBlocks;

  static u64 elements(const Span& span) { return static_cast<u64>(span.rows * span.width); }

  // Adds noise to elements [begin, end) of a span, numbered run by run.
  void add(const Span& span, u64 begin, u64 end) const {
    Launch call = call_;
    call.offset += span.id << 32;
    Tile tile(call);
    const u64 width = static_cast<u64>(span.width);
    for (u64 next = begin; next < end;) {
      const u64 run = next / width, first = next % width, stop = cpu::min(width, first + (end - next));
      for (u64 w = first, count; w < stop; w += count) {
        // Tiles begin where blocks begin, except the first.
        const u64 element = static_cast<u64>(span.first) + run * static_cast<u64>(span.jump) + w;
        count = cpu::min(stop - w, kMost - element % 4);
        add(tile, element, count,
            static_cast<const char*>(span.source) + at(run, span.source_row, w, span.source_stride), span.source_stride,
            static_cast<char*>(span.target) + at(run, span.target_row, w, span.target_stride), span.target_stride);
      }
      next += stop - first;
    }
  }

  static i64 at(u64 run, i64 row_stride, u64 w, i64 stride) {
    return static_cast<i64>(run) * row_stride + static_cast<i64>(w) * stride;
  }

  void add(Tile& tile, u64 element, u64 count, const char* source, i64 source_stride, char* target,
           i64 target_stride) const {
    alignas(64) Real noise[kMost];
    Real sums[kMost];
    const u64 shift = element % 4, blocks = cpu::ceil_div(shift + count, 4);
    cpu::read(Vector{{source}, source_stride, call_.type}, 0, count, sums);
    tile.set_columns(element / 4, blocks, 1);
    for (u64 r = 0; r < weights_.size(); ++r) {
      tile.draw_words(call_.first_row + r, blocks, 1);
      tile.template make_noise<false>(blocks, noise);
      const Real weight = weights_[r], *const z = noise + shift;
      for (u64 k = 0; k < count; ++k) sums[k] = fma_rn(weight, z[k], sums[k]);
    }
    if (target_stride == sizeof(Out)) {
      cpu::put_run<Out>(target, count, [&](u64 k) { return sums[k]; });
      return;
    }
    for (u64 k = 0; k < count; ++k, target += target_stride) {
      reinterpret_cast<cpu::Unaligned<Out>*>(target)->x = narrow<Out>(sums[k]);
    }
  }

  const Launch& call_;
  const Span* const spans_;
  std::vector<Real> weights_;
  std::vector<u64> ends_;
};

}  // namespace multisample
