// The element types, listed once in C++; backends/element_types.py has the same rows, and backends/README.md lists what
// a new type needs.
#pragma once

#include "stream/rounding.h"

namespace multisample {

// Types of a matrix: name, type, bytes, NumPy's name, PyTorch's ScalarType.
#define MULTISAMPLE_MATRIX_TYPES(ROW)              \
  ROW(Float16, float16, 2, "float16", Half)        \
  ROW(BFloat16, bfloat16, 2, "bfloat16", BFloat16) \
  ROW(Float32, float, 4, "float32", Float)         \
  ROW(Float64, double, 8, "float64", Double)

// Types of mu and sigma. LAST is the row for the default case of a switch.
#define MULTISAMPLE_ELEMENT_TYPES(ROW, LAST) \
  MULTISAMPLE_MATRIX_TYPES(ROW)              \
  ROW(Int8, i8, 1, "int8", Char)             \
  ROW(Int16, i16, 2, "int16", Short)         \
  ROW(Int32, i32, 4, "int32", Int)           \
  ROW(Int64, i64, 8, "int64", Long)          \
  ROW(UInt8, u8, 1, "uint8", Byte)           \
  ROW(UInt16, u16, 2, "uint16", UInt16)      \
  ROW(UInt32, u32, 4, "uint32", UInt32)      \
  LAST(UInt64, u64, 8, "uint64", UInt64)

// kNumber: one number in place of a vector.
enum ElementType : u32 {
  kNumber,
#define MULTISAMPLE_ROW(name, type, size, numpy, torch) k##name,
  MULTISAMPLE_ELEMENT_TYPES(MULTISAMPLE_ROW, MULTISAMPLE_ROW)
#undef MULTISAMPLE_ROW
};

#define MULTISAMPLE_ROW(name, type, size, numpy, torch) static_assert(sizeof(type) == size, numpy);
MULTISAMPLE_ELEMENT_TYPES(MULTISAMPLE_ROW, MULTISAMPLE_ROW)
#undef MULTISAMPLE_ROW

// A type as a value.
template <class T>
struct TypeOf {
  using Type = T;
};

// A value known to the compiler.
template <auto value>
struct Constant {
  MULTISAMPLE_HOST_FUNCTION constexpr operator decltype(value)() const { return value; }
};

#if !defined(__CUDACC_RTC__)

// run(Constant<flag>{}...) for flags that are known at run time.
template <class Run>
inline auto with_constants(const Run& run) {
  return run();
}
template <class Run, class... Flags>
inline auto with_constants(const Run& run, bool flag, Flags... flags) {
  const auto with = [&](auto known) {
    return with_constants([&](auto... rest) { return run(known, rest...); }, flags...);
  };
  return flag ? with(Constant<true>{}) : with(Constant<false>{});
}

inline u32 computing_type(u32 type) { return type == kFloat64 ? kFloat64 : kFloat32; }

// Of a matrix type.
inline u32 element_size(u32 type) {
  switch (type) {
#define MULTISAMPLE_ROW(name, type, size, numpy, torch) \
  case k##name: return size;
    MULTISAMPLE_MATRIX_TYPES(MULTISAMPLE_ROW)
#undef MULTISAMPLE_ROW
  }
  __builtin_unreachable();
}

#endif

}  // namespace multisample
