"""Files of results: rows of numbers, and the machine that measured them.

A study writes its machine and rows. `pytest bench --benchmark-only --benchmark-json` writes a file of
pytest-benchmark's, to which our suites add `extra_info` and `multisample_machine`. bench/results keeps the output of
`reduced`. Each benchmark becomes a row with `extra_info` and these numbers:

seconds      the time of the device where that was measured, else of a call and the synchronisation after it
us           the same in microseconds
host us      one call among many without synchronisation, until it returns
queued us    many calls in a row until the last has ended, divided by their number
of memset    the speed as a fraction of that of cudaMemsetAsync over as many bytes
of NumPy     how many times as fast as NumPy in the same case
spread       the distance between the quartiles of `seconds`, over the median
"""

import argparse
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from bench.suites.cases import Case

FILES = {"gpu": "h100", "operations": "operations-h100", "original": "original-h200", "cpu": "epyc-2-cores"}
"""The results of the suites that the pages show."""

Row: TypeAlias = dict[str, Any]


class Run(NamedTuple):
    """One file of results. Rows of ours come first."""

    name: str
    machine: Mapping[str, Any]
    rows: Sequence[Row]

    @property
    def device(self) -> str:
        """The name of the processor that was measured."""
        return str(self.machine.get("gpu") or self.machine.get("cpu") or "an unknown processor")


class Results:
    """The result files of a folder, each read when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = functools.cache(lambda name: read_run(folder / f"{FILES.get(name, name)}.json"))


def read_run(path: Path) -> Run:
    """The results in a file. Raises ValueError for another file, or for two rows of one contender in one case."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if "rows" in content:
            return Run(path.stem, content["machine"], content["rows"])
        rows = sorted(map(_row, content["benchmarks"]), key=lambda row: not row.get("ours"))
        machine = content["multisample_machine"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        found = f"no {error} in it" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path}: expected JSON of `pytest bench --benchmark-only`, got {found}") from error
    by_name = {(row["case"], row["call"]): row for row in rows}
    for row in rows:
        case, call = row["case"], row["call"]
        if by_name[case, call] is not row:
            raise ValueError(f"{path}: expected one row of {call!r} in case {case!r}, got two")
        numpy = by_name.get((case, "numpy")) or by_name.get((case, "numpy_bare"))
        row["of NumPy"] = numpy and numpy["seconds"] / row["seconds"]
    return Run(path.stem, machine, rows)


def read_runs(paths: Sequence[Path], parser: argparse.ArgumentParser) -> list[Run]:
    """The runs of a command's files. An unreadable file ends the command with an error."""
    try:
        return [read_run(path) for path in paths]
    except (OSError, ValueError) as error:
        parser.error(str(error))


def _row(benchmark: Mapping[str, Any]) -> Row:
    info = benchmark["extra_info"]
    if "case" in info:
        return {**info, "seconds": benchmark["stats"]["median"]}
    case = Case(**{field.name: info[field.name] for field in fields(Case) if field.name in info})
    seconds = benchmark["stats"]["median"] if info["device_s"] is None else info["device_s"]
    stats = benchmark["stats"] if info["device_s"] is None else info
    q1, q3 = (stats.get(q, stats.get(f"device_{q}_s")) for q in ("q1", "q3"))
    times = {"us": seconds, "host us": info["host_s"], "queued us": info.get("pipelined_s")}
    return {
        **info,
        **{name: time and time * 1e6 for name, time in times.items()},
        "case": f"{info['suite']} {case.name(info['mode'])}",
        "call": info["contender"],
        "seconds": seconds,
        "spread": q1 and (q3 - q1) / seconds,
        "of memset": info["device_s"] and info["memset_s"] / seconds,
    }


def rounded(value: Any) -> Any:
    """`value` with four digits of every float."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write results as JSON, a line for each row. An interruption leaves the old file or the new one."""
    parts = []
    for key, value in content.items():
        rows = ",\n".join(map(json.dumps, value)) if isinstance(value, list) else ""
        parts.append(f"{json.dumps(key)}: " + (f"[\n{rows}\n]" if rows else json.dumps(value)))
    new = path.with_name(f"{path.name}.new")
    new.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
    new.replace(path)


def reduced(content: Mapping[str, Any]) -> dict[str, Any]:
    """The results of pytest-benchmark without the statistics that nothing reads: a sixth of the file."""
    benchmarks = [
        {
            "extra_info": rounded(benchmark["extra_info"]),
            "stats": {key: rounded(benchmark["stats"][key]) for key in ("min", "q1", "median", "q3")},
        }
        for benchmark in content["benchmarks"]
    ]
    return {"benchmarks": benchmarks, **{key: content[key] for key in ("commit_info", "multisample_machine")}}
