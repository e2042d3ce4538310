"""Threads of the process: created on first use, and created again in a forked child.

A pool's threads do not survive a fork. A child that inherited them would wait for them forever.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

__all__ = ["helped", "limit_threads", "run_all", "thread_count", "thread_limit"]

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


_MOST_HELPERS = 255


class _Helpers:
    """Threads that take jobs from one queue.

    A queue in C wakes a thread several microseconds sooner than the executor of `concurrent.futures`.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = self._wanted = 0

    @contextlib.contextmanager
    def working(self, job: Callable[[], object], count: int) -> Iterator[None]:
        """Put `job` into the queue `count` times, for as many threads, up to a limit for all callers."""
        with self._lock:
            self._wanted += count
            try:
                while self._started < min(self._wanted, _MOST_HELPERS):
                    self._start()
            except RuntimeError:
                pass  # No more threads can start: a limit, or the interpreter shuts down.
        try:
            for _ in range(count if self._started else 0):
                self._jobs.put(job)
            yield
        finally:
            with self._lock:
                self._wanted -= count

    def _start(self) -> None:
        threading.Thread(target=self._serve, name=f"multisample_{self._started}", daemon=True).start()
        self._started += 1

    def _serve(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # The calling thread does what a job left.
                self._jobs.get()()


_helpers = _Helpers()


def _forget() -> None:
    global _helpers
    _helpers = _Helpers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def helped(job: Callable[[], object], helpers: int) -> contextlib.AbstractContextManager[None]:
    """Call `job` on up to `helpers` other threads while the ``with`` block runs.

    Another thread may call `job` late, after the block, or not at all, and its exceptions are ignored: the block must
    do the work that remains.
    """
    return _helpers.working(job, helpers)


def run_all(function: Callable[[_Task], None], tasks: Sequence[_Task], threads: int) -> None:
    """Call `function` on every task, on this thread and up to ``threads - 1`` others. Returns when all are done.

    If a task raises, no further task begins. The first exception is raised after all running tasks have ended.
    """
    helpers = min(threads, len(tasks)) - 1
    if helpers < 1:
        for task in tasks:
            function(task)
        return
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

    # A helper that has begun has taken a ticket, and puts its outcome. The calling thread works too, and takes the
    # tickets that are left when it is done: a busy pool costs time but never blocks.
    tickets = collections.deque(range(helpers))
    outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def help_out() -> None:
        try:
            tickets.pop()
        except IndexError:
            return
        outcome = None
        try:
            work()
        except BaseException as error:
            outcome = error
        outcomes.put(outcome)

    with helped(help_out, helpers):
        try:
            work()
        finally:
            begun = helpers
            with contextlib.suppress(IndexError):
                while True:
                    tickets.pop()
                    begun -= 1
            errors = [outcomes.get() for _ in range(begun)]
    for error in errors:
        if error is not None:
            raise error
