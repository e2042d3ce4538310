"""Forked children, which have only the thread that forked.

A lock that another thread held would stay locked forever in a child. So a fork first acquires Numba's compiler lock:
otherwise the child of a compiling process could never compile.

PyTorch's threads are those of GNU OpenMP, which keeps a pool of them for each thread that starts parallel work. A child
inherits the pool of the thread that forked, without the threads in the pool. Parallel work in the child would wait for
these threads forever.
"""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

# Linux's flag PF_FORKNOEXEC.
_FORKED_WITHOUT_EXEC = 0x40

# Numba's lock, once for each call of `_acquire` in a fork that is in progress. The fork holds the lock or waits for it.
_held: list[Any] = []


def _began_by_fork() -> bool:
    """Whether Linux started this process by a fork, and it has executed no program since."""
    try:
        # The program's name, in parentheses, may have any characters.
        fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
        return bool(int(fields[6]) & _FORKED_WITHOUT_EXEC)
    except (OSError, ValueError, IndexError):
        return False


_forked = _began_by_fork()


def is_forked() -> bool:
    """Whether this process began by a fork."""
    return _forked


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


def _begin_child() -> None:
    global _forked
    _forked = True


def hold_compiler_lock() -> None:
    """Hold Numba's lock during forks.

    The last handler that was registered runs first. The handler of logging acquires the lock of logging, for which a
    thread that compiles may wait. So call this function again after an import of logging.
    """
    os.register_at_fork(before=_acquire, after_in_parent=_release, after_in_child=_release)


os.register_at_fork(after_in_child=_begin_child)
hold_compiler_lock()
