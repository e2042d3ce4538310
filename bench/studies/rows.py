"""What the studies share: rows of calls that took turns, and the command line that writes them."""

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from bench.report.results import Row, rounded, write
from bench.suites.contenders import cuda_reason
from bench.suites.machine import describe
from bench.suites.timing import Call, Ring, Turns, cuda_device, medians, on_device, on_host

__all__ = [
    "Call", "Ring", "Row", "Rows", "Turns", "cuda_device", "cuda_vectors", "main", "medians", "on_device",
    "on_host", "peak", "rows_of",
]  # fmt: skip
Rows: TypeAlias = Iterator[Row]  # What a part of a study yields.


def cuda_vectors(d: int) -> list[Any]:
    import torch

    return [torch.linspace(low, high, d, device="cuda") for low, high in ((-1, 1), (0.5, 2))]


def peak(call: Call) -> float:
    """Bytes that a call adds to PyTorch's allocated peak and to CuPy's pool."""
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


def rows_of(case: str, turns: Turns, base: str | None = None, of: str = "seconds") -> Rows:
    """A row for each call: medians in us, and the median over turns of the ratio of seconds, or of host, to `base`."""
    for name, found in turns.items():
        seconds, host = (1e6 * statistics.median(times) for times in zip(*found, strict=True))
        row: Row = {"case": case, "call": name, "us": seconds, "host us": host}
        if base is not None:
            pairs = zip(found, turns[base], strict=True)
            row["ratio"] = statistics.median(getattr(turn, of) / getattr(other, of) for turn, other in pairs)
        yield row


def main(text: str, parts: Mapping[str, Callable[[], Iterable[Row]]], arguments: Sequence[str] | None = None) -> None:
    """The command line of a study: run its parts, print their rows, and write them with the machine, even if one fails.

    By default all parts run; those with "cuda" in their names where there is a GPU.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}")
    options = parser.parse_args(arguments)
    if not set(options.parts) <= set(parts):
        parser.error(f"parts: expected names of {', '.join(parts)}, got {', '.join(options.parts)}")
    chosen = options.parts or [name for name in parts if "cuda" not in name or cuda_reason() is None]
    rows: list[Row] = []
    try:
        for row in itertools.chain.from_iterable(parts[name]() for name in chosen):
            rows.append(rounded(row))
            print(*(f"{key}: {value}" for key, value in rows[-1].items()), sep="; ", flush=True)
    finally:
        if rows:
            machine = describe(gpu=any("cuda" in name for name in chosen))
            write(options.results, {"machine": machine, "rows": rows})
