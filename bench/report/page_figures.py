"""The figures of pages by name: tables, queries and pictures of page_figures.json, machines, and computed tables.

In page_figures.json, "queries" are named queries of `bench.report.page_markers`. A grid makes a query for each row and
column. A column has a title, a case, a call, a field, and a file if it is not that of the grid. In its case or call,
``{}`` stands for the text of the row. If "rows" is a list, each row is a shape, d x n. With "like", a grid has
the rows and columns of the grid of that name.
"tables of queries" have a query for each cell. "pictures" have a file and the name of one of its pictures.
"""

import functools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.report.page_markers import number_text, numbers, query_text, table
from bench.report.pictures import Picture, pictures
from bench.report.results import Results, Run

TABLES = json.loads(Path(__file__).with_name("page_figures.json").read_text(encoding="utf-8"))


def query(parts: tuple[str, str, str, str], results: Results, _: str) -> str:
    return query_text(results, *parts)


def grid(spec: Mapping[str, Any], results: Results, _: str) -> str:
    """A cell without results is empty; a row or a column of empty cells is left out."""
    if "like" in spec:
        spec = {**TABLES["grids"][spec["like"]], **spec}
    rows, columns = spec["rows"], spec["columns"]
    if isinstance(rows, list):
        rows = {f"({shape.replace('x', ', ')})": shape for shape in rows}

    def cell(row: str, case: str, call: str, field: str, file: str = spec["file"]) -> str:
        try:
            return query_text(results, file, case.format(row), call.format(row), field)
        except ValueError:
            return ""

    cells = {title: [cell(row, *column[1:]) for column in columns] for title, row in rows.items()}
    shown = [k for k in range(len(columns)) if any(line[k] for line in cells.values())]
    body = [[title, *(line[k] for k in shown)] for title, line in cells.items() if any(line)]
    if not body:
        raise ValueError(f"figure: expected rows of the table's cases in {spec['file']}, got none")
    return table([spec["corner"], *(columns[k][0] for k in shown)], body)


def table_of_queries(spec: Mapping[str, Any], results: Results, prefix: str) -> str:
    lines = ([title, *(query(parts, results, prefix) for parts in row)] for title, row in spec["rows"].items())
    return table(spec["head"], ([*line, *[""] * (len(spec["head"]) - len(line))] for line in lines))


def _seconds(results: Results, case: str, call: str) -> float:
    return min(numbers(results, "dask-2-cores", case, call, "us")) * 1e-6


def dask_blocks(results: Results, _: str) -> str:
    """The share of the time that threads work, if the scheduler starts blocks one after the other."""
    start = _seconds(results, "block", "distributed, 2 processes")
    block = _seconds(results, "throughput", "multisample.dask")
    blocks = {
        "blocks of 10^7 (40 MB)": block,
        "blocks of 10^8 (400 MB)": 10 * block,
        "10 s of work on each block": 10.0,
    }
    body = [
        [f"{threads:,}", *(f"{min(1, seconds / start / threads):.2g}" for seconds in blocks.values())]
        for threads in (1, 10, 100, 1000, 10_000)
    ]
    return table(["Threads", *blocks], body)


def dask_workers(results: Results, _: str) -> str:
    """The speed-up of a generation by its workers."""
    task, refit = _seconds(results, "task", "distributed"), _seconds(results, "refit 100x10000", "tell_scores")
    scorings = (100, 10_000)
    body = [
        [f"{w:,}", *(number_text((s + task + refit) / (s / w + w * task + refit)) for s in scorings)]
        for w in (1, 10, 100, 1000, 10_000)
    ]
    return table(["Workers", *(f"S = {s:,} s" for s in scorings)], body)


def dask_limit(executor: str, results: Results, _: str) -> str:
    return f"{math.sqrt(100 / _seconds(results, 'task', executor)):.0f}"


def testu01(results: Results, _: str) -> str:
    """How many of all p-values are outside of TestU01's interval, for the seeds that ran all tests."""
    columns, orders = [], TABLES["orders of testu01"]
    for battery in ("SmallCrush", "Crush", "BigCrush"):
        content = json.loads((results.folder / f"testu01-{battery.lower()}.json").read_text(encoding="utf-8"))
        runs = [run for run in content["runs"] if "incomplete" not in run["summary"]["verdict"]]
        column = [battery]
        for order in orders.values():
            found = [run["summary"] for run in runs if run["order"] == order]
            column.append(f"{sum(len(one['outside']) for one in found)} of {sum(one['statistics'] for one in found)}")
        expected = sum(run["summary"]["expected_outside"] for run in runs) / len(orders)
        columns.append([*column, number_text(expected)])
    head, *body = zip(["", *orders, "expected"], *columns, strict=True)
    return table(head, body)


def pictures_of_pages(results: Results) -> list[tuple[Run, Picture]]:
    return [(results.run(file), _picture(results, file, name)) for file, name in TABLES["pictures"].values()]


def _picture(results: Results, file: str, name: str) -> Picture:
    return next(picture for picture in pictures(results.run(file)) if picture.name == name)


def picture(file: str, name: str, results: Results, prefix: str) -> str:
    alt = _picture(results, file, name).alt.replace('"', "'").replace("µ", "u")
    path = f"{prefix}/{results.run(file).name}-{name}"
    return (
        f'<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="{path}-dark.svg">\n'
        f'  <img alt="{alt}" src="{path}-light.svg">\n</picture>'
    )


def machine(name: str, results: Results, _: str) -> str:
    found = results.run(name).machine
    titles = {"torch": "PyTorch", "cupy": "CuPy", "jax": "JAX", "numpy": "NumPy", "numba": "Numba"}
    versions = {titles[key]: ".".join(text.split(".")[:2]) for key, text in found["versions"].items() if key in titles}
    return f"{results.run(name).device}; {found['date']}; " + ", ".join(f"{k} {v}" for k, v in sorted(versions.items()))


FIGURES: dict[str, Callable[[Results, str], str]] = {
    **{name: functools.partial(query, parts) for name, parts in TABLES["queries"].items()},
    **{name: functools.partial(grid, spec) for name, spec in TABLES["grids"].items()},
    **{name: functools.partial(table_of_queries, spec) for name, spec in TABLES["tables of queries"].items()},
    **{name: functools.partial(picture, *place) for name, place in TABLES["pictures"].items()},
    "machine-gpu": functools.partial(machine, "gpu"),
    "machine-cpu": functools.partial(machine, "cpu"),
    "dask-blocks": dask_blocks,
    "dask-workers": dask_workers,
    "dask-limit": functools.partial(dask_limit, "distributed"),
    "dask-limit-processes": functools.partial(dask_limit, "processes"),
    "testu01": testu01,
}
"""Each gets the results, and the path to their folder from the page."""
