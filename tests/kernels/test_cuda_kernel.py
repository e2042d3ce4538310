"""The Python kernel without a GPU: whole grids run in the emulation and equal the cpu backend bit for bit.

The emulation checks every memory access: see emulated_gpu.py.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import ctypes
import dataclasses
import functools
import importlib.resources
import importlib.util
import itertools
import random
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import emulated_gpu as gpu
import numpy as np
import pytest
from kernel_cases import POISON, TABLES, Case, Cut, Values, ceil_div, input_vectors, large_calls, tall, words_in_memory
from launches import WORDS, a_launch, head_of, stored_word, with_words_in_memory
from tables import DTYPES, INPUTS, NOISES, STORE_KINDS

from multisample import Key, sample
from multisample.backends.driver import CONFIGURATION_SIZE
from multisample.backends.kernels.cuda import few_columns as cuda_few_columns
from multisample.backends.kernels.cuda import group as cuda_group
from multisample.backends.kernels.cuda import kernel as cuda_kernel
from multisample.backends.kernels.cuda import plain as cuda_plain
from multisample.backends.kernels.cuda import rows as cuda_rows
from multisample.backends.kernels.cuda import stores as cuda_stores
from multisample.backends.kernels.cuda import transposed as cuda_transposed
from multisample.backends.kernels.cuda.geometry import _STRUCT
from multisample.backends.kernels.cuda.kernel import advance_kernel
from multisample.backends.kernels.cuda.kernel_choice import own_rows_of
from multisample.backends.kernels.cuda.keys import KernelKey
from multisample.backends.launch import SIZES, Launch, WordFormat, pack
from multisample.backends.numba import NumbaBackend
from multisample.backends.system import cuda_driver

pytestmark = gpu.requires_emulator
requires_numba_cuda = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda is not installed"
)

Array = np.ndarray[Any, Any]


class Template(NamedTuple):
    """The compile-time parameters of a kernel."""

    dtype: str
    noise: str
    store_kind: str
    antithetic: bool = False
    fast_math: bool = False
    origin_in_memory: bool = False
    batched: bool = False


# Compiling a kernel takes seconds, so each store kind is tested with float32, float64 and one 16-bit type.
TEMPLATES = [
    Template(dtype, NOISES[(kind + number) % 2], STORE_KINDS[kind], antithetic=(kind // 2 + number) % 2 == 0)
    for kind in range(len(STORE_KINDS))
    for number, dtype in enumerate(("float64", "float32", ("float16", "bfloat16")[kind % 2]))
]
SOME = Template("float32", "independent", "aligned")
# Kernels that read the seed, the first row or the first column from memory. In a batch, each matrix also has its own
# address.
BATCHED = ("aligned", "shifted", "strided", "transposed", "few_columns", "small_matrices")
ORIGIN = [
    SOME._replace(origin_in_memory=True),
    Template("float32", "shared", "transposed_staged", origin_in_memory=True),
    Template("float64", "independent", "staged", origin_in_memory=True),
    Template("float16", "independent", "strided", antithetic=True, origin_in_memory=True),
    *(SOME._replace(store_kind=store_kind, origin_in_memory=True, batched=True) for store_kind in BATCHED),
]


def named(template: Template) -> str:
    flags = [name for name in ("antithetic", "fast_math", "origin_in_memory", "batched") if getattr(template, name)]
    return "-".join([*template[:3], *flags])


def each(templates: Sequence[Template], quick: Sequence[Template] = ()) -> Any:
    return pytest.mark.parametrize(
        "template", [pytest.param(x, id=named(x), marks=[] if x in quick else pytest.mark.slow) for x in templates]
    )


@functools.cache
def compiled(template: Template) -> Any:
    dtype, noise, store_kind, antithetic, fast_math, *memory = template
    # Loops that are unrolled eight times compile slowly, so 16-bit kernels are unrolled twice.
    unroll = {} if SIZES[dtype] > 2 else {store_kind: min(turns, 2) for store_kind, turns in cuda_rows._UNROLL.items()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(cuda_rows._UNROLL, unroll))
        for module in (cuda_few_columns, cuda_group, cuda_plain, cuda_rows, cuda_stores, cuda_transposed):
            stack.enter_context(mock.patch.object(module, "inline", gpu.once))
        kernel = cuda_kernel.sample_kernel(
            gpu, dtype, noise == "shared", antithetic, fast_math, STORE_KINDS.index(store_kind), *memory
        )
        return gpu.compile_kernel(kernel)


def template_of(case: Case) -> Template:
    """The template of the kernel that draws the case."""
    return Template(case.dtype, case.noise, case.store_kind, case.antithetic, case.fast_math, case.has_origin_in_memory)


def memory_of(case: Case) -> tuple[Array, Array]:
    """Poisoned memory, and the output in it."""
    size = case.placed()[1]
    allocated = np.full(size + 256, POISON, np.uint8)
    memory = allocated[-allocated.ctypes.data % 256 :][:size]
    return memory, case.output(memory)


def expected_memory(case: Case) -> Array:
    memory, out = memory_of(case)
    out[...] = case.expected()
    return memory


def call(case: Case, mu: Values, sigma: Values, out: Array) -> tuple[Launch, Array]:
    """The launch, and the array from which the kernel reads seed, offset and window."""
    draw = a_launch(
        case.d, case.n, case.dtype, mu=mu, sigma=sigma, matrix=out, shared_noise=case.noise == "shared",
        antithetic=case.antithetic, fast_math=case.fast_math, device=0, batch=int(case.small), **case.words(),
    )  # fmt: skip
    return with_words_in_memory(draw, *case.in_memory)


def drawn(case: Case, template: Template | None = None) -> tuple[Array, Array]:
    """The memory and the output in it, drawn by the kernel."""
    memory, out = memory_of(case)
    cut, (mu, sigma) = case.chosen_cut(), case.vectors()
    draw, words = call(case, mu, sigma, out)
    packed, inputs = pack(draw) + _STRUCT.pack(*cut), (mu, sigma, *([words] if case.in_memory else []))
    kernel = compiled(template or template_of(case))
    gpu.launch(kernel, cut.blocks, cut.threads, packed, out, inputs, backwards=case.backwards)
    return memory, out


def check(case: Case, template: Template | None = None) -> None:
    """Check that the kernel writes every element and no other memory; the launch checks for double writes."""
    cut = case.chosen_cut()
    try:
        memory, out = drawn(case, template)
    except gpu.BrokenKernelError as error:
        pytest.fail(f"{error}\n{case}\n{cut}", pytrace=False)
    right = expected_memory(case)
    wrong = np.argwhere(out != case.output(right))
    assert len(wrong) == 0, (case, cut, f"{len(wrong)} wrong", wrong[:5].tolist(), wrong[-1].tolist())
    assert np.array_equal(memory, right), (case, cut, "outside of the output")


def check_some(template: Template, cases: Iterable[Case], number: int) -> None:
    """Check `number` of the cases that this kernel draws; the choice is fixed."""
    there_are = [case for case in cases if template_of(case) == template._replace(batched=False)]
    assert len(there_are) >= min(number, 8), f"only {len(there_are)} cases"
    for case in random.Random(1).sample(there_are, min(number, len(there_are))):
        check(case, template)


# Means of another type than the computing type: a call of any size with them has no plain kernel.
OTHER_TYPE = np.linspace(-3, 3, 2**16).astype(np.float16)

SHAPES = ("every shape", "dimensions side by side", "every address", "threads beyond the last column", "any strides")


@each([SOME, *TEMPLATES], [SOME])
def test_kernel_equals_the_cpu_backend(monkeypatch: pytest.MonkeyPatch, template: Template) -> None:
    """One test has all checks of a kernel, because each process that runs a check compiles the kernel."""

    def some_of(names: Iterable[str], number: int) -> None:
        cases = (TABLES[name][0](template.dtype, template.noise) for name in names)
        check_some(template, itertools.chain(*cases), number)

    if template.store_kind == "few_columns":
        some_of(["few columns"], 100)
    elif template.store_kind.startswith("plain"):
        some_of(["plain"], 150)
    elif template.store_kind == "small_matrices":
        return some_of(["small matrices"], 100)
    else:
        some_of(SHAPES, 70)
        # Several chunks of dimensions, several runs of columns, and interleaved bands.
        some_of(["calls cut differently"], 70)
        some_of(["windows far out", "offsets in memory", *(["windows of pairs"] if template.antithetic else [])], 30)
    if template.store_kind.startswith("transposed"):
        check_transposed_passes(template)
    if template.dtype == "float32":
        check_launch(monkeypatch, template)


@each(ORIGIN, ORIGIN[:1])
def test_kernel_reads_seed_and_window_from_memory(monkeypatch: pytest.MonkeyPatch, template: Template) -> None:
    """Each combination of words in memory, and windows that begin at each position in a group."""
    check_some(template, words_in_memory(template.dtype, template.noise), 40)
    if template.batched:
        check_batches(monkeypatch, template)
    elif template.dtype == "float32":
        check_launch(monkeypatch, template)


def check_transposed_passes(template: Template) -> None:
    """Check blocks of several passes and chunks, partial first and last passes, several tiles, and padding."""
    size, own_rows = SIZES[template.dtype], own_rows_of(SIZES[template.dtype])
    counts: collections.Counter[str] = collections.Counter()
    for k, (d, (passes, per_chunk)) in enumerate(
        itertools.product(
            (1, 3, 4, 7, 8, 16, 20, 32, 63, 64, 128, 256, 280, 304, 560, 577, 1136, 1152, 1160, 2320),
            ((1, 1), (3, 9), (5, 2), (7, 1)),
        )
    ):
        n = (97, 30, 13)[(d > 60) + (d > 300)] + k % 8
        aligned = ceil_div(d * size, 16) * 16 // size
        for stride, misalignment in ((d, 0), (aligned, 0), (aligned, 1), (d + k % 5, k % 4), (-aligned - 16, 0)):
            case = Case(
                d, n, template.dtype, template.noise, template.antithetic, seed=k, sample_offset=3 * k % 8,
                dim_offset=k, strides=(1, stride), misalignment=misalignment, cut=tall(passes, per_chunk),
                backwards=k % 2 == 0,
            )  # fmt: skip
            cut = case.chosen_cut()
            if template_of(case) != template:
                continue  # One dimension is not transposed.
            # Also passes that are shorter than in the geometry for a GPU.
            check(case)
            if d < 300 and passes > 1:
                check(dataclasses.replace(case, cut=wide_passes(passes, per_chunk)))
            counts["chunks"] += cut.band_groups > cut.chunk
            counts["cut"] += cut.skip > 0
            if template.store_kind == "transposed":
                counts[f"{cut.column_step % own_rows} further behind"] += 1
                counts["tiles"] += cut.blocks_per_band > 1
                assert cut.overlap == (cut.column_step % own_rows > 0)
                assert cut.pieces >= ceil_div(d, own_rows)
                counts["begins before"] += cut.pieces * own_rows >= d + own_rows and not cut.overlap
    kinds = {"chunks", "cut"}
    if template.store_kind == "transposed":
        kinds |= {"tiles", "begins before", *(f"{delta} further behind" for delta in range(own_rows))}
    assert min(counts.values()) >= 10 and counts.keys() == kinds, counts


def wide_passes(passes: int, per_chunk: int) -> Cut:
    """A cut with the largest number of groups per pass."""
    return lambda g: {
        "rows_per_pass": 10**6, "band_rows": passes * 10**6, "chunk": per_chunk * 10**6,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISES)
def test_kernel_draws_many_dimensions_or_long_rows(noise: str) -> None:
    # Transposed, many columns of few dimensions.
    columns = 4 * 256 * 1025 - 3
    wide = [Case(d, columns, noise=noise, seed=4, sample_offset=1, strides=(1, d)) for d in (2, 8)]
    assert [case.store_kind for case in wide] == ["transposed_staged", "transposed"]
    # With shared noise, a block with many tiles has few groups only.
    assert noise == "shared" or all(case.chosen_cut().band_groups > case.chosen_cut().chunk for case in wide)
    for case in [*large_calls("float32", noise, (False, False)), *wide]:
        check(case, template_of(case)._replace(fast_math=False))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_mu_and_sigma_may_have_any_type_and_stride_or_be_numbers(dtype: str) -> None:
    """Of each computing type; a float16 or bfloat16 matrix is computed as float32."""
    n = {"float32": 30, "float64": 600}[dtype]
    for k, (mu, sigma) in enumerate(vectors for kind in INPUTS for vectors in input_vectors(kind, 37)[:-1]):
        check(Case(37, n, dtype, seed=k, mu=mu, sigma=sigma, cut=tall(2, 1)))
    # float32 also rounds to subnormals and past its largest number.
    for number in (0.1, 1e-42, 1e-50, -3.4028235677973362e38, 16777217.0):
        check(Case(37, 8, dtype, mu=number, sigma=np.full(37, 1e-300)))
        check(Case(37, 8, dtype, mu=np.full(37, number), sigma=abs(number) / 1e3))


FAST = [
    Template("float32", "independent", "aligned", fast_math=True),
    Template("float32", "shared", "staged", fast_math=True),
    Template("float32", "independent", "transposed", antithetic=True, fast_math=True),
    Template("float32", "independent", "few_columns", fast_math=True),
]


@pytest.mark.slow
@each(FAST, FAST[:1])
def test_fast_math_is_close_to_the_portable_numbers(template: Template) -> None:
    # The emulation computes the approximate functions exactly, unlike a GPU. All other arithmetic is the same.
    n = {"aligned": 1028, "staged": 37, "transposed": 300, "few_columns": 7}[template.store_kind]
    case = Case(
        50, n, template.dtype, template.noise, template.antithetic, True, seed=2**63 + 1, sample_offset=2**32,
        strides=(1, 52) if template.store_kind == "transposed" else None,
        few_columns=template.store_kind == "few_columns",
    )  # fmt: skip
    assert template_of(case) == template
    got = drawn(case)[1].view(DTYPES[template.dtype]).astype(np.float64)
    portable, sigma = (
        case.expected().view(DTYPES[template.dtype]).astype(np.float64),
        np.asarray(case.vectors()[1])[:, None],
    )
    rounding = np.spacing(np.abs(portable).astype(DTYPES[template.dtype])).astype(np.float64)
    assert (np.abs(got - portable) <= 1e-3 * sigma + rounding).all()
    assert (got != portable).any()


@pytest.mark.slow
def test_fast_math_does_not_change_float64() -> None:
    check(Case(20, 37, "float64", fast_math=True))


# --- Launches -------------------------------------------------------------------------------------


class Driver:
    """A fake driver that runs launches in the emulation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, out: Array, inputs: tuple[Values, ...]) -> None:
        self.memory = out, inputs
        self.launched: list[tuple[Any, int, int, int, bytes]] = []
        monkeypatch.setattr(cuda_driver, "launch_function", lambda: self.launch)
        monkeypatch.setattr(cuda_driver, "device_function", lambda: lambda ordinal: 0)

    def launch(self, memory: Any, kernel: Any, addresses: None, extra: Any) -> int:
        configuration = ctypes.string_at(memory, CONFIGURATION_SIZE)
        blocks, blocks_y, blocks_z, threads, threads_y, threads_z, shared_memory = struct.unpack_from(
            "7I", configuration
        )
        stream, attributes, attribute_count = struct.unpack_from("QQI", configuration, 32)
        assert (blocks_z, threads_y, threads_z, shared_memory) == (1, 1, 1, 0)
        assert (attributes, attribute_count, addresses) == (0, 0, None)
        pointer, address, size, at_size, end = extra
        assert (pointer, size, end) == (1, 2, None)  # The constants of cuda.h
        packed = ctypes.string_at(address, ctypes.c_size_t.from_address(at_size).value)
        self.launched.append((kernel, blocks, threads, stream, packed))
        kernel = compiled(kernel) if isinstance(kernel, Template) else kernel
        gpu.launch(kernel, blocks, max(threads, 32), packed, *self.memory, batch=blocks_y)
        return 0


