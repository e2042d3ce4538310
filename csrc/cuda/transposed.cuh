// The kernels with transposed stores, for contiguous dimensions, as with layout "nd".
//
// A thread keeps some dimensions, with their mu and sigma, and goes along the columns. The column parts of the words
// (with shared noise, the normals) are in shared memory. In one pass, a block draws a few groups of columns.
//
// kTransposed: a piece is the contiguous dimensions that one vectorised store writes. A thread keeps the dimensions
// that its piece has in a group's first column. Where columns differ in alignment, the pieces of the other columns
// begin with dimensions of the previous lane. A shuffle supplies these, and lane 0 stores nothing.
// kTransposedStaged: for few dimensions in a contiguous matrix whose pieces are not aligned. A block draws
// one pass into shared memory, in the order of the output, and then copies the pass to the matrix. See cuda/geometry.h.
#pragma once

#include "cuda/stores.cuh"

namespace multisample {

// The lowest `count` bits, 32 at most.
template <u32 count>
constexpr u32 kAllOf = ~0u >> (32 - count);

// The dimensions of one thread.
template <class Out, u32 own_rows>
struct ThreadDimensions {
  using Real = Computing<Out>;
  Real mu[own_rows], sigma[own_rows];
  RowPart words[own_rows];

  MULTISAMPLE_FUNCTION ThreadDimensions(const u64 (&rows)[own_rows], const Keys<Real>& keys, const SampleCall& call) {
    load_elements<Out>(mu_of(call), rows, mu);
    load_elements<Out>(sigma_of(call), rows, sigma);
    const u32 offset = low(value_of(call.offset, call.offset_at));
#pragma unroll
    for (u32 s = 0; s < own_rows; ++s)
      words[s] = row_part(static_cast<u32>(call.first_row + rows[s]), offset, keys.keys);
  }
};

// The groups of columns of one block.
template <class GroupNoise, u32 width>
struct Band {
  u64 first_group;
  u32 count;  // groups
  u32 groups_per_pass;
  i64 columns;             // from the band's first group to the end of the rows
  u32 skipped;             // columns of the first group that come before the matrix
  u32 first_whole, whole;  // passes that begin at groups [first_whole, first_whole + whole) are inside the matrix

  MULTISAMPLE_FUNCTION Band(u32 band, const SampleCall& call, const Geometry& geometry)
      : first_group(static_cast<u64>(band) * geometry.band_groups), groups_per_pass(geometry.groups_per_pass) {
    columns = static_cast<i64>(geometry.skip + call.columns - first_group * width);
    const u64 left = static_cast<u64>(columns + width - 1) / width;
    count = geometry.band_groups < left ? geometry.band_groups : static_cast<u32>(left);
    skipped = band == 0 ? geometry.skip : 0;
    first_whole = skipped > 0 ? groups_per_pass : 0;
    const u64 inside = static_cast<u64>(columns) / width;
    whole = inside < first_whole + groups_per_pass ? 0
            : inside - groups_per_pass - first_whole < count
                ? static_cast<u32>(inside - groups_per_pass) - first_whole + 1
                : count;
  }

  // The address of the first group's first column, which may lie before the matrix.
  MULTISAMPLE_FUNCTION char* address(const SampleCall& call, const Geometry& geometry) const {
    return static_cast<char*>(call.matrix) +
           (static_cast<i64>(first_group * width) - geometry.skip) * call.column_stride;
  }

  // Whether all columns of the pass that begins with group `k` are inside the matrix.
  MULTISAMPLE_FUNCTION bool has_whole(u32 k) const { return k - first_whole < whole; }

  // Mask of group `k`, with `own_rows` bits per column: set for columns inside the matrix.
  template <u32 own_rows>
  MULTISAMPLE_FUNCTION u32 inside(u32 k) const {
    const i64 column = static_cast<i64>(k) * width;
    u32 bits = 0;
#pragma unroll
    for (u32 c = 0; c < width; ++c) {
      if (column + c >= skipped && column + c < columns) bits |= kAllOf<own_rows> << c * own_rows;
    }
    return bits;
  }

