"""Compile the CUDA C++ sources without a GPU: for the CPU, with shim/cuda_shim.h, and for GPUs, with NVRTC."""

import importlib
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest
from places import SHIM
from skip_rules import requires

from multisample.backends.native import csrc_files
from multisample.backends.nvrtc import STANDARD

CaseT = TypeVar("CaseT")
SECONDS = 300
ELEMENTS = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}
"""C++ names of the element types."""
ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")

requires_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

# AddressSanitizer finds accesses by wrong pointers. Checks of every pointer would take a quarter of the compilation.
SANITIZED = (
    "-g1", "-fsanitize=address,undefined", "-fno-sanitize=null,object-size,pointer-overflow,vptr",
    "-fno-sanitize-recover=all",
)  # fmt: skip
CHECKED_IN_CALLS = "--param=asan-instrumentation-with-call-threshold=0"
"""For programs that run few cases: ASan checks addresses in calls, not inline. Compiling takes a quarter less time, and
running a quarter more."""
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")


def compile_cpp(*arguments: str | Path) -> None:
    """Compile with g++, with the include folder of csrc and without warnings."""
    command = ["g++", "-std=c++17", "-ffp-contract=off", *WARNINGS, *map(str, arguments), f"-I{csrc_files.folder()}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * SECONDS)
    assert done.returncode == 0, done.stderr[-5000:]


SHARED = {
    "run_kernel": (("rows", "transposed", "few_columns", "small_matrices"), 7),
    "run_gradient": (("gradient_kernel",), 3),
    "run_moments": (("moments_kernel",), 6),
    "run_perturb": (("perturb_kernel",), 1),
}
"""Programs of the folder shim: the CUDA headers that declare shared memory, and how many declarations they have."""


def compile_runner(folder: Path, program: str, element: str, *options: str) -> None:
    """Compile a program of the folder shim, which runs CUDA kernels of one element type on the CPU, into `folder`."""
    # A macro cannot replace __shared__: the threads of a block share the memory, which holds garbage before each block.
    ids = itertools.count()
    headers, declarations = SHARED[program]
    for header in headers:
        name = f"cuda/{header}.cuh"
        source = re.sub(
            r"__shared__ ([^;]+?) (\w+)((?:\[[^;]+?\])+);",
            lambda match: f"auto& {match[2]} = cuda_shim::shared<{match[1]}{match[3]}, {next(ids)}>();",
            (csrc_files.folder() / name).read_text(),
        )
        assert "__shared__" not in source
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(source)
    assert next(ids) == declarations
    # Optimization takes longer than it saves.
    options = "-O0", *SANITIZED, f"-DELEMENT={ELEMENTS[element]}", *options, f"-I{folder}", f"-I{SHIM}"
    compile_cpp(*options, SHIM / f"{program}.cpp", "-o", folder / program)


def run_program(program: Path, cases: bytes) -> subprocess.CompletedProcess[bytes]:
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    return subprocess.run([str(program)], input=cases, capture_output=True, timeout=SECONDS, env=environment)


def run_cases(
    program: Path, cases: Sequence[CaseT], pack: Callable[[CaseT], bytes], size: Callable[[CaseT], int]
) -> Iterator[tuple[CaseT, bytes]]:
    """Run a program of `compile_runner` on the cases; yields each with its result, of ``size(case)`` bytes."""
    done = run_program(program, b"".join(map(pack, cases)))
    # Exit codes -6 and 1 are failures of the shim and of a sanitizer. The shim registers fibers with AddressSanitizer.
    assert done.returncode in (0, -6, 1), done.stderr.decode()[:4000]
    at = 0
    for case in cases:
        begin, at = at, at + size(case)
        if len(done.stdout) < at:  # The program ended in this case.
            pytest.fail(f"{case}\n{done.stderr.decode()[:4000]}", pytrace=False)
        yield case, done.stdout[begin:at]
    assert len(done.stdout) == at
    assert done.returncode == 0, done.stderr.decode()[:4000]


requires_nvrtc = requires("cupy", "NVRTC", lambda: importlib.import_module("cupy.cuda").nvrtc.getVersion())


# The options of the backends. Without the last option, NVRTC 13.0 refuses generic lambdas.
NVRTC_OPTIONS = f"--std={STANDARD}", f"-I{csrc_files.folder()}", "--device-as-default-execution-space"


class Program(NamedTuple):
    """The output of NVRTC for a source."""

    log: str
    names: list[str]
    """Names of the kernels in the object code."""
    code: bytes
    """Machine code for a real architecture, PTX for a virtual architecture."""


def nvrtc_compile(source: str, kernels: Sequence[str], architecture: str, options: Sequence[str]) -> Program:
    """Compile the kernels in one program, which takes half the time of one program for each."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(source, "program.cu", (), ())
    try:
        for name in kernels:
            nvrtc.addNameExpression(program, name)
        try:
            nvrtc.compileProgram(program, [*options, f"-arch={architecture}"])
        except nvrtc.NVRTCError:
            pytest.fail(f"{architecture}: {nvrtc.getProgramLog(program)[:5000]}", pytrace=False)
        code = (nvrtc.getCUBIN if architecture.startswith("sm_") else nvrtc.getPTX)(program)
        lowered = [nvrtc.getLoweredName(program, name) for name in kernels]
        return Program(
            nvrtc.getProgramLog(program).strip("\0\n "),
            [name.decode() if isinstance(name, bytes) else name for name in lowered],
            code if isinstance(code, bytes) else code.encode(),
        )
    finally:
        nvrtc.destroyProgram(program)
