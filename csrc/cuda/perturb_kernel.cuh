// Perturbs model parameters: target[e] = source[e] + sum of w[r] z[r, e] for the elements e of each span. Noise is made
// in registers, and each element is read once and written once, however many rows there are.
//
// A thread has groups of columns, as in the sampling kernel. It goes down the rows, whose parts of the words are in
// shared memory with their weights. If there is only one member, it is in registers.
#pragma once

#include "cuda/perturb_geometry.h"
#include "cuda/stores.cuh"

namespace multisample {

// What all groups of a row share.
template <class Real, bool has_own_key = false>
struct alignas(16) Member {
  RowPart words;
  Real weight;
};

// A row with a seed and an offset of its own.
template <class Real>
struct alignas(16) Member<Real, true> {
  RowPart words;
  Real weight;
  u32 offset;  // the low half
  u32 seed[2];
};

// The span of this block.
template <class Entry>
MULTISAMPLE_FUNCTION const Entry& span_of_block(const SpanList<Entry>& list) {
  u32 found = 0;
#pragma unroll 1
  for (u32 left = list.count; left > 1;) {
    const u32 half = left / 2;
    if (list.spans[found + half].block <= blockIdx.x) found += half;
    left -= half;
  }
  return list.spans[found];
}

// A group in one row of a span: element k is element `column` + k of the row, if it exists.
struct RowGroup {
  const char* source;  // of element 0, which may lie outside the row
  char* target;
  i64 column;
  u32 index;  // in the row of z

  // This group, moved by `groups` groups along the row.
  template <class Out>
  MULTISAMPLE_FUNCTION RowGroup moved(i64 groups) const {
    const i64 bytes = groups * static_cast<i64>(kWidth * sizeof(Out));
    return {source + bytes, target + bytes, column + groups * kWidth, index + static_cast<u32>(groups)};
  }
};

// Group k of the groups of a row, whose element 0 is column `first` of z.
MULTISAMPLE_FUNCTION RowGroup group_of_row(u64 k, i64 first, const char* source, i64 source_stride, char* target,
                                           i64 target_stride) {
  const i64 column = static_cast<i64>(kWidth * k) - first % kWidth;
  return {source + column * source_stride, target + column * target_stride, column,
          static_cast<u32>(first / kWidth + static_cast<i64>(k))};
}

// Whether the four elements from `column` on are in the row.
MULTISAMPLE_FUNCTION bool has_quad(i64 column, i64 width) { return column >= 0 && column + 4 <= width; }

template <class Out>
MULTISAMPLE_FUNCTION bool is_aligned(const void* at) {
  return reinterpret_cast<u64>(at) % alignof(Quad<Out>) == 0;
}

// The groups of a thread in one turn of a block. `at(g)` is group g of the thread. `are_whole()`: whether the groups of
// the warp (if kUniform, of the block) are whole, aligned quads.
template <class Out, u32 own, class Entry>
class TurnGroups;

template <class Out, u32 own>
class TurnGroups<Out, own, Run> {
 public:
  static constexpr bool kUniform = true;
  static constexpr i64 source_stride = sizeof(Out), target_stride = sizeof(Out);

  // For the turn that begins with group `begin` of the span.
  MULTISAMPLE_FUNCTION TurnGroups(const Run& span, u64 begin)
      : first_(group_of_row(begin + threadIdx.x, span.first, span.source, source_stride, span.target, target_stride)) {
    const i64 column = first_.column - kWidth * threadIdx.x, quads = (span.width - column) / kWidth;
    const bool starts = column >= 0 && is_aligned<Out>(first_.source) && is_aligned<Out>(first_.target);
    whole_ = !starts ? 0 : quads < kMostGroups ? static_cast<u32>(quads) : kMostGroups;
  }
  MULTISAMPLE_FUNCTION RowGroup at(u32 g) const { return first_.template moved<Out>(g * kPerturbThreads); }
  MULTISAMPLE_FUNCTION bool are_whole() const { return own * kPerturbThreads <= whole_; }
  MULTISAMPLE_FUNCTION void next() {
    constexpr u32 kGroups = own * kPerturbThreads;
    first_ = first_.template moved<Out>(kGroups);
    whole_ = whole_ < kGroups ? 0 : whole_ - kGroups;
  }

