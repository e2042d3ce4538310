"""Draw the plots and write the tables of benchmark results: pictures, and one page that needs nothing beside itself.

pytest bench --benchmark-only --benchmark-json=results.json
python -m bench.report results.json [more.json ...] -o report/

Every number comes from the files, except the one that somebody else published, `bench.report.plots.PUBLISHED`.
"""

from __future__ import annotations

import argparse
import base64
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.report.entries import Entry, Group, Run, read_run

try:
    import jinja2

    from bench.report.drawing import LABELS, THEMES, Line, label
    from bench.report.plots import baseline_of, kinds, measures, plots, speedups, svg
except ImportError as error:
    message = 'bench.report: expected Matplotlib and Jinja to be there: pip install -e ".[bench]"'
    raise ImportError(message) from error

__all__ = ["main", "write_report"]


class Row(NamedTuple):
    """A line of a table; ours stand out."""

    ours: bool
    cells: list[str]


class Table(NamedTuple):
    """A table of the page."""

    title: str
    columns: list[str]
    rows: list[Row]
    note: str = ""


def write_report(runs: Sequence[Run], output: Path) -> Path:
    """Write ``index.html`` and the pictures of `runs` into the folder `output`; returns the page's path."""
    output.mkdir(parents=True, exist_ok=True)
    pages = []
    for run in runs:
        pictures = []
        for plot in plots(run):
            uris = {}
            for theme in THEMES:
                image = svg(plot, theme)
                (output / f"{run.name}-{plot.name}-{theme.name}.svg").write_bytes(image)
                uris[theme.name] = f"data:image/svg+xml;base64,{base64.b64encode(image).decode()}"
            pictures.append({"title": plot.title, "caption": plot.caption, **uris})
        suites = dict.fromkeys(group.suite for group in run.groups)
        summaries = [_leads(run), *_averages(run)]
        pages.append(
            {
                "name": run.name,
                "device": run.device,
                "machine": [*_flat(run.machine), *([("commit", run.commit)] if run.commit else [])],
                "summaries": [table for table in summaries if table.rows and len(table.columns) > 1],
                "plots": pictures,
                "suites": [(suite, [_group_table(group) for group in run.of_suite(suite)]) for suite in suites],
            }
        )
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    page = output / "index.html"
    page.write_text(environment.from_string(template).render(runs=pages), encoding="utf-8")
    return page


def _flat(machine: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The description of the machine as rows; one row for each version."""
    for name, value in machine.items():
        if isinstance(value, Mapping):
            yield from ((key if name == "versions" else f"{name}, {key}", text) for key, text in _flat(value))
        elif value is not None:
            yield name, str(value)


# --- Numbers as text ----------------------------------------------------------------------------------------------


def _rounded(value: float) -> str:
    """Three digits or more, as many places as that takes up to two or, below 1, three."""
    places = 3 if value < 1 else 2 if value < 100 else 1 if value < 1000 else 0
    return f"{value:,.{places}f}"


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else _rounded(seconds * 1e6)


def _fraction(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


# --- Tables -------------------------------------------------------------------------------------------------------


def _call(entry: Entry) -> float | None:
    return entry.call.median


def _device(entry: Entry) -> float | None:
    return None if entry.device is None else entry.device.median


TIMES: tuple[tuple[str, Callable[[Entry], float | None]], ...] = (("calls", _call), ("kernels", _device))


def _as_fast(ours: Entry, peer: Entry, time: Callable[[Entry], float | None]) -> float | None:
    """How many times as fast as `peer` we were."""
    its, theirs = time(ours), time(peer)
    return None if its is None or theirs is None else theirs / its


def _table(title: str, columns: list[str], rows: list[Row], note: str = "") -> Table:
    """The table without columns that are empty."""
    full = [k for k in range(len(columns)) if any(row.cells[k] for row in rows)]
    return Table(title, [columns[k] for k in full], [Row(row.ours, [row.cells[k] for k in full]) for row in rows], note)


def _group_table(group: Group) -> Table:
    columns = ["name", "call, us", "device, us", "in a row, us", "host, us", "of memset", "GB/s"]
    columns += [f"{label(mine)}: times as fast, {what}" for what, _ in TIMES for mine in group.ours]
    rows = []
    for entry in group.entries:
        times = (entry.call.median, _device(entry), entry.pipelined_s, entry.host_s)
        cells = [label(entry), *map(_microseconds, times), _fraction(entry.of_memset), _rounded(entry.gb_per_s)]
        for _, time in TIMES:
            for mine in group.ours:
                ratio = None if entry.ours else _as_fast(mine, entry, time)
                cells.append("" if ratio is None else _rounded(ratio))
        rows.append(Row(entry.ours, cells))
    lacks = dict.fromkeys(entry.lacks for entry in group.entries if entry.lacks)
    return _table(group.name, columns, rows, note=f"* {'; '.join(lacks)}" if lacks else "")


def _leads(run: Run) -> Table:
    """Where each of our backends leads least: by how much, before whom, and at which shape."""
    columns = ["name", "suite", "kind", *(f"{what}: least times as fast" for what, _ in TIMES)]
    rows = []
    for suite in dict.fromkeys(group.suite for group in run.groups):
        for kind, groups in kinds(run.of_suite(suite)).items():
            for name in dict.fromkeys(entry.contender for group in groups for entry in group.ours):
                cells = [_least_lead(groups, name, time) for _, time in TIMES]
                if any(cells):
                    rows.append(Row(True, [name, suite, str(kind), *cells]))
    return _table("Where each backend leads least", columns, rows)


def _least_lead(groups: Sequence[Group], contender: str, time: Callable[[Entry], float | None]) -> str:
    leads = [
        (ratio, peer)
        for group in groups
        if (mine := group.find(contender)) is not None
        for peer in group.peers
        if (ratio := _as_fast(mine, peer, time)) is not None
    ]
    if not leads:
        return ""
    ratio, peer = min(leads, key=lambda lead: lead[0])
    return f"{_rounded(ratio)} ({label(peer)} at {peer.d:,} x {peer.n:,})"


def _averages(run: Run) -> Iterator[Table]:
    """The original experiment: speedups over d, over what it was compared with and over the original kernel."""
    for kind, groups in kinds(run.of_suite("original")).items():
        bases = [base for base in (baseline_of(groups), "original_kernel") if base and _measured(groups, base)]
        columns = ["name", *(text for base in bases for text in (f"over {LABELS[base]}: average", "least", "most"))]
        entries = {entry.contender: entry for group in groups for entry in group.entries}
        for measure in measures(groups):
            lines = [
                {line.entry.contender: line for line in speedups(groups, base, lambda entry: entry.d, measure)}
                for base in bases
            ]
            rows = [
                Row(entry.ours, [label(entry), *(cell for over in lines for cell in _average(over.get(name)))])
                for name, entry in entries.items()
            ]
            yield _table(f"The original experiment, times as fast over d: {kind}; {measure.text}", columns, rows)


def _measured(groups: Sequence[Group], contender: str) -> bool:
    return any(group.find(contender) for group in groups)


def _average(line: Line | None) -> list[str]:
    """Average, least and most; nothing for what the others are over."""
    if line is None:
        return [""] * 3
    ratios = [ratio for _, ratio in line.medians]
    return [_rounded(value) for value in (statistics.fmean(ratios), min(ratios), max(ratios))]


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
