"""List what became faster or slower between two versions, on machines whose own speed varies.

python -m bench.report.compare --old old1.json old2.json old3.json --new new1.json new2.json new3.json

Seconds of two runs cannot be compared, ratios within a run can: on a GPU the fraction of the speed of
`cudaMemsetAsync`, on a CPU how many times as fast as NumPy a contender is in its case.

A ratio has moved when its median over the runs has changed by more than the ranges of old and new together, and by more
than --least percent. Changes and ranges are logarithms, so that twice and half the speed are equally far away. One run
has no range: repeat the runs of a machine whose noise exceeds --least.

Ends with status 1 if a contender of ours has become slower, otherwise with 0.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from bench.report.results import Run, read_run


def _ratios(runs: Sequence[Run]) -> dict[tuple[bool, str], list[float]]:
    """The ratios of all runs of one version, by whether they are ours, and name."""
    found: dict[tuple[bool, str], list[float]] = {}
    for row in (row for run in runs for row in run.rows):
        if ratio := row.get("of memset") or row.get("of NumPy"):
            found.setdefault((row["ours"], f"{row['case']}: {row['call']}"), []).append(ratio)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.report.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--old", nargs="+", type=Path, required=True, help="runs of the old version")
    parser.add_argument("--new", nargs="+", type=Path, required=True, help="runs of the new version")
    parser.add_argument("--least", type=float, default=5, help="the least change in percent [5]")
    options = parser.parse_args(arguments)
    try:
        old, new = (_ratios([read_run(path) for path in paths]) for paths in (options.old, options.new))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    common = [key for key in new if key in old]
    if not common:
        parser.error("results: expected ratios that old and new have in common, got none")
    factors = {key: statistics.median(new[key]) / statistics.median(old[key]) for key in common}
    moved = {True: 0, False: 0}
    slower = 0
    for ours, name in sorted(common, key=lambda key: (not key[0], factors[key])):
        factor, sides = factors[ours, name], (old[ours, name], new[ours, name])
        noise = sum(math.log(max(side) / min(side)) for side in sides)
        if abs(math.log(factor)) > max(noise, math.log(1 + options.least / 100)):
            medians = " to ".join(f"{statistics.median(side):.4g}" for side in sides)
            verdict = "faster" if factor > 1 else "slower"
            print(f"{name}{'' if ours else ' (a peer)'}: {medians}, {100 * (factor - 1):+.1f} %, {verdict}")
            moved[ours] += 1
            slower += ours and factor < 1
    print(f"{len(common)} ratios compared; of ours {slower} slower and {moved[True] - slower} faster, of peers "
          f"{moved[False]} moved")  # fmt: skip
    return int(slower > 0)


if __name__ == "__main__":
    raise SystemExit(main())
