// The hot parts of a Python call as builtin functions: the key of a plan, and a launch. Each has a twin in Python
// (multisample/_sample.py, backends/torch_ext) that works without this file.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "launch.h"
#include "torch/python_abi.h"

namespace multisample::python {

// Owns a reference.
class Object {
 public:
  explicit Object(PyObject* object = nullptr) : object_(object) {}
  Object(const Object&) = delete;
  ~Object() {
    if (object_ != nullptr) Py_DecRef(object_);
  }
  static PyObject* new_reference(PyObject* object) {
    Py_IncRef(object);
    return object;
  }
  PyObject* get() const { return object_; }
  PyObject* release() {
    PyObject* object = object_;
    object_ = nullptr;
    return object;
  }

 private:
  PyObject* object_;
};

// A builtin function. Its `self` is a capsule that owns `state`.
template <class State>
PyObject* bound(PyMethodDef* method, State* state) {
  const Object capsule(PyCapsule_New(
      state, nullptr, [](PyObject* self) { delete static_cast<State*>(PyCapsule_GetPointer(self, nullptr)); }));
  if (capsule.get() == nullptr) {
    delete state;
    return nullptr;
  }
  return PyCFunction_NewEx(method, capsule.get(), nullptr);
}

template <class State>
State& state_of(PyObject* self) {
  return *static_cast<State*>(PyCapsule_GetPointer(self, nullptr));
}

// --- Keys -------------------------------------------------------------------------------------------------------

// The properties of a vector, other than its Python type, that a plan depends on.
struct Signature {
  i64 size, stride;
  i32 dtype, device_type, device_index;
  u32 requires_grad, is_negative;
  u32 unused;
};

struct KeyState {
  Object tensor_type, parameter_type, int_type, float_type;
  Object signature;               // Python function for the signature of any tensor
  Object out_signature;           // Python function for the signature of `out`
  Object is_negative;             // torch.Tensor.is_neg
  Object address, requires_grad;  // names of attributes
};

// Returns false with a Python error set, or without one if the Python function must read the signature.
inline bool read_signature(const KeyState& state, PyObject* tensor, Signature* signature) {
  const Object address(PyObject_GetAttr(tensor, state.address.get()));
  if (address.get() == nullptr) return false;
  // A handle is the address of an at::Tensor, which is one pointer to the implementation.
  unsigned long implementation = PyLong_AsUnsignedLong(address.get());
  const auto handle = reinterpret_cast<AtenTensorHandle>(&implementation);
  int64_t dim = 0, *sizes = nullptr, *strides = nullptr;
  int32_t layout = -1;
  if (aoti_torch_get_layout(handle, &layout) != 0 || layout != aoti_torch_layout_strided() ||
      aoti_torch_get_dim(handle, &dim) != 0 || dim != 1 || aoti_torch_get_sizes(handle, &sizes) != 0 ||
      aoti_torch_get_strides(handle, &strides) != 0) {
    return false;
  }
  aoti_torch_get_dtype(handle, &signature->dtype);
  aoti_torch_get_device_type(handle, &signature->device_type);
  aoti_torch_get_device_index(handle, &signature->device_index);
  signature->size = sizes[0];
  signature->stride = strides[0];
  const Object requires_grad(PyObject_GetAttr(tensor, state.requires_grad.get()));
  const Object is_negative(PyObject_CallFunctionObjArgs(state.is_negative.get(), tensor, nullptr));
  if (requires_grad.get() == nullptr || is_negative.get() == nullptr) return false;
  signature->requires_grad = PyObject_IsTrue(requires_grad.get()) == 1;
  signature->is_negative = PyObject_IsTrue(is_negative.get()) == 1;
  return true;
}

inline PyObject* signature_of(const KeyState& state, PyObject* x, PyObject* type) {
  if (type == state.int_type.get() || type == state.float_type.get()) return Object::new_reference(&_Py_NoneStruct);
  if (type == state.tensor_type.get() || type == state.parameter_type.get()) {
    Signature signature{};
    if (read_signature(state, x, &signature)) {
      return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(&signature), sizeof(signature));
    }
    if (PyErr_Occurred() != nullptr) return nullptr;
  }
  return PyObject_CallFunctionObjArgs(state.signature.get(), x, nullptr);
}

