// One kernel with cuRANDDx: Philox 4x32-10 and Box-Muller. Each group of four elements of the flat matrix takes the
// four normals of one counter and one store of 16 bytes, also where rows have an odd length.
#include <algorithm>
#include <curanddx.hpp>

namespace {

constexpr unsigned THREADS = 256, GROUP = 4;

using Philox = decltype(curanddx::Generator<curanddx::philox4_32>() + curanddx::PhiloxRounds<10>() +
                        curanddx::SM<ARCHITECTURE>() + curanddx::Thread());
using Normal = curanddx::normal<float, curanddx::box_muller>;

// An iteration of the grid covers `rows` rows and `columns` columns: no division in the loop.
__global__ void __launch_bounds__(THREADS) draw_matrix(const float* __restrict__ mu, const float* __restrict__ sigma,
                                                       float* __restrict__ out, unsigned long long size, unsigned n,
                                                       unsigned long long seed, unsigned long long call, unsigned rows,
                                                       unsigned columns) {
  unsigned long long k = GROUP * (blockIdx.x * THREADS + threadIdx.x);
  unsigned i = unsigned(k) / n, j = unsigned(k) % n;
  for (; k < size; k += GROUP * gridDim.x * THREADS) {
    Philox rng(seed, call, k / GROUP);
    if (n - j >= GROUP) {
      *reinterpret_cast<float4*>(out + k) = Normal(mu[i], sigma[i]).generate4(rng);
    } else {  // The group ends in another row, or behind the matrix.
      const float4 z = Normal().generate4(rng);
      const float normals[GROUP] = {z.x, z.y, z.z, z.w};
      unsigned row = i, column = j;
      float x[GROUP];
#pragma unroll
      for (unsigned m = 0; m < GROUP; ++m) {
        if (k + m < size) x[m] = mu[row] + sigma[row] * normals[m];
        if (++column == n) {
          column = 0;
          ++row;
        }
      }
      if (k + GROUP <= size) {
        *reinterpret_cast<float4*>(out + k) = make_float4(x[0], x[1], x[2], x[3]);
      } else {
#pragma unroll
        for (unsigned m = 0; m < GROUP; ++m)
          if (k + m < size) out[k + m] = x[m];
      }
    }
    i += rows;
    j += columns;
    if (j >= n) {
      j -= n;
      ++i;
    }
  }
}

}  // namespace

// Writes x[i, j] = mu[i] + sigma[i] z[i, j] to `out` of shape (d, n); each `call` has other numbers. Returns an error's
// text, or null.
extern "C" const char* draw(float* out, const float* mu, const float* sigma, unsigned d, unsigned n, unsigned call) {
  static const unsigned resident = [] {
    int device = 0, multiprocessors = 0, blocks = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, draw_matrix, THREADS, 0);
    return unsigned(std::max(1, multiprocessors * blocks));
  }();
  const unsigned long long size = static_cast<unsigned long long>(d) * n, block = GROUP * THREADS;
  const unsigned blocks = std::min<unsigned long long>(resident, (size + block - 1) / block), stride = blocks * block;
  draw_matrix<<<blocks, THREADS>>>(mu, sigma, out, size, n, 7, call, stride / n, stride % n);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