def numba_backend(template: Template) -> NumbaBackend:
    """A backend with this template as its only compiled kernel."""
    backend = NumbaBackend()
    dtype, noise, store_kind, antithetic, fast_math, *memory = template
    key = KernelKey(dtype, noise == "shared", antithetic, fast_math, STORE_KINDS.index(store_kind), *memory, 0)
    backend._handles = {key: template}  # type: ignore[dict-item]
    return backend


def check_launch(monkeypatch: pytest.MonkeyPatch, template: Template) -> None:
    """Check the grid and the parameters that the backend passes to the driver."""
    d, n = {
        "aligned": (40, 1024), "shifted": (7, 1157), "staged": (300, 10), "strided": (30, 30),
        "transposed": (32, 30), "transposed_staged": (30, 30) if SIZES[template.dtype] < 8 else (33, 30),
        "few_columns": (2**16, 3), "plain": (40, 29), "plain_transposed": (33, 30),
    }[template.store_kind]  # fmt: skip
    strides = {
        "strided": (60, 2), "transposed": (1, 32), "transposed_staged": (1, d), "plain_transposed": (1, 33),
    }.get(template.store_kind)  # fmt: skip
    is_plain = template.store_kind.startswith("plain")
    words = ("offset",)
    if template.origin_in_memory:
        words = WORDS[:3] if template.store_kind in ("aligned", "staged", "few_columns") else WORDS
    case = Case(
        d, n, template.dtype, template.noise, template.antithetic, seed=2**64 - 1, offset=5, in_memory=words,
        strides=strides, mu=None if is_plain else OTHER_TYPE[:d], plain=is_plain,
    )  # fmt: skip
    assert template_of(case) == template
    # Launchers take the seed and the window by value.
    for with_launcher in (False,) if template.origin_in_memory else (False, True):
        memory, out = memory_of(case)
        mu, sigma = case.vectors()
        draw, in_memory = call(case, mu, sigma, out)
        draw = draw._replace(stream=2**63 + 7)
        driver, backend = Driver(monkeypatch, out, (mu, sigma, in_memory)), numba_backend(template)
        if with_launcher:
            launcher = backend.launcher(draw._replace(matrix=0, seed=0, offset=0, stream=0))
            launcher.run(launcher.geometry(draw.matrix, 0), *head_of(draw))
        else:
            backend.launch(draw)
        ((kernel, blocks, threads, stream, packed),) = driver.launched
        cut = case.chosen_cut()
        assert (kernel, blocks, threads, stream) == (template, cut.blocks, cut.threads, draw.stream)
        assert packed == pack(draw) + _STRUCT.pack(*cut)
        assert np.array_equal(memory, expected_memory(case))


