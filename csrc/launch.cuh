// Launches the kernel that a call needs.
#pragma once

#include <cuda_runtime.h>

#include "sample_kernel.cuh"

namespace multisample {

template <class Out, bool shared, bool fast>
void launch_kernel(const SampleCall& call) {
  const Geometry g = geometry_of(call);
  const auto stream = static_cast<cudaStream_t>(call.stream);
  switch (g.stores) {
    case kAligned: sample_kernel<Out, shared, fast, kAligned><<<g.blocks, g.threads, 0, stream>>>(call, g); break;
    case kShifted: sample_kernel<Out, shared, fast, kShifted><<<g.blocks, g.threads, 0, stream>>>(call, g); break;
    case kStaged: sample_kernel<Out, shared, fast, kStaged><<<g.blocks, g.threads, 0, stream>>>(call, g); break;
    default: sample_kernel<Out, shared, fast, kStrided><<<g.blocks, g.threads, 0, stream>>>(call, g);
  }
}

template <class Out, bool fast>
void launch_noise(const SampleCall& call) {
  call.shared ? launch_kernel<Out, true, fast>(call) : launch_kernel<Out, false, fast>(call);
}

template <class Out>
void launch_transform(const SampleCall& call) {
  call.fast_math ? launch_noise<Out, true>(call) : launch_noise<Out, false>(call);
}

// On the device that is current, which is the call's; `rows` and `columns` are at least 1.
inline cudaError_t launch(const SampleCall& call) {
  switch (call.type) {
    case kFloat16: launch_transform<float16>(call); break;
    case kBFloat16: launch_transform<bfloat16>(call); break;
    case kFloat32: launch_transform<float>(call); break;
    default: launch_noise<double, false>(call);
  }
  return cudaGetLastError();
}

}  // namespace multisample
