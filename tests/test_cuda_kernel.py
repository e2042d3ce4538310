"""The Python kernel, proved where there is no GPU: what whole grids of it write, beside what the cpu backend draws.

Bit for bit, with every access to memory watched: see emulated_gpu.py.
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
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import emulated_gpu as gpu
import ml_dtypes
import numpy as np
import pytest
from draws import WORDS, a_draw, with_words_in_memory
from transposed_cuts import recut

import multisample
from multisample.backends.draw import SIZES, Draw, Word, pack
from multisample.backends.kernels.cuda import columns as cuda_transposed
from multisample.backends.kernels.cuda import group as cuda_group
from multisample.backends.kernels.cuda import kernel as cuda_kernel
from multisample.backends.kernels.cuda import rows as cuda_rows
from multisample.backends.kernels.cuda import stores as cuda_stores
from multisample.backends.kernels.cuda.geometry import (
    KERNEL_STORES,
    PACKED_GEOMETRY,
    Geometry,
    geometry,
    slots_of,
    staged_slots_of,
)
from multisample.backends.launch import CONFIGURATION_SIZE, KernelKey
from multisample.backends.numba import NumbaBackend
from multisample.backends.system import cuda_driver

pytestmark = pytest.mark.skipif(not gpu.AVAILABLE, reason="the C library has no makecontext")
requires_numba_cuda = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda is not installed"
)

Array = np.ndarray[Any, Any]
Values = Array | float
Cut = Callable[[Geometry], dict[str, int]]

DTYPES: dict[str, Any] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
ROWS, COLUMNS = 2**32, 2**34
GUARD, POISON = 256, 0xC3


class Variant(NamedTuple):
    """What a kernel is compiled for."""

    dtype: str
    noise: str
    stores: str
    antithetic: bool = False
    fast_math: bool = False
    origin_in_memory: bool = False


def variants(dtype: str, noise: str, *stores: str, antithetic: bool = False) -> list[Variant]:
    return [Variant(dtype, noise, way, antithetic) for way in stores or KERNEL_STORES]


# To compile one takes two seconds. Of what is the same for several, not every combination is here.
VARIANTS = [
    *variants("float32", "independent"),
    *variants("float32", "shared"),
    *variants("float64", "independent"),
    *variants("float64", "shared", "kStaged", "kTransposed", "kTransposedStaged"),
    *variants("float16", "independent"),
    *variants("bfloat16", "independent", "kAligned"),
    *variants("bfloat16", "shared", "kStaged"),
    *variants("float32", "independent", antithetic=True),
    *variants("float32", "shared", "kAligned", "kTransposed", "kTransposedStaged", antithetic=True),
    *variants("float64", "independent", "kAligned", "kShifted", "kStaged", "kTransposed", antithetic=True),
    *variants("float16", "independent", "kAligned", "kShifted", "kTransposed", antithetic=True),
]


# Those that read the seed, the first row or the first column from memory.
ORIGIN = [
    variant._replace(origin_in_memory=True)
    for variant in (
        *variants("float32", "independent"),
        *variants("float32", "shared", "kStrided", "kTransposedStaged"),
        *variants("float64", "independent", "kShifted", "kTransposed"),
        *variants("float16", "independent", "kShifted", "kStrided", "kTransposed", antithetic=True),
    )
]


def named(variant: Variant) -> str:
    flags = [name for name in ("antithetic", "fast_math", "origin_in_memory") if getattr(variant, name)]
    return "-".join([*variant[:3], *flags])


each_variant = pytest.mark.parametrize("variant", VARIANTS, ids=named)


@functools.cache
def compiled(variant: Variant) -> Any:
    dtype, noise, stores, antithetic, fast_math, origin_in_memory = variant
    # Loops that are unrolled eight times take long to compile, and so are unrolled twice for 16 bits.
    unroll = {} if SIZES[dtype] > 2 else {way: min(turns, 2) for way, turns in cuda_rows._UNROLL.items()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(cuda_rows._UNROLL, unroll))
        for module in (cuda_group, cuda_kernel, cuda_rows, cuda_stores, cuda_transposed):
            stack.enter_context(mock.patch.object(module, "inline", gpu.once))
        kernel = cuda_kernel.sample_kernel(
            gpu, dtype, noise == "shared", antithetic, fast_math, KERNEL_STORES.index(stores), origin_in_memory
        )
        return gpu.compile_kernel(kernel)


@dataclasses.dataclass
class Case:
    """A call, where its output lies, and how it is to be cut if not as it is for a GPU."""

    d: int
    n: int
    dtype: str = "float32"
    noise: str = "independent"
    antithetic: bool = False
    fast_math: bool = False
    seed: int = 1
    offset: int = 0
    in_memory: tuple[str, ...] = ()
    """The words that are in memory: seed, offset, first_row, first_column. The draw has other values."""
    dim_offset: int = 0
    sample_offset: int = 0
    strides: tuple[int, int] | None = None
    """Of the output, in elements; contiguous rows by default."""
    misalignment: int = 0
    """How many elements behind an aligned address the lowest one of the output is."""
    mu: Values | None = None
    sigma: Values | None = None
    cut: Cut | None = None
    """Fields of the geometry to change; what follows from others is done again."""
    backwards: bool = False

    @property
    def size(self) -> int:
        return SIZES[self.dtype]

    def byte_strides(self) -> tuple[int, int]:
        rows, columns = self.strides or (self.n, 1)
        return rows * self.size, columns * self.size

    def memory(self) -> tuple[Array, Array]:
        """Memory that nobody has written to, and the output in it."""
        reach = [stride * (length - 1) for stride, length in zip(self.byte_strides(), (self.d, self.n), strict=True)]
        lowest = GUARD + self.misalignment * self.size
        size = lowest + sum(map(abs, reach)) + self.size + GUARD
        allocated = np.full(size + 256, POISON, np.uint8)
        memory = allocated[-allocated.ctypes.data % 256 :][:size]
        first = lowest - sum(r for r in reach if r < 0)
        return memory, np.ndarray((self.d, self.n), f"u{self.size}", memory, first, self.byte_strides())

    def vectors(self) -> tuple[Values, Values]:
        draw = np.random.default_rng(self.d * 10007 + self.n)
        real = np.float64 if self.dtype == "float64" else np.float32
        mu = draw.normal(size=self.d).astype(real) * 3 if self.mu is None else self.mu
        sigma = np.abs(draw.normal(size=self.d)).astype(real) if self.sigma is None else self.sigma
        return mu, sigma

    def expected(self) -> Array:
        """From the cpu backend, which has no fast_math; antithetic pairs from plain draws, the mirror by signs."""
        mu, sigma = self.vectors()
        mu = np.full(self.d, mu) if isinstance(mu, float) else mu

        def drawn(mu: Array, begin: int, end: int) -> Array:
            generator = multisample.Generator(self.seed)
            generator.state = {**generator.state, "offset": self.offset}
            with np.errstate(over="ignore"):
                return np.asarray(
                    multisample.sample(
                        mu, sigma, end - begin,
                        backend="cpu", dtype=self.dtype, generator=generator, noise=self.noise,
                        dim_offset=self.dim_offset, sample_offset=begin,
                    )
                )  # fmt: skip

        begin, end = self.sample_offset, self.sample_offset + self.n
        if not self.antithetic:
            return drawn(mu, begin, end)
        window = begin // 2, _ceil_div(end, 2)
        pairs = np.stack((drawn(mu, *window), -drawn(-mu, *window)), -1).reshape(self.d, -1)
        return pairs[:, begin % 2 :][:, : self.n].copy()

    def usual_geometry(self) -> Geometry:
        """As it is for a GPU."""
        cheap = self.noise == "shared" or (self.fast_math and self.dtype != "float64")
        lowest = self.misalignment - sum(
            min(stride, 0) * (length - 1)
            for stride, length in zip(self.strides or (self.n, 1), (self.d, self.n), strict=True)
        )
        return geometry(
            self.d, self.n, self.dtype, self.byte_strides(), lowest * self.size % 32,
            -1 if "first_column" in self.in_memory else self.sample_offset % 8, cheap, self.noise == "shared",
            self.antithetic,
        )[0]  # fmt: skip

    def geometry(self) -> Geometry:
        usual = self.usual_geometry()
        if self.cut is None:
            return usual
        groups = _ceil_div(usual.skip + self.n, 8 if self.antithetic else 4)
        if KERNEL_STORES[usual.stores].startswith("kTransposed"):
            return recut(self.cut, usual, groups, staged_slots_of(self.size, self.antithetic))
        changed = usual._replace(**self.cut(usual))
        rows, lanes, shift = changed.rows_per_pass, changed.groups_per_pass, changed.interleave_log2
        threads = _ceil_div(lanes * rows, 32) * 32
        bands = _ceil_div(_ceil_div(self.d, changed.band_rows), 1 << shift) << shift
        blocks_per_band = _ceil_div(groups, lanes * changed.steps)
        return changed._replace(
            threads=threads,
            one_by_groups=_ceil_div(1 << 20, lanes),
            one_by_rows=_ceil_div(1 << 20, rows),
            chunk=changed.chunk if changed.chunk != usual.chunk else threads // rows * rows,
            pitch=threads // rows | 1,
            blocks_per_band=blocks_per_band,
            blocks=bands * blocks_per_band,
            row_step=self.byte_strides()[0] // self.size * rows << shift,
        )

    def variant(self) -> Variant:
        origin_in_memory = bool(set(self.in_memory) - {"offset"})
        return Variant(
            self.dtype, self.noise, KERNEL_STORES[self.geometry().stores], self.antithetic, self.fast_math,
            origin_in_memory,
        )  # fmt: skip

    def words(self) -> dict[str, int]:
        return dict(zip(WORDS, (self.seed, self.offset, self.dim_offset, self.sample_offset), strict=True))

    def call(self, mu: Values, sigma: Values, out: Array) -> tuple[Draw, Array]:
        """The draw, and the memory of its words."""
        draw = a_draw(
            self.d, self.n, self.dtype, mu=mu, sigma=sigma, matrix=out, common_noise=self.noise == "shared",
            antithetic=self.antithetic, fast_math=self.fast_math, device=0, **self.words(),
        )  # fmt: skip
        return with_words_in_memory(draw, *self.in_memory)

    def draw(self) -> tuple[Array, Array]:
        """The memory and the output in it, drawn by the kernel."""
        memory, out = self.memory()
        cut, (mu, sigma) = self.geometry(), self.vectors()
        draw, words = self.call(mu, sigma, out)
        packed, inputs = pack(draw) + packed_geometry(cut), (mu, sigma, *([words] if self.in_memory else []))
        gpu.launch(compiled(self.variant()), cut.blocks, cut.threads, packed, out, inputs, backwards=self.backwards)
        return memory, out

    def check(self) -> None:
        """Every element is right, and nothing else is written; nor anything twice, which the launch has seen to."""
        cut = self.geometry()
        try:
            memory, out = self.draw()
        except gpu.BrokenKernelError as error:
            pytest.fail(f"{error}\n{self}\n{cut}", pytrace=False)
        expected_memory, expected = self.memory()
        expected[...] = self.expected().view(expected.dtype)
        wrong = np.argwhere(out != expected)
        assert len(wrong) == 0, (self, cut, f"{len(wrong)} wrong", wrong[:5].tolist(), wrong[-1].tolist())
        assert np.array_equal(memory, expected_memory), (self, cut, "outside of the output")


def packed_geometry(cut: Geometry) -> bytes:
    """The C++ struct."""
    packed = struct.pack("15IiIiI", *cut)
    assert len(packed) == PACKED_GEOMETRY
    return packed


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def check_some(variant: Variant, cases: Iterable[Case], number: int) -> None:
    """So many of those that this kernel draws, the same ones each time."""
    there_are = [case for case in cases if case.variant() == variant]
    assert len(there_are) >= min(number, 8), f"only {len(there_are)} cases"
    for case in random.Random(1).sample(there_are, min(number, len(there_are))):
        case.check()


LENGTHS = [*range(1, 17), 31, 33, 64, 127, 128, 130, 255, 509, 512, 513, 516, 640, 1021, 1024, 1025, 1029, 1149, 1152]
LENGTHS += [1153, 1157, 2049, 2100]


def layouts(d: int, n: int) -> list[tuple[int, int]]:
    """Strides of the output."""
    contiguous = [(n, 1)] * 6
    padded = [(n + 1, 1), (n + 3, 1), (n + 4, 1), (n + 8, 1)]
    backwards = [(-n, 1), (-(n + 3), 1), (-(n + 8), 1), (n, -1), (-1, -d)]
    side_by_side = [(1, d), (1, d + 3), (1, -(d + 1)), (1, _ceil_div(d, 16) * 16)]
    return [*contiguous, *padded, *backwards, *side_by_side, (2 * n, 2), (-9 * n, 3)]


@each_variant
def test_every_shape_at_every_address(variant: Variant) -> None:
    """Rows that end within a warp, within the rows of a pass, and within a band; single rows and columns."""
    cases: list[Case] = []
    for n in LENGTHS:
        for d in (1, 2, 5, 19, 300 if n < 40 else 40):
            for strides in layouts(d, n):
                k = len(cases)
                cases.append(
                    Case(
                        d, n, variant.dtype, variant.noise, variant.antithetic, seed=k, dim_offset=k % 3,
                        sample_offset=k // 2 % 9, strides=strides, misalignment=k // 3 % 5, backwards=k % 2 == 1,
                        cut=(None, tall(3, 3), tall(11, 4))[k % 3],
                    )
                )  # fmt: skip
    check_some(variant, cases, 70)


def tall(passes: int, per_chunk: int) -> Cut:
    """Bands of so many passes, and chunks of so many."""

    def cut(g: Geometry) -> dict[str, int]:
        chunk = min(per_chunk * g.rows_per_pass, g.chunk)
        return {"band_rows": passes * g.rows_per_pass, "chunk": chunk, "steps": 1}

    return cut


def other_cuts(stores: str) -> Iterator[Cut]:
    """Ways to cut a call that the kernel can take as well."""
    # More rows to a block, and of them more chunks than one.
    for passes, per_chunk in [(2, 9), (3, 1), (7, 2), (19, 9), (50, 5), (50, 50)]:
        yield tall(passes, per_chunk)
    # Fewer rows side by side.
    yield lambda g: {"rows_per_pass": 1, "band_rows": 4, "steps": 1}
    if stores != "kShifted":
        yield lambda g: {
            "rows_per_pass": (g.rows_per_pass + 1) // 2, "band_rows": (g.rows_per_pass + 1) // 2 * 3, "steps": 1,
        }  # fmt: skip
    if stores == "kStaged":
        return
    # Bands that take turns.
    for log2 in (1, 2, 3) if not stores.startswith("kTransposed") else ():
        if stores == "kShifted":
            yield lambda g, log2=log2: {"band_rows": 2, "interleave_log2": g.interleave_log2 + log2, "steps": 1}
        else:
            yield lambda g, log2=log2: {"rows_per_pass": 1, "band_rows": 3, "interleave_log2": log2, "steps": 1}
    # Blocks of other widths, and several runs of columns.
    whole_warps = [(32, 1), (64, 2), (96, 5), (288, 3), (160, 2)]
    for lanes, steps in whole_warps + ([(1, 1), (3, 2), (33, 4), (287, 2)] if stores != "kShifted" else []):
        yield lambda g, lanes=lanes, steps=steps: {
            "groups_per_pass": lanes, "rows_per_pass": 1, "band_rows": 5, "steps": steps,
        }  # fmt: skip


@each_variant
def test_numbers_do_not_depend_on_how_a_call_is_cut(variant: Variant) -> None:
    """Several chunks of dimensions, several runs of columns, and bands that take turns."""
    cases: list[Case] = []
    shapes = [(1, 700), (23, 3), (150, 10), (41, 129), (17, 516), (60, 700), (20, 1028), (9, 1157), (6, 2100)]
    for d, n in shapes + ([(64, 900), (600, 30), (1200, 20)] if variant.stores.startswith("kTransposed") else []):
        rows = [((n, 1), 0), ((n + 1, 1), 0), ((n, 1), 1), ((n + 2, 1), 2), ((2 * n, 2), 0)]
        for strides, misalignment in [*rows, ((1, d + 1), 1), ((1, _ceil_div(d, 16) * 16), 0), ((1, d), 1)]:
            for cut in other_cuts(variant.stores):
                k = len(cases)
                cases.append(
                    Case(
                        d, n, variant.dtype, variant.noise, variant.antithetic, seed=k, dim_offset=7 * k,
                        sample_offset=k % 8, strides=strides, misalignment=misalignment, cut=cut,
                        backwards=k % 2 == 1,
                    )
                )  # fmt: skip
    check_some(variant, cases, 70)


TRANSPOSED = [variant for variant in VARIANTS if variant.stores.startswith("kTransposed")]


@pytest.mark.parametrize("variant", TRANSPOSED, ids=named)
def test_dimensions_side_by_side_written_at_once_and_through_the_stage(variant: Variant) -> None:
    """Blocks of several passes and chunks, of which the first pass and the last may be cut; several tiles; padding."""
    size, slots = SIZES[variant.dtype], slots_of(SIZES[variant.dtype])
    seen: collections.Counter[str] = collections.Counter()
    for k, (d, (passes, per_chunk)) in enumerate(
        itertools.product(
            (1, 3, 4, 7, 8, 16, 20, 32, 63, 64, 128, 256, 280, 304, 560, 577, 1136, 1152, 1160, 2320),
            ((1, 1), (3, 9), (5, 2), (7, 1)),
        )
    ):
        n = (97, 30, 13)[(d > 60) + (d > 300)] + k % 8
        aligned = _ceil_div(d * size, 16) * 16 // size
        for stride, misalignment in ((d, 0), (aligned, 0), (aligned, 1), (d + k % 5, k % 4), (-aligned - 16, 0)):
            case = Case(
                d, n, variant.dtype, variant.noise, variant.antithetic, seed=k, sample_offset=3 * k % 8,
                dim_offset=k, strides=(1, stride), misalignment=misalignment, cut=tall(passes, per_chunk),
                backwards=k % 2 == 0,
            )  # fmt: skip
            cut = case.geometry()
            if case.variant() != variant:
                continue  # One dimension is no transposed one.
            # Of passes that are shorter than the geometry for a GPU has them, as well.
            case.check()
            if d < 300 and passes > 1:
                dataclasses.replace(case, cut=wide_passes(passes, per_chunk)).check()
            seen["chunks"] += cut.band_groups > cut.chunk
            seen["cut"] += cut.skip > 0
            if variant.stores == "kTransposed":
                seen[f"{cut.column_step % slots} further behind"] += 1
                seen["tiles"] += cut.blocks_per_band > 1
                assert cut.overlap == (cut.column_step % slots > 0)
                assert cut.pieces >= _ceil_div(d, slots)
                seen["begins before"] += cut.pieces * slots >= d + slots and not cut.overlap
    kinds = {"chunks", "cut"}
    if variant.stores == "kTransposed":
        kinds |= {"tiles", "begins before", *(f"{delta} further behind" for delta in range(slots))}
    assert min(seen.values()) >= 10 and seen.keys() == kinds, seen


def wide_passes(passes: int, per_chunk: int) -> Cut:
    """As many groups side by side as there is room for."""
    return lambda g: {
        "rows_per_pass": 10**6, "band_rows": passes * 10**6, "chunk": per_chunk * 10**6,
    }  # fmt: skip


@each_variant
def test_windows_however_far_out(variant: Variant) -> None:
    cases: list[Case] = []
    for d, n in [(1, 1), (5, 7), (3, 37), (2, 600), (2, 640), (3, 1024), (3, 1028), (300, 4), (7, 1157)]:
        for dim_offset in (ROWS - d, 2**31 - 1, 12345):
            for sample_offset in (*(COLUMNS - n - k for k in range(4)), 2**33 - 2, 2**32 - 1, 2**32):
                for strides in [(n, 1), (n + 1, 1), (1, d + 1), (1, d)]:
                    k = len(cases)
                    cases.append(
                        Case(
                            d, n, variant.dtype, variant.noise, variant.antithetic,
                            dim_offset=dim_offset, sample_offset=sample_offset,
                            seed=(0, 2**32 - 1, 2**32, 2**63 + 11, 2**64 - 1)[k % 5],
                            offset=(0, 1, 2**32 - 1, 2**32, 2**64 - 2, 2**63)[k % 6],
                            in_memory=("offset",) if k % 2 == 0 else (), strides=strides, misalignment=k % 4,
                        )
                    )  # fmt: skip
    check_some(variant, cases, 30)


@pytest.mark.parametrize("variant", ORIGIN, ids=named)
def test_seed_and_window_in_memory(variant: Variant) -> None:
    """Any of the words, wherever in a group the window begins: where that is in memory, the cut does not know."""
    cases: list[Case] = []
    some_words = [
        words for count in range(1, 5) for words in itertools.combinations(WORDS, count) if words != WORDS[1:2]
    ]
    shapes = [(1, 1), (5, 7), (300, 3), (40, 9), (2, 640), (3, 1028), (7, 1157), (3, 1024), (130, 45), (31, 61)]
    for (d, n), place, first in itertools.product(shapes, range(6), range(9)):
        k = len(cases)
        # All of them, the first column alone, and all but that.
        words = (some_words[k // 4 % 14], WORDS, WORDS[3:], WORDS[:3])[(k + k // 9) % 4]
        cases.append(
            Case(
                d, n, variant.dtype, variant.noise, variant.antithetic, seed=2**64 - 1 - k, offset=2**33 + k,
                in_memory=words, dim_offset=(0, 5, ROWS - d)[k % 3],
                sample_offset=(first, COLUMNS - n - first)[k // 3 % 2],
                strides=((n, 1), (n, 1), (n + 3, 1), (1, d), (1, d + 1 + k % 4), (2 * n, 2))[place],
                misalignment=k // 2 % 5, backwards=k % 2 == 1,
            )
        )  # fmt: skip
    check_some(variant, cases, 40)


@pytest.mark.parametrize("noise", ["independent", "shared"])
def test_many_dimensions_and_long_rows(noise: str) -> None:
    """So many that the geometry for a GPU has several chunks to a block, or several runs of columns."""
    chunks = [Case(256 * 513 + 5, 2, noise=noise, seed=3), Case(28 * 513 + 9, 33, noise=noise, sample_offset=1)]
    steps = [
        Case(1, 526_333, noise=noise, seed=5),
        Case(1, 524_300, noise=noise, sample_offset=3, misalignment=2),
        Case(1, 524_301, noise=noise, strides=(0, 2)),
    ]
    # Where dimensions lie side by side, as many columns to a short row of them, and many tiles of dimensions.
    columns = 4 * 256 * 1025 - 3
    chunks.append(Case(2, columns, noise=noise, seed=4, sample_offset=2, strides=(1, 2)))
    chunks.append(Case(8, columns, noise=noise, seed=4, sample_offset=1, strides=(1, 8)))
    tiles = [Case(524_301, 1, noise=noise, strides=(1, 2)), Case(100_004, 9, noise=noise, strides=(1, 100_004))]
    # With shared noise, a block of the latter goes along a few groups only.
    of_many = [chunks[0], *(chunks[2:] if noise == "independent" else ())]
    assert all(max(case.geometry().band_rows, case.geometry().band_groups) > case.geometry().chunk for case in of_many)
    assert [case.variant().stores for case in chunks[2:]] == ["kTransposedStaged", "kTransposed"]
    assert all(case.geometry().steps > 1 for case in steps)
    assert all(case.geometry().blocks_per_band > 10 for case in tiles)
    assert {case.variant().stores for case in steps} == {"kAligned", "kShifted", "kStrided"}
    assert {case.variant().stores for case in tiles} == {"kTransposed"}
    for case in chunks + steps + tiles:
        case.check()


INPUTS = [np.dtype(kind) for kind in DTYPES.values()]
INPUTS += [np.dtype(f"{sign}int{width}") for sign in ("", "u") for width in (8, 16, 32, 64)]


@pytest.mark.parametrize("kind", INPUTS, ids=lambda kind: kind.name)
def test_mu_and_sigma_of_every_type_and_any_stride(kind: np.dtype[Any]) -> None:
    draw, d = np.random.default_rng(5), 37
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
    ]
    for k, (mu, sigma) in enumerate(vectors):
        for dtype, n in [("float32", 30), ("float64", 600), ("float16", 3)]:
            Case(d, n, dtype, seed=k, mu=mu, sigma=sigma, cut=tall(2, 1)).check()


@pytest.mark.parametrize("number", [0.1, 1e-42, 1e-50, -3.4028235677973362e38, 16777217.0])
def test_numbers_in_place_of_mu_or_sigma_are_rounded(number: float) -> None:
    """By float32 also to its subnormals and beyond its largest."""
    for dtype in ("float32", "float64"):
        Case(37, 8, dtype, mu=number, sigma=np.full(37, 1e-300)).check()
        Case(37, 8, dtype, mu=np.full(37, number), sigma=abs(number) / 1e3).check()


FAST = [
    Variant("float32", "independent", "kAligned", fast_math=True),
    Variant("float32", "shared", "kStaged", fast_math=True),
    Variant("float32", "independent", "kTransposed", antithetic=True, fast_math=True),
]


@pytest.mark.parametrize("variant", FAST, ids=named)
def test_fast_math_is_near_the_portable_numbers(variant: Variant) -> None:
    # A GPU's instructions are less exact than those here; what is made of them is the same.
    n = {"kAligned": 1028, "kStaged": 37, "kTransposed": 300}[variant.stores]
    case = Case(
        50, n, variant.dtype, variant.noise, variant.antithetic, True, seed=2**63 + 1, sample_offset=2**32,
        strides=(1, 52) if variant.stores == "kTransposed" else None,
    )  # fmt: skip
    assert case.variant() == variant
    got = case.draw()[1].view(DTYPES[variant.dtype]).astype(np.float64)
    portable, sigma = case.expected().astype(np.float64), np.asarray(case.vectors()[1])[:, None]
    rounding = np.spacing(np.abs(portable).astype(DTYPES[variant.dtype])).astype(np.float64)
    assert (np.abs(got - portable) <= 1e-3 * sigma + rounding).all()
    assert (got != portable).any()


def test_fast_math_is_without_effect_on_float64() -> None:
    Case(20, 37, "float64", fast_math=True).check()


# --- What is launched -----------------------------------------------------------------------------


class Driver:
    """The driver's part in a launch."""

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
        assert (blocks_y, blocks_z, threads_y, threads_z, shared_memory) == (1, 1, 1, 1, 0)
        assert (attributes, attribute_count, addresses) == (0, 0, None)
        pointer, address, size, at_size, end = extra
        assert (pointer, size, end) == (1, 2, None)  # As cuda.h numbers them.
        packed = ctypes.string_at(address, ctypes.c_size_t.from_address(at_size).value)
        self.launched.append((kernel, blocks, threads, stream, packed))
        kernel = compiled(kernel) if isinstance(kernel, Variant) else kernel
        gpu.launch(kernel, blocks, max(threads, 32), packed, *self.memory)
        return 0


