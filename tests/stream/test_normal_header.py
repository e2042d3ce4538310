"""The stream in C++ code of users, ``#include <multisample/normal.h>``: same bits as `multisample.sample`."""

import ctypes
import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_cpp import ARCHITECTURES, SECONDS, nvrtc_compile, requires_gxx, requires_nvrtc
from known_normals import Places, known_f32, known_f64, sampled_row
from ptx_reader import opcodes_of
from tables import slow_but

import multisample
from multisample.backends.native import csrc_files, toolchain
from multisample.backends.system.sources import Sources

INCLUDE = f"-I{multisample.get_include()}"
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wsign-conversion", "-Wshadow", "-Werror")

Array = np.ndarray[Any, Any]


def with_float64(code: str) -> str:
    """The functions of `code`, and the same functions for float64."""
    return code + re.sub(r"\b(points|row|normal|normals4)\(", r"\1_f64(", code).replace("float", "double")


# Each normal is followed by an addition, which a compiler would contract with the product that makes the normal.
HOST = r"""
#include <multisample/normal.h>

using u64 = unsigned long long;
""" + with_float64(r"""
extern "C" void points(u64 n, const u64* seed, const u64* offset, const unsigned* i, const u64* j, float shift,
                       float* z, float* shifted) {
  for (u64 k = 0; k < n; ++k) {
    const multisample::Stream stream(seed[k], offset[k]);
    z[k] = stream.normal(i[k], j[k]);
    shifted[k] = stream.normal(i[k], j[k]) + shift;
  }
}
extern "C" void row(u64 groups, u64 seed, u64 offset, unsigned i, float shift, float* shifted) {
  const multisample::Stream stream(seed, offset);
  for (u64 g = 0; g < groups; ++g) {
    const auto [z0, z1, z2, z3] = stream.normals4(i, g);
    shifted[4 * g] = z0 + shift;
    shifted[4 * g + 1] = z1 + shift;
    shifted[4 * g + 2] = z2 + shift;
    shifted[4 * g + 3] = z3 + shift;
  }
}
""")
FLAGS = {
    "plain": (),
    "contracted": ("-O3", "-march=native", "-ffp-contract=fast"),
    "contracted vectors": ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
    "no contraction": ("-O2", "-ffp-contract=off"),
}


def library(folder: Path, source: str, command: Sequence[str]) -> ctypes.CDLL:
    name = "own.cu" if "nvcc" in command[0] else "own.cpp"
    (folder / name).write_text(source)
    command = [*command, "-std=c++17", "-shared", INCLUDE, "-o", "own.so", name]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "warning" not in done.stderr, done.stderr
    return ctypes.CDLL(str(folder / "own.so"))


def at_points(function: Any, places: Places, shift: Any) -> tuple[Array, Array]:
    out = np.empty(places.i.size, shift.dtype), np.empty(places.i.size, shift.dtype)
    of_shift = (ctypes.c_float if shift.dtype == np.float32 else ctypes.c_double)(shift)
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (*places, *out)]
    function(ctypes.c_uint64(places.i.size), *pointers[:4], of_shift, *pointers[4:])
    return out