def check_batches(monkeypatch: pytest.MonkeyPatch, template: Template) -> None:
    """Check that one launch draws several matrices, each with its vectors and its words."""
    # A row of 1029 columns is aligned in the first matrix only.
    shapes = {"aligned": [(40, 1024, True)], "shifted": [(8, 1157, False)], "transposed": [(32, 30, True)],
              "strided": [(41, 29, False), (1, 1029, True)],
              "few_columns": [(2**16 + 8, 3, True)],
              "small_matrices": [(1, 4, True), (12, 32, True), (10, 10, False)]}[template.store_kind]  # fmt: skip
    for d, n, known_phase in shapes:
        check_batch(monkeypatch, template, d, n, known_phase)


def check_batch(monkeypatch: pytest.MonkeyPatch, template: Template, d: int, n: int, known_phase: bool) -> None:
    batch = 300 if template.store_kind == "small_matrices" else 3
    is_transposed = template.store_kind == "transposed"
    mu, sigma = (np.linspace(low, 2, batch * d).astype(np.float32) for low in (-3, 0.5))
    words = np.array([[2**64 - 2 - b, 5 + b, 7 * b, 2**33 + 8 * b] for b in range(batch)], np.uint64)
    stored = np.append([np.uint64(stored_word("seed", int(seed))) for seed in words[:, 0]], words[:, 1:])
    out = np.full((batch, n, d) if is_transposed else (batch, d, n), -1, np.int32)
    seeds_at, at = stored.ctypes.data, stored[batch:].ctypes.data
    draw = a_launch(
        d, n, mu=mu, sigma=sigma, matrix=out.ctypes.data, strides=(4, 4 * d) if is_transposed else None, device=0,
        seed_at=seeds_at, offset_at=at, first_row_at=at + 8, first_column_at=at + 16,
        batch=batch, mu_step=4 * d, sigma_step=4 * d, matrix_step=4 * d * n, seed_step=8, offset_step=24,
        origin_step=24, origin_in_memory=1, word_formats=WordFormat.high_first, column_phase=int(known_phase),
    )  # fmt: skip
    driver = Driver(monkeypatch, out.reshape(-1), (mu, sigma, stored))
    numba_backend(template).launch(draw)
    assert len(driver.launched) == 1
    for b in range(batch):
        seed, offset, row, column = map(int, words[b])
        expected = sample(
            mu[b * d : (b + 1) * d], sigma[b * d : (b + 1) * d], n, seed=Key(seed, offset), dim_offset=row,
            sample_offset=column, layout="nd" if is_transposed else "dn",
        )  # fmt: skip
        assert np.array_equal(out[b], expected.view(np.int32)), (template, b)


