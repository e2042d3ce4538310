"""The report of benchmark results has the numbers of the files; the comparison detects slowdowns, but not noise."""

from __future__ import annotations

import base64
import copy
import itertools
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from bench.report import compare, drawing, plots, report
from bench.report.entries import read_run

Results = dict[str, Any]

# The committed results.
COMMITTED = [
    path for path in sorted((ROOT / "bench" / "results").glob("*.json"))
    if "multisample_machine" in json.loads(path.read_text(encoding="utf-8"))
]  # fmt: skip

MICRO = 1e-6
GPU_CALLS = {  # Seconds on the device at (1000, 1024), and on the host
    "torch_ext": (3 * MICRO, 6 * MICRO),
    "cupy": (3.1 * MICRO, 7 * MICRO),
    "torch_compile": (9 * MICRO, 42 * MICRO),
    "torch_eager": (12 * MICRO, 20 * MICRO),
    "curand_host": (5 * MICRO, 8 * MICRO),
}
CPU_CALLS = {"cpu": 0.5e-9, "numpy": 7e-9, "torch_randn": 3e-9}  # Seconds per normal
SCALES = (0.3, 1, 5)  # Factors of the time on the device at d = 10, 1000 and 5000
SPEEDUPS = [
    max(42, 9 * scale) / max(6, 3 * scale) for scale in SCALES
]  # Speedups of torch_ext over torch_compile for calls in a row
OURS = ("torch_ext", "cupy", "numba", "cpu")


def _benchmark(suite: str, contender: str, d: int, n: int, noise: str, call: float, **times: float) -> Results:
    """One benchmark in the suite's format; `times` has the seconds of the device, the host and memset."""
    size, device, memset = 4 * d * n, times.get("device"), times.get("memset")
    return {
        "group": f"({d}, {n}), float32, {noise}, portable",
        "name": f"test_draw[{contender}]",
        "extra_info": {
            "suite": suite,
            "contender": contender,
            "ours": contender in OURS,
            "lacks": "applies neither mu nor sigma" if contender == "curand_host" else None,
            "d": d,
            "n": n,
            "dtype": "float32",
            "noise": noise,
            "mode": "portable",
            "layout": "dn",
            "bytes": size,
            "device_s": device,
            "device_s_low": device and 0.99 * device,
            "device_s_high": device and 1.01 * device,
            "host_s": times.get("host"),
            **({"pipelined_s": max(device, times["host"])} if device else {}),
            "memset_s": memset,
            "of_memset": memset / device if memset and device else None,
            "gb_per_s": size / (device or call) / 1e9,
        },
        "stats": {"q1": 0.98 * call, "median": call, "q3": 1.02 * call},
    }


def _file(benchmarks: list[Results], **machine: Any) -> Results:
    versions = {"multisample": "0.1.0", "numpy": "2.4.6"}
    return {
        "benchmarks": benchmarks,
        "commit_info": {"id": "0123abcd"},
        "multisample_machine": {"cpu": "Some CPU", "threads": 2, "date": "2030-01-01", "versions": versions, **machine},
    }


def gpu_results() -> Results:
    benchmarks = []
    for noise in ("shared", "independent"):
        for suite, d in (("original", 10), ("original", 1000), ("original", 5000), ("throughput", 262_144)):
            for contender, (device, host) in GPU_CALLS.items():
                device_s = device * max(0.3, d / 1000)
                call = device_s + host
                memset = 2 * MICRO * max(0.3, d / 1000)
                benchmarks.append(
                    _benchmark(suite, contender, d, 1024, noise, call, device=device_s, host=host, memset=memset)
                )
    return _file(benchmarks, gpu="Some GPU", driver="1.2", sm_clock_mhz=1980)


def cpu_results() -> Results:
    benchmarks = [
        _benchmark("cpu", contender, d, n, "independent", MICRO + seconds * d * n)
        for d, n in ((10, 10), (1000, 1000), (10, 100_000))
        for contender, seconds in CPU_CALLS.items()
    ]
    return _file(benchmarks, gpu=None)


