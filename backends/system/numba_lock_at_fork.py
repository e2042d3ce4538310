"""Keeps Numba's compiler lock usable in forked children.

A forked child has only the thread that forked. A lock that another thread held would stay locked forever in the child.
So a fork first acquires the compiler lock: otherwise the child of a compiling process could never compile.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

__all__: list[str] = []

# The lock, once for each fork that holds it or waits for it.
_held: list[Any] = []


def _acquire() -> None:
    module = sys.modules.get("numba.core.compiler_lock")
    lock = getattr(module, "global_compiler_lock", None)  # None while another thread imports the module.
    if lock is not None:
        _held.append(lock)  # Before the lock: a signal handler may raise right after acquire().
        lock.acquire()


def _release() -> None:
    if _held:
        with contextlib.suppress(RuntimeError):  # A signal handler raised before acquire().
            _held.pop().release()


os.register_at_fork(before=_acquire, after_in_parent=_release, after_in_child=_release)