@pytest.mark.slow
def test_a_launcher_chooses_the_kernel_by_alignment_and_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Aligned, shifted and staged rows of one template."""
    for d, n, mu in [(3, 1024, OTHER_TYPE[:3]), (9, 10, OTHER_TYPE[:9])]:
        for misalignment, first in itertools.product((0, 1, 4), (0, 1, 4, 2**33 + 6)):
            case = Case(d, n, mu=mu, seed=9, offset=2**40, dim_offset=5, sample_offset=first, misalignment=misalignment)
            memory, out = memory_of(case)
            means, deviations = case.vectors()
            draw, _ = call(case, means, deviations, out)
            driver, backend = Driver(monkeypatch, out, (means, deviations)), numba_backend(template_of(case))
            launcher = backend.launcher(draw._replace(matrix=0, seed=0, first_column=0))
            launcher.run(launcher.geometry(draw.matrix, first), *head_of(draw))
            assert [launched[-1] for launched in driver.launched] == [pack(draw) + _STRUCT.pack(*case.chosen_cut())]
            assert np.array_equal(memory, expected_memory(case))


@requires_numba_cuda
@pytest.mark.parametrize("count", [0, 2**32 - 1, 2**64 - 1])
def test_advance_adds_one_to_the_offset(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    count_up = gpu.once(advance_kernel(gpu))

    def kernel(call, geometry):
        # The kernel of `advance` has one thread and one parameter, at the position of a draw's first field.
        if gpu.thread_index() == 0:
            count_up(call.weights)

    counter = np.array([[count]], np.uint64)
    driver, backend = Driver(monkeypatch, counter, (counter,)), NumbaBackend()
    backend._handles = {("advance", 0): gpu.compile_kernel(kernel)}
    backend.advancer(0)(counter.ctypes.data, 7)
    ((_, blocks, threads, stream, packed),) = driver.launched
    assert (blocks, threads, stream, len(packed)) == (1, 1, 7, 8)
    assert counter[0, 0] == (count + 1) % 2**64


# --- The emulation --------------------------------------------------------------------------------


def test_the_emulated_gpu_has_the_names_of_a_real_one() -> None:
    # Parse the source instead of importing it, since numba-cuda may be missing.
    source = importlib.resources.files("multisample.backends.kernels.cuda").joinpath("intrinsics.py").read_text()
    (names,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"
    )
    assert set(names) <= set(vars(gpu))


def outcome(function: Callable[..., None], threads: int = 64, backwards: bool = False) -> tuple[str, Array]:
    """Run two blocks of a kernel that may write 72 of 80 float32; returns the error and the memory."""
    case = Case(1, 80)
    _, out = memory_of(case)
    call = pack(a_launch(1, 80, matrix=out))
    kernel, message = gpu.compile_kernel(function), ""
    try:
        gpu.launch(
            kernel, 2, threads, call + _STRUCT.pack(*case.chosen_cut()), out[:, :72], (0.0, 1.0), backwards=backwards
        )
    except gpu.BrokenKernelError as error:
        message = str(error)
    return message, out.view(np.float32)[0]


# Wrong kernels. The docstring is the error that the emulation must find.

_ONE = np.float32(1)


def writes_outside(call, geometry):
    """block 1, thread 63: accesses memory outside of the output, 288 bytes from its begin."""
    if gpu.block_index() == 1:
        gpu.store(call.matrix + 4 * (np.int64(gpu.thread_index()) + 9), _ONE)


def writes_before(call, geometry):
    """block 0, thread 0: accesses memory outside of the output, -4 bytes from its begin."""
    gpu.store(call.matrix - 4, _ONE)


def writes_four_at_any_address(call, geometry):
    """block 0, thread 1: makes a misaligned access to the output, 20 bytes from its begin."""
    if gpu.block_index() == 0 and gpu.thread_index() < 8:
        gpu.store_vector(call.matrix + 20 * np.int64(gpu.thread_index()), (_ONE, _ONE, _ONE, _ONE))


def writes_in_each_block(call, geometry):
    """block 1, thread 0: writes an element twice in the output, 0 bytes from its begin."""
    gpu.store(call.matrix + 4 * np.int64(gpu.thread_index()), _ONE)


def reads_no_vector(call, geometry):  # The number 1.0, as an address.
    """block 0, thread 0: accesses memory outside of the inputs, 4607182418800017408 bytes from its begin."""
    gpu.store(call.matrix, gpu.load(call.sigma, np.float32))


def never_ends(call, geometry):
    """block 0, thread 0: never ends, in shared memory, 0 bytes from its begin."""
    at = gpu.shared_memory(16)
    gpu.store_shared(at, _ONE)
    while gpu.load_shared(at, np.float32) == _ONE:
        pass


def allocates_too_much_shared_memory(call, geometry):
    """block 0, thread 0: allocates too much shared memory, 80 bytes from its begin."""
    gpu.shared_memory(16)
    gpu.shared_memory(48 << 10)


def reads_behind_its_shared_memory(call, geometry):
    """block 0, thread 0: accesses memory outside of shared memory, 16 bytes from its begin."""
    at = gpu.shared_memory(16)
    gpu.shared_memory(16)
    gpu.load_shared_quad(at + 16)


def reads_uninitialized_memory(call, geometry):
    """block 0, thread 0: reads uninitialized shared memory, 252 bytes from its begin."""
    at = gpu.shared_memory(256)
    gpu.store_shared(at + 4 * np.int64(gpu.thread_index()), _ONE)
    gpu.synchronize_warp()
    gpu.load_shared(at + 4 * np.int64(gpu.thread_index() ^ 63), np.float32)


def overwrites_another_warp(call, geometry):
    """block 0, thread 32: overwrites another warp's element too early in shared memory, 0 bytes from its begin."""
    at = gpu.shared_memory(256)
    for _ in range(2):
        gpu.store_shared(at + 4 * np.int64(gpu.thread_index()), _ONE)
        gpu.synchronize_block()
    gpu.store_shared(at + 4 * np.int64(gpu.thread_index() % 32), _ONE)


