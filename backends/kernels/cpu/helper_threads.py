"""Threads that help kernels. They wait in compiled code.

A helper that waited in Python would need the GIL to continue. With 15 helpers, these waits took longer than drawing a
(1000, 10000) matrix.

Each helper has a record and sleeps on a lock of its own. The record is free, busy, or has the address of a call that
wants the helper. A call takes free records and wakes their helpers. When no work is left, it takes back the records of
helpers that have not begun. So a call never waits for an unscheduled helper, nor, after a fork by C code, for a helper
of the parent.

Calls also start the helpers that they lack, in compiled code. No exception or signal handler can interrupt that, a
start needs no lock, the stack has the size that kernels need, and a monkey patch of `threading` changes nothing.
"""

import ctypes
import functools
import os
import signal
import sys
from typing import Any

import llvmlite.binding
import numpy as np
from numba import types

from multisample.backends.kernels.compilation import callee, inline, source_digest
from multisample.backends.system.threads import STACK_SIZE, configured_threads

from .addresses import c_address, c_function, call_c, numbers_at, symbol
from .intrinsics import compare_exchange, fetch_add, load_acquire, stack_array, stack_copy

# 64-bit numbers in a cache line.
_LINE = 8
# Elements of a helper's record, which takes a cache line: state, lock, index among the threads of the call,
# `pthread_t`, PID of the process that started it, and the processor that it avoids.
_STATE, _LOCK, _NUMBER, _THREAD, _PROCESS, _AVOIDED = range(6)
# States. Any other number is the address of the call that has taken the record: the helper has not begun.
_FREE, _BUSY, _NO_THREAD = range(3)
_MOST_HELPERS = 255
# The cache line before the records: the C function that starts a helper, and how many helpers all running calls want
# together.
_START, _WANTED, _FIRST = 0, 1, _LINE
_POOL_LENGTH = _FIRST + _MOST_HELPERS * _LINE
# Compiled code finds `_shared` by its symbol. Its elements: the address of the pool; the most threads of a call.
_POOL, _MOST = range(2)
_shared = np.zeros(2, np.int64)
llvmlite.binding.add_symbol("multisample_cpu_threads", _shared.ctypes.data)
# Elements of a call. From _BEGUN on, each thread has a cache line: the next unclaimed index of its part.
_ENTRY, _ARGUMENTS, _COUNT, _THREADS, _HELPERS, _BEGUN = 0, 1, 2, 3, 4, _LINE
_CALL = _BEGUN + (_MOST_HELPERS + 1) * _LINE
# Iterations of a spinning thread before it sleeps or yields. They take some 70 us, about as long as waking a thread.
_SPINS = 200_000
# Numbers of 64 bits that hold a `cpu_set_t`, a `sigset_t` or a `pthread_attr_t`.
_SET = 16
# Helpers block all signals but these: if a thread faults with the signal blocked, Linux kills the process before
# faulthandler can report it.
_FAULTS = tuple(int(fault) for fault in (signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV))
_SIG_SETMASK = int(signal.SIG_SETMASK)

_allocate_lock = types.ExternalFunction("PyThread_allocate_lock", types.intp())
_acquire_lock = types.ExternalFunction("PyThread_acquire_lock", types.intc(types.intp, types.intc))
_release_lock = types.ExternalFunction("PyThread_release_lock", types.void(types.intp))
_let_others_run = types.ExternalFunction("sched_yield", types.intc())
_process = types.ExternalFunction("getpid", types.intc())
_this_thread = types.ExternalFunction("pthread_self", types.intp())
_create_thread = types.ExternalFunction("pthread_create", types.intc(types.intp, types.intp, types.intp, types.intp))
_create_attributes = types.ExternalFunction("pthread_attr_init", types.intc(types.intp))
_destroy_attributes = types.ExternalFunction("pthread_attr_destroy", types.intc(types.intp))
_set_stack_size = types.ExternalFunction("pthread_attr_setstacksize", types.intc(types.intp, types.uintp))
_fill_signals = types.ExternalFunction("sigfillset", types.intc(types.intp))
_remove_signal = types.ExternalFunction("sigdelset", types.intc(types.intp, types.intc))
_block_signals = types.ExternalFunction("pthread_sigmask", types.intc(types.intc, types.intp, types.intp))
if sys.platform == "linux":
    _processor = types.ExternalFunction("sched_getcpu", types.intc())
    _get_processors = types.ExternalFunction("sched_getaffinity", types.intc(types.intc, types.intp, types.intp))
    _set_processors = types.ExternalFunction("pthread_setaffinity_np", types.intc(types.intp, types.intp, types.intp))
