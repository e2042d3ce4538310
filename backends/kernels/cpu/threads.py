"""Threads that help kernels. They wait in compiled code.

A helper that waited in Python would need the GIL to continue. With 15 helpers, these waits took longer than drawing a
(1000, 10000) matrix.

Each helper has a slot and sleeps on a lock of its own. The slot is free, busy, or has the address of a call that wants
the helper. A call takes free slots and wakes their helpers. When no work is left, it takes back the slots of helpers
that have not begun: it never waits for a thread that the system does not run, or that a child forked by C code does not
have.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numba import types

from multisample.backends.kernels.compilation import compile_cached, inline, source_digest

from .intrinsics import (
    call_entry,
    compare_exchange,
    entry_address,
    fetch_add,
    integers_at,
    load_acquire,
    stack_array,
    stack_copy,
)

__all__ = ["SLOTS", "SLOTS_LENGTH", "for_each", "helpers", "serving_kernel"]

SLOTS = types.Array(types.int64, 1, "C")
"""The Numba type of the slots."""

# Numbers in a cache line.
_LINE = 8
# Elements of a slot, a line: its state, its helper's lock, the helper's number among the threads of the call, the
# system's numbers of the helper and of its process, and the processor that it avoids.
_STATE, _LOCK, _NUMBER, _THREAD, _PROCESS, _AVOIDED = range(6)
# States. Another number is the address of a call that has taken the slot, and whose helper has not begun.
_FREE, _BUSY, _NO_THREAD = range(3)
_MOST_HELPERS = 255
SLOTS_LENGTH = (_MOST_HELPERS + 1) * _LINE
"""The number of elements of the slots."""
# Elements of a call. From _BEGUN on, each thread has a line, with the first index of its part that has not begun.
_ENTRY, _ARGUMENTS, _COUNT, _THREADS, _HELPERS, _BEGUN = 0, 1, 2, 3, 4, _LINE
_CALL = _BEGUN + (_MOST_HELPERS + 1) * _LINE
# How many times a waiting thread loads a number before it sleeps or lets others run: some 70 us. Waking a thread takes
# about as long.
_LOADS = 200_000
# Numbers of 64 bits in a set of processors.
_SET = 16

_acquire_lock = types.ExternalFunction("PyThread_acquire_lock", types.intc(types.intp, types.intc))
_release_lock = types.ExternalFunction("PyThread_release_lock", types.void(types.intp))
_let_others_run = types.ExternalFunction("sched_yield", types.intc())
_process = types.ExternalFunction("getpid", types.intc())
if sys.platform == "linux":
    _processor = types.ExternalFunction("sched_getcpu", types.intc())
    _get_processors = types.ExternalFunction("sched_getaffinity", types.intc(types.intc, types.intp, types.intp))
    _set_processors = types.ExternalFunction("sched_setaffinity", types.intc(types.intc, types.intp, types.intp))
else:
    _processor = inline(lambda: -1)
    _get_processors = _set_processors = inline(lambda thread, size, processors: -1)


@inline
def for_each(function, arguments, count, threads, slots):
    """Call ``function(arguments, index)`` for each index below `count`, on up to `threads` threads with this one.

    `arguments` is a tuple. Returns when every call has returned. `function` must not raise.
    """
    threads = max(1, min(threads, count, _MOST_HELPERS + 1))
    call = stack_array(_CALL, np.int64)
    call[_ENTRY], call[_ARGUMENTS] = entry_address(function, arguments), stack_copy(arguments)
    call[_COUNT], call[_THREADS], call[_HELPERS] = count, threads, 0
    for part in range(threads):
        call[_BEGUN + part * _LINE] = part * _part_size(call)
    _run(call, slots)


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
            call_entry(call[_ENTRY], call[_ARGUMENTS], index)


@inline
def _keep_away(slots, slot, processor):
    """Let the helper run where the caller may, but not on the caller's `processor`.

    Linux often puts a thread that wakes up there, above all in a virtual machine, where idle processors seem busy.
    """
    # A child that C code forked has the slots of its parent, whose threads it must not touch.
    if slots[slot + _AVOIDED] != processor and slots[slot + _PROCESS] == _process():
        processors = stack_array(_SET, np.int64)
        if _get_processors(0, 8 * _SET, processors.ctypes.data) == 0:
            processors[processor // 64] &= ~(1 << (processor % 64))
            # Fails if the caller may run on this processor alone.
            if _set_processors(slots[slot + _THREAD], 8 * _SET, processors.ctypes.data) == 0:
                slots[slot + _AVOIDED] = processor


@inline
def _run(call, slots):
    address = call.ctypes.data
    processor, helpers, slot = _processor(), 0, 0
    while helpers < call[_THREADS] - 1 and load_acquire(slots, slot + _STATE) != _NO_THREAD:
        if compare_exchange(slots, slot + _STATE, _FREE, address):
            helpers += 1
            slots[slot + _NUMBER] = helpers
            _keep_away(slots, slot, processor)
            _release_lock(slots[slot + _LOCK])
        slot += _LINE
    # Helpers that are already done have made this counter negative.
    fetch_add(call, _HELPERS, helpers)
    _work(call, 0)
    for taken in range(0, slot, _LINE):
        if compare_exchange(slots, taken + _STATE, address, _BUSY):  # The helper has not begun.
            fetch_add(call, _HELPERS, -1)
    loads = 0
    while load_acquire(call, _HELPERS) > 0:
        loads += 1
        if loads > _LOADS:
            _let_others_run()


def _serve(slots, slot):
    loads = 0
    while True:
        while loads > 0 and load_acquire(slots, slot + _STATE) == _FREE:
            loads -= 1
        _acquire_lock(slots[slot + _LOCK], 1)
        address = load_acquire(slots, slot + _STATE)
        if address != _BUSY and compare_exchange(slots, slot + _STATE, address, _BUSY):
            call = integers_at(address, _CALL)
            _work(call, slots[slot + _NUMBER])
            loads = _LOADS
            fetch_add(call, _HELPERS, -1)
        fetch_add(slots, slot + _STATE, _FREE - _BUSY)


class _Helpers:
    """Threads that start when calls want them. All calls share them, and they never end."""

    def __init__(self) -> None:
        self.slots = np.zeros(SLOTS_LENGTH, np.int64)
        self.slots[_STATE::_LINE], self.slots[_AVOIDED::_LINE] = _NO_THREAD, -1
        self.unused = list(reversed(range(_MOST_HELPERS)))
        # A signal handler, or `__del__`, may draw while this thread has the lock.
        self._lock = threading.RLock()
        self._wanted = 0

    @contextlib.contextmanager
    def wanted(self, count: int) -> Iterator[np.ndarray[Any, Any]]:
        if count > 0:
            serving_kernel()
        with self._lock:
            self._wanted += count
        try:
            with self._lock, contextlib.suppress(RuntimeError):  # At a limit of threads, or when the interpreter ends.
                while self.unused and _MOST_HELPERS - len(self.unused) < self._wanted:
                    self._start()
            yield self.slots
        finally:
            with self._lock:
                self._wanted -= count

    def _start(self) -> None:
        helper = self.unused.pop()
        try:
            first = helper * _LINE
            slot = self.slots[first : first + _LINE]
            slot[_LOCK] = slot[_LOCK] or _new_lock()
            thread = threading.Thread(
                target=serving_kernel(), args=(self.slots, first), name=f"multisample_{helper}", daemon=True
            )
            thread.start()
            slot[_THREAD], slot[_PROCESS] = thread.native_id or -1, os.getpid()
        except BaseException:  # If the thread has started nevertheless, two threads serve the slot, which does no harm.
            self.unused.append(helper)
            raise
        slot[_STATE] = _FREE


@functools.cache
def serving_kernel() -> Callable[[np.ndarray[Any, Any], int], None]:
    """``kernel(slots, slot)`` helps the calls that take the slot that begins at element `slot`. It never returns."""
    signature = types.void(SLOTS, types.int64)
    kernel: Callable[[Any, int], None] = compile_cached(signature, _serve, "cpu-serve", source_digest())
    return kernel


def _new_lock() -> int:
    allocate, acquire = ctypes.pythonapi.PyThread_allocate_lock, ctypes.pythonapi.PyThread_acquire_lock
    allocate.restype, acquire.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_int)
    lock: int | None = allocate()
    if lock is None:
        raise RuntimeError("can't allocate a lock")
    acquire(lock, 1)
    return lock


_helpers = _Helpers()


def _forget() -> None:
    global _helpers
    _helpers = _Helpers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def helpers(count: int) -> contextlib.AbstractContextManager[np.ndarray[Any, Any]]:
    """The slots, for a call that wants `count` helpers.

    Starts threads until there are as many as all calls together want, up to 255, or as many as the process can have.
    """
    return _helpers.wanted(count)