 private:
  RowGroup first_;
  u32 whole_;  // how many of the block's next groups are whole
};

template <class Out, u32 own>
class TurnGroups<Out, own, StridedSpan> {
 public:
  static constexpr bool kUniform = false;
  const i64 source_stride, target_stride;

  MULTISAMPLE_FUNCTION TurnGroups(const StridedSpan& span, u64 begin)
      : source_stride(span.source_stride), target_stride(span.target_stride), span_(span) {
    of_row_ = groups_of_row(span);
    row_ = begin / of_row_;
    begin_ = begin - row_ * of_row_;
  }
  MULTISAMPLE_FUNCTION RowGroup at(u32 g) const {
    u64 group = begin_ + g * kPerturbThreads + threadIdx.x, down = group >= of_row_;
    // Only short rows have several ends in one block.
    if (of_row_ <= kMostGroups) down = static_cast<u32>(group) / static_cast<u32>(of_row_);
    group -= down * of_row_;
    const i64 r = static_cast<i64>(row_ + down);
    RowGroup found = group_of_row(group, span_.first + r * span_.jump, span_.source + r * span_.source_row,
                                  source_stride, span_.target + r * span_.target_row, target_stride);
    // Beyond the last row, a group has no elements.
    if (r >= span_.rows) found.column = span_.width;
    return found;
  }
  MULTISAMPLE_FUNCTION bool are_whole() const {
    bool whole = source_stride == sizeof(Out) && target_stride == sizeof(Out);
#pragma unroll
    for (u32 g = 0; g < own; ++g) {
      const RowGroup group = at(g);
      whole = whole && has_quad(group.column, span_.width) && is_aligned<Out>(group.source) &&
              is_aligned<Out>(group.target);
    }
    return __all_sync(~0u, whole) != 0;
  }
  MULTISAMPLE_FUNCTION void next() { begin_ += own * kPerturbThreads; }

