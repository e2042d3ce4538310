// From the original kernel to ours, one change at a time; cuda_steps.py times them. float32, independent noise, rows of
// any length that is a multiple of 4 unless a step says otherwise; seed below 2^32, offset 0.
#pragma once

#include "cuda/kernel.cuh"

namespace multisample {

// The original kernel: a block for each dimension, a thread for each sample, one row of noise read from memory.
extern "C" __global__ void original(const float* mu, const float* sigma, const float* z, float* out, int n) {
  const int i = blockIdx.x, j = threadIdx.x;
  out[i * n + j] = mu[i] + sigma[i] * z[j];
}

// The transform with library functions.
MULTISAMPLE_FUNCTION Normals<float> library_normals(const Words& w) {
  const float r = sqrtf(-2 * logf(fmaf(w.w0, 0x1p-32f, 0x1p-33f))),
              t = sqrtf(-2 * logf(fmaf(w.w2, 0x1p-32f, 0x1p-33f)));
  float c, s, d, v;
  sincospif(static_cast<i32>(w.w1) * 0x1p-31f, &s, &c);
  sincospif(static_cast<i32>(w.w3) * 0x1p-31f, &v, &d);
  return {r * c, r * s, t * d, t * v};
}

// Independent noise, made in the kernel. Still one thread per element, although one Philox block gives four normals.
extern "C" __global__ void noise_in_the_kernel(const float* mu, const float* sigma, float* out, u32 d, u32 n,
                                               u64 seed) {
  const RoundKeys keys = round_keys(seed, kKey1);
  for (u32 i = blockIdx.x; i < d; i += gridDim.x) {
    for (u32 j = threadIdx.x; j < n; j += blockDim.x) {
      const Normals<float> z = library_normals(words(column_part(j / 4, 0, 0, keys), row_part(i, 0, keys), keys));
      const float normal = j % 4 == 0 ? z.z0 : j % 4 == 1 ? z.z1 : j % 4 == 2 ? z.z2 : z.z3;
      out[static_cast<u64>(i) * n + j] = mu[i] + sigma[i] * normal;
    }
  }
}

enum Which { kLibrary, kPortable, kFast };

template <Which which>
MULTISAMPLE_FUNCTION Quad<float> four(const ColumnPart& columns, const Dimension<float>& dimension,
                                      const RoundKeys& keys) {
  const Words w = words(columns, dimension.words, keys);
  const Normals<float> z = which == kLibrary ? library_normals(w) : which == kFast ? fast_normals(w) : normals(w);
  const Elements<float, false> x = scaled<float, false>(dimension.mu, dimension.sigma, z);
  return {{x.x[0], x.x[1], x.x[2], x.x[3]}};
}

// Four columns per thread, one store for them, 16 times along the row.
template <Which which>
__global__ void __launch_bounds__(256) along_the_row(const float* mu, const float* sigma, float* out, u32 d, u32 n,
                                                     u64 seed) {
  const RoundKeys keys = round_keys(seed, kKey1);
  const u32 runs = (n / 4 + 4095) / 4096, i = blockIdx.x / runs;
  const Dimension<float> dimension{row_part(i, 0, keys), mu[i], sigma[i]};
  u32 g = blockIdx.x % runs * 4096 + threadIdx.x;
  for (u32 k = 0; k < 16 && g < n / 4; ++k, g += 256) {
    reinterpret_cast<Quad<float>*>(out + static_cast<u64>(i) * n)[g] =
        four<which>(column_part(g, 0, 0, keys), dimension, keys);
  }
}

// Down 32 dimensions, with the same columns.
template <Which which, int unroll>
__global__ void __launch_bounds__(256) down_the_rows(const float* mu, const float* sigma, float* out, u32 d, u32 n,
                                                     u64 seed) {
  __shared__ Dimension<float> dimensions[32];
  const RoundKeys keys = round_keys(seed, kKey1);
  const u32 blocks = (n / 4 + 255) / 256, first = blockIdx.x / blocks * 32;
  if (threadIdx.x < 32 && first + threadIdx.x < d) {
    const u32 i = first + threadIdx.x;
    dimensions[threadIdx.x] = {row_part(i, 0, keys), mu[i], sigma[i]};
  }
  __syncthreads();
  const u32 g = blockIdx.x % blocks * 256 + threadIdx.x;
  if (g >= n / 4) return;
  const ColumnPart columns = column_part(g, 0, 0, keys);
  Quad<float>* at = reinterpret_cast<Quad<float>*>(out + static_cast<u64>(first) * n) + g;
#pragma unroll(unroll)
  for (u32 k = 0; k < 32 && first + k < d; ++k, at += n / 4) *at = four<which>(columns, dimensions[k], keys);
}

// Down the dimensions, for rows at any address: four scalar stores.
template <Which which>
__global__ void __launch_bounds__(256) four_stores(const float* mu, const float* sigma, float* out, u32 d, u32 n,
                                                   u64 seed) {
  __shared__ Dimension<float> dimensions[32];
  const RoundKeys keys = round_keys(seed, kKey1);
  const u32 blocks = ((n + 3) / 4 + 255) / 256, first = blockIdx.x / blocks * 32;
  if (threadIdx.x < 32 && first + threadIdx.x < d) {
    const u32 i = first + threadIdx.x;
    dimensions[threadIdx.x] = {row_part(i, 0, keys), mu[i], sigma[i]};
  }
  __syncthreads();
  const u32 g = blockIdx.x % blocks * 256 + threadIdx.x;
  if (4 * g >= n) return;
  const ColumnPart columns = column_part(g, 0, 0, keys);
  float* at = out + static_cast<u64>(first) * n + 4 * g;
  for (u32 k = 0; k < 32 && first + k < d; ++k, at += n) {
    const Quad<float> x = four<which>(columns, dimensions[k], keys);
    at[0] = x.x[0];
    if (4 * g + 1 < n) at[1] = x.x[1];
    if (4 * g + 2 < n) at[2] = x.x[2];
    if (4 * g + 3 < n) at[3] = x.x[3];
  }
}

// For rows at any address, through shared memory: coalesced stores, whole warps only.
template <Which which>
__global__ void __launch_bounds__(256) through_shared_memory(const float* mu, const float* sigma, float* out, u32 d,
                                                             u32 n, u64 seed) {
  __shared__ Dimension<float> dimensions[32];
  __shared__ Quad<float> stages[256];
  const RoundKeys keys = round_keys(seed, kKey1);
  const u32 blocks = ((n + 3) / 4 + 255) / 256, first = blockIdx.x / blocks * 32;
  if (threadIdx.x < 32 && first + threadIdx.x < d) {
    const u32 i = first + threadIdx.x;
    dimensions[threadIdx.x] = {row_part(i, 0, keys), mu[i], sigma[i]};
  }
  __syncthreads();
  const u32 g = blockIdx.x % blocks * 256 + threadIdx.x, lane = threadIdx.x % 32;
  const u32 column = 4 * (g - lane);
  if (column >= n) return;
  const ColumnPart columns = column_part(g, 0, 0, keys);
  const float* stage = reinterpret_cast<const float*>(stages + (threadIdx.x - lane));
  float* at = out + static_cast<u64>(first) * n + column;
  for (u32 k = 0; k < 32 && first + k < d; ++k, at += n) {
    stages[threadIdx.x] = four<which>(columns, dimensions[k], keys);
    __syncwarp();
#pragma unroll
    for (u32 e = 0; e < 128; e += 32) {
      if (column + e + lane < n) at[e + lane] = stage[e + lane];
    }
    __syncwarp();
  }
}

}  // namespace multisample
