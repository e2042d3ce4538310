"""The results of benchmarks and studies.

`pytest bench --benchmark-only --benchmark-json` writes a file of pytest-benchmark's: a `Run`, with an `Entry` for each
benchmark. Our suites add `extra_info` and `multisample_machine`. `reduced` is what bench/results keeps of it. A study
writes its machine, and rows of names and numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

CPU_REFERENCE = "numpy", "numpy_bare"
"""The contender of a group that the CPU's ratios are relative to: the first that the group has."""


class Quartiles(NamedTuple):
    """The median of times or ratios, and the quartiles around it."""

    low: float
    median: float
    high: float

    def over(self, other: Quartiles) -> Quartiles:
        """The ratio to `other`, and the range that the quartiles of both allow."""
        return Quartiles(self.low / other.high, self.median / other.median, self.high / other.low)


@dataclass(frozen=True)
class Entry:
    """The measurements of one contender in one group. Times are in seconds."""

    suite: str
    group: str
    contender: str
    ours: bool
    lacks: str | None
    """What it does not compute, although others of its group do."""
    d: int
    n: int
    dtype: str
    noise: str
    mode: str
    layout: str
    antithetic: bool
    operation: str
    """"sample", or what is measured beside it."""
    matrices: int
    """The number of matrices of a batch, which have d rows together."""
    bytes: int
    call: Quartiles
    """One call and the synchronisation after it."""
    device: Quartiles | None
    """Between device events."""
    host_s: float | None
    """One call among many without synchronisation, until it returns."""
    pipelined_s: float | None
    """Many calls in a row until the last has ended, divided by their number."""
    memset_s: float | None

    @property
    def seconds(self) -> float:
        """The time of the device where that was measured, else of the call."""
        return (self.device or self.call).median

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the normals."""
        return ((self.matrices,) if self.matrices > 1 else ()) + (self.d // self.matrices, self.n)

    @property
    def fraction(self) -> Quartiles | None:
        """The speed as a fraction of that of cudaMemsetAsync, whose time is known as a median only."""
        if self.memset_s is None or self.device is None:
            return None
        return Quartiles(*[self.memset_s] * 3).over(self.device)

    @property
    def key(self) -> tuple[str, str, str]:
        """Identifies the entry within a file, and across files."""
        return self.suite, self.group, self.contender


@dataclass(frozen=True)
class Group:
    """The contenders that were measured side by side, ours first."""

    suite: str
    name: str
    entries: tuple[Entry, ...]

    def find(self, *contenders: str) -> Entry | None:
        found = {entry.contender: entry for entry in self.entries}
        return next((found[name] for name in contenders if name in found), None)


@dataclass(frozen=True)
class Run:
    """One file of results."""

    name: str
    machine: Mapping[str, Any]
    groups: tuple[Group, ...]

    @property
    def device(self) -> str:
        """The name of the processor that was measured."""
        return str(self.machine.get("gpu") or self.machine.get("cpu") or "an unknown processor")


def rounded(value: Any) -> Any:
    """`value` with four digits of every number that is not whole."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write results as JSON, a line for each row."""
    parts = []
    for key, value in content.items():
        rows = ",\n".join(map(json.dumps, value)) if isinstance(value, list) else ""
        parts.append(f"{json.dumps(key)}: " + (f"[\n{rows}\n]" if rows else json.dumps(value)))
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def reduced(content: Mapping[str, Any]) -> dict[str, Any]:
    """The results of pytest-benchmark without the statistics that nothing reads: a sixth of the file."""
    benchmarks = [
        {
            "group": benchmark["group"],
            "extra_info": rounded(benchmark["extra_info"]),
            "stats": {key: rounded(benchmark["stats"][key]) for key in ("min", "q1", "median", "q3")},
        }
        for benchmark in content["benchmarks"]
    ]
    kept = {key: content[key] for key in ("commit_info", "multisample_machine") if key in content}
    return {"benchmarks": benchmarks, **kept}


def read_run(path: Path) -> Run:
    """Read the results in the file `path`.

    Raises
    ------
    ValueError
        For a file that the benchmarks did not write, or with two entries for one contender of one group.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        entries = [_entry(benchmark) for benchmark in content["benchmarks"]]
        machine = dict(content["multisample_machine"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        found = f"no {error} in it" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path}: expected JSON of `pytest bench --benchmark-only`, got {found}") from error
    groups: dict[tuple[str, str], dict[str, Entry]] = {}
    for entry in sorted(entries, key=lambda entry: not entry.ours):
        group = groups.setdefault((entry.suite, entry.group), {})
        if entry.contender in group:
            raise ValueError(f"{path}: expected one entry of {entry.contender!r} in group {entry.group!r}, got two")
        group[entry.contender] = entry
    return Run(
        name=path.stem,
        machine=machine,
        groups=tuple(Group(suite, name, tuple(group.values())) for (suite, name), group in groups.items()),
    )


def _entry(benchmark: Mapping[str, Any]) -> Entry:
    info, stats = benchmark["extra_info"], benchmark["stats"]
    defaults = {"antithetic": False, "operation": "sample", "matrices": 1, "pipelined_s": None}
    values = {**defaults, **info, "group": benchmark["group"]}
    values["call"] = Quartiles(stats["q1"], stats["median"], stats["q3"])
    device = (info["device_s_low"], info["device_s"], info["device_s_high"]) if info["device_s"] is not None else None
    values["device"] = device and Quartiles(*device)
    return Entry(**{field.name: values[field.name] for field in fields(Entry)})
