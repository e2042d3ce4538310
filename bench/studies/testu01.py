"""The batteries of TestU01 on the words and the normals of the stream.

python -m bench.studies.testu01 SmallCrush|Crush|BigCrush results.json [--order ORDER ...] [--tests TEST ...]
    [--seed SEED ...] [--jobs JOBS] [--sources PATH]

The orders are words along rows, words down columns, words over the calls of a generator, and Phi of float64 and of
float32 normals (testu01.cpp); the default is all. A float32 normal gives 20 bits: with 30, test 11 of Crush detects the
lattice of binary32 numbers.

TestU01 (L'Ecuyer and Simard, ACM Transactions on Mathematical Software 33(4), 2007, doi:10.1145/1268776.1268777) is
compiled from --sources, a folder or an archive, or from a clone of CLONED.

Each test is one process and reads its own part of the stream, so results do not depend on --jobs. They are written
after every test. The same command with the same results.json runs the tests that it lacks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import multisample
from bench.report import entries
from bench.suites.machine import describe

CLONED = "https://github.com/umontreal-simul/TestU01-2009"
GENERATOR = Path(__file__).with_suffix(".cpp")
ORDERS = ("rows", "columns", "offsets", "normals", "normals_f32")
TESTS = {"SmallCrush": 10, "Crush": 96, "BigCrush": 106}
# TestU01 lists p-values outside of [SUSPICIOUS, 1 - SUSPICIOUS]. Outside of [FAILED, 1 - FAILED], its authors call the
# test failed.
SUSPICIOUS, FAILED = 1e-3, 1e-10

Run = dict[str, Any]


# --- The program --------------------------------------------------------------------------------------------------

# What TestU01's configure finds on 64-bit Linux and macOS.
FOUND = ("LONG_LONG", "ERF", "LGAMMA", "LOG1P", "STDINT_H", "UINT32_T", "UINT8_T")
DEFINITIONS = [f"-DHAVE_{name}" for name in FOUND]


def build(sources: Path | None, folder: Path, jobs: int) -> Path:
    """Compile TestU01 and the generator in an empty folder, without TestU01's configure, which is from 2009.

    Returns the program.
    """
    root = unpacked(sources, folder)
    include = folder / "include"
    include.mkdir()
    for name in ("config.h", "gdefconf.h"):
        (include / name).touch()
    # Every machine gets the same p-values, because nothing is contracted.
    compiler = os.environ.get("CC", "cc"), "-w", "-std=gnu89", "-O3", "-march=native", "-ffp-contract=off"
    output_of(*compiler, root / "mylib" / "tcode.c", "-o", folder / "tcode")
    # TestU01's headers are the code in its LaTeX pages, which tcode extracts.
    pages = sorted(page for name in ("mylib", "probdist", "testu01") for page in (root / name).glob("*.tex"))
    for page in pages:
        output_of(folder / "tcode", page, include / f"{page.stem}.h")
    # A file without a page is included by another one.
    files = [page.with_suffix(".c") for page in pages if page.with_suffix(".c").exists() and page.stem != "tcode"]
    (version,) = re.findall(r"AC_INIT\(TestU01, ([\d.]+)", (root / "configure.ac").read_text())
    options = [*DEFINITIONS, f'-DPACKAGE_STRING="TestU01 {version}"', f"-I{include}"]

    def compile_file(path: Path) -> Path:
        compiled = folder / f"{path.stem}.o"
        output_of(*compiler, *options, f"-I{path.parent}", "-c", path, "-o", compiled)
        return compiled

    with ThreadPoolExecutor(jobs) as pool:
        objects = list(pool.map(compile_file, files))
    program = folder / "testu01"
    output_of(
        os.environ.get("CXX", "c++"), "-std=c++17", "-O3", "-march=native", "-fno-math-errno", *DEFINITIONS,
        f"-I{include}", f"-I{multisample.get_include()}", GENERATOR, *objects, "-lm", "-o", program,
    )  # fmt: skip
    return program


def unpacked(sources: Path | None, folder: Path) -> Path:
    """The folder of TestU01's sources."""
    if sources is None:
        sources = folder / "clone"
        output_of("git", "clone", "--quiet", "--depth", "1", CLONED, sources)
    elif sources.is_file():
        options: dict[str, Any] = {} if sources.suffix == ".zip" else {"filter": "data"}
        shutil.unpack_archive(sources, folder / "archive", **options)
        sources = folder / "archive"
    found = sorted(sources.rglob("testu01/bbattery.c"))
    if not found:
        raise SystemExit(f"sources: expected a folder or an archive with testu01/bbattery.c, got {sources}")
    return found[0].parents[1]


def output_of(*command: str | Path) -> bytes:
    done = subprocess.run(list(map(str, command)), capture_output=True)
    if done.returncode:
        raise SystemExit(f"{command[0]}: {done.stderr.decode(errors='replace')[-5000:]}")
    return done.stdout


