// The hot parts of a Python call as builtin functions: the key of a plan, a launch, and the run of a plan on the CPU.
// Each has a twin in Python (multisample/_sample.py, backends/torch_ext, multisample/_plan.py) that works without this
// file.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "cuda/geometry.h"
#include "launch.h"
#include "torch/python_abi.h"

namespace multisample::python {

struct Release {
  void operator()(PyObject* object) const { Py_DecRef(object); }
};
// Owns a reference, or is null.
using Object = std::unique_ptr<PyObject, Release>;

inline PyObject* new_reference(PyObject* object) {
  Py_IncRef(object);
  return object;
}

// A builtin function whose `self` is a capsule that owns `make_state()`. Null if this process has no Python.
template <PyFastFunction function, class MakeState>
PyObject* builtin(const char* name, const MakeState& make_state) {
  static PyMethodDef method{name, function, METH_FASTCALL, nullptr};
  if (&PyCFunction_NewEx == nullptr) return nullptr;
  auto* const state = make_state();
  using State = std::remove_pointer_t<decltype(make_state())>;
  const Object capsule(PyCapsule_New(
      state, nullptr, [](PyObject* self) { delete static_cast<State*>(PyCapsule_GetPointer(self, nullptr)); }));
  if (capsule.get() == nullptr) {
    delete state;
    return nullptr;
  }
  return PyCFunction_NewEx(&method, capsule.get(), nullptr);
}

struct NoState {};

template <class State>
State& state_of(PyObject* self) {
  return *static_cast<State*>(PyCapsule_GetPointer(self, nullptr));
}

// Where Python's tensors hold the address of their implementation, as the attribute `_cdata` returns it: reading that
// takes 0.1 us. `_place_of_address` in backends/torch_ext/builtins.py finds the place.
inline long place_of_address = 0;

// A tensor of Python. A handle is the address of an at::Tensor, which is one pointer to the implementation.
class TensorOf {
 public:
  explicit TensorOf(PyObject* tensor) {
    std::memcpy(&implementation_, reinterpret_cast<const char*>(tensor) + place_of_address, sizeof(implementation_));
  }
  AtenTensorHandle handle() { return reinterpret_cast<AtenTensorHandle>(&implementation_); }
  // Null if the tensor has no memory.
  void* data() {
    void* data = nullptr;
    return implementation_ != 0 && aoti_torch_get_data_ptr(handle(), &data) == 0 ? data : nullptr;
  }

 private:
  unsigned long implementation_ = 0;
};

// --- Keys -------------------------------------------------------------------------------------------------------

// The properties of mu or sigma in a plan's key, besides the Python type. The shape is (d,), or (B, d) in a batch. In
// the key of a gradient, the signature is that of its matrix, and the flags are 0.
struct Signature {
  i64 dim, sizes[2], strides[2];
  i32 dtype, device_type, device_index;
  u32 requires_grad, is_negative;
  u32 unused;

  bool operator==(const Signature& other) const { return std::memcmp(this, &other, sizeof other) == 0; }
};

// Reads all but the flags. Returns false if the tensor is not strided or has more than two axes.
inline bool read_properties(AtenTensorHandle handle, Signature* signature) {
  int32_t layout = -1;
  int64_t dim = 0, *sizes = nullptr, *strides = nullptr;
  if (aoti_torch_get_layout(handle, &layout) != 0 || layout != aoti_torch_layout_strided() ||
      aoti_torch_get_dim(handle, &dim) != 0 || dim > 2 || aoti_torch_get_sizes(handle, &sizes) != 0 ||
      aoti_torch_get_strides(handle, &strides) != 0) {
    return false;
  }
  signature->dim = dim;
  for (int64_t axis = 0; axis < dim; ++axis) {
    signature->sizes[axis] = sizes[axis];
    signature->strides[axis] = strides[axis];
  }
  return aoti_torch_get_dtype(handle, &signature->dtype) == 0 &&
         aoti_torch_get_device_type(handle, &signature->device_type) == 0 &&
         aoti_torch_get_device_index(handle, &signature->device_index) == 0;
}

struct TorchObjects {
  Object objects;  // a tuple of the objects below
  PyObject* const tensor_type = item(0);
  PyObject* const parameter_type = item(1);
  PyObject* const signature = item(2);      // Python function for the signature of any tensor
  PyObject* const out_signature = item(3);  // Python function for the signature of `out`
  PyObject* const is_negative = item(4);    // torch.Tensor.is_neg
  PyObject* const state = item(5);          // Python function for the state of PyTorch
  PyObject* const questions = item(6);      // functions that return false values in the usual state
  PyObject* const flags = item(7);          // triples: the dict of a module, the name of a variable, its usual value

