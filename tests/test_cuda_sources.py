"""The CUDA C++ sources, proved where there is no GPU: what compilers make of them, and what the kernel writes.

Compilers for the GPU say whether every kernel compiles, and what it is made of. That it is right is seen on the CPU:
the kernel's own source runs there, thread for thread and block for block, over the few words of CUDA that it uses
(shim/cuda_shim.h), with every access to memory watched by sanitizers.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import importlib.util
import itertools
import json
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from draws import a_draw
from numba import njit
from transposed_cuts import recut

import multisample
from multisample.backends import cupy as cupy_backend
from multisample.backends.draw import PACKED_DRAW, ElementType, Vector, Word, pack
from multisample.backends.kernels.cuda import geometry
from multisample.backends.kernels.stream import rounding as narrow
from multisample.backends.kernels.stream.arithmetic import fma
from multisample.backends.launch import KernelKey
from multisample.backends.native import build, csrc_files, toolchain
from reference import stream

Array = np.ndarray[Any, Any]

SHIM = Path(__file__).parent / "shim"
DTYPES: dict[str, Any] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
NOISES = ("independent", "shared")
STORES = ("aligned", "shifted", "staged", "strided", "transposed", "transposed_staged")
ROWS, COLUMNS = 2**32, 2**34
SECONDS = 300

Variant = tuple[str, bool, bool, bool, int]
# Element type, whether noise is shared, antithetic, fast_math, stores.
VARIANTS: list[Variant] = [
    (dtype, shared, antithetic, fast, stores)
    for dtype, shared, antithetic, fast, stores in itertools.product(
        DTYPES, (False, True), (False, True), (False, True), range(len(STORES))
    )
    if not (fast and dtype == "float64")
]


# --- Run on the CPU -------------------------------------------------------------------------------

requires_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

_CASE = struct.Struct(f"{PACKED_DRAW}sQQQ4QII{geometry.PACKED_GEOMETRY}s0Q")
_GEOMETRY = geometry._STRUCT
# What comes before an output: how it was cut, and the offset in memory as it is counted up.
_RESULT = struct.Struct(f"{geometry.PACKED_GEOMETRY}sQ")
_GUARD = 512
_POISON = 0xC3

Values = Array | float


@njit
def _in_pairs(mu: Array, sigma: Array, z: Array, first: int, out: Array) -> None:
    """What is drawn from pairs of noise, from its column `first` on: each number, and then its mirror."""
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            noise = z[i, (first + j) // 2]
            out[i, j] = fma(sigma[i], -noise if (first + j) % 2 else noise, mu[i])


@dataclasses.dataclass
class Case:
    """A call, where its output lies, and how it is to be cut if not as it is for a GPU."""

    d: int
    n: int
    dtype: str = "float32"
    noise: str = "independent"
    antithetic: bool = False
    seed: int = 1
    offset: int = 0
    in_memory: tuple[str, ...] = ()
    """The words that the kernel finds in memory: seed, offset, first_row, first_column. The draw has other values."""
    dim_offset: int = 0
    sample_offset: int = 0
    fast_math: bool = False
    """Of the geometry alone: the portable kernel runs."""
    strides: tuple[int, int] | None = None
    """Of the output, in elements; contiguous rows by default."""
    misalignment: int = 0
    """How many elements behind an aligned address the lowest one of the output is."""
    mu: Values | None = None
    sigma: Values | None = None
    cut: Callable[[geometry.Geometry], dict[str, int]] | None = None
    """Fields of the geometry to change; what follows from others is done again."""
    backwards: bool = False

    @property
    def size(self) -> int:
        return np.dtype(DTYPES[self.dtype]).itemsize

    def byte_strides(self) -> tuple[int, int]:
        rows, columns = self.strides or (self.n, 1)
        return rows * self.size, columns * self.size

    def placed(self) -> tuple[int, int]:
        """Where the first element of the output is in its memory, and how large that is, in bytes."""
        reach = [stride * (length - 1) for stride, length in zip(self.byte_strides(), (self.d, self.n), strict=True)]
        below, above = -sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
        first = _GUARD + self.misalignment * self.size + below
        return first, first + above + self.size + _GUARD

    def vectors(self) -> tuple[Values, Values]:
        draw = np.random.default_rng(self.d * 10007 + self.n)
        real = np.float64 if self.dtype == "float64" else np.float32
        mu = draw.normal(size=self.d).astype(real) * 3 if self.mu is None else self.mu
        sigma = np.abs(draw.normal(size=self.d)).astype(real) if self.sigma is None else self.sigma
        return mu, sigma

    def expected(self) -> Array:
        """Bit patterns: what the cpu backend draws, or for antithetic pairs what is made of the noise that it draws."""
        mu, sigma = self.vectors()
        if not self.antithetic:
            return self._on_cpu(mu, sigma, self.n, self.dtype, self.sample_offset).view(f"u{self.size}")
        real = np.dtype(np.float64 if self.dtype == "float64" else np.float32)
        first, last = self.sample_offset // 2, _ceil_div(self.sample_offset + self.n, 2)
        z = self._on_cpu(-0.0, np.ones(self.d, real), last - first, real.name, first)
        out = np.empty((self.d, self.n), real)
        with np.errstate(all="ignore"):
            vectors = [np.broadcast_to(np.asarray(vector).astype(real), self.d) for vector in (mu, sigma)]
            _in_pairs(*vectors, z, self.sample_offset % 2, out)
            return out.astype(DTYPES[self.dtype]).view(f"u{self.size}")

    def _on_cpu(self, mu: Values, sigma: Values, n: int, dtype: str, sample_offset: int) -> Array:
        generator = multisample.Generator(self.seed)
        generator.state = {**generator.state, "offset": self.offset}
        if isinstance(mu, float):
            mu = np.full(self.d, mu)
        with np.errstate(over="ignore"):
            got = multisample.sample(
                mu, sigma, n, backend="cpu", dtype=dtype, generator=generator, noise=self.noise,
                dim_offset=self.dim_offset, sample_offset=sample_offset,
            )  # fmt: skip
        return np.asarray(got)

    def usual_cut(self) -> geometry.Geometry:
        """As it is for a GPU."""
        cheap = self.noise == "shared" or (self.fast_math and self.dtype != "float64")
        return geometry.geometry(
            self.d, self.n, self.dtype, self.byte_strides(), self.placed()[0] % 32,
            -1 if "first_column" in self.in_memory else self.sample_offset % 8, cheap, self.noise == "shared",
            self.antithetic,
        )[0]  # fmt: skip

    def chosen_cut(self) -> geometry.Geometry:
        g = self.usual_cut()
        if self.cut is None:
            return g
        groups = _ceil_div(g.skip + self.n, 8 if self.antithetic else 4)
        if STORES[g.stores].startswith("transposed"):
            return recut(self.cut, g, groups, geometry.staged_slots_of(self.size, self.antithetic))
        changed = g._replace(**self.cut(g))
        rows, lanes, shift = changed.rows_per_pass, changed.groups_per_pass, changed.interleave_log2
        threads = _ceil_div(lanes * rows, 32) * 32
        bands = _ceil_div(_ceil_div(self.d, changed.band_rows), 1 << shift) << shift
        columns = _ceil_div(groups, changed.steps * lanes)
        return changed._replace(
            threads=threads,
            one_by_groups=_ceil_div(1 << 20, lanes),
            one_by_rows=_ceil_div(1 << 20, rows),
            chunk=changed.chunk if changed.chunk != g.chunk else threads // rows * rows,
            pitch=threads // rows | 1,
            blocks_per_band=columns,
            blocks=bands * columns,
            row_step=self.byte_strides()[0] // self.size * rows << shift,
        )

    def packed(self) -> bytes:
        first, size = self.placed()
        vectors = [_placed(values) for values in self.vectors()]
        values = {
            "seed": self.seed, "offset": self.offset, "first_row": self.dim_offset, "first_column": self.sample_offset,
        }  # fmt: skip
        words = {
            name: Word(value ^ 0x100000005, 8) if name in self.in_memory else Word(value)
            for name, value in values.items()
        }
        draw = a_draw(
            self.d, self.n, self.dtype, mu=vectors[0][0], sigma=vectors[1][0], matrix=first,
            strides=self.byte_strides(), common_noise=self.noise == "shared", antithetic=self.antithetic,
            fast_math=self.fast_math, device=0, **words,
        )  # fmt: skip
        cut = _GEOMETRY.pack(*self.chosen_cut())
        head = _CASE.pack(
            pack(draw), len(vectors[0][1]), len(vectors[1][1]), size, *values.values(), self.backwards,
            self.cut is not None, cut,
        )  # fmt: skip
        return head + vectors[0][1] + vectors[1][1]

    def check(self, cut: geometry.Geometry, advanced: int, out: Array, writes: Array) -> None:
        """Every element written once and right, and nothing else."""
        assert advanced == (self.offset + 1) % 2**64, self
        first, _ = self.placed()
        strides = self.byte_strides()
        shape = (self.d, self.n)
        assert cut == self.chosen_cut(), self
        counted = np.ndarray(shape, np.uint8, writes, first // self.size, tuple(s // self.size for s in strides))
        right = np.full_like(out, _POISON)
        np.ndarray(shape, f"u{self.size}", right, first, strides)[...] = self.expected()
        got, wanted = (np.ndarray(shape, f"u{self.size}", x, first, strides) for x in (out, right))
        wrong = np.argwhere(got != wanted)
        assert len(wrong) == 0, (self, cut, f"{len(wrong)} wrong", wrong[:5].tolist(), wrong[-1].tolist())
        assert np.array_equal(out, right), (self, cut, "outside the output")
        often = np.argwhere(counted != 1)
        assert len(often) == 0, (self, cut, f"{len(often)} not written once", often[:5].tolist(), int(counted.max()))
        assert int(writes.sum(dtype=np.int64)) == self.d * self.n, (self, cut)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _placed(values: Values) -> tuple[Vector | float, bytes]:
    """A vector at its place in memory of so many bytes, or a number; and that memory."""
    if isinstance(values, float):
        return values, b""
    (stride,), size = values.strides, values.itemsize
    reach = stride * (len(values) - 1)
    memory = np.frombuffer(bytearray(b"\x7f" * (abs(reach) + size)), np.uint8)
    first = max(0, -reach)
    np.ndarray(values.shape, values.dtype, memory, first, values.strides)[...] = values
    return Vector(first, stride, 0.0, ElementType[values.dtype.name]), memory.tobytes()


def sources() -> dict[str, str]:
    """The texts of all C++ and CUDA files, by their path below csrc."""
    root = csrc_files.folder()
    return {
        path.relative_to(root).as_posix(): path.read_text()
        for path in root.rglob("*")
        if path.suffix in (".cpp", ".cu", ".cuh", ".h")
    }


def build_runner(folder: Path, *options: str) -> Path:
    """A program that runs kernels."""
    # The one word of CUDA that no macro can stand for: shared memory is one for all threads, and filled with garbage
    # before each block.
    ids = itertools.count()
    for name in ("cuda/rows.cuh", "cuda/columns.cuh"):
        source = (csrc_files.folder() / name).read_text()
        source = re.sub(
            r"__shared__ ([^;]+?) (\w+)((?:\[[^;]+?\])+);",
            lambda match: f"auto& {match[2]} = cuda_shim::shared<{match[1]}{match[3]}, {next(ids)}>();",
            source,
        )
        assert "__shared__" not in source
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(source)
    assert next(ids) == 5
    program = folder / "run_kernel"
    command = [
        "g++", "-std=c++17", *options, "-g1", "-ffp-contract=off", "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas",
        f"-I{folder}", f"-I{csrc_files.folder()}", f"-I{SHIM}", "-o", str(program), str(SHIM / "run_kernel.cpp"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * SECONDS)
    assert done.returncode == 0, done.stderr[-5000:]
    return program


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runner of kernels whose seed and window are parameters."""
    return build_runner(tmp_path_factory.mktemp("kernel"), "-O1")


