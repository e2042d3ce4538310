"""Threads of the process: created on first use, and created again in a forked child.

A pool's threads do not survive a fork. A child that inherited the executor would wait for them forever.
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
    """Limit each call in this context to `most` threads: see `multisample.limit_threads`."""
    token = _limit.set(min(most, _limit.get() or most))
    try:
        yield
    finally:
        _limit.reset(token)


thread_limit = _limit.get
"""``thread_limit()``: the limit of `limit_threads`, or 0."""


def thread_count() -> int:
    """The most threads for one call.

    The number of processors available to this process, or MULTISAMPLE_NUM_THREADS, up to the limit of `limit_threads`.
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
    from concurrent.futures import ThreadPoolExecutor  # The import fails while the interpreter shuts down.

    with _lock:
        if _executor is None:
            _executor = ThreadPoolExecutor(thread_name_prefix="multisample", max_workers=256)
        return _executor


def run_all(function: Callable[[_Task], None], tasks: Sequence[_Task], threads: int) -> None:
    """Call `function` on every task, on this thread and up to ``threads - 1`` others. Returns when all are done.

    If a task raises, no further task begins. The first exception is raised after all running tasks have ended.
    """
    # The calling thread works too, so that a busy pool costs time but never blocks.
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
        pass  # No more threads can start: a limit, or the interpreter shuts down. The started threads do all tasks.
    try:
        work()
    finally:
        # `exception` waits. Helpers that have not begun are cancelled.
        errors = [future.exception() for future in futures if not future.cancel()]
    for error in errors:
        if error is not None:
            raise error
