"""The batteries of TestU01 on the words and the normals of the stream.

python -m bench.studies.testu01 SmallCrush|Crush|BigCrush results.json [--order ORDER ...] [--tests TEST ...]
    [--seed SEED ...] [--jobs JOBS] [--sources PATH]
python -m bench.studies.testu01 merge merged.json results.json ...

The orders are words along rows, words down columns, words over the calls of a generator, and Phi of float64 and of
float32 normals (testu01.cpp); the default is all. A float32 normal gives 20 bits: with 30, test 11 of Crush detects the
lattice of binary32 numbers.

TestU01 (L'Ecuyer and Simard, ACM Transactions on Mathematical Software 33(4), 2007, doi:10.1145/1268776.1268777) is
compiled from --sources, a folder or an archive, or from a clone of CLONED. Before the tests, the numbers of the
compiled program are compared with those of the backends.

Each test is one process and reads its own part of the stream, so results do not depend on --jobs. They are written
after every test. The same command with the same results.json runs the tests that it lacks.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
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
from typing import Any, NamedTuple

import numpy as np
from numba import njit

import multisample
from bench.suites.machine import describe
from multisample.backends.kernels.stream import words

CLONED = "https://github.com/umontreal-simul/TestU01-2009"
GENERATOR = Path(__file__).with_suffix(".cpp")
ORDERS = ("rows", "columns", "offsets", "normals", "normals_f32")
TESTS = {"SmallCrush": 10, "Crush": 96, "BigCrush": 106}
# The tests that take longest start first, so that all jobs end at about the same time.
LONGEST = {
    "BigCrush": (
        21, 20, 94, 39, 13, 45, 8, 19, 18, 10, 7, 9, 6, 36, 12, 5, 44, 11, 37, 35, 46, 89, 88, 25, 4, 47, 15, 49, 3, 65,
        24, 52, 43, 50, 48, 34, 103, 105, 17, 16, 106, 104, 22, 33, 31, 96, 41, 95, 57, 32, 51, 58, 80, 68, 69, 81,
    ),
}  # fmt: skip
# TestU01 lists p-values outside of [SUSPICIOUS, 1 - SUSPICIOUS]. Outside of [FAILED, 1 - FAILED], its authors call the
# test failed.
SUSPICIOUS, FAILED = 1e-3, 1e-10

Array = np.ndarray[Any, Any]
Run = dict[str, Any]


# --- The program --------------------------------------------------------------------------------------------------

# What TestU01's configure finds on 64-bit Linux and macOS.
FOUND = ("LONG_LONG", "ERF", "LGAMMA", "LOG1P", "STDINT_H", "UINT32_T", "UINT8_T")
DEFINITIONS = [f"-DHAVE_{name}" for name in FOUND]


class Program(NamedTuple):
    """The compiled program, and the version and the digest of TestU01's sources."""

    path: Path
    version: str
    digest: str


def build(sources: Path | None, folder: Path, jobs: int) -> Program:
    """Compile TestU01 and the generator in an empty folder, without TestU01's configure, which is from 2009."""
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
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]
    return Program(program, version, digest)


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


# --- Numbers that the program must have ---------------------------------------------------------------------------

stream_key, word, philox4x32_10 = words.stream_key, words.word, words.philox4x32_10


@njit
def _words(seed: int, offsets: Array, rows: Array, columns: Array) -> Array:
    result = np.empty(len(rows), np.uint32)
    k0, k1 = stream_key(np.uint64(seed))
    for m in range(len(rows)):
        o0, o1 = word(offsets[m]), offsets[m] >> np.uint64(32)
        block = philox4x32_10(columns[m] >> np.uint64(2), rows[m], o0, o1, k0, k1)
        result[m] = np.uint32(block[columns[m] & np.uint64(3)])
    return result


def phi(z: Array) -> Array:
    return np.array([math.erfc(-x * math.sqrt(0.5)) / 2 for x in z.astype(np.float64)])


def expected_numbers(test: int, order: str, seed: int, first: int, count: int) -> Array:
    """Numbers of an order from a block on, by the Python code of the backends; all of one row or column."""
    line, place = test + 256 * (first >> 32), first % 2**32
    steps, zeros = np.arange(count, dtype=np.uint64), np.zeros(count, np.uint64)
    if order.startswith("normals"):
        dtype = "float64" if order == "normals" else "float32"
        z = multisample.sample(
            [0.0], 1.0, 2 * count, seed=seed, dtype=dtype, dim_offset=line, sample_offset=4 * place, backend="cpu"
        )[0]
        if order == "normals":
            return phi(z[:count])
        twenty = np.floor(phi(z) * 2**20).astype(np.uint32)
        bits = np.unpackbits(twenty.astype(">u4").view(np.uint8).reshape(-1, 4), axis=1)[:, 12:]
        return np.packbits(bits).view(">u4")[:count] / 2.0**32
    rows, columns, offsets = {
        "rows": (zeros + np.uint64(line), steps + np.uint64(4 * place), zeros),
        "columns": (steps + np.uint64(place), zeros + np.uint64(line), zeros),
        "offsets": (zeros, zeros + np.uint64(test), steps + np.uint64(first)),
    }[order]
    return np.asarray(_words(np.uint64(seed), offsets, rows, columns) / 2.0**32)


