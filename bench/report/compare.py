"""List what became faster or slower between two versions, on machines whose own speed varies.

python -m bench.report.compare --old old1.json old2.json old3.json --new new1.json new2.json new3.json

Seconds of two runs cannot be compared, ratios within a run can: on a GPU the fraction of the speed of
`cudaMemsetAsync`, on a CPU how many times as fast as NumPy a contender is in its group.

A ratio has moved when its median over the runs has changed by more than the spreads of old and new together. The spread
of a side is the range of its repeated runs. A side of one run takes the other side's spread; where neither was
repeated, the spread is the range that the run's quartiles allow. Few runs may agree by chance, so every spread is at
least the median of its side's spreads. If nothing has changed and both sides have the same normal noise, the rule calls
one ratio in 10,000 changed with three runs each, one in 250 with three against one, one in 40 with two each. One run
against one gives hints, not verdicts. Changes and spreads are logarithms, so that twice and half the speed are equally
far away.

Ends with status 1 if a contender of ours has become slower, by verdict or by hint, otherwise with 0.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from bench.report.entries import CPU_REFERENCE, Quartiles, Run, read_run

Key: TypeAlias = tuple[str, str, str]
Ratios: TypeAlias = dict[Key, list[Quartiles]]


class Change(NamedTuple):
    """One ratio before and after."""

    key: Key
    ours: bool
    old: float
    new: float
    spread: float
    """Of old and new together, as a logarithm."""

    @property
    def verdict(self) -> str:
        if abs(math.log(self.new / self.old)) <= self.spread:
            return ""
        return "faster" if self.new > self.old else "slower"


def _read(runs: Iterable[Run]) -> tuple[set[Key], Ratios]:
    """The keys of our entries, and the ratios of all runs of one version."""
    ours: set[Key] = set()
    ratios: Ratios = {}
    for group in (group for run in runs for group in run.groups):
        base = group.find(*CPU_REFERENCE)
        for entry in group.entries:
            value = entry.fraction if entry.device or base is None or base is entry else base.call.over(entry.call)
            if value is not None:
                ratios.setdefault(entry.key, []).append(value)
            if entry.ours:
                ours.add(entry.key)
    return ours, ratios


def _spread(key: Key, ratios: Ratios, others: Ratios) -> float:
    """The range of repeated runs, of `ratios` or else of `others`; else what the quartiles of the one run allow."""
    for side in (ratios, others):
        medians = [value.median for value in side[key]]
        if len(medians) > 1:
            return math.log(max(medians) / min(medians))
    return math.log(ratios[key][0].high / ratios[key][0].low)


def compare(old: Sequence[Run], new: Sequence[Run]) -> list[Change]:
    """Compare the runs of one version with those of another by the rule in the module's text."""
    (_, before), (ours, after) = _read(old), _read(new)
    common = [key for key in after if key in before]
    total = dict.fromkeys(common, 0.0)
    for side, other in ((before, after), (after, before)):
        spreads = {key: _spread(key, side, other) for key in common}
        for key in common:
            total[key] += max(spreads[key], statistics.median(spreads.values()))
    return [
        Change(
            key, key in ours, *(statistics.median(v.median for v in side[key]) for side in (before, after)), total[key]
        )
        for key in common
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.report.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--old", nargs="+", type=Path, required=True, help="runs of the old version")
    parser.add_argument("--new", nargs="+", type=Path, required=True, help="runs of the new version")
    options = parser.parse_args(arguments)
    try:
        old, new = ([read_run(path) for path in paths] for paths in (options.old, options.new))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    changes = compare(old, new)
    if not changes:
        parser.error("results: expected ratios that old and new have in common, got none")
    moved = sorted((change for change in changes if change.verdict), key=lambda c: (not c.ours, c.new / c.old))
    for change in moved:
        name = ": ".join(change.key) + ("" if change.ours else " (a peer)")
        percent = 100 * (change.new / change.old - 1)
        print(f"{name}: {change.old:.4g} to {change.new:.4g}, {percent:+.1f} %, {change.verdict}")
    counts = {verdict: sum(c.ours and c.verdict == verdict for c in moved) for verdict in ("slower", "faster")}
    hint = "; hints only, from one run against one" if len(old) == len(new) == 1 else ""
    print(f"{len(changes)} ratios compared; of ours {counts['slower']} slower and {counts['faster']} faster, of peers "
          f"{sum(not change.ours for change in moved)} moved{hint}")  # fmt: skip
    return int(counts["slower"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
