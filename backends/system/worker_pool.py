"""Threads that belong to the process: made when first needed, and made anew in a forked child.

A pool's threads do not survive a fork, so a child that inherited the executor would wait for them for ever.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

__all__ = ["limit_threads", "run_all", "thread_count", "thread_limit"]

_Task = TypeVar("_Task")

_lock = threading.Lock()
_executor: ThreadPoolExecutor | None = None


_limit: contextvars.ContextVar[int] = contextvars.ContextVar("multisample_thread_limit", default=0)


@contextlib.contextmanager
def limit_threads(most: int) -> Iterator[None]:
    """Let at most `most` threads work on each call that is made in this context: see `multisample.limit_threads`."""
    token = _limit.set(min(most, _limit.get() or most))
    try:
        yield
    finally:
        _limit.reset(token)


thread_limit = _limit.get
"""``thread_limit()``: the limit that `limit_threads` has set, or 0."""


def thread_count() -> int:
    """How many threads may work on one call.

    As many as this process may use processors, or MULTISAMPLE_NUM_THREADS, but no more than `limit_threads` allows.
    """
    most = _configured_threads()
    return min(most, _limit.get() or most)


def _configured_threads() -> int:
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
