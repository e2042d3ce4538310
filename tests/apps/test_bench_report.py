"""Pictures, pages and rows have the numbers of the result files; the comparison names what became slower, not noise."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import DATA, ROOT

from bench.report import __main__ as report
from bench.report import compare, row
from bench.report.page_figures import FIGURES, pictures_of_pages
from bench.report.page_numbers import marked_pages, written
from bench.report.pictures import pictures
from bench.report.results import Results, read_run, reduced, write

Content = dict[str, Any]

COMMITTED = Results(ROOT / "bench" / "results")
OF_SUITES = [path for path in sorted(COMMITTED.folder.glob("*.json")) if '"suite"' in path.read_text(encoding="utf-8")]


def content(kind: str) -> Content:
    """Results that were made up: at (1000, 1024), memset takes 2.1 us and torch_ext 3 us, or 2.25 us by fast_math."""
    found: Content = json.loads((DATA / f"bench_{kind}.json").read_text(encoding="utf-8"))
    return found


def find(results: Content, contender: str, **info: Any) -> Content:
    """The first benchmark of `contender` with such `info`."""
    wanted = {"contender": contender, **info}.items()
    found: Content = next(each for each in results["benchmarks"] if wanted <= each["extra_info"].items())
    return found


def slow_down(one: Content, factor: float) -> None:
    """Multiply all times of `one` by `factor`, except the memset's."""
    info = one["extra_info"]
    for place, keys in ((one["stats"], ("q1", "median", "q3")), (info, ("device_s", "device_s_low", "device_s_high"))):
        place.update({key: place[key] * factor for key in keys if place[key] is not None})


def saved(path: Path, results: Content) -> Path:
    path.write_text(json.dumps(results), encoding="utf-8")
    return path


def test_pictures_have_the_numbers_of_the_file(tmp_path: Path) -> None:
    largest, memory, calls, host = pictures(read_run(DATA / "bench_gpu.json"))
    # 262.144 times 3 us, and times 9 us. In a row, a call takes max(3 d / 1000, 6) us.
    assert "portable numbers 786 µs" in largest.alt and "torch.compile of mu + sigma * randn 2.36 ms" in largest.alt
    assert "times as long as 786 µs" in largest.subtitle and "1,074 MB" in largest.subtitle
    assert "portable numbers 70% to 70%" in memory.alt and "fast_math 93% to" in memory.alt
    assert "portable numbers 6 µs to 15 µs" in calls.alt
    assert "multisample for PyTorch, portable numbers 6 µs; multisample for CuPy, portable numbers 7 µs" in host.alt
    # Ours take 1 us plus 0.5 ns a normal, NumPy's 1 us plus 7 ns.
    found = pictures(read_run(DATA / "bench_cpu.json"))
    assert "portable numbers 1.6 to 14.0" in found[1].alt
    one_shape = content("gpu")
    one_shape["benchmarks"] = [each for each in one_shape["benchmarks"] if each["extra_info"]["d"] == 1000]
    assert [each.name for each in pictures(read_run(saved(tmp_path / "one.json", one_shape)))] == ["host"]


def test_the_report_has_an_index_of_all_pictures_for_light_and_dark(tmp_path: Path, capsys: Any) -> None:
    results = content("cpu")
    for each in results["benchmarks"]:
        each["extra_info"]["contender"] = each["extra_info"]["contender"].replace("torch_randn", "<script>$x^")
        each["extra_info"]["ours"] |= each["extra_info"]["contender"].startswith("<")
    report.main([str(saved(tmp_path / "run.json", results)), "-o", str(tmp_path / "out")])
    index = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    drawn = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "out").glob("*.svg")}
    assert sorted(name.rpartition("-")[2] for name in drawn) == ["dark.svg"] * 2 + ["light.svg"] * 2
    assert all(index.count(f'"{name}"') == 1 for name in drawn) and "prefers-color-scheme: dark" in index
    assert all(text in index.replace("&lt;", "<").replace("&gt;", ">") for text in capsys.readouterr().out.splitlines())
    assert not any("<script" in text or "url(http" in text for text in [index, *drawn.values()])
    assert any("&lt;script&gt;$x^" in image for image in drawn.values())


@pytest.mark.parametrize("page", list(marked_pages()), ids=lambda page: "-".join(page.relative_to(ROOT).parts))
def test_pages_have_the_numbers_of_the_results(page: Path) -> None:
    text, prefix = page.read_text(encoding="utf-8"), os.path.relpath(COMMITTED.folder, page.parent)
    assert written(text, COMMITTED, FIGURES, prefix) == text, "python -m bench.report --pages writes the page"
    assert all((page.parent / path).exists() for path in re.findall(r'(?:src|srcset)="([^"]+)"', text))