def check_host_functions(functions: ctypes.CDLL) -> None:
    singles = functions.points, np.float32, functions.row, known_f32()
    doubles = functions.points_f64, np.float64, functions.row_f64, known_f64()
    for function, real, of_real, (places, known) in (singles, doubles):
        shift = real(0.7)
        z, shifted = at_points(function, places, shift)
        assert z.tobytes() == known.tobytes()
        assert shifted.tobytes() == (known + shift).tobytes()
        row = np.empty(4096, real)
        of_shift = (ctypes.c_float if real is np.float32 else ctypes.c_double)(shift)
        pointer = row.ctypes.data_as(ctypes.c_void_p)
        of_real(ctypes.c_uint64(1024), ctypes.c_uint64(7), ctypes.c_uint64(2**40), 5, of_shift, pointer)
        assert row.tobytes() == (sampled_row(7, 2**40, 5, 4096, real.__name__) + shift).tobytes()


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
@pytest.mark.parametrize("flags", slow_but(["plain", "contracted vectors"], FLAGS))
def test_host_code_has_the_bits_of_sample_without_warnings(tmp_path: Path, compiler: str, flags: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    check_host_functions(library(tmp_path, HOST, [compiler, "-fPIC", *WARNINGS, *FLAGS[flags]]))


@pytest.mark.parametrize("flag", ["-ffast-math", "-fassociative-math", "-Ofast"])
def test_fast_math_of_the_host_is_refused(tmp_path: Path, flag: str) -> None:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    (tmp_path / "own.cpp").write_text(HOST)
    more = ("-fno-signed-zeros", "-fno-trapping-math")  # Which -fassociative-math needs.
    command = ["g++", "-std=c++17", "-fsyntax-only", flag, *more, INCLUDE, "own.cpp"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode != 0
    assert "change the bits of host code" in done.stderr


def test_the_digest_of_compiled_libraries_covers_the_header(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = csrc_files.digest()
    shutil.copytree(csrc_files.folder(), tmp_path / "csrc")
    copy = functools.partial(Sources, tmp_path / "csrc", *csrc_files.CSRC.suffixes)
    monkeypatch.setattr(csrc_files, "CSRC", copy())
    assert csrc_files.digest() == before
    header = Path(multisample.get_include()) / "multisample" / "normal.h"
    assert header.is_relative_to(tmp_path)
    header.write_text(header.read_text() + "// Changed.\n")
    with pytest.raises(multisample.BackendUnavailableError, match=r"normal\.h has changed since .*: restart the"):
        csrc_files.digest()
    monkeypatch.setattr(csrc_files, "CSRC", copy())
    assert csrc_files.digest() != before


def test_the_header_needs_no_system_header() -> None:
    """NVRTC may come without any header."""
    pending, done = [Path(multisample.get_include(), "multisample", "normal.h").resolve()], set()
    while pending:
        path = pending.pop()
        done.add(path)
        text = path.read_text()
        assert not re.findall(r"#include <.*>", text), path
        found = {(path.parent / name).resolve() for name in re.findall(r'#include "([^"]+)"', text)}
        pending += found - done
    assert {path.name for path in done} == {"normal.h", "normals.h", "words.h", "arithmetic.h"}


PORTABLE = r"""
#include <multisample/normal.h>

typedef unsigned long long u64;
""" + with_float64(r"""
extern "C" __global__ void points(const u64* seed, const u64* offset, const unsigned* i, const u64* j, float* z) {
  const unsigned k = blockIdx.x * blockDim.x + threadIdx.x;
  z[k] = multisample::Stream(seed[k], offset[k]).normal(i[k], j[k]);
}
// The host passes `stream` by value.
extern "C" __global__ void row(multisample::Stream stream, unsigned i, float* z) {
  const unsigned g = blockIdx.x * blockDim.x + threadIdx.x;
  const auto [z0, z1, z2, z3] = stream.normals4(i, g);
  z[4 * g] = z0, z[4 * g + 1] = z1, z[4 * g + 2] = z2, z[4 * g + 3] = z3;
}
""")
FAST = PORTABLE.replace(".normal(", ".fast_normal(").replace(".normals4(", ".fast_normals4(")
KERNELS = ("points", "points_f64", "row", "row_f64")


def bodies(source: str, architecture: str, *options: str) -> dict[str, str]:
    """The PTX of each kernel."""
    program = nvrtc_compile(source, KERNELS, architecture, [INCLUDE, *options])
    assert program.log == ""
    assert program.names == list(KERNELS)
    parts = re.split(r"\.entry\s+(\w+)", program.code.decode())
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@requires_nvrtc
@pytest.mark.parametrize("architecture", slow_but(["sm_75"], ARCHITECTURES))
@pytest.mark.parametrize("source", [PORTABLE, FAST], ids=["portable", "fast"])
def test_nvrtc_compiles_for_every_architecture_without_a_warning(architecture: str, source: str) -> None:
    program = nvrtc_compile(source, KERNELS, architecture, [INCLUDE, "-std=c++17"])
    assert program.log == ""
    assert program.code.startswith(b"\x7fELF")


@requires_nvrtc
@pytest.mark.parametrize("options", [(), ("-fmad=false",), ("-use_fast_math",)], ids=" ".join)
def test_device_code_has_only_the_operations_of_the_stream(options: tuple[str, ...]) -> None:
    found = bodies(PORTABLE, "compute_90", *options)
    # A compiler could contract a plain product or sum with one of the caller.
    plain = re.compile(r"(mul|add|sub)(\.ftz)?\.f(32|64)")
    assert not [opcode for name in KERNELS for opcode in opcodes_of(found[name]) if plain.fullmatch(opcode)]
    for name, pairs in (("points", 1), ("row", 2)):
        opcodes = opcodes_of(found[name])
        assert opcodes["rsqrt.approx.ftz.f32"] == pairs and opcodes["fma.rn.f32"] == 20 * pairs


@requires_nvrtc
def test_the_kernel_of_the_page_compiles() -> None:
    page = (csrc_files.folder() / "include" / "README.md").read_text()
    (kernel,) = re.findall(r"^```cuda\n(.*?)^```$", page, re.M | re.S)
    assert nvrtc_compile(kernel, ["simulate"], "sm_90", [INCLUDE]).log == ""


OPTIONS = (), ("--use_fast_math",), ("-Xcompiler=-O3,-march=native,-ffp-contract=fast",)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_nvcc_compiles_device_and_host_code_without_a_warning(tmp_path: Path, options: tuple[str, ...]) -> None:
    home = toolchain.cuda_home()
    if home is None:
        pytest.skip("nvcc is neither on the PATH nor in CUDA_HOME")
    kernels = PORTABLE.replace("#include <multisample/normal.h>", "").replace("typedef unsigned long long u64;", "")
    for name in KERNELS:
        kernels = kernels.replace(f"void {name}(", f"void {name}_kernel(")
    warnings = "-Xcompiler=-fPIC,-Wall,-Wextra,-Wconversion,-Wshadow", "--Werror=all-warnings"
    command = [str(home / "bin" / "nvcc"), "-arch=sm_90", *warnings, *options]
    check_host_functions(library(tmp_path, HOST + kernels, command))


@requires_gxx
def test_an_older_standard_is_refused_by_name(tmp_path: Path) -> None:
    command = ["g++", "-std=c++14", "-fsyntax-only", INCLUDE, "-x", "c++", "-"]
    done = subprocess.run(command, input="#include <multisample/normal.h>", capture_output=True, text=True)
    assert done.returncode != 0
    assert "needs C++17: compile with -std=c++17" in done.stderr


@requires_gxx
def test_the_program_in_the_documentation_draws_the_sample(tmp_path: Path) -> None:
    page = (csrc_files.folder() / "include" / "README.md").read_text()
    found = re.search(r"```cpp\n(// own.cpp.*?)```\n\n```sh\n(.*?)```", page, re.DOTALL)
    assert found
    (tmp_path / "own.cpp").write_text(found[1])
    command = f"PATH={Path(sys.executable).parent}:$PATH; {found[2]}"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True)
    x = multisample.sample([0.0], 1.0, 4, seed=7, dtype="float32", backend="cpu")
    assert np.array_equal(np.array(done.stdout.split(), np.float32), x[0])
