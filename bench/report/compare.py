"""List what became faster or slower between two versions, on machines whose own speed varies.

python -m bench.report.compare --old old1.json old2.json old3.json --new new1.json new2.json new3.json

Seconds of two runs cannot be compared, but ratios within a run can. On a GPU, the ratio is the speed relative to
`cudaMemsetAsync`; on a CPU, relative to NumPy in the same case.

A ratio has moved if its median over the runs has changed by more than the sum of the ranges of old and new, and by
more than --least percent. Changes and ranges are logarithms, so that twice and half the speed are equally far away. One
run has no range: repeat the runs of a machine whose noise exceeds --least.

Ends with status 1 if a contender of ours has become slower, otherwise with 0.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from bench.report.results import Run, read_runs


def _ratios(runs: Sequence[Run]) -> dict[tuple[str, bool], list[float]]:
    """The ratios of all runs of one version, by name, and whether they are ours."""
    found: dict[tuple[str, bool], list[float]] = {}
    for row in (row for run in runs for row in run.rows):
        if ratio := row.get("of memset") or row.get("of NumPy"):
            found.setdefault((f"{row['case']}: {row['call']}", row["ours"]), []).append(ratio)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.report.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--old", nargs="+", type=Path, required=True, help="runs of the old version")
    parser.add_argument("--new", nargs="+", type=Path, required=True, help="runs of the new version")
    parser.add_argument("--least", type=float, default=5, help="the least change in percent [5]")
    options = parser.parse_args(arguments)
    old, new = (_ratios(read_runs(paths, parser)) for paths in (options.old, options.new))
    common = [key for key in new if key in old]
    if not common:
        parser.error("results: expected ratios that old and new have in common, got none")
    moved = []
    for name, ours in common:
        sides = old[name, ours], new[name, ours]
        before, after = map(statistics.median, sides)
        ranges = sum(math.log(max(side) / min(side)) for side in sides)
        if abs(math.log(after / before)) > max(ranges, math.log(1 + options.least / 100)):
            peer = "" if ours else " (a peer)"
            moved.append((not ours, after / before, f"{name}{peer}: {before:.4g} to {after:.4g}"))
    for _, factor, text in sorted(moved):
        print(f"{text}, {100 * (factor - 1):+.1f} %, {'slower' if factor < 1 else 'faster'}")
    slower = sum(factor < 1 for peer, factor, _ in moved if not peer)
    faster = sum(factor > 1 for peer, factor, _ in moved if not peer)
    peers = len(moved) - slower - faster
    print(f"{len(common)} ratios compared; of ours {slower} slower and {faster} faster, of peers {peers} moved")
    return int(slower > 0)


if __name__ == "__main__":
    raise SystemExit(main())
