"""The CUDA kernels of perturb without a GPU: grids that run on the CPU write the bits that STREAM.md defines."""

import ctypes
import itertools
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_cpp import NVRTC_OPTIONS, nvrtc_compile, requires_gxx, requires_nvrtc, run_cases
from launches import a_launch, head_of
from perturb_cases import Call, Part, calls_of_every_kind
from tables import DTYPES

from multisample.backends.driver import CONFIGURATION_SIZE, pack_configuration
from multisample.backends.element_types import SIZES
from multisample.backends.kernels.cuda.keys import CppKey, perturb_key
from multisample.backends.kernels.cuda.perturb_geometry import (
    HEAD_WORDS,
    KEYS_BYTES,
    PERTURB_THREADS,
    KeyOrigin,
    fields_of,
    most_spans,
    origin_of,
    perturb_turns,
    span_lists,
    spans_at,
)
from multisample.backends.kernels.cuda.round_keys import round_keys_of
from multisample.backends.launch import HEAD, PACKED_LAUNCH, SPAN, UNIT_FACTOR, Launch, Operation, Span, pack
from multisample.backends.numba import NumbaBackend
from multisample.backends.nvrtc import source

Array = np.ndarray[Any, Any]


PROGRAM = "run_perturb"


def run_in_cpp(runner: Callable[[str], Path], calls: list[Call]) -> Iterator[Array]:
    """The memory after each call, all of one type."""
    (dtype,) = {call.dtype for call in calls}
    for _, result in run_cases(runner(dtype), calls, Call.packed, lambda call: call.size):
        yield np.frombuffer(result, np.uint8)


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


