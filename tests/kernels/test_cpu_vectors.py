"""SIMD on the CPU: kernels use the widest vectors, and count no references."""

import json
import platform
from pathlib import Path

import pytest
from numba import types
from processes import run_python
from tables import slow_but

import multisample
from multisample.backends.kernels.compilation import compile_cached
from multisample.backends.kernels.cpu import kernel, moments
from multisample.backends.system import cache

# A processor for which LLVM prefers vectors of 256 bits. Nothing runs on it.
PROCESSOR = {
    "NUMBA_CPU_NAME": "skylake-avx512",
    "NUMBA_CPU_FEATURES": "+avx2,+fma,+avx512f,+avx512dq,+avx512bw,+avx512vl,+avx512cd",
}


VECTOR = types.Array(types.float64, 1, "C")


def double_all(x):  # type: ignore[no-untyped-def]
    view = x[1:]
    for k in range(len(view)):
        view[k] = 2 * view[k]


def machine_code(kind: str) -> str:
    """The assembly of a float64 kernel, or of a small loop with the kernels' compiler options."""
    if kind in ("along", "down"):
        function = kernel._window_function("float64", False, False, kind == "down")
        parameters = kernel.window_parameters("float64")
    elif kind == "sum":
        words = types.uint64, types.uint64, types.int64
        sums = types.Array(types.float64, 2, "C")
        function = moments._sum_function("float64")
        parameters = (types.Array(types.uint64, 1, "C"), VECTOR, VECTOR, sums, *words)
    else:
        function, parameters = double_all, (VECTOR,)
    compiled = compile_cached(types.void(*parameters), function, f"test-{kind}", "digest")
    return str(compiled.library.get_asm_str())


def counts(kind: str) -> tuple[int, int, int]:
    """How often the assembly names 512-bit registers, 256-bit registers, and functions that count references."""
    code = machine_code(kind)
    return code.count("%zmm"), code.count("%ymm"), code.count("NRT_")


COUNT = """
import json
import sys
sys.path.insert(0, sys.argv[1])
import test_cpu_vectors
print(json.dumps([test_cpu_vectors.counts(kind) for kind in sys.argv[2:]]))
"""


def counts_in_process(folder: Path, *kinds: str) -> list[tuple[int, int, int]]:
    """`counts` of each kind, in a process that compiles for `PROCESSOR`."""
    environment = PROCESSOR if platform.machine() == "x86_64" else {}
    done = run_python("-c", COUNT, str(Path(__file__).parent), *kinds, MULTISAMPLE_CACHE_DIR=str(folder), **environment)
    found: list[tuple[int, int, int]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("kinds", slow_but([("loop",)], [("loop",), ("along", "down", "sum")]), ids=" ".join)
def test_vectors_have_512_bits_and_threads_share_no_reference_count(kinds: tuple[str, ...], tmp_path: Path) -> None:
    is_x86 = platform.machine() == "x86_64"
    # The loop is short: its remainder uses narrower vectors in almost as many instructions.
    factor = 1 if kinds == ("loop",) else 20
    for wide, narrow, references in counts_in_process(tmp_path, *kinds):
        assert wide > factor * narrow or not is_x86
        # Two threads that counted references to the same arrays took 16 % longer for rows of 512 columns.
        assert references == 0


def test_cached_kernels_count_no_references(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The object code of a kernel names the functions that it calls."""
    multisample.sample([0.0], 1.0, 1, seed=1, dtype="float32", backend="cpu")
    loaded: list[bytes] = []
    read = cache.read

    def reading(file: Path) -> bytes | None:
        payload = read(file)
        loaded.append(payload or b"")
        return payload

    monkeypatch.setattr(cache, "read", reading)
    kernel.window_kernel.__wrapped__("float32", False, False, False)
    assert b"draw_float32" in loaded[0] and b"NRT_" not in loaded[0]
    # Positive control: a kernel that does count references names NRT functions.
    monkeypatch.setenv("MULTISAMPLE_CACHE_DIR", str(tmp_path))
    for _ in range(2):
        compile_cached(types.void(VECTOR), double_all, "test-counting", "digest", allocates=True)
    assert b"NRT_" in loaded[-1]
