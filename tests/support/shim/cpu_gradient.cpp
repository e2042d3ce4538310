// Sums gradients of many shapes with csrc/cpu/gradient_kernel.h, from memory of exactly their size at odd addresses,
// split as for different numbers of threads, and prints digests of their bits.
#include <cstdio>
#include <vector>

#include "cpu/gradient_kernel.h"

using namespace multisample;

namespace {

u64 digest_of(const Launch& call, u64 threads) {
  const GradientParts parts(call, threads);
  std::vector<cpu::Gradients> partial_sums(parts.partial_sums());
  with_matrix_type(call.type, [&](auto type) {
    for (u64 k = parts.count(); k-- > 0;) sum_part<typename decltype(type)::Type>(parts, k, partial_sums.data());
  });
  parts.finish(partial_sums.data());
  u64 digest = 14695981039346656037u;  // FNV-1a
  for (const void* gradient : {call.first, call.second}) {
    const u8* const bytes = static_cast<const u8*>(gradient);
    for (u64 k = 0; k < call.rows * (call.type == kFloat64 ? 8 : 4); ++k) {
      digest = (digest ^ bytes[k]) * 1099511628211u;
    }
  }
  return digest;
}

template <class G>
void fill(std::vector<char>& memory) {
  for (u64 k = 0; k + sizeof(G) < memory.size(); k += sizeof(G)) {
    const G x = narrow<G>(0.01f * static_cast<float>(k % 997) - 4);
    std::memcpy(&memory[k + 1], &x, sizeof x);
  }
}
template <>
void fill<double>(std::vector<char>& memory) {
  for (u64 k = 0; k + 8 < memory.size(); k += 8) {
    const double x = 0.01 * static_cast<double>(k % 997) - 4;
    std::memcpy(&memory[k + 1], &x, sizeof x);
  }
}

}  // namespace

int main() {
  const u64 shapes[][2] = {{1, 1},   {1, 9},    {15, 30},  {16, 1},   {17, 8},   {31, 70},  {32, 64},   {47, 100},
                           {129, 5}, {257, 33}, {2049, 7}, {4200, 3}, {3, 4096}, {2, 4101}, {20, 8200}, {1, 9000}};
  for (const auto& shape : shapes) {
    const u64 d = shape[0], n = shape[1];
    std::vector<double> mu(d), sigma(d);
    for (u32 choice = 0; choice < 64; ++choice) {
      Launch call{};
      call.operation = kGradient;
      call.type = kFloat16 + choice % 4;
      call.shared_noise = choice / 4 % 2;
      call.antithetic = choice / 8 % 2;
      const bool transposed = choice / 16 % 2 != 0;
      const i64 size = call.type == kFloat64 ? 8 : call.type == kFloat32 ? 4 : 2;
      std::vector<char> grad(d * n * static_cast<u64>(size) + 1);
      switch (call.type) {
        case kFloat16: fill<float16>(grad); break;
        case kBFloat16: fill<bfloat16>(grad); break;
        case kFloat32: fill<float>(grad); break;
        default: fill<double>(grad);
      }
      call.matrix = grad.data() + 1;
      call.row_stride = transposed ? size : size * static_cast<i64>(n);
      call.column_stride = transposed ? size * static_cast<i64>(d) : size;
      call.first = mu.data();
      call.second = sigma.data();
      call.rows = d;
      call.columns = n;
      call.first_row = (u64{1} << 32) - d;
      call.first_column = choice / 32 % 2 * 5;
      call.seed = 77;
      call.offset = 3;
      const u64 digest = digest_of(call, 1);
      for (u64 threads : {2, 3, 64}) {
        if (digest_of(call, threads) != digest) std::printf("threads of (%llu, %llu): ", d, n);
      }
      static u64 all = 0;
      all = (all ^ digest) * 1099511628211u;
      if (choice == 63 && &shape == &shapes[sizeof shapes / sizeof *shapes - 1]) std::printf("%llx\n", all);
    }
  }
}
