"""Vectors of the CPU kernels: the widest in Python, also where LLVM prefers narrower ones; equal bits of all in C++."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cuda_cpp import SANITIZED, SHIM, compile_cpp, requires_gxx
from numba import types
from processes import run_python

from multisample.backends.kernels.compilation import cached
from multisample.backends.kernels.cpu import kernel, moments

SECONDS = 300
# A processor for which LLVM prefers vectors of 256 bits. Nothing runs on it.
PROCESSOR = {
    "NUMBA_CPU_NAME": "skylake-avx512",
    "NUMBA_CPU_FEATURES": "+avx2,+fma,+avx512f,+avx512dq,+avx512bw,+avx512vl,+avx512cd",
}


def machine_code(kind: str) -> str:
    """Of a float64 kernel."""
    if kind == "draw":
        function, parameters = kernel._window_function("float64", False), kernel.window_parameters("float64")
    else:
        reals, words = types.Array(types.float64, 1, "C"), (types.uint64, types.uint64, types.int64)
        sums = types.Array(types.float64, 2, "C")
        function = moments._sum_function("float64")
        parameters = (types.Array(types.uint32, 1, "C"), reals, reals, sums, *words)
    dispatcher: Any = cached(function, f"test-{kind}", "")
    dispatcher.compile(types.void(*parameters))
    (code,) = dispatcher.inspect_asm().values()
    return str(code)


def counts(kind: str) -> tuple[int, int, int]:
    """Operands of 512 and of 256 bits in the machine code, and its increments of reference counts."""
    code = machine_code(kind)
    return code.count("%zmm"), code.count("%ymm"), code.count("NRT_incref")


COUNT = """
import json
import sys
sys.path.insert(0, sys.argv[1])
import test_cpu_vectors
print(json.dumps({kind: test_cpu_vectors.counts(kind) for kind in ("draw", "sum")}))
"""


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, int, int]]:
    """`counts` of each kind, in a process that compiles for `PROCESSOR`."""
    environment = PROCESSOR if platform.machine() == "x86_64" else {}
    cache = str(tmp_path_factory.mktemp("cache"))
    done = run_python("-c", COUNT, str(Path(__file__).parent), MULTISAMPLE_CACHE_DIR=cache, **environment)
    found: dict[str, tuple[int, int, int]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("kind", ["draw", "sum"])
def test_vectors_have_512_bits_and_threads_share_no_reference_count(
    kind: str, counted: dict[str, tuple[int, int, int]]
) -> None:
    is_x86 = platform.machine() == "x86_64"
    wide, narrow, references = counted[kind]
    assert wide > 20 * narrow or not is_x86
    # Two threads that counted references to the same arrays took 16 % longer for rows of 512 columns.
    assert references == 0


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the machines below are of x86-64")
@requires_gxx
@pytest.mark.parametrize("name", ["cpu_kernel", "cpu_gradient"])
def test_cpp_for_other_simd_widths_gives_equal_bits_within_bounds(name: str, tmp_path: Path) -> None:
    """The programs divide their work into parts, as threads do."""
    program, digests = tmp_path / name, set()
    for machine in ("x86-64", "x86-64-v3", "native"):
        # UBSan finds the same at every width, so one program has it.
        sanitized = SANITIZED if machine == "native" else ("-g1", "-fsanitize=address")
        options = "-O1", "-DMULTISAMPLE_SOFTWARE_FMA", *sanitized, "-Wno-psabi"
        compile_cpp(f"-march={machine}", *options, SHIM / f"{name}.cpp", "-o", program)
        # GCC before 14 misaligns stack variables of 64-byte vectors under AddressSanitizer (bug 110027).
        environment = os.environ | {"ASAN_OPTIONS": "detect_stack_use_after_return=0"}
        done = subprocess.run([str(program)], capture_output=True, text=True, env=environment, timeout=SECONDS)
        if done.returncode < 0 and -done.returncode == signal.SIGILL:
            continue  # This processor does not support the target.
        assert done.returncode == 0, done.stderr[:4000]
        digests.add(done.stdout)
    (digest,) = digests
    assert len(digest.split()) == 1
