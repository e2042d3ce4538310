"""The study of TestU01: its numbers are those of the reference, wrong numbers are refused, and no result is lost.

A library with TestU01's names takes the place of TestU01: the p-values of each test are two numbers of the generator.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_cpp import SECONDS, requires_gxx
from known_normals import Array
from places import ROOT
from tables import slow_but

from bench.studies import testu01
from reference import stream as reference

pytestmark = requires_gxx

HEADER = """
#pragma once
typedef struct {
  void *state, *param;
  char* name;
  double (*GetU01)(void* param, void* state);
  unsigned long (*GetBits)(void* param, void* state);
  void (*Write)(void* state);
} unif01_Gen;
"""
BATTERIES = """
#include "unif01.h"
extern int bbattery_NTests;
extern double bbattery_pVal[];
extern char* bbattery_TestNames[];
void bbattery_RepeatSmallCrush(unif01_Gen* gen, int rep[]);
void bbattery_RepeatCrush(unif01_Gen* gen, int rep[]);
void bbattery_RepeatBigCrush(unif01_Gen* gen, int rep[]);
"""
CODE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include "bbattery.h"
#include "swrite.h"
int swrite_Basic = 1;
int bbattery_NTests = 0;
double bbattery_pVal[201];
char* bbattery_TestNames[201];
static void repeat(unif01_Gen* gen, int rep[], int tests) {
  int test;
  bbattery_NTests = 0;
  for (test = 1; test <= tests; ++test) {
    if (rep[test] != 1) continue;
    if (tests == 106 && test == 21) exit(1);
    if (tests == 96 && test == 13) {
      FILE* file = fopen(getenv("PROCESS_OF_TEST_13"), "w");
      fprintf(file, "%d\n", (int)getpid());
      fclose(file);
      sleep(600);
    }
    printf("%s, %s\n", PACKAGE_STRING, swrite_Basic ? "with details" : "without details");
    bbattery_TestNames[bbattery_NTests] = "U01, t = 1";
    bbattery_pVal[bbattery_NTests++] = gen->GetU01(gen->param, gen->state);
    bbattery_TestNames[bbattery_NTests] = "Bits";
    bbattery_pVal[bbattery_NTests++] = gen->GetBits(gen->param, gen->state) / 4294967296.0;
  }
}
void bbattery_RepeatSmallCrush(unif01_Gen* gen, int rep[]) { repeat(gen, rep, 10); }
void bbattery_RepeatCrush(unif01_Gen* gen, int rep[]) { repeat(gen, rep, 96); }
void bbattery_RepeatBigCrush(unif01_Gen* gen, int rep[]) { repeat(gen, rep, 106); }
"""
# TestU01's headers are parts of its pages. These pages are headers.
COPY = r"""
#include <stdio.h>
int main(int count, char** names) {
  FILE *page = fopen(names[1], "r"), *header = fopen(names[2], "w");
  int c;
  while ((c = fgetc(page)) != EOF) fputc(c, header);
  return count != 3;
}
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources") / "TestU01-0.0"
    files = {
        "configure.ac": "AC_INIT(TestU01, 0.0, nobody)",
        "mylib/tcode.c": COPY,
        "mylib/tcode.tex": "",
        "testu01/unif01.tex": HEADER,
        "testu01/swrite.tex": "extern int swrite_Basic;",
        "testu01/bbattery.tex": BATTERIES,
        "testu01/bbattery.c": CODE,
        "testu01/part_of_another.c": "#error",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def program(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = testu01.build(sources, tmp_path_factory.mktemp("build"), 1)
    assert built.version == "0.0"
    return built.path


# --- Numbers ------------------------------------------------------------------------------------------------------


def phi(z: float) -> float:
    return math.erfc(-z / math.sqrt(2)) / 2


def reference_numbers(test: int, order: str, seed: int, first: int, count: int) -> Array:
    """The first `count` numbers from a block on."""
    numbers: list[float] = []
    bits, digits = 0, 0
    block = first
    while len(numbers) < count:
        line, place = test + 256 * (block // 2**32), block % 2**32
        if order == "rows":
            numbers += [word / 2**32 for word in reference.words(seed, 0, line, place)]
        elif order == "columns":
            numbers.append(reference.words(seed, 0, place, line // 4)[line % 4] / 2**32)
        elif order == "offsets":
            numbers.append(reference.words(seed, block, 0, test // 4)[test % 4] / 2**32)
        else:
            dtype = "float64" if order == "normals" else "float32"
            known = reference.F64 if order == "normals" else reference.F32
            z = [reference.from_bits(reference.normal(seed, 0, line, 4 * place + k, known), dtype) for k in range(4)]
            if order == "normals":
                numbers += map(phi, z)
            for x in z:
                bits, digits = bits << 20 | int(phi(x) * 2**20), digits + 20
            while order == "normals_f32" and digits >= 32:
                digits -= 32
                numbers.append((bits >> digits) % 2**32 / 2**32)
        block += 1
    return np.array(numbers[:count])


# Numbers that 1024 blocks give, which the program draws at once.
NUMBERS_OF_1024_BLOCKS = {"rows": 4096, "columns": 1024, "offsets": 1024, "normals": 4096, "normals_f32": 2560}


@pytest.mark.parametrize("order", testu01.ORDERS)
@pytest.mark.parametrize(
    ("test", "seed", "first"), [(1, 7, 0), (96, 2**64 - 1, 2**32 - 1024), (106, 2**33 + 5, 5 * 2**32 + 2**31)]
)
def test_numbers_equal_the_reference(program: Path, order: str, test: int, seed: int, first: int) -> None:
    drawn = testu01.drawn_numbers(program, test, order, seed, first, NUMBERS_OF_1024_BLOCKS[order] + 30)
    for got, block in ((drawn[:30], first), (drawn[-30:], first + 1024)):
        expected = reference_numbers(test, order, seed, block, 30)
        if order == "normals":
            np.testing.assert_allclose(got, expected, rtol=1e-13)
        else:
            assert np.array_equal(got, expected)


def test_the_program_passes_its_own_check(program: Path) -> None:
    testu01.check_numbers(program)


WRONG = {
    "word of another offset": ("rows", "words(i, g + k, 0)", "words(i, g + k, 1)"),
    "word of another column": ("columns", "j & 1", "j & 2"),
    "half of the offset": ("offsets", "block_ + k)", "(block_ + k) & ~0u)"),
    "float32 for float64": ("normals", "normals4_f64", "normals4"),
    "19 bits": ("normals_f32", "bits << 20", "bits << 19"),
    "31 bits": ("rows", "* 0x1p32)", "* 0x1p31)"),
}


@pytest.mark.parametrize("name", slow_but(("word of another column", "float32 for float64"), WRONG))
def test_a_program_with_wrong_numbers_is_refused(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    order, text, wrong = WRONG[name]
    code = testu01.GENERATOR.read_text()
    assert text in code
    monkeypatch.setattr(testu01, "GENERATOR", tmp_path / "wrong.cpp")
    testu01.GENERATOR.write_text(code.replace(text, wrong))
    program = testu01.build(sources, tmp_path, 1).path
    with pytest.raises(SystemExit, match=f"^{order}: the (numbers|words) of the program are not"):
        testu01.check_numbers(program)


# --- Results ------------------------------------------------------------------------------------------------------


def run(sources: Path, *command: str | Path) -> None:
    testu01.main([*map(str, command), "--jobs", "2", "--sources", str(sources)])


def p_values(path: Path) -> dict[tuple[str, str, int, int, str], float]:
    return {
        (run["battery"], run["order"], run["seed"], test["test"], one["name"]): one["p"]
        for run in testu01.read(path) for test in run["tests"] for one in test["statistics"]
    }  # fmt: skip


def test_every_test_of_a_battery_runs_once_on_numbers_of_its_own(
    sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = shutil.make_archive(str(tmp_path / "sources"), "gztar", sources.parent)
    results, orders = tmp_path / "results.json", ("--order", "rows", "columns")
    run(Path(archive), "SmallCrush", results, "--tests", "2", "9", "2", *orders, "rows")
    # Marks the results that must stay.
    runs = testu01.read(results)
    for one in runs:
        one["tests"][0]["seconds"] = 1000.0
    testu01.write(results, runs)
    run(sources, "SmallCrush", results, *orders)
    found = p_values(results)
    assert len(found) == 2 * 10 * 2
    for (battery, order, seed, test, name), p in found.items():
        first, second = reference_numbers(test, order, seed, 0, 2)
        assert (battery, seed, p) == ("SmallCrush", 1, first if name == "U01, t = 1" else second)
    for one in testu01.read(results):
        assert [test["test"] for test in one["tests"]] == list(range(1, 11))
        assert [test["test"] for test in one["tests"] if test["seconds"] == 1000] == [2]
        assert one["summary"] == testu01.summary(one)
        (machine,) = one["machines"]
        assert machine["versions"]["testu01"] == "0.0"
    assert capsys.readouterr().out.count("SmallCrush  ") == 4


def test_a_test_that_fails_to_run_leaves_the_results_of_others(sources: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    arguments = "BigCrush", results, "--order", "offsets", "--seed", "7", "8"
    run(sources, *arguments, "--tests", "3")
    with pytest.raises(SystemExit, match="BigCrush, test 21, offsets"):
        run(sources, *arguments, "--tests", "3", "21")
    assert {key[2:4] for key in p_values(results)} == {(7, 3), (8, 3)}
    for one in testu01.read(results):
        assert one["summary"]["verdict"].endswith("incomplete")


def test_an_interruption_ends_all_processes_and_keeps_the_results(sources: Path, tmp_path: Path) -> None:
    results, process = tmp_path / "results.json", tmp_path / "process"
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    study = subprocess.Popen(
        [
            sys.executable, "-m", "bench.studies.testu01", "Crush", str(results), "--order", "rows",
            "--tests", "3", "13", "--jobs", "1", "--sources", str(sources),
        ],
        cwd=ROOT, env={**os.environ, "PROCESS_OF_TEST_13": str(process), "TMPDIR": str(temporary)},
    )  # fmt: skip
    deadline = time.monotonic() + SECONDS
    while not (process.exists() and process.read_text().endswith("\n")):
        assert study.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    study.terminate()
    assert study.wait(SECONDS) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(process.read_text()), 0)
    assert list(temporary.iterdir()) == []
    assert {key[3] for key in p_values(results)} == {3}


def result(battery: str, tests: dict[int, list[float]], **others: Any) -> testu01.Run:
    return {
        "battery": battery, "order": "rows", "seed": 1, "machines": ["one"],
        "tests": [
            {"test": test, "seconds": 1.0, "statistics": [{"name": "A", "p": p} for p in found]}
            for test, found in tests.items()
        ],
        **others,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("p", "outside", "verdict"),
    [(0.002, 0, "passed"), (0.9991, 1, "suspicious"), (2e-10, 1, "suspicious"), (0.0, 1, "failed"), (1.0, 1, "failed")],
)
def test_verdicts(p: float, outside: int, verdict: str) -> None:
    tests = {test: [0.5, 0.25] for test in range(1, 11)}
    found = testu01.summary(result("SmallCrush", {**tests, 4: [0.5, p]}))
    assert (found["verdict"], len(found["outside"]), found["statistics"]) == (verdict, outside, 20)
    assert [one["test"] for one in found["outside"]] == [4] * outside
    assert found["expected_outside"] == 0.04
    assert testu01.summary(result("Crush", tests))["verdict"] == "passed, incomplete"


def test_parts_are_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = {
        "a": [result("SmallCrush", {2: [0.5], 10: [1e-20]})],
        "b": [result("SmallCrush", {test: [0.5] for test in (1, 3, 4, 5, 6, 7, 8, 9)}, machines=["one", "other"])],
        "c": [result("SmallCrush", {2: [0.5]}, seed=2)],
    }
    for name, runs in parts.items():
        testu01.write(tmp_path / name, runs)
    target = tmp_path / "all.json"
    testu01.main(["merge", str(target), *(str(tmp_path / name) for name in parts)])
    first, second = json.loads(target.read_text())["runs"]
    assert [test["test"] for test in first["tests"]] == list(range(1, 11))
    assert (first["summary"]["verdict"], first["machines"]) == ("failed", ["one", "other"])
    assert (second["seed"], second["summary"]["verdict"]) == (2, "passed, incomplete")
    assert "test 10, A: p = 1e-20" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="test 2 is in two files"):
        testu01.main(["merge", str(target), str(tmp_path / "a"), str(tmp_path / "a")])
    with pytest.raises(FileNotFoundError):
        testu01.main(["merge", str(target), str(tmp_path / "d")])
    assert len(testu01.read(target)) == 2


@pytest.mark.parametrize(
    "options", [("--tests", "0"), ("--tests", "97"), ("--seed", "-1"), ("--seed", str(2**64)), ("other.json",)]
)
def test_wrong_options_are_refused(tmp_path: Path, options: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, "Crush", tmp_path / "results.json", *options)
    assert not (tmp_path / "results.json").exists()


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"sources: expected a folder or an archive with testu01/bbattery\.c"):
        run(tmp_path, "Crush", tmp_path / "results.json")
