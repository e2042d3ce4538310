"""CUDA kernels as programs for the CPU, and as PTX."""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba_ptx
import pytest
from cuda_cpp import SHIM, compile_runner

from multisample.backends.native import csrc_files


@pytest.fixture(scope="module")
def runner(request: pytest.FixtureRequest, build_once: Callable[..., Path]) -> Callable[..., Path]:
    """``runner(element, *options)``: the module's PROGRAM of the folder shim, which runs the kernels of this type."""
    program = request.module.PROGRAM

    def runner(element: str, *options: str) -> Path:
        def make(folder: Path) -> None:
            compile_runner(folder, program, element, *options)

        return build_once(program, (element, *options), [csrc_files.folder(), SHIM], make) / program

    return runner


@pytest.fixture(scope="session")
def compiled_by_numba(build_once: Callable[..., Path]) -> Callable[..., Any]:
    """``compiled_by_numba(kind, variants)``: PTX and messages of nvJitLink for each variant of an operation."""
    sources = [Path(str(importlib.resources.files("multisample.backends"))).resolve(), Path(numba_ptx.__file__)]

    def compiled(kind: str, variants: list[tuple[Any, ...]]) -> list[tuple[str, str]]:
        def make(folder: Path) -> None:
            try:
                numba_ptx.compile_others(kind, variants, folder)
            except numba_ptx.CannotCompileError as error:
                pytest.skip(str(error))

        folder = build_once(f"numba_{kind}", (variants, numba_ptx.versions()), sources, make)
        files = [folder / f"{kind}{k}" for k in range(len(variants))]
        return [(file.with_suffix(".ptx").read_text(), file.with_suffix(".log").read_text()) for file in files]

    return compiled
