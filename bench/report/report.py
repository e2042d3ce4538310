"""Make a page of pictures and tables from benchmark results. The page needs no other file.

pytest bench --benchmark-only --benchmark-json=results.json
python -m bench.report results.json [more.json ...] -o report/
"""

from __future__ import annotations

import argparse
import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.report.entries import Entry, Group, Run, read_run

try:
    import jinja2

    from bench.report.pictures import THEMES, by_kind, by_shape, label, pictures, svg, time_text
except ImportError as error:
    message = 'bench.report: expected Matplotlib and Jinja to be there: pip install -e ".[bench]"'
    raise ImportError(message) from error

__all__ = ["main", "write_report"]

SUITES = {
    "throughput": "matrices of many shapes",
    "original": "1,024 samples, the experiment of the hand-written kernel",
    "cpu": "new arrays",
    "cpu_out": "arrays that the caller passes (out=)",
}


class Table(NamedTuple):
    """A table of the page; each row says whether it stands out."""

    title: str
    columns: list[str]
    rows: list[tuple[bool, list[str]]]


def write_report(runs: Sequence[Run], output: Path) -> Path:
    """Write ``index.html`` and the pictures of `runs` into the folder `output`; returns the page's path."""
    output.mkdir(parents=True, exist_ok=True)
    sections = []
    for run in runs:
        drawn = []
        for picture in pictures(run):
            images = {theme: svg(picture, theme) for theme in THEMES}
            for theme, image in images.items():
                (output / f"{run.name}-{picture.name}-{theme}.svg").write_bytes(image)
            data = {theme: base64.b64encode(image).decode() for theme, image in images.items()}
            drawn.append({"title": picture.title, "sentence": picture.sentence, **data})
        kinds = {
            f"{kind}: {SUITES.get(suite, suite)}": groups
            for suite in dict.fromkeys(group.suite for group in run.groups)
            for kind, groups in by_kind(group for group in run.groups if group.suite == suite).items()
        }
        sections.append({
            "run": run,
            "pictures": drawn,
            "machine": ", ".join(_machine(run.machine)),
            "versions": [("commit", run.commit or "not recorded"), *dict(run.machine.get("versions") or {}).items()],
            "summaries": [_summary(title, groups) for title, groups in kinds.items()],
            "tables": [_measurements(title, groups) for title, groups in kinds.items()],
        })  # fmt: skip
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    page = output / "index.html"
    page.write_text(template.render(sections=sections), encoding="utf-8")
    return page


def _machine(machine: Mapping[str, Any]) -> Iterator[str]:
    forms = {
        "gpu": "{}", "driver": "driver {}", "sm_clock_mhz": "{} MHz", "memory_clock_mhz": "memory {} MHz", "cpu": "{}",
        "threads": "{} threads", "date": "measured on {}",
    }  # fmt: skip
    return (form.format(machine[name]) for name, form in forms.items() if machine.get(name) is not None)


def _summary(title: str, groups: Iterable[Group]) -> Table:
    """Our time by shape, and how many times as long each of the others takes."""
    shapes = by_shape(groups)
    found = {name: entry for entries in shapes.values() for name, entry in entries.items()}
    names = sorted(found, key=lambda name: not found[name].ours)
    rows = []
    for shape, entries in shapes.items():
        ours = next((entry.seconds for entry in entries.values() if entry.ours), None)
        cells = [str(shape)]
        for entry in map(entries.get, names):
            if entry is None or entry.ours or ours is None:
                cells.append("" if entry is None else time_text(entry.seconds))
            else:
                cells.append(f"{entry.seconds / ours:.1f} x")
        rows.append((False, cells))
    return Table(title, ["(d, n)", *names], rows)


def _measurements(title: str, groups: Iterable[Group]) -> Table:
    """Every measurement of `groups`, without the columns that are empty."""
    columns = ["(d, n)", "name", "mode", "call", "device", "in a row", "host", "of memset", "GB/s"]
    entries = [entry for group in groups for entry in group.entries]
    rows = [_cells(entry) for entry in entries]
    full = [k for k, column in enumerate(zip(*rows, strict=True)) if any(column)]
    cells = [(entry.ours, [row[k] for k in full]) for entry, row in zip(entries, rows, strict=True)]
    return Table(title, [columns[k] for k in full], cells)


def _cells(entry: Entry) -> list[str]:
    times = (entry.call.median, entry.device and entry.device.median, entry.pipelined_s, entry.host_s)
    cells = [str((entry.d, entry.n)), label(entry), entry.mode, *(time_text(time) if time else "" for time in times)]
    return [*cells, f"{entry.fraction.median:.3f}" if entry.fraction else "", f"{entry.gb_per_s:,.4g}"]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", nargs="+", type=Path, help="JSON files of `pytest bench --benchmark-only`")
    parser.add_argument("-o", "--output", type=Path, default=Path("report"), help="the folder to write to [report]")
    options = parser.parse_args(arguments)
    names = [path.stem for path in options.results]
    if len(set(names)) < len(names):
        parser.error(f"results: expected files of different names, got {', '.join(names)}")
    try:
        runs = [read_run(path) for path in options.results]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(write_report(runs, options.output))
