"""The study of TestU01: the numbers of its program are those of the reference, and no result is lost."""

from __future__ import annotations

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.studies import testu01
from reference import stream as reference


def reference_numbers(test: int, order: str, seed: int, block: int) -> list[float]:
    """The two numbers that begin at `block`."""
    line, place = test + 256 * (block // 2**32), block % 2**32
    offset_i_j = {
        "rows": [(0, line, 4 * place + k) for k in range(2)],
        "columns": [(0, place + k, line) for k in range(2)],
        "offsets": [(block + k, 0, test) for k in range(2)],
    }
    if order in offset_i_j:
        return [reference.words(seed, offset, i, j // 4)[j % 4] / 2**32 for offset, i, j in offset_i_j[order]]
    dtype, known = ("float64", reference.F64) if order == "normals" else ("float32", reference.F32)
    z = [reference.from_bits(reference.normal(seed, 0, line, 4 * place + k, known), dtype) for k in range(4)]
    phi = [math.erfc(-x / math.sqrt(2)) / 2 for x in z]
    bits = sum(int(u * 2**20) << (60 - 20 * k) for k, u in enumerate(phi))
    return phi[:2] if order == "normals" else [(bits >> 48) / 2**32, (bits >> 16) % 2**32 / 2**32]


def test_numbers_equal_the_reference() -> None:
    get_u01, get_bits, _ = testu01.callbacks()
    for order, name in enumerate(testu01.ORDERS):
        for test, seed, block in ((1, 7, 0), (96, 2**64 - 1, 2**32 - 1024), (106, 2**33 + 5, 5 * 2**32 + 2**31)):
            place = np.array([order, test, seed, block, 0, 0], np.uint64)
            numbers = np.empty(4096)
            arguments = place.ctypes.data, numbers.ctypes.data
            drawn = [get_u01.ctypes(*arguments) for _ in range(2)]
            np.testing.assert_allclose(drawn, reference_numbers(test, name, seed, block), rtol=1e-13)
            assert get_bits.ctypes(*arguments) == int(numbers[2] * 2**32)
            # The next buffer begins with the next block.
            place[4] = place[5]
            get_u01.ctypes(*arguments)
            np.testing.assert_allclose(numbers[:2], reference_numbers(test, name, seed, block + 1024), rtol=1e-13)


def result_of(library: Path, battery: str, test: int, order: str, seed: int) -> dict[str, Any]:
    if test == 7:
        time.sleep(0.2)  # The other tests end first.
        raise OSError(f"{battery}, test 7, {order}")
    p = {"A": test / 10, "B": 1e-20}
    return {"test": test, "seconds": 1.5, "statistics": [{"name": name, "p": value} for name, value in p.items()]}


def test_every_test_runs_once_and_a_failure_leaves_the_results_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(testu01, "run_test", result_of)
    # Threads: JAX, which other tests import, must not be forked.
    monkeypatch.setattr(testu01, "ProcessPoolExecutor", lambda mp_context: ThreadPoolExecutor(2))
    run: testu01.Run = {"battery": "SmallCrush", "order": "rows", "seed": 1, "tests": []}
    run["tests"] = [{"test": 2, "seconds": 1000.0, "statistics": [{"name": "A", "p": 0.5}]}]
    with pytest.raises(OSError, match="SmallCrush, test 7, rows"):
        for _ in testu01.run_tests(tmp_path, [run]):
            testu01.write(tmp_path / "results.json", [run])
    (found,) = json.loads((tmp_path / "results.json").read_text())["runs"]
    done = {each["test"]: (each["seconds"], each["statistics"][0]["p"]) for each in found["tests"]}
    assert done[2] == (1000, 0.5) and all(done[k] == (1.5, k / 10) for k in set(done) - {2}) and len(done) > 1
    assert found["summary"]["verdict"] == "failed, incomplete"


@pytest.mark.parametrize(
    ("p", "verdict"),
    [(0.002, "passed"), (0.9991, "suspicious"), (2e-10, "suspicious"), (0.0, "failed"), (1.0, "failed")],
)
def test_verdicts(p: float, verdict: str) -> None:
    values = [*[0.5] * 9, p]
    tests = [{"test": k, "seconds": 1.0, "statistics": [{"name": "A", "p": one}]} for k, one in enumerate(values)]
    found = testu01.summary({"battery": "SmallCrush", "tests": tests})
    assert (found["verdict"], len(found["outside"]), found["statistics"]) == (verdict, verdict != "passed", 10)
