// The elements of one dimension in one group of columns: the unit that a thread draws.
//
// Philox words have a column part and a row part. A thread that draws many dimensions of the same columns computes the
// column part once; a thread that draws many columns of one dimension computes the row part once.
#pragma once

#include "cuda/geometry.h"
#include "stream/normals.h"
#include "stream/rounding.h"

namespace multisample {

template <class T>
MULTISAMPLE_FUNCTION T load(const char* at) {
  return *reinterpret_cast<const T*>(at);
}

// Element `k` of a vector of any type, or a number.
template <class Real>
MULTISAMPLE_FUNCTION Real any_element(const Vector& vector, u64 k) {
  const char* const at = static_cast<const char*>(vector.input.data) + static_cast<i64>(k) * vector.stride;
  // The usual type avoids the jump table.
  if (vector.type == (sizeof(Real) == 4 ? kFloat32 : kFloat64)) return load<Real>(at);
  switch (vector.type) {
    case kNumber: return rounded<Real>(vector.input.number);
#define MULTISAMPLE_ROW(name, type, size, numpy, torch) \
  case k##name: return converted<Real>(load<type>(at));
#define MULTISAMPLE_LAST(name, type, size, numpy, torch) \
  default: return converted<Real>(load<type>(at));
      MULTISAMPLE_ELEMENT_TYPES(MULTISAMPLE_ROW, MULTISAMPLE_LAST)
#undef MULTISAMPLE_ROW
#undef MULTISAMPLE_LAST
  }
}

// Loads elements `k` of a vector that kernels for matrices of type Out read. All loads are issued before the first is
// used. `usual`: the vector is contiguous.
template <class Out, bool usual = false, class Real, u32 count>
MULTISAMPLE_FUNCTION void load_elements(const Vector& vector, const u64 (&k)[count], Real (&x)[count]) {
  const auto load_as = [&](auto type) {
    using Type = typename decltype(type)::Type;
    const char* const data = static_cast<const char*>(vector.input.data);
#pragma unroll
    for (u32 j = 0; j < count; ++j) {
      const char* const at = data + static_cast<i64>(k[j]) * vector.stride;
      x[j] = converted<Real>(usual ? static_cast<const Type*>(vector.input.data)[k[j]] : load<Type>(at));
    }
  };
  if (!usual && vector.type == kNumber) {
#pragma unroll
    for (u32 j = 0; j < count; ++j) x[j] = rounded<Real>(vector.input.number);
  } else if (sizeof(Out) < sizeof(Real) && vector.type != kFloat32) {
    load_as(TypeOf<Out>{});
  } else {
    load_as(TypeOf<Real>{});
  }
}

template <class Out>
MULTISAMPLE_FUNCTION Computing<Out> element(const Vector& vector, u64 k) {
  const u64 one[] = {k};
  Computing<Out> x[1];
  load_elements<Out>(vector, one, x);
  return x[0];
}

template <class Real>
struct Keys {
  RoundKeys keys;

  MULTISAMPLE_HOST_FUNCTION explicit Keys(u64 seed) : keys(round_keys(seed, kKey1)) {}
};

template <>
struct Keys<double> : Keys<float> {
  RoundKeys fine_keys;

  MULTISAMPLE_HOST_FUNCTION explicit Keys(u64 seed)
      : Keys<float>(seed), fine_keys(round_keys(seed, kKey1 ^ kFloat64Key)) {}
};

// The part of a group's noise that depends on its columns alone.
template <class Real, bool shared_noise, bool fast>
struct alignas(16) Noise {
  ColumnPart columns[sizeof(Real) / 4];  // of both blocks of words in float64

  MULTISAMPLE_FUNCTION static Noise of(u32 group, u64 offset, const Keys<Real>& k) {
    const auto part = [&](const RoundKeys& keys) { return column_part(group, low(offset), high(offset), keys); };
    if constexpr (sizeof(Real) == 4) {
      return {{part(k.keys)}};
    } else {
      return {{part(k.keys), part(k.fine_keys)}};
    }
  }
  MULTISAMPLE_FUNCTION Normals<Real> in(const RowPart& row, const Keys<Real>& k) const {
    const Words w = words(columns[0], row, k.keys);
    if constexpr (sizeof(Real) == 8) {
      return normals(w, words(columns[1], row, k.fine_keys));
    } else {
      return fast ? fast_normals(w) : normals(w);
    }
  }
};

// With shared noise, every row has the normals of row 0.
template <class Real, bool fast>
struct alignas(16) Noise<Real, true, fast> {
  Normals<Real> z;

  MULTISAMPLE_FUNCTION static Noise of(u32 group, u64 offset, const Keys<Real>& k) {
    return {Noise<Real, false, fast>::of(group, offset, k).in(row_part(0, low(offset), k.keys), k)};
  }
  MULTISAMPLE_FUNCTION Normals<Real> in(const RowPart&, const Keys<Real>&) const { return z; }
};

// Bytes of the largest vectorised load or store.
constexpr u32 kStore = 16;

// Adjacent elements, which one vectorised store writes, or several if they have more than kStore bytes.
template <class Out, u32 count>
struct alignas(count * sizeof(Out) < kStore ? count * sizeof(Out) : kStore) Piece {
  static constexpr u32 kCount = count;
  Out x[count];
};

template <class Out>
using Quad = Piece<Out, 4>;

// The elements of one dimension in one group.
template <class Out, bool antithetic>
using Elements = Piece<Out, antithetic ? kAntitheticWidth : kWidth>;

template <class Out, bool antithetic, class Real>
MULTISAMPLE_FUNCTION Elements<Out, antithetic> scaled(Real mu, Real sigma, const Normals<Real>& z) {
  const auto at = [&](Real factor, Real noise) { return narrow<Out>(fma_rn(factor, noise, mu)); };
  if constexpr (antithetic) {
    const Real mirrored = negated(sigma);
    return {{at(sigma, z.z0), at(mirrored, z.z0), at(sigma, z.z1), at(mirrored, z.z1), at(sigma, z.z2),
             at(mirrored, z.z2), at(sigma, z.z3), at(mirrored, z.z3)}};
  } else {
    return {{at(sigma, z.z0), at(sigma, z.z1), at(sigma, z.z2), at(sigma, z.z3)}};
  }
}

}  // namespace multisample
