// Kernels with cuRANDDx: Philox 4x32-10 and Box-Muller, in every layout of the loop that may be the fastest. A group of
// four elements takes the four normals of one counter.
#include <algorithm>
#include <curanddx.hpp>

namespace {

constexpr unsigned THREADS = 256, GROUP = 4;

using Philox = decltype(curanddx::Generator<curanddx::philox4_32>() + curanddx::PhiloxRounds<10>() +
                        curanddx::SM<ARCHITECTURE>() + curanddx::Thread());
using Normal = curanddx::normal<float, curanddx::box_muller>;
using Number = unsigned long long;

// A thread draws GROUPS groups of a row, and a block a segment of ROWS rows. The group selects Philox's
// subsequence, so that the threads of a row share the parts of the first rounds for row and call. ALIGNED if n is a
// multiple of GROUP.
template <unsigned ROWS, unsigned GROUPS, unsigned UNROLLED, bool ALIGNED>
__global__ void __launch_bounds__(THREADS)
    draw_rows(const float* __restrict__ mu, const float* __restrict__ sigma, float* __restrict__ out, unsigned d,
              unsigned n, Number seed, Number call, unsigned segments) {
  constexpr unsigned WIDTH = THREADS / ROWS;
  const unsigned row = blockIdx.x / segments * ROWS + threadIdx.x / WIDTH;
  if (row >= d) return;
  float* const x = out + Number(row) * n;
  Normal normal(mu[row], sigma[row]);
  unsigned group = blockIdx.x % segments * (WIDTH * GROUPS) + threadIdx.x % WIDTH;
#pragma unroll UNROLLED
  for (unsigned m = 0; m < GROUPS; ++m, group += WIDTH) {
    const unsigned j = GROUP * group;
    if (j >= n) return;
    Philox rng(seed, group, call << 32 | row);
    const float4 four = normal.generate4(rng);
    if constexpr (ALIGNED) {
      *reinterpret_cast<float4*>(x + j) = four;
    } else {
      x[j] = four.x;
      if (j + 1 < n) x[j + 1] = four.y;
      if (j + 2 < n) x[j + 2] = four.z;
      if (j + 3 < n) x[j + 3] = four.w;
    }
  }
}

template <unsigned ROWS, unsigned GROUPS, unsigned UNROLLED = GROUPS>
void by_rows(float* out, const float* mu, const float* sigma, unsigned d, unsigned n, Number seed, Number call,
             cudaStream_t stream) {
  constexpr unsigned COLUMNS = THREADS / ROWS * GROUPS * GROUP;
  const unsigned segments = (n + COLUMNS - 1) / COLUMNS, blocks = (d + ROWS - 1) / ROWS * segments;
  const auto kernel = n % GROUP ? draw_rows<ROWS, GROUPS, UNROLLED, false> : draw_rows<ROWS, GROUPS, UNROLLED, true>;
  kernel<<<blocks, THREADS, 0, stream>>>(mu, sigma, out, d, n, seed, call, segments);
}

// The flat matrix: groups have aligned stores of 16 bytes also where rows have an odd length. An iteration
// advances (i, j) by (`rows`, `columns`), which avoids a division.
__global__ void __launch_bounds__(THREADS)
    draw_flat(const float* __restrict__ mu, const float* __restrict__ sigma, float* __restrict__ out, Number size,
              unsigned n, Number seed, Number call, unsigned rows, unsigned columns) {
  Number k = GROUP * (blockIdx.x * THREADS + threadIdx.x);
  unsigned i = unsigned(k) / n, j = unsigned(k) % n;
  for (; k < size; k += GROUP * gridDim.x * THREADS) {
    Philox rng(seed, call, k / GROUP);
    if (n - j >= GROUP) {
      *reinterpret_cast<float4*>(out + k) = Normal(mu[i], sigma[i]).generate4(rng);
    } else {  // The group ends in another row, or behind the matrix.
      const float4 z = Normal().generate4(rng);
      const float normals[GROUP] = {z.x, z.y, z.z, z.w};
      for (unsigned m = 0, row = i, column = j; m < GROUP && k + m < size; ++m) {
        out[k + m] = mu[row] + sigma[row] * normals[m];
        if (++column == n) {
          column = 0;
          ++row;
        }
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

void by_grid(float* out, const float* mu, const float* sigma, unsigned d, unsigned n, Number seed, Number call,
             cudaStream_t stream) {
  static const unsigned resident = [] {
    int device = 0, multiprocessors = 0, blocks = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, draw_flat, THREADS, 0);
    return unsigned(std::max(1, multiprocessors * blocks));
  }();
  const Number size = Number(d) * n, block = GROUP * THREADS;
  const unsigned blocks = std::min<Number>(resident, (size + block - 1) / block), stride = blocks * block;
  draw_flat<<<blocks, THREADS, 0, stream>>>(mu, sigma, out, size, n, seed, call, stride / n, stride % n);
}

// Named in curanddx_peer.py, in this order.
constexpr decltype(&by_grid) LAYOUTS[] = {by_grid,        by_rows<1, 1>,     by_rows<1, 4>, by_rows<1, 16>,
                                          by_rows<1, 16, 4>, by_rows<8, 1>,  by_rows<8, 4>, by_rows<32, 1>,
                                          by_rows<32, 4>};

}  // namespace

// Writes x[i, j] = mu[i] + sigma[i] z[i, j] to `out` of shape (d, n); each `call` has other numbers. Returns an error's
// text, or null.
extern "C" const char* draw(float* out, const float* mu, const float* sigma, unsigned d, unsigned n, unsigned call,
                            unsigned layout, cudaStream_t stream) {
  LAYOUTS[layout](out, mu, sigma, d, n, 7, call, stream);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
