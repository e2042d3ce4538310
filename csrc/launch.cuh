// Launches the kernel that a call needs.
#pragma once

#include <cuda_runtime.h>

#include "sample_kernel.cuh"

namespace multisample {

template <class Out, bool shared, bool antithetic, bool fast>
void launch_kernel(const SampleCall& call) {
  const Geometry g = geometry_of(call);
  const auto run = [&](auto kernel) {
    kernel<<<g.blocks, g.threads, 0, static_cast<cudaStream_t>(call.stream)>>>(call, g);
  };
  switch (g.stores) {
    case kAligned: return run(sample_kernel<Out, shared, antithetic, fast, kAligned>);
    case kShifted: return run(sample_kernel<Out, shared, antithetic, fast, kShifted>);
    case kStaged: return run(sample_kernel<Out, shared, antithetic, fast, kStaged>);
    case kTransposed: return run(sample_kernel<Out, shared, antithetic, fast, kTransposed>);
    case kTransposedStaged: return run(sample_kernel<Out, shared, antithetic, fast, kTransposedStaged>);
    default: return run(sample_kernel<Out, shared, antithetic, fast, kStrided>);
  }
}

template <class Out, bool antithetic, bool fast>
void launch_noise(const SampleCall& call) {
  call.shared ? launch_kernel<Out, true, antithetic, fast>(call) : launch_kernel<Out, false, antithetic, fast>(call);
}

template <class Out, bool fast>
void launch_pairs(const SampleCall& call) {
  call.antithetic ? launch_noise<Out, true, fast>(call) : launch_noise<Out, false, fast>(call);
}

template <class Out>
void launch_transform(const SampleCall& call) {
  call.fast_math ? launch_pairs<Out, true>(call) : launch_pairs<Out, false>(call);
}

// On the device that is current, which is the call's; `rows` and `columns` are at least 1.
inline cudaError_t launch(const SampleCall& call) {
  switch (call.type) {
    case kFloat16: launch_transform<float16>(call); break;
    case kBFloat16: launch_transform<bfloat16>(call); break;
    case kFloat32: launch_transform<float>(call); break;
    default: launch_pairs<double, false>(call);
  }
  return cudaGetLastError();
}

// Counts up the offset at `counter`, in the order of `stream`.
inline cudaError_t advance(u64* counter, void* stream) {
  advance_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(counter);
  return cudaGetLastError();
}

}  // namespace multisample
