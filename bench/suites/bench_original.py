"""The project's first experiment: n = 1024 samples of d dimensions, d from 10 to 5000, on a GPU.

pytest bench --benchmark-only -k original --benchmark-json=results.json

With one row of noise for all dimensions, as at first: the original kernel (original_kernel.cu), and `mu + sigma *
torch.randn((1, n))`, eager and compiled. Then with independent noise, which the original kernel cannot draw. Its author
timed a thousand consecutive calls with CUDA events: this is `pipelined_s` in `extra_info`, beside the time on the
device alone and the host's time of one call. Between calls he emptied PyTorch's memory cache. That does not clear the
device's cache and adds to the time, so here the results rotate past the device's cache instead.

Predicted before the first run, for an H200, from host costs in other runs (13 us for `sample` without a seed, 16.5 for
the original kernel, 27 eager, 45 compiled) and from the speeds on large shapes. For consecutive calls, `torch_ext` is
3.5 times as fast as torch.compile at every d, since the host is the limit. It is 1.3 times as fast as the original
kernel up to d = 1000, twice at 2500 and 3.5 times at 5000, where the original is bound by scalar stores and by the
zeros that it writes first. On the device alone, it is twice as fast as torch.compile at d = 10 (two kernels, one), 3
times at 5000, and 4 times with fast_math.
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
