"""How many threads a call on the CPU may use (multisample/ENVIRONMENT.md).

The package imports this module before its first call: a block of `threadpoolctl.threadpool_limits` limits only what
threadpoolctl knows when the block begins.
"""

import contextlib
import contextvars
import functools
import math
import os
from collections.abc import Iterator
from pathlib import Path

STACK_SIZE = 1 << 20
"""Bytes of stack for a thread that draws. Kernels of float64 need a quarter of it."""

# More threads than any system has.
_MOST = 2**31 - 1

# Variables of other libraries. joblib and Dask set them in their workers.
_VARIABLES = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")

_limit: contextvars.ContextVar[int] = contextvars.ContextVar("multisample_thread_limit", default=0)
# The limit of threadpoolctl, or 0.
_of_threadpool = 0


@contextlib.contextmanager
def limit_threads(most: int) -> Iterator[None]:
    """Limit each call in this context to `most` threads: see `multisample.limit_threads`."""
    token = _limit.set(min(most, _limit.get() or most))
    try:
        yield
    finally:
        _limit.reset(token)


def thread_limit() -> int:
    """The limit of `limit_threads` and of threadpoolctl, or 0."""
    of_context = _limit.get()
    return min(of_context or _of_threadpool, _of_threadpool) if _of_threadpool else of_context


def thread_count() -> int:
    """The most threads for one call: `configured_threads`, up to `thread_limit`."""
    most = configured_threads()
    return min(most, thread_limit() or most)


def configured_threads() -> int:
    """MULTISAMPLE_NUM_THREADS, or the processors available to this process, up to the numbers of `_VARIABLES`."""
    setting = os.environ.get("MULTISAMPLE_NUM_THREADS", "")
    if setting:
        number = positive(setting)
        if number == 0:
            raise ValueError(f"MULTISAMPLE_NUM_THREADS must be a positive integer, got {setting[:60]!r}")
        return number
    # OMP_NUM_THREADS may have a number for each level of nested regions. Values that OpenMP refuses are ignored.
    others = [positive(os.environ.get(name, "").partition(",")[0].strip()) for name in _VARIABLES]
    return min([processors(), *filter(None, others)])


def positive(text: str) -> int:
    """The positive integer, up to `_MOST`, with these digits; 0 if it is none."""
    digits = text.lstrip("0")
    return min(int(digits[:10]), _MOST) if text.isdecimal() and digits else 0  # Ten digits are more than `_MOST`.


def processors() -> int:
    """The processors available to this process."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(count, cpu_quota() or count)


@functools.cache
def cpu_quota(root: Path = Path("/")) -> int:
    """The processors that the quota of a container allows, rounded up, or 0. Reads Linux's files below `root`.

    The control groups of this process, of version 1 or 2, and all groups above them may have a quota.
    """
    quotas = []
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "cpu" in controllers.split(","):
                mount = root / "sys/fs/cgroup" / controllers
                # In a container, the path may be that of the host, which is not mounted here.
                group = mount / path.strip("/")
                quotas += [_quota_of(folder) for folder in (group, *group.parents) if folder.is_relative_to(mount)]
    return min(filter(None, quotas), default=0)


def _quota_of(group: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        if (group / "cpu.max").exists():
            most, period = (group / "cpu.max").read_text().split()
        else:
            most, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return max(0, math.ceil(int(most) / int(period)))  # "max" and -1 are no quota.
    return 0


with contextlib.suppress(ImportError, AttributeError):  # Not installed, or older than 3.2.
    import threadpoolctl

    class Controller(threadpoolctl.LibController):  # type: ignore[misc]
        """threadpoolctl finds a controller by a library that is loaded: here NumPy's, which always is."""

        user_api = internal_api = "multisample"
        filename_prefixes = ("_multiarray_umath",)

        def get_num_threads(self) -> int:
            return _of_threadpool or configured_threads()

        def set_num_threads(self, num_threads: int) -> None:
            global _of_threadpool
            _of_threadpool = 0 if num_threads >= configured_threads() else num_threads

        def get_version(self) -> None:
            return None

    threadpoolctl.register(Controller)
