"""CUDA kernels as programs for the CPU."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
from cuda_cpp import SHIM, compile_cpp, compile_runner

from multisample.backends.native import csrc_files


@pytest.fixture(scope="module")
def runner(request: pytest.FixtureRequest, build_once: Callable[..., Path]) -> Callable[..., Path]:
    """``runner(element, *options)``: the module's PROGRAM of the folder shim, with kernels of this type."""
    program = request.module.PROGRAM

    def runner(element: str, *options: str) -> Path:
        def make(folder: Path) -> None:
            compile_runner(folder, program, element, *options)

        return build_once(program, (element, *options), [csrc_files.folder(), SHIM], make) / program

    return runner


@pytest.fixture(scope="session")
def geometries(build_once: Callable[..., Path]) -> ctypes.CDLL:
    """The functions of ``shim/host_geometry.cpp``."""

    def make(folder: Path) -> None:
        compile_cpp("-O1", "-shared", "-fPIC", f"-I{SHIM}", SHIM / "host_geometry.cpp", "-o", folder / "geometry.so")

    return ctypes.CDLL(str(build_once("host_geometry", (), [csrc_files.folder(), SHIM], make) / "geometry.so"))