MAKERS = {"gpu": gpu_results, "cpu": cpu_results}


def write(path: Path, results: Results) -> Path:
    path.write_text(json.dumps(results), encoding="utf-8")
    return path


def find(results: Results, contender: str, **info: Any) -> Results:
    """The first benchmark of `contender` that has `info`."""
    found: Results = next(
        benchmark for benchmark in results["benchmarks"]
        if {"contender": contender, **info}.items() <= benchmark["extra_info"].items()
    )  # fmt: skip
    return found


def slow_down(benchmark: Results, factor: float) -> None:
    """Multiply all times of the contender, but not of memset, by `factor`."""
    info = benchmark["extra_info"]
    for place, keys in ((benchmark["stats"], ("q1", "median", "q3")), (info, ("device_s", "device_s_low", "host_s"))):
        place.update({key: place[key] * factor for key in keys if place[key] is not None})
    if info["device_s"] is not None:
        info["device_s_high"] *= factor
        info["of_memset"] /= factor


class Page(HTMLParser):
    """Parses a page: the text of its tables by class, and its links to other files."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[tuple[str, list[list[str]]]] = []
        self.links: list[str] = []
        self.titles: list[str] = []
        self._text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._text = ""
        if tag == "table":
            self.tables.append((dict(attrs).get("class") or "", []))
        elif tag == "tr":
            self.tables[-1][1].append([])
        self.links += [value or "" for name, value in attrs if name in ("src", "srcset", "href", "data", "action")]

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self.tables[-1][1][-1].append(self._text)
        elif tag == "summary":
            self.titles.append(self._text)

    def handle_data(self, data: str) -> None:
        self._text += data

    def of_class(self, name: str) -> list[list[list[str]]]:
        return [rows for kind, rows in self.tables if kind == name]

    def group(self, title: str) -> dict[str, list[str]]:
        rows = self.of_class("group")[self.titles.index(title)]
        return {row[0]: row[1:] for row in rows[1:]}


# --- The report ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the report of a GPU run and a CPU run."""
    folder = tmp_path_factory.mktemp("report")
    files = [str(write(folder / f"{name}.json", maker())) for name, maker in MAKERS.items()]
    report.main([*files, "-o", str(folder / "out")])
    return folder / "out"