def drawn_numbers(program: Path, test: int, order: str, seed: int, first: int, count: int) -> Array:
    """Numbers of the program from a block on. Its words must be their first 32 bits."""
    drawn = output_of(program, "draw", str(test), order, str(seed), str(first), str(count))
    numbers, got = np.frombuffer(drawn[: 8 * count]), np.frombuffer(drawn[8 * count :], np.uint32)
    if not np.array_equal(got, np.floor(numbers * 2**32)):
        raise SystemExit(f"{order}: the words of the program are not the first bits of its numbers")
    return numbers


def check_numbers(program: Path) -> None:
    """Refuse a program with other numbers than the backends."""
    count = 12_000
    for order in ORDERS:
        for test, seed, first in ((3, 7, 0), (106, 2**64 - 1, 3 * 2**32 - 24 * 1024)):
            place = test, order, seed, first, count
            # Two C libraries may round the error function differently.
            if not np.allclose(drawn_numbers(program, *place), expected_numbers(*place), rtol=1e-13, atol=0):
                raise SystemExit(f"{order}: the numbers of the program are not those of the backends")


# --- Tests --------------------------------------------------------------------------------------------------------


def run_tests(program: Path, battery: str, runs: Sequence[Run], tests: Sequence[int], jobs: int) -> Iterator[Run]:
    """Run the tests that `runs` lack, and yield a run after each of its tests."""
    queue = [test for test in LONGEST.get(battery, ()) if test in tests]
    queue += [test for test in tests if test not in queue]
    waiting = [(run, test) for test in queue for run in runs if test not in {done["test"] for done in run["tests"]}]
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
                add_tests(run, [parsed(test, output)])
                yield run
            time.sleep(0.02)
    finally:
        for process in running:
            process.kill()
            process.communicate()


def add_tests(run: Run, tests: Sequence[dict[str, Any]]) -> None:
    run["tests"] = sorted([*run["tests"], *tests], key=lambda entry: int(entry["test"]))


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
    new.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    new.replace(path)


def run_of(runs: list[Run], battery: str, order: str, seed: int) -> Run:
    """The run of this kind, which is new if there is none."""
    for run in runs:
        if (run["battery"], run["order"], run["seed"]) == (battery, order, seed):
            return run
    runs.append({"battery": battery, "order": order, "seed": seed, "machines": [], "tests": []})
    return runs[-1]


def merged(files: Sequence[Path]) -> list[Run]:
    """The runs of all files. Parts of a run may be in several files; a test that is in two is refused."""
    runs: list[Run] = []
    for path in files:
        for part in read(path):
            run = run_of(runs, part["battery"], part["order"], part["seed"])
            repeated = {test["test"] for test in run["tests"]} & {test["test"] for test in part["tests"]}
            if repeated:
                raise SystemExit(f"{path}: {part['battery']}, {part['order']}: test {min(repeated)} is in two files")
            add_tests(run, part["tests"])
            run["machines"] += [machine for machine in part["machines"] if machine not in run["machines"]]
    return runs


def report(runs: Sequence[Run]) -> None:
    print(
        f"{'battery':12}{'order':13}{'seed':>6}{'tests':>7}{'p-values':>10}{'outside':>9}{'expected':>10}{'CPU s':>8}"
    )
    for run in runs:
        result = summary(run)
        print(
            f"{run['battery']:12}{run['order']:13}{run['seed']:6}{result['tests']:7}{result['statistics']:10}"
            f"{len(result['outside']):9}{result['expected_outside']:10}{result['cpu_seconds']:8}  {result['verdict']}"
        )
        for entry in result["outside"]:
            p = f"{entry['p']:.3g}" if entry["p"] < 0.5 else f"1 - {1 - entry['p']:.3g}"
            print(f"    test {entry['test']}, {entry['name']}: p = {p}")


def main(command: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("battery", choices=[*TESTS, "merge"])
    parser.add_argument("results", type=Path)
    parser.add_argument("files", type=Path, nargs="*", help="with merge: the files to merge")
    parser.add_argument("--order", choices=ORDERS, nargs="+", default=ORDERS)
    parser.add_argument("--tests", type=int, nargs="+", help="only these tests of the battery")
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--sources", type=Path)
    arguments = parser.parse_args(command)
    if (arguments.battery == "merge") != bool(arguments.files):
        parser.error("files: expected one or more with merge, and none with a battery")
    if arguments.battery == "merge":
        runs = merged(arguments.files)
        write(arguments.results, runs)
        report(runs)
        return
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
        check_numbers(program.path)
        machine = describe(None)
        machine["versions"].update({"testu01": program.version, "testu01_sources": program.digest})
        for run in chosen:
            run["machines"] += [machine] * (machine not in run["machines"])
        write(arguments.results, runs)
        for run in run_tests(program.path, arguments.battery, chosen, tests, arguments.jobs):
            write(arguments.results, runs)
            result = run["summary"]
            print(f"{run['order']}: {result['tests']} tests, {len(result['outside'])} p-values outside", flush=True)
    report(chosen)


if __name__ == "__main__":
    main()
