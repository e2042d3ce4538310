"""The threads of the cpu backend, which wait for work in compiled code."""

import contextlib
import ctypes
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forks import forked, in_forks
from numba import njit, types

from multisample.backends.kernels.compilation import callee, compile_cached
from multisample.backends.kernels.cpu import helper_threads
from multisample.backends.kernels.cpu.intrinsics import fetch_add, load_acquire

DEADLINE = 60
# So many loads take about half a minute.
LOADS = 100_000_000_000
PROCESSORS: set[int] = os.sched_getaffinity(0) if sys.platform == "linux" else set()
Pool = np.ndarray[Any, Any]
NUMBERS = types.Array(types.int64, 1, "C")


def visit(arguments, index):  # type: ignore[no-untyped-def]
    """Wait until `together` threads are inside, then for a time proportional to `index`, and count the visit.

    Counts nothing if too few threads arrive.
    """
    visits, arrived, together = arguments
    if fetch_add(arrived, 0, 1) < together:
        for _ in range(LOADS):
            if load_acquire(arrived, 0) >= together:
                break
        else:
            return
        for _ in range(1_000_000 * index):
            load_acquire(arrived, 0)
    fetch_add(visits, index, 1)


visit_compiled = callee(visit, "test-visit")


def visit_all(visits, arrived, together, count, number):  # type: ignore[no-untyped-def]
    helper_threads.for_each(visit_compiled, (visits, arrived, together), count, number)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    signature = types.void(NUMBERS, NUMBERS, types.int64, types.int64, types.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MULTISAMPLE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        compiled: Callable[..., None] = compile_cached(signature, visit_all, "test-visit_all", "digest").entry_point
    return compiled


@pytest.fixture(autouse=True)
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """A new pool for a test, with a line for each helper. Its helpers sleep until the process ends."""
    before = helper_threads._shared[helper_threads._POOL]
    array = helper_threads._new_pool()
    monkeypatch.setattr(helper_threads, "_pool", array)
    yield array[helper_threads._FIRST :].reshape(-1, helper_threads._LINE)
    helper_threads._shared[helper_threads._POOL] = before


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def with_thread(pool: Pool) -> Pool:
    return pool[pool[:, helper_threads._STATE] != helper_threads._NO_THREAD]


def wait_for_helpers(pool: Pool) -> None:
    """Until all are free."""
    wait_until(lambda: not with_thread(pool)[:, helper_threads._STATE].any())


def visits(kernel: Callable[..., None], count: int, number: int, together: int = 0) -> list[int]:
    counts, arrived = np.zeros(max(count, 1), np.int64), np.zeros(1, np.int64)
    helper_threads.find_threads()
    kernel(counts, arrived, together, count, number)
    return counts[:count].tolist()


def in_time(work: Callable[[], Any]) -> Any:
    """The result of `work`, on another thread: a failing test must not hang."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(DEADLINE)
    assert results, "hangs, or failed"
    return results[0]


@pytest.mark.parametrize(
    ("number", "count"),
    [(1, 0), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (3, 1), (3, 7), (7, 6), (7, 7), (7, 8), (7, 1000)],
)
def test_each_index_is_visited_once(kernel: Callable[..., None], number: int, count: int) -> None:
    for _ in range(20):
        assert in_time(lambda: visits(kernel, count, number)) == [1] * count


def new_lock() -> int:
    """A locked lock for a helper's record. The helper sleeps until the lock is released."""
    allocate, acquire = ctypes.pythonapi.PyThread_allocate_lock, ctypes.pythonapi.PyThread_acquire_lock
    allocate.restype, acquire.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_int)
    lock: int = allocate()
    acquire(lock, 1)
    return lock


def test_more_threads_than_helpers(kernel: Callable[..., None], pool: Pool) -> None:
    # Helpers that never wake up, as in a child that C code forked.
    pool[:, helper_threads._LOCK], pool[:, helper_threads._STATE] = [new_lock() for _ in pool], helper_threads._FREE
    assert in_time(lambda: visits(kernel, 1000, 1 << 20)) == [1] * 1000
    assert (pool[:, helper_threads._STATE] == helper_threads._BUSY).all()


def test_a_call_wakes_no_more_helpers_than_it_has_indices(kernel: Callable[..., None], pool: Pool) -> None:
    assert in_time(lambda: visits(kernel, 3, 8)) == [1] * 3
    assert sorted(pool[:, helper_threads._NUMBER])[-3:] == [0, 1, 2]


