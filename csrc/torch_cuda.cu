// The torch_ext backend on CUDA devices: the kernels on PyTorch's current stream, as operators and as a C function.
//
// Only PyTorch's stable ABI is used, so that one binary serves every version from the one it was built for on. A
// library of its own, since it cannot be loaded where PyTorch has no CUDA; the operators' schemas are in torch_cpu.cpp.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "gradient_launch.cuh"
#include "launch.cuh"
#include "torch_call.h"

namespace multisample {
namespace {

using torch::stable::Tensor;

// Makes the device of `of` current for as long as it lives.
struct OnDevice {
  int index;
  torch::stable::accelerator::DeviceGuard guard;
  void* stream;

  explicit OnDevice(const Tensor& of) : index(of.get_device_index()), guard(index) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &stream));
  }
};

void draw(const char* op, const Tensor& out, SampleCall call) {
  if (call.rows == 0 || call.columns == 0) return;
  const OnDevice device(out);
  call.device = device.index;
  call.stream = device.stream;
  const cudaError_t error = launch(call);
  check(error == cudaSuccess, op, "the launch failed: ", cudaGetErrorString(error), "; out has ", out);
}

void sample_(const Tensor& out, const Tensor& mu, const Tensor& sigma, const std::optional<Tensor>& counter,
             int64_t seed, int64_t offset, int64_t dim_offset, int64_t sample_offset, bool shared, bool fast_math,
             bool antithetic) {
  draw("sample_", out,
       checked_call("sample_", out, false, mu, sigma,
                    {seed, offset, dim_offset, sample_offset, shared, fast_math, antithetic, counter}));
}

Tensor sample(const Tensor& mu, const Tensor& sigma, int64_t n, const std::optional<Tensor>& counter, int64_t seed,
              int64_t offset, int64_t dim_offset, int64_t sample_offset,
              const std::optional<torch::headeronly::ScalarType>& dtype, bool shared, bool fast_math, bool antithetic,
              bool transposed) {
  const Tensor out = new_sample(mu, sigma, n, dtype, transposed);
  draw("sample", out,
       checked_call("sample", out, transposed, mu, sigma,
                    {seed, offset, dim_offset, sample_offset, shared, fast_math, antithetic, counter}));
  return out;
}

Gradient sample_backward(const Tensor& grad, const std::optional<Tensor>& counter, int64_t seed, int64_t offset,
                         int64_t dim_offset, int64_t sample_offset, bool shared, bool fast_math, bool antithetic,
                         bool transposed) {
  Gradient gradient = new_gradient(grad, transposed);
  GradientCall call = checked_gradient_call(
      grad, transposed, gradient, {seed, offset, dim_offset, sample_offset, shared, fast_math, antithetic, counter});
  if (call.rows == 0 || call.columns == 0) {
    set_zero(gradient);
    return gradient;
  }
  const GradientGeometry geometry = gradient_geometry(call);
  const int64_t count = static_cast<int64_t>(partial_sums_of(call, geometry));
  // The allocator keeps it for those that come after on the same stream.
  const Tensor partial_sums = torch::stable::new_empty(grad, {&count, 1}, torch::headeronly::ScalarType::Double);
  call.partial_sums = static_cast<double*>(partial_sums.mutable_data_ptr());
  const OnDevice device(grad);
  const cudaError_t error = launch_gradient(call, geometry, device.stream);
  check(error == cudaSuccess, "sample_backward", "the launch failed: ", cudaGetErrorString(error), "; grad has ", grad);
  return gradient;
}

// What `launch` returns, with `device` current for as long as it runs.
template <class Launch>
cudaError_t on_device(int device, const Launch& launch) {
  int previous = device;
  cudaError_t error = cudaGetDevice(&previous);
  if (error == cudaSuccess && previous != device) error = cudaSetDevice(device);
  if (error != cudaSuccess) return error;
  error = launch();
  if (previous != device) cudaSetDevice(previous);
  return error;
}

}  // namespace
}  // namespace multisample

// Draws what the call describes, on its device and its stream. Returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int multisample_launch_cuda(const multisample::SampleCall* call) {
  return multisample::on_device(call->device, [&] { return multisample::launch(*call); });
}

// Counts up the offset at an address of the device, in the order of the stream. Returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int multisample_advance_cuda(multisample::u64* counter, int device,
                                                                               void* stream) {
  return multisample::on_device(device, [&] { return multisample::advance(counter, stream); });
}

// What an error of the functions above means.
extern "C" __attribute__((visibility("default"))) const char* multisample_cuda_error(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

STABLE_TORCH_LIBRARY_IMPL(multisample, CUDA, m) {
  m.impl("sample_", TORCH_BOX(&multisample::sample_));
  m.impl("sample", TORCH_BOX(&multisample::sample));
  m.impl("sample_backward", TORCH_BOX(&multisample::sample_backward));
}
