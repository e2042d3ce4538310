"""What the studies share: calls that take turns, so that a disturbance slows all, and files of rows."""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from bench.report.entries import rounded, write
from bench.suites.cases import clamp
from bench.suites.contenders import cuda_reason
from bench.suites.machine import describe
from bench.suites.timing import BUSY, CudaDevice, without_collection

LEAST_TURNS = 3
LIMIT = 2.0  # Most seconds for the turns of a call, after LEAST_TURNS.

Call: TypeAlias = Callable[[], Any]
Row: TypeAlias = dict[str, Any]


class Turn(NamedTuple):
    """Seconds of a call in one turn: until it was done, and until it returned."""

    seconds: float
    host: float


Turns: TypeAlias = dict[str, list[Turn]]


@functools.cache
def cuda_device() -> CudaDevice:
    """The device that `on_device` uses."""
    device = CudaDevice()
    device.reserve(BUSY)
    return device


def on_host(
    calls: Mapping[str, Call],
    wait: Callable[[Any], Any] = lambda result: None,
    turns: int = 21,
    least: float = 2e-3,
    repeats: int | None = None,
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


def on_device(calls: Mapping[str, Call], turns: int = 15, row: int = 1, fills: int = 1) -> Turns:
    """Times between device events around `row` calls; `fills` keep the device busy until the calls have been made."""
    device = cuda_device()

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


def peak(call: Call) -> float:
    """Bytes that PyTorch's and CuPy's pools hand out at the peak of a call, beside what there is before it."""
    import cupy
    import torch

    pool = cupy.get_default_memory_pool()
    cuda_device().wait()
    cuda_device().release()
    torch.cuda.reset_peak_memory_stats()
    before, held = torch.cuda.memory_allocated(), pool.total_bytes()
    result = call()
    cuda_device().wait()
    del result
    return float(torch.cuda.max_memory_allocated() - before + pool.total_bytes() - held)


def _alternating(calls: Mapping[str, Callable[[], Turn]], turns: int) -> Turns:
    found: Turns = {name: [] for name in calls}
    end = time.perf_counter() + LIMIT * len(calls)
    with without_collection():
        for k in range(turns):
            if k >= LEAST_TURNS and time.perf_counter() > end:
                break
            for name, call in calls.items():
                found[name].append(call())
    return found


def rows_of(case: str, turns: Turns, base: str | None = None) -> Iterator[Row]:
    """A row for each call: medians in us, and the median of the ratios to `base` within a turn."""
    for name, found in turns.items():
        row: Row = {"case": case, "call": name}
        row["us"] = 1e6 * statistics.median(turn.seconds for turn in found)
        row["host us"] = 1e6 * statistics.median(turn.host for turn in found)
        if base is not None:
            pairs = zip(found, turns[base], strict=True)
            row["ratio"] = statistics.median(turn.seconds / other.seconds for turn, other in pairs)
        yield row


def main(text: str, parts: Mapping[str, Callable[[], Iterable[Row]]], arguments: Sequence[str] | None = None) -> None:
    """The command line of a study: run its parts, print their rows, and write them with the machine.

    By default all parts run; those with "cuda" in their names where there is a GPU.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}")
    options = parser.parse_args(arguments)
    if not set(options.parts) <= set(parts):
        parser.error(f"parts: expected names of {', '.join(parts)}, got {', '.join(options.parts)}")
    chosen = options.parts or [name for name in parts if "cuda" not in name or cuda_reason() is None]
    rows = []
    for name in chosen:
        for row in parts[name]():
            rows.append(rounded(row))
            print(*(f"{key}: {value}" for key, value in rows[-1].items()), sep="; ", flush=True)
    machine = describe(gpu=any("cuda" in name for name in chosen))
    write(options.results, {"machine": machine, "rows": rows})
