"""The CUDA C++ sources without a GPU: they compile, and the kernel draws the bits of the cpu backend.

Compilers for the GPU compile every kernel, and the tests read their PTX. The kernel's source also runs on the CPU, with
a shim for the CUDA features that it uses (shim/cuda_shim.h). Sanitizers check every memory access.
"""

import collections
import itertools
import os
import re
import struct
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from cuda_cpp import (
    ARCHITECTURES,
    CHECKED_IN_CALLS,
    ELEMENTS,
    NVRTC_OPTIONS,
    SECONDS,
    compile_cpp,
    nvrtc_compile,
    requires_gxx,
    requires_nvrtc,
    run_cases,
    run_program,
)  # fmt: skip
from kernel_cases import GUARD, POISON, TABLES, Case, Values, large_calls, words_in_memory
from launches import WORDS, Vector, a_launch, stored_words, word_fields
from ptx_reader import opcodes_of, unexpected_operations
from tables import COVERING, DTYPES, GRADIENTS, NOISES, QUICK, STORE_KINDS, VARIANTS, Variant, slow_but, versions_of

import multisample
from multisample.backends import nvrtc
from multisample.backends.driver import CONFIGURATION_SIZE
from multisample.backends.kernels.cuda import geometry
from multisample.backends.kernels.cuda.keys import KernelKey, instance, moments_key, perturb_key
from multisample.backends.kernels.cuda.perturb_geometry import KeyOrigin
from multisample.backends.launch import PACKED_LAUNCH, ElementType, pack
from multisample.backends.native import compiler_flags, csrc_files, toolchain, units
from multisample.backends.numba import NumbaBackend
from multisample.backends.system import cuda_driver

Array = np.ndarray[Any, Any]

_CASE = struct.Struct(f"{PACKED_LAUNCH}sQQQ4QII{geometry.PACKED_GEOMETRY}s0Q")
_GEOMETRY = geometry._STRUCT
# The head of a result: the geometry, and the offset in memory after `advance`.
_RESULT = struct.Struct(f"{geometry.PACKED_GEOMETRY}sQ")


def packed(case: Case) -> bytes:
    first, size = case.placed()
    vectors = [_placed(values) for values in case.vectors()]
    values = case.words()
    draw = a_launch(
        case.d, case.n, case.dtype, mu=vectors[0][0], sigma=vectors[1][0], matrix=first, strides=case.byte_strides(),
        shared_noise=case.noise == "shared", antithetic=case.antithetic, fast_math=case.fast_math, device=0,
        batch=int(case.small), **word_fields(values, case.in_memory),
    )  # fmt: skip
    cut = _GEOMETRY.pack(*case.chosen_cut())
    head = _CASE.pack(
        pack(draw), len(vectors[0][1]), len(vectors[1][1]), size, *stored_words(values), case.backwards,
        not case.plain or case.turns > 1, cut,
    )  # fmt: skip
    return head + vectors[0][1] + vectors[1][1]


def _placed(values: Values) -> tuple[Vector | float, bytes]:
    """A vector and the memory that contains it, or a number and empty memory."""
    if isinstance(values, float):
        return values, b""
    (stride,), size = values.strides, values.itemsize
    reach = stride * (len(values) - 1)
    memory = np.frombuffer(bytearray(b"\x7f" * (abs(reach) + size)), np.uint8)
    first = max(0, -reach)
    np.ndarray(values.shape, values.dtype, memory, first, values.strides)[...] = values
    return Vector(first, stride, ElementType[values.dtype.name]), memory.tobytes()


def sources() -> dict[str, str]:
    """The texts of all C++ and CUDA files, by path relative to csrc."""
    root = csrc_files.folder()
    return {
        path.relative_to(root).as_posix(): path.read_text()
        for path in root.rglob("*")
        if path.suffix in (".cpp", ".cu", ".cuh", ".h")
    }


