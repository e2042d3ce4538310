"""Worker processes that Ctrl-C does not interrupt, and that an error or a signal in this process ends at once."""

import multiprocessing
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any


class Workers(ProcessPoolExecutor):
    """An executor of `count` processes, for a ``with`` statement."""

    def __init__(self, count: int) -> None:
        # A forked process could inherit a lock that another thread holds.
        super().__init__(count, multiprocessing.get_context("spawn"))
        self._others = set(multiprocessing.active_children())
        # Ctrl-C reaches all processes of a terminal. Workers inherit the signal mask of the thread that starts them.
        self._starter = ThreadPoolExecutor(1, "", signal.pthread_sigmask, (signal.SIG_BLOCK, {signal.SIGINT}))

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        """Submit a task from the thread that starts the workers. A signal interrupts the main thread only."""
        return self._starter.submit(super().submit, function, *args, **options).result()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._starter.shutdown(cancel_futures=True)
        report = threading.excepthook
        if kind is not None:
            # Before Python 3.13, the executor's thread fails if a worker dies while tasks are cancelled (gh-107219).
            threading.excepthook = lambda failure: (
                None if issubclass(failure.exc_type, InvalidStateError) else report(failure)
            )
            for process in set(multiprocessing.active_children()) - self._others:
                process.terminate()
        try:
            self.shutdown(cancel_futures=True)
        finally:
            threading.excepthook = report
