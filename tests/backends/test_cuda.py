"""Tests that need a CUDA device: equal bits, its memory and its streams.

Results are compared bit for bit with the cpu backend, which other files compare with the exact reference.
``skip_rules.py`` skips these tests without a device. ``test_cuda_numba.py`` has the tests of numba alone.
"""

import concurrent.futures
import ctypes
import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from cuda_memory import CROSSED, CYCLES, OWN, SECONDS, Array, Gpu, ToArray, gpu_of, names, numpy_dtype, on_cpu, vectors
from launches import a_launch, head_of, stored_words
from perturb_cases import Call, calls_of_every_kind
from skip_rules import device_count, require
from tables import DTYPES, NOISES

import multisample
from multisample.backends import generic, registry
from multisample.backends.kernels.cuda import geometry
from multisample.backends.kernels.cuda.geometry import StoreKind

SIZES = {name: np.dtype(dtype).itemsize for name, dtype in DTYPES.items()}


@pytest.fixture(params=OWN, ids=names)
def gpu(request: pytest.FixtureRequest) -> Gpu:
    """A backend, with arrays of its own library."""
    return gpu_of(request.param)


@pytest.fixture(params=(*OWN, *CROSSED), ids=names)
def any_gpu(request: pytest.FixtureRequest) -> Gpu:
    """A backend, with arrays of any library."""
    return gpu_of(request.param)


@pytest.fixture
def all_gpus() -> list[Gpu]:
    """Every available backend (at least two), each with arrays of its own library."""
    found, missing = [], []
    for pair in OWN:
        try:
            found.append(gpu_of(pair))
        except pytest.skip.Exception as reason:
            missing.append(f"{pair[1]}: {reason}")
    if len(found) < 2:
        pytest.skip("; ".join(missing))
    return found


@pytest.fixture
def torch() -> Any:
    """PyTorch, with the operator loaded."""
    require("torch_ext")
    registry.find("torch_ext").prepare("cuda")
    return pytest.importorskip("torch")


def test_fast_math_has_no_effect_on_float64(any_gpu: Gpu, bits: ToArray) -> None:
    for d, n in [(5, 37), (30, 1024), (7, 4099)]:
        mu, sigma = vectors(d, "float64", n)
        for noise, options in itertools.product(NOISES, ({}, {"dtype": "float64"})):
            got = any_gpu.sample(
                any_gpu.memory.put(mu), any_gpu.memory.put(sigma), n, seed=4, noise=noise, fast_math=True, **options
            )
            assert np.array_equal(bits(got), bits(on_cpu(mu, sigma, n, "float64", seed=4, noise=noise))), (d, n)


