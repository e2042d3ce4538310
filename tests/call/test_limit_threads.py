"""The threads and the memory of a call: `limit_threads` limits threads; memory is the output and a few megabytes."""

import contextlib
import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import launches
import numpy as np
import pytest
import torch
from processes import run_python

import multisample
from multisample import limit_threads, sample
from multisample.backends import registry
from multisample.backends.launch import FIELD_AT, PACKED_LAUNCH
from multisample.backends.system import threads

LARGE = 1 << 20
MU, SIGMA = np.zeros(8, np.float32), np.ones(8, np.float32)


@pytest.fixture
def threads_of_cpu(monkeypatch: pytest.MonkeyPatch, thread_counts: Callable[[], list[int]]) -> Callable[[], int]:
    """``threads_of_cpu()``: the number of threads for a large matrix of the cpu backend."""
    monkeypatch.setenv("MULTISAMPLE_NUM_THREADS", "6")

    def count() -> int:
        sample(MU, SIGMA, LARGE, seed=1, backend="cpu")
        return thread_counts().pop()

    return count


def test_a_block_limits_the_number_of_threads(threads_of_cpu: Callable[[], int]) -> None:
    assert threads_of_cpu() == 6
    with limit_threads(2):
        assert threads_of_cpu() == 2
        with limit_threads(4):  # The limit of the outer block still applies.
            assert threads_of_cpu() == 2
        with limit_threads(1):
            assert threads_of_cpu() == 1
            with ThreadPoolExecutor(1) as other:  # Another thread has a limit of its own.
                assert other.submit(threads_of_cpu).result() == 6
        assert threads_of_cpu() == 2
    with limit_threads(100):
        assert threads_of_cpu() == 6
    with pytest.raises(KeyError), limit_threads(1):
        raise KeyError
    assert threads_of_cpu() == 6
    for wrong, error in ((0, ValueError), (2**31, ValueError), (1.0, TypeError)):
        with pytest.raises(error, match=r"^n: expected"):
            limit_threads(wrong)  # type: ignore[arg-type]


PROCESSORS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, PROCESSORS),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "1,4"}, 1),
        ({"NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "2"}, 1),
        ({"OMP_NUM_THREADS": "100000"}, PROCESSORS),
        ({"OMP_NUM_THREADS": "0", "NUMBA_NUM_THREADS": "all"}, PROCESSORS),
        ({"MULTISAMPLE_NUM_THREADS": "3", "OMP_NUM_THREADS": "1"}, 3),
    ],
    ids=str,
)
def test_the_default_number_obeys_variables_of_other_libraries(
    monkeypatch: pytest.MonkeyPatch, thread_counts: Callable[[], list[int]], variables: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(threads, "cpu_quota", lambda: 0)
    for name in ("MULTISAMPLE_NUM_THREADS", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    sample(MU, SIGMA, LARGE, seed=1, backend="cpu")
    assert thread_counts() == [expected] and threads.thread_count() == expected


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/", {"": "150000 100000"}, 2),
        ("0::/", {"": "max 100000"}, 0),
        ("0::/a/b", {"a": "300000 100000", "a/b": "max 100000"}, 3),
        # The path on the host, in a container that sees its own group as the root.
        ("0::/docker/id", {"": "50000 100000"}, 1),
        ("5:memory:/\n1:cpu,cpuacct:/job\n0::/", {"cpu,cpuacct/job": "400000\n100000", "cpu,cpuacct": "-1\n100000"}, 4),
        ("2:cpuset:/\n1:cpu:/", {"cpuset": "100000\n100000", "cpu": "-1\n100000"}, 0),
        ("what", {}, 0),
        (None, {}, 0),
    ],
    ids=str,
)
def test_the_quota_of_a_container_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str | None, files: dict[str, str], expected: int
) -> None:
    if groups is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups + "\n")
    for folder, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / folder
        path.mkdir(parents=True, exist_ok=True)
        names = ["cpu.max"] if " " in text else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        for name, line in zip(names, text.split("\n"), strict=True):
            (path / name).write_text(line + "\n")
    assert threads.cpu_quota(tmp_path) == expected
    monkeypatch.setattr(threads, "cpu_quota", lambda: 1)
    monkeypatch.delenv("MULTISAMPLE_NUM_THREADS", raising=False)
    assert threads.thread_count() == 1


