"""Benchmarks on the CPU: `sample` and the other operations, ours and those of other libraries, in the same run.

pytest bench --benchmark-only -k cpu --benchmark-json=results.json

Only ratios within one run mean anything; the comparison uses the ratios to NumPy. The suite "cpu" makes new arrays. The
suite "cpu_out" fills an existing array. A contender with `lacks` draws standard normals, without mu and sigma.
"""

from typing import Any

import pytest

from bench.suites.cases import Case, parametrize
from bench.suites.contenders import CPU
from bench.suites.running import run_on_cpu

pytestmark = pytest.mark.benchmark(min_rounds=7, max_time=0.5)

SHAPES = [
    (10, 10), (100, 100), (1000, 100), (1000, 1000), (1000, 10_000), (10_000, 1000), (10, 1_000_000), (1, 10_000_000),
    (32, 300_000), (33, 30_000), (100_000, 100),
]  # fmt: skip
HEADLINES = [(10, 10), (100, 100), (1000, 1000), (1000, 10_000)]
SUITES = {
    "cpu": [
        *(Case(*shape, headline=shape in HEADLINES) for shape in SHAPES),
        *(Case(*shape, noise="shared") for shape in SHAPES),
    ],
    "cpu_operations": [
        *(Case(b * d, n, operation="batch", matrices=b, headline=True) for b, d, n in ((1000, 10, 10), (64, 7, 512))),
        *(Case(members, 2**22, operation="perturb", headline=True) for members in (1, 8)),
        *(Case(d, n, operation="moments", headline=True) for d, n in ((100, 1000), (1000, 10_000))),
    ],
    "cpu_out": [Case(*shape, operation="fill") for shape in SHAPES],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize(metafunc, SUITES, CPU.values(), ["portable"])


def test_cpu(benchmark: Any, suite: str, case: Case, contender: str, mode: str) -> None:
    run_on_cpu(benchmark, suite, CPU[contender], case)
