"""The pictures have the numbers of the result files; the comparison names what became slower, and not noise."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from bench.report import compare, report, row
from bench.report.entries import read_run

Results = dict[str, Any]

# The results in the repository that the report is for.
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
CPU_CALLS = {"cpu": 0.5e-9, "numpy": 7e-9, "torch_randn": 3e-9}  # Seconds a normal
OURS = ("torch_ext", "cupy", "numba", "cpu")


def _benchmark(suite: str, contender: str, d: int, n: int, noise: str, call: float, **times: float) -> Results:
    """One benchmark as the suite writes it: `times` has the seconds of the device, the host and memset, if any."""
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
    """The first benchmark of `contender` with such `info`."""
    found: Results = next(
        benchmark for benchmark in results["benchmarks"]
        if {"contender": contender, **info}.items() <= benchmark["extra_info"].items()
    )  # fmt: skip
    return found


def slow_down(benchmark: Results, factor: float) -> None:
    """All times of what was measured, but not of the memset beside it, times `factor`."""
    info = benchmark["extra_info"]
    for place, keys in ((benchmark["stats"], ("q1", "median", "q3")), (info, ("device_s", "device_s_low", "host_s"))):
        place.update({key: place[key] * factor for key in keys if place[key] is not None})
    if info["device_s"] is not None:
        info["device_s_high"] *= factor


# --- The pictures -------------------------------------------------------------------------------------------------


def reported(folder: Path, capsys: Any, *results: Results) -> tuple[dict[str, str], list[str]]:
    """The pictures of `results` by the names of their files, and the printed sentences."""
    files = [str(write(folder / f"run{k}.json", each)) for k, each in enumerate(results)]
    report.main([*files, "-o", str(folder / "out")])
    images = {path.name: path.read_text(encoding="utf-8") for path in (folder / "out").iterdir()}
    return images, capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_every_picture_is_drawn_in_two_themes_and_loads_nothing(tmp_path: Path, capsys: Any) -> None:
    images, _ = reported(tmp_path, capsys, gpu_results(), cpu_results())
    names = {f"run0-{picture}-float32-{noise}" for picture in ("largest", "memory", "calls")
             for noise in ("shared", "independent")}  # fmt: skip
    names |= {"run0-host", "run1-largest-float32-independent", "run1-cpu-float32-independent"}
    assert images.keys() == {f"{name}-{theme}.svg" for name in names for theme in ("light", "dark")}
    for drawn in images.values():
        assert "@import" not in drawn and "url(http" not in drawn
        assert all(inner.startswith("#") for inner in re.findall(r'href="([^"]*)"', drawn))


def test_the_sentences_have_the_numbers_of_the_file(tmp_path: Path, capsys: Any) -> None:
    _, (first, second, third, host, *_) = reported(tmp_path, capsys, gpu_results())
    # Kernels of 262 x 3 us beside 262 x 9 us; memset takes 262 x 2 us; calls in a row are max(3 d / 1000, 6) us.
    assert "in 786 µs" in first and "torch.compile of mu + sigma * randn) takes 3.0 times as long" in first
    assert "67% of the speed of cudaMemsetAsync" in second
    assert "takes 6 µs to 15 µs" in third and "takes 5.7 times as long on average" in third
    assert "keeps the host busy for 6 µs to 7 µs" in host
    _, sentences = reported(tmp_path, capsys, cpu_results())
    # Calls of 1 us and 0.5 ns a normal beside 1 us and 7 ns a normal.
    assert "multisample is 1.6 to 14 times as fast as NumPy" in sentences[1]


def test_portable_numbers_are_compared_with_their_peers(tmp_path: Path, capsys: Any) -> None:
    results = gpu_results()
    for benchmark in [each for each in results["benchmarks"] if each["extra_info"]["contender"] == "torch_eager"]:
        fast = copy.deepcopy(benchmark)
        fast["group"] += ", fast_math"
        fast["extra_info"].update(contender="curanddx_fast_math", mode="fast_math")
        slow_down(fast, 0.1)
        results["benchmarks"].append(fast)
    images, sentences = reported(tmp_path, capsys, results)
    assert "cuRANDDx" in images["run0-largest-float32-independent-light.svg"]
    assert "torch.compile of mu + sigma * randn) takes 3.0 times as long" in sentences[0]


def test_names_in_the_results_are_escaped(tmp_path: Path, capsys: Any) -> None:
    results = gpu_results()
    for benchmark in results["benchmarks"]:
        if benchmark["extra_info"]["contender"] == "cupy":
            benchmark["extra_info"]["contender"] = "<script>$x^"
    images, _ = reported(tmp_path, capsys, results)
    assert not any("<script" in image for image in images.values())
    assert any("&lt;script&gt;$x^" in image for image in images.values())


@pytest.mark.parametrize("kept", ["one shape", "peers"])
def test_a_part_of_the_results_may_have_no_pictures(kept: str, tmp_path: Path, capsys: Any) -> None:
    for results in (gpu_results(), cpu_results()):
        infos = {"one shape": lambda info: info["d"] == info["n"] == 1000, "peers": lambda info: not info["ours"]}
        results["benchmarks"] = [each for each in results["benchmarks"] if infos[kept](each["extra_info"])]
        images, sentences = reported(tmp_path, capsys, results)
        assert (images, sentences) == ({}, ["No pictures: they need results of several shapes."])


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem == "h200" else []) for path in COMMITTED],
)
def test_committed_results_have_their_pictures_and_can_be_compared(path: Path, tmp_path: Path) -> None:
    report.main([str(path), "-o", str(tmp_path / "out")])
    shown = {picture.name for picture in path.parent.glob(f"{path.stem}-*.svg")}
    assert shown <= {written.name for written in (tmp_path / "out").iterdir()}, "a picture that is no longer drawn"
    assert compare.main([str(path), str(path)]) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "expected JSON of `pytest bench --benchmark-only`"),
        ('{"benchmarks": [], "datetime": ""}', "got no 'multisample_machine' in it"),
        ('{"benchmarks": [{"extra_info": {}, "stats": {}}], "multisample_machine": {}}', "got no 'group' in it"),
        ("[" * 100_000, "expected JSON of `pytest bench --benchmark-only`"),
    ],
)
def test_other_files_are_refused(content: str, message: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "other.json"
    path.write_text(content, encoding="utf-8")
    for command in ([report.main, [str(path)]], [compare.main, [str(path), str(path)]]):
        with pytest.raises(SystemExit, match="2"):
            command[0](command[1])  # type: ignore[operator]
        assert message in capsys.readouterr().err


def test_a_contender_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    results = cpu_results()
    results["benchmarks"].append(copy.deepcopy(results["benchmarks"][0]))
    with pytest.raises(ValueError, match="expected one entry of 'cpu' in group"):
        read_run(write(tmp_path / "twice.json", results))


def test_different_results_need_different_names(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        report.main([str(tmp_path / "a.json"), str(tmp_path / "b" / "a.json")])
    assert "results: expected files of different names, got a, a" in capsys.readouterr().err


def test_the_extra_is_named_where_matplotlib_is_missing() -> None:
    code = "import sys; sys.modules['matplotlib'] = None; import bench.report.report"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert 'ImportError: bench.report: expected Matplotlib to be there: pip install -e ".[bench]"' in done.stderr


# --- The rows of machines ------------------------------------------------------------------------------------------


def rows_of(tmp_path: Path, capsys: Any, *results: Results) -> list[list[str]]:
    """The cells of the printed rows."""
    files = [str(write(tmp_path / f"run{k}.json", each)) for k, each in enumerate(results)]
    report.main(["--row", *files])
    return [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]


def machine_results() -> Results:
    """Results of a machine with a GPU, with everything that a row has."""
    benchmarks = []
    for d, n in row.SHAPES:
        for contender, (device, host) in GPU_CALLS.items():
            for mode, factor in (("portable", 1), ("fast_math", 0.75 if contender in OURS else 1)):
                times = {"device": factor * device, "host": host, "memset": 2.1 * MICRO}
                benchmark = _benchmark("throughput", contender, d, n, "independent", factor * device, **times)
                benchmark["group"], benchmark["extra_info"]["mode"] = f"({d}, {n}) {mode}", mode
                benchmarks.append(benchmark)
    for suite, factor in (("cpu", 1), ("cpu_out", 0.5)):
        for contender in ("cpu", "numpy"):
            time = factor * CPU_CALLS[contender] * math.prod(row.CPU_SHAPE)
            benchmarks.append(_benchmark(suite, contender, *row.CPU_SHAPE, "independent", time))
    results = _file(benchmarks, gpu="Some GPU", driver="1.2")
    results["multisample_machine"]["versions"].update(sources="0123", cuda_runtime="13020")
    return results


def test_a_row_has_the_numbers_of_the_file(tmp_path: Path, capsys: Any) -> None:
    (cells,) = rows_of(tmp_path, capsys, machine_results())
    assert len(cells) == len(row.COLUMNS)
    found = dict(zip(row.COLUMNS, cells, strict=True))
    # 2.1 us of memset beside 3 and 3.1 us of two backends, and 0.75 of that; cuRAND's 5 us lack mu and sigma.
    speeds = "0.70, 0.68, - / 0.93, 0.90, -<br>torch_compile 3.0 / torch_compile 4.0"
    assert [found[str(shape)] for shape in row.SHAPES] == [speeds] * 3
    assert found["(10, 1000000) on the CPU"] == "2.0 G/s, in place 4.0 G/s<br>numpy 14.0"
    assert (found["GPU"], found["Driver, CUDA"]) == ("Some GPU", "1.2, 13.2")
    assert (found["Date"], found["Versions"]) == ("2030-01-01", "0.1.0 (0123), numpy 2.4.6")


def test_a_row_names_the_fastest_peer_of_each_mode(tmp_path: Path, capsys: Any) -> None:
    results = machine_results()
    d, n = row.SHAPES[0]
    fast = find(results, "torch_eager", d=d, n=n, mode="fast_math")
    fast["extra_info"]["device_s"] = 0.9 * MICRO
    (cells,) = rows_of(tmp_path, capsys, results)
    assert cells[row.COLUMNS.index(str((d, n)))].endswith("<br>torch_compile 3.0 / torch_eager 0.4")


def test_what_a_machine_has_not_measured_is_missing_in_its_row(tmp_path: Path, capsys: Any) -> None:
    gpu, cpu = machine_results(), machine_results()
    gpu["benchmarks"] = [each for each in gpu["benchmarks"] if each["extra_info"]["suite"] == "throughput"]
    cpu["benchmarks"] = [each for each in cpu["benchmarks"] if each["extra_info"]["suite"] != "throughput"]
    cpu["multisample_machine"].update(gpu=None, driver=None)
    rows = rows_of(tmp_path, capsys, gpu, cpu)
    missing = [[name for name, cell in zip(row.COLUMNS, cells, strict=True) if cell == "-"] for cells in rows]
    assert missing == [["(10, 1000000) on the CPU"], ["GPU", "Driver, CUDA", *map(str, row.SHAPES)]]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_the_table_of_machines_has_the_rows_of_committed_results(path: Path) -> None:
    lines = (path.parent / "machines.md").read_text(encoding="utf-8").splitlines()
    table = lines[lines.index(f"| {' | '.join(row.COLUMNS)} |") :]
    run = read_run(path)
    # The suite `original` has no shape of the table.
    has_row = any(group.name.startswith(("throughput", "cpu")) for group in run.groups)
    assert (row.row(run) in table) == has_row
    assert all(line.count(" | ") == len(row.COLUMNS) - 1 for line in table[2:]), "a row can be appended to the file"


def test_a_row_selects_the_benchmarks_that_it_needs() -> None:
    command = ["pytest", "bench", "--collect-only", "-q", "--benchmark-only", "-k", row.SELECTION]
    # pytest-benchmark refuses to run in a worker of xdist.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    names = {line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line}
    kinds = {(name.partition("[")[0], *re.findall(r"\[(\d+)x(\d+)-", name)[0]) for name in names}
    shapes = {("test_throughput", str(d), str(n)) for d, n in row.SHAPES}
    assert kinds == shapes | {(test, "10", "1000000") for test in ("test_cpu", "test_cpu_out")}
    ours = {f"float32-independent-{mode}-{backend}" for mode in row.MODES for backend in row.BACKENDS}
    assert {f"test_throughput[4096x65536-{each}]" for each in ours} <= names
    assert "test_cpu_out[10x1000000-dn-cpu]" in names and not any("nd-portable" in name for name in names)


@pytest.mark.parametrize("arguments", [[], ["-o", "out"]])
def test_pictures_need_results(arguments: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        report.main(arguments)
    assert "results: expected files, got none" in capsys.readouterr().err


# --- The comparison -----------------------------------------------------------------------------------------------


def compared(tmp_path: Path, old: list[Results], new: list[Results], *options: str) -> int:
    old_paths = [str(write(tmp_path / f"old{k}.json", results)) for k, results in enumerate(old)]
    new_paths = [str(write(tmp_path / f"new{k}.json", results)) for k, results in enumerate(new)]
    if len(old) == len(new) == 1:
        return compare.main([*old_paths, *new_paths, *options])
    return compare.main(["--old", *old_paths, "--new", *new_paths, *options])


ENTRIES = [("gpu", "torch_ext", "throughput"), ("cpu", "cpu", "cpu")]


@pytest.mark.parametrize(("kind", "contender", "suite"), ENTRIES)
def test_a_planted_slowdown_is_found(kind: str, contender: str, suite: str, tmp_path: Path, capsys: Any) -> None:
    new = MAKERS[kind]()
    planted = find(new, contender, suite=suite)
    slow_down(planted, 1.25)
    assert compared(tmp_path, [MAKERS[kind]()], [new]) == 1
    lines = capsys.readouterr().out.splitlines()
    (found,) = [line for line in lines if line.endswith("slower")]
    assert found.startswith(f"{suite}: {planted['group']}: {contender} ") and "-20.0 %" in found
    assert "of ours 1 slower and 0 faster, of peers 0 moved" in lines[-1]


def test_only_a_slowdown_of_ours_fails_and_repeated_runs_make_verdicts(tmp_path: Path, capsys: Any) -> None:
    new = gpu_results()
    slow_down(find(new, "torch_ext", suite="throughput"), 0.75)
    slow_down(find(new, "torch_eager"), 2)
    assert compared(tmp_path, [gpu_results()], [new]) == 0
    said = capsys.readouterr().out
    assert "torch_eager (a peer)" in said and "of ours 0 slower and 1 faster, of peers 1 moved; hints only" in said
    assert compared(tmp_path, 2 * [gpu_results()], [new]) == 0
    said = capsys.readouterr().out
    assert "verdict\n" in said and "hint" not in said


@pytest.mark.parametrize("speed", [1, 2])
@pytest.mark.parametrize("kind", MAKERS)
def test_noise_and_a_slower_machine_are_no_change(kind: str, speed: float, tmp_path: Path, capsys: Any) -> None:
    new = MAKERS[kind]()
    for k, benchmark in enumerate(new["benchmarks"]):
        slow_down(benchmark, speed * (1.01, 1, 0.99)[k % 3])
        if benchmark["extra_info"]["memset_s"] is not None:
            benchmark["extra_info"]["memset_s"] *= speed
    assert compared(tmp_path, [MAKERS[kind]()], [new]) == 0
    assert "of ours 0 slower and 0 faster, of peers 0 moved" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "contender", "suite"), ENTRIES)
def test_the_spread_is_that_of_repeated_runs(kind: str, contender: str, suite: str, tmp_path: Path) -> None:
    def runs(factors: tuple[float, ...]) -> list[Results]:
        found = []
        for factor in factors:
            found.append(MAKERS[kind]())
            slow_down(find(found[-1], contender, suite=suite), factor)
        return found

    steady, unsteady, slower = (1, 1.001, 0.999), (1, 1.15, 0.9), (1.1, 1.101, 1.099)
    assert compared(tmp_path, runs(steady), runs(slower)) == 1
    assert compared(tmp_path, runs(unsteady), runs(slower)) == 0
    assert compared(tmp_path, runs(unsteady), runs((1.1,))) == 0  # The spread of one side stands for both.
    assert compared(tmp_path, runs(unsteady), runs((2, 2.3, 1.8))) == 1


def test_few_runs_that_agree_by_chance_do_not_make_a_change(tmp_path: Path) -> None:
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


def test_what_is_missing_is_listed(tmp_path: Path, capsys: Any) -> None:
    old, new = cpu_results(), cpu_results()
    old["benchmarks"].remove(find(old, "torch_randn", d=10, n=10))
    new["benchmarks"].remove(find(new, "cpu", d=10, n=10))
    new["benchmarks"].remove(find(new, "numpy", n=100_000))
    assert compared(tmp_path, [old], [new], "--all") == 0
    said = capsys.readouterr().out
    group, far = "cpu: (10, 10), float32, independent, portable", "cpu: (10, 100000), float32, independent, portable"
    assert f"only in the old results:\n  {group}: cpu\n  {far}: numpy\n" in said
    assert f"only in the new results:\n  {group}: torch_randn\n" in said
    assert f"in both, without a ratio:\n  {far}: cpu\n  {far}: torch_randn\n2 ratios compared" in said
    assert re.search(r"\(1000, 1000\).*: cpu +13.97 +13.97 +\+0.0 % ", said)


@pytest.mark.parametrize("arguments", [["a"], ["a", "b", "c"], ["--old", "a"], ["a", "b", "--old", "c", "--new", "d"]])
def test_two_files_or_two_lists_are_compared(arguments: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        compare.main(arguments)
    assert "results: expected two files, or --old and --new with files each" in capsys.readouterr().err