def test_threadpoolctl_limits_calls(threads_of_cpu: Callable[[], int]) -> None:
    threadpoolctl = pytest.importorskip("threadpoolctl")
    with threadpoolctl.threadpool_limits(2):
        assert threads_of_cpu() == 2
        with limit_threads(1), threadpoolctl.threadpool_limits({"multisample": 5}):
            assert threads_of_cpu() == 1
        with threadpoolctl.threadpool_limits(1, user_api="blas"):
            assert threads_of_cpu() == 2
    assert threads_of_cpu() == 6
    (found,) = (library for library in threadpoolctl.threadpool_info() if library["user_api"] == "multisample")
    assert found["num_threads"] == 6


def test_several_threads_perturb_parameters(monkeypatch: Any, thread_counts: Callable[[], list[int]]) -> None:
    monkeypatch.setenv("MULTISAMPLE_NUM_THREADS", "6")
    for limit, expected in ((2, 2), (100, 6)):
        with limit_threads(limit):
            multisample.perturb(np.zeros(LARGE, np.float32), 0.5, seed=1, backend="cpu")
        assert thread_counts().pop() == expected


@pytest.mark.parametrize("road", ["builtins", "python"])
def test_torch_ext_passes_the_limit_to_its_library(road: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if registry.find("torch_ext").status().reasons:
        pytest.skip("torch_ext cannot run")
    mu, sigma = torch.zeros(8), torch.ones(8)
    expected = sample(mu, sigma, LARGE, seed=1, backend="torch_ext")
    backend: Any = registry.find("torch_ext")
    library, launched = backend._cpu, []

    def run(address: int) -> int:
        launched.append(ctypes.string_at(address, PACKED_LAUNCH))
        return int(library.multisample_run_cpu(launched[-1]))

    class Watched:
        multisample_is_valid_cpu = library.multisample_is_valid_cpu
        multisample_has_unit = library.multisample_has_unit
        multisample_run_cpu = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(run)

    monkeypatch.setattr(backend, "_cpu", Watched())
    multisample._plan.PLANS.clear()
    try:
        with launches.without_builtins() if road == "python" else contextlib.nullcontext():
            for limit in (1, 3):
                with limit_threads(limit):
                    assert torch.equal(sample(mu, sigma, LARGE, seed=1, backend="torch_ext"), expected)
    finally:
        multisample._plan.PLANS.clear()
    assert [np.frombuffer(launch, np.uint64, 1, FIELD_AT["threads"])[0] for launch in launched] == [1, 3]


linux_only = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")


_PROGRAM = """
import sys
import numpy as np
import multisample

dtype, noise, given = sys.argv[1:]

def peak():  # Not getrusage, whose peak a child process inherits from its parent.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:"))

mu, sigma = np.zeros(1000, np.float32), np.ones(1000, np.float32)
for n in (1, 200):  # Compile the kernels, and start the threads.
    multisample.sample(mu, sigma, n, seed=1, dtype=dtype, noise=noise)
out = np.ones((1000, 20000), dtype) if given == "out" else None
before = peak()
result = multisample.sample(mu, sigma, 20000, seed=2, dtype=dtype, noise=noise, out=out)
print(peak() - before, 0 if out is not None else result.nbytes)
"""


@linux_only
@pytest.mark.parametrize(("dtype", "noise", "given"), [
    ("float32", "independent", "new"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("float64", "shared", "new"), ("float16", "independent", "out"), ("float32", "shared", "out"))
    ),
])  # fmt: skip
def test_peak_memory_is_the_output_and_a_few_megabytes(dtype: str, noise: str, given: str) -> None:
    grown, needed = map(int, run_python("-c", _PROGRAM, dtype, noise, given, seconds=120).stdout.split())
    assert grown <= needed + (6 << 20)
    if needed:
        assert grown > needed // 2  # The measurement detects the result's memory.


def uses_huge_pages(address: int) -> bool:
    """Whether Linux may use huge pages for the memory at an address."""
    begins = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, last = line.split()[0].partition("-")
        if last:
            begins = int(first, 16) <= address < int(last, 16)
        elif begins and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("no such memory")


@linux_only
def test_large_new_results_use_huge_pages() -> None:
    array, tensor = (multisample.sample(make(1000), 1.0, 20000, seed=1) for make in (np.zeros, torch.zeros))
    # Linux may have none: NumPy's arrays show it. Pages at both ends are shared with other memory.
    assert uses_huge_pages(tensor.data_ptr() + (1 << 22)) == uses_huge_pages(array.ctypes.data + (1 << 22))
