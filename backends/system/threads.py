"""How many threads a call on the CPU may use, and threads for calls of Python functions."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

STACK_SIZE = 1 << 20
"""Bytes of stack for a thread that draws. Kernels of float64 need a quarter of it."""

# More threads than any system has.
_MOST = 2**31 - 1

_Task = TypeVar("_Task")

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
    most = configured_threads()
    return min(most, _limit.get() or most)


def configured_threads() -> int:
    """The same without the limit of `limit_threads`."""
    setting = os.environ.get("MULTISAMPLE_NUM_THREADS", "")
    if setting:
        digits = setting.lstrip("0")
        if not (setting.isdecimal() and digits):
            raise ValueError(f"MULTISAMPLE_NUM_THREADS must be a positive integer, got {setting[:60]!r}")
        return min(int(digits[:10]), _MOST)  # Ten digits are more than `_MOST`.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_all(function: Callable[[_Task], None], tasks: Sequence[_Task], threads: int) -> None:
    """Call `function` on every task, on this thread and up to ``threads - 1`` new ones. Returns when all are done.

    If a task raises, no further task begins. The first exception is raised after all running tasks have ended.
    No threads start if `threading.stack_size` gives them too little stack to draw.
    """
    if 0 < threading.stack_size() < STACK_SIZE:
        threads = 1
    waiting, errors = collections.deque(tasks), collections.deque[BaseException]()

    def work() -> None:
        try:
            while True:
                try:
                    task = waiting.popleft()
                except IndexError:
                    return
                function(task)
        except BaseException as error:
            waiting.clear()
            errors.append(error)

    helpers = [threading.Thread(target=work, daemon=True) for _ in range(min(threads, len(tasks)) - 1)]
    try:
        with contextlib.suppress(RuntimeError):  # No more threads can start: a limit, or the interpreter shuts down.
            for helper in helpers:
                helper.start()
        work()
    finally:
        waiting.clear()
        for helper in helpers:
            if helper.is_alive():
                helper.join()
    if errors:
        raise errors[0]