class Recorded(NumbaBackend):
    """The numba backend without a driver: it records the kernels that it launches, each with its parameter bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[tuple[Any, bytes]] = []

    def kernel(self, key: Any) -> Any:
        return key

    def _launch_function(self, size: int, device: int) -> Any:
        def launch(key: Any, parameters: bytes) -> None:
            assert len(parameters) == CONFIGURATION_SIZE + size and device == key.device == 0
            self.launched.append((key, parameters))

        return launch


def expected_launches(launch: Launch) -> Iterator[tuple[CppKey, bytes]]:
    """The kernels of a float32 launch, each with its parameter bytes."""
    spans = spans_at(ctypes.string_at(launch.matrix, launch.spans * SPAN.size))
    origin, rows, batch = origin_of(launch, spans), launch.rows, max(launch.batch, 1)
    head, keys = pack(launch._replace(matrix=0)), round_keys_of("float32")(launch.seed)
    lists = span_lists(launch, spans, origin)
    for (strided, blocks, _), packed in zip(lists.kernels, lists.packed(spans), strict=True):
        key = perturb_key("float32", False, rows == 1 and origin != KeyOrigin.kOfRows, strided, origin, 0)
        yield key, pack_configuration(blocks, PERTURB_THREADS, launch.stream, batch) + head + packed + keys


KEYS = ((1, 2, 3), (4, 5, 6), (7, 8, 9))
PARTS = [Part(40, first=1, id=3), Part(9, 3, jump=11, id=4)]
WEIGHTS = np.array([1.5, -2.0, 0.25], np.float32)
# Calls of one launcher, the origin of their keys, and how many kernels take runs, and how many strided spans.
LAUNCHED: dict[str, tuple[list[Call], str, tuple[int, int]]] = {
    "more spans than a kernel takes": (
        [Call([Part(1 + k % 5, 1 + k % 3 % 2, first=k % 4, jump=9, id=k) for k in range(150)], weights=WEIGHTS)],
        "kInParameters", (2, 2),
    ),
    "words in memory": ([Call(PARTS, in_memory=("seed", "offset"))], "kInMemory", (1, 1)),
    "a population": ([Call(PARTS, keys=KEYS)], "kOfBatch", (1, 1)),
    "factors": ([Call(PARTS, factors=factors, seed=3) for factors in ((0.5, 0.75), (1.5, 0.25))], "kOfBatch", (1, 1)),
    "keys of coefficients": (
        [Call(PARTS, weights=WEIGHTS, keys=KEYS, has_own_keys=True, dim_offset=3)], "kOfRows", (1, 1)
    ),
    "spans of another shape": (
        [Call(PARTS, members=2), Call([Part(30, first=3, id=3), Part(5, 2, jump=7, id=1)], members=2)], "kInParameters",
        (1, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("has_launcher", [False, True])
@pytest.mark.parametrize("name", LAUNCHED)
def test_a_launch_has_all_spans_at_their_addresses(name: str, has_launcher: bool) -> None:
    calls, origin, kernels = LAUNCHED[name]
    backend, launcher, tail = Recorded(), None, ()
    # The addresses change from call to call.
    for call, memory in itertools.product(calls * 2, (4096, 1 << 20)):
        spans = ctypes.create_string_buffer(call.spans_at(memory))
        launch = call.launch(8 * memory, matrix=ctypes.addressof(spans), stream=7)
        launch = call.launch_with_inputs(launch, 16 * memory)
        tail = tail or launch[len(HEAD) :]  # All calls of a launcher have one tail.
        launch = Launch(*launch[: len(HEAD)], *tail)
        backend.launched.clear()
        if has_launcher:
            launcher = launcher or backend.launcher(launch)
            assert launcher.geometry is launcher.scratch_size is None
            if launch.origin_step:  # The launcher takes the address of the first rows as the row.
                row_at = launch.first_row_at
                launch = launch._replace(first_row=row_at, first_column_at=row_at)
            launcher.run(None, *head_of(launch))
        else:
            backend.launch(launch)
        assert backend.launched == list(expected_launches(launch))
        assert all(f"multisample::{origin}>" in key.name for key, _ in backend.launched)
        strided = ["StridedSpan" in key.name for key, _ in backend.launched]
        assert strided == [False] * kernels[0] + [True] * kernels[1]


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
                rows, 1, dtype, operation=Operation.perturb, spans=len(spans), matrix=ctypes.addressof(buffer),
                fast_math=fast_math, batch=batch,
            )  # fmt: skip
            turns = perturb_turns(call, spans)
            assert geometries.turns(pack(call)) == turns
            assert geometries.perturb_origin(pack(call)) == origin_of(call, spans)
            wide = draw.random() < 0.5
            cut = span_lists(call, spans, KeyOrigin.kOfBatch if wide else KeyOrigin.kInParameters)
            for strided in (False, True):
                out = ctypes.create_string_buffer(20 * 4096)
                count = geometries.perturb_cut(pack(call), turns, strided, wide, out)
                every = zip(cut.kernels, cut.packed(spans), strict=True)
                lists = [(kernel[1], words) for kernel, words in every if kernel[0] == strided]
                assert count == len(lists), (dtype, strided)
                for k, (blocks, words) in enumerate(lists):
                    expected = np.frombuffer(out.raw, np.int64, len(words) // 8, k * len(words))
                    got = np.frombuffer(words, np.int64)
                    used = HEAD_WORDS + (got[0] & 0xFFFFFFFF) * len(fields_of(strided, wide))
                    assert np.array_equal(got[:used], expected[:used]), (dtype, strided, k)
                    assert 0 < blocks < 2**31
                    found.add((turns, strided))
    assert found >= {(1, False), (1, True), (8, False), (8, True)}


def test_parameters_fill_no_more_than_every_driver_supports() -> None:
    for strided, wide in itertools.product((False, True), repeat=2):
        fields = len(fields_of(strided, wide))
        words = HEAD_WORDS + most_spans(strided, wide) * fields
        assert 4096 - 8 * fields < PACKED_LAUNCH + KEYS_BYTES + 8 * words <= 4096


@pytest.mark.slow
@requires_nvrtc
def test_neighbouring_elements_are_read_and_written_by_vectors() -> None:
    types = ("float32", "v4"), ("float16", "v4"), ("float64", "v2")
    in_parameters = KeyOrigin.kInParameters
    kinds = (False, in_parameters), (True, in_parameters), (True, KeyOrigin.kOfBatch), (False, KeyOrigin.kOfRows)
    keys = {
        perturb_key(dtype, False, one, False, origin, 0).name: width for dtype, width in types for one, origin in kinds
    }
    compiled = nvrtc_compile(source("perturb_kernel"), [*keys], "compute_90", NVRTC_OPTIONS)
    ptx = compiled.code.decode()
    bodies = re.split(r"\.entry\s+", ptx)[1:]
    assert compiled.log == "" and len(bodies) == len(keys) and not re.search(r"\.local", ptx)
    for name, (key, width) in zip(compiled.names, keys.items(), strict=True):
        (body,) = (body for body in bodies if body.startswith(name))
        for access in ("ld", "st"):
            assert re.search(rf"{access}\.global\.{width}\.|{access}\.global\.{width[0]}2\.[bu]32", body), (key, access)
