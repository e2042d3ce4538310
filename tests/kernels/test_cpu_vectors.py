"""Machine code of the CPU kernels: vectors as wide as the processor has, also where LLVM prefers narrower ones."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from numba import njit

from multisample.backends.kernels.cpu import kernel, moments

SECONDS = 300
# A processor for which LLVM prefers vectors of 256 bits. Nothing runs on it.
PROCESSOR = {
    "NUMBA_CPU_NAME": "skylake-avx512",
    "NUMBA_CPU_FEATURES": "+avx2,+fma,+avx512f,+avx512dq,+avx512bw,+avx512vl,+avx512cd",
}


def vectors(kind: str) -> tuple[int, int]:
    """How many operands in the machine code of a float64 kernel are vectors of 512, and how many of 256 bits."""

    def compiled(signature: Any, function: Callable[..., Any], name: str) -> Any:
        dispatcher = njit(function)
        dispatcher.compile(signature)
        return dispatcher

    kernel._compiled = moments._compiled = compiled  # type: ignore[assignment]
    dispatcher: Any = kernel.window_kernel("float64") if kind == "draw" else moments.summing_kernel("float64")
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
