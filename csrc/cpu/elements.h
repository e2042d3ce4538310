// Reads elements of any type at any address, and converts them to the computing type.
#pragma once

#include "launch.h"

namespace multisample {
namespace cpu {

// An element at any address.
template <class T>
struct __attribute__((packed, may_alias)) Unaligned {
  T x;
};

template <class T>
MULTISAMPLE_FUNCTION T load(const char* at) {
  return reinterpret_cast<const Unaligned<T>*>(at)->x;
}

template <class T, class Real>
inline void read_as(const Vector& from, u64 first, u64 count, Real* to) {
  const char* at = static_cast<const char*>(from.input.data) + static_cast<i64>(first) * from.stride;
  if (from.stride == sizeof(T)) {  // A constant stride gives a vector loop.
    for (u64 k = 0; k < count; ++k) to[k] = converted<Real>(load<T>(at + k * sizeof(T)));
    return;
  }
  for (u64 k = 0; k < count; ++k) to[k] = converted<Real>(load<T>(at + static_cast<i64>(k) * from.stride));
}

// Reads elements of mu or sigma, rounded to the computing type.
template <class Real>
inline void read(const Vector& from, u64 first, u64 count, Real* to) {
  switch (from.type) {
    case kNumber:
      for (u64 k = 0; k < count; ++k) to[k] = static_cast<Real>(from.input.number);
      break;
#define MULTISAMPLE_ROW(name, type, size, numpy, torch) \
  case k##name: read_as<type>(from, first, count, to); break;
#define MULTISAMPLE_LAST(name, type, size, numpy, torch) \
  default: read_as<type>(from, first, count, to);
      MULTISAMPLE_ELEMENT_TYPES(MULTISAMPLE_ROW, MULTISAMPLE_LAST)
#undef MULTISAMPLE_ROW
#undef MULTISAMPLE_LAST
  }
}

}  // namespace cpu
}  // namespace multisample
