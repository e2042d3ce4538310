"""Times of calls that take turns: on the device, on the host, and of both together.

Calls alternate, so that a disturbance slows all. On a GPU, a memset of the result's size takes a turn too. Some
results are kept alive, so that new results miss the cache. Before each call, an untimed memset keeps the device busy
while the host launches the call, so that the host's time does not add to the device's.
"""

import functools
import gc
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from bench.suites.cases import clamp

BUSY = 2**30  # Bytes of the untimed memset. It takes 240 us on an H200, longer than the host needs for most calls.
ROTATED = 2**28  # Bytes of results that are kept alive: several times the cache.
MOST_KEPT = 256
LEAST_TURNS = 3
LIMIT = 2.0  # Seconds for each call, after which no round of turns begins if there were LEAST_TURNS.
DEVICE_TURNS = 40
PIPELINED_SECONDS = 0.008  # Total time of the calls of one pipeline.
PIPELINED_CALLS = 4, 200
PIPELINES = 5

Call: TypeAlias = Callable[[], Any]


class Turn(NamedTuple):
    seconds: float  # Until a call was done.
    host: float  # Until it returned.


Turns: TypeAlias = dict[str, list[Turn]]


def medians(turns: Turns) -> dict[str, float]:
    return {name: statistics.median(turn.seconds for turn in found) for name, found in turns.items()}


class CudaDevice:
    """The current CUDA device, through CuPy. Fills and marks use the legacy default stream, as all calls but JAX's."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._buffer: Any = None
        self._size = 0

    def reserve(self, size: int) -> None:
        """Allocate a buffer of at least `size` bytes for fills."""
        if size > self._size:
            self._buffer = None
            self._buffer = self._cupy.cuda.alloc(size)
            self._size = size

    def release(self) -> None:
        self._cupy.get_default_memory_pool().free_all_blocks()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()

    def fill(self, size: int) -> None:
        self._cupy.cuda.runtime.memsetAsync(self._buffer.ptr, 1, size, 0)

    def mark(self) -> Any:
        event = self._cupy.cuda.Event()
        event.record(self._cupy.cuda.Stream.null)
        return event

    def seconds(self, start: Any, stop: Any) -> float:
        """Seconds between two marks; waits for the second."""
        stop.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(start, stop)) / 1e3

    def wait(self, result: Any = None) -> None:
        self._cupy.cuda.runtime.deviceSynchronize()


@functools.cache
def cuda_device() -> CudaDevice:
    device = CudaDevice()
    device.reserve(BUSY)
    return device


class Ring:
    """The latest results, of `size` bytes each, kept alive so that the next one gets other memory."""

    def __init__(self, size: int) -> None:
        self.kept: deque[Any] = deque(maxlen=clamp(ROTATED / size if size else float("inf"), 1, MOST_KEPT))

    def keeping(self, call: Call) -> Call:
        def kept() -> Any:
            self.kept.append(call())
            return self.kept[-1]

        return kept

    def warm_up(self, call: Call) -> None:
        """Call until all kept results and one more have memory, and the next call reuses freed memory."""
        for _ in range((self.kept.maxlen or 0) + 2):
            call()


def on_host(
    calls: Mapping[str, Call], wait: Any = lambda result: None, turns: int = 21, least: float = 2e-3, repeats: int = 0
) -> Turns:
    """Times by the host's clock. A turn has `repeats` calls; by default, as many as take `least` seconds.

    `wait` gets the last result before the clock is read.
    """

    def turn(call: Call, count: int) -> Turn:
        start = time.perf_counter()
        for _ in range(count):
            result = call()
        host = time.perf_counter() - start
        wait(result)
        return Turn((time.perf_counter() - start) / count, host / count)

    for call in calls.values():
        turn(call, 1)  # Compiles.
    counts = {name: repeats or clamp(least / turn(call, 1).seconds, 1, 5000) for name, call in calls.items()}
    return _alternating({name: functools.partial(turn, call, counts[name]) for name, call in calls.items()}, turns)


def on_device(
    calls: Mapping[str, Call], turns: int = 15, row: int = 1, fills: int = 1, device: CudaDevice | None = None
) -> Turns:
    """Times between device events around `row` calls; `fills` keep the device busy until the calls have been made.

    If the host takes longer than the fills, the times include the difference.
    """
    device = device or cuda_device()

    def turn(call: Call) -> Turn:
        for _ in range(fills):
            device.fill(BUSY)
        first, start = device.mark(), time.perf_counter()
        for _ in range(row):
            call()
        host, last = time.perf_counter() - start, device.mark()
        return Turn(device.seconds(first, last) / row, host / row)

    for call in calls.values():
        turn(call)  # Compiles.
    device.wait()
    return _alternating({name: functools.partial(turn, call) for name, call in calls.items()}, turns)


def _alternating(calls: Mapping[str, Callable[[], Turn]], turns: int) -> Turns:
    found: Turns = {name: [] for name in calls}
    end = time.perf_counter() + LIMIT * len(calls)
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for k in range(turns):
            if k >= LEAST_TURNS and time.perf_counter() > end:
                break
            for name, call in calls.items():
                found[name].append(call())
    finally:
        if enabled:
            gc.enable()
    return found


class Times(NamedTuple):
    """Median seconds of one call."""

    device: float  # Time on the device alone.
    memset: float  # Time of a fill of as many bytes.
    host: float  # Time on the host, while earlier calls are still running.
    pipelined: float  # Time per call of many consecutive calls: the larger of host time and device time.
    device_q1: float  # The quartiles of the times on the device.
    device_q3: float


def measure(device: CudaDevice, call: Call, size: int, wait: Callable[[Any], None] | None = None) -> Times:
    """Times of `call`, whose result has `size` bytes.

    A call that is not ordered with the device's marks needs `wait`, which waits for a result. Its time on the device is
    the time per call of many consecutive calls, by the host's clock. If the host is slower, that is the host's time.
    """
    timed = {"memset": lambda: device.fill(size)} | ({"call": call} if wait is None else {})
    turns = on_device(timed, DEVICE_TURNS, device=device)
    seconds = medians(turns)
    if wait is None:
        row = clamp(PIPELINED_SECONDS / seconds["call"], *PIPELINED_CALLS)
        pipelines = on_device({"call": call}, PIPELINES, row, fills=0, device=device)
    else:
        pipelines = on_host({"call": call}, wait, 2 * PIPELINES, PIPELINED_SECONDS)
    q1, device, q3 = statistics.quantiles(turn.seconds for turn in turns.get("call", pipelines["call"]))
    host = statistics.median(turn.host for turn in pipelines["call"])
    return Times(device, seconds["memset"], host, medians(pipelines)["call"], q1, q3)
