"""Draw the pictures of benchmark results, write the numbers of the pages, or print a machine's section of machines.md.

pytest bench --benchmark-only --benchmark-json=results.json
python -m bench.report results.json [more.json ...] -o report/    writes report/index.html and its pictures
python -m bench.report --pages                                    writes the marked places of all pages
python -m bench.report --row [results.json ...]
"""

import argparse
import html
import json
import os
from collections.abc import Sequence
from pathlib import Path

from bench.report.page_figures import FIGURES, pictures_of_pages
from bench.report.page_markers import ROOT, marked_pages, written
from bench.report.pictures import THEMES, Picture, pictures, svg
from bench.report.results import Results, Run, read_runs, reduced, write
from bench.report.row import MOST_SPREAD, measured, section, shapes

PAGE = """<!doctype html>
<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>multisample: benchmarks</title>
<style>
:root { color-scheme: light dark } img { max-width: 100% }
body { font-family: sans-serif; max-width: 50em; margin: auto; padding: 1em; background: light-dark(#fff, #131416) }
</style>
"""


def _write_picture(run: Run, picture: Picture, folder: Path) -> list[Path]:
    """Write both themes of a picture; returns the files, light first."""
    files = [folder / f"{run.name}-{picture.name}-{theme}.svg" for theme in THEMES]
    for path, theme in zip(files, THEMES, strict=True):
        path.write_bytes(svg(picture, theme))
    return files


def write_report(runs: Sequence[Run], folder: Path) -> list[str]:
    """Write the pictures of `runs` and index.html into `folder`; returns what each picture shows."""
    folder.mkdir(parents=True, exist_ok=True)
    texts, body = [], []
    for run in runs:
        body.append(f"<h1>{html.escape(f'{run.name}: {run.device}')}</h1>")
        for picture in pictures(run):
            light, dark = _write_picture(run, picture, folder)
            texts.append(picture.alt)
            body.append(
                f'<p><picture><source media="(prefers-color-scheme: dark)" srcset="{dark.name}">'
                f'<img alt="{html.escape(picture.alt)}" src="{light.name}"></picture></p>'
            )
    (folder / "index.html").write_text(PAGE + "\n".join(body), encoding="utf-8")
    return texts


def write_pages() -> None:
    """Reduce the committed results, draw the pictures that pages show, and write the marked places of all pages."""
    results = Results(ROOT / "bench" / "results")
    for path in results.folder.glob("*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        if "machine_info" in content:  # As pytest-benchmark wrote it.
            write(path, reduced(content))
    pages = pictures_of_pages(results)
    drawn = {file for run, picture in pages for file in _write_picture(run, picture, results.folder)}
    for stale in set(results.folder.glob("*.svg")) - drawn:
        stale.unlink()
    for page in marked_pages():
        text, prefix = page.read_text(encoding="utf-8"), os.path.relpath(results.folder, page.parent)
        page.write_text(written(text, results, FIGURES, prefix), encoding="utf-8")


def _print_sections(runs: Sequence[Run]) -> None:
    """Print the section of each run; exit instead if repeated calls took too different times."""
    for run in runs:
        if wide := [f"{cells[0]} {cells[-1]}" for _, cells, spread in shapes(run) if (spread or 0) > MOST_SPREAD]:
            raise SystemExit(
                f"row: {run.name}: expected a spread of at most {100 * MOST_SPREAD:.0f} %, got {', '.join(wide)}:"
                " end other programs, and measure again"
            )
        print(f"\n{section(run)}", end="")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", nargs="*", type=Path, help="JSON files of `pytest bench --benchmark-only`")
    parser.add_argument("--pages", action="store_true", help="write the numbers of the pages from bench/results")
    text = "print the section of machines.md for each file; without files, measure this machine first"
    parser.add_argument("--row", action="store_true", help=text)
    parser.add_argument("-o", "--output", type=Path, default=Path("report"), help="the folder to write to [report]")
    options = parser.parse_args(arguments)
    if options.pages:
        return write_pages()
    if not options.results and not options.row:
        parser.error("results: expected files, got none")
    names = [path.stem for path in options.results]
    if len(set(names)) < len(names):
        parser.error(f"results: expected files of different names, got {', '.join(names)}")
    runs = read_runs(options.results, parser)
    if options.row:
        return _print_sections(runs or [measured(options.output / "machine.json")])
    print(*write_report(runs, options.output) or ["No pictures: they need results of several shapes."], sep="\n")


if __name__ == "__main__":
    main()