@pytest.fixture(scope="module")
def page(reported: Path) -> Page:
    return Page((reported / "index.html").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_every_plot_has_a_light_and_a_dark_version(reported: Path) -> None:
    names = {
        "gpu-original-float32-shared-portable", "gpu-original-float32-independent-portable",
        "gpu-roofline-float32-shared-portable", "gpu-roofline-float32-independent-portable", "gpu-host-cost",
        "cpu-cpu-float32-independent-portable",
    }  # fmt: skip
    expected = {f"{name}-{theme}.svg" for name in names for theme in ("light", "dark")}
    assert {path.name for path in reported.iterdir()} == {"index.html", *expected}
    assert all("<svg" in (reported / name).read_text(encoding="utf-8") for name in expected)


@pytest.mark.slow
def test_the_page_refers_only_to_its_plots(reported: Path, page: Page) -> None:
    images = [link for link in page.links if link.startswith("data:image/svg+xml;base64,")]
    assert len(images) == 12 and images == page.links
    assert "url(" not in (reported / "index.html").read_text(encoding="utf-8") and "@import" not in str(page.rawdata)
    for image in images:
        drawn = base64.b64decode(image.partition(",")[2]).decode()
        assert all(link.startswith("#") for link in re.findall(r'(?:href|src)="([^"]*)"', drawn))
        assert all(link.startswith("#") for link in re.findall(r"url\(([^)]*)\)", drawn))


def test_results_of_one_shape_have_no_pictures(tmp_path: Path) -> None:
    promise, reason = "Pictures lie beside this page", "No pictures: they take results of several shapes"
    part = cpu_results()
    part["benchmarks"] = [each for each in part["benchmarks"] if each["extra_info"]["d"] == 1000]
    paths = [str(write(tmp_path / "part.json", part)), str(write(tmp_path / "all.json", cpu_results()))]
    for files, promised in ((paths[:1], 0), (paths, 1)):
        report.main([*files, "-o", str(tmp_path / "out")])
        text = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
        assert text.count(promise) == promised == len(list((tmp_path / "out").glob("*-light.svg")))
        assert text.count(reason) == 1
        assert text.count("<figure>") == promised


def test_tables_without_numbers_are_omitted(tmp_path: Path) -> None:
    results = gpu_results()
    results["benchmarks"] = [each for each in results["benchmarks"] if each["extra_info"]["ours"]]
    report.main([str(write(tmp_path / "ours.json", results)), "-o", str(tmp_path / "out")])
    page = Page((tmp_path / "out" / "index.html").read_text(encoding="utf-8"))
    assert page.of_class("summary") == []


def test_the_page_has_the_numbers_of_the_file(page: Page) -> None:
    rows = page.group("(1000, 1024), float32, shared, portable")
    # A call is 3 + 6 us; 4096000 bytes in 3 us; memset takes 2 us.
    assert rows["torch_ext"][:6] == ["9.00", "3.00", "6.00", "6.00", "0.667", "1,365"]
    # Ratios of the peers' calls (9 + 42 us) and kernels (9 us) to our calls (9 and 10.1 us) and kernels (3 and 3.1 us).
    assert rows["torch.compile"][:6] == ["51.00", "9.00", "42.00", "42.00", "0.222", "455.1"]
    assert rows["torch.compile"][6:] == ["5.67", "5.05", "3.00", "2.90"]
    assert rows["cuRAND host API*"][6] == "1.44"
    cpu = page.group("(1000, 1000), float32, independent, portable")
    assert cpu["cpu"] == ["501.0", "7.98", ""] and cpu["NumPy"] == ["7,001", "0.571", "13.97"]


def test_the_page_lists_machine_and_versions(page: Page) -> None:
    gpu, cpu = (dict(rows) for rows in page.of_class("machine"))
    assert gpu == {
        "cpu": "Some CPU", "threads": "2", "date": "2030-01-01", "multisample": "0.1.0", "numpy": "2.4.6",
        "gpu": "Some GPU", "driver": "1.2", "sm_clock_mhz": "1980", "commit": "0123abcd",
    }  # fmt: skip
    assert "gpu" not in cpu


def test_the_page_has_the_smallest_lead_and_the_averages(page: Page) -> None:
    leads, in_a_row, alone, *_ = page.of_class("summary")
    lead = next(row for row in leads if row[:3] == ["torch_ext", "original", "float32, shared noise, portable"])
    # At d = 10 calls take 1.5 + 8 us and 0.9 + 6 us; the ratio of kernel times is 5 to 3 at every d.
    assert lead[3:] == ["1.38 (cuRAND host API* at 10 x 1,024)", "1.67 (cuRAND host API* at 10 x 1,024)"]
    by_itself = [(42 + 9 * scale) / (6 + 3 * scale) for scale in SCALES]
    for table, ratios in ((in_a_row, SPEEDUPS), (alone, by_itself)):
        row = next(row for row in table if row[0] == "torch_ext")
        assert row[1:] == [f"{value:.2f}" for value in (sum(ratios) / 3, min(ratios), max(ratios))]


def test_changed_results_change_the_page(tmp_path: Path, page: Page) -> None:
    results = cpu_results()
    slow_down(find(results, "cpu", d=1000), 2)
    report.main([str(write(tmp_path / "cpu.json", results)), "-o", str(tmp_path / "out")])
    changed = Page((tmp_path / "out" / "index.html").read_text(encoding="utf-8"))
    title = "(1000, 1000), float32, independent, portable"
    assert changed.group(title)["cpu"][0] == "1,002" and changed.group(title)["NumPy"][2] == "6.99"
    before = page.links[-2:]  # The picture of the CPU in two themes
    assert all(old != new for old, new in zip(before, changed.links, strict=True))


def test_speedups_are_plotted_with_the_published_speedup(tmp_path: Path) -> None:
    run = read_run(write(tmp_path / "gpu.json", gpu_results()))
    plot = next(plot for plot in plots.plots(run) if plot.name == "original-float32-independent-portable")
    for theme in drawing.THEMES:
        upper, lower = plot.draw(theme).axes
        drawn = [list(line.get_ydata()) for line in lower.lines]
        assert any(values == pytest.approx(SPEEDUPS) for values in drawn if len(values) == 3)
        assert [plots.PUBLISHED.speedup] * 2 in drawn
        assert sum(f"{plots.PUBLISHED.speedup} " in text.get_text() for text in lower.texts) == 1
        assert {text.get_text() for text in upper.texts} == {
            "torch_ext", "cupy", "torch.compile", "torch eager", "cuRAND host API*"
        }  # fmt: skip
    assert plots.svg(plot, theme) == plots.svg(plot, theme)


def test_without_calls_in_a_row_the_plot_shows_single_calls(tmp_path: Path) -> None:
    results = gpu_results()
    for benchmark in results["benchmarks"]:
        del benchmark["extra_info"]["pipelined_s"]
    run = read_run(write(tmp_path / "gpu.json", results))
    original = next(plot for plot in plots.plots(run) if plot.name.startswith("original"))
    assert original.caption.startswith("Time of a call with its synchronisation against d")


def test_without_torch_compile_the_speedups_are_over_eager(tmp_path: Path) -> None:
    results = gpu_results()
    results["benchmarks"] = [
        benchmark for benchmark in results["benchmarks"] if benchmark["extra_info"]["contender"] != "torch_compile"
    ]  # fmt: skip
    run = read_run(write(tmp_path / "gpu.json", results))
    original = next(plot for plot in plots.plots(run) if plot.name.startswith("original"))
    assert "times as fast as torch eager: cupy" in original.caption


@pytest.mark.parametrize("wanted", [[0.5], [0.1, 0.9], [0.5, 0.5, 0.5], [0.52, 0.5, 0.1, 0.51, 0.9, 0.88]])
def test_plot_names_do_not_overlap(wanted: list[float]) -> None:
    gap = 0.05
    places = drawing.spread(wanted, gap)
    in_order = sorted(places)
    assert all(b - a > gap * 0.999 for a, b in itertools.pairwise(in_order))
    assert [p for _, p in sorted(zip(wanted, places, strict=True))] == in_order
    assert sum(places) == pytest.approx(sum(wanted))
    if min((abs(a - b) for k, a in enumerate(wanted) for b in wanted[:k]), default=1) > gap:
        assert places == pytest.approx(wanted)


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem == "h200" else []) for path in COMMITTED],
)
def test_committed_results_can_be_reported_and_compared(path: Path, tmp_path: Path) -> None:
    report.main([str(path), "-o", str(tmp_path / "out")])
    page = Page((tmp_path / "out" / "index.html").read_text(encoding="utf-8"))
    assert len(page.of_class("group")) == len(read_run(path).groups) and page.links
    assert compare.main([str(path), str(path)]) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "expected JSON of `pytest bench --benchmark-only`"),
        ('{"benchmarks": [], "datetime": ""}', "got no 'multisample_machine' in it"),
        ('{"benchmarks": [{"extra_info": {}, "stats": {}}], "multisample_machine": {}}', "got no 'device_s' in it"),
        ('{"benchmarks": [], "multisample_machine": "mine"}', "expected JSON of `pytest bench --benchmark-only`"),
        ('{"benchmarks": [], "multisample_machine": {}, "commit_info": "x"}', "expected JSON of `pytest bench"),
        ("[" * 100_000, "expected JSON of `pytest bench --benchmark-only`"),
    ],
)
def test_other_files_raise(content: str, message: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "other.json"
    path.write_text(content, encoding="utf-8")
    for command in ([report.main, [str(path)]], [compare.main, [str(path), str(path)]]):
        with pytest.raises(SystemExit, match="2"):
            command[0](command[1])  # type: ignore[operator]
        assert message in capsys.readouterr().err


def test_a_duplicate_contender_raises(tmp_path: Path) -> None:
    results = cpu_results()
    results["benchmarks"].append(copy.deepcopy(results["benchmarks"][0]))
    with pytest.raises(ValueError, match="expected one entry of 'cpu' in group"):
        read_run(write(tmp_path / "twice.json", results))


def test_report_and_compare_run_as_modules() -> None:
    for module in ("bench.report", "bench.report.compare"):
        done = subprocess.run(
            [sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert f"usage: python -m {module}" in done.stdout


def test_without_matplotlib_the_error_names_the_extra() -> None:
    code = "import sys; sys.modules['matplotlib'] = None; import bench.report.report"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (
        'ImportError: bench.report: expected Matplotlib and Jinja to be there: pip install -e ".[bench]"' in done.stderr
    )


# --- The comparison -----------------------------------------------------------------------------------------------


def compared(tmp_path: Path, old: list[Results], new: list[Results], *options: str) -> int:
    old_paths = [str(write(tmp_path / f"old{k}.json", results)) for k, results in enumerate(old)]
    new_paths = [str(write(tmp_path / f"new{k}.json", results)) for k, results in enumerate(new)]
    if len(old) == len(new) == 1:
        return compare.main([*old_paths, *new_paths, *options])
    return compare.main(["--old", *old_paths, "--new", *new_paths, *options])


ENTRIES = [("gpu", "torch_ext", "throughput"), ("cpu", "cpu", "cpu")]


@pytest.mark.parametrize(("kind", "contender", "suite"), ENTRIES)
def test_a_planted_slowdown_is_detected(kind: str, contender: str, suite: str, tmp_path: Path, capsys: Any) -> None:
    new = MAKERS[kind]()
    planted = find(new, contender, suite=suite)
    slow_down(planted, 1.25)
    assert compared(tmp_path, [MAKERS[kind]()], [new]) == 1
    lines = capsys.readouterr().out.splitlines()
    (found,) = [line for line in lines if line.endswith("slower")]
    assert found.startswith(f"{suite}: {planted['group']}: {contender} ") and "-20.0 %" in found
    assert "of ours 1 slower and 0 faster, of peers 0 moved" in lines[-1]


@pytest.mark.parametrize(("runs", "heading"), [((1, 1), "hint"), ((2, 1), "verdict"), ((1, 3), "verdict")])
def test_comparing_single_runs_gives_hints(runs: tuple[int, int], heading: str, tmp_path: Path, capsys: Any) -> None:
    old, new = ([cpu_results() for _ in range(count)] for count in runs)
    for results in new:
        slow_down(find(results, "cpu", suite="cpu"), 1.25)
    assert compared(tmp_path, old, new) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines if line.endswith(("hint", "verdict", "slower"))] == [heading, "slower"]
    assert ("hints only" in lines[-1]) == (heading == "hint")


@pytest.mark.parametrize(("kind", "contender", "suite"), ENTRIES)
def test_a_speedup_is_reported_without_a_failure(
    kind: str, contender: str, suite: str, tmp_path: Path, capsys: Any
) -> None:
    new = MAKERS[kind]()
    slow_down(find(new, contender, suite=suite), 0.75)
    assert compared(tmp_path, [MAKERS[kind]()], [new]) == 0
    assert "of ours 0 slower and 1 faster" in capsys.readouterr().out


def test_a_slower_peer_is_not_a_failure(tmp_path: Path, capsys: Any) -> None:
    new = gpu_results()
    slow_down(find(new, "torch_eager"), 2)
    assert compared(tmp_path, [gpu_results()], [new]) == 0
    assert "torch_eager (a peer)" in capsys.readouterr().out


@pytest.mark.parametrize("kind", MAKERS)
def test_noise_is_not_reported_as_a_change(kind: str, tmp_path: Path, capsys: Any) -> None:
    new = MAKERS[kind]()
    for k, benchmark in enumerate(new["benchmarks"]):
        slow_down(benchmark, (1.01, 1, 0.99)[k % 3])
    assert compared(tmp_path, [MAKERS[kind]()], [new]) == 0
    assert "of ours 0 slower and 0 faster, of peers 0 moved" in capsys.readouterr().out


@pytest.mark.parametrize("kind", MAKERS)
def test_a_slower_machine_is_not_reported_as_a_change(kind: str, tmp_path: Path, capsys: Any) -> None:
    new = MAKERS[kind]()
    for benchmark in new["benchmarks"]:
        slow_down(benchmark, 2)
        if benchmark["extra_info"]["memset_s"] is not None:
            benchmark["extra_info"]["memset_s"] *= 2
            benchmark["extra_info"]["of_memset"] *= 2
    assert compared(tmp_path, [MAKERS[kind]()], [new]) == 0
    assert "of ours 0 slower and 0 faster, of peers 0 moved" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "contender", "suite"), ENTRIES)
