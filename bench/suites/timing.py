"""Times of calls that return before the device has done what they ask for: of the device, of the host, and of both.

What makes a figure honest is the same for all: results are kept for a while, so that memory rotates past the cache; the
device is busy until a call has been made, so that the host's time does not show in the device's; and each call takes
turns with a fill of as many bytes, so that what slows one slows both.
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
from typing import Any, NamedTuple, Protocol

from bench.suites.cases import clamp

__all__ = ["BUSY", "CudaDevice", "Device", "Quartiles", "Ring", "Times", "measure", "quartiles"]

BUSY = 2**30  # Bytes that take longer to write, 240 us on an H200, than it takes to make a call; many caches full.
ROTATED = 2**28  # Bytes of results that are kept: several caches full.
MOST_KEPT = 256
DEVICE_SECONDS = 0.04  # For the repeats of one measurement on the device, fills included.
REPEATS = 11, 40  # At least and at most.
PIPELINED_SECONDS = 0.008  # For the calls of one pipeline.
PIPELINED_CALLS = 4, 200
PIPELINES = 5

Call = Callable[[], Any]
Mark = Any


class Device(Protocol):
    """A device to time: fills and marks are ordered with the calls, and do not wait."""

    def reserve(self, size: int) -> None:
        """Have a buffer of at least so many bytes, to be filled."""

    def release(self) -> None:
        """Give back what libraries keep of the device's memory for results that are no more."""

    def fill(self, size: int) -> None:
        """Write so many bytes of that buffer."""

    def mark(self) -> Mark:
        """This moment of the device's."""

    def seconds(self, start: Mark, stop: Mark) -> float:
        """Between two moments; waits for the second."""

    def wait(self) -> None:
        """Until the device has done everything."""


class CudaDevice:
    """The current CUDA device, by CuPy.

    Fills and marks go to the legacy default stream, on which PyTorch, CuPy, Numba and cuRAND put their work as well
    unless told otherwise. JAX has streams of its own.
    """

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._buffer: Any = None
        self._size = 0

    def reserve(self, size: int) -> None:
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

    def mark(self) -> Mark:
        event = self._cupy.cuda.Event()
        event.record(self._cupy.cuda.Stream.null)
        return event

    def seconds(self, start: Mark, stop: Mark) -> float:
        stop.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(start, stop)) / 1e3

    def wait(self) -> None:
        self._cupy.cuda.runtime.deviceSynchronize()


class Ring:
    """The latest results, kept so that the next one gets other memory: `size` is that of one result in bytes."""

    def __init__(self, size: int) -> None:
        self.kept: deque[Any] = deque(maxlen=clamp(ROTATED / size if size else float("inf"), 1, MOST_KEPT))

    def warm_up(self, call: Call) -> None:
        """Have the memory allocated that the results will be in: one more than are kept, while the next is made."""
        for _ in range(self.kept.maxlen + 2 if self.kept.maxlen else 0):
            self.kept.append(call())


class Quartiles(NamedTuple):
    low: float
    median: float
    high: float


def quartiles(values: list[float]) -> Quartiles:
    """Of one value or more."""
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


@dataclass(frozen=True)
class Times:
    """Seconds of one call."""

    device: Quartiles
    """On the device alone."""
    memset: float
    """Of a fill of as many bytes."""
    host: float
    """On the host, while other calls are still to be done."""
    pipelined: float
    """Of each of many calls in a row, by the device's clock: whichever of host and device takes longer."""
    way: str
    """How the time on the device was taken."""


def measure(device: Device, call: Call, ring: Ring, size: int, wait: Callable[[Any], None] | None = None) -> Times:
    """Times of `call`, whose result has `size` bytes and is kept by the `ring`.

    `wait`, for a call that is not ordered with the device's marks, waits for its result: then the time on the device is
    that of each of many calls in a row, by the host's clock, which is more than that where the host takes longer.
    """
    with _without_collection():
        device.wait()
        if wait is None:
            turns = [_turn(device, call, ring, size) for _ in range(_repeats(device, call, ring, size))]
            memset, times = statistics.median(filled for filled, _ in turns), quartiles([taken for _, taken in turns])
            calls = clamp(PIPELINED_SECONDS / times.median, *PIPELINED_CALLS)
            rows = [_pipeline(device, call, ring, calls) for _ in range(PIPELINES)]
            way = "device events around one call"
        else:
            memset = statistics.median(_filling(device, size) for _ in range(REPEATS[0]))
            calls = clamp(PIPELINED_SECONDS / _waited_pipeline(call, ring, 1, wait)[1], *PIPELINED_CALLS)
            rows = [_waited_pipeline(call, ring, calls, wait) for _ in range(2 * PIPELINES)]
            times = quartiles([taken for _, taken in rows])
            way = f"the host's clock around {calls} calls"
    return Times(
        device=times,
        memset=memset,
        host=statistics.median(host for host, _ in rows),
        pipelined=statistics.median(taken for _, taken in rows),
        way=way,
    )


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _repeats(device: Device, call: Call, ring: Ring, size: int) -> int:
    start = time.perf_counter()
    for _ in range(2):
        _turn(device, call, ring, size)
    return clamp(2 * DEVICE_SECONDS / (time.perf_counter() - start), *REPEATS)


def _turn(device: Device, call: Call, ring: Ring, size: int) -> tuple[float, float]:
    """Seconds on the device of a fill and of a call."""
    return _filling(device, size), _calling(device, call, ring)


def _filling(device: Device, size: int) -> float:
    device.fill(BUSY)
    start = device.mark()
    device.fill(size)
    return device.seconds(start, device.mark())


def _calling(device: Device, call: Call, ring: Ring) -> float:
    device.fill(BUSY)
    start = device.mark()
    ring.kept.append(call())
    return device.seconds(start, device.mark())


def _pipeline(device: Device, call: Call, ring: Ring, calls: int) -> tuple[float, float]:
    """Seconds per call of many calls in a row, on the host and on the device."""
    device.wait()
    begin, start = device.mark(), time.perf_counter()
    for _ in range(calls):
        ring.kept.append(call())
    host, end = time.perf_counter() - start, device.mark()
    return host / calls, device.seconds(begin, end) / calls


def _waited_pipeline(call: Call, ring: Ring, calls: int, wait: Callable[[Any], None]) -> tuple[float, float]:
    wait(ring.kept[-1])
    start = time.perf_counter()
    for _ in range(calls):
        ring.kept.append(call())
    host = time.perf_counter() - start
    wait(ring.kept[-1])
    return host / calls, (time.perf_counter() - start) / calls
