"""The kernels in Python, and launches of the numba backend, without a GPU: see emulated_gpu.py."""

import ctypes
import functools
import importlib.resources
import itertools
import random
import re
import struct
import textwrap
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import emulated_gpu as gpu
import numpy as np
import pytest
from kernel_cases import POISON, TABLES, Case, Values
from launches import WORDS, a_launch, head_of, with_words_in_memory
from tables import DTYPES, NOISES, STORE_KINDS, versions_of

from multisample.backends import driver as driver_module
from multisample.backends.driver import CONFIGURATION_SIZE
from multisample.backends.kernels.cuda.geometry import ONE_ROW_TURNS, PACKED_GEOMETRY, PLAIN_TURNS, Geometry, geometry
from multisample.backends.kernels.cuda.keys import CppKey, KernelKey
from multisample.backends.kernels.cuda.plain import plain_kernel, plain_transposed_kernel
from multisample.backends.launch import SAMPLE_CALL, Launch, WordFormat, pack
from multisample.backends.numba import NumbaBackend, is_in_python
from multisample.backends.system import cuda_driver

Array = np.ndarray[Any, Any]


def key_of(
    store_kind: str, dtype: str = "float32", noise: str = "independent", antithetic: bool = False,
    fast_math: bool = False, origin_in_memory: bool = False, batched: bool = False,
    version: tuple[int, bool] = (0, False),
) -> KernelKey:  # fmt: skip
    kind = STORE_KINDS.index(store_kind)
    return KernelKey(dtype, noise == "shared", antithetic, fast_math, kind, origin_in_memory, batched, 0, *version)


def named(key: KernelKey) -> str:
    flags = [name for name in ("antithetic", "fast_math", "origin_in_memory", "batched") if getattr(key, name)]
    version = [f"{key.turns}{'-usual' * key.usual}"] if key.turns else []
    return "-".join([key.dtype, NOISES[key.shared_noise], STORE_KINDS[key.store_kind], *flags, *version])


def each(keys: Sequence[KernelKey], quick: Sequence[KernelKey] = ()) -> Any:
    return pytest.mark.parametrize(
        "key", [pytest.param(key, id=named(key), marks=[] if key in quick else pytest.mark.slow) for key in keys]
    )


PLAIN = ("plain", "plain_transposed")
SOME = [
    key_of("plain", version=(ONE_ROW_TURNS, True)), key_of("plain", "float16", version=(PLAIN_TURNS, False)),
    key_of("plain_transposed", "bfloat16", antithetic=True, version=(2, True)),
    key_of("plain_transposed", version=(1, False)),
]  # fmt: skip
# And half of the choices, with all pairs of them.
KEYS = SOME + [
    key_of(kind, dtype, noise, antithetic, version=version)
    for kind in PLAIN
    for k, (dtype, noise, antithetic) in enumerate(itertools.product(DTYPES, NOISES, (False, True)))
    for number, version in enumerate(versions_of(kind, dtype, antithetic))
    if (k.bit_count() + number) % 2 == 0
]


@functools.cache
def compiled(key: KernelKey) -> Any:
    assert is_in_python(key)
    make = plain_kernel if STORE_KINDS[key.store_kind] == "plain" else plain_transposed_kernel
    with gpu.emulated():
        return gpu.compile_kernel(make(key, (9, 0)))


def key_of_case(case: Case) -> KernelKey:
    """The key of the kernel that draws the case."""
    version = case.chosen_cut().version
    return key_of(
        case.store_kind, case.dtype, case.noise, case.antithetic, case.fast_math, case.has_origin_in_memory,
        version=version,
    )  # fmt: skip


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
        antithetic=case.antithetic, fast_math=case.fast_math, device=0, **case.words(),
    )  # fmt: skip
    return with_words_in_memory(draw, *case.in_memory)


def parameters_of(draw: Launch, cut: Geometry) -> bytes:
    """The bytes that a kernel takes; a plain kernel takes a part of the launch."""
    taken = SAMPLE_CALL if STORE_KINDS[cut.store_kind] in PLAIN else slice(None)
    return pack(draw)[taken] + cut.packed()