  PyObject* item(long k) const { return PyTuple_GetItem(objects.get(), k); }
};

// The state of PyTorch that a plan depends on, or null with a Python error. In the usual state it is the grad mode.
inline PyObject* current_state(const TorchObjects& state) {
  bool is_usual = true;
  for (long k = 0, count = PySequence_Size(state.questions); is_usual && k < count; ++k) {
    const Object answer(PyObject_CallNoArgs(PyTuple_GetItem(state.questions, k)));
    if (answer.get() == nullptr) return nullptr;
    is_usual = PyObject_IsTrue(answer.get()) == 0;
  }
  for (long k = 0, count = PySequence_Size(state.flags); is_usual && k < count; ++k) {
    PyObject* const flag = PyTuple_GetItem(state.flags, k);
    is_usual = PyDict_GetItemWithError(PyTuple_GetItem(flag, 0), PyTuple_GetItem(flag, 1)) == PyTuple_GetItem(flag, 2);
  }
  if (is_usual) return PyBool_FromLong(aoti_torch_grad_mode_is_enabled());
  return PyObject_CallNoArgs(state.state);
}

// Returns false if it cannot read the signature. Then a Python error is set, or the caller asks the Python function.
inline bool read_signature(const TorchObjects& state, PyObject* tensor, Signature* signature) {
  TensorOf read(tensor);
  if (!read_properties(read.handle(), signature)) return false;
  static PyObject* const name = PyUnicode_InternFromString("requires_grad");
  const Object requires_grad(PyObject_GetAttr(tensor, name));
  const Object is_negative(PyObject_CallFunctionObjArgs(state.is_negative, tensor, nullptr));
  if (requires_grad.get() == nullptr || is_negative.get() == nullptr) return false;
  signature->requires_grad = PyObject_IsTrue(requires_grad.get()) == 1;
  signature->is_negative = PyObject_IsTrue(is_negative.get()) == 1;
  return true;
}

inline PyObject* signature_of(const TorchObjects& state, PyObject* x, PyObject* type) {
  if (type == &PyLong_Type || type == &PyFloat_Type) return new_reference(&_Py_NoneStruct);
  if (type == state.tensor_type || type == state.parameter_type) {
    Signature signature{};
    if (read_signature(state, x, &signature)) {
      return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(&signature), sizeof(signature));
    }
    if (PyErr_Occurred() != nullptr) return nullptr;
  }
  return PyObject_CallFunctionObjArgs(state.signature, x, nullptr);
}

// key(mu, sigma, out, seed, generator, dim_offset, sample_offset, *options): a tuple of the signatures of mu, sigma and
// out, the types of all arguments, the values of the options, the signature of a seed that is a tensor, and the state
// of PyTorch. None if the state is None. key() is the state.
inline PyObject* key(PyObject* self, PyObject* const* args, long count) {
  constexpr long kTyped = 7, kSeed = 3;
  const TorchObjects& state = state_of<TorchObjects>(self);
  Object current(current_state(state));
  if (count == 0 || current.get() == nullptr || current.get() == &_Py_NoneStruct) return current.release();
  const Object seed_type(PyObject_Type(args[kSeed]));
  const bool has_tensor = seed_type.get() == state.tensor_type;
  const long last = 3 + kTyped + 2 * (count - kTyped) + has_tensor;
  Object result(PyTuple_New(last + 1));
  if (result.get() == nullptr) return nullptr;
  PyTuple_SetItem(result.get(), last, current.release());
  for (long k = 0; k < count; ++k) {
    PyObject* const type = PyObject_Type(args[k]);
    PyTuple_SetItem(result.get(), 3 + k, type);
    if (k < 2 || (k == kSeed && has_tensor)) {
      PyObject* const signature = signature_of(state, args[k], type);
      if (signature == nullptr) return nullptr;
      PyTuple_SetItem(result.get(), k < 2 ? k : last - 1, signature);
    }
    if (k >= kTyped) PyTuple_SetItem(result.get(), 3 + count + k - kTyped, new_reference(args[k]));
  }
  PyObject* const out = args[2];
  PyObject* const target =
      out == &_Py_NoneStruct ? new_reference(out) : PyObject_CallFunctionObjArgs(state.out_signature, out, nullptr);
  if (target == nullptr) return nullptr;
  PyTuple_SetItem(result.get(), 2, target);
  return result.release();
}

