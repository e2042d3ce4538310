// A unit has the kernels of one operation, element type and set of options. Each unit is a library, so a program
// compiles only the units that its calls need. backends/native/units.py lists the units and writes their sources.
#pragma once

#include <atomic>
#include <initializer_list>

#include "launch.h"

#define MULTISAMPLE_EXPORT extern "C" __attribute__((visibility("default")))

namespace multisample {

using UnitFunction = void (*)();  // the caller casts it to the type of the operation

// Whether a call is a gradient with one result, which is an elementwise product with noise.
inline bool is_product(const Launch& call) { return call.operation == kGradient && call.results == 1; }

// A product as a sample: sigma is the matrix, and mu is -0.0, with which a fused multiply-add rounds as a product does.
inline Launch sample_of_product(Launch call) {
  call.operation = kSample;
  call.results = 0;
  call.mu.number = -0.0, call.mu_stride = 0, call.mu_type = kNumber;
  call.sigma.data = call.matrix, call.sigma_stride = call.row_stride, call.sigma_type = call.type;
  call.type = computing_type(call.type);
  call.matrix = call.first;
  call.row_stride = call.column_stride = element_size(call.type);
  return call;
}

// Whether vectors of a kernel for the CPU run down the columns: rows are adjacent in memory.
inline bool runs_down(const Launch& call) {
  return call.rows > 1 && (is_product(call) || call.row_stride == static_cast<i64>(element_size(call.type)));
}

// The number of a call's kind. A product has the kind of its sample. In host memory, samples have kernels for two
// directions, and fast_math has no effect. backends/native/units.py computes the same number.
inline u32 kind_of(const Launch& call) {
  const u32 operation = is_product(call) ? kSample : call.operation;
  const u32 type = is_product(call) ? computing_type(call.type) : call.type;
  const bool last = operation == kSample && call.device < 0 ? runs_down(call) : call.fast_math != 0;
  return (operation * 4 + type - kFloat16) * 8 + (call.shared_noise ? 4 : 0) + (call.antithetic ? 2 : 0) + last;
}
constexpr u32 kKinds = 4 * 4 * 8;

// The function for each kind of call; null if its unit is not loaded. Each shared library has a table of its own.
__attribute__((visibility("hidden"))) inline std::atomic<UnitFunction> units[kKinds];

// Enters a function into the table for some kinds of calls.
struct Unit {
  template <class Function>
  Unit(Function* function, std::initializer_list<u32> kinds) {
    for (const u32 kind : kinds) units[kind] = reinterpret_cast<UnitFunction>(function);
  }
};

}  // namespace multisample

// The table of this library.
MULTISAMPLE_EXPORT inline __attribute__((used)) const void* multisample_units() { return multisample::units; }
