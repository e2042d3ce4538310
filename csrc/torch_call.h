// Checked arguments of torch.ops.multisample, on PyTorch's stable ABI, for the CPU and for CUDA.
//
// The operators can be called with any tensors, from any language, and their kernels only see addresses: whatever would
// make them read or write outside of the tensors is refused here.
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

#include "gradient_call.h"

namespace multisample {

// kNumber for those that no kernel takes.
inline ElementType element_type(torch::headeronly::ScalarType type) {
  using torch::headeronly::ScalarType;
  switch (type) {
    case ScalarType::Half: return kFloat16;
    case ScalarType::BFloat16: return kBFloat16;
    case ScalarType::Float: return kFloat32;
    case ScalarType::Double: return kFloat64;
    case ScalarType::Char: return kInt8;
    case ScalarType::Short: return kInt16;
    case ScalarType::Int: return kInt32;
    case ScalarType::Long: return kInt64;
    case ScalarType::Byte: return kUInt8;
    case ScalarType::UInt16: return kUInt16;
    case ScalarType::UInt32: return kUInt32;
    case ScalarType::UInt64: return kUInt64;
    default: return kNumber;
  }
}

// Strings alone, no streams: where libstdc++ is linked in part statically, those do not work beside PyTorch's.
inline std::string text_of(const std::string& text) { return text; }
inline std::string text_of(int64_t number) { return std::to_string(number); }

// Shape, dtype and device, as an error message shows what it received.
inline std::string text_of(const torch::stable::Tensor& tensor) {
  const auto list = [](torch::headeronly::IntHeaderOnlyArrayRef values) {
    std::string text = "(";
    for (size_t k = 0; k < values.size(); ++k) text += (k == 0 ? "" : ", ") + std::to_string(values[k]);
    return text + (values.size() == 1 ? ",)" : ")");
  };
  // What NumPy and Python call the types of call.h.
  constexpr const char* kNames[] = {"",      "float16", "bfloat16", "float32", "float64", "int8",  "int16",
                                    "int32", "int64",   "uint8",    "uint16",  "uint32",  "uint64"};
  const ElementType type = element_type(tensor.scalar_type());
  std::string text = "shape " + list(tensor.sizes()) + ", strides " + list(tensor.strides()) + ", dtype ";
  text += type == kNumber ? torch::headeronly::toString(tensor.scalar_type()) : kNames[type];
  if (tensor.is_cpu()) return text + ", on cpu";
  if (tensor.is_cuda()) return text + ", on cuda:" + std::to_string(tensor.get_device_index());
  return text + ", on another device";
}

// Throws what STD_TORCH_CHECK does, without the place in this file that it begins with.
template <class... Parts>
inline void check(bool holds, const char* op, const Parts&... parts) {
  if (!holds) throw std::runtime_error(((std::string("multisample::") + op + ": ") + ... + text_of(parts)));
}

// What all operators are told of the noise.
struct NoiseOptions {
  int64_t seed, offset, dim_offset, sample_offset;
  bool shared, fast_math, antithetic;
  const std::optional<torch::stable::Tensor>& counter;
};

inline bool is_real(ElementType type) {
  return type == kFloat16 || type == kBFloat16 || type == kFloat32 || type == kFloat64;
}

inline bool on_one_device(const torch::stable::Tensor& a, const torch::stable::Tensor& b) {
  return a.is_cpu() == b.is_cpu() && a.is_cuda() == b.is_cuda() && a.get_device_index() == b.get_device_index();
}

// `of` is what the others belong to: out, or grad.
inline void check_matrix(const char* op, const char* of, const torch::stable::Tensor& matrix) {
  check(matrix.dim() == 2, op, of, " must have two dimensions, got ", matrix);
  check(is_real(element_type(matrix.scalar_type())), op, of,
        " must be of dtype float16, bfloat16, float32 or float64, got ", matrix);
  check(matrix.is_cpu() || matrix.is_cuda(), op, of, " must be on a CPU or a CUDA device, got ", matrix);
}

inline void check_window(const char* op, int64_t rows, int64_t columns, const NoiseOptions& options) {
  constexpr int64_t kMaxRows = int64_t{1} << 32, kMaxColumns = int64_t{1} << 34;
  check(options.dim_offset >= 0 && options.dim_offset <= kMaxRows - rows, op,
        "dim_offset must be at least 0, and dim_offset + d at most 2**32, got ", options.dim_offset, "; d is ", rows);
  check(options.sample_offset >= 0 && options.sample_offset <= kMaxColumns - columns, op,
        "sample_offset must be at least 0, and sample_offset + n at most 2**34, got ", options.sample_offset, "; n is ",
        columns);
}

// The address of the offset, or null.
inline u64* checked_counter(const char* op, const char* of, const torch::stable::Tensor& matrix,
                            const NoiseOptions& options) {
  if (!options.counter.has_value()) return nullptr;
  const torch::stable::Tensor& counter = *options.counter;
  check(counter.numel() == 1 && element_type(counter.scalar_type()) == kInt64, op,
        "counter must be one element of dtype int64, got ", counter);
  check(on_one_device(counter, matrix), op, "counter must be on the device of ", of, ", got ", counter, "; ", of,
        " has ", matrix);
  return static_cast<u64*>(const_cast<void*>(counter.const_data_ptr()));
}

inline Vector checked_vector(const char* op, const char* name, const torch::stable::Tensor& vector,
                             const torch::stable::Tensor& out, int64_t rows) {
  check(vector.dim() == 1 && vector.size(0) == rows, op, name, " must have shape (d,), out being (d, n), got ", vector,
        "; out has ", out);
  const ElementType type = element_type(vector.scalar_type());
  check(type != kNumber, op, name, " must be of a real floating or an integer dtype, got ", vector);
  check(on_one_device(vector, out), op, name, " must be on the device of out, got ", vector, "; out has ", out);
  return {vector.const_data_ptr(), vector.stride(0) * static_cast<i64>(vector.element_size()), 0, type, 0};
}

// What draws to `out`, which is (n, d) if it is `transposed`. There is nothing to do when `rows` or `columns` is 0.
inline SampleCall checked_call(const char* op, const torch::stable::Tensor& out, bool transposed,
                               const torch::stable::Tensor& mu, const torch::stable::Tensor& sigma,
                               const NoiseOptions& options) {
  check_matrix(op, "out", out);
  const int64_t rows = out.size(transposed), columns = out.size(!transposed);
  const int64_t row_stride = out.stride(transposed), column_stride = out.stride(!transposed);
  check((row_stride != 0 || rows < 2) && (column_stride != 0 || columns < 2), op,
        "elements of out must not share memory, got ", out);
  check_window(op, rows, columns, options);
  const i64 size = static_cast<i64>(out.element_size());
  SampleCall call{};
  call.mu = checked_vector(op, "mu", mu, out, rows);
  call.sigma = checked_vector(op, "sigma", sigma, out, rows);
  call.out = out.mutable_data_ptr();
  call.row_stride = row_stride * size;
  call.column_stride = column_stride * size;
  call.rows = static_cast<u64>(rows);
  call.columns = static_cast<u64>(columns);
  call.first_row = static_cast<u64>(options.dim_offset);
  call.first_column = static_cast<u64>(options.sample_offset);
  call.seed = static_cast<u64>(options.seed);
  call.offset = static_cast<u64>(options.offset);
  call.counter = checked_counter(op, "out", out, options);
  call.type = element_type(out.scalar_type());
  call.shared = options.shared;
  call.antithetic = options.antithetic;
  call.fast_math = options.fast_math;
  return call;
}

// The type of a sample of which none was asked for: integers count as float32, and two types that differ meet in
// float64 if either is that, and else in float32.
inline torch::headeronly::ScalarType promoted(const torch::stable::Tensor& mu, const torch::stable::Tensor& sigma) {
  using torch::headeronly::ScalarType;
  const auto counts_as = [](const torch::stable::Tensor& vector) {
    return is_real(element_type(vector.scalar_type())) ? vector.scalar_type() : ScalarType::Float;
  };
  const ScalarType a = counts_as(mu), b = counts_as(sigma);
  return a == b ? a : a == ScalarType::Double || b == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Memory for a sample of `n` columns.
inline torch::stable::Tensor new_sample(const torch::stable::Tensor& mu, const torch::stable::Tensor& sigma, int64_t n,
                                        std::optional<torch::headeronly::ScalarType> dtype, bool transposed) {
  check(mu.dim() == 1, "sample", "mu must have shape (d,), got ", mu);
  check(n >= 0, "sample", "n must be at least 0, got ", n);
  const int64_t d = mu.size(0), shape[] = {transposed ? n : d, transposed ? d : n};
  return torch::stable::new_empty(mu, {shape, 2}, dtype.has_value() ? *dtype : promoted(mu, sigma));
}

// The results of a backward call.
using Gradient = std::tuple<torch::stable::Tensor, torch::stable::Tensor>;

inline Gradient new_gradient(const torch::stable::Tensor& grad, bool transposed) {
  check_matrix("sample_backward", "grad", grad);
  using torch::headeronly::ScalarType;
  const ScalarType type = grad.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  const int64_t shape[] = {grad.size(transposed)};
  return {torch::stable::new_empty(grad, {shape, 1}, type), torch::stable::new_empty(grad, {shape, 1}, type)};
}

inline void set_zero(Gradient& gradient) {
  torch::stable::zero_(std::get<0>(gradient));
  torch::stable::zero_(std::get<1>(gradient));
}

// What sums `grad`, which is (n, d) if it is `transposed`, to what `new_gradient` made. There is nothing to sum when
// `rows` or `columns` is 0.
inline GradientCall checked_gradient_call(const torch::stable::Tensor& grad, bool transposed, const Gradient& gradient,
                                          const NoiseOptions& options) {
  const char* const op = "sample_backward";
  const int64_t rows = grad.size(transposed), columns = grad.size(!transposed);
  check_window(op, rows, columns, options);
  const i64 size = static_cast<i64>(grad.element_size());
  GradientCall call{};
  call.grad = grad.const_data_ptr();
  // Of one row or one column, any stride will do: these say that it lies side by side.
  call.column_stride = columns == 1 ? size : grad.stride(!transposed) * size;
  call.row_stride = rows == 1 ? columns * size : grad.stride(transposed) * size;
  call.grad_mu = std::get<0>(gradient).mutable_data_ptr();
  call.grad_sigma = std::get<1>(gradient).mutable_data_ptr();
  call.rows = static_cast<u64>(rows);
  call.columns = static_cast<u64>(columns);
  call.first_row = static_cast<u64>(options.dim_offset);
  call.first_column = static_cast<u64>(options.sample_offset);
  call.seed = static_cast<u64>(options.seed);
  call.offset = static_cast<u64>(options.offset);
  call.counter = checked_counter(op, "grad", grad, options);
  call.type = element_type(grad.scalar_type());
  call.shared = options.shared;
  call.antithetic = options.antithetic;
  call.fast_math = options.fast_math;
  return call;
}

}  // namespace multisample