// --- Sequences of tensors ---------------------------------------------------------------------------------------

// addresses(tensors): the data pointers of the tensors, packed as bytes; None if a tensor is of another subclass than
// Parameter, or nested.
inline PyObject* addresses(PyObject* self, PyObject* const* args, long) {
  const TorchObjects& state = state_of<TorchObjects>(self);
  const long count = PySequence_Size(args[0]);
  std::vector<void*> found(static_cast<size_t>(count < 0 ? 0 : count));
  for (long k = 0; k < count; ++k) {
    const Object tensor(PySequence_GetItem(args[0], k));
    if (tensor.get() == nullptr) return nullptr;
    const Object type(PyObject_Type(tensor.get()));
    if (type.get() != state.tensor_type && type.get() != state.parameter_type) {
      return new_reference(&_Py_NoneStruct);
    }
    TensorOf read(tensor.get());
    int64_t* sizes = nullptr;
    if (aoti_torch_get_sizes(read.handle(), &sizes) != 0) return new_reference(&_Py_NoneStruct);
    found[static_cast<size_t>(k)] = read.data();
  }
  if (PyErr_Occurred() != nullptr) return nullptr;
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(found.data()),
                                   static_cast<long>(found.size() * sizeof(void*)));
}

// --- Modules ----------------------------------------------------------------------------------------------------

// What `add_tree` has found so far.
struct Tree {
  Object items, tensors;  // lists
  bool is_common = true;  // whether all containers are plain dicts

  bool add_item(PyObject* item) const { return PyList_Append(items.get(), item) == 0; }
};

// Calls add(name, value) for all entries of a container but those that are None, then adds None to the tree. Returns
// false with a Python error, or if the container is no plain dict.
template <class Add>
bool add_entries(PyObject* owner, PyObject* container_name, Tree* tree, const Add& add) {
  // The containers are in the module's __dict__, where PyObject_GetAttr would call the class's __getattr__ machinery.
  const Object container(PyObject_GenericGetAttr(owner, container_name));
  if (container.get() == nullptr) return false;
  tree->is_common = Object(PyObject_Type(container.get())).get() == &PyDict_Type;
  PyObject *key = nullptr, *entry = nullptr;
  for (long position = 0; tree->is_common && PyDict_Next(container.get(), &position, &key, &entry) != 0;) {
    const Object name(new_reference(key)), value(new_reference(entry));
    if (value.get() != &_Py_NoneStruct && !(tree->add_item(name.get()) && add(value.get()))) return false;
  }
  return tree->is_common && tree->add_item(&_Py_NoneStruct);
}

// Adds a module and its descendants, in the order of Module.named_parameters.
inline bool add_tree(PyObject* module, Tree* tree) {
  static PyObject* const parameters = PyUnicode_InternFromString("_parameters");
  static PyObject* const modules = PyUnicode_InternFromString("_modules");
  if (Py_EnterRecursiveCall(" in a module") != 0) return false;  // A module may contain itself.
  const bool is_added =
      tree->add_item(Object(PyObject_Type(module)).get()) &&
      add_entries(module, parameters, tree, [&](PyObject* x) { return PyList_Append(tree->tensors.get(), x) == 0; }) &&
      add_entries(module, modules, tree, [&](PyObject* child) { return add_tree(child, tree); });
  Py_LeaveRecursiveCall();
  return is_added;
}

// tree(module): `tree_of` of multisample/_libraries/torch.py; None if a module has other containers than plain dicts.
inline PyObject* tree(PyObject*, PyObject* const* args, long) {
  Tree found{Object(PyList_New(0)), Object(PyList_New(0))};
  if (found.items.get() == nullptr || found.tensors.get() == nullptr) return nullptr;
  if (!add_tree(args[0], &found)) {
    return PyErr_Occurred() != nullptr ? nullptr : new_reference(&_Py_NoneStruct);
  }
  const Object items(PyList_AsTuple(found.items.get()));
  return items.get() == nullptr ? nullptr : PyTuple_Pack(2, items.get(), found.tensors.get());
}

