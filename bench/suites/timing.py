"""Times of asynchronous calls: on the device, on the host, and of both together.

Three rules hold for every contender. Some results are kept alive, so that memory rotates past the cache. The device is
busy until a call has been made, so that the host's time does not add to the device's. Calls alternate with fills of as
many bytes, so that a disturbance slows both.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bench.report.entries import Quartiles
from bench.suites.cases import clamp

BUSY = 2**30  # Bytes of a fill that outlasts most calls on the host (240 us on an H200); many times the cache.
ROTATED = 2**28  # Bytes of results that are kept alive: several times the cache.
MOST_KEPT = 256
DEVICE_SECONDS = 0.04  # Total time of the repeats of one measurement on the device, with fills.
REPEATS = 11, 40  # Minimum and maximum.
PIPELINED_SECONDS = 0.008  # Total time of the calls of one pipeline.
PIPELINED_CALLS = 4, 200
PIPELINES = 5
TURNS = 7  # Of variants that are compared.

Call = Callable[[], Any]


class CudaDevice:
    """The current CUDA device, through CuPy. Fills and marks are asynchronous, and ordered with the calls.

    They use the legacy default stream, as PyTorch, CuPy, Numba and cuRAND do by default. JAX has its own streams.
    """

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
        """Free device memory that libraries keep for reuse."""
        self._cupy.get_default_memory_pool().free_all_blocks()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()

    def fill(self, size: int) -> None:
        """Fill `size` bytes of the buffer."""
        self._cupy.cuda.runtime.memsetAsync(self._buffer.ptr, 1, size, 0)

    def mark(self) -> Any:
        """A mark in the order of the device's work."""
        event = self._cupy.cuda.Event()
        event.record(self._cupy.cuda.Stream.null)
        return event

    def seconds(self, start: Any, stop: Any) -> float:
        """Seconds between two marks; waits for the second."""
        stop.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(start, stop)) / 1e3

    def wait(self) -> None:
        """Wait until the device is idle."""
        self._cupy.cuda.runtime.deviceSynchronize()


class Ring:
    """The latest results, kept alive so that the next one gets other memory. `size` is the bytes of one result."""

    def __init__(self, size: int) -> None:
        self.kept: deque[Any] = deque(maxlen=clamp(ROTATED / size if size else float("inf"), 1, MOST_KEPT))

    def warm_up(self, call: Call) -> None:
        """Allocate the memory of all results: the kept ones, and one more for the next."""
        for _ in range(self.kept.maxlen + 2 if self.kept.maxlen else 0):
            self.kept.append(call())


def quartiles(values: list[float]) -> Quartiles:
    """The quartiles of one value or more."""
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


@dataclass(frozen=True)
class Times:
    """Seconds of one call."""

    device: Quartiles
    """Time on the device alone. A host that needs longer than a fill of `BUSY` bytes adds the rest."""
    memset: float
    """Time of a fill of as many bytes."""
    host: float
    """Time on the host, while earlier calls are still running."""
    pipelined: float
    """Time per call of many consecutive calls, by the device's clock: the larger of host time and device time."""


def compared(device: CudaDevice, calls: dict[str, Call], ring: Ring) -> dict[str, float]:
    """Seconds on the device of several calls, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    with without_collection():
        for _ in range(TURNS):
            for name, call in calls.items():
                times[name].append(_calling(device, call, ring))
    return {name: statistics.median(part) for name, part in times.items()}


def measure(device: CudaDevice, call: Call, ring: Ring, size: int, wait: Callable[[Any], None] | None = None) -> Times:
    """Times of `call`, whose result has `size` bytes and is kept by the `ring`.

    A call that is not ordered with the device's marks needs `wait`, which waits for a result. Its time on the device is
    the time per call of many consecutive calls, by the host's clock. It is too long where the host takes longer.
    """
    with without_collection():
        device.wait()
        if wait is None:
            turns = [_turn(device, call, ring, size) for _ in range(_repeats(device, call, ring, size))]
            memset = statistics.median(filled for filled, _ in turns)
            times = quartiles([seconds for _, seconds in turns])
            calls = clamp(PIPELINED_SECONDS / times.median, *PIPELINED_CALLS)
            rows = [_pipeline(device, call, ring, calls) for _ in range(PIPELINES)]
        else:
            memset = statistics.median(_filling(device, size) for _ in range(REPEATS[0]))
            calls = clamp(PIPELINED_SECONDS / _pipeline(device, call, ring, 1, wait)[1], *PIPELINED_CALLS)
            rows = [_pipeline(device, call, ring, calls, wait) for _ in range(2 * PIPELINES)]
            times = quartiles([seconds for _, seconds in rows])
    return Times(
        device=times,
        memset=memset,
        host=statistics.median(host for host, _ in rows),
        pipelined=statistics.median(seconds for _, seconds in rows),
    )


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _repeats(device: CudaDevice, call: Call, ring: Ring, size: int) -> int:
    start = time.perf_counter()
    for _ in range(2):
        _turn(device, call, ring, size)
    return clamp(2 * DEVICE_SECONDS / (time.perf_counter() - start), *REPEATS)


def _turn(device: CudaDevice, call: Call, ring: Ring, size: int) -> tuple[float, float]:
    """Seconds on the device of a fill and of a call."""
    return _filling(device, size), _calling(device, call, ring)


def _filling(device: CudaDevice, size: int) -> float:
    device.fill(BUSY)
    start = device.mark()
    device.fill(size)
    return device.seconds(start, device.mark())


def _calling(device: CudaDevice, call: Call, ring: Ring) -> float:
    device.fill(BUSY)
    start = device.mark()
    ring.kept.append(call())
    return device.seconds(start, device.mark())


def _pipeline(
    device: CudaDevice, call: Call, ring: Ring, calls: int, wait: Callable[[Any], None] | None = None
) -> tuple[float, float]:
    """Seconds per call of many calls in a row, on the host, and until the last has ended."""
    if wait is None:
        device.wait()
        begin = device.mark()
    else:
        wait(ring.kept[-1])
    start = time.perf_counter()
    for _ in range(calls):
        ring.kept.append(call())
    host = time.perf_counter() - start
    if wait is None:
        return host / calls, device.seconds(begin, device.mark()) / calls
    wait(ring.kept[-1])
    return host / calls, (time.perf_counter() - start) / calls
