"""The only entry from XLA's threads into Python, which closes when the interpreter exits.

A thread that wants the GIL while the interpreter finalizes never gets it: it hangs, or its exit unwinds C++ code and
aborts the process. So compiled code counts the threads that are inside. At exit, the interpreter closes the entry and
waits for them. If an exception hits a ctypes callback before its first line, the callback returns garbage. So the
callback reports through memory: it replaces `_UNFINISHED` with XLA's error, or with 0.
"""

import atexit
import ctypes
import os
import threading
import time

import llvmlite.binding
import numpy as np
from numba import types

from multisample.backends.kernels.compilation import inline, source_digest
from multisample.backends.kernels.cpu.addresses import c_string, call_c, numbers_at, symbol, word_at
from multisample.backends.kernels.cpu.intrinsics import compare_exchange, fetch_add, load_acquire, stack_array
from multisample.backends.system.sources import python_sources
from multisample.backends.system.xla_ffi import CALL_API_AT, ERROR_CREATE, INTERNAL, UNAVAILABLE, Target, handle

_SOURCES = python_sources("_routes", "jax")
# The entry: the number of threads inside, and the thread that closed it or 0.
_ENTERED, _CLOSER = 0, 1
_entry = np.zeros(2, np.int64)
_UNFINISHED = -1  # No address of an error.

_python = types.ExternalFunction("multisample_xla_python", types.void(*[types.int64] * 4))
_this_thread = types.ExternalFunction("PyThread_get_thread_ident", types.int64())


@inline
def enter_python(frame, target, launch):
    """Let Python handle a call frame of the target with this number; return XLA's error, or 0.

    `launch` is the address of the call's `Launch`, or 0 for calls that only ask for metadata or make an executable.
    """
    entry = numbers_at(symbol("multisample_xla_entry"), 2, np.int64)
    fetch_add(entry, _ENTERED, 1)
    closer = load_acquire(entry, _CLOSER)
    if closer != 0 and closer != _this_thread():
        _leave(entry)
        return _error(frame, UNAVAILABLE, c_string("multisample: Python is shutting down, and a call needs it"))
    report = stack_array(1, np.int64)
    report[0] = _UNFINISHED
    _python(frame, target, launch, report.ctypes.data)
    _leave(entry)
    error = load_acquire(report, 0)
    if error == _UNFINISHED:
        return _error(frame, INTERNAL, c_string("multisample: an exception, which Python printed, ended a call"))
    return error


@inline
def _leave(entry):
    """Count one thread less. In a child forked inside a callback, `reopen` has set the count to 0."""
    entered = load_acquire(entry, _ENTERED)
    while entered > 0 and not compare_exchange(entry, _ENTERED, entered, entered - 1):
        entered = load_acquire(entry, _ENTERED)


@inline
def _error(frame, code, message):
    request = stack_array(4, np.int64)  # XLA_FFI_Error_Create_Args
    request[0], request[1], request[2], request[3] = 28, 0, message, code
    return call_c(word_at(word_at(frame + CALL_API_AT) + ERROR_CREATE), request.ctypes.data)


# --- Python's side --------------------------------------------------------------------------------

targets: dict[int, Target] = {}
"""Targets by number: see `enter_python`."""


def _call(frame: int, target: int, launch: int, report: int) -> None:
    ctypes.c_int64.from_address(report).value = handle(frame, launch, targets[target])


_callback = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(_call)
# XLA may call when the module's variables are gone.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_callback))
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_entry))
llvmlite.binding.add_symbol("multisample_xla_entry", _entry.ctypes.data)
llvmlite.binding.add_symbol("multisample_xla_python", ctypes.cast(_callback, ctypes.c_void_p).value or 0)


def digest() -> str:
    """The digest of the sources that compiled handlers are made from."""
    return source_digest() + _SOURCES.digest()


def close() -> None:
    """Close the entry to all threads but this one, and wait until all threads have left."""
    _entry[_CLOSER] = threading.get_ident()
    # A thread adds 1 before it reads `_CLOSER`, so each thread that read 0 is counted. After this wait, none reads 0.
    time.sleep(1e-3)
    while _entry[_ENTERED]:
        time.sleep(1e-3)


def reopen() -> None:
    """Reset the entry in a forked child, which lacks the threads that entered or closed it."""
    _entry[:] = 0


atexit.register(close)
os.register_at_fork(after_in_child=reopen)
