"""The CUDA kernels of perturb without a GPU: whole grids, in C++ and in Python, run on the CPU.

Both must have the same geometry and write the bits of the definition, in place and out of place.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import random
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import emulated_gpu
import numpy as np
import pytest
from cuda_cpp import CUPY_OPTIONS, nvrtc_compile, requires_gxx, requires_nvrtc, run_cases  # fmt: skip
from emulated_gpu import requires_emulator
from launches import a_launch, head_of, stored_words
from perturb_cases import Call, Part, calls_of_every_kind
from tables import DTYPES

from multisample.backends.cupy import BACKEND as CUPY
from multisample.backends.cupy import kernel_name, source
from multisample.backends.driver import CONFIGURATION_SIZE
from multisample.backends.element_types import SIZES
from multisample.backends.kernels.cuda import group, perturb
from multisample.backends.kernels.cuda.kernel_choice import OF_BATCH, ORIGINS
from multisample.backends.kernels.cuda.keys import PerturbKey
from multisample.backends.kernels.cuda.perturb_geometry import (
    HEAD_WORDS,
    KEYS_BYTES,
    MOST_SPANS_OF_NUMBA,
    fields_of,
    most_spans,
    origin_of,
    perturb_turns,
    span_lists,
    spans_at,
)
from multisample.backends.launch import PACKED_LAUNCH, SPAN, UNIT_FACTOR, Launch, Operation, Span, pack
from multisample.backends.numba import NumbaBackend

Array = np.ndarray[Any, Any]


# --- C++ ------------------------------------------------------------------------------------------


PROGRAM = "run_perturb"


def run_in_cpp(runner: Callable[[str], Path], calls: list[Call]) -> Iterator[Array]:
    """The memory after each call, all of one type."""
    (dtype,) = {call.dtype for call in calls}
    for _, result in run_cases(runner(dtype), calls, Call.packed, lambda call: call.size):
        yield np.frombuffer(result, np.uint8)


# --- Python ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled() -> Iterator[Callable[..., Any]]:
    """``compiled(dtype, one_member, strided, origin)``: the portable kernel, for the emulated GPU."""

    @functools.cache
    def compiled(dtype: str, one_member: bool, strided: bool, origin: int) -> Any:
        kernel = perturb.perturb_kernel(emulated_gpu, dtype, False, one_member, strided, origin)
        wide = "wide " if origin >= OF_BATCH else ""
        return emulated_gpu.compile_kernel(kernel, wide + ("strided spans" if strided else "runs"))

    with emulated_gpu.sharing_functions(group, perturb):
        yield compiled


def run_in_python(compiled: Callable[..., Any], call: Call) -> Array:
    memory = call.memory().view(f"u{SIZES[call.dtype]}").copy()
    words = np.array(stored_words(call.words()), np.uint64)
    inputs = call.inputs().copy()
    launch = call.launch_with_inputs(call.launch(words.ctypes.data), inputs.ctypes.data)
    spans = spans_at(call.spans_at(memory.ctypes.data))
    origin = origin_of(launch, spans)
    for cut in span_lists(spans, call.dtype, call.rows, call.turns, MOST_SPANS_OF_NUMBA, origin >= OF_BATCH):
        kernel = compiled(call.dtype, call.rows == 1, cut.strided, origin)
        for blocks, packed in zip(cut.blocks, cut.packed(spans), strict=True):
            emulated_gpu.launch(
                kernel, blocks, 256, pack(launch) + packed, memory, (inputs, memory, words),
                batch=call.batch, backwards=call.backwards,
            )  # fmt: skip
    return memory.view(np.uint8)


# --- Tests ----------------------------------------------------------------------------------------


def check(got: Array, call: Call) -> None:
    bits = f"u{SIZES[call.dtype]}"
    expected = call.expected()
    wrong = np.flatnonzero(got.view(bits) != expected.view(bits))
    assert len(wrong) == 0, (call, f"{len(wrong)} wrong", wrong[:9], call.spans)


# float16 and bfloat16 differ only in their roundings, which test_normals.py tests.
@pytest.mark.slow
@requires_gxx
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_kernels_in_cpp_perturb_every_layout(runner: Any, dtype: str) -> None:
    cases = list(calls_of_every_kind(dtype))
    for call, got in zip(cases, run_in_cpp(runner, cases), strict=True):
        check(got, call)


@pytest.mark.slow
@requires_emulator
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_kernels_in_python_perturb_every_layout(compiled: Any, dtype: str) -> None:
    # Compiling a kernel takes seconds. The launch tests below run the other kernels of float32.
    for call in calls_of_every_kind(dtype, some_kernels=dtype == "float32"):
        check(run_in_python(compiled, call), call)


class Emulated(NumbaBackend):
    """The numba backend without a driver: it launches on the emulated GPU."""

    def __init__(self, compiled: Any, call: Call) -> None:
        super().__init__()
        self.compiled_kernel, self.call = compiled, call
        self.memory = call.memory().view(f"u{SIZES[call.dtype]}").copy()
        self.spans = ctypes.create_string_buffer(call.spans_at(self.memory.ctypes.data))
        self.words = np.array(stored_words(call.words()), np.uint64)
        self.inputs = call.inputs().copy()
        self.kernels: list[PerturbKey] = []

    def kernel(self, key: Any) -> Any:
        return key

    def _launch_function(self, size: int, device: int) -> Any:
        def launch(key: PerturbKey, parameters: bytes) -> None:
            assert len(parameters) == CONFIGURATION_SIZE + size and device == key.device == 0
            blocks, batch, _, threads, *_, stream, _, _ = struct.unpack_from("7I4xPP I4x", parameters)
            assert (batch, stream) == (self.call.batch, 7)
            self.kernels.append(key)
            emulated_gpu.launch(
                self.compiled_kernel(key.dtype, key.one_member, key.strided, key.origin), blocks, threads,
                parameters[CONFIGURATION_SIZE:], self.memory, (self.inputs, self.memory, self.words), batch=batch,
            )  # fmt: skip

        return launch

    def launch_of_call(self) -> Launch:
        launch = self.call.launch(self.words.ctypes.data, matrix=ctypes.addressof(self.spans), stream=7)
        return self.call.launch_with_inputs(launch, self.inputs.ctypes.data)


@pytest.mark.slow
@requires_emulator
@pytest.mark.parametrize("way", ["launch", "launcher", "words in memory"])
def test_every_way_to_launch_perturbs_the_spans_at_the_address(compiled: Any, way: str) -> None:
    words: tuple[str, ...] = ()
    weights = np.array([1.5, -2.0], np.float32)
    if way == "words in memory":
        words, weights = ("seed", "offset", "first_row"), weights[:1]
    parts = [Part(1 + k % 5, 1 + k % 3 % 2, first=k % 4, jump=9, id=k) for k in range(60)]
    call = Call(parts, weights=weights, seed=9, offset=3, dim_offset=4, in_memory=words)
    backends = [Emulated(compiled, call) for _ in range(3)]
    backend = backends[0]
    launch = backend.launch_of_call()
    launcher = backend.launcher(launch)
    assert launcher.geometry is launcher.scratch_size is None
    for other in backends:
        # The addresses change from call to call.
        backend.memory, backend.words, launch = other.memory, other.words, other.launch_of_call()
        backend.inputs = other.inputs
        backend.kernels.clear()
        if way == "launcher":
            launcher.run(None, *head_of(launch))
        else:
            backend.launch(launch)
        check(backend.memory.view(np.uint8), call)
        # 40 runs take 3 launches, and 20 strided spans 5.
        assert [key.strided for key in backend.kernels] == [False] * 3 + [True] * 5
        assert {key.origin for key in backend.kernels} == {int(bool(words))}


@pytest.mark.slow
@requires_emulator
@pytest.mark.parametrize("way", ["launch", "launcher"])
def test_a_population_and_factors_are_launched_as_one(compiled: Any, way: str) -> None:
    parts = [Part(40, first=1, id=3), Part(9, 3, jump=11, id=4)]
    keys, factors = ((1, 2, 3), (4, 5, 6), (7, 8, 9)), (0.5, 0.75)
    weights = np.array([1.5, -2.0, 0.25], np.float32)
    for call, origin in (
        (Call(parts, keys=keys), "kOfBatch"), (Call(parts, factors=factors, seed=3), "kOfBatch"),
        (Call(parts, weights=weights, keys=keys, has_own_keys=True, dim_offset=3), "kOfRows"),
    ):  # fmt: skip
        backend = Emulated(compiled, call)
        launch = backend.launch_of_call()
        if way == "launch":
            backend.launch(launch)
        else:  # The launcher takes the address of the first rows as the row.
            head = head_of(launch._replace(first_row=launch.first_row_at or launch.first_row))
            backend.launcher(launch).run(None, *head)
        check(backend.memory.view(np.uint8), call)
        assert [ORIGINS[key.origin] for key in backend.kernels] == [origin] * 2


@pytest.mark.slow
@requires_emulator
def test_a_launcher_follows_spans_of_another_shape(compiled: Any) -> None:
    first = Call([Part(5, id=1), Part(8, 2, jump=9, id=2)], members=2)
    second = Call([Part(5, 2, jump=7, id=1), Part(30, first=3, id=3)], members=2)
    backend = Emulated(compiled, first)
    launcher = backend.launcher(backend.launch_of_call())
    for call in (first, second, first):
        other = Emulated(compiled, call)
        backend.memory, backend.inputs = other.memory, other.inputs
        launcher.run(None, *head_of(other.launch_of_call()))
        check(backend.memory.view(np.uint8), call)


# --- Geometry and parameters ----------------------------------------------------------------------


def random_spans(draw: random.Random, size: int) -> Iterator[Span]:
    for _ in range(draw.choice([1, 3, 100, 300])):
        width = draw.choice([1, 3, 4, 100, 4096, 10**6 + 1, 2**31])
        rows = draw.choice([1, 1, 1, 2, 5, 4096 if width < 2**20 else 8])
        stride, other = draw.choice([(size, size), (size, size), (size, 2 * size), (-size, size)])
        jump = draw.choice([width, width, width + 4, width + 1])
        row = draw.choice([width * size, width * size, jump * size])
        yield Span(
            16 * draw.randrange(2**40), 16 * draw.randrange(2**40), draw.randrange(2**20), rows, width, jump, row,
            stride, draw.choice([row, row + 16]), other, draw.randrange(2**32), 16 * draw.randrange(9),
            16 * draw.randrange(9), draw.choice([UNIT_FACTOR, 2**62]),
        )  # fmt: skip


@requires_gxx
def test_the_cut_into_kernels_is_equal_in_both_languages(geometries: ctypes.CDLL) -> None:
    draw = random.Random(3)
    found: set[tuple[int, bool]] = set()
    for dtype, rows, fast_math, batch in itertools.product(DTYPES, (1, 4, 5, 30), (False, True), (0, 64)):
        for _ in range(10):
            packed = b"".join(SPAN.pack(*span) for span in random_spans(draw, SIZES[dtype]))
            spans, buffer = spans_at(packed), ctypes.create_string_buffer(packed)
            call = a_launch(
                rows,
                1,
                dtype,
                operation=Operation.perturb,
                spans=len(spans),
                matrix=ctypes.addressof(buffer),
                fast_math=fast_math,
                batch=batch,
            )
            turns = perturb_turns(spans, dtype, rows, fast_math, batch)
            assert geometries.turns(pack(call)) == turns
            assert geometries.perturb_origin(pack(call)) == origin_of(call, spans)
            wide = draw.random() < 0.5
            found_lists = span_lists(spans, dtype, rows, turns, CUPY.most_spans[wide], wide)
            cuts = {cut.strided: cut for cut in found_lists}
            for strided in (False, True):
                out = ctypes.create_string_buffer(20 * 4096)
                count = geometries.perturb_cut(pack(call), turns, strided, wide, out)
                lists = cuts[strided].packed(spans) if strided in cuts else []
                assert count == len(lists), (dtype, strided)
                for k, words in enumerate(lists):
                    expected = np.frombuffer(out.raw, np.int64, len(words) // 8, k * len(words))
                    got = np.frombuffer(words, np.int64)
                    used = HEAD_WORDS + (got[0] & 0xFFFFFFFF) * fields_of(strided, wide)
                    assert np.array_equal(got[:used], expected[:used]), (dtype, strided, k)
                    assert 0 < cuts[strided].blocks[k] < 2**31
                    found.add((turns, strided))
    assert found >= {(1, False), (1, True), (8, False), (8, True)}


def test_parameters_fill_no_more_than_every_driver_supports() -> None:
    for strided, wide in itertools.product((False, True), repeat=2):
        fields = fields_of(strided, wide)
        words = HEAD_WORDS + most_spans(strided, wide) * fields
        assert 4096 - 8 * fields < PACKED_LAUNCH + KEYS_BYTES + 8 * words <= 4096


@pytest.mark.slow
@requires_nvrtc
def test_neighbouring_elements_are_read_and_written_by_vectors() -> None:
    types = ("float32", "v4"), ("float16", "v4"), ("float64", "v2")
    kinds = (False, 0), (True, 0), (True, ORIGINS.index("kOfBatch")), (False, ORIGINS.index("kOfRows"))
    keys = [PerturbKey(dtype, False, one, False, origin, 0) for dtype, _ in types for one, origin in kinds]
    compiled = nvrtc_compile(source("perturb"), [*map(kernel_name, keys)], "compute_90", CUPY_OPTIONS)
    ptx = compiled.code.decode()
    bodies = re.split(r"\.entry\s+", ptx)[1:]
    assert compiled.log == "" and len(bodies) == len(keys) and not re.search(r"\.local", ptx)
    for name, key in zip(compiled.names, keys, strict=True):
        (body,) = (body for body in bodies if body.startswith(name))
        width = dict(types)[key.dtype]
        for access in ("ld", "st"):
            assert re.search(rf"{access}\.global\.{width}\.|{access}\.global\.{width[0]}2\.[bu]32", body), (key, access)