  // Stores the noise of a chunk of groups, from group `begin` on, in shared memory, and returns the number of groups.
  // An incomplete last pass reads groups behind the band, whose noise is stored too. All threads of the block take
  // part.
  template <class Real>
  MULTISAMPLE_FUNCTION u32 fill(GroupNoise* chunk, u32 begin, const Keys<Real>& keys, const SampleCall& call,
                                const Geometry& geometry) const {
    const u32 groups = count - begin < geometry.chunk ? count - begin : geometry.chunk;
    if (begin > 0) __syncthreads();
    if (threadIdx.x < geometry.chunk && threadIdx.x + 1 < groups + groups_per_pass) {
      const u64 group = call.first_column / width + first_group + begin + threadIdx.x;
      chunk[threadIdx.x] = GroupNoise::of(static_cast<u32>(group), value_of(call.offset, call.offset_at), keys);
    }
    __syncthreads();
    return groups;
  }
};

// The pieces of one thread, one per column of a group, from its own dimensions and from those of the previous lane.
template <class Out, bool antithetic>
struct Pieces {
  using Real = Computing<Out>;
  static constexpr u32 kOwnRows = multisample::kOwnRows<sizeof(Out)>;
  static constexpr u32 kColumns = Elements<Out, antithetic>::kCount, kPerNormal = kColumns / 4;
  static constexpr u32 kAll = kAllOf<kColumns * kOwnRows>;
  RowPart words[kOwnRows];
  Real mu[2 * kOwnRows - 1], sigma[2 * kOwnRows - 1];  // of the previous lane's last dimensions, then of the lane's own
  i32 to[kColumns];  // displacement of each piece from the first column's, in elements
  u32 inside;        // mask of the elements inside the matrix's rows
  Piece<Out, kOwnRows> piece[kColumns];

  // Sets the parameters of the lane's own dimensions and of the previous lane's. All lanes of the warp take part.
  MULTISAMPLE_FUNCTION void set_parameters(const ThreadDimensions<Out, kOwnRows>& own) {
#pragma unroll
    for (u32 s = 0; s < kOwnRows; ++s) {
      words[s] = own.words[s], mu[kOwnRows - 1 + s] = own.mu[s], sigma[kOwnRows - 1 + s] = own.sigma[s];
    }
#pragma unroll
    for (u32 s = 0; s + 1 < kOwnRows; ++s) {
      mu[s] = shuffle_up(own.mu[s + 1]), sigma[s] = shuffle_up(own.sigma[s + 1]);
    }
  }

  // Computes the pieces from the normals of the lane's own dimensions. The piece of column 0 has exactly these
  // dimensions. The piece of each further column begins `delta` dimensions earlier than the one before, modulo the size
  // of a piece. All lanes of the warp take part.
  template <u32 delta>
  MULTISAMPLE_FUNCTION void make(const Normals<Real>* z) {
#pragma unroll
    for (u32 k = 0; k < 4; ++k) {
      Real of_both[2 * kOwnRows - 1];
      const u32 back_0 = k * kPerNormal * delta % kOwnRows, back_1 = (back_0 + delta) % kOwnRows;
      const u32 most = kPerNormal == 1 || back_0 > back_1 ? back_0 : back_1;
#pragma unroll
      for (u32 s = 0; s < kOwnRows; ++s) of_both[kOwnRows - 1 + s] = normal(z[s], k);
#pragma unroll
      for (u32 s = 1; s <= most; ++s) of_both[kOwnRows - 1 - s] = shuffle_up(normal(z[kOwnRows - s], k));
#pragma unroll
      for (u32 c = 0; c < kPerNormal; ++c) {
        const u32 back = c == 0 ? back_0 : back_1;
#pragma unroll
        for (u32 e = 0; e < kOwnRows; ++e) {
          const u32 at = kOwnRows - 1 + e - back;
          piece[kPerNormal * k + c].x[e] =
              narrow<Out>(fma_rn(c == 0 ? sigma[at] : negated(sigma[at]), of_both[at], mu[at]));
        }
      }
    }
  }

