// The torch_ext backend on the CPU, as operators and as C functions. The kernels are the C functions of the cpu
// backend. Numba compiles them, and Python enters them into the table of torch/unit.h.
//
// It uses only PyTorch's stable ABI, so that one binary serves every version from its build version on.
#include "torch/inputs.h"
#include "torch/operators.h"
#include "torch/python_calls.h"

namespace multisample {
namespace {

// Returns 0, or 1 if there is no memory for sums.
using Kernel = i64(const Launch*);

// Runs a call on at most as many threads as PyTorch's.
i64 run(Kernel* kernel, Launch call) {
  const u64 threads = torch::stable::get_num_threads();
  call.threads = call.threads == 0 ? threads : min(call.threads, threads);
  // Bits must not depend on a stride that no element needs.
  if (call.operation == kGradient) call = with_regular_strides(call);
  return kernel(&call);
}

struct Cpu {
  static void run(const char* op, const Tensor& matrix, const Launch& call) {
    auto* const kernel = unit_function<Kernel>(
        call, "kernels for the CPU need Python: call multisample.torch.load_operators() in this process");
    check(multisample::run(kernel, call) == 0, op, "no memory for the sums; the matrix has ", matrix);
  }
};

// A request of a kernel for elements of an input, in the computing type.
struct Reading {
  Vector from;
  u64 count;
  void* to;
  u64 in_float64;
};

}  // namespace
}  // namespace multisample

// Enters the kernel for calls of a kind.
MULTISAMPLE_EXPORT void multisample_set_kernel_cpu(multisample::u32 kind, multisample::UnitFunction kernel) {
  multisample::units[kind] = kernel;
}

// Runs a call in host memory, whose kernel has been entered. Returns 0, or 1 if there is no memory for sums.
MULTISAMPLE_EXPORT int multisample_run_cpu(const multisample::Launch* call) {
  const auto kernel = multisample::units[multisample::kind_of(*call)].load();
  return static_cast<int>(multisample::run(reinterpret_cast<multisample::Kernel*>(kernel), *call));
}

// Kernels call this function for inputs of other types than the computing type.
MULTISAMPLE_EXPORT multisample::i64 multisample_read_cpu(const multisample::Reading* reading) {
  const auto read = [&](auto* to) { multisample::read(reading->from, 0, reading->count, to); };
  reading->in_float64 != 0 ? read(static_cast<double*>(reading->to)) : read(static_cast<float*>(reading->to));
  return 0;
}

// Whether all of mu and of weights is finite, and all of sigma finite and not negative: see torch/inputs.h.
MULTISAMPLE_EXPORT int multisample_is_valid_cpu(const multisample::Launch* call) {
  return multisample::has_valid_inputs(*call);
}

// --- Builtin functions for Python: see torch/python_calls.h. Null if this process has no Python. ---

MULTISAMPLE_EXPORT void multisample_python_set_place(long place) { multisample::python::place_of_address = place; }

MULTISAMPLE_EXPORT PyObject* multisample_python_key(PyObject* objects) {
  using namespace multisample::python;
  return builtin<key>("key", [&] { return new TorchObjects{Object(new_reference(objects))}; });
}

MULTISAMPLE_EXPORT PyObject* multisample_python_addresses(PyObject* objects) {
  using namespace multisample::python;
  return builtin<addresses>("addresses", [&] { return new TorchObjects{Object(new_reference(objects))}; });
}

MULTISAMPLE_EXPORT PyObject* multisample_python_tree() {
  using namespace multisample::python;
  return builtin<tree>("tree", [] { return new NoState; });
}

MULTISAMPLE_EXPORT PyObject* multisample_python_launch(const multisample::Launch* call, multisample::python::Run run,
                                                       PyObject* fail, PyObject* thread_limit) {
  using namespace multisample::python;
  return builtin<launch>("launch", [&] {
    return new LaunchState{*call, run, Object(new_reference(fail)), Object(new_reference(thread_limit))};
  });
}

// The plan of a sample on a CPU checks values unless `checks` is 0. Only the plan of a gradient has the operand
// `matrix`. `functions` are those of `PlanFunction`.
MULTISAMPLE_EXPORT PyObject* multisample_python_plan(const multisample::Launch* call, multisample::python::Run run,
                                                     multisample::u64 mask, int has_list, int checks, PyObject* matrix,
                                                     PyObject* functions) {
  using namespace multisample::python;
  return builtin<run_plan>("run", [&] {
    const bool is_gradient = call->operation == multisample::kGradient;
    const Run is_valid = is_gradient || call->device >= 0 || checks == 0 ? nullptr : multisample_is_valid_cpu;
    auto* const state =
        new PlanState{*call, run, is_valid, mask, has_list != 0, Signature{}, Object(new_reference(functions))};
    if (is_gradient) {
      TensorOf tensor(matrix);
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

// The schemas of the operators in C++, for both devices. That of perturb is in
// multisample/_routes/torch_compile_perturb.py.
STABLE_TORCH_LIBRARY(multisample, m) {
  // seed and offset are the bits of unsigned integers. The kernel reads counter, one element, in place of offset. With
  // keys, shape (B, 2), there is a matrix for each row of keys, a seed and an offset; seed, offset and counter are
  // ignored.
  // counter and keys are positional: with a keyword-only tensor, PyTorch registers neither derivatives nor batching
  // rules.
  m.def(
      "sample_(Tensor(a!) out, Tensor mu, Tensor sigma, Tensor? counter=None, *, SymInt seed, SymInt offset=0, "
      "SymInt dim_offset=0, SymInt sample_offset=0, bool shared=False, bool fast_math=False, bool antithetic=False) -> "
      "()");
  m.def(
      "sample(Tensor mu, Tensor sigma, SymInt n, Tensor? counter=None, Tensor? keys=None, *, SymInt seed, "
      "SymInt offset=0, SymInt dim_offset=0, SymInt sample_offset=0, ScalarType? dtype=None, bool shared=False, "
      "bool fast_math=False, bool antithetic=False, bool transposed=False) -> Tensor");
  m.def(
      "sample_backward(Tensor grad, Tensor? counter=None, Tensor? keys=None, *, SymInt seed, SymInt offset=0, "
      "SymInt dim_offset=0, SymInt sample_offset=0, bool shared=False, bool fast_math=False, bool antithetic=False, "
      "bool transposed=False) -> (Tensor grad_mu, Tensor grad_sigma)");
}

STABLE_TORCH_LIBRARY_IMPL(multisample, CPU, m) { multisample::implement<multisample::Cpu>(m); }
