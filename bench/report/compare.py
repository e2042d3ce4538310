"""List what became faster or slower between two versions, on machines whose own speed varies.

python -m bench.report.compare old.json new.json
python -m bench.report.compare --old old1.json old2.json old3.json --new new1.json new2.json new3.json

Seconds of two runs cannot be compared, ratios within a run can: on a GPU the fraction of the speed of
`cudaMemsetAsync`, on a CPU how many times as fast as NumPy a contender is in its group.

A ratio has moved when its median over the runs has changed by more than the spreads of old and new together. The spread
of a side is the range of its repeated runs, from the lowest to the highest. A side of one run takes the other side's
spread; where neither was repeated, the spread is the range that the run's quartiles allow (of `cudaMemsetAsync` only
the median is known). Few runs agree at times by chance, so every spread is at least the median of its side's spreads.
Where nothing changed and noise is normal and alike, this calls one ratio in 10,000 moved with three runs each, one in
250 with three against one, one in 40 with two each. One run against one gives hints, not verdicts.
Changes and spreads are logarithms, so that twice and half the speed are equally far away.

Ends with status 1 if a contender of ours has become slower, by verdict or by hint, otherwise with 0.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from bench.report.entries import CPU_REFERENCE, Entry, Group, Quartiles, Run, read_run

__all__ = ["Comparison", "compare", "main"]

Key: TypeAlias = tuple[str, str, str]
Ratios: TypeAlias = dict[Key, list[Quartiles]]


class Change(NamedTuple):
    """One ratio before and after."""

    entry: Entry
    old: float
    new: float
    spread: float
    """Of old and new together, as a logarithm."""

    @property
    def verdict(self) -> str:
        if abs(math.log(self.new / self.old)) <= self.spread:
            return ""
        return "faster" if self.new > self.old else "slower"


class Comparison(NamedTuple):
    """What was in both, and what was not."""

    changes: list[Change]
    only_old: list[Key]
    only_new: list[Key]
    unrelated: list[Key]
    """Without a ratio, because the group has no reference."""

    def ours(self, verdict: str) -> int:
        return sum(change.entry.ours and change.verdict == verdict for change in self.changes)


def _ratio(entry: Entry, group: Group) -> Quartiles | None:
    if entry.device is not None:
        return entry.fraction
    base = group.find(CPU_REFERENCE)
    return None if base is None or base is entry else base.call.over(entry.call)


def _read(runs: Iterable[Run]) -> tuple[dict[Key, Entry], Ratios]:
    """The entries and the ratios of all runs of one version."""
    entries: dict[Key, Entry] = {}
    ratios: Ratios = {}
    for group in (group for run in runs for group in run.groups):
        for entry in group.entries:
            entries.setdefault(entry.key, entry)
            value = _ratio(entry, group)
            if value is not None:
                ratios.setdefault(entry.key, []).append(value)
    return entries, ratios


def _spread(key: Key, ratios: Ratios, others: Ratios) -> float:
    """The range of repeated runs, of `ratios` or else of `others`; else what the quartiles of the one run allow."""
    for side in (ratios, others):
        medians = [value.median for value in side[key]]
        if len(medians) > 1:
            return math.log(max(medians) / min(medians))
    return math.log(ratios[key][0].high / ratios[key][0].low)


def compare(old: Sequence[Run], new: Sequence[Run]) -> Comparison:
    """Compare the runs of one version with those of another by the rule in the module's text."""
    (entries_before, before), (entries, after) = _read(old), _read(new)
    common = [key for key in after if key in before]
    total = dict.fromkeys(common, 0.0)
    for side, other in ((before, after), (after, before)):
        spreads = {key: _spread(key, side, other) for key in common}
        for key in common:
            total[key] += max(spreads[key], statistics.median(spreads.values()))
    medians = [
        {key: statistics.median(value.median for value in side[key]) for key in common} for side in (before, after)
    ]
    return Comparison(
        [Change(entries[key], medians[0][key], medians[1][key], total[key]) for key in common],
        only_old=[key for key in entries_before if key not in entries],
        only_new=[key for key in entries if key not in entries_before],
        unrelated=[
            key for key in entries
            if key in entries_before and key not in after and key[2] != CPU_REFERENCE
        ],
    )  # fmt: skip


def _percent(logarithm: float) -> str:
    return f"{100 * math.expm1(logarithm):+.1f} %"


def _row(change: Change) -> list[str]:
    name = ": ".join(change.entry.key) + ("" if change.entry.ours else " (a peer)")
    moved = _percent(math.log(change.new / change.old))
    return [name, f"{change.old:.4g}", f"{change.new:.4g}", moved, _percent(change.spread).lstrip("+"), change.verdict]


def _print(comparison: Comparison, *, everything: bool, is_hint: bool) -> None:
    changes = comparison.changes
    shown = [change for change in changes if everything or change.verdict]
    shown.sort(key=lambda change: (not change.entry.ours, change.new / change.old))
    rows = [["", "old", "new", "change", "spread", "hint" if is_hint else "verdict"], *map(_row, shown)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows if shown else []:
        print(name.ljust(widths[0]), *map(str.rjust, cells, widths[1:]), sep="  ")
    missing = {
        "only in the old results": comparison.only_old,
        "only in the new results": comparison.only_new,
        "in both, without a ratio": comparison.unrelated,
    }
    for title, keys in missing.items():
        if keys:
            print(f"{title}:", *("  " + ": ".join(key) for key in keys), sep="\n")
    peers = sum(bool(change.verdict) and not change.entry.ours for change in changes)
    print(
        f"{len(changes)} ratios compared; of ours {comparison.ours('slower')} slower and {comparison.ours('faster')} "
        f"faster, of peers {peers} moved"
        + ("; hints only, from one run against one: pass repeated runs as --old and --new" if is_hint and shown else "")
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.report.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="*", type=Path, help="two JSON files: the old one, the new one")
    parser.add_argument("--old", nargs="+", type=Path, default=[], help="runs of the old version, instead")
    parser.add_argument("--new", nargs="+", type=Path, default=[], help="runs of the new version, instead")
    parser.add_argument("--all", action="store_true", help="also show what has not moved")
    options = parser.parse_args(arguments)
    if len(options.results) == 2 and not options.old and not options.new:
        options.old, options.new = [options.results[0]], [options.results[1]]
    elif options.results or not (options.old and options.new):
        parser.error("results: expected two files, or --old and --new with files each")
    try:
        old, new = ([read_run(path) for path in paths] for paths in (options.old, options.new))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for name, runs in (("old", old), ("new", new)):
        print(f"{name}:", ", ".join(f"{run.name} ({run.device}, {run.machine.get('date')})" for run in runs))
    comparison = compare(old, new)
    if not comparison.changes:
        parser.error("results: expected ratios that old and new have in common, got none")
    _print(comparison, everything=options.all, is_hint=len(old) == len(new) == 1)
    return int(comparison.ours("slower") > 0)


if __name__ == "__main__":
    raise SystemExit(main())
