"""Samples on a GPU, of every shape and type: our backends beside what people use today.

pytest bench --benchmark-only -k throughput --benchmark-json=results.json

The table has the time of a call and of waiting for the device. In `extra_info`, which the report and the comparison
read, are the time on the device alone (`device_s`), the host's time of one call among many (`host_s`), that of each of
many calls in a row (`pipelined_s`) and of a cudaMemsetAsync over the same bytes; see timing.py for how they are taken,
and sample_checks.py for what a contender has to pass before. All draw as their users would: into a new array, each
time with new numbers. float32 for all; other types for ours and PyTorch's, at one shape.

Predicted before the first run, for an H200, from the figures of this kernel with `out=` and a seed (results/) and from
those of others on that GPU; fractions of the speed of memset. At (4096, 65536) and (262144, 1024): ours 0.70, with
fast_math 0.95; cuRAND without mu and sigma 0.45, with the dynamic order 0.5; torch.compile 0.18; torch.normal, whose
mean and deviation are applied one after the other in place, 0.13; eager, Normal.rsample and JAX 0.12, JAX's rbg 0.25;
CuPy 0.05 to 0.08. (1048576, 128): ours 0.68 and 0.86, (4194304, 32): 0.63 and 0.78, (4096, 65537): 0.63 and 0.82,
others as before. (100, 100000): as (4096, 65536), less a third for all, as the device is never full. (1000, 1024): ours
0.65 and 0.7, torch.compile 0.35. (10, 10): 2.5 us for what has one kernel, and its number of kernels times 2 us for
others. Half types: portable bound by instructions as float32 is, so 0.35 of a memset of half the bytes, fast_math 0.7.
float64: 0.3. Shared noise: ours 0.99, the original kernel 0.23 with the zeros that it writes first, eager 0.3,
torch.compile 0.18, as it draws anew for every element. Host, a call: ours 13 us, eager 27, torch.compile 45, JAX 50,
torch.normal waits for the device, as it looks for negative deviations.
"""

from __future__ import annotations

from typing import Any

import pytest

from bench.suites.cases import Case, modes_on_cuda, parametrize
from bench.suites.contenders import CUDA
from bench.suites.running import CudaRunner

# What other libraries warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

SHAPES = [
    (4096, 65_536), (262_144, 1024), (1_048_576, 128), (4_194_304, 32), (4096, 65_537),
    (100, 100_000), (1000, 1024), (10, 10),
]  # fmt: skip
CASES = [
    *(Case(d, n, "float32", noise) for noise in ("independent", "shared") for d, n in SHAPES),
    *(Case(*SHAPES[0], dtype) for dtype in ("float16", "bfloat16", "float64")),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize(metafunc, CASES, CUDA.values(), modes_on_cuda)


@pytest.mark.benchmark(disable_gc=True)
def test_throughput(
    benchmark: Any, cuda: CudaRunner, d: int, n: int, dtype: str, noise: str, contender: str, mode: str
) -> None:
    cuda.run(benchmark, "throughput", CUDA[contender], Case(d, n, dtype, noise), mode)