def test_the_spread_comes_from_repeated_runs(kind: str, contender: str, suite: str, tmp_path: Path) -> None:
    def runs(factors: tuple[float, ...]) -> list[Results]:
        found = []
        for factor in factors:
            found.append(MAKERS[kind]())
            slow_down(find(found[-1], contender, suite=suite), factor)
        return found

    steady, unsteady, slower = (1, 1.001, 0.999), (1, 1.15, 0.9), (1.1, 1.101, 1.099)
    assert compared(tmp_path, runs(steady), runs(slower)) == 1
    assert compared(tmp_path, runs(unsteady), runs(slower)) == 0
    assert compared(tmp_path, runs(unsteady), runs((1.1,))) == 0  # The spread of one side counts for both.
    assert compared(tmp_path, runs(unsteady), runs((2, 2.3, 1.8))) == 1


def test_few_runs_that_agree_by_chance_are_not_a_change(tmp_path: Path) -> None:
    old, new = ([gpu_results() for _ in range(3)] for _ in range(2))
    for runs in (old, new):
        for k, results in enumerate(runs):
            for benchmark in results["benchmarks"]:
                slow_down(benchmark, 1 + 0.05 * k)
    agreeing = {"contender": "cupy", "suite": "throughput", "noise": "shared"}
    for runs, factor in ((old, 1), (new, 1.08)):
        for results in runs:
            entry = find(gpu_results(), **agreeing)
            slow_down(entry, factor)
            find(results, **agreeing).update(entry)
    assert compared(tmp_path, old, new) == 0


