"""The batteries of TestU01 on the words and the normals of the stream.

python -m bench.studies.testu01 SmallCrush|Crush|BigCrush results.json [--seed SEED ...] [--sources FOLDER]

Each test of a battery reads its own part of the stream, in one of these orders:

rows         the words of row TEST
columns      the words of column TEST
offsets      the word of element (0, TEST) of every offset: one word of each call of a generator
normals      Phi of the float64 normals of row TEST
normals_f32  Phi of the float32 normals of row TEST: 20 bits from each of eight normals make five words. With 32 bits,
             test 11 of Crush detects the lattice of binary32 numbers.

A row ends after 2^32 blocks of four, and a column after 2^32 rows. The test goes on in row or column TEST + 256.

TestU01 (L'Ecuyer and Simard, ACM Transactions on Mathematical Software 33(4), 2007, doi:10.1145/1268776.1268777) is
compiled from --sources, or from a clone of CLONED. Results are written after every test. The same command with the same
results.json runs the tests that it lacks.
"""

import argparse
import ctypes
import functools
import itertools
import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
from numba import carray, cfunc, njit

from bench.report import results
from bench.suites.machine import describe
from multisample.backends.kernels.stream.words import philox4x32_10, stream_key, word
from multisample.numba import normals4, normals4_f64

CLONED = "https://github.com/umontreal-simul/TestU01-2009"
ORDERS = ("rows", "columns", "offsets", "normals", "normals_f32")
TESTS = {"SmallCrush": 10, "Crush": 96, "BigCrush": 106}
# TestU01 lists p-values outside of [SUSPICIOUS, 1 - SUSPICIOUS]. Outside of [FAILED, 1 - FAILED], its authors call the
# test failed.
SUSPICIOUS, FAILED = 1e-3, 1e-10
BLOCKS = 1024  # Blocks that are drawn at once.

Run = dict[str, Any]


@njit
def phi(z: float) -> float:
    return min(math.erfc(-z * math.sqrt(0.5)) / 2, 1 - 2.0**-53)


