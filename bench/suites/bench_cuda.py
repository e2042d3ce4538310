"""Samples on a GPU, of every shape and type: our backends beside other libraries.

pytest bench --benchmark-only -k throughput --benchmark-json=results.json

The table has the time of a call and of waiting for the device. `extra_info`, for the report and the comparison, has the
time on the device alone (`device_s`), the host's time of one call among many (`host_s`), the time per call of many
consecutive calls (`pipelined_s`), and the time of a cudaMemsetAsync over the same bytes. timing.py has the method, and
sample_checks.py the checks before. All contenders draw as their users do: into a new array, with new numbers each time.
All draw float32. Ours and PyTorch's also draw other types, at one shape. Layout nd is compared with RAFT's tables,
which have a row for each sample.

Predicted before the first run, for an H200, from figures of this kernel with `out=` and a seed (results/) and from
figures of others on that GPU, as fractions of the speed of memset:

- (4096, 65536) and (262144, 1024): ours 0.70, with fast_math 0.95; cuRAND without mu and sigma 0.45, with the dynamic
  order 0.5; torch.compile 0.18; torch.normal, which applies mean and deviation one after the other in place, 0.13;
  eager, Normal.rsample and JAX 0.12; JAX's rbg 0.25; CuPy 0.05 to 0.08.
- (1048576, 128): ours 0.68 and 0.86. (4194304, 32): 0.63 and 0.78. (4096, 65537): 0.63 and 0.82. Others as above.
- (100, 100000): a third less than (4096, 65536) for all, because the device is never full.
- (1000, 1024): ours 0.65 and 0.7, torch.compile 0.35.
- (10, 10): 2.5 us for contenders with one kernel, and 2 us per kernel for others.
- Half types: 0.35 portable, bound by instructions as float32 is, with half the bytes; 0.7 with fast_math. float64: 0.3.
- Shared noise: ours 0.99; the original kernel, which writes zeros first, 0.23; eager 0.3; torch.compile, which draws
  new noise for every element, 0.18.
- The kernel with cuRANDDx, before its first run, from the instructions of four normals (180, and 112 with
  --use_fast_math; ours 119, portable): 0.46 and 0.75 at (4096, 65536), the same at (262144, 1024) and (4096, 65537),
  since its loop and its aligned stores do not depend on the rows; 0.44 and 0.68 at (4194304, 32), where rows of eight
  groups load mu and sigma; 6.5 and 6 us at (1000, 1024). Its precise variant has the GPU's approximate sincos too.
- RAFT's normalTable, before its first run, from 360 instructions for four normals, with remainders for the column,
  scalar stores and half of the threads: 0.20 at (4096, 65536) and (262144, 1024), and 0.12 with Philox. Ours in layout
  nd have 0.67 there, and 0.92 and 0.84 with fast_math.
- Host time of a call: ours 13 us, eager 27, torch.compile 45, JAX 50. torch.normal waits for the device, because it
  checks for negative deviations.
"""

from __future__ import annotations

from typing import Any

import pytest

from bench.suites.cases import Case, modes_on_cuda, parametrize
from bench.suites.contenders import CUDA
from bench.suites.running import CudaRunner

# Warnings of other libraries are not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")

HEADLINES = [(4096, 65_536), (262_144, 1024), (4_194_304, 32), (1000, 1024)]
SHAPES = [*HEADLINES, (1_048_576, 128), (4096, 65_537), (100, 100_000), (10, 10)]
CASES = [
    *(Case(*shape, headline=shape in HEADLINES) for shape in SHAPES),
    *(Case(*shape, noise="shared") for shape in SHAPES),
    *(Case(*SHAPES[0], dtype) for dtype in ("float16", "bfloat16", "float64")),
    *(Case(*shape, layout="nd") for shape in ((4096, 65_536), (262_144, 1024), (1000, 1024))),
]
FEW_SAMPLES = [Case(2**26 // n, n) for n in range(1, 9)]
OPERATIONS = [
    *(Case(b * d, n, operation="batch", matrices=b) for b, d, n in ((64, 7, 512), (1024, 12, 32), (8, 4096, 1024))),
    *(Case(members, 2**28, dtype, operation="perturb") for dtype in ("float32", "bfloat16") for members in (1, 8)),
    *(Case(d, n, operation="moments") for d, n in ((4096, 65_536), (1000, 1024))),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = {test_throughput: CASES, test_few_samples: FEW_SAMPLES, test_operations: OPERATIONS}[metafunc.function]
    parametrize(metafunc, cases, CUDA.values(), modes_on_cuda)


@pytest.mark.benchmark(disable_gc=True)
def test_throughput(benchmark: Any, cuda: CudaRunner, case: Case, contender: str, mode: str) -> None:
    cuda.run(benchmark, "throughput", CUDA[contender], case, mode)


@pytest.mark.benchmark(disable_gc=True)
def test_few_samples(benchmark: Any, cuda: CudaRunner, case: Case, contender: str, mode: str) -> None:
    cuda.run(benchmark, "few_samples", CUDA[contender], case, mode)


@pytest.mark.benchmark(disable_gc=True)
def test_operations(benchmark: Any, cuda: CudaRunner, case: Case, contender: str, mode: str) -> None:
    cuda.run(benchmark, "operations", CUDA[contender], case, mode)
