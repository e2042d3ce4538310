// The operators torch.ops.multisample on PyTorch's stable ABI, for the CPU and for CUDA.
//
// Operators accept any tensors, from any language, and kernels see only addresses. So the operators refuse every input
// that would make a kernel read or write outside the tensors.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "launch.h"
#include "torch/unit.h"

namespace multisample {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// kNumber for types without a kernel.
inline ElementType element_type(ScalarType type) {
  switch (type) {
#define MULTISAMPLE_ROW(name, type, size, numpy, torch) \
  case ScalarType::torch: return k##name;
    MULTISAMPLE_ELEMENT_TYPES(MULTISAMPLE_ROW, MULTISAMPLE_ROW)
#undef MULTISAMPLE_ROW
    default: return kNumber;
  }
}

// Formats text without std::ostream: iostreams of a statically linked libstdc++ fail beside PyTorch's.
inline std::string text_of(const std::string& text) { return text; }
inline std::string text_of(int64_t number) { return std::to_string(number); }

// Shape, strides, dtype and device, for error messages.
inline std::string text_of(const Tensor& tensor) {
  const auto list = [](torch::headeronly::IntHeaderOnlyArrayRef values) {
    std::string text = "(";
    for (size_t k = 0; k < values.size(); ++k) text += (k == 0 ? "" : ", ") + std::to_string(values[k]);
    return text + (values.size() == 1 ? ",)" : ")");
  };
#define MULTISAMPLE_ROW(name, type, size, numpy, torch) , numpy
  constexpr const char* kNames[] = {"" MULTISAMPLE_ELEMENT_TYPES(MULTISAMPLE_ROW, MULTISAMPLE_ROW)};
#undef MULTISAMPLE_ROW
  const ElementType type = element_type(tensor.scalar_type());
  std::string text = "shape " + list(tensor.sizes()) + ", strides " + list(tensor.strides()) + ", dtype ";
  text += type == kNumber ? torch::headeronly::toString(tensor.scalar_type()) : kNames[type];
  if (tensor.is_cpu()) return text + ", on cpu";
  if (tensor.is_cuda()) return text + ", on cuda:" + std::to_string(tensor.get_device_index());
  return text + ", on another device";
}

// Throws as STD_TORCH_CHECK does, but the text does not begin with the name of this file.
template <class... Parts>
inline void check(bool holds, const char* op, const Parts&... parts) {
  if (!holds) throw std::runtime_error(((std::string("multisample::") + op + ": ") + ... + text_of(parts)));
}

// The arguments that all operators have in common.
struct NoiseOptions {
  const std::optional<Tensor>& counter;  // the offset in memory, if there is one
  const std::optional<Tensor>& keys;     // a seed and an offset for each matrix of a batch, if there is one
  int64_t seed, offset, dim_offset, sample_offset;
  bool shared_noise, fast_math, antithetic;
};

// Whether a matrix can have elements of this type.
inline bool is_real(ElementType type) { return kNumber < type && type < kInt8; }

// Turns a launch over `matrix` into a batch. A key is a pair of a seed and an offset.
inline void set_batch(const char* op, const Tensor& keys, const Tensor& matrix, Launch* call) {
  check(element_type(keys.scalar_type()) == kInt64 && keys.dim() == 2 && keys.size(0) == matrix.size(0) &&
            keys.size(1) == 2,
        op, "keys must have shape (B, 2) and dtype int64, got ", keys, "; the matrices have ", matrix);
  check(keys.device() == matrix.device(), op, "keys must be on the device of the matrices, got ", keys,
        "; the matrices have ", matrix);
  call->seed_at = static_cast<const u64*>(keys.const_data_ptr());
  call->offset_at = call->seed_at + keys.stride(1);
  call->seed_step = call->offset_step = keys.stride(0) * 8;
  call->batch = static_cast<u32>(keys.size(0));
  call->matrix_step = matrix.stride(0) * static_cast<i64>(matrix.element_size());
  call->result_step = static_cast<i64>(call->rows) * (call->type == kFloat64 ? 8 : 4);
  call->origin_in_memory = 1;
}

// A launch over `matrix`, without mu, sigma and the stream. Errors call the matrix `name`. With `transposed` it is
// (n, d); a batch has one dimension more.
inline Launch checked_launch(const char* op, const char* name, const Tensor& matrix, bool transposed,
                             const NoiseOptions& options) {
  const bool is_batch = options.keys.has_value();
  check(matrix.dim() == 2 + is_batch, op, name, is_batch ? " must have three" : " must have two", " dimensions, got ",
        matrix);
  const ElementType type = element_type(matrix.scalar_type());
#define MULTISAMPLE_ROW(name, type, size, numpy, torch) numpy ", "
  check(is_real(type), op, name, " must be of dtype " MULTISAMPLE_MATRIX_TYPES(MULTISAMPLE_ROW) "got ", matrix);
#undef MULTISAMPLE_ROW
  check(matrix.is_cpu() || matrix.is_cuda(), op, name, " must be on a CPU or a CUDA device, got ", matrix);
  const int64_t row_axis = is_batch + transposed, column_axis = is_batch + !transposed;
  const int64_t rows = matrix.size(row_axis), columns = matrix.size(column_axis);
  check(options.dim_offset >= 0 && options.dim_offset <= int64_t{kMaxRows} - rows, op,
        "dim_offset must be at least 0, and dim_offset + d at most 2**32, got ", options.dim_offset, "; d is ", rows);
  check(options.sample_offset >= 0 && options.sample_offset <= int64_t{kMaxColumns} - columns, op,
        "sample_offset must be at least 0, and sample_offset + n at most 2**34, got ", options.sample_offset, "; n is ",
        columns);
  const u64* counter = nullptr;
  if (options.counter.has_value()) {
    const Tensor& one = *options.counter;
    check(one.numel() == 1 && element_type(one.scalar_type()) == kInt64, op,
          "counter must be one element of dtype int64, got ", one);
    check(one.device() == matrix.device(), op, "counter must be on the device of ", name, ", got ", one, "; ", name,
          " has ", matrix);
    counter = static_cast<const u64*>(one.const_data_ptr());
  }
  const i64 size = static_cast<i64>(matrix.element_size());
  Launch call{};
  call.matrix = const_cast<void*>(matrix.const_data_ptr());
  call.row_stride = matrix.stride(row_axis) * size;
  call.column_stride = matrix.stride(column_axis) * size;
  call.rows = static_cast<u64>(rows);
  call.columns = static_cast<u64>(columns);
  call.seed = static_cast<u64>(options.seed);
  call.offset = static_cast<u64>(options.offset);
  call.offset_at = counter;
  call.first_row = static_cast<u64>(options.dim_offset);
  call.first_column = static_cast<u64>(options.sample_offset);
  call.type = type;
  call.shared_noise = options.shared_noise;
  call.antithetic = options.antithetic;
  call.fast_math = options.fast_math;
  call.device = matrix.is_cuda() ? matrix.get_device_index() : -1;
  if (is_batch) set_batch(op, *options.keys, matrix, &call);
  return call;
}

// mu or sigma of `out`, which has `rows` rows. In a batch, the first axis may be that of the matrices.
inline Vector checked_vector(const char* op, const char* name, const Tensor& vector, const Tensor& out, u64 rows,
                             i64* step) {
  const int64_t dim = vector.dim();
  const bool has_own = dim == 2 && out.dim() == 3 && vector.size(0) == out.size(0);
  check((dim == 1 || has_own) && vector.size(dim - 1) == static_cast<int64_t>(rows), op, name,
        " must have shape (d,), or in a batch (B, d), got ", vector, "; out has ", out);
  const ElementType type = element_type(vector.scalar_type());
  check(type != kNumber, op, name, " must be of a real floating or an integer dtype, got ", vector);
  check(vector.device() == out.device(), op, name, " must be on the device of out, got ", vector, "; out has ", out);
  const i64 size = static_cast<i64>(vector.element_size());
  *step = has_own ? vector.stride(0) * size : 0;
  return {{vector.const_data_ptr()}, vector.stride(dim - 1) * size, type};
}

// Whether two elements of the matrix, which is not empty, share memory. PyTorch has no negative strides.
inline bool overlaps_itself(const Launch& call) {
  const u64 row = static_cast<u64>(call.row_stride), column = static_cast<u64>(call.column_stride);
  const u64 common = std::gcd(row, column);
  if (common == 0) return call.rows > 1 || call.columns > 1;
  return column / common < call.rows && row / common < call.columns;
}

// Whether an element of a vector, one for each row, shares memory with an element of the matrix, which is not empty.
inline bool shares_memory(const Launch& call, size_t element_size, const Vector& vector, size_t vector_element_size) {
  const i64 size = static_cast<i64>(element_size), vector_size = static_cast<i64>(vector_element_size);
  struct Axis {
    i64 stride, last;
  };
  Axis outer{call.row_stride, static_cast<i64>(call.rows) - 1};
  Axis inner{call.column_stride, static_cast<i64>(call.columns) - 1};
  const i64 last = vector.stride == 0 ? 0 : outer.last;
  if (outer.stride < inner.stride) std::swap(outer, inner);
  const i64 width = inner.last * inner.stride + size, end = outer.last * outer.stride + width;
  const i64 begin = static_cast<const char*>(vector.input.data) - static_cast<const char*>(call.matrix);
  if (begin >= end || begin + last * vector.stride + vector_size <= 0) return false;
  // The first element of a sequence of elements, `stride` apart, that ends after byte `at`.
  const auto first_after = [](i64 at, i64 bytes, i64 stride) {
    return at < bytes || stride == 0 ? 0 : (at - bytes) / stride + 1;
  };
  for (i64 k = 0; k <= last; ++k) {
    const i64 at = begin + k * vector.stride;
    for (i64 p = first_after(at, width, outer.stride); p <= outer.last; ++p) {
      const i64 inside = at - p * outer.stride;
      if (inside + vector_size <= 0) break;
      const i64 q = first_after(inside, size, inner.stride);
      if (q <= inner.last && q * inner.stride < inside + vector_size) return true;
    }
  }
  return false;
}

// The default dtype of a sample: integers count as float32. Two different types give float64 if one of them is float64,
// and else float32.
inline ScalarType promoted(const Tensor& mu, const Tensor& sigma) {
  const auto counts_as = [](const Tensor& vector) {
    return is_real(element_type(vector.scalar_type())) ? vector.scalar_type() : ScalarType::Float;
  };
  const ScalarType a = counts_as(mu), b = counts_as(sigma);
  return a == b ? a : a == ScalarType::Double || b == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Loads the unit for calls like `call`. Returns 0, or 1 with the reason in a text of `size` bytes.
using UnitLoader = int (*)(const Launch* call, char* reason, u64 size);
inline std::atomic<UnitLoader> unit_loader;

// The function for a call. Loads its unit, and throws if that fails. `remedy` is for processes that load no units.
template <class Function>
Function* unit_function(const Launch& call,
                        const char* remedy =
                            "call multisample.torch.load_operators() in Python, or without Python "
                            "load the library that 'python -m multisample build torch_ext' prints") {
  const std::atomic<UnitFunction>& unit = units[kind_of(call)];
  if (unit == nullptr) {
    char reason[4096]{};
    std::strncpy(reason, remedy, sizeof(reason) - 1);
    const UnitLoader load = unit_loader;
    if (load == nullptr || load(&call, reason, sizeof(reason)) != 0 || unit == nullptr) {
      throw std::runtime_error(std::string("multisample: the kernels of this call are not loaded: ") + reason);
    }
  }
  return reinterpret_cast<Function*>(unit.load());
}

// The operators for one kind of device. Device::run(op, matrix, call) runs a call, which has at least one row and one
// column, on the device of `matrix`.
template <class Device>
struct Operators {
  using Gradient = std::tuple<Tensor, Tensor>;

  static void sample_(const Tensor& out, const Tensor& mu, const Tensor& sigma, const std::optional<Tensor>& counter,
                      int64_t seed, int64_t offset, int64_t dim_offset, int64_t sample_offset, bool shared,
                      bool fast_math, bool antithetic) {
    draw("sample_", out, false, mu, sigma,
         {counter, std::nullopt, seed, offset, dim_offset, sample_offset, shared, fast_math, antithetic});
  }

  static Tensor sample(const Tensor& mu, const Tensor& sigma, int64_t n, const std::optional<Tensor>& counter,
                       const std::optional<Tensor>& keys, int64_t seed, int64_t offset, int64_t dim_offset,
                       int64_t sample_offset, const std::optional<ScalarType>& dtype, bool shared, bool fast_math,
                       bool antithetic, bool transposed) {
    const bool is_batch = keys.has_value();
    check(mu.dim() == 1 || (is_batch && mu.dim() == 2), "sample", "mu must have shape (d,), or in a batch (B, d), got ",
          mu);
    if (is_batch) check(keys->dim() == 2, "sample", "keys must have shape (B, 2), got ", *keys);
    check(n >= 0, "sample", "n must be at least 0, got ", n);
    const int64_t d = mu.size(mu.dim() - 1);
    const int64_t shape[] = {is_batch ? keys->size(0) : 1, transposed ? n : d, transposed ? d : n};
    const size_t axes = is_batch ? 3 : 2;
    const Tensor out =
        torch::stable::new_empty(mu, {shape + 3 - axes, axes}, dtype.has_value() ? *dtype : promoted(mu, sigma));
    draw("sample", out, transposed, mu, sigma,
         {counter, keys, seed, offset, dim_offset, sample_offset, shared, fast_math, antithetic});
    return out;
  }

  static Gradient sample_backward(const Tensor& grad, const std::optional<Tensor>& counter,
                                  const std::optional<Tensor>& keys, int64_t seed, int64_t offset, int64_t dim_offset,
                                  int64_t sample_offset, bool shared, bool fast_math, bool antithetic,
                                  bool transposed) {
    const char* const op = "sample_backward";
    const NoiseOptions options{counter, keys, seed, offset, dim_offset, sample_offset, shared, fast_math, antithetic};
    Launch call = checked_launch(op, "grad", grad, transposed, options);
    const size_t axes = keys.has_value() ? 2 : 1;
    const int64_t shape[] = {grad.size(0), static_cast<int64_t>(call.rows)};
    const auto vector = [&] {
      return torch::stable::new_empty(grad, {shape + 2 - axes, axes},
                                      call.type == kFloat64 ? ScalarType::Double : ScalarType::Float);
    };
    Tensor mu = vector(), sigma = vector();
    if (call.rows == 0 || call.columns == 0 || grad.size(0) == 0) {
      torch::stable::zero_(mu);
      torch::stable::zero_(sigma);
      return {mu, sigma};
    }
    call.operation = kGradient;
    call.first = mu.mutable_data_ptr();
    call.second = sigma.mutable_data_ptr();
    if (grad.is_cuda() && call.columns == 1 && !keys.has_value()) {
      call.results = 1;
      call.first = call.second;
      torch::stable::copy_(mu, torch::stable::select(grad, transposed ? 0 : 1, 0));
    }
    Device::run(op, grad, call);
    return {mu, sigma};
  }

 private:
  static void draw(const char* op, const Tensor& out, bool transposed, const Tensor& mu, const Tensor& sigma,
                   const NoiseOptions& options) {
    Launch call = checked_launch(op, "out", out, transposed, options);
    const Vector of_mu = checked_vector(op, "mu", mu, out, call.rows, &call.mu_step);
    const Vector of_sigma = checked_vector(op, "sigma", sigma, out, call.rows, &call.sigma_step);
    call.mu = of_mu.input, call.mu_stride = of_mu.stride, call.mu_type = of_mu.type;
    call.sigma = of_sigma.input, call.sigma_stride = of_sigma.stride, call.sigma_type = of_sigma.type;
    if (call.rows == 0 || call.columns == 0 || out.size(0) == 0) return;
    check(!overlaps_itself(call), op, "elements of out must not share memory, got ", out);
    const auto check_memory = [&](const char* name, const Vector& vector, const Tensor& tensor) {
      check(!shares_memory(call, out.element_size(), vector, tensor.element_size()), op,
            "out must have memory of its own, got memory that ", name, " also uses");
    };
    check_memory("mu", of_mu, mu);
    check_memory("sigma", of_sigma, sigma);
    Device::run(op, out, call);
  }
};

// Registers the operators for one kind of device.
template <class Device, class Library>
void implement(Library& m) {
  using Operators = Operators<Device>;
  m.impl("sample_", TORCH_BOX(&Operators::sample_));
  m.impl("sample", TORCH_BOX(&Operators::sample));
  m.impl("sample_backward", TORCH_BOX(&Operators::sample_backward));
}

}  // namespace multisample

// Whether the unit for calls of a kind is loaded.
MULTISAMPLE_EXPORT int multisample_has_unit(multisample::u32 kind) { return multisample::units[kind] != nullptr; }

// Adds the units of another library, which must stay loaded.
MULTISAMPLE_EXPORT void multisample_add_units(const void* table) {
  const auto* const others = static_cast<const std::atomic<multisample::UnitFunction>*>(table);
  for (multisample::u32 kind = 0; kind < multisample::kKinds; ++kind) {
    if (others[kind] != nullptr) multisample::units[kind] = others[kind].load();
  }
}

// Sets the function that loads units which are missing.
MULTISAMPLE_EXPORT void multisample_set_unit_loader(multisample::UnitLoader load) { multisample::unit_loader = load; }
