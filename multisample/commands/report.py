"""The `report` command: the status and speed of each backend, and whether all backends give the same bits.

The promise of equal bits covers machines that we cannot test, so everybody can check it on theirs.
"""

import argparse
import statistics
import timeit
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import multisample
from multisample.backends import registry
from multisample.backends.contract import BackendStatus, HostArray
from multisample.backends.native import library_cache

from .arrays import to_numpy

_D, _N = 2500, 1024
_SEED = 7
_REPEATS, _CALLS = 7, 5
_NEXT = """
Next, draw 5 samples with the means 0 and 10, and see what the examples do:
  python -c "import multisample; print(multisample.sample([0, 10], [1, 0.5], 5, seed=7))"
  python -m multisample examples"""


def add_parser(subparsers: Any) -> Any:
    """Add ``report`` to the command line."""
    return subparsers.add_parser(
        "report",
        help="list the backends, their speed, and whether all give the same bits (the default)",
        description="List the status and the speed of each backend, and check that all draw the same numbers.",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report; returns 1 if backends give different bits or fail, or if no backend is available."""
    statuses = multisample.list_backends()
    print(f"multisample {multisample.__version__}\n")
    print(_status_table(statuses))
    names = [name for name, status in statuses.items() if status.available]
    if "torch_ext" in names and not library_cache.cuda_reasons():
        units, of, seconds = library_cache.compiled()
        print(f"\ntorch_ext: {units} of {of} kinds of kernels for CUDA are compiled.")
        if seconds:
            print("A call compiles the kind that it needs.")
            print(f"  python -m multisample build torch_ext    # compiles all, about {seconds:.0f} s")
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
            # A reason may end in a build log, which has several lines.
            heading += "\n    - " + reason.rstrip().replace("\n", "\n      ")
    return heading


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _speeds_and_bits(names: Sequence[str]) -> int:
    # Values that are exact in float32, so that no library rounds them.
    mu = (np.arange(_D, dtype=np.float32) - _D // 2) / np.float32(1024)
    sigma = (np.arange(_D, dtype=np.float32) % 64 + 1) / np.float32(32)
    size = 4 * _D * _N
    print(
        f"\nSpeed: each backend draws a matrix of {_D} dimensions and {_N} samples in the memory of its device."
        f"\nTime is per call: the median of {_REPEATS} series of {_CALLS} calls. GB/s counts"
        f" the {size / 1e6:.1f} MB of the matrix."
        "\nThe first run on a machine compiles for up to a minute, and caches the result on disk.\n",
        flush=True,
    )
    rows, failures = [("backend", "time", "GB/s")], []
    results: dict[str, HostArray] = {}
    for name in names:
        try:
            seconds, results[name] = _timed(name, mu, sigma)
        except Exception as error:  # A driver may raise anything; report the other backends anyway.
            failures.append(f"{name} failed: {type(error).__name__}: {error}")
        else:
            rows.append((name, f"{seconds * 1e6:.0f} us", f"{size / seconds / 1e9:.3g}"))
    print("\n".join(_columns(rows) + failures))
    if not _compare(results) or failures:
        return 1
    print(_NEXT)
    return 0


def _timed(name: str, mu: HostArray, sigma: HostArray) -> tuple[float, HostArray]:
    """Median seconds of a call, and its result."""
    backend = registry.find(name)
    own_mu, own_sigma = backend.adopt(mu), backend.adopt(sigma)

    def call() -> Any:
        return multisample.sample(own_mu, own_sigma, _N, seed=_SEED, backend=name)

    def series() -> None:
        for _ in range(_CALLS):
            last = call()
        to_numpy(last[0, :4])  # Waits for the device.

    result = to_numpy(call())
    return statistics.median(timeit.repeat(series, number=1, repeat=_REPEATS)) / _CALLS, result


def _compare(results: Mapping[str, HostArray]) -> bool:
    """Print whether all `results` have equal bits; False if one differs or `results` is empty."""
    if not results:
        return False
    (first, expected), *rest = results.items()
    bits = expected.view(np.uint32)
    differing = []
    for name, result in rest:
        count = np.count_nonzero(result.view(np.uint32) != bits)
        if count:
            differing.append(f"{name} differs from {first} in {count} of {bits.size} numbers")
    if differing:
        answer = f"NO. {'; '.join(differing)}. This is a bug: please report it."
    elif rest:
        answer = f"yes, to the last bit ({', '.join(results)})"
    else:
        answer = f"not compared, because {first} is the only backend that ran"
    print(f"\nDoes every backend draw the same numbers from the same seed? {answer}")
    return not differing