def test_results_are_small_and_have_the_pictures_of_pages_only() -> None:
    shown = pictures_of_pages(COMMITTED)
    names = {f"{run.name}-{each.name}-{theme}.svg" for run, each in shown for theme in report.THEMES}
    assert {path.name for path in COMMITTED.folder.glob("*.svg")} == names
    assert sum(path.stat().st_size for path in COMMITTED.folder.iterdir()) <= 2.5e6


def test_places_are_written_from_the_rows(tmp_path: Path) -> None:
    write(tmp_path / "run.json", reduced(content("gpu")))
    assert "rounds" not in (tmp_path / "run.json").read_text(encoding="utf-8")
    rows = [{"case": "a", "call": "x", "us": 10.04}, {"case": "a", "call": "y", "us": 25_000.0},
            {"case": "b", "call": "x", "us": 4.0}, {"case": "b", "call": "y", "us": 8.0}]  # fmt: skip
    write(tmp_path / "study.json", {"machine": {}, "rows": rows})
    results = Results(tmp_path)

    def place(name: str) -> str:
        page = written(f"It takes <!-- figure: {name} -->?<!-- end -->.", results, FIGURES, ".")
        return re.sub("<!--.*?-->", "", page)

    for name, text in {
        "study | a | x | us": "10 us",
        "study | * | y | us": "8 us to 25 ms",
        "study | b | x;y | us": "4 to 8 us",
        "study | b | y | us over x": "2.0",
        "study | * | * | best us over y": "0.00 to 0.50",
        "run | throughput 1000x1024 portable | torch_* | best us over torch_ext": "1.00",
        "run | throughput 1000x1024 fast_math | torch_compile | us over torch_ext": "4.0",
        "run | throughput 1000x1024 portable | curand_host | of memset": "0.42",
    }.items():
        assert place(name) == f"It takes {text}."
    table = written("<!-- figure: t --><!-- end -->", results, {"t": lambda results, prefix: "| a |\n|---|"}, ".")
    assert table == "<!-- figure: t -->\n\n| a |\n|---|\n\n<!-- end -->"
    for name, message in (("study | c | x | us", "expected rows for study"), ("other", "or one of")):
        with pytest.raises(ValueError, match=message):
            place(name)
    with pytest.raises(ValueError, match="expected a word before the marker"):
        written("<!-- figure: study | a | x | us -->1<!-- end --> long", results, FIGURES, ".")


def test_other_files_are_refused(tmp_path: Path, capsys: Any) -> None:
    twice = content("cpu")
    twice["benchmarks"] *= 2
    path = str(tmp_path / "other.json")
    for text, message in {
        "{": "expected JSON of `pytest bench --benchmark-only`",
        '{"benchmarks": [], "datetime": ""}': "got no 'multisample_machine' in it",
        json.dumps(twice): "expected one row of 'cpu' in case",
    }.items():
        Path(path).write_text(text, encoding="utf-8")
        for command, arguments in ((report.main, [path]), (compare.main, ["--old", path, "--new", path])):
            with pytest.raises(SystemExit, match="2"):
                command(arguments)
            assert message in capsys.readouterr().err


def test_a_row_has_the_numbers_of_the_file_and_names_the_fastest_peers(tmp_path: Path) -> None:
    results = content("gpu")
    find(results, "torch_eager", suite="throughput", d=1000, mode="fast_math")["extra_info"]["device_s"] = 0.9e-6
    found = {}
    for name, each in (("gpu", results), ("cpu", content("cpu"))):
        cells = row.row(read_run(saved(tmp_path / f"{name}.json", each))).strip("| ").split(" | ")
        found[name] = dict(zip(row.COLUMNS, cells, strict=True))
    # memset's 2.1 us over 3 and 3.1 us, and over 0.75 of these with fast_math. cuRAND's 5 us are for z only.
    speeds = "0.70, 0.68, - / 0.93, 0.90, -<br>torch_compile 3.0 / torch_{} "
    assert found["gpu"]["(4096, 65536)"] == speeds.format("compile") + "4.0"
    assert found["gpu"]["(1000, 1024)"] == speeds.format("eager") + "0.4"
    assert (found["gpu"]["GPU"], found["gpu"]["Driver, CUDA"]) == ("Some GPU", "1.2, 13.2")
    assert (found["gpu"]["Date"], found["gpu"]["Versions"]) == ("2030-01-01", "0.1.0 (0123), numpy 2.4.6")
    assert found["cpu"]["(10, 1000000) on the CPU"] == "2.0 G/s, in place 4.0 G/s<br>numpy 14.0"
    missing = {name: [title for title, cell in cells.items() if cell == "-"] for name, cells in found.items()}
    assert missing["gpu"] == ["(10, 1000000) on the CPU"]
    assert missing["cpu"] == ["GPU", "Driver, CUDA", *map(str, row.SHAPES)]


