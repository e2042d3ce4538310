"""The study of TestU01: the numbers of its program are those of the reference, and no result is lost."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
from cuda_cpp import requires_gxx
from places import SHIM

import multisample
from bench.studies import testu01
from reference import stream as reference


def reference_numbers(test: int, order: str, seed: int, block: int) -> list[float]:
    """Two numbers from a block on."""
    line, place = test + 256 * (block // 2**32), block % 2**32
    if order == "rows":
        return [word / 2**32 for word in reference.words(seed, 0, line, place)][:2]
    if order == "columns":
        return [reference.words(seed, 0, place + k, line // 4)[line % 4] / 2**32 for k in range(2)]
    if order == "offsets":
        return [reference.words(seed, block + k, 0, test // 4)[test % 4] / 2**32 for k in range(2)]
    dtype, known = ("float64", reference.F64) if order == "normals" else ("float32", reference.F32)
    z = [reference.from_bits(reference.normal(seed, 0, line, 4 * place + k, known), dtype) for k in range(4)]
    phi = [math.erfc(-x / math.sqrt(2)) / 2 for x in z]
    bits = sum(int(u * 2**20) << (60 - 20 * k) for k, u in enumerate(phi))
    return phi[:2] if order == "normals" else [(bits >> 48) / 2**32, (bits >> 16) % 2**32 / 2**32]


@requires_gxx
def test_numbers_equal_the_reference(tmp_path: Path) -> None:
    includes = f"-I{multisample.get_include()}", f"-I{SHIM / 'testu01'}"
    program = tmp_path / "program"
    subprocess.run(["g++", "-std=c++17", "-O1", *includes, testu01.GENERATOR, "-o", program], check=True)
    for order in testu01.ORDERS:
        for test, seed, block in ((1, 7, 0), (96, 2**64 - 1, 2**32 - 1024), (106, 2**33 + 5, 5 * 2**32 + 2**31)):
            output = testu01.output_of(program, "draw", *map(str, (test, order, seed, block)), "2")
            expected = reference_numbers(test, order, seed, block)
            np.testing.assert_allclose(np.frombuffer(output[:16]), expected, rtol=1e-13)


def test_every_test_runs_once_and_a_failure_leaves_the_results_of_others(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text(
        '#!/bin/sh\n[ $3 = 7 ] && exit 1\nprintf "p-value\\tA\\t0.$3\\np-value\\tB\\t1e-20\\nseconds\\t1.5\\n"\n'
    )
    program.chmod(0o755)
    run: testu01.Run = {"battery": "SmallCrush", "order": "rows", "seed": 1, "tests": []}
    run["tests"] = [{"test": 2, "seconds": 1000.0, "statistics": [{"name": "A", "p": 0.5}]}]
    with pytest.raises(SystemExit, match="SmallCrush, test 7, rows"):
        list(testu01.run_tests(program, "SmallCrush", [run], [1, 2, 3, 7], 1))
    testu01.write(tmp_path / "results.json", [run])
    (found,) = testu01.read(tmp_path / "results.json")
    assert [(each["test"], each["seconds"], each["statistics"][0]["p"]) for each in found["tests"]] == [
        (1, 1.5, 0.1), (2, 1000, 0.5), (3, 1.5, 0.3),
    ]  # fmt: skip
    assert found["summary"]["verdict"] == "failed, incomplete"


@pytest.mark.parametrize(
    ("p", "outside", "verdict"),
    [(0.002, 0, "passed"), (0.9991, 1, "suspicious"), (2e-10, 1, "suspicious"), (0.0, 1, "failed"), (1.0, 1, "failed")],
)
def test_verdicts(p: float, outside: int, verdict: str) -> None:
    tests = [
        {"test": k, "seconds": 1.0, "statistics": [{"name": "A", "p": one}]} for k, one in enumerate([0.5] * 9 + [p])
    ]
    found = testu01.summary({"battery": "SmallCrush", "tests": tests})
    assert (found["verdict"], len(found["outside"]), found["statistics"]) == (verdict, outside, 10)
