"""The stream in Numba kernels of users, `multisample.numba`: same bits as `multisample.sample`."""

import importlib
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from known_normals import check_points, random_places, sampled_row
from numba import njit, typeof
from numba.core.errors import TypingError
from processes import run_python
from ptx_reader import opcodes_of
from skip_rules import requires

import multisample
import multisample.numba

SHIFT = np.float32(0.7)


@njit
def points(seed, offset, i, j, z):
    for k in range(z.size):
        z[k] = multisample.numba.normal(seed[k], offset[k], i[k], j[k])


@njit
def points_f64(seed, offset, i, j, z):
    for k in range(z.size):
        z[k] = multisample.numba.normal_f64(seed[k], offset[k], i[k], j[k])


def row(seed, offset, i, shift, z):
    for g in range(z.size // 4):
        z0, z1, z2, z3 = multisample.numba.normals4(seed, offset, i, g)
        z[4 * g] = z0 + shift
        z[4 * g + 1] = z1 + shift
        z[4 * g + 2] = z2 + shift
        z[4 * g + 3] = z3 + shift


@njit
def row_f64(seed, offset, i, z):
    for g in range(z.size // 4):
        z0, z1, z2, z3 = multisample.numba.normals4_f64(seed, offset, i, g)
        z[4 * g] = z0
        z[4 * g + 1] = z1
        z[4 * g + 2] = z2
        z[4 * g + 3] = z3


def test_njit_gives_the_test_vectors() -> None:
    functions = {"points": points, "points_f64": points_f64}
    check_points(lambda name, places, z: (functions[name](*places, z), z)[1])


# With fastmath, LLVM would contract an addition of the caller with the product that makes a normal.
@pytest.mark.parametrize("options", [{}, {"fastmath": True}], ids=str)
def test_rows_have_the_bits_of_sample_whatever_the_options_of_the_caller(options: dict[str, bool]) -> None:
    z = np.empty(4096, np.float32)
    njit(**options)(row)(7, 5, 3, SHIFT, z)
    assert z.tobytes() == (sampled_row(7, 5, 3, 4096) + SHIFT).tobytes()


def test_float64_rows_have_the_bits_of_sample() -> None:
    z = np.empty(4096)
    row_f64(2**64 - 1, 0, 3, z)
    assert z.tobytes() == sampled_row(2**64 - 1, 0, 3, 4096, "float64").tobytes()


def test_loops_over_blocks_vectorise() -> None:
    function = njit(row)
    function(7, 5, 3, SHIFT, np.empty(64, np.float32))
    (code,) = function.inspect_llvm().values()
    assert "@llvm.fma.v" in code


def test_loops_call_no_function() -> None:
    places = random_places(4, seed=2)
    points(*places, np.empty(4, np.float32))
    (code,) = points.inspect_llvm().values()
    assert "call float @llvm.fma.f32" in code
    assert not any("multisample" in line for line in code.splitlines() if " call " in line)


def test_functions_also_run_in_python() -> None:
    x = multisample.sample([0.0, 0.0], 1.0, 8, seed=7)
    assert multisample.numba.normal(7, 0, 1, 5) == x[1, 5]
    assert multisample.numba.normals4(7, 0, 1, 1) == tuple(x[1, 4:].tolist())


@pytest.mark.parametrize("wrong", [0, 1, 2, 3])
def test_arguments_that_are_no_integers_do_not_compile(wrong: int) -> None:
    for function, place in (("normal", "j"), ("normals4", "g"), ("normal_f64", "j"), ("normals4_f64", "g")):
        draw, name = getattr(multisample.numba, function), ("seed", "offset", "i", place)[wrong]
        caller = njit(lambda a, b, c, d, draw=draw: draw(a, b, c, d))
        places: list[Any] = [7, 0, 1, 2]
        for value in (7.0, np.float32(7)):
            places[wrong] = value
            with pytest.raises(TypingError, match=rf"{name}: expected an integer, got a value of type {typeof(value)}"):
                caller(*places)


def test_callers_can_be_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(
        textwrap.dedent(
            """
            import numba
            import multisample

            @numba.njit(cache=True)
            def draw(seed, i, j):
                return multisample.numba.normal(seed, 0, i, j) + multisample.numba.normals4_f64(seed, 0, i, j)[1]

            drawn = draw(7, 1, 5).hex(), sum(draw.stats.cache_hits.values()), sum(draw.stats.cache_misses.values())
            print(*drawn)
            """
        )
    )
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    here = importlib.import_module("own").drawn
    del sys.modules["own"]
    expected = float(multisample.numba.normal(7, 0, 1, 5)) + multisample.numba.normals4_f64(7, 0, 1, 5)[1]
    assert here == (expected.hex(), 0, 1)
    elsewhere = run_python("-c", "import own", NUMBA_CACHE_DIR=str(tmp_path / "cache")).stdout
    assert elsewhere.split() == [expected.hex(), "1", "0"]


def test_importing_multisample_imports_no_library_for_gpus() -> None:
    code = """
import sys
import multisample
before = {"multisample.numba", "multisample.triton"} & set(sys.modules)
multisample.numba.normal
import numba
print(sorted(before), hasattr(numba, "njit"), sorted({"numba.cuda", "triton", "torch"} & set(sys.modules)))
"""
    assert run_python("-c", code).stdout.split("\n")[0] == "[] True []"


# In a process of its own, because it replaces the device whose properties Numba reads to compile.
COMPILE = """
import json
from types import SimpleNamespace
from numba import cuda, types
from numba.cuda import dispatcher
import multisample

dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=(9, 0))

def points(seed, offset, i, j, z):
    k = cuda.grid(1)
    z[k] = multisample.numba.normal(seed[k], offset[k], i[k], j[k])

def row(seed, offset, i, shift, z):
    g = cuda.grid(1)
    z0, z1, z2, z3 = multisample.numba.normals4(seed, offset, i, g)
    z[4 * g] = z0 + shift
    z[4 * g + 1] = z1 + shift
    z[4 * g + 2] = z2 + shift
    z[4 * g + 3] = z3 + shift

words, index, singles = map(types.CPointer, (types.uint64, types.uint32, types.float32))
for function, signature in (
    (points, (words, words, index, words, singles)),
    (row, (types.uint64, types.uint64, types.uint32, types.float32, singles)),
):
    ptx, _ = cuda.compile(function, signature, device=False, abi="numba", cc=(9, 0), output="ptx")
    print(json.dumps(ptx.split(".entry")[1]))
"""


@pytest.mark.slow
@requires("numba_cuda", "libNVVM", lambda: importlib.import_module("numba.cuda.cudadrv.nvvm").NVVM())
def test_normals_on_a_gpu_cost_one_block_and_only_the_pairs_used() -> None:
    for line, pairs in zip(run_python("-c", COMPILE).stdout.splitlines(), (1, 2), strict=True):
        found = opcodes_of(json.loads(line))
        assert found["rsqrt.approx.ftz.f32"] == pairs and found["mul.wide.u32"] <= 20
        # A compiler contracts a plain product with the caller's addition: then there are more FMAs.
        assert found["fma.rn.f32"] == 20 * pairs and found["mul.rn.f32"] == 2 * pairs