def drawn(case: Case) -> tuple[Array, Array]:
    """The memory and the output in it, drawn by the kernel."""
    memory, out = memory_of(case)
    cut, (mu, sigma) = case.chosen_cut(), case.vectors()
    draw, words = call(case, mu, sigma, out)
    packed, inputs = parameters_of(draw, cut), (mu, sigma, *([words] if case.in_memory else []))
    gpu.launch(compiled(key_of_case(case)), cut.blocks, cut.threads, packed, out, inputs, backwards=case.backwards)
    return memory, out


def check(case: Case) -> None:
    """Check that the kernel writes every element and no other memory; the launch checks for double writes."""
    cut = case.chosen_cut()
    try:
        memory, out = drawn(case)
    except gpu.BrokenKernelError as error:
        pytest.fail(f"{error}\n{case}\n{cut}", pytrace=False)
    right = expected_memory(case)
    wrong = np.argwhere(out != case.output(right))
    assert len(wrong) == 0, (case, cut, f"{len(wrong)} wrong", wrong[:5].tolist(), wrong[-1].tolist())
    assert np.array_equal(memory, right), (case, cut, "outside of the output")


def check_some(key: KernelKey, cases: Iterable[Case], number: int) -> None:
    """Check `number` of the cases that this kernel draws; the choice is fixed."""
    there_are = [case for case in cases if key_of_case(case) == key]
    assert len(there_are) >= min(number, 8), f"only {len(there_are)} cases"
    for case in random.Random(1).sample(there_are, min(number, len(there_are))):
        check(case)


@each(KEYS, SOME)
def test_kernel_equals_the_cpu_backend(key: KernelKey) -> None:
    check_some(key, TABLES["plain"][0](key.dtype, NOISES[key.shared_noise]), 30)


@pytest.mark.slow
@pytest.mark.parametrize(("store_kind", "noise", "antithetic"), [*itertools.product(PLAIN, NOISES, (False, True))])
def test_fast_math_is_close_to_the_portable_numbers(store_kind: str, noise: str, antithetic: bool) -> None:
    # The emulation computes the approximate functions exactly, unlike a GPU. All other arithmetic is the same.
    case = Case(
        50, 300, "float32", noise, antithetic, True, seed=2**63 + 1, sample_offset=2**32,
        strides=(1, 52) if store_kind == "plain_transposed" else None, plain=True,
    )  # fmt: skip
    assert case.store_kind == store_kind
    got, portable = drawn(case)[1].view(np.float32), case.expected().view(np.float32)
    sigma = np.asarray(case.vectors()[1])[:, None]
    assert (np.abs(got - portable) <= 1e-3 * sigma + np.spacing(np.abs(portable))).all()
    assert (got != portable).any()


@pytest.mark.slow
def test_fast_math_does_not_change_float64() -> None:
    check(Case(20, 37, "float64", fast_math=True, plain=True))


def test_the_page_of_the_backends_shows_the_kernel() -> None:
    backends = importlib.resources.files("multisample.backends")
    (shown,) = re.findall(r"^```python\n(for k .*?)^```$", (backends / "README.md").read_text(), re.M | re.S)
    assert textwrap.indent(shown, " " * 8) in (backends / "kernels/cuda/plain.py").read_text()


