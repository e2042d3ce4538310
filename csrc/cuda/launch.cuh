// Launches of kernels through the CUDA runtime, for each operation.
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "launch.h"

namespace multisample {

// Clears the runtime's last error, which another library would take for its own, and returns `error`.
inline cudaError_t cleared(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

// Returns this launch's error. cudaGetLastError could return one that another library left behind.
template <class... Parameters>
cudaError_t launch_kernel(void (*kernel)(Parameters...), dim3 blocks, u32 threads, void* stream,
                          const std::remove_const_t<Parameters>&... parameters) {
  void* addresses[] = {const_cast<void*>(static_cast<const void*>(&parameters))...};
  return cleared(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), blocks, dim3(threads), addresses, 0,
                                  static_cast<cudaStream_t>(stream)));
}

// Maximum length of a grid's y axis.
constexpr u32 kMostBatch = 65535;

// Calls function(part) for parts of a batch, of at most `most` matrices, until it returns an error.
template <class Function>
cudaError_t for_batch(const Launch& call, u32 most, const Function& function) {
  const u32 batch = call.batch == 0 ? 1 : call.batch;
  cudaError_t error = cudaSuccess;
  for (u32 b = 0; b < batch && error == cudaSuccess; b += most) {
    Launch part = matrix_of_batch(call, b);
    part.batch = batch - b < most ? batch - b : most;
    error = function(part);
  }
  return error;
}

}  // namespace multisample