KINDS = (*DTYPES, *(f"{sign}int{width}" for sign in ("", "u") for width in (8, 16, 32, 64)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_every_type_and_stride_give_the_bits_of_the_cpu(
    any_gpu: Gpu, bits: ToArray, kind: str, dtype: str
) -> None:
    d, n = 300, 9
    element, memory = numpy_dtype(kind), any_gpu.memory
    mu, sigma = (vector.astype(np.float64) for vector in vectors(d, "float64", 1))
    if "int" in kind:
        limits = np.iinfo(kind)
        mu, sigma = mu.clip(limits.min, limits.max), sigma.clip(0, limits.max)
    mu, sigma = mu.astype(element), sigma.astype(element)
    if "int" in kind:
        # Integers that no computing type represents exactly.
        mu[:3] = limits.max, limits.min, limits.max // 3
        sigma[3:5] = limits.max, limits.max // 5
    options = {"seed": 12, "dtype": dtype, "sample_offset": 1}
    for name, arrange in (
        ("contiguous", lambda x: memory.put(x)),
        ("every third", lambda x: memory.put(np.repeat(x, 3))[1::3]),
        ("column", lambda x: memory.put(np.stack((x, x[::-1]), 1))[:, :1]),
        ("reversed", lambda x: memory.put(x[::-1].copy())[::-1]),
    ):
        if name == "reversed" and memory.name == "torch":
            continue  # PyTorch has no tensors of this type.
        expected = bits(on_cpu(mu, sigma, n, **options))
        assert np.array_equal(bits(any_gpu.sample(arrange(mu), arrange(sigma), n, **options)), expected), name
        expected = bits(on_cpu(mu, 0.75, n, **options))
        assert np.array_equal(bits(any_gpu.sample(arrange(mu), 0.75, n, **options)), expected), name
        expected = bits(on_cpu(-1e-42, sigma, n, **options))
        assert np.array_equal(bits(any_gpu.sample(-1e-42, arrange(sigma), n, **options)), expected), name
    if kind in DTYPES and kind != "bfloat16":
        same = memory.repeated(0.75, kind, d)
        expected = bits(on_cpu(np.full(d, 0.75), np.full(d, 0.75), n, **options))
        assert np.array_equal(bits(any_gpu.sample(same, same, n, **options)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", DTYPES)
def test_subnormal_numbers_are_kept(any_gpu: Gpu, bits: ToArray, kind: str, dtype: str) -> None:
    # Subnormal numbers of float32, float16 and float64, as inputs, products and results.
    mu = [0, 0, 1e-42, -3e-41, 1e-45, 0, 6e-8, 0, 5e-324, 0, 2e-38, 1e-39]
    sigma = [1e-42, 1e-45, 0, 1e-40, 0, 1e-38, 0, 6e-8, 0, 1e-310, 1e-38, 0]
    with np.errstate(under="ignore"):
        host = [np.array(vector, np.float64).astype(numpy_dtype(kind)) for vector in (mu, sigma)]
    for n in (5, 1024):
        for options in ({"dtype": dtype}, {}):
            if not options and (kind != dtype or kind not in ("float32", "float64")):
                continue
            got = any_gpu.sample(*map(any_gpu.memory.put, host), n, seed=5, **options)
            assert np.array_equal(bits(got), bits(on_cpu(*host, n, dtype, seed=5))), (n, options)


# Shapes near the limits at which rows share a block or are split: 1 to 8, a warp, 128 groups, the threads of a block.
LENGTHS = (
    *range(1, 9), *range(31, 34), *range(127, 130), *range(511, 518), *range(1023, 1030), *range(1151, 1158),
    *range(4095, 4100),
)  # fmt: skip
HEIGHTS = (*range(1, 6), *range(255, 259), 2047)
# Guard elements before and after; a multiple of the alignment of vectorised stores.
GUARD = 64


class Grid(NamedTuple):
    """Heights and lengths of matrices; their windows begin at the columns `skips` in turn."""

    heights: Sequence[int]
    lengths: Sequence[int]
    skips: Sequence[int]
    first: int = 0
    """The number of the first matrix."""
    strided: bool = False
    """Whether mu and sigma are not contiguous. A large call then has no plain kernel."""

    @property
    def reference(self) -> tuple[int, int]:
        """The largest window; results are parts of it."""
        return max(self.heights) + 2, max(self.lengths) + max(self.skips)


LEAST = geometry.LEAST_ROWS
GRIDS = (
    Grid(HEIGHTS, LENGTHS, range(8)),
    # For kFewColumns: rows that fill whole threads, and five more. That store kind needs a window that begins at a
    # group's first column.
    Grid((LEAST, LEAST + 5), range(1, geometry.MOST_FEW_COLUMNS + 2), (0, 8, 0, 3)),
    # More groups than the plain kernels draw.
    Grid((1, 2), (2**22 + 4, 2**22 + 5), (0, 3), strided=True),
    *(
        Grid((2**21 // -(-n // 4) + 1 + k,), (n,), range(8), k, strided=True)
        for k, n in enumerate((10, 12, 31, 33, 129, 509, 512, 1023, 1024, 1029, 1157, 4100, 2**20 + 1))
    ),
)


def layouts(d: int, n: int, skip: int) -> list[tuple[int, int, int]]:
    """Strides of rows and columns and the index of the first element, all in elements."""
    return [(-(-(skip + n) // 4) * 4, 1, GUARD + skip), (n, 1, GUARD + 1), (n + 1 + n % 2, 1, GUARD), (1, d, GUARD)]


class Case(NamedTuple):
    """A window of the reference, which begins at row `top` and column `skip`, and its place in memory."""

    d: int
    n: int
    top: int
    skip: int
    row_stride: int
    column_stride: int
    first: int
    antithetic: bool
    turned: bool

    def store_kind(self, dtype: str, noise: str, fast_math: bool) -> int:
        size = SIZES[dtype]
        strides = self.row_stride * size, self.column_stride * size
        launch = a_launch(
            self.d, self.n, dtype, matrix=self.first * size, strides=strides, first_column=self.skip,
            shared_noise=noise == "shared", antithetic=self.antithetic, fast_math=fast_math,
        )  # fmt: skip
        return geometry.geometry(launch).store_kind


def cases(grid: Grid) -> Iterator[Case]:
    """Every shape in each memory layout. Antithetic pairs take one layout in turn; with short rows, every layout."""
    for number, (d, n) in enumerate(itertools.product(grid.heights, grid.lengths), grid.first):
        top, skip = (number % 3, grid.skips[number % len(grid.skips)]) if number % 5 else (0, 0)
        places = layouts(d, n, skip)
        turn = sum(divmod(number, len(grid.lengths))) % len(places)
        paired = places if n <= geometry.MOST_FEW_COLUMNS else [places[turn]]
        for place, antithetic in [*((place, False) for place in places), *((place, True) for place in paired)]:
            yield Case(d, n, top, skip, *place, antithetic, place[1] != 1 and number % 2 == 1)


# Several small matrices share a block: `test_batches.py` compares them with launches of one matrix.
def test_the_cases_have_every_store_kind() -> None:
    of_one_matrix = [kind for kind in StoreKind if kind != StoreKind.kSmallMatrices]
    for dtype, noise, fast_math in itertools.product(DTYPES, NOISES, (False, True)):
        found = [(case.store_kind(dtype, noise, fast_math), case) for grid in GRIDS for case in cases(grid)]
        assert {(kind, case.antithetic) for kind, case in found} == set(itertools.product(of_one_matrix, (False, True)))
        assert {
            (case.n, case.column_stride == 1, case.antithetic) for kind, case in found if kind == StoreKind.kFewColumns
        } == set(itertools.product(range(1, geometry.MOST_FEW_COLUMNS + 1), (False, True), (False, True)))


def check_all_layouts(
    gpu: Gpu, grid: Grid, references: tuple[Array, Array], dtype: str, noise: str, fast_math: bool, bits: ToArray
) -> None:
    """Check bits and guards of all cases. The references are bit patterns; the second has antithetic pairs."""
    memory, size, width = gpu.memory, SIZES[dtype], grid.reference[1]
    integer = f"int{8 * size}"
    on_device = [memory.put(reference.view(np.uint8).reshape(-1)) for reference in references]
    mu, sigma = map(memory.put, vectors(grid.reference[0], dtype))
    if grid.strided:
        mu, sigma = (memory.put(np.repeat(x, 2))[::2] for x in vectors(grid.reference[0], dtype))
    for case in cases(grid):
        d, n, top, skip, *strides, first, antithetic, turned = case
        length = first + (d - 1) * strides[0] + (n - 1) * strides[1] + 1 + GUARD
        length += -length % 8
        buffer, wanted = memory.poisoned(length * size), memory.poisoned(length * size)
        # Two views of the same memory.
        order = -1 if turned else 1
        out = memory.view(buffer, dtype, (d, n)[::order], tuple(strides)[::order], first)
        got = gpu.sample(
            mu[top : top + d], sigma[top : top + d], n, seed=13, noise=noise, dtype=dtype, out=out, fast_math=fast_math,
            dim_offset=top, sample_offset=skip, antithetic=antithetic, layout="nd" if turned else "dn",
        )  # fmt: skip
        assert got is out
        part = memory.view(on_device[antithetic], integer, (d, n), (width, 1), top * width + skip)
        memory.copy(part, memory.view(wanted, integer, (d, n), tuple(strides), first))
        if not memory.same(buffer, wanted):
            found, due = (bits(x).view(integer) for x in (buffer, wanted))
            at = np.flatnonzero(found != due)
            pytest.fail(
                f"{gpu.backend}, {case}: {at.size} elements differ, {found[at[:5]]} at {at[:5]}, expected {due[at[:5]]}"
            )


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_and_no_other_memory_is_written(gpu: Gpu, bits: ToArray, dtype: str, noise: str) -> None:
    for grid in GRIDS:
        rows, columns = grid.reference
        mu, sigma = vectors(rows, dtype)
        plain, antithetic = (
            on_cpu(mu, sigma, columns, dtype, seed=13, noise=noise, antithetic=pairs) for pairs in (False, True)
        )
        assert np.isfinite(plain.astype(np.float64)).all() and np.isfinite(antithetic.astype(np.float64)).all()
        check_all_layouts(gpu, grid, (bits(plain), bits(antithetic)), dtype, noise, fast_math=False, bits=bits)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_fast_math_has_equal_bits_in_every_backend_and_layout(
    all_gpus: list[Gpu], bits: ToArray, dtype: str, noise: str
) -> None:
    first = all_gpus[0]
    for grid in GRIDS:
        rows, columns = grid.reference
        mu, sigma = map(first.memory.put, vectors(rows, dtype))

        def drawn(fast_math: bool, antithetic: bool, given: Any = (mu, sigma, columns)) -> Array:
            options: dict[str, Any] = {"fast_math": fast_math, "antithetic": antithetic}
            return bits(first.sample(*given, seed=13, dtype=dtype, noise=noise, **options))

        references = drawn(True, False), drawn(True, True)
        for antithetic, reference in enumerate(references):
            assert np.isfinite(reference.view(numpy_dtype(dtype)).astype(np.float64)).all()
            assert not np.array_equal(reference, drawn(False, bool(antithetic)))
        # One column of each pair equals the draw without antithetic pairs.
        half = columns // 2
        assert np.array_equal(references[1][:, 0 : 2 * half : 2], references[0][:, :half])
        for gpu in all_gpus:
            check_all_layouts(gpu, grid, references, dtype, noise, fast_math=True, bits=bits)


@pytest.mark.parametrize(
    ("dtype", "d", "n", "noise", "transposed", "antithetic"),
    [
        ("float32", 1, 2**31 + 3, "independent", False, False),
        ("float32", 1, 2**31 + 3, "shared", False, False),
        ("float16", 1, 2**31 + 3, "independent", False, True),
        ("float32", 3, 2**29 + 1, "independent", False, False),
        ("float64", 2**20 + 1, 1025, "independent", False, False),
        ("float16", 2**31 + 5, 1, "independent", False, False),
        ("float32", 2**16 + 1, 2**15 + 1, "independent", True, False),
        # Transposed layouts: few dimensions and many samples, and more dimensions than any GPU has threads.
        ("float16", 3, 2**30 + 1, "independent", True, True),
        ("float16", 2**30 + 1, 3, "independent", True, False),
    ],
)
def test_results_may_exceed_32_bit_sizes(
    gpu: Gpu,
    room: Callable[[Any, int], None],
    bits: ToArray,
    dtype: str,
    d: int,
    n: int,
    noise: str,
    transposed: bool,
    antithetic: bool,
) -> None:
    memory, size, elements = gpu.memory, SIZES[dtype], d * n
    assert elements * size > 2**32
    room(memory, elements * size + 2**31)
    many = d > 2**24
    host = [np.full(8, value, np.float32) for value in (3.0, 0.5)] if many else vectors(d, dtype)
    mu, sigma = (memory.repeated(float(x[0]), "float32", d) if many else memory.put(x) for x in host)
    buffer = memory.poisoned(elements * size)
    out = memory.view(buffer, dtype, (d, n), (1, d) if transposed else (n, 1), 0)
    options: dict[str, Any] = {"seed": 2**40 + 5, "dtype": dtype, "noise": noise, "antithetic": antithetic}
    assert gpu.sample(mu, sigma, n, out=out, **options) is out

    whole = memory.view(buffer, f"int{8 * size}", (elements,), (1,), 0)
    step = 2**28
    for start in range(0, elements, step):
        assert memory.count(whole[start : start + step], -1) == 0, f"unwritten elements from {start} on"
    # Compare near these elements of the memory.
    for at in {0, 2**31, 2**31 // size, 2**32 // size, 2**33 // size, elements // 2, elements - 1}:
        if at >= elements:
            continue
        row, column = divmod(at, d)[::-1] if transposed else divmod(at, n)
        top, bottom = max(row - 3, 0), min(row + 4, d)
        left, right = max(column - 1000, 0), min(column + 1001, n)
        rows = slice(0, bottom - top) if many else slice(top, bottom)
        expected = on_cpu(*(x[rows] for x in host), right - left, **options, dim_offset=top, sample_offset=left)
        got = bits(memory.packed(out[top:bottom, left:right]))
        assert np.array_equal(got, bits(expected)), (at, row, column)


@pytest.mark.parametrize(
    ("d", "n", "row_stride", "column_stride"),
    [(3, 700, 2**31 + 1, 1), (3, 1024, 2**31, 1), (300, 5, 2**24 + 1, 1), (300, 8, 2**24, 1), (5, 300, 1, 2**24 + 1)],
)
def test_elements_may_be_gigabytes_apart(
    gpu: Gpu, room: Callable[[Any, int], None], bits: ToArray, d: int, n: int, row_stride: int, column_stride: int
) -> None:
    memory, length = gpu.memory, GUARD + (d - 1) * row_stride + (n - 1) * column_stride + 1 + GUARD
    room(memory, 2 * length + 2**31)
    mu, sigma = vectors(d)
    buffer = memory.poisoned(2 * length)
    out = memory.view(buffer, "float16", (d, n), (row_stride, column_stride), GUARD)
    gpu.sample(memory.put(mu), memory.put(sigma), n, seed=14, dtype="float16", out=out)
    assert np.array_equal(bits(memory.packed(out)), bits(on_cpu(mu, sigma, n, "float16", seed=14)))
    whole = memory.view(buffer, "int16", (length,), (1,), 0)
    step = 2**28
    unwritten = sum(memory.count(whole[start : start + step], -1) for start in range(0, length, step))
    assert unwritten == length - d * n


def perturbed(gpu: Gpu, to_numpy: ToArray, call: Call, fast_math: bool = False, way: str = "launch") -> Array:
    """The memory after the call, which a backend runs on memory of its library."""
    stored = np.array(stored_words(call.words()), np.uint64)
    memory, words = gpu.memory.put(call.memory()), gpu.memory.put(stored.view(np.int64))
    spans = ctypes.create_string_buffer(call.spans_at(gpu.memory.pointer(memory)))
    launch = call.launch(gpu.memory.pointer(words), matrix=ctypes.addressof(spans), fast_math=fast_math)
    if call.inputs().size:
        inputs = gpu.memory.put(call.inputs().copy())
        launch = call.launch_with_inputs(launch, gpu.memory.pointer(inputs))
    backend: Any = registry.find(gpu.backend)
    backend.prepare("cuda")
    scratch_size = generic.launcher(backend, launch).scratch_size
    scratch = gpu.memory.put(np.zeros(1 if scratch_size is None else scratch_size(0)))
    launch = launch._replace(scratch=gpu.memory.pointer(scratch))
    gpu.memory.synchronize()
    if way == "launch":
        backend.launch(launch)
    else:
        head = head_of(launch._replace(first_row=launch.first_row_at or launch.first_row))
        generic.launcher(backend, launch).run(None, *head)
    gpu.memory.synchronize()
    return to_numpy(memory)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_of_every_layout_are_perturbed(gpu: Gpu, to_numpy: ToArray, dtype: str) -> None:
    for k, call in enumerate(calls_of_every_kind(dtype)):
        way = "launch" if k % 2 or set(call.in_memory) - {"offset"} else "launcher"
        got, expected = (x.view(f"u{SIZES[dtype]}") for x in (perturbed(gpu, to_numpy, call, way=way), call.expected()))
        wrong = np.flatnonzero(got != expected)
        assert len(wrong) == 0, (call, len(wrong), wrong[:9])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_backends_perturb_equally_with_fast_math(all_gpus: list[Gpu], to_numpy: ToArray, dtype: str) -> None:
    kind = numpy_dtype(dtype)
    for call in itertools.islice(calls_of_every_kind(dtype), 36, None):
        first, *others = (perturbed(gpu, to_numpy, call, fast_math=True) for gpu in all_gpus)
        assert all(np.array_equal(first, other) for other in others), call
        got, portable = (x.view(kind).astype(np.float64) for x in (first, call.expected()))
        weights = np.broadcast_to(call.weights, call.rows)
        # A small difference may tip a rounding, which changes the result by one unit in the last place.
        tolerance = 1e-3 * np.abs(weights).sum() + float(ml_dtypes.finfo(kind).eps) * np.abs(portable)
        assert (np.abs(got - portable) <= tolerance).all(), call


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fast_math": True, "noise": "shared"},
        {"dtype": "float16"},
        {"dim_offset": 1},
        {"antithetic": True, "layout": "nd"},
        {"seed": [3, 4]},
    ],
    ids=["float32", "fast and shared noise", "float16", "window", "transposed and antithetic", "seeds on the host"],
)
def test_a_call_is_ordered_on_the_current_stream_without_waiting(
    any_gpu: Gpu, bits: ToArray, options: dict[str, Any]
) -> None:
    memory, d, n = any_gpu.memory, 300, 1031
    options = {"seed": 3, **options}
    mu, sigma = memory.put(np.zeros(d, np.float32)), memory.put(np.ones(d, np.float32))
    expected = bits(any_gpu.sample(memory.put(np.full(d, 5.0, np.float32)), sigma, n, **options))
    memory.synchronize()
    with memory.stream():
        mu, sigma = memory.on_stream(mu), memory.on_stream(sigma)

        def draw(cycles: int) -> Any:
            memory.keep_busy(cycles)
            memory.fill(mu, 5.0)
            return any_gpu.sample(mu, sigma, n, **options)

        # The first call may wait for the device, since it compiles, loads and allocates.
        bits(draw(1))
        memory.fill(mu, 0.0)
        memory.synchronize()

        x = draw(CYCLES)
        done = memory.marker()
        # Numba copies seeds on its default stream.
        assert not done() or (memory.name == "numba" and isinstance(options["seed"], list)), "the call waited"
        got = bits(x)
        memory.finish()  # Without a named stream, Numba does not promise to wait.
        assert done()
    assert np.array_equal(got, expected)
    if "fast_math" not in options:
        assert np.array_equal(got, bits(on_cpu([5.0] * d, [1.0] * d, n, **{"dtype": "float32", **options})))


def test_calls_run_on_the_device_of_the_arrays(any_gpu: Gpu, bits: ToArray) -> None:
    if device_count() < 2:
        pytest.skip("there is only one CUDA device")
    memory, d, n = any_gpu.memory, 7, 1031
    host = vectors(d)
    for here, there in ((0, 1), (1, 0)):
        mu, sigma = (memory.put(x, there) for x in host)
        with memory.device(here):
            every: list[dict[str, Any]] = [
                {}, {"noise": "shared"}, {"dtype": "float16"}, {"sample_offset": 3}, {"dtype": "float64"},
            ]  # fmt: skip
            for options in every:
                x = any_gpu.sample(mu, sigma, n, seed=6, **options)
                assert memory.device_of(x) == there, options
                assert memory.current_device() == here, options
                dtype = options.get("dtype", "float32")
                with memory.device(there):
                    out = memory.view(memory.poisoned(d * n * SIZES[dtype]), dtype, (d, n), (n, 1), 0)
                    memory.synchronize()
                assert any_gpu.sample(mu, sigma, n, seed=6, out=out, **options) is out
                assert memory.current_device() == here, options
                expected = bits(on_cpu(*host, n, **{**options, "dtype": dtype}, seed=6))
                with memory.device(there):
                    assert np.array_equal(bits(x), expected), options
                    assert np.array_equal(bits(out), expected), options
            with pytest.raises(ValueError, match=r"^sigma: expected it on the device of mu"):
                any_gpu.sample(mu, memory.put(host[1], here), n, seed=6)


@pytest.fixture
def cuda_runtime(torch: Any) -> Iterator[Any]:
    """The CUDA runtime of PyTorch and torch_ext; its last error is cleared before and after the test."""
    torch.zeros(1, device="cuda")
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = sorted({line.split(maxsplit=5)[-1] for line in lines if re.search(r"/libcudart[^/]*\.so", line)})
    if len(paths) != 1:
        pytest.skip(f"the process must have one CUDA runtime, but has {paths}")
    runtime = ctypes.CDLL(paths[0])
    torch.cuda.synchronize()
    assert runtime.cudaGetLastError() == 0
    yield runtime
    runtime.cudaGetLastError()


INVALID_DEVICE = 101  # cudaErrorInvalidDevice


def test_launches_do_not_report_errors_of_other_libraries(torch: Any, cuda_runtime: Any, bits: ToArray) -> None:
    d, n = 300, 1031
    mu, sigma = torch.zeros(d, device="cuda"), torch.ones(d, device="cuda")
    outs = [torch.empty((d, n), device="cuda") for _ in range(2)]

    def draw_all() -> tuple[Any, Any]:
        multisample.sample(mu, sigma, n, seed=3, backend="torch_ext", out=outs[0])
        torch.ops.multisample.sample_(outs[1], mu, sigma, seed=3)
        gradients: tuple[Any, Any] = torch.ops.multisample.sample_backward(outs[1], seed=3)
        return gradients

    # PyTorch caches the memory of the gradients, so it does not allocate below.
    expected = [gradient.clone() for gradient in draw_all()]
    torch.cuda.synchronize()
    for out in outs:
        out.zero_()
    torch.cuda.synchronize()
    # An error of another library is still the last error of the runtime.
    assert cuda_runtime.cudaSetDevice(999) == INVALID_DEVICE
    gradients = draw_all()
    assert cuda_runtime.cudaGetLastError() == INVALID_DEVICE, "the launch cleared another library's error"
    torch.cuda.synchronize()
    for out in outs:
        assert np.array_equal(bits(out), bits(on_cpu([0.0] * d, [1.0] * d, n, seed=3)))
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))


def test_failed_launches_clear_the_last_error(torch: Any, cuda_runtime: Any) -> None:
    backend: Any = registry.find("torch_ext")
    out = torch.empty((3, 5), device="cuda")
    draw = a_launch(matrix=out.data_ptr(), device=999)
    with pytest.raises(RuntimeError, match=r"^backend: 'torch_ext' could not launch: invalid device ordinal"):
        backend.launch(draw)
    assert cuda_runtime.cudaGetLastError() == 0
    backend.launch(draw._replace(device=0))
    torch.cuda.synchronize()


def test_concurrent_calls_have_the_right_bits(gpu: Gpu, bits: ToArray) -> None:
    memory, threads = gpu.memory, 8
    host = vectors(300)
    mu, sigma = map(memory.put, host)
    cases: list[tuple[int, int, dict[str, Any]]] = [
        (d, n, options)
        for (d, n), options in itertools.product(
            [(3, 5), (300, 7), (5, 1027), (2, 4099)],
            [{}, {"noise": "shared"}, {"dtype": "float16"}, {"dtype": "float64", "sample_offset": 3}],
        )
    ]
    inputs = [(mu[:d], sigma[:d]) for d, _, _ in cases]
    together = threading.Barrier(threads)

    def draw(thread: int) -> list[Any]:
        # Each thread begins with another call. All results are kept, so that no memory is freed meanwhile.
        order = [(thread * 5 + k) % len(cases) for k in range(len(cases))]
        drawn = {}
        together.wait(SECONDS)
        for k in order:
            _, n, options = cases[k]
            drawn[k] = gpu.sample(*inputs[k], n, seed=100 * thread + k, **options)
        memory.synchronize()
        return [drawn[k] for k in range(len(cases))]

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        results = list(pool.map(draw, range(threads)))
    for thread, drawn in enumerate(results):
        for k, (x, (d, n, options)) in enumerate(zip(drawn, cases, strict=True)):
            expected = on_cpu(*(v[:d] for v in host), n, **{"dtype": "float32", **options}, seed=100 * thread + k)
            assert np.array_equal(bits(x), bits(expected)), (thread, d, n, options)


def test_torch_tensors_use_the_generator_of_their_device(any_gpu: Gpu, bits: ToArray) -> None:
    if any_gpu.memory.name != "torch":
        pytest.skip("for tensors only")
    torch, (mu, sigma) = any_gpu.memory.torch, vectors(5)
    device = [any_gpu.memory.put(x) for x in (mu, sigma)]
    torch.manual_seed(123)
    default, own = torch.cuda.default_generators[0], torch.Generator(device="cuda")
    own.manual_seed(77)
    start = default.get_offset()
    for generator, seed, first in ((default, 123, start), (own, 77, 0)):
        source = {} if generator is default else {"generator": generator}
        for call in range(3):
            got = any_gpu.sample(*device, 33, **source)
            assert generator.get_offset() == first + 4 * (call + 1)
            key = multisample.Key(seed, first + 4 * call)
            assert np.array_equal(bits(got), bits(on_cpu(mu, sigma, 33, seed=key)))
    assert default.get_offset() == start + 12
    got = any_gpu.sample(*device, 33, generator=torch.Generator().manual_seed(5))
    key = multisample.torch.take_key(torch.Generator().manual_seed(5))
    assert np.array_equal(bits(got), bits(on_cpu(mu, sigma, 33, seed=key)))


@pytest.mark.parametrize("extra", [{}, {"dtype": "float32"}], ids=["default dtype", "explicit dtype"])
def test_refused_calls_change_nothing(any_gpu: Gpu, bits: ToArray, extra: dict[str, Any]) -> None:
    memory, d, n = any_gpu.memory, 5, 700
    mu, sigma = map(memory.put, vectors(d))
    buffer = memory.poisoned(4 * 4096)
    out = memory.view(buffer, "float32", (d, n), (n, 1), GUARD)
    generator = multisample.Generator(1)

    def inside(first: int) -> Any:
        return memory.view(buffer, "float32", (d,), (1,), first)

    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "sigma: expected as many elements as mu, 5, got 4", {"sigma": sigma[:4]}),
        (ValueError, "out: expected shape", {"n": n - 1}),
        (ValueError, "out: expected dtype", {"out": memory.view(buffer, "float64", (d, 350), (350, 1), 0), "n": 350}),
        (ValueError, "out: .* they overlap", {"out": memory.view(buffer, "float32", (d, n), (1, 1), GUARD)}),
        (ValueError, "out: .* mu also uses", {"mu": inside(GUARD)}),
        (ValueError, "out: .* sigma also uses", {"sigma": inside(GUARD + d * n - 1)}),
        (TypeError, "seed, generator: ", {"seed": 1}),
        (TypeError, "mu, sigma, out: expected arrays of one library", {"sigma": np.ones(d, np.float32)}),
    ]
    if memory.name == "torch":
        cases += [
            (ValueError, "sigma: expected it on the device of mu", {"sigma": sigma.cpu()}),
            (ValueError, "mu: requires grad", {"mu": mu.clone().requires_grad_()}),
            (ValueError, "out: requires grad", {"out": out.detach().requires_grad_()}),
        ]
    for error, message, wrong in cases:
        arguments = {"mu": mu, "sigma": sigma, "n": n, "out": out, "generator": generator, **extra, **wrong}
        with pytest.raises(error, match=f"^{message}"):
            any_gpu.sample(**arguments)
    assert generator.offset == 0
    assert memory.same(buffer, memory.poisoned(4 * 4096))
    # `out` may be adjacent to its inputs.
    memory.fill(inside(GUARD - d), 2.0)
    memory.fill(inside(GUARD + d * n), 0.0)
    any_gpu.sample(inside(GUARD - d), inside(GUARD + d * n), n, out=out, seed=1, **extra)
    assert (bits(out).view(np.float32) == 2.0).all()


@pytest.mark.parametrize("dtype", [None, *DTYPES])
def test_values_in_device_memory_are_checked_only_with_validate(any_gpu: Gpu, bits: ToArray, dtype: str | None) -> None:
    d, n = 9, 700
    for name, row, value in (("mu", 2, np.nan), ("mu", 0, -np.inf), ("sigma", 8, np.nan), ("sigma", 3, np.inf)):
        clean = [np.linspace(-3, 3, d).astype(np.float32), np.linspace(0.5, 2, d).astype(np.float32)]
        vector = {"mu": clean[0].copy(), "sigma": clean[1].copy()}
        vector[name][row] = value
        device = [any_gpu.memory.put(x) for x in vector.values()]
        options = {} if dtype is None else {"dtype": dtype}
        got = bits(any_gpu.sample(*device, n, seed=8, **options))
        expected = bits(on_cpu(*clean, n, dtype or "float32", seed=8))
        valid_rows = np.arange(d) != row
        assert np.array_equal(got[valid_rows], expected[valid_rows]), (name, value)
        drawn = got[row].view(numpy_dtype(dtype or "float32")).astype(np.float64)
        assert (np.isnan(drawn) if np.isnan(value) else ~np.isfinite(drawn)).all(), (name, value)
        with pytest.raises(ValueError, match=rf"^{name}: expected finite .*got {name}\[{row}\]"):
            any_gpu.sample(*device, n, seed=8, validate=True, **options)
    sigma = any_gpu.memory.put(np.array([1, -1, 1], np.float32))
    mu = any_gpu.memory.put(np.zeros(3, np.float32))
    with pytest.raises(ValueError, match=r"^sigma: expected .* of at least 0, got sigma\[1\]"):
        any_gpu.sample(mu, sigma, n, seed=8, validate=True)


SANITIZED = """
import itertools
import sys

import numpy as np
from cuda_memory import OWN, memory_of, numpy_dtype

import multisample

backend = sys.argv[1]
memory = memory_of(next(library for library, own in OWN if own == backend))
if backend == "cupy":
    memory.cupy.cuda.set_allocator(None)

calls = 0
for (d, n), sample_offset in itertools.product(
    [(1, 1), (3, 5), (300, 7), (700, 1), (33, 129), (5, 1024), (3, 1027), (2, 513), (1, 5001), (600, 516)], (0, 3)
):
    mu, sigma = (memory.put(np.linspace(low, high, d).astype(np.float32)) for low, high in ((-3, 3), (0.5, 2)))
    for dtype, noise, fast_math in [
        ("float32", "independent", False), ("float32", "shared", False), ("float32", "independent", True),
        ("float16", "independent", False), ("float64", "independent", False),
    ]:
        # The number of kinds is odd, so that each occurs with and without antithetic pairs.
        antithetic = calls // 2 % 2 == 1
        options = {"seed": 1, "dtype": dtype, "noise": noise, "fast_math": fast_math, "sample_offset": sample_offset}
        multisample.sample(mu, sigma, n, backend=backend, antithetic=antithetic, **options)
        turned = memory.view(memory.poisoned(d * n * numpy_dtype(dtype).itemsize), dtype, (d, n), (1, d), 0)
        multisample.sample(mu, sigma, n, backend=backend, antithetic=not antithetic, out=turned, **options)
        calls += 2
    multisample.sample(mu, sigma, n, backend=backend, seed=1)
memory.synchronize()
print(f"{calls} calls done")
"""


@pytest.mark.parametrize(
    ("tool", "backend_name"),
    [
        ("memcheck", "torch_ext"),
        ("memcheck", "cupy"),
        ("racecheck", "cupy"),
        ("memcheck", "numba"),
        ("racecheck", "numba"),
    ],
)
def test_compute_sanitizer_finds_no_errors(tool: str, backend_name: str) -> None:
    require(backend_name)
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    # Build outside the sanitizer. Without memory pools every array is an allocation, whose bounds the sanitizer checks.
    registry.find(backend_name).prepare("cuda")
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    # Libraries make driver calls that fail, and handle the errors.
    options = ["--report-api-errors", "no"] if tool == "memcheck" else []
    done = subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "9", *options, sys.executable, "-c", SANITIZED, backend_name],
        env=environment, capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    output = done.stdout + done.stderr
    if "Device not supported" in output:
        pytest.skip(f"compute-sanitizer cannot watch this device: {output.strip().splitlines()[0]}")
    assert done.returncode == 0, output[-6000:]
    assert "calls done" in done.stdout, output[-6000:]
