"""The report: what can run here and what stands in the way, how fast it is, and whether all give the same bits.

Same bits everywhere is a promise about machines that we have not seen, so that everybody can check it on their own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import multisample
from multisample.backends import registry
from multisample.backends.contract import BackendStatus, HostArray

from .arrays import to_numpy

__all__ = ["add_parser", "run"]

_D, _N = 2500, 1024  # The workload of the hand-written kernel in bench/suites.
_SEED = 7
_REPEATS, _CALLS = 7, 5
_NEXT = """
Next, draw 5 samples with the means 0 and 10, and see what the examples do:
  python -c "import multisample; print(multisample.sample([0, 10], [1, 0.5], 5, seed=7))"
  python -m multisample examples"""


def add_parser(subparsers: Any) -> None:
    """Add ``report`` to the command line."""
    parser = subparsers.add_parser(
        "report",
        help="what can run here, how fast, and whether all give the same bits (the default)",
        description="Every backend, available or why not; the speed of each; whether all draw the same numbers.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 if backends give different bits, or fail, or there are none."""
    statuses = multisample.backends()
    print(f"multisample {multisample.__version__}\n")
    print(_status_table(statuses))
    names = [name for name, status in statuses.items() if status.available]
    if not names:
        print("\nNo backend is available.")
        return 1
    return _speeds_and_bits(names)


def _status_table(statuses: Mapping[str, BackendStatus]) -> str:
    rows = [("backend", "available", "version", "device")]
    rows += [(name, "yes" if s.available else "no", s.version, s.device) for name, s in statuses.items()]
    heading, *lines = _columns(rows)
    for line, (name, status) in zip(lines, statuses.items(), strict=True):
        heading += "\n" + line
        if status.reasons and registry.find(name).device_kinds == ("cuda",):
            heading += "\n    - runs on NVIDIA GPUs only"
        for reason in status.reasons:
            # A reason may end in a build log.
            heading += "\n    - " + reason.rstrip().replace("\n", "\n      ")
    return heading


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _speeds_and_bits(names: Sequence[str]) -> int:
    # float32 values that every library rounds alike, because they need no rounding.
    mu = (np.arange(_D, dtype=np.float32) - _D // 2) / np.float32(1024)
    sigma = (np.arange(_D, dtype=np.float32) % 64 + 1) / np.float32(32)
    size = 4 * _D * _N
    print(
        f"\nSpeed: each backend draws a matrix of {_D} dimensions and {_N} samples in the memory of its device."
        f"\nA time is that of one call, the median of {_REPEATS} series of {_CALLS}. GB/s counts"
        f" the {size / 1e6:.1f} MB of the matrix."
        "\nThe first run on a machine compiles for some seconds, and keeps the result on disk.\n",
        flush=True,
    )
    rows, failures = [("backend", "time", "GB/s")], []
    results: dict[str, HostArray] = {}
    for name in names:
        try:
            seconds, results[name] = _timed(name, mu, sigma)
        except Exception as error:  # Whatever a driver may raise: the others' rows are still wanted.
            failures.append(f"{name} failed: {type(error).__name__}: {error}")
        else:
            rows.append((name, f"{seconds * 1e6:.0f} us", f"{size / seconds / 1e9:.3g}"))
    print("\n".join(_columns(rows) + failures))
    if not _compare(results) or failures:
        return 1
    print(_NEXT)
    return 0


def _timed(name: str, mu: HostArray, sigma: HostArray) -> tuple[float, HostArray]:
    """Seconds of a call, and its result."""
    backend = registry.find(name)
    near_mu, near_sigma = backend.adopt(mu), backend.adopt(sigma)

    def call() -> Any:
        return multisample.sample(near_mu, near_sigma, _N, seed=_SEED, backend=name)

    result = to_numpy(call())
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        for _ in range(_CALLS):
            last = call()
        to_numpy(last[0, :4])  # Waits until a device is done.
        times.append((time.perf_counter() - start) / _CALLS)
    return statistics.median(times), result


def _compare(results: Mapping[str, HostArray]) -> bool:
    """Print whether all of `results` have the bits of the first; False if one differs, or there is none."""
    if not results:
        return False
    (first, expected), *others = results.items()
    bits = expected.view(np.uint32)
    differing = []
    for name, result in others:
        count = np.count_nonzero(result.view(np.uint32) != bits)
        if count:
            differing.append(f"{name} differs from {first} in {count} of {bits.size} numbers")
    if differing:
        answer = f"NO. {'; '.join(differing)}. This is a bug: please report it."
    elif others:
        answer = f"yes, to the last bit ({', '.join(results)})"
    else:
        answer = f"not compared, because {first} is the only backend that ran"
    print(f"\nDoes every backend draw the same numbers from the same seed? {answer}")
    return not differing