# --- Tests --------------------------------------------------------------------------------------------------------


def run_tests(program: Path, battery: str, runs: Sequence[Run], tests: Sequence[int], jobs: int) -> Iterator[Run]:
    """Run the tests that `runs` lack, and yield a run after each of its tests."""
    waiting = [(run, test) for test in tests for run in runs if test not in {done["test"] for done in run["tests"]}]
    running: dict[subprocess.Popen[str], tuple[Run, int]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run, test = waiting.pop(0)
                command = [str(program), "test", battery, str(test), run["order"], str(run["seed"])]
                running[subprocess.Popen(command, stdout=subprocess.PIPE, text=True)] = run, test
            for process in [process for process in running if process.poll() is not None]:
                run, test = running.pop(process)
                output = process.communicate()[0]
                if process.returncode:
                    raise SystemExit(f"{battery}, test {test}, {run['order']}: {output[-5000:]}")
                run["tests"] = sorted([*run["tests"], parsed(test, output)], key=lambda entry: int(entry["test"]))
                yield run
            time.sleep(0.02)
    finally:
        for process in running:
            process.kill()
            process.communicate()


def parsed(test: int, output: str) -> dict[str, Any]:
    """The results of a test."""
    statistics = [
        {"name": name, "p": float(p)} for name, p in re.findall(r"^p-value\t(.*)\t(.*)$", output, re.MULTILINE)
    ]
    (seconds,) = re.findall(r"^seconds\t(.*)$", output, re.MULTILINE)
    return {"test": test, "seconds": float(seconds), "statistics": statistics}


def summary(run: Run) -> dict[str, Any]:
    """The p-values of a run that are outside of TestU01's interval."""
    found = [{"test": test["test"], **statistic} for test in run["tests"] for statistic in test["statistics"]]
    outside = [entry for entry in found if not SUSPICIOUS <= entry["p"] <= 1 - SUSPICIOUS]
    failed = [entry for entry in outside if not FAILED <= entry["p"] <= 1 - FAILED]
    verdict = "failed" if failed else "suspicious" if outside else "passed"
    return {
        "verdict": verdict if len(run["tests"]) == TESTS[run["battery"]] else f"{verdict}, incomplete",
        "tests": len(run["tests"]), "statistics": len(found), "outside": outside,
        "expected_outside": round(2 * SUSPICIOUS * len(found), 2), "failed": len(failed),
        "cpu_seconds": round(sum(test["seconds"] for test in run["tests"])),
    }  # fmt: skip


# --- Files --------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[Run]:
    runs: list[Run] = json.loads(path.read_text())["runs"]
    return runs


def write(path: Path, runs: Sequence[Run]) -> None:
    """Replace the file at once, so that an interruption leaves the old or the new one."""
    for run in runs:
        run["summary"] = summary(run)
    new = path.with_name(path.name + ".new")
    entries.write(new, {"runs": runs})
    new.replace(path)


def run_of(runs: list[Run], battery: str, order: str, seed: int) -> Run:
    """The run of this kind, which is new if there is none."""
    for run in runs:
        if (run["battery"], run["order"], run["seed"]) == (battery, order, seed):
            return run
    runs.append({"battery": battery, "order": order, "seed": seed, "machines": [], "tests": []})
    return runs[-1]


def main(command: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("battery", choices=TESTS)
    parser.add_argument("results", type=Path)
    parser.add_argument("--order", choices=ORDERS, nargs="+", default=ORDERS)
    parser.add_argument("--tests", type=int, nargs="+", help="only these tests of the battery")
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--sources", type=Path)
    arguments = parser.parse_args(command)
    everything = range(1, TESTS[arguments.battery] + 1)
    tests = everything if arguments.tests is None else sorted(set(arguments.tests))
    if not set(tests) <= set(everything):
        parser.error(f"--tests: expected numbers from 1 to {everything[-1]}, got {tests}")
    if not all(0 <= seed < 2**64 for seed in arguments.seed):
        parser.error(f"--seed: expected 0 <= seed < 2**64, got {arguments.seed}")
    runs = read(arguments.results) if arguments.results.exists() else []
    kinds = itertools.product(dict.fromkeys(arguments.seed), dict.fromkeys(arguments.order))
    chosen = [run_of(runs, arguments.battery, order, seed) for seed, order in kinds]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ends the processes of the tests too.
    with tempfile.TemporaryDirectory() as folder:
        program = build(arguments.sources, Path(folder), arguments.jobs)
        machine = describe(None)
        for run in chosen:
            run["machines"] += [machine] * (machine not in run["machines"])
        write(arguments.results, runs)
        for run in run_tests(program, arguments.battery, chosen, tests, arguments.jobs):
            write(arguments.results, runs)
            result = run["summary"]
            print(f"{run['order']}: {result['tests']} tests, {len(result['outside'])} p-values outside", flush=True)


if __name__ == "__main__":
    main()