def check(case: Case, cut: geometry.Geometry, advanced: int, out: Array, writes: Array) -> None:
    """Check that the kernel writes every element once and correctly, and no other memory."""
    assert advanced == (case.offset + 1) % 2**64, case
    assert cut == case.chosen_cut(), case
    right = np.full_like(out, POISON)
    got, wanted = case.output(out), case.output(right)
    wanted[...] = case.expected()
    wrong = np.argwhere(got != wanted)
    assert len(wrong) == 0, (case, cut, f"{len(wrong)} wrong", wrong[:5].tolist(), wrong[-1].tolist())
    assert np.array_equal(out, right), (case, cut, "outside the output")
    first, strides = case.placed()[0] // case.size, tuple(stride // case.size for stride in case.byte_strides())
    counted = np.ndarray((case.d, case.n), np.uint8, writes, first, strides)
    often = np.argwhere(counted != 1)
    assert len(often) == 0, (case, cut, f"{len(often)} not written once", often[:5].tolist(), int(counted.max()))
    assert int(writes.sum(dtype=np.int64)) == case.d * case.n, (case, cut)


PROGRAM = "run_kernel"


def template(noise: str, origin_in_memory: bool = False) -> tuple[str, str]:
    """Compiler options that select the kernels of the test program."""
    return f"-DSHARED={int(noise == 'shared')}", f"-DORIGIN_IN_MEMORY={int(origin_in_memory)}"


# Options of the program that runs few cases.
SOME = (*template("independent"), CHECKED_IN_CALLS)


def run(program: Path, cases: Iterable[Case]) -> collections.Counter[str]:
    """Run and check all cases; returns the number of cases of each store kind."""

    def size(case: Case) -> int:
        _, size = case.placed()
        return _RESULT.size + size + size // case.size

    taken = collections.Counter[str]()
    for case, result in run_cases(program, list(cases), packed, size):
        packed_cut, advanced = _RESULT.unpack_from(result)
        cut = geometry.Geometry(*_GEOMETRY.unpack(packed_cut))
        out, writes = np.split(np.frombuffer(result, np.uint8, offset=_RESULT.size), [case.placed()[1]])
        check(case, cut, advanced, out, writes)
        taken[STORE_KINDS[cut.store_kind]] += 1
    return taken


def thinned(cases: Iterable[Case], dtype: str, noise: str) -> list[Case]:
    """All cases for the first of `TEMPLATES`. The others, from the same source, run every third of 300 or more."""
    cases = list(cases)
    return cases if (dtype, noise) == TEMPLATES[0] or len(cases) < 300 else cases[sorted(DTYPES).index(dtype) % 3 :: 3]


# float16 and bfloat16 differ only in the last step, whose functions test_normals.py compares.
TEMPLATES = [*itertools.product(["float32"], NOISES), ("float64", "independent"), ("float16", "shared")]