else:
    _processor = inline(lambda: -1)
    _get_processors = _set_processors = inline(lambda thread, size, processors: -1)


@inline
def threads_for(most, limit):
    """The number of threads for a call with work for `most` threads.

    `limit` is the most threads of the call, or 0 for the number that `find_threads` found.
    """
    return min(most, limit if limit != 0 else numbers_at(symbol("multisample_cpu_threads"), 2, np.int64)[_MOST])


@inline
def for_each(function, arguments, count, threads):
    """Call ``function(arguments, index)`` for each index below `count`, on up to `threads` threads with this one.

    `arguments` is a tuple. Returns when every call has returned. `function` must not raise. C functions
    may use this: it needs neither the GIL nor a Python thread. For more than one thread, call `find_threads` first.
    """
    pool = numbers_at(numbers_at(symbol("multisample_cpu_threads"), 2, np.int64)[_POOL], _POOL_LENGTH, np.int64)
    _share(c_function(function, arguments), stack_copy(arguments), count, threads, pool)


@inline
def _share(entry, arguments, count, threads, pool):
    threads = max(1, min(threads, count, _MOST_HELPERS + 1))
    if threads == 1:
        for index in range(count):
            call_c(entry, arguments, index)
        return
    call = stack_array(_CALL, np.int64)
    call[_ENTRY], call[_ARGUMENTS] = entry, arguments
    call[_COUNT], call[_THREADS], call[_HELPERS] = count, threads, 0
    for part in range(threads):
        call[_BEGUN + part * _LINE] = part * _part_size(call)
    _run(call, pool)


@inline
def _part_size(call):
    return (call[_COUNT] + call[_THREADS] - 1) // call[_THREADS]


@inline
def _work(call, number):
    """Call the function for each index that no thread has begun: first in part `number`, then in the others.

    Threads begin far apart, because neighbours would page in and clear the same fresh memory. A thread usually gets the
    same part in the next call, when the memory may still be in its cache.
    """
    for k in range(call[_THREADS]):
        part = (number + k) % call[_THREADS]
        end = min((part + 1) * _part_size(call), call[_COUNT])
        while True:
            index = fetch_add(call, _BEGUN + part * _LINE, 1)
            if index >= end:
                break
            call_c(call[_ENTRY], call[_ARGUMENTS], index)


