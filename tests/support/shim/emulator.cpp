// The runtime of kernels that Numba compiles for the emulated GPU: functions that the compiled kernels call. fibers.h
// runs the kernels' threads. Every access to memory is checked, and the first wrong one ends the launch.
#include "fibers.h"

using std::uint32_t, std::uint64_t, std::uint8_t;

namespace {

// Regions of memory: one for the output, four for inputs, the others for arrays in shared memory.
enum { kOut, kInputs, kShared = 5, kRegions = 10 };
struct Region {
  uint64_t begin, end;
};
Region regions[kRegions];

// The static shared memory of a block, and the gap between its arrays.
constexpr uint64_t kMostShared = 48 << 10, kGap = 64;
alignas(64) uint8_t shared[kMostShared];
// For each byte of shared memory: 0 if unwritten, 1 + the warp that wrote it since the last barrier, else `kByAny`.
uint8_t shared_written[kMostShared];
constexpr uint8_t kByAny = 255;
std::vector<unsigned> pieces;  // the number of shared arrays that a thread has allocated

// A kernel with more accesses counts as endless.
constexpr uint64_t kMostAccesses = 100'000'000;
uint64_t accesses, element_size;
uint8_t* written;  // a byte for each element of the output's memory

char failure[300];
fibers::Place after_failure;

[[noreturn]] void fail_at(const char* what, uint64_t address, int region) {
  const char* const name = region == kOut ? "the output" : region < kShared ? "the inputs" : "shared memory";
  char message[200];
  const long long bytes = static_cast<long long>(address - regions[region].begin);
  std::snprintf(message, sizeof message, "%s %s, %lld bytes from its begin", what, name, bytes);
  fibers::fail(message);
}

void check(uint64_t address, uint64_t size, int first, int last) {
  if (++accesses > kMostAccesses) fail_at("never ends, in", address, first);
  if (address % (size < 16 ? size : 16) != 0) fail_at("makes a misaligned access to", address, first);
  for (int k = first; k < last; ++k) {
    if (regions[k].begin <= address && address + size <= regions[k].end) return;
  }
  fail_at("accesses memory outside of", address, first);
}

uint8_t* check_shared(uint64_t address, uint64_t size) {
  check(address, size, kShared, kRegions);
  return shared_written + (address - reinterpret_cast<uint64_t>(shared));
}

}  // namespace

namespace fibers {

void fail(const char* message) {
  std::snprintf(failure, sizeof failure, "block %u, thread %u: %s", blockIdx.x, threadIdx.x, message);
  go_to(after_failure);
}

void begin_block() {
  std::memset(shared_written, 0, sizeof shared_written);
  std::memset(regions + kShared, 0, sizeof(Region) * (kRegions - kShared));
  pieces.assign(blockDim.x, 0);
}

void after_barrier() {
  for (uint8_t& by : shared_written) by = by != 0 ? kByAny : 0;
}

}  // namespace fibers

extern "C" {

// Runs a grid; returns the error, or an empty text. `memory`: the output and the inputs.
const char* emulated_launch(void (*kernel)(), uint32_t blocks, uint32_t batch, uint32_t threads, bool backwards,
                            const Region* memory, uint64_t size, uint8_t* elements) {
  std::memcpy(regions, memory, sizeof(Region) * kShared);
  accesses = 0, element_size = size, written = elements, failure[0] = 0;
  if (__builtin_setjmp(after_failure) == 0) {
    fibers::launch(blocks, batch, threads, backwards, kernel);
  } else {
    fibers::threads.clear();  // They stopped in the middle of the kernel.
  }
  return failure;
}

void emulated_load(uint64_t address, uint64_t size) { check(address, size, kInputs, kShared); }

void emulated_store(uint64_t address, uint64_t size) {
  check(address, size, kOut, kOut + 1);
  uint8_t* const element = written + (address - regions[kOut].begin) / element_size;
  for (uint64_t k = 0; k < size / element_size; ++k) {
    if (element[k]++ != 0) fail_at("writes an element twice in", address, kOut);
  }
}

void emulated_load_shared(uint64_t address, uint64_t size) {
  const uint8_t* const by = check_shared(address, size);
  for (uint64_t k = 0; k < size; ++k) {
    if (by[k] == 0) fail_at("reads uninitialized", address, kShared);
  }
}

void emulated_store_shared(uint64_t address, uint64_t size) {
  uint8_t* const by = check_shared(address, size);
  const uint8_t warp = static_cast<uint8_t>(1 + threadIdx.x / fibers::kWarp);
  for (uint64_t k = 0; k < size; ++k) {
    if (by[k] != 0 && by[k] != kByAny && by[k] != warp) {
      fail_at("overwrites another warp's element too early in", address, kShared);
    }
    by[k] = warp;
  }
}

// The address of an array in shared memory: call k of every thread of a block returns the same array.
uint64_t emulated_shared_memory(uint64_t size) {
  const unsigned piece = kShared + pieces[threadIdx.x]++;
  uint64_t begin = piece == kShared ? reinterpret_cast<uint64_t>(shared) : regions[piece - 1].end + kGap;
  begin = (begin + 15) / 16 * 16;
  if (piece == kRegions || begin + size > reinterpret_cast<uint64_t>(shared) + kMostShared) {
    fail_at("allocates too much", begin, kShared);
  }
  regions[piece] = {begin, begin + size};
  return begin;
}

uint32_t emulated_thread() { return threadIdx.x; }
uint32_t emulated_block() { return blockIdx.x; }
uint32_t emulated_matrix() { return blockIdx.y; }
void emulated_block_barrier() { fibers::wait_for_others(fibers::kBlock); }
void emulated_warp_barrier() { fibers::wait_for_others(fibers::kWarpBarrier); }
uint64_t emulated_shuffle(uint64_t value, uint32_t lane) {
  return fibers::wait_for_others(fibers::kShuffle, value, lane);
}
uint64_t emulated_shuffle_up(uint64_t value) {
  const uint32_t lane = threadIdx.x % fibers::kWarp;
  return emulated_shuffle(value, lane == 0 ? 0 : lane - 1);
}
uint64_t emulated_vote(uint64_t flag) { return fibers::wait_for_others(fibers::kVote, flag); }
}