// --- Launches ---------------------------------------------------------------------------------------------------

// Runs or checks a launch.
using Run = int (*)(const Launch*);

struct LaunchState {
  Launch call;
  Run run;
  Object fail;          // raises the exception for an error of `run`
  Object thread_limit;  // called if the launch is on the CPU
};

inline void* pointer(PyObject* address) { return reinterpret_cast<void*>(PyLong_AsUnsignedLong(address)); }

inline Input input(PyObject* value, u32 type) {
  Input result;
  if (type == kNumber) {
    result.number = PyFloat_AsDouble(value);
  } else {
    result.data = pointer(value);
  }
  return result;
}

// Sets the inputs that the operation reads.
inline void set_inputs(Launch* call, PyObject* mu, PyObject* sigma, PyObject* weights) {
  if (call->operation == kSample || call->operation == kMoments) {
    call->mu = input(mu, call->mu_type);
    call->sigma = input(sigma, call->sigma_type);
  }
  if (call->operation == kMoments || call->operation == kPerturb) call->weights = input(weights, call->weights_type);
}

// Calls function(call) without the GIL.
inline int without_lock(Run function, const Launch& call) {
  PyThreadState* const thread = PyEval_SaveThread();
  const int result = function(&call);
  PyEval_RestoreThread(thread);
  return result;
}

// Sets the most threads of a call on the CPU, by the Python function `limit`. Returns false with a Python error.
inline bool set_threads(Launch* call, PyObject* limit) {
  if (call->device >= 0) return true;
  const Object most(PyObject_CallFunctionObjArgs(limit, nullptr));
  if (most.get() != nullptr) call->threads = PyLong_AsUnsignedLong(most.get());
  return most.get() != nullptr;
}

// launch(geometry, mu, sigma, weights, matrix, first, second, seed, offset, seed_at, offset_at, first_row,
// first_column, stream, scratch): Launcher.run of backends/contract.py
inline PyObject* launch(PyObject* self, PyObject* const* args, long) {
  const LaunchState& state = state_of<LaunchState>(self);
  Launch call = state.call;
  set_inputs(&call, args[1], args[2], args[3]);
  if (call.operation == kPerturb) {
    call.matrix = PyBytes_AsString(args[4]);
  } else if (call.operation != kMoments) {
    call.matrix = pointer(args[4]);
  }
  if (call.operation == kMoments || call.operation == kGradient) {
    call.first = pointer(args[5]);
    call.second = pointer(args[6]);
  }
  call.scratch = static_cast<double*>(pointer(args[14]));
  call.seed = PyLong_AsUnsignedLong(args[7]);
  call.offset = PyLong_AsUnsignedLong(args[8]);
  call.seed_at = static_cast<const u64*>(pointer(args[9]));
  call.offset_at = static_cast<const u64*>(pointer(args[10]));
  call.first_row = PyLong_AsUnsignedLong(args[11]);
  call.first_column = PyLong_AsUnsignedLong(args[12]);
  call.stream = pointer(args[13]);
  if (PyErr_Occurred() != nullptr) return nullptr;
  if (!set_threads(&call, state.thread_limit.get())) return nullptr;
  const int error = without_lock(state.run, call);
  if (error == 0) return new_reference(&_Py_NoneStruct);
  const Object number(PyLong_FromLong(error));
  return PyObject_CallFunctionObjArgs(state.fail.get(), number.get(), nullptr);
}

// --- Plans ------------------------------------------------------------------------------------------------------

// Python functions of a plan, each possibly None: see `compiled_plan` in backends/torch_ext.
enum PlanFunction : long {
  kAllocate,        // allocate(like): a new result
  kTake,            // take(generator): seed and offset
  kCheckGenerator,  // check(generator)
  kRunInPython,     // Plan.run
  kStream,          // stream(like): the current stream of the device
  kIsCapturing,     // is_capturing(stream)
  kScratch,         // scratch(sample_offset): scratch memory, or None
  kFail,            // as in LaunchState
  kThreadLimit,     // as in LaunchState
};