@pytest.mark.parametrize("number", [2, 5])
def test_threads_work_at_the_same_time(kernel: Callable[..., None], number: int) -> None:
    for _ in range(20):
        assert in_time(lambda: visits(kernel, number, number, together=number)) == [1] * number


def test_threads_help_several_calls_at_the_same_time(kernel: Callable[..., None], pool: Pool) -> None:
    begin = threading.Barrier(4, timeout=DEADLINE)

    def call(_: int) -> list[list[int]]:
        begin.wait()
        return [visits(kernel, 100, 3) for _ in range(200)]

    with ThreadPoolExecutor(4) as executor:
        for counts in executor.map(call, range(4), timeout=DEADLINE):
            assert counts == [[1] * 100] * 200
    assert helper_threads._pool[helper_threads._WANTED] == 0
    assert 2 <= len(with_thread(pool)) <= 8
    wait_for_helpers(pool)
    number = len(with_thread(pool)) + 1
    assert in_time(lambda: visits(kernel, number, number, together=number)) == [1] * number


def test_a_call_starts_helpers_if_concurrent_calls_leave_too_few(kernel: Callable[..., None], pool: Pool) -> None:
    for number, threads_before in ((3, 0), (2, 2), (3, 2), (6, 2), (4, 5)):
        assert len(with_thread(pool)) == threads_before
        assert in_time(lambda number=number: visits(kernel, number, number, together=number)) == [1] * number
        wait_for_helpers(pool)
    # Another call has all five helpers, and wants a sixth.
    pool[:5, helper_threads._STATE], helper_threads._pool[helper_threads._WANTED] = helper_threads._BUSY, 6
    assert in_time(lambda: visits(kernel, 4, 4, together=4)) == [1] * 4
    assert len(with_thread(pool)) == 8


def test_a_call_does_not_wait_for_a_thread_that_has_not_begun(kernel: Callable[..., None], pool: Pool) -> None:
    lock = pool[0, helper_threads._LOCK] = new_lock()
    assert in_time(lambda: visits(kernel, 10, 2)) == [1] * 10
    assert pool[0, helper_threads._STATE] == helper_threads._BUSY
    ctypes.pythonapi.PyThread_release_lock(ctypes.c_void_p(int(lock)))
    wait_for_helpers(pool)
    assert in_time(lambda: visits(kernel, 2, 2, together=2)) == [1, 1]


@contextlib.contextmanager
def no_new_threads() -> Iterator[None]:
    """Without memory for stacks."""
    _, most = limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of memory that the system obeys")
def test_a_call_succeeds_if_threads_cannot_be_started(kernel: Callable[..., None], pool: Pool) -> None:
    helper_threads.find_threads()  # Compiles a kernel, which takes memory.
    with no_new_threads():
        counts = visits(kernel, 10, 4)
    assert counts == [1] * 10
    assert len(with_thread(pool)) == 0
    pool[0, helper_threads._STATE] = helper_threads._BUSY
    assert in_time(lambda: visits(kernel, 3, 3, together=2)) == [1] * 3
    pool[0, helper_threads._STATE] = helper_threads._NO_THREAD
    wait_for_helpers(pool)
    with no_new_threads():
        counts = visits(kernel, 2, 4, together=2)  # The helper with the second record does the work.
    assert counts == [1] * 2
    assert pool[:3, helper_threads._STATE].tolist()[::2] == [helper_threads._NO_THREAD] * 2
    assert in_time(lambda: visits(kernel, 4, 4, together=4)) == [1] * 4


def interrupt(thread: threading.Thread) -> None:
    identity = ctypes.c_ulong(thread.ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(InterruptedError))


def test_interrupts_by_other_threads_lose_nothing(kernel: Callable[..., None], pool: Pool) -> None:
    done = threading.Event()

    def call() -> None:
        while not done.is_set():
            with contextlib.suppress(InterruptedError):
                visits(kernel, 100, 3)

    def call_until_done() -> None:
        while not done.is_set():
            with contextlib.suppress(InterruptedError):
                call()

    callers = [threading.Thread(target=call_until_done, daemon=True) for _ in range(3)]
    visits(kernel, 100, 3)
    for caller in callers:
        caller.start()
    for k in range(3000):
        interrupt(callers[k % 3])
        if k % 3 == 0:
            time.sleep(1e-4)
    done.set()
    for caller in callers:
        caller.join(DEADLINE)
    assert not any(caller.is_alive() for caller in callers)
    assert helper_threads._pool[helper_threads._WANTED] == 0
    assert len(with_thread(pool)) <= 6
    wait_for_helpers(pool)
    number = len(with_thread(pool)) + 1
    assert in_time(lambda: visits(kernel, number, number, together=number)) == [1] * number


