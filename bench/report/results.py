"""Numbers of the committed results, by queries, and their text.

A query has four parts: FILE, CASE, CALL and FIELD. FILE is a file of bench/results, or a name of FILES. CASE and CALL
select its rows, with ``*`` for any text and ``;`` between several patterns. FIELD is a number of a row, or
``FIELD over OTHER``: its ratio to that of another call in the same case. ``best FIELD`` is the lowest of the matching
calls. Fields that end in "us" are times, and get their unit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from bench.report.entries import Entry, Group, Run, read_run

FILES = {"gpu": "h200", "original": "original-h200", "cpu": "epyc-2-cores"}
"""The results of the suites that the pages show."""

Row = Mapping[str, Any]


class Results:
    """The result files of a folder, each read when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._contents: dict[str, Any] = {}

    @cached_property
    def runs(self) -> list[Run]:
        """The files of our suites."""
        names = [path.stem for path in sorted(self.folder.glob("*.json"))]
        of_suites = [
            name for name in names if "suite" in self.content(name).get("benchmarks", [{}])[0].get("extra_info", ())
        ]
        return [read_run(self.folder / f"{name}.json") for name in of_suites]

    def run(self, name: str) -> Run:
        for run in self.runs:
            if run.name == FILES.get(name, name):
                return run
        raise ValueError(f"{name}: expected {FILES.get(name, name)}.json with benchmarks of the suites, got none")

    def content(self, name: str) -> Any:
        name = FILES.get(name, name)
        if name not in self._contents:
            self._contents[name] = json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
        return self._contents[name]

    def rows(self, name: str) -> Sequence[Row]:
        """The rows of a study. Those of benchmarks are made from the entries, or are in `extra_info`."""
        content = self.content(name)
        if "rows" not in content and "suite" in content["benchmarks"][0]["extra_info"]:
            content["rows"] = [_row(group, entry) for group in self.run(name).groups for entry in group.entries]
        elif "rows" not in content:
            content["rows"] = [benchmark["extra_info"] for benchmark in content["benchmarks"]]
        rows: Sequence[Row] = content["rows"]
        return rows

    def numbers(self, file: str, case: str, call: str, field: str) -> list[float]:
        """The numbers of a query.

        Raises
        ------
        ValueError
            If there is none.
        """
        field, _, other = field.partition(" over ")
        best, field = field.startswith("best "), field.removeprefix("best ")
        cases: dict[str, tuple[list[float], list[float]]] = {}
        for row in self.rows(file):
            if _matches(row["case"], case) and row.get(field) is not None:
                above, below = cases.setdefault(row["case"], ([], []))
                above += [row[field]] if _matches(row["call"], call) else []
                below += [row[field]] if other and _matches(row["call"], other) else []
        found = []
        for above, below in cases.values():
            if above and (below or not other):
                chosen = [min(above)] if best else above
                found += [value / min(below) if other else value for value in chosen]
        if not found:
            raise ValueError(f"figure: expected rows for {file} | {case} | {call} | {field}, got none")
        return found


def _row(group: Group, entry: Entry) -> Row:
    usual = ("float32", "independent", "dn", "sample", "fill")
    unusual = [word for word in (entry.dtype, entry.noise, entry.layout, entry.operation) if word not in usual]
    shape = "x".join(map(str, entry.shape))
    words = [entry.suite, shape, *unusual, *(["antithetic"] if entry.antithetic else []), entry.mode]
    times = {"us": entry.seconds, "host us": entry.host_s, "queued us": entry.pipelined_s}
    numbers = {name: seconds and seconds * 1e6 for name, seconds in times.items()}
    fraction = entry.fraction
    return {"case": " ".join(words), "call": entry.contender, **numbers, "of memset": fraction and fraction.median}


def _matches(text: str, patterns: str) -> bool:
    return any(fnmatchcase(text, pattern.strip()) for pattern in patterns.split(";"))


def number_text(value: float) -> str:
    """`value` with as many digits as a reader uses."""
    digits = 2 if value < 1.995 else 1 if value < 9.95 else 0
    return f"{value:,.{digits}f}" if value else "0"


def time_text(us: float) -> str:
    """A time of three digits at most, and its unit."""
    value, unit = (us, "us") if us < 1e4 else (us / 1e3, "ms") if us < 1e7 else (us / 1e6, "s")
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def text_of(values: Iterable[float], field: str) -> str:
    """One number, or the range of several."""
    show = time_text if field.endswith("us") and not {"over", "per"} & {*field.split()} else number_text
    low, *_, high = [show(value) for value in sorted(values)] * 2
    unit = f" {high.rpartition(' ')[2]}"
    return low if low == high else f"{low.removesuffix(unit)} to {high}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