struct PlanState {
  Launch call;
  Run run, is_valid;  // `is_valid` is null if values are not checked
  u64 mask;           // the bits that are 0 in the address of a vector
  bool has_list;      // whether the seed is in a list
  Signature matrix;   // of a gradient's operand
  Object functions;   // a tuple

  // Null for None.
  PyObject* function(PlanFunction which) const {
    PyObject* const found = PyTuple_GetItem(functions.get(), which);
    return found == &_Py_NoneStruct ? nullptr : found;
  }
  // The result of the function for `argument`; None without a function, and null with a Python error.
  PyObject* call_function(PlanFunction which, PyObject* argument) const {
    PyObject* const found = function(which);
    if (found == nullptr) return new_reference(&_Py_NoneStruct);
    return PyObject_CallFunctionObjArgs(found, argument, nullptr);
  }
};

// Reads an integer of at most `most`. Returns false, without a Python error, for anything else.
inline bool read_word(PyObject* integer, u64 most, u64* word) {
  *word = PyLong_AsUnsignedLong(integer);
  if (*word == ~u64{0} && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    return false;
  }
  return *word <= most;
}

// Sets the operands, the window, a given seed and, for a gradient, the offset. Returns false, possibly with a Python
// error, if the call is not of the common kind.
inline bool read_operands(const PlanState& state, PyObject* const* args, Launch* call) {
  PyObject *const matrix = args[3], *const seed = args[4];
  // Reading `rows` from the copy in `call` would wait for its stores, 0.1 us.
  if (!read_word(args[6], kMaxRows - state.call.rows, &call->first_row)) return false;
  if (!read_word(args[7], kMaxColumns - state.call.columns, &call->first_column)) return false;
  if (call->operation == kGradient) {
    TensorOf tensor(matrix);
    Signature signature{};
    if (!read_properties(tensor.handle(), &signature)) return false;
    if (!(signature == state.matrix) || PyTuple_GetItem(seed, 2) != &_Py_NoneStruct) return false;
    call->matrix = tensor.data();
    return call->matrix != nullptr && read_word(PyTuple_GetItem(seed, 0), ~u64{0}, &call->seed) &&
           read_word(PyTuple_GetItem(seed, 1), ~u64{0}, &call->offset);
  }
  if (matrix != &_Py_NoneStruct) return false;
  if (call->batch > 0) {  // A tensor of seeds on the device.
    call->seed_at = static_cast<const u64*>(TensorOf(seed).data());
    if (call->seed_at == nullptr) return false;
  } else if (seed != &_Py_NoneStruct) {
    const Object word(state.has_list ? PySequence_GetItem(seed, 0) : new_reference(seed));
    if (word.get() == nullptr) return false;
    const Object type(PyObject_Type(word.get()));
    if (type.get() != &PyLong_Type || !read_word(word.get(), ~u64{0}, &call->seed)) return false;
  }
  call->mu.data = TensorOf(args[0]).data();
  call->sigma.data = TensorOf(args[1]).data();
  return call->mu.data != nullptr && call->sigma.data != nullptr &&
         ((reinterpret_cast<u64>(call->mu.data) | reinterpret_cast<u64>(call->sigma.data)) & state.mask) == 0;
}

// Sets the stream, if the plan has one. Returns false, possibly with a Python error, if a graph captures the stream and
// the seed is from a generator or a list: replays need it in device memory.
inline bool read_stream(const PlanState& state, bool takes, Launch* call) {
  if (state.function(kStream) == nullptr) return true;
  const Object stream(state.call_function(kStream, &_Py_NoneStruct));
  if (stream.get() == nullptr) return false;
  call->stream = pointer(stream.get());
  if (!takes && !state.has_list) return PyErr_Occurred() == nullptr;
  const Object captures(state.call_function(kIsCapturing, stream.get()));
  return captures.get() != nullptr && PyObject_IsTrue(captures.get()) == 0;
}

// Takes seed and offset from the generator. Returns a tuple of them, or null with a Python error.
inline PyObject* take_words(const PlanState& state, PyObject* generator, Launch* call) {
  Object taken(state.call_function(kTake, generator));
  if (taken.get() == nullptr) return nullptr;
  call->seed = PyLong_AsUnsignedLong(PyTuple_GetItem(taken.get(), 0));
  call->offset = PyLong_AsUnsignedLong(PyTuple_GetItem(taken.get(), 1));
  return PyErr_Occurred() == nullptr ? taken.release() : nullptr;
}

