// The stream of `multisample.sample` as a generator of TestU01. testu01.py compiles this program, checks its arguments
// and runs
//
//   testu01 test BATTERY TEST ORDER SEED       prints the p-value of each statistic, and the CPU time
//   testu01 draw TEST ORDER SEED FIRST COUNT   writes COUNT doubles in [0, 1), from block FIRST of the stream on, and
//                                              the COUNT words that TestU01 gets instead if it asks for bits.
//                                              FIRST is a multiple of 1024.
//
// Each test of a battery reads its own part of the stream, in one of these orders:
//
//   rows         the words of row TEST
//   columns      the words of column TEST
//   offsets      the word of element (0, TEST) of every offset: one word of each call of a generator
//   normals      Phi of the float64 normals of row TEST
//   normals_f32  the same of float32; the first 20 bits of eight normals make five words
//
// A row has 2^32 blocks of four, and a column 2^32 rows. Row or column TEST + 256 follows.
#include <multisample/normal.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <map>
#include <string>
#include <vector>

extern "C" {
#include "bbattery.h"
#include "swrite.h"
#include "unif01.h"
}

namespace {

using multisample::u32;
using multisample::u64;

// Blocks that are drawn at once, in loops that compilers vectorize.
constexpr u32 kBlocks = 1024;
constexpr int kMostTests = 200;

double phi(double z) { return std::min(std::erfc(-z * std::sqrt(0.5)) / 2, 1 - 0x1p-53); }
double of_word(u32 word) { return word * 0x1p-32; }

class Numbers {
 public:
  Numbers(u32 test, const std::string& order, u64 seed, u64 first = 0)
      : test_(test),
        block_(first),
        stream_(seed),
        keys_(multisample::round_keys(seed, multisample::kKey1)),
        fill_(kOrders.at(order)) {}

  double next() {
    if (used_ == size_) {
      size_ = (this->*fill_)();
      block_ += kBlocks;
      used_ = 0;
    }
    return buffer_[used_++];
  }

 private:
  // The row or column of the next kBlocks blocks, and the place of the first of them.
  u32 line() const { return test_ + 256 * static_cast<u32>(block_ >> 32); }
  u32 place() const { return static_cast<u32>(block_); }

  multisample::Words words(u32 i, u32 g, u64 offset) const {
    const u32 o0 = multisample::low(offset), o1 = multisample::high(offset);
    return multisample::words(multisample::column_part(g, o0, o1, keys_), multisample::row_part(i, o0, keys_), keys_);
  }
  static u32 of_column(const multisample::Words& w, u32 j) {
    return j & 2 ? (j & 1 ? w.w3 : w.w2) : (j & 1 ? w.w1 : w.w0);
  }
  template <class Four>
  void put(u32 k, const Four& four) {
    const auto [a, b, c, d] = four;
    buffer_[4 * k] = a;
    buffer_[4 * k + 1] = b;
    buffer_[4 * k + 2] = c;
    buffer_[4 * k + 3] = d;
  }

  // Functions that fill the buffer return its size.

  u32 rows() {
    const u32 i = line(), g = place();
    for (u32 k = 0; k < kBlocks; ++k) put(k, words(i, g + k, 0));
    for (double& word : buffer_) word *= 0x1p-32;
    return 4 * kBlocks;
  }
  u32 columns() {
    const u32 i = place(), j = line();
    for (u32 k = 0; k < kBlocks; ++k) buffer_[k] = of_word(of_column(words(i + k, j / 4, 0), j));
    return kBlocks;
  }
  u32 offsets() {
    const u32 j = test_;
    for (u32 k = 0; k < kBlocks; ++k) buffer_[k] = of_word(of_column(words(0, j / 4, block_ + k), j));
    return kBlocks;
  }
  u32 normals() {
    const u32 i = line(), g = place();
    for (u32 k = 0; k < kBlocks; ++k) put(k, stream_.normals4_f64(i, g + k));
    for (double& z : buffer_) z = phi(z);
    return 4 * kBlocks;
  }
  u32 normals_f32() {
    const u32 i = line(), g = place();
    for (u32 k = 0; k < kBlocks; ++k) put(k, stream_.normals4(i, g + k));
    for (double& z : buffer_) z = phi(z);
    u64 bits = 0;
    u32 count = 0, size = 0;
    for (double u : buffer_) {
      bits = bits << 20 | static_cast<u64>(u * 0x1p20);
      count += 20;
      if (count >= 32) {
        count -= 32;
        buffer_[size++] = of_word(static_cast<u32>(bits >> count));
      }
    }
    return size;
  }

  inline static const std::map<std::string, u32 (Numbers::*)()> kOrders = {
      {"rows", &Numbers::rows},       {"columns", &Numbers::columns},         {"offsets", &Numbers::offsets},
      {"normals", &Numbers::normals}, {"normals_f32", &Numbers::normals_f32},
  };

  u32 test_;
  u64 block_;
  multisample::Stream stream_;
  multisample::RoundKeys keys_;
  u32 (Numbers::*fill_)();
  double buffer_[4 * kBlocks];
  u32 used_ = 0, size_ = 0;
};

double get_u01(void*, void* numbers) { return static_cast<Numbers*>(numbers)->next(); }
unsigned long get_bits(void*, void* numbers) { return static_cast<unsigned long>(get_u01(nullptr, numbers) * 0x1p32); }
void write_nothing(void*) {}

u64 number(const char* text) { return std::strtoull(text, nullptr, 10); }

void run_test(const std::string& battery, u32 test, unif01_Gen* generator) {
  const std::map<std::string, void (*)(unif01_Gen*, int*)> batteries = {
      {"SmallCrush", bbattery_RepeatSmallCrush},
      {"Crush", bbattery_RepeatCrush},
      {"BigCrush", bbattery_RepeatBigCrush},
  };
  int repetitions[1 + kMostTests] = {};
  repetitions[test] = 1;
  swrite_Basic = 0;
  const std::clock_t start = std::clock();
  batteries.at(battery)(generator, repetitions);
  // testu01.py reads these lines, which follow the report of the battery.
  for (int k = 0; k < bbattery_NTests; ++k)
    std::printf("\np-value\t%s\t%.17g\n", bbattery_TestNames[k], bbattery_pVal[k]);
  std::printf("seconds\t%.2f\n", static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC);
}

void write_numbers(Numbers numbers, Numbers same, size_t count) {
  std::vector<double> u01(count);
  std::vector<u32> words(count);
  for (double& u : u01) u = get_u01(nullptr, &numbers);
  for (u32& word : words) word = static_cast<u32>(get_bits(nullptr, &same));
  std::fwrite(u01.data(), sizeof(double), count, stdout);
  std::fwrite(words.data(), sizeof(u32), count, stdout);
}

}  // namespace

int main(int, char** arguments) {
  if (arguments[1] == std::string("draw")) {
    const Numbers numbers(static_cast<u32>(number(arguments[2])), arguments[3], number(arguments[4]),
                          number(arguments[5]));
    write_numbers(numbers, numbers, number(arguments[6]));
  } else {
    const u32 test = static_cast<u32>(number(arguments[3]));
    Numbers numbers(test, arguments[4], number(arguments[5]));
    std::string name = "multisample";
    unif01_Gen generator{&numbers, nullptr, name.data(), get_u01, get_bits, write_nothing};
    run_test(arguments[2], test, &generator);
  }
}