@requires_gxx
@pytest.mark.parametrize("table", TABLES)
def test_kernel_equals_the_cpu_backend_in_some_cases(runner: Callable[..., Path], table: str) -> None:
    cases = list(TABLES[table][0]("float32", "independent"))
    run(runner("float32", *SOME), cases[:: max(len(cases) // 50, 1) | 1])


@requires_gxx
@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(("dtype", "noise"), TEMPLATES)
def test_kernel_equals_the_cpu_backend(runner: Callable[..., Path], dtype: str, noise: str, table: str) -> None:
    make, expected = TABLES[table]
    taken = run(runner(dtype, *template(noise)), thinned(make(dtype, noise), dtype, noise))
    for store_kind, count in expected.items():
        # For antithetic float64, a thread has one dimension only, which is always aligned.
        others = 0 if dtype == "float64" and store_kind.endswith("staged") else 1
        least = count if (dtype, noise) == TEMPLATES[0] else others
        assert taken[store_kind] >= least, (store_kind, taken)


@requires_gxx
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "noise"), [("float32", "independent"), ("float64", "shared")])
def test_kernel_takes_seed_and_window_from_memory(runner: Callable[..., Path], dtype: str, noise: str) -> None:
    taken = run(runner(dtype, *template(noise, True)), thinned(words_in_memory(dtype, noise), dtype, noise))
    # The plain kernels take words by value.
    assert min(taken[name] for name in STORE_KINDS if not name.startswith("plain")) > 1, taken


class Batch(NamedTuple):
    """Matrices of one launch, each with its vectors and its words."""

    store_kind: str
    d: int
    n: int
    known_phase: bool
    """Whether the launch knows where the first columns are in a group."""

    @property
    def count(self) -> int:
        return 300 if self.store_kind == "small_matrices" else 3

    @property
    def size(self) -> int:
        return 4 * self.count * self.d * self.n

    def vectors(self) -> tuple[Array, Array]:
        mu, sigma = (np.linspace(low, 2, self.count * self.d).astype(np.float32) for low in (-3, 0.5))
        return mu.reshape(self.count, self.d), sigma.reshape(self.count, self.d)

    def words(self) -> list[dict[str, int]]:
        return [dict(zip(WORDS, (2**64 - 2 - b, 5 + b, 7 * b, 2**33 + 8 * b), strict=True)) for b in range(self.count)]

    def packed(self) -> bytes:
        is_transposed, vector = self.store_kind == "transposed", Vector(0, 4, ElementType.float32)
        draw = a_launch(
            self.d, self.n, mu=vector, sigma=vector, matrix=GUARD, strides=(4, 4 * self.d) if is_transposed else None,
            device=0, batch=self.count, mu_step=4 * self.d, sigma_step=4 * self.d, matrix_step=4 * self.d * self.n,
            seed_step=32, offset_step=32, origin_step=32, column_phase=int(self.known_phase),
            **word_fields(self.words()[0], WORDS),
        )  # fmt: skip
        # The bytes that a backend launches.
        backend = NumbaBackend()
        kind = STORE_KINDS.index(self.store_kind)
        backend._handles = {KernelKey("float32", False, False, False, kind, True, True, 0): 7}
        ((_, parameters),) = backend.parameters(draw)
        launched, cut = np.split(np.frombuffer(parameters, np.uint8)[CONFIGURATION_SIZE:], [PACKED_LAUNCH])
        first, *others = (stored_words(words) for words in self.words())
        mu, sigma = self.vectors()
        head = _CASE.pack(
            launched.tobytes(), mu.nbytes, sigma.nbytes, self.size + 2 * GUARD, *first, False, True, cut.tobytes()
        )
        return head + mu.tobytes() + sigma.tobytes() + np.array(others, np.uint64).tobytes()

    def expected(self) -> Array:
        layout = "nd" if self.store_kind == "transposed" else "dn"
        matrices = [
            multisample.sample(
                mu, sigma, self.n, seed=multisample.Key(words["seed"], words["offset"]), layout=layout,
                dim_offset=words["first_row"], sample_offset=words["first_column"], backend="cpu",
            ).view(np.uint8).ravel()
            for mu, sigma, words in zip(*self.vectors(), self.words(), strict=True)
        ]  # fmt: skip
        out = np.full(self.size + 2 * GUARD, POISON, np.uint8)
        out[GUARD:-GUARD] = np.concatenate(matrices)
        return out


BATCHES = [
    Batch("aligned", 40, 1024, True), Batch("shifted", 8, 1157, False), Batch("transposed", 32, 30, True),
    Batch("strided", 41, 29, False), Batch("few_columns", 2**16 + 8, 3, True), Batch("small_matrices", 1, 4, True),
    Batch("small_matrices", 12, 32, True), Batch("small_matrices", 10, 10, False),
    Batch("strided", 3, 1029, True),  # Only the first matrix is aligned.
    Batch("few_rows", 1, 1029, True), Batch("few_rows", 1, 4096, True), Batch("few_rows", 2, 1040, False),
]  # fmt: skip


@requires_gxx
@pytest.mark.slow
def test_one_launch_draws_the_matrices_of_a_batch(runner: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "launch_function", lambda: None)
    cuda = SimpleNamespace(cuCtxGetDevice=None, cuThreadExchangeStreamCaptureMode=lambda mode: 0)
    monkeypatch.setattr(cuda_driver, "driver", lambda: cuda)
    program = runner("float32", *template("independent", True))
    for batch, result in run_cases(
        program, BATCHES, Batch.packed, lambda batch: _RESULT.size + (batch.size + 2 * GUARD) * 5 // 4
    ):
        out, writes = np.split(np.frombuffer(result, np.uint8, offset=_RESULT.size), [batch.size + 2 * GUARD])
        assert np.array_equal(out, batch.expected()), batch
        assert (writes[GUARD // 4 : -GUARD // 4] == 1).all() and writes.sum(dtype=np.int64) == batch.size // 4, batch


@requires_gxx
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "noise"), TEMPLATES)
def test_kernel_equals_the_cpu_backend_for_many_dimensions_and_long_rows(
    runner: Callable[..., Path], dtype: str, noise: str
) -> None:
    is_shared = noise == "shared"
    run(runner(dtype, *template(noise)), large_calls(dtype, noise, (is_shared, not is_shared)))


@requires_gxx
def test_the_runner_detects_outputs_and_vectors_that_are_too_short(runner: Callable[..., Path]) -> None:
    program = runner("float32", *SOME)

    def outcome(**fields: int) -> str:
        draw, *rest = _CASE.unpack_from(packed(Case(5, 600)))
        sizes = dict(zip(("mu", "sigma", "out"), rest[:3], strict=True)) | fields
        head = _CASE.pack(draw, *sizes.values(), *rest[3:])
        done = run_program(program, head + b"\1" * (sizes["mu"] + sizes["sigma"]))
        return f"{done.returncode} {done.stderr.decode()}"

    whole = Case(5, 600).placed()[1]
    assert outcome().startswith("0 ")
    for fields in ({"mu": 16}, {"sigma": 19}, {"out": whole - GUARD - 4}):
        assert "AddressSanitizer: heap-buffer-overflow" in outcome(**fields)


def sample_kernel(variant: Variant) -> str:
    dtype, _, antithetic, _, number = variant
    return KernelKey(*variant, False, False, 0, *versions_of(STORE_KINDS[number], dtype, antithetic)[-1]).name


def perturb_kernels() -> list[str]:
    flags = itertools.product(DTYPES, *((False, True),) * 3, KeyOrigin)
    return [
        perturb_key(dtype, fast, one_member, strided, origin, 0).name
        for dtype, fast, one_member, strided, origin in flags
        if not (fast and dtype == "float64") and not (one_member and origin == KeyOrigin.kOfRows)
    ]


def moments_kernels() -> list[str]:
    kinds = (1, False), (4, False), (1, True)
    names = [
        moments_key(real, antithetic, fast, rows, with_second, origin, 0).name
        for real, antithetic, fast, with_second, (rows, origin) in itertools.product(
            ("float32", "float64"), *((False, True),) * 3, kinds
        )
        if not (real == "float64" and (fast or rows == 4))
    ]
    return names + [instance("finish_moments_kernel", real) for real in ("float32", "float64")]


def gradient_kernels() -> list[str]:
    names = ["multisample::add_segments_kernel<float>"]
    for dtype, shared, antithetic, fast, rows, only_at_once, origin_in_memory in GRADIENTS:
        element = ELEMENTS[dtype] if dtype in ("float32", "float64") else f"multisample::{dtype}"
        arguments = shared, antithetic, fast, rows, only_at_once, origin_in_memory
        names.append(f"multisample::gradient_kernel<{', '.join([element, *(str(x).lower() for x in arguments)])}>")
    return names


OPERATIONS: dict[str, Callable[[], list[str]]] = {
    "sample": lambda: list(map(sample_kernel, QUICK)),
    "advance": lambda: ["multisample::advance_kernel"],
    "gradient": gradient_kernels,
    "moments": moments_kernels,
    "perturb": perturb_kernels,
}
"""The kernels of each kind."""


@requires_nvrtc
@pytest.mark.parametrize(
    "kind", slow_but([("moments", "sm_90")], itertools.product(OPERATIONS, ARCHITECTURES)), ids=" ".join
)
def test_nvrtc_compiles_kernels_for_every_architecture_without_a_warning(kind: tuple[str, str]) -> None:
    """Kernels of "sample" are compiled for every architecture; those of each other operation are spread over them.

    Code depends on the architecture in the barriers of staged rows, uniform registers and rounding to bfloat16.
    """
    depending = {name for name, text in sources().items() if re.search(r"__CUDA_ARCH__\)? *[<>=!]", text)}
    assert depending == {"cuda/intrinsics.cuh", "stream/rounding.h"}
    operation, architecture = kind
    kernels, header = OPERATIONS[operation](), f"{operation}_kernel".removeprefix("sample_")
    if operation in ("gradient", "moments", "perturb"):
        kernels = kernels[ARCHITECTURES.index(architecture) :: 24 if architecture == "sm_90" else 8]
    compiled = nvrtc_compile(nvrtc.source(header), kernels, architecture, NVRTC_OPTIONS)
    # Not even of launch bounds that exceed the threads of a multiprocessor.
    assert compiled.log == ""
    assert compiled.code.startswith(b"\x7fELF")
    assert len(set(compiled.names)) == len(kernels) > 0
    for name in compiled.names:
        assert f".text.{name}\0".encode() in compiled.code, name


Bodies = dict[Variant, str]


@pytest.fixture(scope="module")
def ptx() -> tuple[Bodies, Bodies]:
    """The PTX of kernels with contraction (NVRTC's default), and of a third of the kernels without contraction."""

    def bodies(variants: list[Variant], option: str) -> Bodies:
        names = list(map(sample_kernel, variants))
        compiled = nvrtc_compile(nvrtc.source("kernel"), names, "compute_90", [*NVRTC_OPTIONS, option])
        assert compiled.log == ""
        parts = re.split(r"\.entry\s+(\w+)", compiled.code.decode())
        found = dict(zip(parts[1::2], parts[2::2], strict=True))
        assert set(found) == set(compiled.names)
        return {variant: found[name] for variant, name in zip(variants, compiled.names, strict=True)}

    with ThreadPoolExecutor(2) as pool:
        contracted = pool.submit(bodies, COVERING, "--fmad=true")
        as_written = pool.submit(bodies, COVERING[::3], "--fmad=false")
        return contracted.result(), as_written.result()


@pytest.mark.slow
@requires_nvrtc
@pytest.mark.parametrize(("capability", "size"), [("75", 18560), ("89", 18560), ("90", 34304)])
def test_staged_kernels_take_less_shared_memory_where_there_is_little(capability: str, size: int) -> None:
    name = sample_kernel(("float32", False, False, False, STORE_KINDS.index("staged")))
    ptx = nvrtc_compile(nvrtc.source("kernel"), [name], f"compute_{capability}", NVRTC_OPTIONS).code.decode()
    assert sum(map(int, re.findall(r"^\s*\.shared .*\[(\d+)\]", ptx, re.M))) == size


@pytest.mark.slow
@requires_nvrtc
def test_contraction_does_not_change_the_ptx(ptx: tuple[Bodies, Bodies]) -> None:
    """Every floating-point product and sum is an intrinsic, so a compiler has nothing to fuse."""

    def lines(body: str) -> list[str]:
        # Positions of kernels differ, and names of constants and labels contain numbers of the compilation.
        return re.sub(r"_ZN\d+_INTERNAL_\w*?multisample|\$L__BB\d+", "", body).partition("\n}")[0].split("\n")

    contracted, as_written = ptx
    for variant, body in as_written.items():
        assert f"fma.rn.f{64 if variant[0] == 'float64' else 32}" in body, variant
        assert lines(body) == lines(contracted[variant]), variant


@pytest.mark.slow
@requires_nvrtc
def test_kernels_have_only_the_operations_of_the_stream(ptx: tuple[Bodies, Bodies]) -> None:
    for (dtype, shared, antithetic, fast, store_kind), body in ptx[0].items():
        variant = (dtype, shared, antithetic, fast, STORE_KINDS[store_kind])
        found = opcodes_of(body)
        # Every expected instruction occurs.
        assert found["ret"] > 0 and sum(found.values()) > 300, variant
        assert not unexpected_operations(found, dtype, fast), variant


@pytest.mark.slow
def test_nvcc_compiles_every_kernel_of_the_extension_without_a_warning(tmp_path: Path) -> None:
    home = toolchain.cuda_home()
    if home is None:
        pytest.skip("nvcc is neither on the PATH nor in CUDA_HOME")
    command = [
        str(home / "bin" / "nvcc"), *compiler_flags.LIBRARIES["cuda"].nvcc_flags, "-arch=sm_90", "-Xptxas", "-v",
        "-Xcompiler", "-fPIC,-Wall", f"-I{csrc_files.folder()}",
    ]  # fmt: skip

    def compiled(source: Path) -> str:
        place = tmp_path / f"{source.stem}.o"
        done = subprocess.run([*command, "-c", source, "-o", place], capture_output=True, text=True, timeout=SECONDS)
        output = done.stdout + done.stderr
        assert done.returncode == 0, output[-5000:]
        assert not re.search("warning", output, re.I), output[:5000]
        return output

    sources = [csrc_files.folder() / "torch/shared_kernels.cu"]
    for unit in units.all_units():
        sources.append(tmp_path / f"{unit.name}.cu")
        sources[-1].write_text(unit.text)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        output = "".join(pool.map(compiled, sources))
    kernels = re.findall(r"Compiling entry function '(\w+)' for 'sm_90'", output)
    # Units compile only kernels of their own, but for the last step of gradients and moments.
    own = [name for name in kernels if not re.search("add_segments|finish_moments", name)]
    assert len(own) == len(set(own))
    gradients = sum("gradient_kernel" in name for name in kernels)
    assert gradients == len(GRADIENTS) == 80
    # Kernels with aligned stores have a second variant, which reads the seed and the window from memory.
    aligned = [variant for variant in VARIANTS if STORE_KINDS[variant[-1]] == "aligned"]
    versions = [versions_of(STORE_KINDS[kind], dtype, antithetic) for dtype, _, antithetic, _, kind in VARIANTS]
    assert sum("sample_kernel" in name for name in kernels) == sum(map(len, versions)) + len(aligned)


def test_launches_report_only_their_own_errors() -> None:
    """The runtime's last error may belong to another library, so the code reads it only to clear our own error."""
    texts = sources()
    assert {"cuda/launch.cuh", "cuda/gradient_launch.cuh", "torch/shared_kernels.cu"} <= texts.keys()
    code = {name: re.sub(r"//[^\n]*", "", text) for name, text in texts.items()}
    assert not [name for name, text in code.items() if "<<<" in text or "cudaPeekAtLastError" in text]
    uses = {name: text.count("cudaGetLastError") for name, text in code.items() if "cudaGetLastError" in text}
    assert uses == {"cuda/launch.cuh": 1}
    assert re.search(r"if \(error != cudaSuccess\) cudaGetLastError\(\);\n  return error;", code["cuda/launch.cuh"])
    # Every launch goes through the one function that returns the launch's error.
    launches = {name: len(re.findall(r"\bcudaLaunch\w*", text)) for name, text in code.items() if "cudaLaunch" in text}
    assert launches == {"cuda/launch.cuh": 1}
    assert "return cleared(cudaLaunchKernel(" in code["cuda/launch.cuh"]


@requires_gxx
@pytest.mark.parametrize(
    "header",
    [
        "stream/arithmetic.h",
        "stream/words.h",
        "stream/normals.h",
        "stream/rounding.h",
        "include/multisample/normal.h",
        "launch.h",
        "cuda/geometry.h",
        "cuda/gradient_geometry.h",
        "torch/inputs.h",
    ],
)
def test_headers_compile_alone_for_the_cpu(header: str) -> None:
    compile_cpp("-Wno-psabi", "-fsyntax-only", "-include", header, "-x", "c++", os.devnull)