// key(mu, sigma, out, seed, generator, dim_offset, sample_offset, *options): a tuple of the signatures of mu, sigma and
// out, the types of all arguments, and the values of the options.
inline PyObject* key(PyObject* self, PyObject* const* args, long count) {
  constexpr long kTyped = 7;
  const KeyState& state = state_of<KeyState>(self);
  Object result(PyTuple_New(3 + kTyped + 2 * (count - kTyped)));
  if (result.get() == nullptr) return nullptr;
  for (long k = 0; k < count; ++k) {
    PyObject* const type = PyObject_Type(args[k]);
    PyTuple_SetItem(result.get(), 3 + k, type);
    if (k < 2) {
      PyObject* const signature = signature_of(state, args[k], type);
      if (signature == nullptr) return nullptr;
      PyTuple_SetItem(result.get(), k, signature);
    }
    if (k >= kTyped) PyTuple_SetItem(result.get(), 3 + count + k - kTyped, Object::new_reference(args[k]));
  }
  PyObject* const out = args[2];
  PyObject* const target = out == &_Py_NoneStruct
                               ? Object::new_reference(out)
                               : PyObject_CallFunctionObjArgs(state.out_signature.get(), out, nullptr);
  if (target == nullptr) return nullptr;
  PyTuple_SetItem(result.get(), 2, target);
  return result.release();
}

// --- Launches ---------------------------------------------------------------------------------------------------

struct LaunchState {
  Launch call;
  int (*run)(const Launch*);  // runs or checks a launch
  Object fail;                // raises the exception for an error of `run`
  Object thread_limit;        // called if the launch is on the CPU
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
  if (call->operation == kGradient) return;
  call->mu = input(mu, call->mu_type);
  call->sigma = input(sigma, call->sigma_type);
  if (call->operation == kMoments) call->weights = input(weights, call->weights_type);
}

// Calls function(call) without the GIL.
inline int without_lock(int (*function)(const Launch*), const Launch& call) {
  PyThreadState* const thread = PyEval_SaveThread();
  const int result = function(&call);
  PyEval_RestoreThread(thread);
  return result;
}

// launch(geometry, mu, sigma, weights, matrix, first, second, seed, offset, seed_at, offset_at, first_row,
// first_column,
//        stream, scratch): Launcher.run of backends/contract.py
inline PyObject* launch(PyObject* self, PyObject* const* args, long) {
  const LaunchState& state = state_of<LaunchState>(self);
  Launch call = state.call;
  set_inputs(&call, args[1], args[2], args[3]);
  if (call.operation != kMoments) call.matrix = pointer(args[4]);
  if (call.operation != kSample) {
    call.first = pointer(args[5]);
    call.second = pointer(args[6]);
    call.scratch = static_cast<double*>(pointer(args[14]));
  }
  call.seed = PyLong_AsUnsignedLong(args[7]);
  call.offset = PyLong_AsUnsignedLong(args[8]);
  call.seed_at = static_cast<const u64*>(pointer(args[9]));
  call.offset_at = static_cast<const u64*>(pointer(args[10]));
  call.first_row = PyLong_AsUnsignedLong(args[11]);
  call.first_column = PyLong_AsUnsignedLong(args[12]);
  call.stream = pointer(args[13]);
  if (PyErr_Occurred() != nullptr) return nullptr;
  if (call.device < 0) {
    const Object limit(PyObject_CallFunctionObjArgs(state.thread_limit.get(), nullptr));
    if (limit.get() == nullptr) return nullptr;
    call.threads = PyLong_AsUnsignedLong(limit.get());
  }
  const int error = without_lock(state.run, call);
  if (error == 0) return Object::new_reference(&_Py_NoneStruct);
  const Object number(PyLong_FromLong(error));
  return PyObject_CallFunctionObjArgs(state.fail.get(), number.get(), nullptr);
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
