"""Machine code of the CPU kernels: the widest vectors, also where LLVM prefers narrower ones, and nothing atomic."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from numba import types

from multisample.backends.kernels.compilation import cached
from multisample.backends.kernels.cpu import kernel, moments

SECONDS = 300
# A processor for which LLVM prefers vectors of 256 bits. Nothing runs on it.
PROCESSOR = {
    "NUMBA_CPU_NAME": "skylake-avx512",
    "NUMBA_CPU_FEATURES": "+avx2,+fma,+avx512f,+avx512dq,+avx512bw,+avx512vl,+avx512cd",
}


def machine_code(kind: str) -> str:
    """Of a kernel of each operation."""
    if kind == "draw":
        function, parameters = kernel._window_function("float32", False), kernel.window_parameters("float32")
    else:
        function, parameters = moments.sum_function("float64"), moments._sum_parameters("float64")
    dispatcher: Any = cached(function, f"test-{kind}", "")
    dispatcher.compile(types.void(*parameters))
    (code,) = dispatcher.inspect_asm().values()
    return str(code)


def counts(kind: str) -> tuple[int, int, int]:
    """How many operands in the machine code are vectors of 512 and of 256 bits, and how often it counts references."""
    code = machine_code(kind)
    return code.count("%zmm"), code.count("%ymm"), code.count("NRT_incref")


COUNT = """
import json
import sys
sys.path.insert(0, sys.argv[1])
import test_cpu_vectors
print(json.dumps(test_cpu_vectors.counts(sys.argv[2])))
"""


@pytest.mark.parametrize("kind", ["draw", "sum"])
def test_vectors_have_512_bits_and_threads_share_no_reference_count(kind: str, tmp_path: Path) -> None:
    is_x86 = platform.machine() == "x86_64"
    command = [sys.executable, "-c", COUNT, str(Path(__file__).parent), kind]
    environment = os.environ | (PROCESSOR if is_x86 else {}) | {"MULTISAMPLE_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    wide, narrow, references = json.loads(done.stdout)
    assert wide > 20 * narrow or not is_x86
    # Two threads that counted references to the same arrays took 16 % longer for rows of 512 columns.
    assert references == 0