 private:
  const StridedSpan& span_;
  u64 of_row_, row_, begin_;  // groups of a row; the block's first row, and the turn's first group from there on
};

MULTISAMPLE_FUNCTION bool is_inside(i64 column, i64 width) {
  return static_cast<u64>(column) < static_cast<u64>(width);
}

template <class Out>
MULTISAMPLE_FUNCTION Quad<Out> load_group(const RowGroup& group, i64 width, i64 stride) {
  Quad<Out> quad{};
  if (stride == sizeof(Out) && is_aligned<Out>(group.source) && has_quad(group.column, width)) {
    return load<Quad<Out>>(group.source);
  }
#pragma unroll
  for (u32 k = 0; k < kWidth; ++k) {
    if (is_inside(group.column + k, width)) quad.x[k] = load<Out>(group.source + k * stride);
  }
  return quad;
}

// The elements of the aligned quad that begins `shift` elements before the lane's group. All lanes of the warp take
// part.
template <class Out>
MULTISAMPLE_FUNCTION Quad<Out> shifted(const Quad<Out>& own, u32 shift) {
  const Out* const x = own.x;
  if constexpr (sizeof(Out) == 8) {
    const Out last = shuffle_up(x[3]);
    return shift == 0 ? own : Quad<Out>{{last, x[0], x[1], x[2]}};
  } else {
    const Out all[] = {shuffle_up(x[1]), shuffle_up(x[2]), shuffle_up(x[3]), x[0], x[1], x[2], x[3]};
    Out by_one[7];
#pragma unroll
    for (u32 k = 1; k < 7; ++k) by_one[k] = shift % 2 == 0 ? all[k] : all[k - 1];
    Quad<Out> quad;
#pragma unroll
    for (u32 k = 0; k < kWidth; ++k) quad.x[k] = shift < 2 ? by_one[k + 3] : by_one[k + 1];
    return quad;
  }
}

// Stores the aligned quads of a warp at any alignment of the row, and other elements one by one. The lane stores the
// quad that begins in the previous lane's group. A quad inside the row has elements of that row's groups only. All
// lanes of the warp take part.
template <class Out>
MULTISAMPLE_FUNCTION void store_group(const RowGroup& group, const Quad<Out>& own, i64 width, i64 stride) {
  const bool adjacent = stride == sizeof(Out);
  const u32 shift =
      adjacent ? static_cast<u32>(reinterpret_cast<u64>(group.target) % alignof(Quad<Out>) / sizeof(Out)) : 0;
  Quad<Out> quad = own;
  if (__all_sync(~0u, shift == 0) == 0) quad = shifted(own, shift);
  const u32 lane = threadIdx.x % 32;
  const bool has_own = adjacent && (shift == 0 || lane > 0) && has_quad(group.column - shift, width);
  const bool has_next = adjacent && shift > 0 && lane < 31 && has_quad(group.column - shift + 4, width);
  if (has_own) *reinterpret_cast<Quad<Out>*>(group.target - shift * sizeof(Out)) = quad;
  if (has_own && (has_next || shift == 0)) return;
#pragma unroll
  for (u32 k = 0; k < kWidth; ++k) {
    const bool done = k < kWidth - shift ? has_own : has_next;
    if (!done && is_inside(group.column + k, width)) *reinterpret_cast<Out*>(group.target + k * stride) = own.x[k];
  }
}

template <class Real>
MULTISAMPLE_FUNCTION void add(Real weight, const Normals<Real>& z, Real (&x)[kWidth]) {
  x[0] = fma_rn(weight, z.z0, x[0]);
  x[1] = fma_rn(weight, z.z1, x[1]);
  x[2] = fma_rn(weight, z.z2, x[2]);
  x[3] = fma_rn(weight, z.z3, x[3]);
}

// One turn of a block, with `rows` members. `prepare(row)` puts the members from `row` on into shared memory, and
// returns how many there are; the last call was prepare(0) and returned `count`. A warp without groups only
// prepares members.
template <class Out, bool fast, bool one_member, KeyOrigin origin, u32 kOwn, class Entry, class Whole, class Prepare>
MULTISAMPLE_FUNCTION void perturb_turn(const TurnGroups<Out, kOwn, Entry>& groups, Whole whole, bool works, i64 width,
                                       Computing<Out> factor, const Member<Computing<Out>, origin == kOfRows>* members,
                                       u64 rows, u32& count, u64 offset, const Keys<Computing<Out>>& keys,
                                       const Prepare& prepare) {
  using Real = Computing<Out>;
  Quad<Out> quads[kOwn];
#pragma unroll
  for (u32 g = 0; g < kOwn; ++g) {
    const RowGroup group = groups.at(g);
    quads[g] = whole ? load<Quad<Out>>(group.source) : load_group<Out>(group, width, groups.source_stride);
  }
  using OfMember = Member<Real, origin == kOfRows>;
  using Drawn = Noise<Real, false, fast>;
  // With a key for each row, no part of the noise is common to the rows.
  Drawn noise[kOwn];
  if constexpr (origin != kOfRows) {
#pragma unroll
    for (u32 g = 0; g < kOwn; ++g) noise[g] = Drawn::of(groups.at(g).index, offset, keys);
  }
  const auto normals_of = [&](u32 g, const OfMember& member) {
    if constexpr (origin == kOfRows) {
      const Keys<Real> own(u64{member.seed[1]} << 32 | member.seed[0]);
      return Drawn::of(groups.at(g).index, (offset & ~u64{0xFFFFFFFF}) | member.offset, own).in(member.words, own);
    } else {
      return noise[g].in(member.words, keys);
    }
  };
  Real x[kOwn][kWidth] = {};
  if (works) {
    // The first member is outside the loop: its noise is computed while the loads are in flight.
    const OfMember member = members[0];
#pragma unroll
    for (u32 g = 0; g < kOwn; ++g) {
      const Normals<Real> z = normals_of(g, member);
#pragma unroll
      for (u32 k = 0; k < kWidth; ++k) {
        x[g][k] = converted<Real>(quads[g].x[k]);
        if constexpr (origin >= kOfBatch) x[g][k] = mul_rn(factor, x[g][k]);
      }
      if (one_member || rows > 0) add(member.weight, z, x[g]);
    }
  }
  if constexpr (!one_member) {
    u32 first = 1;
#pragma unroll 1
    for (u64 row = 0;;) {
      // The address stays in a register: the compiler would compute it again for each member.
      const OfMember* const all = opaque_shared(members);
#pragma unroll(kOwn == 1 ? 2 : 1)
      for (u32 r = works ? first : count; r < count; ++r) {
        const OfMember member = all[r];
#pragma unroll
        for (u32 g = 0; g < kOwn; ++g) add(member.weight, normals_of(g, member), x[g]);
      }
      first = 0;
      if (rows <= kPerturbThreads) break;
      __syncthreads();
      row = rows - row > kPerturbThreads ? row + kPerturbThreads : 0;
      count = prepare(row);
      if (row == 0) break;
    }
  }
#pragma unroll
  for (u32 g = 0; g < kOwn; ++g) {
    Quad<Out> quad;
#pragma unroll
    for (u32 k = 0; k < kWidth; ++k) quad.x[k] = narrow<Out>(x[g][k]);
    const RowGroup group = groups.at(g);
    if (whole) {
      *reinterpret_cast<Quad<Out>*>(group.target) = quad;
    } else {
      store_group(group, quad, width, groups.target_stride);
    }
  }
}

// The span of matrix b of a batch.
template <class Entry>
MULTISAMPLE_HOST_FUNCTION const Entry& span_of_batch(const Entry& span, u32) {
  return span;
}
template <class Entry>
MULTISAMPLE_HOST_FUNCTION Entry span_of_batch(const Wide<Entry>& span, u32 b) {
  Entry own = span;
  own.source += b * span.source_step;
  own.target += b * span.target_step;
  return own;
}

template <class Real, class Entry>
MULTISAMPLE_FUNCTION Real factor_of(const Launch& call, const Wide<Entry>& span) {
  if (call.sigma_type == kNumber) return static_cast<Real>(span.factor.number);
  const char* const factors = static_cast<const char*>(call.sigma.data);
  return load<Real>(factors + static_cast<i64>(span.factor.index) * call.sigma_stride);
}

template <class Out, bool fast, bool one_member, KeyOrigin origin, class Kind>
MULTISAMPLE_FUNCTION void perturb(const Launch& call, const SpanList<EntryOf<Kind, origin>>& list,
                                  const Keys<Computing<Out>>& keys) {
  using Real = Computing<Out>;
  using OfMember = Member<Real, origin == kOfRows>;
  constexpr u32 kOwn = own_groups(sizeof(Out), one_member), kTurn = kOwn * kPerturbThreads;
  const auto& entry = span_of_block(list);
  const auto& span = span_of_batch<Kind>(entry, origin == kOfBatch ? blockIdx.y : 0);
  Real factor = 1;
  if constexpr (origin >= kOfBatch) factor = factor_of<Real>(call, entry);
  const u64 id = static_cast<u64>(span.id) << 32;
  const u64 offset = origin == kOfRows ? id : value_of(call.offset, call.offset_at) + id;
  const auto member_of = [&](u64 r) -> OfMember {
    const Real weight = element<Out>(weights_of(call), r);
    if constexpr (origin == kOfRows) {
      const i64 k = static_cast<i64>(r);
      const u64 seed = word_of(call.seed, moved(call.seed_at, k * call.seed_step), call.word_formats & 0xFF);
      const u32 own = low(word_of(call.offset, moved(call.offset_at, k * call.offset_step), call.word_formats >> 8));
      return {row_part(static_cast<u32>(call.first_row), own, round_keys(seed, kKey1)),
              weight,
              own,
              {low(seed), high(seed)}};
    } else {
      return {row_part(static_cast<u32>(call.first_row + r), low(offset), keys.keys), weight};
    }
  };
  const u64 begin = static_cast<u64>(blockIdx.x - span.block) * (list.turns * kTurn), left = groups_of(span) - begin;
  const u32 most = list.turns * kTurn, end = left < most ? static_cast<u32>(left) : most;
  TurnGroups<Out, kOwn, Kind> groups(span, begin);
  const auto turns = [&](const OfMember* members, u64 rows, u32 count, const auto& prepare) {
#pragma unroll 1
    for (u32 first = 0; first < end; first += kTurn) {
      const bool whole = groups.are_whole(), works = first + threadIdx.x / 32 * 32 < end;
      // With a constant `whole`, no branch separates the loads, and the compiler issues them together.
      if constexpr (!decltype(groups)::kUniform) {
        perturb_turn<Out, fast, one_member, origin>(groups, whole, works, span.width, factor, members, rows, count,
                                                    offset, keys, prepare);
      } else if (whole) {
        perturb_turn<Out, fast, one_member, origin>(groups, Constant<true>{}, true, span.width, factor, members, rows,
                                                    count, offset, keys, prepare);
      } else {
        perturb_turn<Out, fast, one_member, origin>(groups, Constant<false>{}, works, span.width, factor, members, rows,
                                                    count, offset, keys, prepare);
      }
      groups.next();
    }
  };
  if constexpr (one_member) {
    // Registers keep a single member: the block needs neither shared memory nor a barrier.
    const OfMember member = member_of(0);
    turns(&member, 1, 1, [](u64) { return 1; });
  } else {
    __shared__ OfMember members[kPerturbThreads];
    const auto prepare = [&](u64 row) {
      const u64 rest = call.rows - row;
      if (threadIdx.x < rest) members[threadIdx.x] = member_of(row + threadIdx.x);
      __syncthreads();
      return rest < kPerturbThreads ? static_cast<u32>(rest) : kPerturbThreads;
    };
    const u32 count = prepare(0);
    turns(members, call.rows, count, prepare);
  }
}

// Minimum blocks per SM, for __launch_bounds__: more blocks spill registers. Strided spans and non-uniform round keys
// take further registers. With one member and elements of at most four bytes, occupancy is full, except in a batch,
// whose addresses take registers too.
template <class Out, bool one_member, class Kind, KeyOrigin origin>
constexpr int kPerturbBlocksAtOnce = one_member ? blocks_with_room(sizeof(Out) == 8     ? 4
                                                                   : origin == kOfBatch ? 6
                                                                                        : 8,
                                                                   kPerturbThreads)
                                                : (sizeof(Kind) > sizeof(Run) || origin != kInParameters ? 2 : 3);

// `Kind` is Run or StridedSpan.
template <class Out, bool fast, bool one_member, class Kind, KeyOrigin origin>
__global__ void __launch_bounds__(kPerturbThreads, (kPerturbBlocksAtOnce<Out, one_member, Kind, origin>))
perturb_kernel(const __grid_constant__ Launch call, const __grid_constant__ SpanList<EntryOf<Kind, origin>> list,
               const __grid_constant__ Keys<Computing<Out>> keys) {
  // See sample_kernel: numbers passed by value are uniform to the compiler.
  if constexpr (origin == kInMemory || origin == kOfBatch) {
    const Launch values = with_values(origin == kOfBatch ? matrix_of_batch(call, blockIdx.y) : call);
    const Keys<Computing<Out>> own_keys(values.seed);
    perturb<Out, fast, one_member, origin, Kind>(values, list, own_keys);
  } else if constexpr (origin == kOfRows) {
    Launch values = call;
    values.first_row = value_of(call.first_row, call.first_row_at);
    perturb<Out, fast, one_member, origin, Kind>(values, list, keys);
  } else {
    perturb<Out, fast, one_member, origin, Kind>(call, list, keys);
  }
}

}  // namespace multisample
