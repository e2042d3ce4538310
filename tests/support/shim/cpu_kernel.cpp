// Draws windows of many shapes with csrc/cpu/kernel.h, into memory of exactly their size at odd addresses, and prints a
// digest of their bits.
#include <cstdio>
#include <vector>

#include "cpu/kernel.h"

using namespace multisample;

int main() {
  const u64 shapes[][2] = {{1, 1},    {1, 9},   {2, 3},     {2, 2500}, {3, 5000},  {5, 1},    {7, 999}, {9, 300},
                           {15, 30},  {16, 1},  {16, 9},    {17, 8},   {13, 90},   {20, 500}, {25, 60}, {31, 70},
                           {32, 64},  {33, 65}, {40, 2100}, {47, 100}, {127, 3},   {128, 40}, {129, 5}, {200, 9},
                           {255, 33}, {257, 9}, {300, 70},  {2049, 7}, {4097, 13}, {9000, 9}};
  u64 digest = 14695981039346656037u;  // FNV-1a
  for (const auto& shape : shapes) {
    const u64 d = shape[0], n = shape[1];
    std::vector<double> mu(d), sigma(d);
    for (u64 k = 0; k < d; ++k) {
      mu[k] = 0.01 * static_cast<double>(k) - 3;
      sigma[k] = 0.1 + 0.003 * static_cast<double>(k);
    }
    for (u32 choice = 0; choice < 64; ++choice) {
      Launch call{};
      call.type = kFloat16 + choice % 4;
      call.shared_noise = choice / 4 % 2;
      call.antithetic = choice / 8 % 2;
      const bool transposed = choice / 16 % 2 != 0;
      const i64 size = call.type == kFloat64 ? 8 : call.type == kFloat32 ? 4 : 2;
      // The memory has one more row than the call, which must stay unchanged.
      const u64 pitch = d + (choice / 32 % 2);
      std::vector<char> out(pitch * n * static_cast<u64>(size) + 1);
      call.mu.data = mu.data(), call.sigma.data = sigma.data();
      call.mu_stride = call.sigma_stride = sizeof(double);
      call.mu_type = call.sigma_type = kFloat64;
      call.matrix = out.data() + 1;
      call.row_stride = transposed ? size : size * static_cast<i64>(n);
      call.column_stride = transposed ? size * static_cast<i64>(pitch) : size;
      call.rows = d;
      call.columns = n;
      call.first_row = (u64{1} << 32) - d;
      call.first_column = choice / 32 % 2 * 5;
      call.seed = 77;
      call.offset = 3;
      with_matrix_type(call.type, [&](auto type) {
        using Out = typename decltype(type)::Type;
        draw_window<Out>(call, 0, d, n / 2, n);
        if (n > 1) draw_window<Out>(call, 0, d, 0, n / 2);
      });
      for (u64 k = 1; k < out.size(); ++k) digest = (digest ^ static_cast<u8>(out[k])) * 1099511628211u;
    }
  }
  std::printf("%llx\n", digest);
}
