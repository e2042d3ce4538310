"""Machine code of the CPU kernels: vectors as wide as the processor has, also where LLVM prefers narrower ones."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from numba import njit, types

from multisample.backends.kernels.cpu import kernel, moments

SECONDS = 300
# A processor for which LLVM prefers vectors of 256 bits. Nothing runs on it.
PROCESSOR = {
    "NUMBA_CPU_NAME": "skylake-avx512",
    "NUMBA_CPU_FEATURES": "+avx2,+fma,+avx512f,+avx512dq,+avx512bw,+avx512vl,+avx512cd",
}


def vectors(kind: str) -> tuple[int, int]:
    """How many operands in the machine code of a float64 kernel are vectors of 512, and how many of 256 bits."""

    if kind == "draw":
        function, parameters = kernel._window_function("float64", False), kernel._window_parameters("float64")
    else:
        function, parameters = moments._sum_function("float64"), moments._sum_parameters("float64")
    dispatcher: Any = njit(function)
    dispatcher.compile(types.void(*parameters))
    (code,) = dispatcher.inspect_asm().values()
    return code.count("%zmm"), code.count("%ymm")


COUNT = """
import json
import sys
sys.path.insert(0, sys.argv[1])
import test_cpu_vectors
print(json.dumps(test_cpu_vectors.vectors(sys.argv[2])))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the processor below is of x86-64")
@pytest.mark.parametrize("kind", ["draw", "sum"])
def test_vectors_have_512_bits(kind: str) -> None:
    command = [sys.executable, "-c", COUNT, str(Path(__file__).parent), kind]
    environment = os.environ | PROCESSOR
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    wide, narrow = json.loads(done.stdout)
    assert wide > 20 * narrow
