// The torch_ext backend on CUDA devices: launches on PyTorch's current stream, as operators and as C functions. The
// kernels themselves are units: see torch/unit.h. nvcc would take twice as long for this file as a C++ compiler.
//
// It uses only PyTorch's stable ABI, so that one binary serves every version from its build version on. It is a library
// of its own, because it does not load where PyTorch has no CUDA. torch/cpu.cpp has the operators' schemas.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "cuda/conversion.h"
#include "cuda/gradient_geometry.h"
#include "cuda/launch.cuh"
#include "cuda/moments_geometry.h"
#include "torch/operators.h"

namespace multisample {

// In shared_kernels.cu.
cudaError_t advance(u64* offset, void* stream);
cudaError_t convert(const Conversions& conversions, u32 type, void* stream);

namespace {

// Points the call to vectors that kernels read. Returns how many float64 numbers of scratch memory the copies take.
u64 make_readable(Launch* call, Conversions* conversions) {
  if (is_product(*call)) *call = sample_of_product(*call);
  return convert_vectors(call, conversions);
}

cudaError_t launch(const Launch& call) {
  auto* const run = unit_function<cudaError_t(const Launch&)>(call);
  Launch readable = call;
  Conversions conversions;
  if (make_readable(&readable, &conversions) > 0) {
    const cudaError_t error = convert(conversions, call.type, call.stream);
    if (error != cudaSuccess) return error;
  }
  return run(readable);
}

// How many float64 numbers of scratch memory a call needs.
u64 scratch_of(const Launch& call) {
  Launch readable = call;
  Conversions conversions;
  const u64 taken = make_readable(&readable, &conversions);
  switch (readable.operation) {
    case kGradient: {
      const Launch regular = with_regular_strides(readable);
      return taken + scratch_size(regular, gradient_geometry(regular));
    }
    case kMoments: return taken + scratch_size(readable, moment_geometry(readable));
    default: return taken;
  }
}

struct Cuda {
  // Runs on the device of `matrix`, on PyTorch's current stream.
  static void run(const char* op, const Tensor& matrix, Launch call) {
    const torch::stable::accelerator::DeviceGuard guard(call.device);
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(call.device, &call.stream));
    const int64_t size = static_cast<int64_t>(scratch_of(call));
    // The allocator reuses this memory only for later work on the same stream.
    std::optional<Tensor> scratch;
    if (size > 0) {
      scratch = torch::stable::new_empty(matrix, {&size, 1}, ScalarType::Double);
      call.scratch = static_cast<double*>(scratch->mutable_data_ptr());
    }
    const cudaError_t error = launch(call);
    check(error == cudaSuccess, op, "the launch failed: ", cudaGetErrorString(error), "; the matrix has ", matrix);
  }
};

// Calls `function` with `device` current.
template <class Function>
cudaError_t on_device(int device, const Function& function) {
  int previous = device;
  cudaError_t error = cleared(cudaGetDevice(&previous));
  if (error == cudaSuccess && previous != device) error = cleared(cudaSetDevice(device));
  if (error != cudaSuccess) return error;
  error = function();
  if (previous != device) cudaSetDevice(previous);
  return error;
}

}  // namespace
}  // namespace multisample

// The required size of `scratch` in device memory, in float64 numbers.
MULTISAMPLE_EXPORT uint64_t multisample_scratch_size_cuda(const multisample::Launch* call) {
  return multisample::scratch_of(*call);
}

// Launches a call on its device and its stream. Returns a cudaError_t. The unit of the call must be loaded.
MULTISAMPLE_EXPORT int multisample_run_cuda(const multisample::Launch* call) {
  if (!multisample_has_unit(multisample::kind_of(*call))) return cudaErrorInvalidDeviceFunction;
  return multisample::on_device(call->device, [&] { return multisample::launch(*call); });
}

// Adds 1 to an offset in device memory, in stream order. Returns a cudaError_t.
MULTISAMPLE_EXPORT int multisample_advance_cuda(multisample::u64* offset, int device, void* stream) {
  return multisample::on_device(device, [&] { return multisample::advance(offset, stream); });
}

// The text of an error of the functions above.
MULTISAMPLE_EXPORT const char* multisample_cuda_error(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

STABLE_TORCH_LIBRARY_IMPL(multisample, CUDA, m) { multisample::implement<multisample::Cuda>(m); }