def numba_backend(variant: Variant) -> NumbaBackend:
    """One that has compiled this variant and no other."""
    backend = NumbaBackend()
    dtype, noise, stores, *flags, origin_in_memory = variant
    key = KernelKey(dtype, noise == "shared", *flags, KERNEL_STORES.index(stores), origin_in_memory, 0)
    backend._handles = {key: variant}  # type: ignore[dict-item]
    return backend


LAUNCHED = VARIANTS[:10] + [variant for variant in VARIANTS if variant.antithetic][:5]


@pytest.mark.parametrize(
    ("variant", "road"),
    # Launchers take the seed and the window by value.
    [*itertools.product(LAUNCHED, ("launch", "launcher")), *((variant, "launch") for variant in ORIGIN[:6])],
    ids=lambda value: value if isinstance(value, str) else named(value),
)
def test_what_is_launched_is_what_runs_here(monkeypatch: pytest.MonkeyPatch, variant: Variant, road: str) -> None:
    """The grid and the parameters that the numba backend hands to the driver."""
    d, n = {
        "kAligned": (40, 1024), "kShifted": (7, 1157), "kStaged": (300, 10), "kStrided": (30, 30),
        "kTransposed": (32, 30), "kTransposedStaged": (30, 30) if SIZES[variant.dtype] < 8 else (33, 30),
    }[variant.stores]  # fmt: skip
    strides = {"kStrided": (60, 2), "kTransposed": (1, 32), "kTransposedStaged": (1, d)}.get(variant.stores)
    words = ("offset",)
    if variant.origin_in_memory:
        words = WORDS[:3] if variant.stores in ("kAligned", "kStaged") else WORDS
    case = Case(
        d, n, variant.dtype, variant.noise, variant.antithetic, seed=2**64 - 1, offset=5, in_memory=words,
        strides=strides,
    )  # fmt: skip
    assert case.variant() == variant
    memory, out = case.memory()
    mu, sigma = case.vectors()
    draw, in_memory = case.call(mu, sigma, out)
    draw = draw._replace(stream=2**63 + 7)
    driver, backend = Driver(monkeypatch, out, (mu, sigma, in_memory)), numba_backend(variant)
    if road == "launch":
        backend.launch(draw)
    else:
        launcher = backend.launcher(draw._replace(matrix=0, seed=Word(0), offset=Word(0), stream=0))
        ready, addresses = launcher.ready(draw.matrix, 0), (draw.mu.data, draw.sigma.data, draw.matrix)
        launcher.run(ready, *addresses, case.seed, *draw.offset, 0, 0, draw.stream)
    ((kernel, blocks, threads, stream, packed),) = driver.launched
    cut = case.geometry()
    assert (kernel, blocks, threads, stream) == (variant, cut.blocks, cut.threads, draw.stream)
    assert packed == pack(draw) + packed_geometry(cut)
    expected_memory, expected = case.memory()
    expected[...] = case.expected().view(expected.dtype)
    assert np.array_equal(memory, expected_memory)