@pytest.mark.parametrize("path", OF_SUITES, ids=lambda path: path.stem)
def test_the_table_of_machines_has_the_rows_of_committed_results(path: Path) -> None:
    run = read_run(path)
    lines = (COMMITTED.folder / "machines.md").read_text(encoding="utf-8").splitlines()
    table = lines[lines.index(f"| {' | '.join(row.COLUMNS)} |") :]
    # The suite `original` has no shape of the table.
    has_row = any(each["suite"] in ("throughput", "cpu") for each in run.rows)
    assert (row.row(run) in table) == has_row, "python -m bench.report --row prints the row"
    assert all(line.count(" | ") == len(row.COLUMNS) - 1 for line in table[2:]), "a row can be appended to the file"


def test_a_row_selects_the_benchmarks_that_it_needs() -> None:
    command = [sys.executable, "-m", "pytest", "bench", "--collect-only", "-q", "--benchmark-only", "-k", row.SELECTION]
    # pytest-benchmark refuses to run in a worker of xdist.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    names = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True).stdout
    shapes = {("test_throughput", str(d), str(n)) for d, n in row.SHAPES}
    cpu = {(test, "10", "1000000") for test in ("test_cpu", "test_cpu_out")}
    assert set(re.findall(r"::(\w+)\[(\d+)x(\d+)-", names)) == shapes | cpu
    assert all(f"test_throughput[4096x65536-{mode}-cupy]" in names for mode in row.MODES)


def compared(tmp_path: Path, old: list[Content], new: list[Content]) -> int:
    paths = [[str(saved(tmp_path / f"{k}{id(runs)}.json", one)) for k, one in enumerate(runs)] for runs in (old, new)]
    return compare.main(["--old", *paths[0], "--new", *paths[1]])


@pytest.mark.parametrize(
    ("kind", "contender", "suite", "shape"),
    [("gpu", "torch_ext", "throughput", "4096x65536"), ("cpu", "cpu", "cpu", "10x10")],
)
def test_a_slowdown_beyond_the_spread_of_repeated_runs_is_found(
    kind: str, contender: str, suite: str, shape: str, tmp_path: Path, capsys: Any
) -> None:
    unsteady = 1, 1.15, 0.9
    for old, new, code in (
        ((1,), (1.25,), 1),
        ((1, 1.001, 0.999), (1.1, 1.101, 1.099), 1),
        (unsteady, (1.1, 1.101, 1.099), 0),
        (unsteady, (1.1,), 0),  # A single run takes the other side's spread.
        (unsteady, (2, 2.3, 1.8), 1),
    ):
        runs = [[content(kind) for _ in factors] for factors in (old, new)]
        planted = [find(each, contender, suite=suite) for each in itertools.chain(*runs)]
        for each, factor in zip(planted, old + new, strict=True):
            slow_down(each, factor)
        assert compared(tmp_path, *runs) == code
        *found, last = capsys.readouterr().out.splitlines()
        first = "".join(found[:1])
        assert first.startswith(f"{suite} {shape} portable: {contender}: ") == code
        assert first.endswith("-20.0 %, slower") == (new == (1.25,))
        assert f"of ours {code} slower and 0 faster, of peers 0 moved" in last


@pytest.mark.parametrize(("kind", "peer", "speed"), [("gpu", "torch_compile", 2), ("cpu", "torch_randn", 1)])
def test_noise_and_a_slower_machine_are_no_change(
    kind: str, peer: str, speed: int, tmp_path: Path, capsys: Any
) -> None:
    new = content(kind)
    for k, each in enumerate(new["benchmarks"]):
        slow_down(each, speed * (1.01, 1, 0.99)[k % 3])
        if each["extra_info"]["memset_s"] is not None:
            each["extra_info"]["memset_s"] *= speed
    slow_down(find(new, peer), 2)  # Only a slowdown of ours fails.
    assert compared(tmp_path, [content(kind)], [new]) == 0
    assert "of ours 0 slower and 0 faster, of peers 1 moved" in capsys.readouterr().out
