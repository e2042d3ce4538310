"""What the benchmarks write, as the report and the comparison read it: one `Run` for each file, one `Entry` for each
line of a group's table.

The files are pytest-benchmark's own; what the benchmarks add stands in `extra_info` and `multisample_machine`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["CPU_REFERENCE", "Entry", "Group", "Quartiles", "Run", "read_run"]

CPU_REFERENCE = "numpy"
"""The contender that ratios on the CPU are taken to, of the same group."""


class Quartiles(NamedTuple):
    """The median of times or ratios, and the quartiles around it."""

    low: float
    median: float
    high: float

    def over(self, other: Quartiles) -> Quartiles:
        """The ratio to `other`, and the range that both's quartiles leave it."""
        return Quartiles(self.low / other.high, self.median / other.median, self.high / other.low)


@dataclass(frozen=True)
class Entry:
    """One contender in one group: its times in seconds, and what they make of the device."""

    suite: str
    group: str
    contender: str
    ours: bool
    lacks: str | None
    d: int
    n: int
    dtype: str
    noise: str
    mode: str
    layout: str
    antithetic: bool
    bytes: int
    call: Quartiles
    """Of a call and the synchronisation after it."""
    device: Quartiles | None
    host_s: float | None
    """Of a call among many, until it returns."""
    pipelined_s: float | None
    """Of each of many calls in a row, from the first to the end of the last."""
    memset_s: float | None
    of_memset: float | None
    gb_per_s: float

    @property
    def fraction(self) -> Quartiles | None:
        """`of_memset` with the range that the quartiles leave it; of memset itself only the median is known."""
        if self.memset_s is None or self.device is None:
            return None
        return Quartiles(self.memset_s, self.memset_s, self.memset_s).over(self.device)

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells the entry from every other one of a file, and finds it again in another."""
        return self.suite, self.group, self.contender


@dataclass(frozen=True)
class Group:
    """The contenders that were measured side by side, ours first."""

    suite: str
    name: str
    entries: tuple[Entry, ...]

    @property
    def ours(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.ours]

    @property
    def peers(self) -> list[Entry]:
        return [entry for entry in self.entries if not entry.ours]

    def find(self, contender: str) -> Entry | None:
        """The entry of `contender`, if it was there."""
        return next((entry for entry in self.entries if entry.contender == contender), None)


@dataclass(frozen=True)
class Run:
    """One file of results."""

    name: str
    machine: Mapping[str, Any]
    commit: str | None
    groups: tuple[Group, ...]

    @property
    def entries(self) -> Iterable[Entry]:
        return (entry for group in self.groups for entry in group.entries)

    @property
    def device(self) -> str:
        """The processor that was measured, in words."""
        return str(self.machine.get("gpu") or self.machine.get("cpu") or "an unknown processor")

    def of_suite(self, suite: str) -> list[Group]:
        return [group for group in self.groups if group.suite == suite]


def read_run(path: Path) -> Run:
    """The results in the file `path`.

    Raises
    ------
    ValueError
        For a file that the benchmarks did not write, or with two entries for one contender of one group.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        entries = [_entry(benchmark) for benchmark in content["benchmarks"]]
        machine = dict(content["multisample_machine"])
        commit = dict(content.get("commit_info") or {})
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        found = f"no {error} in it" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path}: expected JSON of `pytest bench --benchmark-only`, got {found}") from error
    groups: dict[tuple[str, str], dict[str, Entry]] = {}
    for entry in entries:
        group = groups.setdefault((entry.suite, entry.group), {})
        if entry.contender in group:
            raise ValueError(f"{path}: expected one entry of {entry.contender!r} in group {entry.group!r}, got two")
        group[entry.contender] = entry
    return Run(
        name=path.stem,
        machine=machine,
        commit=f"{commit['id']}, with changes" if commit.get("dirty") else commit.get("id"),
        groups=tuple(
            Group(suite, name, tuple(sorted(group.values(), key=lambda entry: not entry.ours)))
            for (suite, name), group in groups.items()
        ),
    )


def _entry(benchmark: Mapping[str, Any]) -> Entry:
    info, stats = benchmark["extra_info"], benchmark["stats"]
    device = None
    if info["device_s"] is not None:
        device = Quartiles(info["device_s_low"], info["device_s"], info["device_s_high"])
    as_they_are = (
        "suite", "contender", "ours", "lacks", "d", "n", "dtype", "noise", "mode", "layout", "bytes", "host_s",
        "memset_s", "of_memset", "gb_per_s",
    )  # fmt: skip
    return Entry(
        group=benchmark["group"],
        antithetic=info.get("antithetic", False),
        pipelined_s=info.get("pipelined_s"),
        call=Quartiles(stats["q1"], stats["median"], stats["q3"]),
        device=device,
        **{name: info[name] for name in as_they_are},
    )