@inline
def _keep_away(pool, helper, processor):
    """Let the helper run where the caller may, but not on the caller's `processor`.

    Linux often wakes a thread on the processor of its waker, above all in a virtual machine, where idle processors seem
    busy.
    """
    # A child that C code forked has the pool of its parent, whose threads it must not touch.
    if pool[helper + _AVOIDED] != processor and pool[helper + _PROCESS] == _process():
        processors = stack_array(_SET, np.int64)
        if _get_processors(0, 8 * _SET, processors.ctypes.data) == 0:
            processors[processor // 64] &= ~(1 << (processor % 64))
            # Fails if the caller may run on this processor alone.
            if _set_processors(pool[helper + _THREAD], 8 * _SET, processors.ctypes.data) == 0:
                pool[helper + _AVOIDED] = processor


@inline
def _run(call, pool):
    address = call.ctypes.data
    processor, helpers, helper, wanted = _processor(), 0, _FIRST, call[_THREADS] - 1
    can_start = pool[_START] != 0
    most = fetch_add(pool, _WANTED, wanted) + wanted
    while helpers < wanted and helper < len(pool):
        state = load_acquire(pool, helper + _STATE)
        if state == _NO_THREAD:
            if helper // _LINE > most:
                break
            if can_start and compare_exchange(pool, helper + _STATE, _NO_THREAD, address):
                pool[helper + _NUMBER] = helpers + 1
                call_c(pool[_START], pool.ctypes.data + 8 * helper)
                can_start = load_acquire(pool, helper + _STATE) != _NO_THREAD
                helpers += can_start
        elif state == _FREE and compare_exchange(pool, helper + _STATE, _FREE, address):
            helpers += 1
            pool[helper + _NUMBER] = helpers
            _keep_away(pool, helper, processor)
            _release_lock(pool[helper + _LOCK])
        helper += _LINE
    # Each helper subtracts 1 when it has finished this call. The counter is negative if some have finished already.
    fetch_add(call, _HELPERS, helpers)
    _work(call, 0)
    for taken in range(_FIRST, helper, _LINE):
        if compare_exchange(pool, taken + _STATE, address, _BUSY):  # The helper has not begun.
            fetch_add(call, _HELPERS, -1)
    spins = 0
    while load_acquire(call, _HELPERS) > 0:
        spins += 1
        if spins > _SPINS:
            _let_others_run()
    fetch_add(pool, _WANTED, -wanted)


def _serve(address):
    """Help the calls that take the record at `address`. Never returns."""
    helper = numbers_at(address, _LINE, np.int64)
    helper[_THREAD] = _this_thread()
    spins = 0
    while True:
        while spins > 0 and load_acquire(helper, _STATE) == _FREE:
            spins -= 1
        _acquire_lock(helper[_LOCK], 1)
        address = load_acquire(helper, _STATE)
        if address != _BUSY and compare_exchange(helper, _STATE, address, _BUSY):
            call = numbers_at(address, _CALL, np.int64)
            _work(call, helper[_NUMBER])
            spins = _SPINS
            fetch_add(call, _HELPERS, -1)
        fetch_add(helper, _STATE, _FREE - _BUSY)


@functools.cache
def starting_function() -> int:
    """The address of a C function that starts the thread of the helper whose record, at its argument, a call has taken.

    If the system cannot start a thread, the state of the record is _NO_THREAD again.
    """
    serve = callee(_serve, "cpu-serve")

    def start(address):
        helper = numbers_at(address, _LINE, np.int64)
        thread, attributes = stack_array(1, np.int64), stack_array(_SET, np.int64)
        blocked, before = stack_array(_SET, np.int64), stack_array(_SET, np.int64)
        if helper[_LOCK] == 0:
            helper[_LOCK] = _allocate_lock()
        helper[_PROCESS] = _process()
        error = -1
        if helper[_LOCK] != 0 and _create_attributes(attributes.ctypes.data) == 0:
            _fill_signals(blocked.ctypes.data)
            for fault in _FAULTS:
                _remove_signal(blocked.ctypes.data, fault)
            if _set_stack_size(attributes.ctypes.data, STACK_SIZE) == 0:
                # The new thread has the signal mask of this one.
                _block_signals(_SIG_SETMASK, blocked.ctypes.data, before.ctypes.data)
                error = _create_thread(thread.ctypes.data, attributes.ctypes.data, c_function(serve), address)
                _block_signals(_SIG_SETMASK, before.ctypes.data, 0)
            _destroy_attributes(attributes.ctypes.data)
        if error != 0:
            fetch_add(helper, _STATE, _NO_THREAD - load_acquire(helper, _STATE))

    return c_address(start, "cpu-start", source_digest())


def _new_pool() -> np.ndarray[Any, Any]:
    pool = np.zeros(_POOL_LENGTH, np.int64)
    pool[_FIRST + _STATE :: _LINE], pool[_FIRST + _AVOIDED :: _LINE] = _NO_THREAD, -1
    # Never freed, since helpers load from it until the process ends, also after the end of the interpreter.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
    _shared[_POOL] = pool.ctypes.data
    return pool


_pool = _new_pool()


def _forget() -> None:
    global _pool
    start, _pool = _pool[_START], _new_pool()
    _pool[_START] = start


# The child gets a new pool. If an earlier fork hook drew in the child, its helpers keep the old pool.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def find_threads() -> None:
    """Read anew how many threads a call may have that sets no number, such as XLA's, and prepare helpers for all calls.

    All calls share the helpers, which never end. A call starts those that it lacks, up to the number that all running
    calls want together, and 255 is the maximum.
    """
    _shared[_MOST] = configured_threads()
    if not _pool[_START]:
        _pool[_START] = starting_function()