def test_a_launcher_finds_the_kernel_for_each_alignment_and_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Aligned, shifted and staged rows of one template; numbers in place of a vector."""
    for d, n, mu in [(3, 1024, None), (9, 10, 2.5)]:
        for misalignment, first in itertools.product((0, 1, 4), (0, 1, 4, 2**33 + 6)):
            case = Case(d, n, mu=mu, seed=9, offset=2**40, dim_offset=5, sample_offset=first, misalignment=misalignment)
            memory, out = case.memory()
            means, deviations = case.vectors()
            draw, _ = case.call(means, deviations, out)
            driver, backend = Driver(monkeypatch, out, (means, deviations)), numba_backend(case.variant())
            launcher = backend.launcher(draw._replace(matrix=0, seed=Word(0), first_column=Word(0)))
            launcher.run(
                launcher.ready(draw.matrix, first), draw.mu.data if mu is None else mu, draw.sigma.data, draw.matrix, 9,
                2**40, 0, 5, first, 0,
            )  # fmt: skip
            assert [launched[-1] for launched in driver.launched] == [pack(draw) + packed_geometry(case.geometry())]
            expected_memory, expected = case.memory()
            expected[...] = case.expected().view(expected.dtype)
            assert np.array_equal(memory, expected_memory)


@requires_numba_cuda
@pytest.mark.parametrize("count", [0, 2**32 - 1, 2**64 - 1])
def test_advance_counts_up_by_one(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    from multisample.backends.kernels.cuda.compilation import advance_kernel

    code = advance_kernel().__code__
    count_up = gpu.once(types.FunctionType(code, {"cuda_intrinsics": gpu, "np": np}))

    def kernel(call, geometry):
        # Its one parameter is where the first of a draw would be, and it has one thread.
        if gpu.thread_index() == 0:
            count_up(call.mu.data)

    counter = np.array([[count]], np.uint64)
    driver, backend = Driver(monkeypatch, counter, (counter,)), NumbaBackend()
    backend._handles = {("advance", 0): gpu.compile_kernel(kernel)}
    backend.advancer(0)(counter.ctypes.data, 7)
    ((_, blocks, threads, stream, packed),) = driver.launched
    assert (blocks, threads, stream, len(packed)) == (1, 1, 7, 8)
    assert counter[0, 0] == (count + 1) % 2**64


# --- The emulation --------------------------------------------------------------------------------


def test_the_emulated_gpu_has_the_names_of_a_real_one() -> None:
    # Read, not imported: there may be no numba-cuda.
    source = importlib.resources.files("multisample.backends.kernels.cuda").joinpath("intrinsics.py").read_text()
    (names,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"
    )
    own = {"AVAILABLE", "BrokenKernelError", "DRAW", "GEOMETRY", "compile_kernel", "launch", "once"}
    assert set(gpu.__all__) - own == set(names)


@requires_numba_cuda
def test_kernels_take_the_same_types_as_on_a_gpu() -> None:
    from multisample.backends.kernels.cuda.compilation import SIGNATURE

    assert str(SIGNATURE.args) == str((gpu.DRAW, gpu.GEOMETRY))


def outcome(function: Callable[..., None], threads: int = 64, backwards: bool = False) -> tuple[str, Array]:
    """What two blocks of a kernel are told, and 80 float32 of which they may write 72."""
    case = Case(1, 80)
    _, out = case.memory()
    call = pack(a_draw(1, 80, matrix=out))
    kernel, message = gpu.compile_kernel(function), ""
    try:
        gpu.launch(
            kernel, 2, threads, call + packed_geometry(case.geometry()), out[:, :72], (0.0, 1.0), backwards=backwards
        )
    except gpu.BrokenKernelError as error:
        message = str(error)
    return message, out.view(np.float32)[0]


_ONE = np.float32(1)


def writes_outside(call, geometry):
    if gpu.block_index() == 1:
        gpu.store(call.matrix + 4 * (np.int64(gpu.thread_index()) + 9), _ONE)


def writes_before(call, geometry):
    gpu.store(call.matrix - 4, _ONE)


def writes_four_at_any_address(call, geometry):
    if gpu.block_index() == 0 and gpu.thread_index() < 8:
        gpu.store_quad(call.matrix + 20 * np.int64(gpu.thread_index()), (_ONE, _ONE, _ONE, _ONE))


def writes_in_each_block(call, geometry):
    gpu.store(call.matrix + 4 * np.int64(gpu.thread_index()), _ONE)


def reads_no_vector(call, geometry):
    gpu.store(call.matrix, gpu.load(call.sigma.data, np.float32))


def goes_on_for_ever(call, geometry):
    at = gpu.shared_memory(16)
    gpu.store_shared(at, _ONE)
    while gpu.load_shared(at, np.float32) == _ONE:
        pass


def wants_too_much_shared_memory(call, geometry):
    gpu.shared_memory(16)
    gpu.shared_memory(48 << 10)


def reads_behind_its_shared_memory(call, geometry):
    at = gpu.shared_memory(16)
    gpu.shared_memory(16)
    gpu.load_shared_quad(at + 16)


def reads_what_is_not_written(call, geometry):
    at = gpu.shared_memory(256)
    gpu.store_shared(at + 4 * np.int64(gpu.thread_index()), _ONE)
    gpu.synchronize_warp()
    gpu.load_shared(at + 4 * np.int64(gpu.thread_index() ^ 63), np.float32)


def writes_over_another_warps(call, geometry):
    at = gpu.shared_memory(256)
    for _ in range(2):
        gpu.store_shared(at + 4 * np.int64(gpu.thread_index()), _ONE)
        gpu.synchronize_block()
    gpu.store_shared(at + 4 * np.int64(gpu.thread_index() % 32), _ONE)


def leaves_its_warp(call, geometry):
    if gpu.thread_index() != 33:
        gpu.synchronize_warp()


def leaves_its_block(call, geometry):
    if gpu.thread_index() < 32:
        gpu.synchronize_block()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (writes_outside, "block 1, thread 63: touches memory outside of the output, 288 bytes from its begin"),
        (writes_before, "block 0, thread 0: touches memory outside of the output, -4 bytes from its begin"),
        (writes_four_at_any_address, "block 0, thread 1: is not aligned in the output, 20 bytes from its begin"),
        (writes_in_each_block, "block 1, thread 0: writes an element again in the output, 0 bytes from its begin"),
        (reads_no_vector, "block 0, thread 0: touches memory outside of what it may read, 0 bytes from its begin"),
        (goes_on_for_ever, "block 0, thread 0: goes on for ever in shared memory, 0 bytes from its begin"),
        (wants_too_much_shared_memory, "block 0, thread 0: wants too much of shared memory, 80 bytes from its begin"),
        (
            reads_behind_its_shared_memory,
            "block 0, thread 0: touches memory outside of shared memory, 16 bytes from its begin",
        ),
        (
            reads_what_is_not_written,
            "block 0, thread 0: reads what nobody has written in shared memory, 252 bytes from its begin",
        ),
        (
            writes_over_another_warps,
            "block 0, thread 32: writes over what another warp has written since the last barrier in shared memory,"
            " 0 bytes from its begin",
        ),
        (leaves_its_warp, "block 0, thread 33: waits for something else than its warp"),
        (leaves_its_block, "block 0, thread 32: waits for something else than its block"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_the_emulated_gpu_watches_for_does_not_pass(function: Callable[..., None], message: str) -> None:
    assert outcome(function)[0] == message


@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
def test_emulated_threads_wait_for_each_other_only_where_they_say_so(backwards: bool) -> None:
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
    # Where nobody waits, whoever comes later finds what others have written, and whoever comes first does not.
    early = (thread < 32) if backwards else (thread >= 32)
    assert out[:64].tolist() == (((before * 64 + fifth) * 2 + (thread < 32)) * 2 + early).tolist()


def test_only_whole_warps_are_launched() -> None:
    assert outcome(writes_in_each_block, threads=48)[0] == "no such grid: 2 blocks of 48 threads"