@pytest.fixture(scope="module")
def origin_runner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runner of kernels that read seed and window from memory; to optimize them would take three minutes."""
    return build_runner(tmp_path_factory.mktemp("origin_kernel"), "-O0", "-DORIGIN_IN_MEMORY")


def run(runner: Path, cases: Iterable[Case]) -> collections.Counter[str]:
    """Run and check them all; how often each way to store was taken."""
    cases = list(cases)
    done = subprocess.run(
        [str(runner)], input=b"".join(case.packed() for case in cases), capture_output=True, timeout=SECONDS,
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
    )  # fmt: skip
    # What a sanitizer or the shim found. AddressSanitizer warns that it does not know fibers; it is told of each.
    assert done.returncode in (0, -6, 1), done.stderr.decode()[:4000]
    results, at, taken = done.stdout, 0, collections.Counter[str]()
    for case in cases:
        _, size = case.placed()
        begin = at + _RESULT.size
        after = begin + size + size // case.size
        if len(results) < after:  # Here it ended.
            pytest.fail(f"{case}\n{case.chosen_cut()}\n{done.stderr.decode()[:4000]}", pytrace=False)
        packed_cut, advanced = _RESULT.unpack_from(results, at)
        cut = geometry.Geometry(*_GEOMETRY.unpack(packed_cut))
        out = np.frombuffer(results, np.uint8, size, begin)
        case.check(cut, advanced, out, np.frombuffer(results, np.uint8, size // case.size, begin + size))
        taken[STORES[cut.stores]] += 1
        at = after
    assert len(results) == at
    assert done.returncode == 0, done.stderr.decode()[:4000]
    return taken


def thinned(cases: list[Case], dtype: str) -> list[Case]:
    """All for float32, and every third for the other types, which are the same templates."""
    return cases if dtype == "float32" else cases[sorted(DTYPES).index(dtype) % 3 :: 3]


LENGTHS = [*range(1, 41), *range(127, 131), *range(511, 514), *range(1023, 1030), *range(1152, 1158), 2049]
LENGTHS += [2304, 2307, 2309]


@requires_gxx
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_draws_every_shape(runner: Path, dtype: str, noise: str) -> None:
    cases: list[Case] = []
    for n in LENGTHS:
        # Bands that are full and not, and one row.
        for d in (1, 2, 3, 7, 40 if n > 40 else 300):
            k = len(cases)
            common: dict[str, Any] = {"antithetic": (k + n) % 2 == 1, "seed": k}
            cases.append(
                Case(d, n, dtype, noise, **common, sample_offset=k % 9, dim_offset=k % 3, backwards=k // 2 % 2 == 1)
            )
            if d < 10:
                cases.append(Case(d, n, dtype, noise, **common, sample_offset=8 * k, fast_math=k // 2 % 2 == 0))
    taken = run(runner, thinned(cases, dtype))
    assert min(taken[name] for name in ("aligned", "shifted", "staged")) > 15, taken


WIDTHS = [
    *range(2, 20),
    31,
    32,
    33,
    64,
    65,
    *range(127, 131),
    *range(255, 259),
    *range(287, 291),
    512,
    513,
    577,
    1145,
    1200,
]


@requires_gxx
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_draws_every_shape_with_dimensions_side_by_side(runner: Path, dtype: str, noise: str) -> None:
    cases: list[Case] = []
    for d in WIDTHS:
        # Groups that are whole and not, and bands of them.
        for n in (2, 4, 7, 8, 16, 29, 61, 150 if d > 40 else 1100):
            k = len(cases)
            cases.append(
                Case(
                    d, n, dtype, noise, antithetic=(k + d) % 2 == 1, seed=k, sample_offset=k % 9, dim_offset=k % 3,
                    strides=(1, d + 1 + k % 4), misalignment=k % 5, fast_math=k % 3 == 0, backwards=k // 2 % 2 == 1,
                )
            )  # fmt: skip
    assert {STORES[case.usual_cut().stores] for case in cases} == {"transposed"}
    run(runner, thinned(cases, dtype))


@requires_gxx
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_draws_to_every_address_and_padded_rows(runner: Path, dtype: str, noise: str) -> None:
    cases: list[Case] = []
    lengths = (1, 3, 4, 8, 10, 37, 120, 128, 509, 512, 513, 516, 1021, 1024, 1028, 1029, 1149, 1152, 1156, 1500, 2304)
    for index, n in enumerate(lengths):
        for misalignment, pad in itertools.product(range(8 // (2 if dtype in ("float32", "float64") else 1)), range(5)):
            k = len(cases)
            # Those of an antithetic group are at the same place for every other offset.
            common: dict[str, Any] = {
                "antithetic": (index + misalignment + pad) % 2 == 1, "seed": k, "sample_offset": (k // 3 + n) % 8,
                "misalignment": misalignment, "backwards": k % 2 == 1,
            }  # fmt: skip
            cases.append(Case((1, 2, 5, 9)[(k + n) % 4], n, dtype, noise, strides=(n + pad, 1), **common))
            if n < 600 and pad < 3:
                cases.append(Case(n, (2, 5, 9, 31)[(k + n) % 4], dtype, noise, strides=(1, n + pad), **common))
            if n < 140:
                cases.append(Case(n, (31, 2, 5, 9)[(k + n) % 4], dtype, noise, strides=(1, n), **common))
    taken = run(runner, thinned(cases, dtype))
    assert min(taken[name] for name in STORES) > 10, taken


@requires_gxx
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_beyond_the_last_column_write_nothing(runner: Path, dtype: str) -> None:
    """They would be the first ones of the next row: of columns that are inside, and so as if they had them all.

    Where dimensions lie side by side, those beyond the last one would be the first ones of the next column.
    """
    cases: list[Case] = []
    for n in (132, 516, 520, 636, 640, 644, 1024, 1028, 1148, 1152, 2312):
        for pad, misalignment, rows in itertools.product((0, 1, 4), (0, 1), (1, 3)):
            k = len(cases)
            common: dict[str, Any] = {
                "antithetic": (pad + misalignment + k // 12) % 2 == 1, "misalignment": misalignment,
                "cut": lambda g, rows=rows: {"band_rows": rows * g.rows_per_pass},
            }  # fmt: skip
            cases.append(Case(6, n, dtype, strides=(n + pad, 1), **common))
            if n < 1000:
                cases.append(Case(n, 45, dtype, strides=(1, n + pad), **common))
            if n < 600:
                short = n % 97 + 1
                cases.append(Case(short, 45, dtype, strides=(1, short), **common))
    assert {STORES[case.usual_cut().stores] for case in cases} == set(STORES)
    run(runner, cases)


def layouts(d: int, n: int) -> dict[str, tuple[int, int]]:
    return {
        "rows backwards": (-n, 1),
        "padded rows backwards": (-(n + 3), 1),
        "rows with gaps, backwards": (-(n + 8), 1),
        "Fortran": (1, d),
        "Fortran with gaps": (1, d + 3),
        "Fortran, columns backwards": (1, -d),
        "Fortran, both backwards": (-1, -d),
        "columns backwards": (n, -1),
        "every second column": (2 * n, 2),
        "every third row and column, backwards": (-9 * n, 3),
        "every second row, Fortran": (2, 2 * d),
    }


@requires_gxx
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_draws_to_any_strides(runner: Path, dtype: str, noise: str) -> None:
    cases: list[Case] = []
    for d, n in [(1, 1), (1, 9), (5, 1), (3, 7), (9, 64), (40, 13), (6, 516), (4, 700), (3, 1028), (5, 1157), (300, 9)]:
        for strides, antithetic in itertools.product(layouts(d, n).values(), (False, True)):
            k = len(cases)
            cases.append(
                Case(
                    d, n, dtype, noise, antithetic, seed=k, sample_offset=k // 2 % 8, strides=strides,
                    misalignment=k // 2 % 3,
                )
            )  # fmt: skip
    taken = run(runner, cases)
    assert min(taken[name] for name in STORES) > 2, taken


@requires_gxx
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_draws_windows_however_far_out(runner: Path, dtype: str, noise: str) -> None:
    cases: list[Case] = []
    for (d, n), antithetic in itertools.product(
        [(1, 1), (5, 7), (3, 37), (2, 600), (3, 1028), (300, 4), (7, 1157)], (False, True)
    ):
        for row, dim_offset in enumerate((ROWS - d, 2**31 - 1, 12345)):
            last = COLUMNS - n
            for column, sample_offset in enumerate(
                (last, last - 1, last - 2, last - 3, last - 5, 2**33 - 2, 2**32 - 1)
            ):
                k = len(cases)
                cases.append(
                    Case(
                        d, n, dtype, noise, antithetic, dim_offset=dim_offset, sample_offset=sample_offset,
                        seed=(0, 2**32 - 1, 2**32, 2**63 + 11, 2**64 - 1)[k % 5],
                        offset=(0, 1, 2**32 - 1, 2**32, 2**64 - 2, 2**63)[k % 6],
                        strides=(1, d) if (row + column) % 2 else (n, 1),
                    )
                )  # fmt: skip
    run(runner, cases)


@requires_gxx
@pytest.mark.parametrize("dtype", DTYPES)
def test_windows_of_pairs_are_those_of_the_whole_wherever_they_cut_it(runner: Path, dtype: str) -> None:
    """From each column of a group to each, in one group and in several."""
    cases: list[Case] = []
    for first, groups, end in itertools.product(range(8), (0, 1, 3), range(1, 9)):
        n = 8 * groups + end - first
        if n > 0:
            k = len(cases)
            cases.append(
                Case(
                    5, n, dtype, NOISES[k % 2], antithetic=True, sample_offset=8 * k + first,
                    strides=((n, 1), (1, 5), (n + 1, 1), (2 * n, 2), (1, 8))[k % 5], misalignment=k // 5 % 3,
                )
            )  # fmt: skip
    taken = run(runner, cases)
    # A thread keeps one dimension alone of pairs of float64, which is aligned anywhere.
    ways = {"staged", "strided", "transposed", *({"transposed_staged"} if dtype != "float64" else ())}
    assert min(taken[name] for name in ways) > 20, taken


@requires_gxx
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_takes_the_offset_from_memory(runner: Path, dtype: str) -> None:
    """Whatever the draw's own value is; and counted up, it carries."""
    cases: list[Case] = []
    offsets = (0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**64 - 2)
    for (d, n), strides, noise, antithetic in itertools.product(
        [(3, 7), (2, 1100), (1, 1024), (300, 9)], ("rows", "columns", "neither"), NOISES, (False, True)
    ):
        k = len(cases)
        cases.append(
            Case(
                d, n, dtype, noise, antithetic, offset=offsets[(k + k // 6) % 6], in_memory=("offset",),
                misalignment=k // 4 % 2, strides={"rows": (n, 1), "columns": (1, d), "neither": (2 * n, 2)}[strides],
            )
        )  # fmt: skip
    taken = run(runner, cases)
    assert min(taken[name] for name in STORES) > 1, taken


WORDS = ("seed", "offset", "first_row", "first_column")
SOME_WORDS = [words for count in range(1, 5) for words in itertools.combinations(WORDS, count)]


@requires_gxx
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_takes_its_seed_and_its_window_from_memory(origin_runner: Path, dtype: str, noise: str) -> None:
    """Any of the words, with every way to store; whatever the draw's own values are."""
    cases: list[Case] = []
    shapes = [(1, 1), (5, 7), (300, 3), (40, 9), (2, 640), (3, 1028), (7, 1157), (3, 1024), (130, 45), (31, 61)]
    for (d, n), antithetic, place in itertools.product(shapes, (False, True), range(7)):
        k = len(cases)
        strides = ((n, 1), (n, 1), (n + 3, 1), (1, d), (1, d), (1, d + 1 + k % 4), (2 * n, 2))[place]
        # Where the window begins in a group is what the cut does not know, if that is in memory.
        words = (("first_column",), SOME_WORDS[k // 3 % 15], WORDS)[k % 3]
        cases.append(
            Case(
                d, n, dtype, noise, antithetic, seed=2**64 - 1 - k, offset=2**33 + k, in_memory=words,
                dim_offset=(0, 5, ROWS - d)[k // 3 % 3], sample_offset=(k // 3 % 9, COLUMNS - n - k % 8)[k % 2],
                strides=strides, misalignment=k // 2 % 5, backwards=k // 4 % 2 == 1,
            )
        )  # fmt: skip
    # Rows are staged, and written as aligned ones, where only the other words are in memory.
    for k, (d, n, first) in enumerate(itertools.product((1, 9, 70), (3, 10, 37, 128, 520), (0, 2, 8, 16))):
        words = [words for words in SOME_WORDS if "first_column" not in words][k % 7]
        cases.append(Case(d, n, dtype, noise, k % 2 == 1, seed=k, in_memory=words, sample_offset=first, dim_offset=k))
    taken = run(origin_runner, thinned(cases, dtype))
    assert min(taken[name] for name in STORES) > 1, taken


@requires_gxx
def test_the_strided_kernel_takes_words_from_memory_whatever_the_strides(origin_runner: Path) -> None:
    """As torch_ext launches it: cut as for elements one by one."""
    strided = STORES.index("strided")
    cases = [
        Case(
            d, n, dtype, noise, antithetic, seed=d, in_memory=WORDS, dim_offset=n, sample_offset=first,
            strides=(2 * n, 2) if row else (2, 2 * d + 1), misalignment=first,
        )
        for (d, n), dtype, noise, antithetic, row, first in itertools.product(
            [(3, 5), (41, 130), (2, 1157)], DTYPES, NOISES, (False, True), (False, True), (0, 3, 6)
        )
    ]  # fmt: skip
    assert {case.usual_cut().stores for case in cases} == {strided}
    run(origin_runner, cases)


INPUTS: list[Any] = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
INPUTS += [np.dtype(f"{sign}int{width}") for sign in ("", "u") for width in (8, 16, 32, 64)]


@requires_gxx
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_takes_mu_and_sigma_of_every_type_and_any_stride(runner: Path, dtype: str) -> None:
    draw, cases, d = np.random.default_rng(5), [], 37
    for number, kind in enumerate(map(np.dtype, INPUTS)):
        if kind.kind in "iu":
            wide = draw.integers(np.iinfo(kind).min, np.iinfo(kind).max, 3 * d, kind, endpoint=True)
            wide[:2] = np.iinfo(kind).min, np.iinfo(kind).max
        else:
            wide = (draw.normal(size=3 * d) * 10.0 ** draw.integers(-5, 4, 3 * d)).astype(kind)
            wide[:4] = 0.0, -0.0, np.finfo(np.float16).smallest_subnormal, 65504
        spread = np.abs(wide) if kind.kind != "i" else np.maximum(wide, 0)
        vectors: list[tuple[Values, Values]] = [
            (wide[:d], spread[d : 2 * d]),
            (wide[::3], spread[:d][::-1]),
            (wide[d::-1][:d], spread[d::2][:d]),
            (np.broadcast_to(wide[5], (d,)), spread[:d]),
            (wide[:d], np.broadcast_to(spread[6], (d,))),
            (wide[:d], 0.3),
            (-1.1, spread[:d]),
            (wide[:d], np.abs(draw.normal(size=d))),
            (draw.normal(size=d).astype(np.float16), spread[:d]),
            (wide[:d], spread[:d]),
        ]
        for k, (mu, sigma) in enumerate(vectors):
            n = (3, 30, 600)[k % 3]
            for strides in ((n, 1), (1, d)):
                antithetic = (k // 3 + number + (strides[0] == 1)) % 2 == 1
                cases.append(Case(d, n, dtype, NOISES[k % 2], antithetic, seed=k, mu=mu, sigma=sigma, strides=strides))
    # What float32 rounds, also to its subnormals and beyond its largest.
    for number, strides in itertools.product((0.1, 1e-42, 1e-50, -3.4028235677973362e38, 16777217.0), ((5, 1), (1, d))):
        cases.append(Case(d, 5, dtype, mu=number, sigma=np.full(d, 1e-300), strides=strides))
        cases.append(Case(d, 5, dtype, mu=np.full(d, number), sigma=abs(number) / 1e3, strides=strides))
    run(runner, cases)


@requires_gxx
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_draws_many_dimensions_and_long_rows(runner: Path, dtype: str, noise: str) -> None:
    """So many that the geometry for a GPU has several chunks to a block, several runs of columns or several tiles."""
    pairs = noise == "shared"
    chunks = [
        Case(256 * 513 + 5, 2, dtype, noise, not pairs, seed=3),
    ]
    steps = [
        Case(1, 526_333 * (2 if pairs else 1), dtype, noise, pairs, seed=5),
        Case(1, 524_300 * (1 if pairs else 2), dtype, noise, not pairs, sample_offset=3, misalignment=2),
        Case(1, 524_301, dtype, noise, strides=(0, 2), fast_math=True),
    ]
    tiles = [
        Case(131_400, 3, dtype, noise, True, sample_offset=2, strides=(1, 131_401)),
        Case(131_328, 2, dtype, noise, sample_offset=1, strides=(1, 131_328)),
    ]
    for case in chunks:
        assert max(case.usual_cut().band_rows, case.usual_cut().band_groups) > case.usual_cut().chunk, case
    for case in steps:
        assert case.usual_cut().steps > 1, case
    for case in tiles:
        assert case.usual_cut().blocks_per_band > 1, case
    assert {STORES[case.usual_cut().stores] for case in steps} == {"aligned", "shifted", "strided"}
    assert {STORES[case.usual_cut().stores] for case in tiles} == {"transposed"}
    cases = [*chunks, Case(28 * 513 + 9, 33, dtype, noise, pairs, sample_offset=1), *steps, *tiles]
    run(runner, {"float16": cases[::2], "bfloat16": cases[1::2]}.get(dtype, cases))


Cut = Callable[[geometry.Geometry], dict[str, int]]


def other_cuts() -> Iterator[tuple[str, Cut]]:
    """Ways to cut a call that the kernel can take as well, for these ways to store."""
    # More rows to a block, and of them more chunks than one.
    for passes, per_chunk in [(2, 9), (3, 1), (7, 2), (50, 5), (50, 50)]:

        def tall(g: geometry.Geometry, passes: int = passes, per_chunk: int = per_chunk) -> dict[str, int]:
            chunk = min(per_chunk * g.rows_per_pass, g.chunk)
            return {"band_rows": passes * g.rows_per_pass, "chunk": chunk, "steps": 1}

        yield "aligned shifted staged strided transposed transposed_staged", tall
    # Fewer rows side by side.
    yield (
        "aligned shifted staged strided transposed transposed_staged",
        lambda g: {"rows_per_pass": 1, "band_rows": 4, "steps": 1},
    )
    yield "aligned staged strided transposed transposed_staged", lambda g: {
        "rows_per_pass": (g.rows_per_pass + 1) // 2, "band_rows": (g.rows_per_pass + 1) // 2 * 3, "steps": 1,
    }  # fmt: skip
    # Bands that take turns.
    for log2 in (1, 2, 3):
        yield "aligned strided", lambda g, log2=log2: {
            "rows_per_pass": 1, "band_rows": 3, "interleave_log2": log2, "steps": 1,
        }  # fmt: skip
        yield "shifted", lambda g, log2=log2: {"band_rows": 2, "interleave_log2": g.interleave_log2 + log2, "steps": 1}
    # Blocks of other widths, and several runs of columns.
    for lanes, steps in [(32, 1), (64, 2), (96, 5), (288, 3), (160, 2)]:
        yield "aligned shifted strided", lambda g, lanes=lanes, steps=steps: {
            "groups_per_pass": lanes, "rows_per_pass": 1, "band_rows": 5, "steps": steps,
        }  # fmt: skip
    for lanes, steps in [(1, 1), (3, 2), (33, 4), (257, 1), (287, 2)]:
        yield "aligned strided", lambda g, lanes=lanes, steps=steps: {
            "groups_per_pass": lanes, "rows_per_pass": 1, "band_rows": 5, "steps": steps,
        }  # fmt: skip


@requires_gxx
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_do_not_depend_on_how_a_call_is_cut(runner: Path, dtype: str, noise: str) -> None:
    cases: list[Case] = []
    shapes = [(1, 700), (23, 3), (150, 10), (41, 129), (17, 516), (20, 1028), (9, 1157), (6, 2100), (300, 41)]
    for d, n in shapes:
        places = [
            ((n, 1), 0),
            ((n + 1, 1), 0),
            ((n, 1), 1),
            ((n + 2, 1), 2),
            ((2 * n, 2), 0),
            ((1, d + 1), 1),
            ((1, d), 1),
        ]
        for place, (strides, misalignment) in enumerate(places):
            for number, (stores, cut) in enumerate(other_cuts()):
                k = len(cases)
                case = Case(
                    d, n, dtype, noise, (d + place + number) % 2 == 1, seed=k, sample_offset=k // 2 % 8,
                    strides=strides, misalignment=misalignment, cut=cut, backwards=k % 2 == 1,
                )  # fmt: skip
                if STORES[case.usual_cut().stores] in stores.split():
                    cases.append(case)
    taken = run(runner, thinned(cases, dtype))
    assert min(taken[name] for name in STORES) > 5, taken


@requires_gxx
def test_what_the_runner_watches_for_does_not_pass(runner: Path) -> None:
    """An output one element too short for the call, and vectors too short for it."""

    def outcome(**fields: int) -> str:
        case = Case(5, 600)
        draw, *rest = _CASE.unpack_from(case.packed())
        sizes = dict(zip(("mu", "sigma", "out"), rest[:3], strict=True)) | fields
        head = _CASE.pack(draw, *sizes.values(), *rest[3:])
        vectors = b"\1" * (sizes["mu"] + sizes["sigma"])
        done = subprocess.run([str(runner)], input=head + vectors, capture_output=True, timeout=SECONDS)
        return f"{done.returncode} {done.stderr.decode()}"

    whole = Case(5, 600).placed()[1]
    assert outcome().startswith("0 ")
    for fields in ({"mu": 16}, {"sigma": 19}, {"out": whole - _GUARD - 4}):
        assert "AddressSanitizer: heap-buffer-overflow" in outcome(**fields)


# --- Compiled for the GPU -------------------------------------------------------------------------

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")
FAST = {f"{name}.approx.ftz.f32" for name in ("lg2", "sqrt", "cos", "sin")}


def _no_nvrtc() -> str:
    """Why NVRTC cannot be had through CuPy; empty if it can."""
    if importlib.util.find_spec("cupy") is None:
        return "cupy is not installed"
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except Exception as error:  # Whatever a broken installation may do.
        return f"NVRTC cannot be loaded: {error}"
    return ""


requires_nvrtc = pytest.mark.skipif(bool(_no_nvrtc()), reason=_no_nvrtc())


@dataclasses.dataclass
class Compiled:
    log: str
    names: dict[Variant, str]
    """The kernels' names in the object code."""
    advance: str
    """That of the kernel that counts up an offset."""
    code: bytes
    """For a real architecture its machine code, for a virtual one PTX."""


def nvrtc_compile(architecture: str, *options: str, variants: Iterable[Variant] = VARIANTS) -> Compiled:
    """These kernels in one program, which takes half the time of one for each; and the one that counts up an offset."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(cupy_backend.source(), "program.cu", (), ())
    try:
        names = {variant: cupy_backend.kernel_name(KernelKey(*variant, False, 0)) for variant in variants}
        for name in (*names.values(), cupy_backend.ADVANCE_KERNEL):
            nvrtc.addNameExpression(program, name)
        try:
            nvrtc.compileProgram(program, [*cupy_backend.OPTIONS, f"-arch={architecture}", *options])
        except nvrtc.NVRTCError:
            pytest.fail(f"{architecture}: {nvrtc.getProgramLog(program)[:5000]}", pytrace=False)
        code = (nvrtc.getCUBIN if architecture.startswith("sm_") else nvrtc.getPTX)(program)
        lowered = {variant: nvrtc.getLoweredName(program, name) for variant, name in names.items()}
        advance = nvrtc.getLoweredName(program, cupy_backend.ADVANCE_KERNEL)
        return Compiled(
            nvrtc.getProgramLog(program),
            {variant: name.decode() if isinstance(name, bytes) else name for variant, name in lowered.items()},
            advance.decode() if isinstance(advance, bytes) else advance,
            code if isinstance(code, bytes) else code.encode(),
        )
    finally:
        nvrtc.destroyProgram(program)


@requires_nvrtc
def test_nvrtc_compiles_every_kernel_for_every_architecture_without_a_word() -> None:
    """A third of them for each, in turn: the sources do not know for which they are compiled."""
    kernels = [VARIANTS[k % 3 :: 3] for k in range(len(ARCHITECTURES))]
    assert not any("__CUDA_ARCH__" in text for text in sources().values())
    assert len(VARIANTS) == 168
    with ThreadPoolExecutor(2) as pool:
        every = pool.map(
            lambda work: nvrtc_compile(work[0], variants=work[1]), zip(ARCHITECTURES, kernels, strict=True)
        )
        for architecture, variants, compiled in zip(ARCHITECTURES, kernels, every, strict=True):
            assert compiled.log.strip("\0\n ") == "", (architecture, compiled.log[:5000])
            assert len(set(compiled.names.values())) == len(variants)
            assert compiled.code.startswith(b"\x7fELF"), architecture
            for name in (*compiled.names.values(), compiled.advance):
                assert f".text.{name}\0".encode() in compiled.code, (architecture, name)


@pytest.fixture(scope="module")
def ptx() -> dict[str, Compiled]:
    """With contraction, which is NVRTC's default, and a third without."""
    with ThreadPoolExecutor(2) as pool:
        contracted = pool.submit(nvrtc_compile, "compute_90", "--fmad=true")
        as_written = pool.submit(nvrtc_compile, "compute_90", "--fmad=false", variants=VARIANTS[::3])
        return {"contracted": contracted.result(), "as written": as_written.result()}


def bodies_of(compiled: Compiled) -> dict[str, str]:
    """The PTX of each kernel, by its name there."""
    parts = re.split(r"\.entry\s+(\w+)", compiled.code.decode())
    bodies = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert set(bodies) == {*compiled.names.values(), compiled.advance}
    return bodies


@pytest.fixture(scope="module")
def instructions(ptx: dict[str, Compiled]) -> dict[Variant, collections.Counter[str]]:
    """How often each kernel has each PTX instruction, inline assembly included; ``.local`` for such memory."""
    compiled = ptx["contracted"]
    bodies, result = bodies_of(compiled), {}
    for variant, name in compiled.names.items():
        body = re.sub(r"//.*", "", bodies[name])
        found = re.findall(r"(?:^|[;{}])\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)(?=[\s;])", body, re.M)
        result[variant] = collections.Counter(found)
        result[variant][".local"] = len(re.findall(r"\.local\b|__local_depot", body))
        # The expression above sees them all.
        assert result[variant]["ret"] > 0 and sum(result[variant].values()) > 300, variant
    return result


Instructions = dict[Variant, collections.Counter[str]]


@requires_nvrtc
def test_contraction_changes_nothing(ptx: dict[str, Compiled]) -> None:
    """Since every product and sum of floating-point numbers is an intrinsic, nothing is left for a compiler to fuse."""

    def comparable(compiled: Compiled) -> dict[Variant, list[str]]:
        bodies = bodies_of(compiled)
        # Where the next kernel begins differs, and names of constants and labels hold numbers of the compilation.
        return {
            variant: re.sub(r"_ZN\d+_INTERNAL_\w*?multisample|\$L__BB\d+", "", bodies[name])
            .partition("\n}")[0]
            .split("\n")
            for variant, name in compiled.names.items()
        }

    contracted, as_written = comparable(ptx["contracted"]), comparable(ptx["as written"])
    assert {dtype for dtype, *_ in as_written} == set(DTYPES)
    for variant, lines in as_written.items():
        assert any(f"fma.rn.f{64 if variant[0] == 'float64' else 32}" in line for line in lines), variant
        assert lines == contracted[variant], variant


@requires_nvrtc
def test_kernels_do_no_more_than_the_stream_says(instructions: Instructions) -> None:
    assert len(instructions) == 168
    for (dtype, shared, antithetic, fast, stores), found in instructions.items():
        variant = (dtype, shared, antithetic, fast, STORES[stores])
        approximate = {name for name in found if ".approx" in name}
        flushed = {name for name in found if ".ftz" in name}
        assert flushed <= approximate, (variant, flushed)
        if dtype == "float64":
            assert not approximate and found["sqrt.rn.f64"] > 0, variant
        else:
            assert approximate == (FAST if fast else {"rsqrt.approx.ftz.f32"}), (variant, approximate)
            # float64 comes in alone, as an element of mu or sigma that is rounded at once.
            wide = {name for name in found if ".f64" in name} - {"cvt.rn.f32.f64"}
            assert all(name.startswith(("ld.", "mov.")) for name in wide), (variant, wide)
        # No function is called, no 64-bit number divided, nothing rounded other than to nearest even.
        odd = {name for name in found if re.match(r"call|div\..*64|rem\..*64|div\..*f32|.*\.r[zmp]i?\.", name)}
        assert not odd, (variant, odd)


@requires_nvrtc
def test_kernels_are_made_of_the_instructions_that_make_them_fast(instructions: Instructions) -> None:
    whole = {
        "float32": r"st\.global\.v4\.[bfu]32",
        "float64": r"st\.global\.v2\.[bfu]64",
        "float16": r"st\.global\.(v4\.[bfu]16|v2\.[bfu]32|[bfu]64)",
    }
    whole["bfloat16"] = whole["float16"]
    for (dtype, shared, antithetic, fast, stores), found in instructions.items():
        variant = (dtype, shared, antithetic, fast, STORES[stores])
        assert found[".local"] == 0, variant
        assert found["mul.wide.u32"] > 0 and not any(name.startswith("mul.hi.") for name in found), variant
        wide_stores = sum(count for name, count in found.items() if re.fullmatch(whole[dtype], name))
        if STORES[stores] == "transposed":
            # All of a thread's dimensions at once, which may be few bytes.
            size = geometry.SIZES[dtype] * geometry.slots_of(geometry.SIZES[dtype])
            piece = {16: r"(v4\.[bfu]32|v2\.[bfu]64)", 8: r"(v4\.[bfu]16|v2\.[bfu]32|[bfu]64)"}
            assert any(re.fullmatch(rf"st\.global\.{piece[size]}", name) for name in found), variant
        else:
            assert (wide_stores > 0) == (STORES[stores] in ("aligned", "shifted", "transposed_staged")), variant
        if dtype != "float64":
            if STORES[stores] == "aligned":
                assert wide_stores >= 8, variant  # rows in one turn of the loop
            # Two radii to a group, which is four columns or eight. If noise is shared they are made before any row, in
            # two places: for the first run of columns, and for each other (in one where dimensions lie side by side);
            # and in the loop if it is not.
            radii = found["sqrt.approx.ftz.f32" if fast else "rsqrt.approx.ftz.f32"]
            if shared:
                assert radii == (2 if STORES[stores].startswith("transposed") else 4), (variant, radii)
            elif STORES[stores].startswith("transposed"):
                # The dimensions of a thread; if they are not staged, in a loop for each way that columns are aligned.
                size = geometry.SIZES[dtype]
                slots = geometry.staged_slots_of(size, antithetic)
                if STORES[stores] == "transposed":
                    slots = geometry.slots_of(size) ** 2
                assert radii == 2 * slots, (variant, radii)
            else:
                assert radii >= (1 if antithetic else 2) * wide_stores, (variant, radii)


@pytest.fixture(scope="module")
def nvcc() -> str:
    home = toolchain.cuda_home()
    if home is None:
        pytest.skip("nvcc is neither on the PATH nor in CUDA_HOME")
    return str(home / "bin" / "nvcc")


def test_nvcc_compiles_the_extension_without_a_warning_and_without_spills(nvcc: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from torch.utils import cpp_extension

    command = [
        nvcc, *build.LIBRARIES["cuda"].flags, "-arch=sm_90", "-Xptxas", "-v", "-Xcompiler", "-fPIC,-Wall",
        f"-I{csrc_files.folder()}", *(f"-isystem={path}" for path in cpp_extension.include_paths()),
        "-c", str(csrc_files.folder() / "torch/cuda.cu"), "-o", str(tmp_path / "torch_cuda.o"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-5000:]
    assert not re.search("warning", output, re.I), output[:5000]
    kernels = re.findall(r"Compiling entry function '(\w+)' for 'sm_90'", output)
    # Kernels that read the seed or the window from memory have strided stores only.
    from_memory = [variant for variant in VARIANTS if STORES[variant[-1]] == "strided"]
    assert sum("sample_kernel" in name for name in kernels) == len(VARIANTS) + len(from_memory)
    frames = re.findall(
        r"properties for (\w+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", output
    )
    assert len(frames) >= len(VARIANTS)
    spilled = [frame for frame in frames if any(map(int, frame[1:]))]
    assert not spilled, spilled


def test_launches_report_their_own_errors_and_no_others() -> None:
    """The runtime's last error may be one that another library has left behind, and is asked for only to drop it."""
    texts = sources()
    assert {"cuda/launch.cuh", "cuda/gradient_launch.cuh", "torch/cuda.cu"} <= texts.keys()
    code = {name: re.sub(r"//[^\n]*", "", text) for name, text in texts.items()}
    assert not [name for name, text in code.items() if "<<<" in text or "cudaPeekAtLastError" in text]
    asked = {name: text.count("cudaGetLastError") for name, text in code.items() if "cudaGetLastError" in text}
    assert asked == {"cuda/launch.cuh": 1}
    assert re.search(r"if \(error != cudaSuccess\) cudaGetLastError\(\);\n  return error;", code["cuda/launch.cuh"])
    # Every launch goes through the one function that returns the launch's error.
    launches = {name: len(re.findall(r"\bcudaLaunch\w*", text)) for name, text in code.items() if "cudaLaunch" in text}
    assert launches == {"cuda/launch.cuh": 1}
    assert "return taken(cudaLaunchKernel(" in code["cuda/launch.cuh"]


# --- Device functions on the CPU ------------------------------------------------------------------


@requires_gxx
@pytest.mark.parametrize(
    "header",
    ["stream/arithmetic.h", "stream/words.h", "stream/normals.h", "stream/rounding.h", "draw.h", "cuda/geometry.h"],
)
def test_headers_compile_alone_for_the_cpu(header: str) -> None:
    command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{csrc_files.folder()}"]
    done = subprocess.run(
        [*command, "-include", header, "-x", "c++", os.devnull], capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr[-5000:]


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    made = tmp_path_factory.mktemp("functions") / "functions.so"
    command = ["g++", "-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    command += [f"-I{csrc_files.folder()}", str(SHIM / "host_functions.cpp"), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-5000:]
    return ctypes.CDLL(str(made))


def apply(function: Any, out: Any, inputs: Iterable[Array], *flags: int) -> Array:
    """Of `out`'s type and shape, from arrays of as many elements, or of four times as many."""
    result = np.empty(*out)
    arrays = [np.ascontiguousarray(array) for array in inputs]
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (*arrays, result)]
    function(ctypes.c_uint64(result.shape[0]), *pointers[:-1], *flags, pointers[-1])
    return result


def cpp_words(functions: ctypes.CDLL, seed: Any, offset: Any, i: Any, g: Any, *, fine: bool = False) -> Array:
    places = [np.asarray(seed, np.uint64), np.asarray(offset, np.uint64), np.asarray(i, np.uint32)]
    places.append(np.asarray(g, np.uint32))
    return apply(functions.draw_words, ((len(places[0]), 4), np.uint32), places, fine)


def cpp_normals(functions: ctypes.CDLL, dtype: str, w: Array, fine: Array | None = None) -> Array:
    if dtype == "float32":
        return apply(functions.transform_f32, (w.shape, np.float32), [w])
    assert fine is not None
    return apply(functions.transform_f64, (w.shape, np.float64), [w, fine])


def load(name: str, key: str) -> Any:
    return json.loads((Path(__file__).parent / "data" / name).read_text())[key]


def random_places(size: int) -> list[Array]:
    draw = np.random.default_rng(7)
    seed, offset = (draw.integers(2**64 - 1, size=size, dtype=np.uint64, endpoint=True) for _ in range(2))
    i, g = (draw.integers(2**32 - 1, size=size, dtype=np.uint64, endpoint=True) for _ in range(2))
    for values, edges in [(seed, (0, 2**32 - 1, 2**32, 2**64 - 1)), (offset, (0, 1, 2**32, 2**64 - 1))]:
        values[: size // 2] = draw.choice(np.array(edges, np.uint64), size // 2)
    for values in (i, g):
        values[: size // 3] = draw.choice(np.array([0, 1, 2**31, 2**32 - 1], np.uint64), size // 3)
    return [seed, offset, i, g]


@requires_gxx
def test_words_are_the_published_and_the_known_ones(functions: ctypes.CDLL) -> None:
    published = load("words.json", "philox4x32_10")
    assert len(published) == 3
    counters = [[int(text, 16) for text in entry["counter"]] for entry in published]
    keys = [[int(text, 16) for text in entry["key"]] for entry in published]
    seeds = [k0 ^ 0x6D756C74 | (k1 ^ 0x73616D70) << 32 for k0, k1 in keys]
    got = cpp_words(
        functions, seeds, [c[2] | c[3] << 32 for c in counters], [c[1] for c in counters], [c[0] for c in counters]
    )
    assert got.tolist() == [[int(text, 16) for text in entry["words"]] for entry in published]
    known = load("words.json", "stream")
    got = cpp_words(functions, *([entry[name] for entry in known] for name in ("seed", "offset", "i", "g")))
    assert got.tolist() == [[int(text, 16) for text in entry["words"]] for entry in known]


@requires_gxx
def test_words_equal_the_reference(functions: ctypes.CDLL) -> None:
    places = random_places(2000)
    coarse, fine = (cpp_words(functions, *places, fine=fine).tolist() for fine in (False, True))
    for place, words, fine_words in zip(zip(*map(np.ndarray.tolist, places), strict=True), coarse, fine, strict=True):
        assert tuple(words) == stream.words(*place), place
        pairs = tuple(high << 32 | low for high, low in zip(words, fine_words, strict=True))
        assert [pairs[0:2], pairs[2:4]] == [stream.pair_f64(*place[:3], 4 * place[3] + k) for k in (0, 2)], place


@requires_gxx
def test_normals_are_the_known_ones(functions: ctypes.CDLL) -> None:
    pairs = np.array([[int(text, 16) for text in pair] for pair in load("transform_f32.json", "pairs")], np.uint32)
    got = cpp_normals(functions, "float32", pairs[:, [0, 1, 0, 1]])
    expected = pairs[:, 2:].copy().view(np.float32)
    assert np.array_equal(got[:, :2], expected)
    assert np.array_equal(got[:, 2:], expected)
    same = (got[:, :2].copy().view(np.uint32) == pairs[:, 2:]) | (expected == 0)
    assert same.all()
    entries = load("normals_f32.json", "normals")
    places = [np.array([entry[name] for entry in entries], np.uint64) for name in ("seed", "offset", "i", "j")]
    columns = (places[3] % 4).astype(np.int64)[:, None]
    words = cpp_words(functions, *places[:3], places[3] // 4)
    z = np.take_along_axis(cpp_normals(functions, "float32", words), columns, 1)[:, 0]
    assert z.view(np.uint32).tolist() == [int(entry["bits"], 16) for entry in entries]


@requires_gxx
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_normals_equal_those_of_the_cpu_backend(functions: ctypes.CDLL, dtype: str) -> None:
    """Which test_normals.py holds against the exact reference: in whole rows, and a little against that itself."""
    for place in zip(*map(np.ndarray.tolist, (x[:60] for x in random_places(180))), strict=True):
        seed, offset, i, g = place
        offset = min(offset, 2**64 - 2)
        columns = np.arange(g, min(g + 4000, 2**32), dtype=np.uint64)
        row = [np.full(len(columns), value, np.uint64) for value in (seed, offset, i)]
        fine = cpp_words(functions, *row, columns, fine=True)
        z = cpp_normals(functions, dtype, cpp_words(functions, *row, columns), fine).ravel()
        generator = multisample.Generator(seed)
        generator.state = {**generator.state, "offset": offset}
        got = multisample.sample(
            [-0.0], [1.0], len(z), backend="cpu", generator=generator, dtype=dtype, dim_offset=i, sample_offset=4 * g
        )
        width = f"u{z.itemsize}"
        assert np.array_equal(z.view(width), np.asarray(got)[0].view(width)), (seed, offset, i, g)
        exact = stream.normal_f32 if dtype == "float32" else stream.normal_f64
        assert z.view(width)[:4].tolist() == [exact(seed, offset, i, 4 * g + k) for k in range(4)]


@requires_gxx
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_narrow_number_is_widened_exactly_and_comes_back(functions: ctypes.CDLL, dtype: str) -> None:
    patterns = np.arange(2**16).astype(np.uint16)
    wide = apply(getattr(functions, f"widen_{dtype}"), (2**16, np.float32), [patterns])
    with np.errstate(invalid="ignore"):
        expected = patterns.view(DTYPES[dtype]).astype(np.float32)
    number = ~np.isnan(expected)
    assert np.array_equal(wide[number].view(np.uint32), expected[number].view(np.uint32))
    assert np.isnan(wide[~number]).all()
    assert np.array_equal(narrowed(functions, dtype, wide)[number], patterns[number])


def narrowed(functions: ctypes.CDLL, dtype: str, x: Array) -> Array:
    return apply(getattr(functions, f"narrow_{dtype}"), (len(x), np.uint16), [x])


@requires_gxx
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrowing_rounds_as_numpy_and_the_cpu_backend_do(functions: ctypes.CDLL, dtype: str) -> None:
    values = np.arange(2**16).astype(np.uint16).view(DTYPES[dtype]).astype(np.float32)
    exact = np.sort(values[np.isfinite(values)].astype(np.float64))
    last = 2 * exact[-1] - exact[-2]
    exact = np.concatenate(([-last], exact, [last]))
    middles = ((exact[1:] + exact[:-1]) / 2).astype(np.float32)
    infinity = np.float32(np.inf)
    draw = np.random.default_rng(8)
    patterns = draw.integers(2**32, size=1 << 20, dtype=np.uint64).astype(np.uint32)
    special = [0x7F800000, 0xFF800000, 0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0xFFFFFFFF, 0x7F7FFFFF, 0x80000000, 1]
    x = np.concatenate(
        (
            middles, np.nextafter(middles, infinity), np.nextafter(middles, -infinity), patterns.view(np.float32),
            draw.standard_normal(1 << 20, np.float32), np.array(special, np.uint32).view(np.float32),
            np.arange(2**14, dtype=np.uint32).view(np.float32),
        )
    )  # fmt: skip
    with np.errstate(all="ignore"):
        expected = x.astype(DTYPES[dtype]).view(np.uint16)
    got, nan = narrowed(functions, dtype, x), np.isnan(x)
    wrong = np.flatnonzero((got != expected) & ~nan)
    assert len(wrong) == 0, [(x[k].hex(), hex(got[k]), hex(expected[k])) for k in wrong[:5]]
    # A nan stays one, and it is the one of the cpu backend.
    cpu = {"float16": narrow.to_float16, "bfloat16": narrow.to_bfloat16}[dtype]
    narrow_one = njit(lambda number: cpu(number))
    assert got[nan][:100].tolist() == [int(narrow_one(number)) for number in x[nan][:100]]


def test_cupys_program_is_another_one_when_a_header_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # CuPy's cache goes by the program's text alone, and so the text names what the headers contain.
    before = cupy_backend.source.__wrapped__()
    sources = tmp_path / "csrc"
    shutil.copytree(csrc_files.folder(), sources)
    monkeypatch.setattr(csrc_files, "folder", lambda: sources)
    assert cupy_backend.source.__wrapped__() == before
    header = sources / "stream/normals.h"
    header.write_text(header.read_text() + "// Changed.\n")
    assert cupy_backend.source.__wrapped__() != before