class Driver:
    """A fake driver that keeps the arguments of launches, and runs the plain kernels in the emulation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, out: Array, inputs: tuple[Values, ...]) -> None:
        self.memory = out, inputs
        self.launched: list[tuple[Any, int, int, int, int, bytes]] = []
        monkeypatch.setattr(cuda_driver, "launch_function", lambda: self.launch)
        cuda = SimpleNamespace(cuCtxGetDevice=lambda ordinal: 0, cuThreadExchangeStreamCaptureMode=lambda mode: 0)
        monkeypatch.setattr(cuda_driver, "driver", lambda: cuda)

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
        self.launched.append((kernel, blocks, blocks_y, threads, stream, packed))
        if isinstance(kernel, KernelKey) and is_in_python(kernel):
            gpu.launch(compiled(kernel), blocks, threads, packed, *self.memory)
        return 0


def numba_backend(key: KernelKey) -> NumbaBackend:
    """A backend with the kernel of this key only. Its handle is the key."""
    backend = NumbaBackend()
    backend._handles = {key: key}  # type: ignore[dict-item]
    return backend


def with_geometry(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """Let backends take the kernels of large calls, unless the case is plain."""

    def of_case(launch: Launch, strided: bool) -> Geometry:
        return geometry(launch if case.plain else launch._replace(origin_in_memory=1), strided)

    monkeypatch.setattr(driver_module, "geometry", of_case)


LAUNCHED = [
    key_of(name, version=(1, False) if name in PLAIN else (0, False))
    for name in STORE_KINDS
    if name != "small_matrices"
]
LAUNCHED += [
    key_of("shifted", noise="shared", antithetic=True),
    *(key_of(name, noise="shared", antithetic=True, version=(1, False)) for name in PLAIN),
]
LAUNCHED += [
    key_of("aligned", origin_in_memory=True),
    key_of("transposed_staged", noise="shared", origin_in_memory=True),
]


@each(LAUNCHED, LAUNCHED)
def test_a_launch_has_the_grid_and_the_parameters_of_its_geometry(
    monkeypatch: pytest.MonkeyPatch, key: KernelKey
) -> None:
    store_kind = STORE_KINDS[key.store_kind]
    d, n = {
        "aligned": (40, 1024), "shifted": (7, 1157), "staged": (300, 10), "strided": (30, 30),
        "transposed": (32, 30), "transposed_staged": (30, 30), "few_columns": (2**16, 3), "plain": (40, 29),
        "plain_transposed": (33, 30), "few_rows": (2, 900),
    }[store_kind]  # fmt: skip
    strides = {
        "strided": (60, 2), "transposed": (1, 32), "transposed_staged": (1, d), "plain_transposed": (1, 33),
    }.get(store_kind)  # fmt: skip
    words = ("offset",)
    if key.origin_in_memory:
        words = WORDS[:3] if store_kind == "aligned" else WORDS
    case = Case(
        d, n, key.dtype, NOISES[key.shared_noise], key.antithetic, seed=2**64 - 1, offset=5, in_memory=words,
        strides=strides, plain=store_kind in PLAIN,
    )  # fmt: skip
    assert key_of_case(case) == key
    with_geometry(monkeypatch, case)
    # Launchers take the seed and the window by value.
    for with_launcher in (False,) if key.origin_in_memory else (False, True):
        memory, out = memory_of(case)
        mu, sigma = case.vectors()
        draw, in_memory = call(case, mu, sigma, out)
        draw = draw._replace(stream=2**63 + 7)
        driver, backend = Driver(monkeypatch, out, (mu, sigma, in_memory)), numba_backend(key)
        if with_launcher:
            launcher = backend.launcher(draw._replace(matrix=0, seed=0, offset=0, stream=0))
            launcher.run(launcher.geometry(draw.matrix, 0), *head_of(draw))
        else:
            backend.launch(draw)
        cut = case.chosen_cut()
        assert driver.launched == [(key, cut.blocks, 1, cut.threads, draw.stream, parameters_of(draw, cut))]
        assert not is_in_python(key) or np.array_equal(memory, expected_memory(case))


@pytest.mark.parametrize(("store_kind", "d", "n"), [("aligned", 40, 1024), ("small_matrices", 12, 32)])
def test_one_launch_draws_a_batch(monkeypatch: pytest.MonkeyPatch, store_kind: str, d: int, n: int) -> None:
    """test_cuda_sources.py runs the kernels of batches."""
    key = key_of(store_kind, origin_in_memory=True, batched=True)
    out, words = np.zeros((3, d, n), np.float32), np.zeros((3, 4), np.uint64)
    draw = a_launch(
        d, n, matrix=out[0], device=0, seed_at=words.ctypes.data, offset_at=words.ctypes.data + 8, batch=3,
        matrix_step=4 * d * n, seed_step=32, offset_step=32, origin_in_memory=1, word_formats=WordFormat.high_first,
        column_phase=1,
    )  # fmt: skip
    driver = Driver(monkeypatch, out, ())
    numba_backend(key).launch(draw)
    ((kernel, _, batch, _, _, packed),) = driver.launched
    assert (kernel, batch) == (key, 1 if store_kind == "small_matrices" else 3)
    assert packed[:-PACKED_GEOMETRY] == pack(draw)


def test_a_launcher_chooses_the_kernel_by_alignment_and_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Aligned, shifted, staged and plain rows of one plan."""
    kinds = set()
    for (d, n, plain), (misalignment, first) in itertools.product(
        [(3, 1024, False), (9, 10, False), (9, 10, True)], itertools.product((0, 1, 4), (0, 1, 4, 2**33 + 6))
    ):
        case = Case(
            d, n, seed=9, offset=2**40, dim_offset=5, sample_offset=first, misalignment=misalignment, plain=plain
        )
        with_geometry(monkeypatch, case)
        memory, out = memory_of(case)
        means, deviations = case.vectors()
        draw, _ = call(case, means, deviations, out)
        driver, backend = Driver(monkeypatch, out, (means, deviations)), numba_backend(key_of_case(case))
        launcher = backend.launcher(draw._replace(matrix=0, seed=0, first_column=0))
        launcher.run(launcher.geometry(draw.matrix, first), *head_of(draw))
        assert [launched[-1] for launched in driver.launched] == [parameters_of(draw, case.chosen_cut())]
        assert not plain or np.array_equal(memory, expected_memory(case))
        kinds.add(case.store_kind)
    assert kinds == {"aligned", "shifted", "staged", "plain"}


