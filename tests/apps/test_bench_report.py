"""Pictures, pages and rows have the numbers of the result files; the comparison names what became slower, not noise."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from places import DATA, ROOT

from bench.report import __main__ as report
from bench.report import compare, row
from bench.report.page_figures import FIGURES, pictures_of_pages
from bench.report.page_markers import written
from bench.report.pictures import MOST_SERIES, pictures
from bench.report.results import Results, read_run, reduced, write

COMMITTED = Results(ROOT / "bench" / "results")
OF_SUITES = [path for path in sorted(COMMITTED.folder.glob("*.json")) if '"suite"' in path.read_text(encoding="utf-8")]


def content(kind: str) -> Any:
    """Results that were made up: at (1000, 1024), memset takes 2.1 us and torch_ext 3 us, or 2.25 us by fast_math."""
    return json.loads((DATA / f"bench_{kind}.json").read_text(encoding="utf-8"))


def slow_down(results: Any, factor: float, **info: Any) -> None:
    """Multiply the time of the first benchmark with such `info` by `factor`."""
    one = next(each for each in results["benchmarks"] if info.items() <= each["extra_info"].items())
    one["stats"]["median"] *= factor
    one["extra_info"]["device_s"] = one["extra_info"]["device_s"] and one["extra_info"]["device_s"] * factor


def saved(path: Path, results: Any) -> Path:
    path.write_text(json.dumps(results), encoding="utf-8")
    return path


def test_pictures_have_the_numbers_of_the_file(tmp_path: Path) -> None:
    largest, memory, calls, host = pictures(read_run(DATA / "bench_gpu.json"))
    # The largest shape has 262,144 rows. 1000 rows take 3 us, with torch.compile 9 us. Queued calls take
    # max(3 d / 1000, 6) us.
    assert "portable numbers 786 µs" in largest.alt and "torch.compile of mu + sigma * randn 2.36 ms" in largest.alt
    assert "1,074 MB" in largest.subtitle
    assert "portable numbers 70% to 70%" in memory.alt and "fast_math 93% to" in memory.alt
    assert "portable numbers 6 µs to 15 µs" in calls.alt
    assert "multisample for PyTorch, portable numbers 6 µs; " in host.alt
    # Ours take 1 us plus 0.5 ns a normal, NumPy's 1 us plus 7 ns.
    found = pictures(read_run(DATA / "bench_cpu.json"))
    assert "portable numbers 1.6 to 14.0" in found[1].alt
    assert max(each.alt.count("; ") for run in OF_SUITES for each in pictures(read_run(run))) < MOST_SERIES
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


def test_markers_are_filled_from_the_rows(tmp_path: Path) -> None:
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
    for name, message in (("study | c | x | us", "expected rows for study"), ("other", "or one of")):
        with pytest.raises(ValueError, match=message):
            place(name)
    with pytest.raises(ValueError, match="expected a word before the marker"):
        written("<!-- figure: study | a | x | us -->1<!-- end --> long", results, FIGURES, ".")


def test_other_files_are_refused(tmp_path: Path, capsys: Any) -> None:
    twice = content("cpu")
    twice["benchmarks"] *= 2
    path = tmp_path / "other.json"
    for text, message in {
        "{": "expected JSON of `pytest bench --benchmark-only`",
        '{"benchmarks": [], "datetime": ""}': "got no 'multisample_machine' in it",
        json.dumps(twice): "expected one row of 'cpu' in case",
    }.items():
        path.write_text(text, encoding="utf-8")
        with pytest.raises(SystemExit, match="2"):
            report.main([str(path)])
        assert message in capsys.readouterr().err


def test_a_section_has_the_numbers_of_the_file_and_nothing_that_was_not_measured() -> None:
    gpu, cpu = (row.section(read_run(DATA / f"bench_{kind}.json")) for kind in ("gpu", "cpu"))
    # memset takes 2.1 us, ours 3 and 3.1 us, with fast_math 0.75 of that. cuRAND has no entry, since it draws z only.
    others = "torch_compile: 3.0 times as long; torch_compile: 4.0 times as long"
    assert f"| (1000, 1024) | 0.70, 0.68, - | 0.93, 0.90, - | {others} | not recorded |" in gpu
    assert gpu.startswith("## Some GPU\n") and "driver 1.2, CUDA 13.2" in gpu and "(10, 1000000)" not in gpu
    assert "| (10, 1000000) | 2.0 billion | 4.0 billion | numpy: 14.0 times as long | 4 % |" in cpu
    assert cpu.startswith("## Some CPU\n") and "2 threads" in cpu and "(1000, 1024)" not in cpu


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_section_of_a_busy_machine_is_refused(kind: str, tmp_path: Path, capsys: Any) -> None:
    results = content(kind)
    for each in results["benchmarks"]:
        seconds = each["extra_info"]["device_s"] or each["stats"]["median"]
        quartiles = (each["stats"], "") if kind == "cpu" else (each["extra_info"], "device_")
        for name, factor in (("q1", 1.0), ("q3", 1.2 if each["extra_info"]["ours"] else 1.0)):
            quartiles[0][f"{quartiles[1]}{name}{'_s' * (kind == 'gpu')}"] = factor * seconds
    with pytest.raises(SystemExit, match=r"expected a spread of at most 10 %, got \(\d+, \d+\) 20 %"):
        report.main(["--row", str(saved(tmp_path / "busy.json", results))])
    assert capsys.readouterr().out == ""
    report.main(["--row", str(DATA / f"bench_{kind}.json")])
    assert capsys.readouterr().out == f"\n{row.section(read_run(DATA / f'bench_{kind}.json'))}"


def test_the_folder_of_results_has_sections_of_machines_and_the_pictures_of_pages_and_is_small() -> None:
    page = (COMMITTED.folder / "machines.md").read_text(encoding="utf-8")
    for run in map(read_run, OF_SUITES):
        # The suite `original` has no shape of the page.
        shapes = row.shapes(run)
        published = bool(shapes) and all((spread or 0) <= row.MOST_SPREAD for *_, spread in shapes)
        assert (row.section(run) in page) == published, "python -m bench.report --row prints the section"
    assert page.endswith("|\n"), "a section can be appended to the file"
    shown = pictures_of_pages(COMMITTED)
    names = {f"{run.name}-{each.name}-{theme}.svg" for run, each in shown for theme in report.THEMES}
    assert {path.name for path in COMMITTED.folder.glob("*.svg")} == names
    assert sum(path.stat().st_size for path in COMMITTED.folder.iterdir()) <= 2.5e6


def test_only_slowdowns_beyond_the_ranges_of_repeated_runs_are_found(tmp_path: Path, capsys: Any) -> None:
    def compared(*runs: list[Any]) -> tuple[int, list[str]]:
        paths = [[saved(tmp_path / f"{k}{n}.json", run) for n, run in enumerate(side)] for k, side in enumerate(runs)]
        code = compare.main(["--old", *map(str, paths[0]), "--new", *map(str, paths[1])])
        return code, capsys.readouterr().out.splitlines()

    unsteady = 1, 1.15, 0.9
    slow = 1.1, 1.101, 1.099
    for old, new, slower in (
        ((1,), (1.25,), 1), ((1, 1.001, 0.999), slow, 1), (unsteady, slow, 0), (unsteady, (1.1,), 0),
        (unsteady, (2, 2.3, 1.8), 1),
    ):  # fmt: skip
        for kind, suite, contender in (("gpu", "throughput 4096x65536", "torch_ext"), ("cpu", "cpu 10x10", "cpu")):
            runs = [[content(kind) for _ in factors] for factors in (old, new)]
            for run, factor in zip(itertools.chain(*runs), old + new, strict=True):
                slow_down(run, factor, contender=contender, suite=suite.split()[0])
            code, (*found, last) = compared(*runs)
            assert [line.startswith(f"{suite} portable: {contender}: ") for line in found] == [True] * slower
            assert "".join(found).endswith("-20.0 %, slower") == (new == (1.25,))
            assert code == slower and f"of ours {slower} slower and 0 faster, of peers 0 moved" in last
    # Noise, and a GPU of half the speed.
    for kind, peer, speed in (("gpu", "torch_compile", 2), ("cpu", "torch_randn", 1)):
        run = content(kind)
        for k, each in enumerate(run["benchmarks"]):
            slow_down({"benchmarks": [each]}, speed * (1.01, 1, 0.99)[k % 3])
            each["extra_info"]["memset_s"] = each["extra_info"]["memset_s"] and speed * each["extra_info"]["memset_s"]
        slow_down(run, 2, contender=peer)
        code, (*_, last) = compared([content(kind)], [run])
        assert code == 0 and "of ours 0 slower and 0 faster, of peers 1 moved" in last
