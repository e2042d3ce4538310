// The torch_ext backend on CUDA devices: the kernel on PyTorch's current stream, as an operator and as a C function.
//
// Only PyTorch's stable ABI is used, so that one binary serves every version from the one it was built for on. A library
// of its own, since it cannot be loaded where PyTorch has no CUDA; the operator's schema is in torch_cpu.cpp.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "launch.cuh"
#include "torch_call.h"

namespace multisample {
namespace {

void sample_(const torch::stable::Tensor& out, const torch::stable::Tensor& mu, const torch::stable::Tensor& sigma,
             int64_t seed, int64_t offset, int64_t dim_offset, int64_t sample_offset, bool shared, bool fast_math) {
  const SampleCall call = checked_call(out, mu, sigma, seed, offset, dim_offset, sample_offset, shared, fast_math);
  if (call.rows == 0 || call.columns == 0) return;
  const auto device = out.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  const cudaError_t error = launch(call, static_cast<cudaStream_t>(stream));
  STD_TORCH_CHECK(error == cudaSuccess, "multisample::sample_: the launch failed: ", cudaGetErrorString(error),
                  "; out with ", described(out));
}

}  // namespace
}  // namespace multisample

// Draws what the call describes, all of it in memory that the device can address, on a stream of that device. Returns a
// cudaError_t.
extern "C" __attribute__((visibility("default"))) int multisample_launch_cuda(const multisample::SampleCall* call,
                                                                              int device, void* stream) {
  int previous = device;
  cudaError_t error = cudaGetDevice(&previous);
  if (error == cudaSuccess && previous != device) error = cudaSetDevice(device);
  if (error != cudaSuccess) return error;
  error = multisample::launch(*call, static_cast<cudaStream_t>(stream));
  if (previous != device) cudaSetDevice(previous);
  return error;
}

// What an error of multisample_launch_cuda means.
extern "C" __attribute__((visibility("default"))) const char* multisample_cuda_error(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

STABLE_TORCH_LIBRARY_IMPL(multisample, CUDA, m) { m.impl("sample_", TORCH_BOX(&multisample::sample_)); }