def test_missing_benchmarks_are_listed(tmp_path: Path, capsys: Any) -> None:
    old, new = cpu_results(), cpu_results()
    old["benchmarks"].remove(find(old, "torch_randn", d=10, n=10))
    new["benchmarks"].remove(find(new, "cpu", d=10, n=10))
    new["benchmarks"].remove(find(new, "numpy", n=100_000))
    assert compared(tmp_path, [old], [new], "--all") == 0
    printed = capsys.readouterr().out
    group, far = "cpu: (10, 10), float32, independent, portable", "cpu: (10, 100000), float32, independent, portable"
    assert f"only in the old results:\n  {group}: cpu\n  {far}: numpy\n" in printed
    assert f"only in the new results:\n  {group}: torch_randn\n" in printed
    assert f"in both, without a ratio:\n  {far}: cpu\n  {far}: torch_randn\n2 ratios compared" in printed
    assert re.search(r"\(1000, 1000\).*: cpu +13.97 +13.97 +\+0.0 % ", printed)


@pytest.mark.parametrize("arguments", [["a"], ["a", "b", "c"], ["--old", "a"], ["a", "b", "--old", "c", "--new", "d"]])
def test_other_arguments_than_two_files_or_two_lists_raise(arguments: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        compare.main(arguments)
    assert "results: expected two files, or --old and --new with files each" in capsys.readouterr().err


def test_results_with_equal_file_names_raise(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        report.main([str(tmp_path / "a.json"), str(tmp_path / "b" / "a.json")])
    assert "results: expected files of different names, got a, a" in capsys.readouterr().err
