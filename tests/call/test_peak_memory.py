"""Noise is never stored in memory: a call needs memory for its output, and a few megabytes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from processes import run_python

import multisample

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")

_SLACK = 6 << 20

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


@pytest.mark.parametrize(("dtype", "noise", "given"), [
    ("float32", "independent", "new"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("float64", "shared", "new"), ("float16", "independent", "out"), ("float32", "shared", "out"))
    ),
])  # fmt: skip
def test_peak_memory_is_the_output_and_a_few_megabytes(dtype: str, noise: str, given: str) -> None:
    grown, needed = map(int, run_python("-c", _PROGRAM, dtype, noise, given, seconds=120).stdout.split())
    assert grown <= needed + _SLACK
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


def test_large_new_results_use_huge_pages() -> None:
    array, tensor = (multisample.sample(make(1000), 1.0, 20000, seed=1) for make in (np.zeros, torch.zeros))
    # Linux may have none: NumPy's arrays show it. Pages at both ends are shared with other memory.
    assert uses_huge_pages(tensor.data_ptr() + (1 << 22)) == uses_huge_pages(array.ctypes.data + (1 << 22))
