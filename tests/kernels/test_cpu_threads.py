"""The threads of the cpu backend, which wait for work in compiled code."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numba import njit, types

from multisample.backends.kernels.compilation import cached, compile_cached
from multisample.backends.kernels.cpu import threads
from multisample.backends.kernels.cpu.intrinsics import fetch_add, load_acquire

DEADLINE = 60
# Half a minute.
LOADS = 100_000_000_000
PROCESSORS: set[int] = os.sched_getaffinity(0) if sys.platform == "linux" else set()
NUMBERS = types.Array(types.int64, 1, "C")


def visit(arguments, index):  # type: ignore[no-untyped-def]
    """Wait until `together` threads have come, then longer the higher `index` is, and count the visit.

    Counts nothing if they do not come.
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


visit_compiled = cached(visit, "test-visit", "")


def visit_all(visits, arrived, together, count, number, slots):  # type: ignore[no-untyped-def]
    threads.for_each(visit_compiled, (visits, arrived, together), count, number, slots)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    signature = types.void(NUMBERS, NUMBERS, types.int64, types.int64, types.int64, threads.SLOTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MULTISAMPLE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        compiled: Callable[..., None] = compile_cached(signature, visit_all, "test-visit_all", "")
    return compiled


@pytest.fixture(autouse=True)
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """New threads for a test. They sleep until the process ends."""
    helpers = threads._Helpers()
    monkeypatch.setattr(threads, "_helpers", helpers)
    yield helpers


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def started(pool: Any) -> int:
    return threads._MOST_HELPERS - len(pool.unused)


def wait_for_helpers(pool: Any) -> None:
    """Until all are free."""
    wait_until(lambda: not pool.slots[: started(pool) * threads._LINE : threads._LINE].any())


def visits(kernel: Callable[..., None], count: int, number: int, together: int = 0) -> list[int]:
    counts, arrived = np.zeros(max(count, 1), np.int64), np.zeros(1, np.int64)
    if together > 0:
        wait_for_helpers(threads._helpers)
    with threads.helpers(number - 1) as slots:
        kernel(counts, arrived, together, count, number, slots)
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


def test_more_threads_than_slots(kernel: Callable[..., None], pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_start", pool.unused.pop)
    assert in_time(lambda: visits(kernel, 1000, 1 << 20)) == [1] * 1000
    assert started(pool) == threads._MOST_HELPERS


def test_a_call_wakes_no_more_helpers_than_it_has_indices(kernel: Callable[..., None], pool: Any) -> None:
    assert in_time(lambda: visits(kernel, 3, 8)) == [1] * 3
    assert sorted(pool.slots[threads._NUMBER :: threads._LINE])[-3:] == [0, 1, 2]


@pytest.mark.parametrize("number", [2, 5])
def test_threads_work_at_the_same_time(kernel: Callable[..., None], number: int) -> None:
    for _ in range(20):
        assert in_time(lambda: visits(kernel, number, number, together=number)) == [1] * number


def test_threads_help_several_calls_at_the_same_time(kernel: Callable[..., None], pool: Any) -> None:
    begin = threading.Barrier(4, timeout=DEADLINE)

    def call(_: int) -> list[list[int]]:
        begin.wait()
        with threads.helpers(2):  # Until all calls have begun.
            begin.wait()
            return [visits(kernel, 100, 3) for _ in range(200)]

    with ThreadPoolExecutor(4) as executor:
        for counts in executor.map(call, range(4), timeout=DEADLINE):
            assert counts == [[1] * 100] * 200
    assert pool._wanted == 0
    assert 8 <= started(pool) <= 16
    wait_for_helpers(pool)
    number = started(pool) + 1
    assert in_time(lambda: visits(kernel, number, number, together=number)) == [1] * number


def test_a_call_does_not_wait_for_a_thread_that_has_not_begun(kernel: Callable[..., None], pool: Any) -> None:
    # A slot whose thread does not wake up, as in a child that C code forked.
    slot = pool.slots[: threads._LINE]
    slot[threads._LOCK], slot[threads._STATE] = threads._new_lock(), threads._FREE
    assert pool.unused.pop() == 0
    assert in_time(lambda: visits(kernel, 10, 2)) == [1] * 10
    assert slot[threads._STATE] == threads._BUSY
    # The thread wakes up.
    threading.Thread(target=threads.serving_kernel(), args=(pool.slots, 0), daemon=True).start()
    wait_for_helpers(pool)
    assert in_time(lambda: visits(kernel, 2, 2, together=2)) == [1, 1]


def test_a_call_succeeds_if_threads_cannot_be_started(
    kernel: Callable[..., None], pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if started(pool) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        counts = visits(kernel, 2, 4, together=2), visits(kernel, 10, 4)
    assert counts == ([1, 1], [1] * 10)
    assert started(pool) == 1
    wait_for_helpers(pool)
    assert in_time(lambda: visits(kernel, 4, 4, together=4)) == [1] * 4


def test_a_signal_handler_may_draw_while_a_thread_starts(
    kernel: Callable[..., None], pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, in_handler = threading.Thread.start, []

    def start_with_signal(thread: threading.Thread) -> None:
        if not in_handler:
            in_handler.append(None)
            in_handler[0] = visits(kernel, 3, 3)
        start(thread)

    def call() -> list[int]:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start_with_signal)
            with threads.helpers(4):
                pass
        return visits(kernel, 5, 5, together=5)

    assert in_time(call) == [1] * 5
    assert in_handler == [[1] * 3]


needs_processors = pytest.mark.skipif(len(PROCESSORS) < 2, reason="needs two processors that threads can be kept from")


def helper_of(kernel: Callable[..., None], pool: Any, allowed: set[int]) -> tuple[set[int], int]:
    """The processors of the helper of a call from a thread that may run on `allowed`, and the processor it avoids."""

    def call() -> tuple[list[int], set[int]]:
        os.sched_setaffinity(0, allowed)
        return visits(kernel, 2, 2, together=2), os.sched_getaffinity(0)

    assert in_time(call) == ([1, 1], allowed)
    return os.sched_getaffinity(int(pool.slots[threads._THREAD])), int(pool.slots[threads._AVOIDED])


@needs_processors
def test_a_helper_may_run_where_the_caller_may_but_not_on_its_processor(kernel: Callable[..., None], pool: Any) -> None:
    for _ in range(50):
        processors, avoided = helper_of(kernel, pool, PROCESSORS)
        assert avoided in PROCESSORS
        assert processors == PROCESSORS - {avoided}
    # A caller that may run on one processor leaves its helper no other.
    for processor in PROCESSORS:
        assert helper_of(kernel, pool, {processor})[0] == PROCESSORS - {avoided}


@needs_processors
def test_a_helper_that_a_pinned_caller_started_may_run_elsewhere_later(kernel: Callable[..., None], pool: Any) -> None:
    one = min(PROCESSORS)
    assert helper_of(kernel, pool, {one}) == ({one}, -1)
    processors, avoided = helper_of(kernel, pool, PROCESSORS)
    assert processors == PROCESSORS - {avoided}


@needs_processors
def test_a_process_leaves_helpers_of_another_alone(kernel: Callable[..., None], pool: Any) -> None:
    processors, _ = helper_of(kernel, pool, PROCESSORS)
    pool.slots[threads._AVOIDED], pool.slots[threads._PROCESS] = -1, os.getppid()
    assert helper_of(kernel, pool, PROCESSORS) == (processors, -1)


@needs_processors
def test_each_processor_can_be_avoided(kernel: Callable[..., None], pool: Any) -> None:
    keep_away: Any = njit(lambda slots, processor: threads._keep_away(slots, 0, processor))
    helper_of(kernel, pool, PROCESSORS)
    for processor in PROCESSORS:
        keep_away(pool.slots, processor)
        assert os.sched_getaffinity(int(pool.slots[threads._THREAD])) == PROCESSORS - {processor}


def test_a_start_may_be_interrupted(kernel: Callable[..., None], pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def interrupted_start(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    def interrupted_creation(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    for name, interrupted in (
        ("start", interrupted_start),
        ("start", interrupted_start),
        ("__init__", interrupted_creation),
    ):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(threading.Thread, name, interrupted)
            visits(kernel, 3, 3)
    assert pool._wanted == started(pool) == 0
    for _ in range(200):
        assert in_time(lambda: visits(kernel, 3, 3)) == [1] * 3
    wait_for_helpers(pool)
    assert in_time(lambda: visits(kernel, 3, 3, together=3)) == [1] * 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
# Python 3.12 and later warn of forks with threads, and so does JAX if another test has imported it.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*fork.*:RuntimeWarning")
def test_a_forked_child_starts_its_own_threads(kernel: Callable[..., None]) -> None:
    assert in_time(lambda: visits(kernel, 3, 3, together=3)) == [1] * 3
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if in_time(lambda: visits(kernel, 3, 3, together=3)) == [1] * 3 else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert in_time(lambda: visits(kernel, 3, 3, together=3)) == [1] * 3
