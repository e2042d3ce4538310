// Launches the sampling kernel of a call.
#pragma once

#include <cuda_runtime.h>

#include "cuda/kernel.cuh"

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

// Whether elements of this type have a fast transform.
template <class Out>
constexpr bool has_fast = sizeof(Out) < 8;

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

template <class Out, bool shared_noise, bool antithetic, bool fast>
cudaError_t launch_stores(const Launch& call) {
  if (call.origin_in_memory) {
    if (call.batch > 1 && is_small(call)) {
      const Geometry g = geometry_of(call);
      return launch_kernel(sample_kernel<Out, shared_noise, antithetic, fast, kSmallMatrices, true>, g.blocks,
                           g.threads, call.stream, call, g);
    }
    // Other kernels that read their origin from memory have two store kinds: kAligned, and kStrided for all the rest.
    const bool same_alignment = call.batch <= 1 || call.matrix_step % 32 == 0;
    Geometry g = geometry_of(call);
    if (g.store_kind != kAligned || !same_alignment) g = geometry_of(call, true);
    const auto kernel = g.store_kind == kAligned ? sample_kernel<Out, shared_noise, antithetic, fast, kAligned, true>
                                                 : sample_kernel<Out, shared_noise, antithetic, fast, kStrided, true>;
    return for_batch(call, kMostBatch, [&](const Launch& part) {
      return launch_kernel(kernel, dim3(g.blocks, part.batch), g.threads, part.stream, part, g);
    });
  }
  const Geometry g = geometry_of(call);
  const auto run = [&](auto kernel) { return launch_kernel(kernel, g.blocks, g.threads, call.stream, call, g); };
  switch (g.store_kind) {
    case kAligned: return run(sample_kernel<Out, shared_noise, antithetic, fast, kAligned>);
    case kShifted: return run(sample_kernel<Out, shared_noise, antithetic, fast, kShifted>);
    case kStaged: return run(sample_kernel<Out, shared_noise, antithetic, fast, kStaged>);
    case kTransposed: return run(sample_kernel<Out, shared_noise, antithetic, fast, kTransposed>);
    case kTransposedStaged: return run(sample_kernel<Out, shared_noise, antithetic, fast, kTransposedStaged>);
    case kFewColumns: return run(sample_kernel<Out, shared_noise, antithetic, fast, kFewColumns>);
    default: return run(sample_kernel<Out, shared_noise, antithetic, fast, kStrided>);
  }
}

// Launches on the current device, which must be the call's. The call has at least one row and one column.
inline cudaError_t launch_sample(const Launch& call) {
  return with_matrix_type(call.type, [&](auto type) {
    using Out = typename decltype(type)::Type;
    const auto launch = [&](auto shared_noise, auto antithetic, auto fast_math) {
      constexpr bool fast = fast_math && has_fast<Out>;
      return launch_stores<Out, shared_noise, antithetic, fast>(call);
    };
    return with_constants(launch, call.shared_noise, call.antithetic, call.fast_math);
  });
}

// Adds 1 to the offset at `offset`, in stream order.
inline cudaError_t advance(u64* offset, void* stream) { return launch_kernel(advance_kernel, 1, 1, stream, offset); }

}  // namespace multisample
