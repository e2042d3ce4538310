"""Benchmarks on a GPU: `sample` and the other operations, ours and those of other libraries.

pytest bench --benchmark-only -k throughput --benchmark-json=results.json

The table has the time from a call until the device has finished; `extra_info` has those of `Times` in timing.py. All
contenders draw as their users do: into a new array, with new numbers each time.

The suite "original" is the project's first experiment: 1024 samples, with one row of noise for all dimensions, then
with independent noise, which the original kernel cannot draw. Its author timed a thousand consecutive calls
(`pipelined_s`) and emptied PyTorch's memory pool between calls, which takes time. Here results rotate instead.
"""

from typing import Any

import pytest

from bench.suites.cases import MODES, Case, parametrize
from bench.suites.contenders import CUDA
from bench.suites.running import CudaRunner

# Warnings of other libraries are not ours to fix.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.benchmark(disable_gc=True)]

HEADLINES = [(4096, 65_536), (262_144, 1024), (4_194_304, 32), (1000, 1024)]
SHAPES = [*HEADLINES, (1_048_576, 128), (4096, 65_537), (100, 100_000), (10, 10)]
SUITES = {
    "throughput": [
        *(Case(*shape, headline=shape in HEADLINES) for shape in SHAPES),
        *(Case(*shape, noise="shared") for shape in HEADLINES),
        *(Case(*SHAPES[0], dtype) for dtype in ("float16", "bfloat16", "float64")),
    ],
    "original": [
        Case(d, 1024, noise=noise)
        for noise in ("shared", "independent")
        for d in (10, 100, 500, 1000, 1500, 2000, 3000, 5000)
    ],
    "operations": [
        *(Case(b * d, n, operation="batch", matrices=b) for b, d, n in ((64, 7, 512), (4096, 12, 32), (8, 4096, 1024))),
        *(Case(members, 2**28, dtype, operation="perturb") for dtype in ("float32", "bfloat16") for members in (1, 8)),
        *(Case(d, n, operation="moments") for d, n in ((4096, 65_536), (1000, 1024))),
    ],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize(metafunc, SUITES, CUDA.values(), list(MODES))


def test_cuda(benchmark: Any, cuda: CudaRunner, suite: str, case: Case, contender: str, mode: str) -> None:
    cuda.run(benchmark, suite, CUDA[contender], case, mode)