def test_advance_launches_one_thread_with_the_address_of_the_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    """test_cuda_sources.py runs the kernel."""
    driver, backend = Driver(monkeypatch, np.zeros(1), ()), NumbaBackend()
    backend._handles = {CppKey("advance_kernel", "multisample::advance_kernel", 0): 7}
    backend.advancer(0)(2**40 + 8, 9)
    assert driver.launched == [(7, 1, 1, 1, 9, (2**40 + 8).to_bytes(8, "little"))]


def outcome(function: Callable[..., None], threads: int = 64, backwards: bool = False) -> tuple[str, Array]:
    """Run two blocks of a kernel that may write 72 of 80 float32; returns the error and the memory."""
    case = Case(1, 80)
    _, out = memory_of(case)
    offset = np.zeros(1, np.uint64)
    call = pack(a_launch(1, 80, matrix=out, offset_at=offset.ctypes.data))[SAMPLE_CALL]
    kernel, message = gpu.compile_kernel(function), ""
    try:
        gpu.launch(
            kernel, 2, threads, call + case.chosen_cut().packed(), out[:, :72], (offset, 1.0), backwards=backwards
        )
    except gpu.BrokenKernelError as error:
        message = str(error)
    return message, out.view(np.float32)[0]


# Wrong kernels. The docstring is the error that the emulation must find.

cuda, _ONE = gpu.cuda, np.float32(1)


def writes_outside(call, geometry):
    """block 1, thread 63: accesses memory outside of the output, 288 bytes behind its first byte."""
    if cuda.blockIdx.x == 1:
        gpu.store(call.matrix + 4 * (cuda.threadIdx.x + 9), _ONE)


def writes_before(call, geometry):
    """block 0, thread 0: accesses memory outside of the output, -4 bytes behind its first byte."""
    gpu.store(call.matrix - 4, _ONE)


def writes_four_at_any_address(call, geometry):
    """block 0, thread 1: makes a misaligned access to the output, 20 bytes behind its first byte."""
    if cuda.blockIdx.x == 0 and cuda.threadIdx.x < 8:
        gpu.store_vector(call.matrix + 20 * cuda.threadIdx.x, (_ONE, _ONE, _ONE, _ONE), 4)


def writes_in_each_block(call, geometry):
    """block 1, thread 0: writes an element twice in the output, 0 bytes behind its first byte."""
    gpu.store(call.matrix + 4 * cuda.threadIdx.x, _ONE)


def reads_outside(call, geometry):
    """block 0, thread 0: accesses memory outside of an input, 64 bytes behind its first byte."""
    gpu.store(call.matrix, gpu.load(call.offset_at + 64, np.float32))


def never_ends(call, geometry):
    """block 0, thread 0: never ends, in an input, 0 bytes behind its first byte."""
    while gpu.load(call.offset_at, np.uint64) == 0:
        pass


WRONG = [
    writes_outside, writes_before, writes_four_at_any_address, writes_in_each_block, reads_outside, never_ends,
]  # fmt: skip


@pytest.mark.parametrize("function", WRONG)
def test_the_emulated_gpu_detects_wrong_kernels(function: Callable[..., None]) -> None:
    assert outcome(function)[0] + "." == function.__doc__


def test_only_whole_warps_are_launched() -> None:
    assert outcome(writes_in_each_block, threads=48)[0] == "invalid grid: 2 blocks of 48 threads"
