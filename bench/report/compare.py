"""Say what became faster or slower between two versions, on machines whose speed is not quite the same twice.

python -m bench.report.compare old.json new.json
python -m bench.report.compare --old old1.json old2.json old3.json --new new1.json new2.json new3.json

Seconds of two runs cannot be compared, ratios within a run can: on a GPU the fraction of the speed of
`cudaMemsetAsync`, on a CPU how many times as fast as NumPy a contender is in its group.

A ratio has moved when its median over the runs has changed by more than the old and the new spread together. The spread
is that of repeated runs, from the lowest to the highest. A side of one run has none of its own: the other side's stands
for it, and where neither was repeated, what the run's quartiles admit, from the lowest to the highest ratio (of
`cudaMemsetAsync` only the median is known). Few runs agree at times by chance, so no spread counts for less than the
median of its side's spreads. Where nothing changed and noise is normal and alike, that calls one ratio in 10,000 moved
with three runs each, one in 250 with three against one, one in 40 with two each.
One run against one gives hints, not verdicts.
Everything is reckoned in logarithms, so that twice as fast and half as fast are as far away.

Ends with status 1 if anything of ours has become slower, by verdict or by hint, otherwise with 0.
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


class Change(NamedTuple):
    """One ratio before and after."""

    entry: Entry
    old: float
    new: float
    spread: float
    """Of old and new together: the logarithm that the change of one that has moved exceeds."""

    @property
    def moved(self) -> bool:
        return abs(math.log(self.new / self.old)) > self.spread

    @property
    def verdict(self) -> str:
        if not self.moved:
            return ""
        return "faster" if self.new > self.old else "slower"


class Comparison(NamedTuple):
    """What was in both, and what was not."""

    changes: list[Change]
    only_old: list[Key]
    only_new: list[Key]
    unrelated: list[Key]
    """Without anything in their group to take a ratio to."""

    @property
    def regressions(self) -> list[Change]:
        return [change for change in self.changes if change.entry.ours and change.verdict == "slower"]


def ratio(entry: Entry, group: Group) -> Quartiles | None:
    """Speed of `entry` over that of what its group's ratios are to; of that itself, and without it, None."""
    if entry.device is not None:
        return entry.fraction
    base = group.find(CPU_REFERENCE)
    return None if base is None or base is entry else base.call.over(entry.call)


class Side(NamedTuple):
    """The ratios of all runs of one version."""

    entries: dict[Key, Entry]
    ratios: dict[Key, list[Quartiles]]

    @classmethod
    def of(cls, runs: Iterable[Run]) -> Side:
        side = cls({}, {})
        for run in runs:
            for group in run.groups:
                for entry in group.entries:
                    side.entries.setdefault(entry.key, entry)
                    value = ratio(entry, group)
                    if value is not None:
                        side.ratios.setdefault(entry.key, []).append(value)
        return side

    def median(self, key: Key) -> float:
        return statistics.median(value.median for value in self.ratios[key])

    def measured(self, key: Key) -> float | None:
        """The range of repeated runs."""
        medians = [value.median for value in self.ratios[key]]
        return math.log(max(medians) / min(medians)) if len(medians) > 1 else None

    def admitted(self, key: Key) -> float:
        """The range that the quartiles of a single run leave."""
        (value,) = self.ratios[key]
        return math.log(value.high / value.low)


def compare(old: Sequence[Run], new: Sequence[Run]) -> Comparison:
    """Compare the runs of one version with those of another; see the module's text for the rule."""
    before, after = Side.of(old), Side.of(new)
    common = [key for key in after.ratios if key in before.ratios]
    spreads: list[dict[Key, float]] = []
    for side, other in ((before, after), (after, before)):
        spread = {}
        for key in common:
            own, others = side.measured(key), other.measured(key)
            spread[key] = own if own is not None else others if others is not None else side.admitted(key)
        typical = statistics.median(spread.values()) if spread else 0.0
        spreads.append({key: max(value, typical) for key, value in spread.items()})
    changes = [
        Change(after.entries[key], before.median(key), after.median(key), spreads[0][key] + spreads[1][key])
        for key in common
    ]
    unrelated = [
        key for key, entry in after.entries.items()
        if key not in after.ratios and key in before.entries and not _is_reference(entry)
    ]  # fmt: skip
    return Comparison(
        changes,
        only_old=[key for key in before.entries if key not in after.entries],
        only_new=[key for key in after.entries if key not in before.entries],
        unrelated=unrelated,
    )


def _is_reference(entry: Entry) -> bool:
    return entry.device is None and entry.contender == CPU_REFERENCE


# --- The command line ---------------------------------------------------------------------------------------------


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text in columns, of which the first is the widest and stands on the left."""
    widths = [max(len(line[k]) for line in (columns, *rows)) for k in range(len(columns))]
    return "\n".join(
        "  ".join(f"{cell:{'<' if k == 0 else '>'}{widths[k]}}" for k, cell in enumerate(line)).rstrip()
        for line in (columns, *rows)
    )


def _percent(logarithm: float) -> str:
    return f"{100 * math.expm1(logarithm):+.1f} %"


def _row(change: Change) -> list[str]:
    entry = change.entry
    name = f"{entry.suite}: {entry.group}: {entry.contender}" + ("" if entry.ours else " (a peer)")
    moved = _percent(math.log(change.new / change.old))
    return [name, f"{change.old:.4g}", f"{change.new:.4g}", moved, _percent(change.spread).lstrip("+"), change.verdict]


def _print(comparison: Comparison, *, everything: bool, is_hint: bool) -> None:
    shown = [change for change in comparison.changes if everything or change.moved]
    if shown:
        shown.sort(key=lambda change: (not change.entry.ours, change.new / change.old))
        columns = ["", "old", "new", "change", "spread", "hint" if is_hint else "verdict"]
        print(table(columns, [_row(change) for change in shown]))
    missing = (
        ("only in the old results", comparison.only_old),
        ("only in the new results", comparison.only_new),
        ("in both, without a ratio", comparison.unrelated),
    )
    for title, keys in missing:
        if keys:
            print(f"{title}:", *("  " + ": ".join(key) for key in keys), sep="\n")
    moved = [change for change in comparison.changes if change.moved]
    faster = sum(change.entry.ours and change.verdict == "faster" for change in moved)
    print(
        f"{len(comparison.changes)} ratios compared; of ours {len(comparison.regressions)} slower and {faster} faster, "
        f"of peers {sum(not change.entry.ours for change in moved)} moved"
        + ("; hints only, from one run against one: pass repeated runs as --old and --new" if is_hint and moved else "")
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.report.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", nargs="*", type=Path, help="two JSON files: the old one, the new one")
    parser.add_argument("--old", nargs="+", type=Path, default=[], help="runs of the old version, instead")
    parser.add_argument("--new", nargs="+", type=Path, default=[], help="runs of the new version, instead")
    parser.add_argument("--all", action="store_true", help="also show what has not moved")
    options = parser.parse_args(arguments)
    two, lists = len(options.results) == 2, bool(options.old and options.new)
    if two and not options.old and not options.new:
        options.old, options.new = [options.results[0]], [options.results[1]]
    elif options.results or not lists:
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
    return int(bool(comparison.regressions))


if __name__ == "__main__":
    raise SystemExit(main())
