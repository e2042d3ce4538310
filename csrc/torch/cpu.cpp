// The torch_ext backend on the CPU: samples and gradients on PyTorch's threads, as operators and as C functions. The
// kernels themselves are units: see torch/unit.h.
//
// It uses only PyTorch's stable ABI, so that one binary serves every version from its build version on.
#include <pthread.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <exception>
#include <future>
#include <string>
#include <system_error>
#include <vector>

#include "cpu/gradient_kernel.h"
#include "cpu/thread_windows.h"
#include "torch/operators.h"
#include "torch/python_calls.h"
#include "torch/schemas.h"

namespace multisample {
namespace {

// Whether Linux started this process by a fork, and it has executed no program since. The library may be loaded only
// after the fork.
bool began_by_fork() {
  char text[512]{};
  std::FILE* const file = std::fopen("/proc/self/stat", "r");
  if (file == nullptr) return false;
  std::fread(text, 1, sizeof(text) - 1, file);
  std::fclose(file);
  // The program's name, in parentheses, may have any characters. Six fields lie between it and the flags.
  const char* const fields = std::strrchr(text, ')');
  unsigned flags = 0;
  constexpr unsigned kForkedWithoutExec = 0x40;  // PF_FORKNOEXEC
  return fields != nullptr && std::sscanf(fields, ") %*s %*s %*s %*s %*s %*s %u", &flags) == 1 &&
         (flags & kForkedWithoutExec) != 0;
}

// GNU OpenMP, which runs PyTorch's threads, has a pool of threads for each thread that begins parallel work. A forked
// child inherits the pool of the thread that forked, but none of its threads, and would wait for them forever.
std::atomic<bool> forked{began_by_fork()};
[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, [] { forked = true; });

u64 threads_for(const Launch& call) {
  const u64 most = cpu::most_threads(call);
  if (most == 1) return 1;
  const u64 available = torch::stable::get_num_threads();
  return min(most, call.threads == 0 ? available : min(call.threads, available));
}

// Calls run(k) for k < count on some threads.
template <class Run>
void on_threads(u64 count, u64 threads, const Run& run) {
  if (threads == 1) {
    for (u64 k = 0; k < count; ++k) run(k);
    return;
  }
  // Threads begin far apart, because neighbours would both page in and clear the same fresh memory.
  const u64 stride = ceil_div(count, threads);
  std::atomic<u64> next{0};
  const auto work = [&](int64_t, int64_t) {
    for (u64 turn; (turn = next.fetch_add(1, std::memory_order_relaxed)) < stride * threads;) {
      const u64 k = turn % threads * stride + turn / threads;
      if (k < count) run(k);
    }
  };
  const auto work_in_parallel = [&] { torch::stable::parallel_for(0, static_cast<int64_t>(threads), 1, work); };
  if (!forked) return work_in_parallel();
  try {
    std::async(std::launch::async, work_in_parallel).get();  // A new thread has a new pool.
  } catch (const std::system_error&) {                       // No thread can start.
    work(0, 0);
  }
}

using DrawWindow = decltype(draw_window<float>);
using SumPart = decltype(sum_part<float>);

void run_sample(const Launch& call, DrawWindow* draw) {
  const u64 threads = threads_for(call);
  const cpu::Windows windows(call, threads);
  on_threads(windows.count(), threads, [&](u64 k) { windows.draw(k, draw); });
}

void run_gradient(const Launch& call, SumPart* sum) {
  const u64 threads = threads_for(call);
  const GradientParts parts(call, threads);
  std::vector<cpu::Gradients> partial_sums(parts.partial_sums());
  on_threads(parts.count(), threads, [&](u64 k) { sum(parts, k, partial_sums.data()); });
  parts.finish(partial_sums.data());
}

// If a matrix is too little work for several threads, one thread draws each matrix of the batch.
void run(const Launch& batch) {
  const auto function = unit_function<void()>(batch);  // Here, because it may need Python's lock.
  Launch whole = batch;
  if (batch.batch > 1) whole.rows *= batch.batch;
  on_threads(batch.batch > 1 ? batch.batch : 1, threads_for(batch) == 1 ? threads_for(whole) : 1, [&](u64 b) {
    const Launch call = with_values(matrix_of_batch(batch, b));
    call.operation == kSample ? run_sample(call, reinterpret_cast<DrawWindow*>(function))
                              : run_gradient(with_regular_strides(call), reinterpret_cast<SumPart*>(function));
  });
}

struct Cpu {
  static void run(const char*, const Tensor&, const Launch& call) { multisample::run(call); }
};

thread_local std::string last_error;

// Returns 0, or 1 after an exception, with its text in last_error.
template <class Run>
int without_exceptions(const Run& run) {
  try {
    run();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
  } catch (...) {
    last_error = "unknown exception";
  }
  return 1;
}

}  // namespace
}  // namespace multisample

