"""Draw the pictures of benchmark results, and print what each shows. Or print rows of the table of machines.

pytest bench --benchmark-only --benchmark-json=results.json
python -m bench.report results.json [more.json ...] -o report/
python -m bench.report --row [results.json ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.report.entries import Run, read_run
from bench.report.row import measured, row

try:
    from bench.report.pictures import THEMES, pictures, svg
except ImportError as error:
    message = 'bench.report: expected Matplotlib to be there: pip install -e ".[bench]"'
    raise ImportError(message) from error

__all__ = ["main", "write_pictures"]


def write_pictures(run: Run, output: Path) -> list[str]:
    """Write the pictures of `run` into the folder `output`; returns a sentence on what each shows."""
    output.mkdir(parents=True, exist_ok=True)
    drawn = pictures(run)
    for picture in drawn:
        for theme in THEMES:
            (output / f"{run.name}-{picture.name}-{theme}.svg").write_bytes(svg(picture, theme))
    return [picture.sentence for picture in drawn]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", nargs="*", type=Path, help="JSON files of `pytest bench --benchmark-only`")
    parser.add_argument(
        "--row",
        action="store_true",
        help="print a row of the table of machines for each file;"
        " without files, measure this machine, and store the results in the folder",
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("report"), help="the folder to write to [report]")
    options = parser.parse_args(arguments)
    if not options.results and not options.row:
        parser.error("results: expected files, got none")
    names = [path.stem for path in options.results]
    if len(set(names)) < len(names):
        parser.error(f"results: expected files of different names, got {', '.join(names)}")
    try:
        runs = [read_run(path) for path in options.results]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if options.row:
        print(*map(row, runs or [measured(options.output / "machine.json")]), sep="\n")
        return
    for run in runs:
        print(*write_pictures(run, options.output) or ["No pictures: they need results of several shapes."], sep="\n")
