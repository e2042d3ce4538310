// Checked arguments of torch.ops.multisample.sample_, on PyTorch's stable ABI, for the CPU and for CUDA.
//
// The operator can be called with any tensors, from any language, and its kernels only see addresses: whatever would
// make them read or write outside of the tensors is refused here.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "call.h"

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
inline void check(bool holds, const Parts&... parts) {
  if (!holds) throw std::runtime_error((std::string("multisample::sample_: ") + ... + text_of(parts)));
}

inline Vector checked_vector(const char* name, const torch::stable::Tensor& vector, const torch::stable::Tensor& out) {
  check(vector.dim() == 1 && vector.size(0) == out.size(0), name, " must have shape (d,), out being (d, n), got ",
        vector, "; out has ", out);
  const ElementType type = element_type(vector.scalar_type());
  check(type != kNumber, name, " must be of a real floating or an integer dtype, got ", vector);
  check(vector.is_cpu() == out.is_cpu() && vector.is_cuda() == out.is_cuda() &&
            vector.get_device_index() == out.get_device_index(),
        name, " must be on the device of out, got ", vector, "; out has ", out);
  return {vector.const_data_ptr(), vector.stride(0) * static_cast<i64>(vector.element_size()), 0, type, 0};
}

// What the operator is called with, as kernels take it. There is nothing to do when `rows` or `columns` is 0.
inline SampleCall checked_call(const torch::stable::Tensor& out, const torch::stable::Tensor& mu,
                               const torch::stable::Tensor& sigma, int64_t seed, int64_t offset, int64_t dim_offset,
                               int64_t sample_offset, bool shared, bool fast_math, bool antithetic) {
  check(out.dim() == 2, "out must have shape (d, n), got ", out);
  const ElementType type = element_type(out.scalar_type());
  check(type == kFloat16 || type == kBFloat16 || type == kFloat32 || type == kFloat64,
        "out must be of dtype float16, bfloat16, float32 or float64, got ", out);
  check(out.is_cpu() || out.is_cuda(), "out must be on a CPU or a CUDA device, got ", out);
  const int64_t rows = out.size(0), columns = out.size(1);
  check((out.stride(0) != 0 || rows < 2) && (out.stride(1) != 0 || columns < 2),
        "elements of out must not share memory, got ", out);
  constexpr int64_t kMaxRows = int64_t{1} << 32, kMaxColumns = int64_t{1} << 34;
  check(dim_offset >= 0 && dim_offset <= kMaxRows - rows,
        "dim_offset must be at least 0, and dim_offset + d at most 2**32, got ", dim_offset, "; out has ", out);
  check(sample_offset >= 0 && sample_offset <= kMaxColumns - columns,
        "sample_offset must be at least 0, and sample_offset + n at most 2**34, got ", sample_offset, "; out has ",
        out);
  const i64 size = static_cast<i64>(out.element_size());
  SampleCall call{};
  call.mu = checked_vector("mu", mu, out);
  call.sigma = checked_vector("sigma", sigma, out);
  call.out = out.mutable_data_ptr();
  call.row_stride = out.stride(0) * size;
  call.column_stride = out.stride(1) * size;
  call.rows = static_cast<u64>(rows);
  call.columns = static_cast<u64>(columns);
  call.first_row = static_cast<u64>(dim_offset);
  call.first_column = static_cast<u64>(sample_offset);
  call.seed = static_cast<u64>(seed);
  call.offset = static_cast<u64>(offset);
  call.type = type;
  call.shared = shared;
  call.antithetic = antithetic;
  call.fast_math = fast_math;
  return call;
}

}  // namespace multisample