// Draws a sample or sums a gradient in host memory. Returns 0, or 1 with the reason in multisample_last_error.
MULTISAMPLE_EXPORT int multisample_run_cpu(const multisample::Launch* call) {
  return multisample::without_exceptions([&] { multisample::run(*call); });
}

// Whether all of mu and of weights is finite, and all of sigma finite and not negative: see cpu/kernel.h.
MULTISAMPLE_EXPORT int multisample_is_valid_cpu(const multisample::Launch* call) {
  return multisample::cpu::has_valid_inputs(*call);
}

// The last error on this thread; valid until the next call on it.
MULTISAMPLE_EXPORT const char* multisample_last_error() { return multisample::last_error.c_str(); }

// --- Builtin functions for Python: see torch/python_calls.h. Null if this process has no Python. ---

MULTISAMPLE_EXPORT PyObject* multisample_python_key(PyObject* tensor_type, PyObject* parameter_type, PyObject* int_type,
                                                    PyObject* float_type, PyObject* signature, PyObject* out_signature,
                                                    PyObject* is_negative, PyObject* state, PyObject* questions,
                                                    PyObject* flags) {
  using namespace multisample::python;
  return builtin<key>("key", [&] {
    return new KeyState{Object::shared(tensor_type),
                        Object::shared(parameter_type),
                        Object::shared(int_type),
                        Object::shared(float_type),
                        Object::shared(signature),
                        Object::shared(out_signature),
                        Object::shared(is_negative),
                        Object::shared(state),
                        Object::shared(questions),
                        Object::shared(flags),
                        Object(PyUnicode_InternFromString("_cdata")),
                        Object(PyUnicode_InternFromString("requires_grad"))};
  });
}

MULTISAMPLE_EXPORT PyObject* multisample_python_addresses(PyObject* tensor_type, PyObject* parameter_type, long place) {
  using namespace multisample::python;
  return builtin<addresses>("addresses", [&] {
    return new AddressesState{Object::shared(tensor_type), Object::shared(parameter_type),
                              Object(PyUnicode_InternFromString("_cdata")), place};
  });
}

MULTISAMPLE_EXPORT PyObject* multisample_python_tree() {
  using namespace multisample::python;
  return builtin<tree>("tree", [] {
    return new TreeState{Object(PyUnicode_InternFromString("_parameters")),
                         Object(PyUnicode_InternFromString("_modules"))};
  });
}

MULTISAMPLE_EXPORT PyObject* multisample_python_launch(const multisample::Launch* call, multisample::python::Run run,
                                                       PyObject* fail, PyObject* thread_limit) {
  using namespace multisample::python;
  return builtin<launch>(
      "launch", [&] { return new LaunchState{*call, run, Object::shared(fail), Object::shared(thread_limit)}; });
}

// The plan of a sample on a CPU checks values unless `checks` is 0. Only the plan of a gradient has the operand
// `matrix`. `functions` are those of `PlanFunction`.
MULTISAMPLE_EXPORT PyObject* multisample_python_plan(const multisample::Launch* call, multisample::python::Run run,
                                                     multisample::u64 mask, int has_list, int checks, PyObject* matrix,
                                                     PyObject* functions, PyObject* int_type) {
  using namespace multisample::python;
  return builtin<run_plan>("run", [&] {
    const bool is_gradient = call->operation == multisample::kGradient;
    const Run is_valid = is_gradient || call->device >= 0 || checks == 0 ? nullptr : multisample_is_valid_cpu;
    auto* const state = new PlanState{*call,
                                      run,
                                      is_valid,
                                      mask,
                                      has_list != 0,
                                      Signature{},
                                      Object::shared(functions),
                                      Object::shared(int_type),
                                      Object(PyUnicode_InternFromString("_cdata"))};
    if (is_gradient) {
      TensorOf tensor(matrix, state->address.get());
      read_properties(tensor.handle(), &state->matrix);
    }
    return state;
  });
}

MULTISAMPLE_EXPORT PyObject* multisample_python_is_valid(const multisample::Launch* call) {
  using namespace multisample::python;
  return builtin<is_valid>("is_valid",
                           [&] { return new LaunchState{*call, multisample_is_valid_cpu, Object(), Object()}; });
}

STABLE_TORCH_LIBRARY_IMPL(multisample, CPU, m) { multisample::implement<multisample::Cpu>(m); }