@njit
def fill(order: int, test: int, seed: int, first: int, out: Any) -> int:
    """Write the numbers of BLOCKS blocks from block `first` on; returns how many there are."""
    k0, k1 = stream_key(seed)
    zero, four = np.uint64(0), np.uint64(4)
    line, place = test + np.uint64(256) * (first >> np.uint64(32)), word(first)
    bits, count, size = zero, 0, 0
    for k in range(BLOCKS):
        at = place + np.uint64(k)
        if order < 3:
            j, i, o = ((four * at, line, zero), (line, at, zero), (test, zero, first + np.uint64(k)))[order]
            words = philox4x32_10(j // four, i, word(o), o >> np.uint64(32), k0, k1)
            for c in range(4):
                if order == 0 or np.uint64(c) == j % four:  # Rows take every word of a block.
                    out[size] = np.uint32(words[c]) * 2.0**-32
                    size += 1
        elif order == 3:
            for z in normals4_f64(seed, zero, line, at):
                out[size] = phi(z)
                size += 1
        else:
            for x in normals4(seed, zero, line, at):
                bits = bits << np.uint64(20) | np.uint64(phi(np.float64(x)) * 2.0**20)
                count += 20
                if count >= 32:
                    count -= 32
                    out[size] = np.uint32(bits >> np.uint64(count)) * 2.0**-32
                    size += 1
    return size


@njit
def next_number(place_address: Any, numbers_address: Any) -> float:
    """The next buffered number. The place: order, test, seed, next block, numbers used, numbers in the buffer."""
    place, numbers = carray(place_address, 6, np.uint64), carray(numbers_address, 4 * BLOCKS, np.float64)
    if place[4] == place[5]:
        place[5] = fill(place[0], place[1], place[2], place[3], numbers)
        place[3] += np.uint64(BLOCKS)
        place[4] = 0
    place[4] += np.uint64(1)
    return numbers[place[4] - np.uint64(1)]


@functools.cache
def callbacks() -> tuple[Any, ...]:
    """Callbacks of a generator of TestU01, compiled at first use: next number, 32-bit word, and an empty report."""

    @cfunc("float64(voidptr, voidptr)")
    def get_u01(place: Any, numbers: Any) -> float:
        return next_number(place, numbers)

    @cfunc("uint64(voidptr, voidptr)")
    def get_bits(place: Any, numbers: Any) -> int:
        return np.uint64(next_number(place, numbers) * 2.0**32)

    @cfunc("void(voidptr)")
    def write_nothing(numbers: Any) -> None:
        pass

    return get_u01, get_bits, write_nothing


def build(sources: Path | None, folder: Path) -> Path:
    """Compile TestU01 in an empty folder, and return the path of the shared library."""
    copy = folder / "TestU01"  # TestU01 compiles only where its sources are.
    if sources is None:
        subprocess.run(["git", "clone", "--quiet", "--depth", "1", CLONED, copy], check=True)
    else:
        shutil.copytree(sources, copy)
    # Every machine gets the same p-values, because nothing is contracted.
    flags = "CFLAGS=-w -std=gnu89 -O3 -march=native -ffp-contract=off"
    configure = ["./configure", f"--prefix={folder}", "--disable-static", flags]
    # A clone gives all files one time. `make` would take the generated files for outdated, and run Autotools.
    make = ["make", "install", *(f"{tool}=:" for tool in ("ACLOCAL", "AUTOCONF", "AUTOHEADER", "AUTOMAKE"))]
    for command in (configure, make):
        subprocess.run(command, cwd=copy, check=True, stdout=subprocess.DEVNULL)
    return folder / "lib" / ("libtestu01.dylib" if sys.platform == "darwin" else "libtestu01.so")


def run_test(library: Path, battery: str, test: int, order: str, seed: int) -> dict[str, Any]:
    """The p-values and the CPU time of a test. TestU01's own report goes to /dev/null."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    testu01 = ctypes.CDLL(str(library))
    place, numbers = np.array([ORDERS.index(order), test, seed, 0, 0, 0], np.uint64), np.empty(4 * BLOCKS)
    name, functions = ctypes.create_string_buffer(b"multisample"), (function.address for function in callbacks())
    # TestU01's unif01_Gen: the functions' two arguments in reverse, the name, and the functions.
    generator = (ctypes.c_void_p * 6)(numbers.ctypes.data, place.ctypes.data, ctypes.addressof(name), *functions)
    repetitions = (ctypes.c_int * 201)()
    repetitions[test] = 1
    start = os.times()
    getattr(testu01, f"bbattery_Repeat{battery}")(ctypes.byref(generator), repetitions)
    count = ctypes.c_int.in_dll(testu01, "bbattery_NTests").value
    names = (ctypes.c_char_p * count).in_dll(testu01, "bbattery_TestNames")
    p = (ctypes.c_double * count).in_dll(testu01, "bbattery_pVal")
    statistics = [{"name": (names[k] or b"").decode(), "p": p[k]} for k in range(count)]
    return {"test": test, "seconds": round(os.times().user - start.user, 2), "statistics": statistics}


def run_tests(library: Path, runs: Sequence[Run]) -> Iterator[Run]:
    """Run the tests whose results `runs` lack, and yield the run after each test."""
    # A forked process inherits the compiled functions.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as pool:
        waiting = {
            pool.submit(run_test, library, run["battery"], test, run["order"], run["seed"]): run
            for run in runs
            for test in sorted(set(range(1, TESTS[run["battery"]] + 1)) - {done["test"] for done in run["tests"]})
        }
        for future in as_completed(waiting):
            run = waiting[future]
            run["tests"] = sorted([*run["tests"], future.result()], key=lambda entry: int(entry["test"]))
            yield run


def summary(run: Run) -> dict[str, Any]:
    """The p-values of a run that are outside of TestU01's interval."""
    found = [{"test": test["test"], **statistic} for test in run["tests"] for statistic in test["statistics"]]
    outside = [entry for entry in found if not SUSPICIOUS <= entry["p"] <= 1 - SUSPICIOUS]
    failed = any(not FAILED <= entry["p"] <= 1 - FAILED for entry in outside)
    verdict = "failed" if failed else "suspicious" if outside else "passed"
    return {
        "verdict": verdict if len(run["tests"]) == TESTS[run["battery"]] else f"{verdict}, incomplete",
        "statistics": len(found),
        "outside": outside,
        "expected_outside": round(2 * SUSPICIOUS * len(found), 2),
        "cpu_seconds": round(sum(test["seconds"] for test in run["tests"])),
    }


def write(path: Path, runs: Sequence[Run]) -> None:
    for run in runs:
        run["summary"] = summary(run)
    results.write(path, {"runs": runs})


def main(command: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("battery", choices=TESTS)
    parser.add_argument("results", type=Path)
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument("--sources", type=Path, help="a folder with TestU01's sources")
    options = parser.parse_args(command)
    if not all(0 <= seed < 2**64 for seed in options.seed):
        parser.error(f"--seed: expected 0 <= seed < 2**64, got {options.seed}")
    runs = json.loads(options.results.read_text())["runs"] if options.results.exists() else []
    machine = describe(gpu=False)
    kinds = {(run["battery"], run["order"], run["seed"]): run for run in runs}
    for key in itertools.product([options.battery], ORDERS, options.seed):
        made = dict(zip(("battery", "order", "seed"), key, strict=True), machines=[], tests=[])
        run = kinds.setdefault(key, made)
        run["machines"] += [machine] * (machine not in run["machines"])
    with tempfile.TemporaryDirectory() as folder:
        library = build(options.sources, Path(folder))
        for run in run_tests(library, list(kinds.values())):
            write(options.results, list(kinds.values()))
            outside = len(run["summary"]["outside"])
            print(f"{run['order']}: {len(run['tests'])} tests, {outside} p-values outside", flush=True)


if __name__ == "__main__":
    main()