  MULTISAMPLE_FUNCTION void write(Out* at) const {
#pragma unroll
    for (u32 c = 0; c < kColumns; ++c) *reinterpret_cast<Piece<Out, kOwnRows>*>(at + to[c]) = piece[c];
  }

  // Stores the elements whose bit in `written` is set.
  MULTISAMPLE_FUNCTION void write(Out* at, u32 written) const {
#pragma unroll
    for (u32 c = 0; c < kColumns; ++c) {
      Out* const of_column = opaque(at + to[c]);
#pragma unroll
      for (u32 s = 0; s < kOwnRows; ++s) {
        if (written >> (c * kOwnRows + s) & 1) of_column[s] = piece[c].x[s];
      }
    }
  }

 private:
  MULTISAMPLE_FUNCTION static Real normal(const Normals<Real>& z, u32 k) {
    return k == 0 ? z.z0 : k == 1 ? z.z1 : k == 2 ? z.z2 : z.z3;
  }
};

// Draws the passes of a chunk, from address `at` on, and returns the address of the next pass. The thread draws group
// `pass_group` of each pass.
template <u32 delta, class Out, bool antithetic, class Real, class GroupNoise, class Band>
MULTISAMPLE_FUNCTION Out* go_along(Pieces<Out, antithetic>& made, const GroupNoise* chunk, u32 begin, u32 pass_group,
                                   u32 groups, Out* at, i32 step, const Band& band, const Keys<Real>& keys) {
  using Made = Pieces<Out, antithetic>;
  const GroupNoise* from = chunk + pass_group;
#pragma unroll 1
  for (u32 k = 0; k < groups; k += band.groups_per_pass, from += band.groups_per_pass) {
    const GroupNoise noise = *from;
    Normals<Real> z[Made::kOwnRows];
#pragma unroll
    for (u32 s = 0; s < Made::kOwnRows; ++s) z[s] = noise.in(made.words[s], keys);
    made.template make<delta % Made::kOwnRows>(z);
    const bool is_whole = band.has_whole(begin + k);
    if (is_whole && made.inside == Made::kAll) {
      made.write(at);
    } else if (made.inside != 0) {
      made.write(at,
                 is_whole ? made.inside : made.inside & band.template inside<Made::kOwnRows>(begin + k + pass_group));
    }
    at += step;
  }
  return at;
}

template <class Out, bool shared_noise, bool antithetic, bool fast>
MULTISAMPLE_FUNCTION void draw_transposed(const SampleCall& call, const Geometry& geometry) {
  using Real = Computing<Out>;
  using GroupNoise = Noise<Real, shared_noise, fast>;
  using Made = Pieces<Out, antithetic>;
  constexpr u32 width = Made::kColumns, own_rows = Made::kOwnRows;
  __shared__ GroupNoise chunk[kTransposedThreads];
  const u32 band_index = blockIdx.x / geometry.blocks_per_band;
  const u32 tile = blockIdx.x - band_index * geometry.blocks_per_band;
  const Band<GroupNoise, width> band(band_index, call, geometry);
  const Keys<Real> keys(call.seed);

  // Alignment in elements, the same in all groups: the first column of a group begins `shift` behind an aligned
  // address, and each further column `delta` more.
  const i32 stride = geometry.column_step, step = static_cast<i32>(band.groups_per_pass * width) * stride;
  const u64 begin_of_0 = reinterpret_cast<u64>(call.matrix) - geometry.skip * static_cast<u64>(call.column_stride);
  const u32 shift = begin_of_0 / sizeof(Out) % own_rows, delta = static_cast<u32>(stride) % own_rows;

  // Pieces are numbered through all groups of a pass. With `overlap`, lane 0 repeats the last piece of the previous
  // warp. Lane 0 of the first warp of a pass has position -1, which is no piece.
  const u32 overlap = geometry.overlap, thread = threadIdx.x;
  const u32 pieces_of_tile = (32 - overlap) * (blockDim.x / 32);
  const i32 position = static_cast<i32>(tile * pieces_of_tile + thread - overlap * (thread / 32 + 1));
  const u32 group_of_position = position < 0 ? 0 : static_cast<u32>(position) / geometry.pieces;
  const bool exists = position >= 0 && group_of_position < band.groups_per_pass;
  const u32 pass_group = exists ? group_of_position : 0;
  const i64 first = (position - static_cast<i64>(pass_group) * geometry.pieces) * own_rows - shift;
  const i64 rows = static_cast<i64>(call.rows);
  u64 row[own_rows];
#pragma unroll
  for (u32 s = 0; s < own_rows; ++s) {
    row[s] = static_cast<u64>(first + s < 0 ? 0 : first + s < rows ? first + s : rows - 1);
  }
  const ThreadDimensions<Out, own_rows> dimensions(row, keys, call);

  Made made;
#pragma unroll
  for (u32 c = 0; c < width; ++c) {
    const u32 behind = c * static_cast<u32>(stride) - c * delta % own_rows;
    // Without opaque(), each pass recomputes the displacement. Registers have room for four displacements, and only
    // where the computing type is float32.
    made.to[c] = static_cast<i32>(width == 4 && sizeof(Real) == 4 ? opaque(behind) : behind);
  }
  made.inside = exists && thread % 32 >= overlap ? Made::kAll : 0;
  if (first < (delta == 0 ? 0 : static_cast<i32>(own_rows) - 1) || first + own_rows > rows) {
#pragma unroll
    for (u32 c = 0; c < width; ++c) {
#pragma unroll
      for (u32 s = 0; s < own_rows; ++s) {
        const i64 place = first + s - static_cast<i64>(c * delta % own_rows);
        if (place < 0 || place >= rows) made.inside &= ~(1u << (c * own_rows + s));
      }
    }
  }

  Out* at = reinterpret_cast<Out*>(band.address(call, geometry)) + first +
            static_cast<i64>(static_cast<i32>(pass_group * width)) * stride;
  for (u32 begin = 0; begin < band.count; begin += geometry.chunk) {
    const u32 groups = band.fill(chunk, begin, keys, call, geometry);
    // The shuffle waits for mu and sigma. It comes after fill(), which hides the latency of their loads.
    if (begin == 0) made.set_parameters(dimensions);
    switch (delta) {
      case 0: at = go_along<0>(made, chunk, begin, pass_group, groups, at, step, band, keys); break;
      case 1: at = go_along<1>(made, chunk, begin, pass_group, groups, at, step, band, keys); break;
      case 2: at = go_along<2>(made, chunk, begin, pass_group, groups, at, step, band, keys); break;
      default: at = go_along<3>(made, chunk, begin, pass_group, groups, at, step, band, keys);
    }
  }
}

template <class Out, bool shared_noise, bool antithetic, bool fast>
MULTISAMPLE_FUNCTION void draw_transposed_staged(const SampleCall& call, const Geometry& geometry) {
  using Real = Computing<Out>;
  using Group = Elements<Out, antithetic>;
  using GroupNoise = Noise<Real, shared_noise, fast>;
  constexpr u32 width = Group::kCount, own_rows = kStagedOwnRows<sizeof(Out), antithetic>;
  // A thread copies at most kPieces pieces per pass from shared memory.
  using Piece = multisample::Piece<Out, alignof(Quad<Out>) / sizeof(Out)>;
  constexpr u32 kStagedThreads = multisample::kStagedThreads<shared_noise>;
  constexpr u32 kPieces = own_rows * width * sizeof(Out) / sizeof(Piece);
  __shared__ GroupNoise chunk[kStagedThreads];
  __shared__ Piece stage[kStagedThreads * kPieces];
  const Band<GroupNoise, width> band(blockIdx.x, call, geometry);
  const Keys<Real> keys(call.seed);
  const u32 rows = static_cast<u32>(call.rows);

  // Dimensions are numbered through all groups of a pass. Neighbouring threads take neighbouring numbers in each own
  // row s. A warp skips the own rows in which it has no dimension. Blocks rotate the warps that skip, so that every
  // scheduler has the same work.
  const u32 filled = band.groups_per_pass * rows, thread = (threadIdx.x + blockIdx.x * 32) % kStagedThreads;
  u64 row[own_rows];
  u32 place[own_rows][width];
  const GroupNoise* from[own_rows];
#pragma unroll
  for (u32 s = 0; s < own_rows; ++s) {
    // A lane without a dimension repeats lane 0's, which takes less time than a branch.
    const u32 of_thread = thread + s * kStagedThreads, position = of_thread < filled ? of_thread : of_thread & ~31u;
    const u32 pass_group = position / rows;
    row[s] = position - pass_group * rows, from[s] = chunk + pass_group;
#pragma unroll
    for (u32 c = 0; c < width; ++c) {
      // Without opaque(), each pass recomputes the place.
      place[s][c] = opaque((pass_group * (width - 1) + c) * rows * static_cast<u32>(sizeof(Out)) +
                           position * static_cast<u32>(sizeof(Out)));
    }
  }
  ThreadDimensions<Out, own_rows> dimensions(row, keys, call);
#pragma unroll
  for (u32 s = 0; s < own_rows; ++s) {
    // Without opaque(), each pass recomputes the row part.
    dimensions.words[s] = {opaque(dimensions.words[s].into_c2_of_round_2), opaque(dimensions.words[s].c3_of_round_2)};
  }
  // Own rows that the warp draws. The shuffle from lane 0 makes the number uniform to the compiler.
  const u32 used = __shfl_sync(~0u, (filled + kStagedThreads - 1 - thread) / kStagedThreads, 0);

  Out* out = reinterpret_cast<Out*>(band.address(call, geometry));
  const u32 step = filled * width, pieces = step * sizeof(Out) / sizeof(Piece);
  const bool aligned = reinterpret_cast<u64>(out) % sizeof(Piece) == 0;
  for (u32 begin = 0; begin < band.count; begin += geometry.chunk) {
    const u32 groups = band.fill(chunk, begin, keys, call, geometry);
    for (u32 k = 0; k < groups; k += band.groups_per_pass) {
#pragma unroll
      for (u32 s = 0; s < own_rows; ++s) {
        if (s >= used) break;
        const Normals<Real> z = from[s][k].in(dimensions.words[s], keys);
        const Group group = scaled<Out, antithetic>(dimensions.mu[s], dimensions.sigma[s], z);
#pragma unroll
        for (u32 c = 0; c < width; ++c) {
          *reinterpret_cast<Out*>(reinterpret_cast<char*>(stage) + place[s][c]) = group.x[c];
        }
      }
      __syncthreads();
      if (aligned && band.has_whole(begin + k)) {
        const Piece* const from = stage + threadIdx.x;
        Piece* const to = reinterpret_cast<Piece*>(out) + threadIdx.x;
#pragma unroll
        for (u32 j = 0; j < kPieces; ++j) {
          if (threadIdx.x + j * kStagedThreads < pieces) to[j * kStagedThreads] = from[j * kStagedThreads];
        }
      } else {
        const i64 left = band.columns - static_cast<i64>(begin + k) * width;
        const u32 last = left < band.groups_per_pass * width ? static_cast<u32>(left) * rows : step;
        for (u32 e = (begin + k == 0 ? band.skipped : 0) * rows + threadIdx.x; e < last; e += kStagedThreads) {
          out[e] = reinterpret_cast<const Out*>(stage)[e];
        }
      }
      __syncthreads();
      out += step;
    }
  }
}

}  // namespace multisample
