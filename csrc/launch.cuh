// Launches the kernel that a call needs, on a stream of the current device.
#pragma once

#include <cuda_runtime.h>

#include "sample_kernel.cuh"

namespace multisample {

template <class Out, bool shared, bool fast>
void launch_kernel(const SampleCall& call, cudaStream_t stream) {
  const Geometry g = geometry_of(call);
  switch (g.stores) {
    case kAligned: sample_kernel<Out, shared, fast, kAligned><<<g.blocks, g.threads, 0, stream>>>(call, g); break;
    case kShifted: sample_kernel<Out, shared, fast, kShifted><<<g.blocks, g.threads, 0, stream>>>(call, g); break;
    case kStaged: sample_kernel<Out, shared, fast, kStaged><<<g.blocks, g.threads, 0, stream>>>(call, g); break;
    default: sample_kernel<Out, shared, fast, kStrided><<<g.blocks, g.threads, 0, stream>>>(call, g);
  }
}

template <class Out, bool fast>
void launch_noise(const SampleCall& call, cudaStream_t stream) {
  call.shared ? launch_kernel<Out, true, fast>(call, stream) : launch_kernel<Out, false, fast>(call, stream);
}

template <class Out>
void launch_transform(const SampleCall& call, cudaStream_t stream) {
  call.fast_math ? launch_noise<Out, true>(call, stream) : launch_noise<Out, false>(call, stream);
}

// `rows` and `columns` are at least 1.
inline cudaError_t launch(const SampleCall& call, cudaStream_t stream) {
  switch (call.type) {
    case kFloat16: launch_transform<float16>(call, stream); break;
    case kBFloat16: launch_transform<bfloat16>(call, stream); break;
    case kFloat32: launch_transform<float>(call, stream); break;
    default: launch_noise<double, false>(call, stream);
  }
  return cudaGetLastError();
}

}  // namespace multisample