// Allocates a result and stores its address. Returns null with a Python error.
inline PyObject* allocate_result(const PlanState& state, void** at) {
  Object result(state.call_function(kAllocate, &_Py_NoneStruct));
  if (result.get() == nullptr) return nullptr;
  *at = TensorOf(result.get()).data();
  return result.release();
}

// Whether the kernel of a sample on CUDA can store noise. The matrix may not be allocated yet.
inline bool keeps_noise_on_cuda(const Launch& call) {
  const i64 skip = call.first_column % (call.antithetic ? kAntitheticWidth : kWidth);
  return call.results != 0 && has_few_columns(call, skip, element_size(call.type));
}

// run(mu, sigma, weights, matrix, seed, generator, dim_offset, sample_offset): Plan.run of multisample/_plan.py, for
// new samples, batches with seeds on the device, and gradients. All other calls, as with a Key or bad values, go to
// Plan.run; if that is None, they return None.
inline PyObject* run_plan(PyObject* self, PyObject* const* args, long) {
  const PlanState& state = state_of<PlanState>(self);
  Launch call = state.call;
  const bool is_gradient = call.operation == kGradient, takes = args[4] == &_Py_NoneStruct;
  const bool is_common = read_operands(state, args, &call) && read_stream(state, takes, &call) &&
                         (state.is_valid == nullptr || without_lock(state.is_valid, call) != 0);
  if (!is_common) {
    if (PyErr_Occurred() != nullptr) return nullptr;
    PyObject* const run_in_python = state.function(kRunInPython);
    if (run_in_python == nullptr) return new_reference(&_Py_NoneStruct);
    return PyObject_CallFunctionObjArgs(run_in_python, args[0], args[1], args[2], args[3], args[4], args[5], args[6],
                                        args[7], nullptr);
  }
  if (takes && Object(state.call_function(kCheckGenerator, args[5])).get() == nullptr) return nullptr;
  const Object result(is_gradient ? PyTuple_New(call.results) : allocate_result(state, &call.matrix));
  if (result.get() == nullptr) return nullptr;
  if (!is_gradient && call.device >= 0 && !keeps_noise_on_cuda(call)) call.results = 0;
  const bool keeps_noise = !is_gradient && call.results != 0;
  const Object noise(keeps_noise ? allocate_result(state, &call.first) : nullptr);
  if (keeps_noise && noise.get() == nullptr) return nullptr;
  for (u32 k = 0; is_gradient && k < call.results; ++k) {
    PyObject* const sums = allocate_result(state, k == 0 ? &call.first : &call.second);
    if (sums == nullptr) return nullptr;
    PyTuple_SetItem(result.get(), k, sums);
  }
  const Object scratch(state.call_function(kScratch, args[7]));
  if (scratch.get() == nullptr) return nullptr;
  if (scratch.get() != &_Py_NoneStruct) call.scratch = static_cast<double*>(TensorOf(scratch.get()).data());
  if (!set_threads(&call, state.function(kThreadLimit))) return nullptr;
  const Object taken(takes ? take_words(state, args[5], &call) : nullptr);
  if (takes && taken.get() == nullptr) return nullptr;
  const int error = without_lock(state.run, call);
  if (error != 0) {
    const Object number(PyLong_FromLong(error));
    return state.call_function(kFail, number.get());
  }
  const Object zero(PyLong_FromLong(0));
  PyObject* const words = is_gradient ? args[4] : taken.get();
  PyObject* const seed = words == nullptr ? args[4] : PyTuple_GetItem(words, 0);
  PyObject* const offset = words == nullptr ? zero.get() : PyTuple_GetItem(words, 1);
  return PyTuple_Pack(keeps_noise ? 5 : 4, result.get(), seed, offset, &_Py_NoneStruct, noise.get());
}

// is_valid(mu, sigma, weights)
inline PyObject* is_valid(PyObject* self, PyObject* const* args, long) {
  const LaunchState& state = state_of<LaunchState>(self);
  Launch call = state.call;
  set_inputs(&call, args[0], args[1], args[2]);
  if (PyErr_Occurred() != nullptr) return nullptr;
  return PyBool_FromLong(without_lock(state.run, call));
}

}  // namespace multisample::python