@pytest.mark.skipif(sys.platform != "linux", reason="reads signal masks from /proc")
def test_helpers_block_all_signals_except_faults(kernel: Callable[..., None]) -> None:
    def threads_of_process() -> set[Path]:
        return set(Path("/proc/self/task").iterdir())

    before = threads_of_process()
    assert visits(kernel, 3, 3, together=3) == [1] * 3
    helpers = threads_of_process() - before
    assert len(helpers) == 2
    faults = {signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}
    expected = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP} - faults
    for helper in helpers:
        (mask,) = re.findall(r"^SigBlk:\s*(\w+)$", (helper / "status").read_text(), re.MULTILINE)
        assert {number for number in signal.valid_signals() if int(mask, 16) >> (number - 1) & 1} == expected


needs_processors = pytest.mark.skipif(len(PROCESSORS) < 2, reason="needs two processors that threads can be kept from")


def helper_of(kernel: Callable[..., None], pool: Pool, allowed: set[int]) -> tuple[set[int], int]:
    """Make a call from a thread with affinity `allowed`; returns its helper's affinity and the processor it avoids."""

    def call() -> tuple[list[int], set[int]]:
        os.sched_setaffinity(0, allowed)
        return visits(kernel, 2, 2, together=2), os.sched_getaffinity(0)

    assert in_time(call) == ([1, 1], allowed)
    return affinity(pool[0]), int(pool[0, helper_threads._AVOIDED])


def affinity(helper: Pool) -> set[int]:
    """The processors of a helper."""
    bits = np.zeros(helper_threads._SET, np.uint64)
    thread = ctypes.c_void_p(int(helper[helper_threads._THREAD]))
    assert ctypes.CDLL(None).pthread_getaffinity_np(thread, bits.nbytes, ctypes.c_void_p(bits.ctypes.data)) == 0
    return {64 * k + bit for k, word in enumerate(bits.tolist()) for bit in range(64) if word >> bit & 1}


@needs_processors
def test_a_helper_may_run_where_the_caller_may_but_not_on_its_processor(
    kernel: Callable[..., None], pool: Pool
) -> None:
    assert helper_of(kernel, pool, PROCESSORS) == (PROCESSORS, -1)  # The system places a new thread well.
    for _ in range(50):
        processors, avoided = helper_of(kernel, pool, PROCESSORS)
        assert avoided in PROCESSORS
        assert processors == PROCESSORS - {avoided}
    # Where the caller may use one processor only, its helper keeps its own processors.
    for processor in PROCESSORS:
        assert helper_of(kernel, pool, {processor})[0] == PROCESSORS - {avoided}


@needs_processors
def test_a_helper_that_a_pinned_caller_started_may_run_elsewhere_later(kernel: Callable[..., None], pool: Pool) -> None:
    one = min(PROCESSORS)
    assert helper_of(kernel, pool, {one}) == ({one}, -1)
    processors, avoided = helper_of(kernel, pool, PROCESSORS)
    assert processors == PROCESSORS - {avoided}


@needs_processors
def test_a_process_leaves_helpers_of_another_alone(kernel: Callable[..., None], pool: Pool) -> None:
    helper_of(kernel, pool, PROCESSORS)
    processors, _ = helper_of(kernel, pool, PROCESSORS)
    pool[0, helper_threads._AVOIDED], pool[0, helper_threads._PROCESS] = -1, os.getppid()
    assert helper_of(kernel, pool, PROCESSORS) == (processors, -1)


@needs_processors
def test_each_processor_can_be_avoided(kernel: Callable[..., None], pool: Pool) -> None:
    keep_away: Any = njit(lambda pool, processor: helper_threads._keep_away(pool, helper_threads._FIRST, processor))
    helper_of(kernel, pool, PROCESSORS)
    for processor in PROCESSORS:
        keep_away(helper_threads._pool, processor)
        assert affinity(pool[0]) == PROCESSORS - {processor}


@forked
def test_a_forked_child_starts_its_own_threads(kernel: Callable[..., None]) -> None:
    def visited() -> list[int]:
        counts: list[int] = in_time(lambda: visits(kernel, 3, 3, together=3))
        return counts

    assert visited() == [1] * 3
    assert in_forks(visited) == [[1] * 3]
    assert visited() == [1] * 3
