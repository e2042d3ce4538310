"""The CUDA kernels of perturb without a GPU: whole grids, in C++ and in Python, run on the CPU.

Both must have the same geometry and write the bits of the definition, in place and out of place.
"""

from __future__ import annotations

import ctypes
import importlib.resources
import itertools
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import emulated_gpu
import numba_ptx
import numpy as np
import pytest
from cuda_cpp import (
    ARCHITECTURES,
    SHIM,
    compile_runner,
    nvrtc_compile,
    requires_gxx,
    requires_nvrtc,
    run_cases,
)  # fmt: skip
from launches import a_launch, head_of, stored_words
from perturb_cases import Call, Part, calls_of_every_kind
from tables import DTYPES, slow_but

from multisample.backends.cupy import OPTIONS, PERTURB_HEADER, CupyBackend, perturb_kernel_name, source
from multisample.backends.driver import CONFIGURATION_SIZE, PerturbKey
from multisample.backends.element_types import SIZES
from multisample.backends.kernels.cuda import group, perturb
from multisample.backends.kernels.cuda.perturb_geometry import (
    HEAD_WORDS,
    KEYS_BYTES,
    MOST_SPANS_OF_NUMBA,
    RUN_FIELDS,
    STRIDED_FIELDS,
    SpanList,
    most_spans,
    perturb_turns,
    span_lists,
    spans_at,
)
from multisample.backends.launch import PACKED_LAUNCH, SPAN, Operation, Span, pack, packer
from multisample.backends.native import csrc_files
from multisample.backends.system import cuda_driver

Array = np.ndarray[Any, Any]


# --- C++ ------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def runner(build_once: Callable[..., Path]) -> Callable[[str], Path]:
    """``runner(dtype)``: a program that runs the kernels of this type of parameters."""

    def runner(dtype: str) -> Path:
        def make(folder: Path) -> None:
            compile_runner(folder, "run_perturb", ["cuda/perturb_kernel.cuh"], 1, dtype)

        return build_once("run_perturb", dtype, [csrc_files.folder(), SHIM], make) / "run_perturb"

    return runner


def run_in_cpp(runner: Callable[[str], Path], calls: list[Call]) -> Iterator[Array]:
    """The memory after each call, all of one type."""
    (dtype,) = {call.dtype for call in calls}
    for _, result in run_cases(runner(dtype), calls, Call.packed, lambda call: call.size):
        yield np.frombuffer(result, np.uint8)


# --- Python ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled() -> Iterator[Callable[..., Any]]:
    """``compiled(dtype, strided, origin_in_memory)``: the portable kernel, for the emulated GPU."""
    cache: dict[Any, Any] = {}
    modules = (perturb, group)
    patched = [(module, module.inline) for module in modules]
    caches = [x for module in modules for x in vars(module).values() if hasattr(x, "cache_clear")]
    for function in caches:
        function.cache_clear()
    for module in modules:
        module.inline = emulated_gpu.once  # type: ignore[assignment]

    def compiled(dtype: str, strided: bool, origin_in_memory: bool) -> Any:
        key = dtype, strided, origin_in_memory
        if key not in cache:
            kernel = perturb.perturb_kernel(emulated_gpu, dtype, False, strided, origin_in_memory)
            cache[key] = emulated_gpu.compile_kernel(kernel, "strided spans" if strided else "runs")
        return cache[key]

    yield compiled
    for module, original in patched:
        module.inline = original  # type: ignore[assignment]
    for function in caches:
        function.cache_clear()


def run_in_python(compiled: Callable[..., Any], call: Call) -> Array:
    memory = call.memory().view(f"u{SIZES[call.dtype]}").copy()
    words = np.array(stored_words(call.words()), np.uint64)
    weights = call.weights if isinstance(call.weights, np.ndarray) else 0.0
    launch = pack(call.launch(words.ctypes.data))
    spans = spans_at(call.spans_at(memory.ctypes.data))
    for cut in span_lists(spans, call.dtype, call.turns, MOST_SPANS_OF_NUMBA):
        kernel = compiled(call.dtype, cut.strided, bool(set(call.in_memory) - {"offset"}))
        for blocks, packed in zip(cut.blocks, cut.packed(spans), strict=True):
            emulated_gpu.launch(
                kernel, blocks, 256, launch + packed, memory, (weights, memory, words), backwards=call.backwards
            )
    return memory.view(np.uint8)


# --- Tests ----------------------------------------------------------------------------------------

requires_emulator = pytest.mark.skipif(not emulated_gpu.AVAILABLE, reason="the C library has no fibers")


def check(got: Array, call: Call) -> None:
    bits = f"u{SIZES[call.dtype]}"
    expected = call.expected()
    wrong = np.flatnonzero(got.view(bits) != expected.view(bits))
    assert len(wrong) == 0, (call, f"{len(wrong)} wrong", wrong[:9], call.spans)


def calls(dtype: str, quick: bool) -> Iterable[Call]:
    return itertools.islice(calls_of_every_kind(dtype), 0, None, 1 if quick else 3)


@requires_gxx
@pytest.mark.parametrize("dtype", slow_but(["float32", "bfloat16"], DTYPES))
def test_kernels_in_cpp_perturb_every_layout(runner: Any, dtype: str) -> None:
    cases = list(calls_of_every_kind(dtype))
    for call, got in zip(cases, run_in_cpp(runner, cases), strict=True):
        check(got, call)


@requires_emulator
@pytest.mark.parametrize("dtype", slow_but(["float32"], DTYPES))
def test_kernels_in_python_perturb_every_layout(compiled: Any, dtype: str) -> None:
    for call in calls_of_every_kind(dtype):
        check(run_in_python(compiled, call), call)
