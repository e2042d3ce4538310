"""Draw the plots and write the tables of benchmark results: pictures, and one page that needs nothing beside itself.

pytest bench --benchmark-only --benchmark-json=results.json
python -m bench.report results.json [more.json ...] -o report/

Every number comes from the files, except the one that somebody else published, `bench.plots.PUBLISHED`.
"""

from __future__ import annotations

import argparse
import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.entries import Entry, Group, Run, read_run

try:
    import jinja2

    from bench.drawing import LABELS, THEMES, label
    from bench.plots import baseline_of, kinds, plots, speedups, svg
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
        pages.append(
            {
                "name": run.name,
                "device": run.device,
                "machine": [*_flat(run.machine), *([("commit", run.commit)] if run.commit else [])],
                "summaries": [table for table in (_leads(run), *_averages(run)) if table.rows],
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
    """What is known of the machine; versions each by itself."""
    for name, value in machine.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
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


def _group_table(group: Group) -> Table:
    on_device = any(entry.device is not None for entry in group.entries)
    times = TIMES if on_device else TIMES[:1]
    columns = ["", "call, us", *(["device, us", "host, us", "of memset"] if on_device else []), "GB/s"]
    columns += [f"{label(mine)}: times as fast, {what}" for what, _ in times for mine in group.ours]
    rows = []
    for entry in group.entries:
        cells = [label(entry), _microseconds(entry.call.median)]
        if on_device:
            cells += [_microseconds(_device(entry)), _microseconds(entry.host_s), _fraction(entry.of_memset)]
        cells.append(_rounded(entry.gb_per_s))
        for _, time in times:
            for mine in group.ours:
                ratio = None if entry.ours else _as_fast(mine, entry, time)
                cells.append("" if ratio is None else _rounded(ratio))
        rows.append(Row(entry.ours, cells))
    lacks = dict.fromkeys(entry.lacks for entry in group.entries if entry.lacks)
    return Table(group.name, columns, rows, note=f"* {'; '.join(lacks)}" if lacks else "")


def _leads(run: Run) -> Table:
    """Where each of our backends leads least: by how much, before whom, and at which shape."""
    columns = ["", "suite", "kind", *(f"{what}: least times as fast" for what, _ in TIMES)]
    rows = []
    for suite in dict.fromkeys(group.suite for group in run.groups):
        for kind, groups in kinds(run.of_suite(suite)).items():
            for name in dict.fromkeys(entry.contender for group in groups for entry in group.ours):
                cells = [_least_lead(groups, name, time) for _, time in TIMES]
                if any(cells):
                    rows.append(Row(True, [name, suite, str(kind), *cells]))
    if not any(row.cells[-1] for row in rows):  # On the CPU there is no time of kernels.
        columns, rows = columns[:-1], [Row(row.ours, row.cells[:-1]) for row in rows]
    return Table("Where each backend leads least", columns, rows)


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
        rows: dict[str, Row] = {}
        columns = [""]
        for base in (baseline_of(groups), "original_kernel"):
            lines = speedups(groups, base, lambda entry: entry.d) if base else []
            if base is None or not lines:
                continue
            columns += [f"over {LABELS[base]}: average", "least", "most"]
            for line in reversed(lines):
                row = rows.setdefault(line.entry.contender, Row(line.entry.ours, [label(line.entry)]))
                row.cells.extend(
                    [""] * (len(columns) - 3 - len(row.cells))
                )  # Where it was itself what others are over.
                ratios = [ratio for _, ratio in line.medians]
                row.cells.extend(_rounded(value) for value in (sum(ratios) / len(ratios), min(ratios), max(ratios)))
        full = [Row(row.ours, row.cells + [""] * (len(columns) - len(row.cells))) for row in rows.values()]
        yield Table(f"The original experiment, times as fast over d: {kind}", columns, full)


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


if __name__ == "__main__":
    main()
