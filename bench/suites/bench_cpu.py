"""Samples on the CPU, of many shapes, and the operations beside `sample`: ours beside other libraries, in the same run.

pytest bench --benchmark-only -k cpu --benchmark-json=results.json

Only ratios within one run mean anything; the comparison uses the ratios to NumPy. `test_cpu` makes new arrays,
`test_cpu_out` fills an existing one. A contender with `lacks` draws standard normals, without mu and sigma.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import multisample
from bench.suites import mkl_peer
from bench.suites.cases import Case, is_timed, parametrize, vectors
from bench.suites.contenders import BARE, CPU
from bench.suites.running import record_cpu_speed, run_on_cpu
from multisample.backends.system.threads import thread_count

SHAPES = [
    (10, 10),
    (100, 100),
    (1000, 100),
    (1000, 1000),
    (1000, 10_000),
    (10_000, 1000),
    (10, 1_000_000),
    (1, 10_000_000),
    (32, 300_000),
    (33, 30_000),
    (100_000, 100),
]
HEADLINES = [(10, 10), (100, 100), (1000, 1000), (1000, 10_000)]
CASES = [
    *(Case(*shape, headline=shape in HEADLINES) for shape in SHAPES),
    *(Case(*shape, noise="shared") for shape in SHAPES),
]
OPERATIONS = [
    *(Case(b * d, n, operation="batch", matrices=b, headline=True) for b, d, n in ((1000, 10, 10), (64, 7, 512))),
    *(Case(members, 2**22, operation="perturb", headline=True) for members in (1, 8)),
    *(Case(d, n, operation="moments", headline=True) for d, n in ((100, 1000), (1000, 10_000))),
]
FILLERS = ("cpu", "torch_ext", "numpy", "torch_randn", "mkl_bare")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = {test_cpu: CASES, test_cpu_operations: OPERATIONS}
    if metafunc.function in cases:
        parametrize(metafunc, cases[metafunc.function], CPU.values(), ["portable"])
    else:
        shapes = SHAPES if is_timed(metafunc.config) else [(4, 6)]
        metafunc.parametrize("shape", shapes, ids=lambda shape: "x".join(map(str, shape)))


@pytest.mark.benchmark(min_rounds=7, max_time=0.5)
def test_cpu(benchmark: Any, case: Case, contender: str, mode: str) -> None:
    run_on_cpu(benchmark, "cpu", CPU[contender], case)


@pytest.mark.benchmark(min_rounds=7, max_time=0.5)
def test_cpu_operations(benchmark: Any, case: Case, contender: str, mode: str) -> None:
    run_on_cpu(benchmark, "cpu_operations", CPU[contender], case)


@pytest.mark.parametrize("contender", FILLERS)
@pytest.mark.benchmark(min_rounds=7, max_time=0.5)
def test_cpu_out(benchmark: Any, shape: tuple[int, int], contender: str) -> None:
    reason = CPU[contender].reason()
    if reason:
        pytest.skip(f"{contender}: {reason}")
    d, n = shape
    out = np.zeros((d, n), np.float32)
    fill = filling(contender, out, d, n)
    fill()
    assert np.isfinite(out).all() and out.any()
    case, ours = Case(d, n), CPU[contender].ours
    benchmark.group = f"cpu_out {case.group('portable')}"
    benchmark.extra_info.update(
        suite="cpu_out", contender=contender, ours=ours, lacks=None if ours else BARE, d=d, n=n, dtype="float32",
        noise="independent", mode="portable", layout="dn", bytes=out.nbytes,
    )  # fmt: skip
    benchmark(fill)
    record_cpu_speed(benchmark, out.nbytes)


def filling(contender: str, out: Any, d: int, n: int) -> Callable[[], Any]:
    """The call that fills `out`. PyTorch gets the same memory as a tensor."""
    mu, sigma = (vector.astype(np.float32) for vector in vectors(d))
    if contender == "numpy":
        return functools.partial(np.random.default_rng(7).standard_normal, out=out, dtype=np.float32)
    if contender == "cpu":
        return functools.partial(multisample.sample, mu, sigma, n, backend="cpu", out=out)
    if contender == "mkl_bare":
        return functools.partial(mkl_peer.filling("SFMT19937", min(thread_count(), len(out))), out, None)
    import torch

    tensor = torch.from_numpy(out)
    if contender == "torch_randn":
        fill: Callable[[], Any] = tensor.normal_
        return fill
    arrays = torch.from_numpy(mu), torch.from_numpy(sigma)
    return functools.partial(multisample.sample, *arrays, n, backend="torch_ext", out=tensor)
