// The functions of Python's stable ABI (PEP 384) that this folder calls. They are declared here, because a machine that
// compiles PyTorch extensions need not have Python's headers. One binary serves every version of Python.
//
// They are weak, so that the library also loads into a process that has no Python.
#pragma once

#define MULTISAMPLE_PYTHON extern "C" __attribute__((weak))

extern "C" {
struct PyObject;
struct PyThreadState;
using PyFastFunction = PyObject* (*)(PyObject* self, PyObject* const* args, long count);
struct PyMethodDef {
  const char* name;
  PyFastFunction function;
  int flags;
  const char* doc;
};
using PyCapsule_Destructor = void (*)(PyObject*);
}
constexpr int METH_FASTCALL = 0x80;
static_assert(sizeof(long) == sizeof(void*), "Py_ssize_t is a long");

MULTISAMPLE_PYTHON PyObject _Py_NoneStruct;
MULTISAMPLE_PYTHON void Py_IncRef(PyObject*);
MULTISAMPLE_PYTHON void Py_DecRef(PyObject*);
MULTISAMPLE_PYTHON int Py_EnterRecursiveCall(const char* where);
MULTISAMPLE_PYTHON void Py_LeaveRecursiveCall();
MULTISAMPLE_PYTHON PyObject* PyBool_FromLong(long);
MULTISAMPLE_PYTHON char* PyBytes_AsString(PyObject*);
MULTISAMPLE_PYTHON PyObject* PyBytes_FromStringAndSize(const char*, long);
MULTISAMPLE_PYTHON PyObject* PyCFunction_NewEx(PyMethodDef*, PyObject* self, PyObject* module);
MULTISAMPLE_PYTHON void* PyCapsule_GetPointer(PyObject*, const char* name);
MULTISAMPLE_PYTHON PyObject* PyCapsule_New(void*, const char* name, PyCapsule_Destructor);
MULTISAMPLE_PYTHON PyObject* PyDict_GetItemWithError(PyObject* dict, PyObject* key);
MULTISAMPLE_PYTHON int PyDict_Next(PyObject*, long* position, PyObject** key, PyObject** value);
MULTISAMPLE_PYTHON PyObject PyDict_Type;
MULTISAMPLE_PYTHON void PyErr_Clear();
MULTISAMPLE_PYTHON PyObject* PyErr_Occurred();
MULTISAMPLE_PYTHON void PyEval_RestoreThread(PyThreadState*);
MULTISAMPLE_PYTHON PyThreadState* PyEval_SaveThread();
MULTISAMPLE_PYTHON double PyFloat_AsDouble(PyObject*);
MULTISAMPLE_PYTHON PyObject PyFloat_Type;
MULTISAMPLE_PYTHON int PyList_Append(PyObject*, PyObject* item);
MULTISAMPLE_PYTHON PyObject* PyList_AsTuple(PyObject*);
MULTISAMPLE_PYTHON PyObject* PyList_New(long);
MULTISAMPLE_PYTHON PyObject* PyLong_FromLong(long);
MULTISAMPLE_PYTHON unsigned long PyLong_AsUnsignedLong(PyObject*);
MULTISAMPLE_PYTHON PyObject PyLong_Type;
MULTISAMPLE_PYTHON PyObject* PyObject_CallNoArgs(PyObject* callable);
MULTISAMPLE_PYTHON PyObject* PyObject_CallFunctionObjArgs(PyObject* callable, ...);
MULTISAMPLE_PYTHON PyObject* PyObject_GenericGetAttr(PyObject*, PyObject* name);
MULTISAMPLE_PYTHON PyObject* PyObject_GetAttr(PyObject*, PyObject* name);
MULTISAMPLE_PYTHON int PyObject_IsTrue(PyObject*);
MULTISAMPLE_PYTHON PyObject* PyObject_Type(PyObject*);
MULTISAMPLE_PYTHON PyObject* PySequence_GetItem(PyObject*, long);
MULTISAMPLE_PYTHON long PySequence_Size(PyObject*);
MULTISAMPLE_PYTHON PyObject* PyTuple_GetItem(PyObject*, long);
MULTISAMPLE_PYTHON PyObject* PyTuple_Pack(long, ...);
MULTISAMPLE_PYTHON int PyTuple_SetItem(PyObject*, long, PyObject*);
MULTISAMPLE_PYTHON PyObject* PyTuple_New(long);
MULTISAMPLE_PYTHON PyObject* PyUnicode_InternFromString(const char*);