def diverges_from_its_warp(call, geometry):
    """block 0, thread 33: diverges from its warp."""
    if gpu.thread_index() != 33:
        gpu.synchronize_warp()


def diverges_from_its_block(call, geometry):
    """block 0, thread 32: diverges from its block."""
    if gpu.thread_index() < 32:
        gpu.synchronize_block()


WRONG = [
    writes_outside,
    writes_before,
    writes_four_at_any_address,
    writes_in_each_block,
    reads_no_vector,
    never_ends,
    allocates_too_much_shared_memory,
    reads_behind_its_shared_memory,
    reads_uninitialized_memory,
    overwrites_another_warp,
    diverges_from_its_warp,
    diverges_from_its_block,
]


@pytest.mark.parametrize("function", WRONG)
def test_the_emulated_gpu_detects_wrong_kernels(function: Callable[..., None]) -> None:
    assert outcome(function)[0] + "." == function.__doc__


@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
def test_emulated_threads_synchronize_only_at_barriers(backwards: bool) -> None:
    def kernel(call, geometry):
        thread = np.int64(gpu.thread_index())
        at = gpu.shared_memory(512)
        mine, other = at + 8 * thread, at + 8 * (63 - thread)
        gpu.store_shared(mine, np.int32(0))
        gpu.synchronize_block()
        gpu.store_shared(mine, np.int32(1))
        early = gpu.load_shared(other, np.int32)
        gpu.store_shared(mine + 4, np.int32(thread))
        gpu.synchronize_block()
        x = gpu.load_shared(other + 4, np.int32)
        before, fifth, low = gpu.shuffle_up(x), gpu.from_lane(x, 5), gpu.all_of_warp(thread < 32)
        if gpu.block_index() == 1:
            gpu.store(call.matrix + 4 * thread, np.float32(((before * 64 + fifth) * 2 + low) * 2 + early))

    message, out = outcome(kernel, backwards=backwards)
    assert message == ""
    thread = np.arange(64)
    before, fifth = 63 - np.maximum(thread - 1, thread // 32 * 32), 63 - (thread // 32 * 32 + 5)
    # Without a barrier, a later warp reads the writes of an earlier warp, but not vice versa.
    early = (thread < 32) if backwards else (thread >= 32)
    assert out[:64].tolist() == (((before * 64 + fifth) * 2 + (thread < 32)) * 2 + early).tolist()


def test_only_whole_warps_are_launched() -> None:
    assert outcome(writes_in_each_block, threads=48)[0] == "invalid grid: 2 blocks of 48 threads"
