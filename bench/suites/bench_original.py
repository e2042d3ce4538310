"""The project's first experiment: n = 1024 samples of d dimensions, d from 10 to 5000, on a GPU.

pytest bench --benchmark-only -k original --benchmark-json=results.json

With one row of noise for all dimensions, as at first: the original kernel (original_kernel.cu), and `mu + sigma *
torch.randn((1, n))`, eager and compiled. Then with independent noise, which the original kernel cannot draw. Its author
timed a thousand consecutive calls with CUDA events: this is `pipelined_s` in `extra_info`, beside the time on the
device alone and the host's time of one call. Between calls he emptied PyTorch's memory cache. That does not clear the
device's cache and adds to the time, so here the results rotate past the device's cache instead.
"""

from __future__ import annotations

from typing import Any

import pytest

from bench.suites.cases import Case, modes_on_cuda, parametrize
from bench.suites.contenders import CUDA
from bench.suites.running import CudaRunner

# Warnings of other libraries are not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")

N = 1024
DIMENSIONS = [10, 100, 500, 1000, 1500, 2000, 3000, 5000]
CASES = [Case(d, N, "float32", noise) for noise in ("shared", "independent") for d in DIMENSIONS]

# Without JAX: where the host takes longer, as here, JAX's time on the device cannot be measured.
CONTENDERS = {name: contender for name, contender in CUDA.items() if contender.wait is None}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize(metafunc, CASES, CONTENDERS.values(), modes_on_cuda)


@pytest.mark.benchmark(disable_gc=True)
def test_original(benchmark: Any, cuda: CudaRunner, case: Case, contender: str, mode: str) -> None:
    cuda.run(benchmark, "original", CONTENDERS[contender], case, mode)
