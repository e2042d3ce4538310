"""Threads that belong to the process: made when first needed, and made anew in a forked child.

A pool's threads do not survive a fork, so a child that inherited the executor would wait for them for ever.
"""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

__all__ = ["run_all", "thread_count"]

_Task = TypeVar("_Task")

_lock = threading.Lock()
_executor: ThreadPoolExecutor | None = None


def thread_count() -> int:
    """How many threads work on one call: the processors this process may use, or MULTISAMPLE_NUM_THREADS."""
    setting = os.environ.get("MULTISAMPLE_NUM_THREADS", "")
    if setting:
        if not setting.isdecimal() or int(setting) < 1:
            raise ValueError(f"MULTISAMPLE_NUM_THREADS must be a positive integer, got {setting!r}")
        return int(setting)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _forget() -> None:
    global _executor, _lock
    _executor, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _helpers() -> ThreadPoolExecutor:
    global _executor
    from concurrent.futures import ThreadPoolExecutor  # Which cannot be imported while the interpreter shuts down.

    with _lock:
        if _executor is None:
            _executor = ThreadPoolExecutor(thread_name_prefix="multisample", max_workers=256)
        return _executor


def run_all(function: Callable[[_Task], None], tasks: Sequence[_Task], threads: int) -> None:
    """Call `function` on every task, on this thread and up to ``threads - 1`` others; returns when all are done.

    The first exception is raised, after every task that had been begun has ended.
    """
    # The calling thread works too, so that a pool kept busy by others costs time but never blocks.
    waiting = collections.deque(tasks)

    def work() -> None:
        try:
            while True:
                try:
                    task = waiting.popleft()
                except IndexError:
                    return
                function(task)
        except BaseException:
            waiting.clear()
            raise

    futures = []
    try:
        executor = _helpers()
        for _ in range(min(threads, len(tasks)) - 1):
            futures.append(executor.submit(work))
    except RuntimeError:
        pass  # No more threads: a limit, or the interpreter shuts down. This one does what the others leave.
    try:
        work()
    finally:
        # `exception` waits. A helper that never began is not waited for.
        errors = [future.exception() for future in futures if not future.cancel()]
    for error in errors:
        if error is not None:
            raise error
