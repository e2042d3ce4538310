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
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "launch.h"

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

// Strings without streams: the streams of a statically linked part of libstdc++ do not work beside PyTorch's.
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
  int64_t seed, offset, dim_offset, sample_offset;
  bool shared_noise, fast_math, antithetic;
};

// Whether a matrix can have elements of this type.
inline bool is_real(ElementType type) {
  switch (type) {
#define MULTISAMPLE_ROW(name, type, size, numpy, torch) case k##name:
    MULTISAMPLE_MATRIX_TYPES(MULTISAMPLE_ROW)
#undef MULTISAMPLE_ROW
    return true;
    default: return false;
  }
}

inline bool on_one_device(const Tensor& a, const Tensor& b) {
  return a.is_cpu() == b.is_cpu() && a.is_cuda() == b.is_cuda() && a.get_device_index() == b.get_device_index();
}

// A launch over `matrix`, without mu, sigma and the stream. `name` is its name in errors; it is (n, d) if `transposed`.
inline Launch checked_launch(const char* op, const char* name, const Tensor& matrix, bool transposed,
                             const NoiseOptions& options) {
  check(matrix.dim() == 2, op, name, " must have two dimensions, got ", matrix);
  const ElementType type = element_type(matrix.scalar_type());
#define MULTISAMPLE_ROW(name, type, size, numpy, torch) numpy ", "
  check(is_real(type), op, name, " must be of dtype " MULTISAMPLE_MATRIX_TYPES(MULTISAMPLE_ROW) "got ", matrix);
#undef MULTISAMPLE_ROW
  check(matrix.is_cpu() || matrix.is_cuda(), op, name, " must be on a CPU or a CUDA device, got ", matrix);
  const int64_t rows = matrix.size(transposed), columns = matrix.size(!transposed);
  constexpr int64_t kMaxRows = int64_t{1} << 32, kMaxColumns = int64_t{1} << 34;
  check(options.dim_offset >= 0 && options.dim_offset <= kMaxRows - rows, op,
        "dim_offset must be at least 0, and dim_offset + d at most 2**32, got ", options.dim_offset, "; d is ", rows);
  check(options.sample_offset >= 0 && options.sample_offset <= kMaxColumns - columns, op,
        "sample_offset must be at least 0, and sample_offset + n at most 2**34, got ", options.sample_offset, "; n is ",
        columns);
  const u64* counter = nullptr;
  if (options.counter.has_value()) {
    const Tensor& one = *options.counter;
    check(one.numel() == 1 && element_type(one.scalar_type()) == kInt64, op,
          "counter must be one element of dtype int64, got ", one);
    check(on_one_device(one, matrix), op, "counter must be on the device of ", name, ", got ", one, "; ", name, " has ",
          matrix);
    counter = static_cast<const u64*>(one.const_data_ptr());
  }
  const i64 size = static_cast<i64>(matrix.element_size());
  Launch call{};
  call.matrix = const_cast<void*>(matrix.const_data_ptr());
  call.row_stride = matrix.stride(transposed) * size;
  call.column_stride = matrix.stride(!transposed) * size;
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
  return call;
}

// mu or sigma of `out`, which has `rows` rows.
inline Vector checked_vector(const char* op, const char* name, const Tensor& vector, const Tensor& out, u64 rows) {
  check(vector.dim() == 1 && vector.size(0) == static_cast<int64_t>(rows), op, name,
        " must have shape (d,), out being (d, n), got ", vector, "; out has ", out);
  const ElementType type = element_type(vector.scalar_type());
  check(type != kNumber, op, name, " must be of a real floating or an integer dtype, got ", vector);
  check(on_one_device(vector, out), op, name, " must be on the device of out, got ", vector, "; out has ", out);
  return {{vector.const_data_ptr()}, vector.stride(0) * static_cast<i64>(vector.element_size()), type};
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

// The operators for one kind of device. Device::run(op, matrix, call) runs a call, which has at least one row and one
// column, on the device of `matrix`.
template <class Device>
struct Operators {
  using Gradient = std::tuple<Tensor, Tensor>;

  static void sample_(const Tensor& out, const Tensor& mu, const Tensor& sigma, const std::optional<Tensor>& counter,
                      int64_t seed, int64_t offset, int64_t dim_offset, int64_t sample_offset, bool shared,
                      bool fast_math, bool antithetic) {
    draw("sample_", out, false, mu, sigma,
         {counter, seed, offset, dim_offset, sample_offset, shared, fast_math, antithetic});
  }

  static Tensor sample(const Tensor& mu, const Tensor& sigma, int64_t n, const std::optional<Tensor>& counter,
                       int64_t seed, int64_t offset, int64_t dim_offset, int64_t sample_offset,
                       const std::optional<ScalarType>& dtype, bool shared, bool fast_math, bool antithetic,
                       bool transposed) {
    check(mu.dim() == 1, "sample", "mu must have shape (d,), got ", mu);
    check(n >= 0, "sample", "n must be at least 0, got ", n);
    const int64_t d = mu.size(0), shape[] = {transposed ? n : d, transposed ? d : n};
    const Tensor out = torch::stable::new_empty(mu, {shape, 2}, dtype.has_value() ? *dtype : promoted(mu, sigma));
    draw("sample", out, transposed, mu, sigma,
         {counter, seed, offset, dim_offset, sample_offset, shared, fast_math, antithetic});
    return out;
  }

  static Gradient sample_backward(const Tensor& grad, const std::optional<Tensor>& counter, int64_t seed,
                                  int64_t offset, int64_t dim_offset, int64_t sample_offset, bool shared,
                                  bool fast_math, bool antithetic, bool transposed) {
    Launch call = checked_launch("sample_backward", "grad", grad, transposed,
                                 {counter, seed, offset, dim_offset, sample_offset, shared, fast_math, antithetic});
    const int64_t shape[] = {static_cast<int64_t>(call.rows)};
    const auto vector = [&] {
      return torch::stable::new_empty(grad, {shape, 1}, call.type == kFloat64 ? ScalarType::Double : ScalarType::Float);
    };
    Tensor mu = vector(), sigma = vector();
    if (call.rows == 0 || call.columns == 0) {
      torch::stable::zero_(mu);
      torch::stable::zero_(sigma);
      return {mu, sigma};
    }
    call.operation = kGradient;
    call.first = mu.mutable_data_ptr();
    call.second = sigma.mutable_data_ptr();
    Device::run("sample_backward", grad, call);
    return {mu, sigma};
  }

 private:
  static void draw(const char* op, const Tensor& out, bool transposed, const Tensor& mu, const Tensor& sigma,
                   const NoiseOptions& options) {
    Launch call = checked_launch(op, "out", out, transposed, options);
    check((call.row_stride != 0 || call.rows < 2) && (call.column_stride != 0 || call.columns < 2), op,
          "elements of out must not share memory, got ", out);
    const Vector of_mu = checked_vector(op, "mu", mu, out, call.rows);
    const Vector of_sigma = checked_vector(op, "sigma", sigma, out, call.rows);
    call.mu = of_mu.input, call.mu_stride = of_mu.stride, call.mu_type = of_mu.type;
    call.sigma = of_sigma.input, call.sigma_stride = of_sigma.stride, call.sigma_type = of_sigma.type;
    if (call.rows > 0 && call.columns > 0) Device::run(op, out, call);
  }
};

}  // namespace multisample
