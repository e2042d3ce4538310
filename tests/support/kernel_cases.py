"""Test cases for the CUDA kernels in C++ and for the plain kernels in Python. The tests run both on the CPU."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from launches import WORDS, Vector, Window, a_launch, extent
from numba import njit
from tables import COLUMNS, DTYPES, INPUTS, ROWS, STORE_KINDS
from transposed_cuts import recut

import multisample
from multisample.backends.kernels.cuda.geometry import (
    ONE_ROW_TURNS,
    PLAIN_TURNS,
    Geometry,
    StoreKind,
    ceil_div,
    divisor,
    few_columns_geometry,
    geometry,
    own_rows_of,
    small_matrices_geometry,
)
from multisample.backends.kernels.stream.arithmetic import fma
from multisample.backends.launch import SIZES, ElementType

Array = np.ndarray[Any, Any]
Values = Array | float
Cut = Callable[[Geometry], dict[str, int]]

GUARD, POISON = 512, 0xC3
"""Bytes of memory before and after an output, and the byte that fills memory."""


@njit
def _draw_antithetic(mu: Array, sigma: Array, z: Array, first: int, out: Array) -> None:
    """Write antithetic samples of the noise `z`, from column `first` on: each column, then its mirror."""
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            noise = z[i, (first + j) // 2]
            out[i, j] = fma(sigma[i], -noise if (first + j) % 2 else noise, mu[i])


@dataclasses.dataclass
class Case(Window):
    """A call, the layout of its output, and an optional change to its geometry."""

    d: int
    n: int
    dtype: str = "float32"
    noise: str = "independent"
    antithetic: bool = False
    fast_math: bool = False
    """Whether to take the geometry for fast_math. The C++ runner has kernels for the portable numbers only."""
    strides: tuple[int, int] | None = None
    """Strides of the output in elements; contiguous rows by default."""
    misalignment: int = 0
    """Distance of the output's lowest element from an aligned address, in elements."""
    mu: Values | None = None
    sigma: Values | None = None
    cut: Cut | None = None
    """Changes to fields of the geometry; dependent fields are computed again."""
    plain: bool = False
    """Whether to take the geometry of a plain kernel, as `sample` does for calls of these sizes."""
    turns: int = 1
    """Turns of a thread of a plain kernel and of kFewRows."""
    few_columns: bool = False
    """Whether to take the geometry of kFewColumns. `sample` takes it only with more rows than these cases have."""
    small: bool = False
    """Whether to take the geometry of kSmallMatrices, which `sample` uses for batches only."""

    @property
    def size(self) -> int:
        return SIZES[self.dtype]

    @property
    def store_kind(self) -> str:
        return STORE_KINDS[self.usual_cut().store_kind]

    def byte_strides(self) -> tuple[int, int]:
        rows, columns = self.strides or (self.n, 1)
        return rows * self.size, columns * self.size

    def placed(self) -> tuple[int, int]:
        """Byte offset of the output's first element in its memory, and the size of the memory."""
        below, above = extent((self.d, self.n), self.byte_strides())
        first = GUARD + self.misalignment * self.size + below
        return first, first + above + self.size + GUARD

    def output(self, memory: Array) -> Array:
        """The output in its memory, as bit patterns."""
        first, _ = self.placed()
        return np.ndarray((self.d, self.n), f"u{self.size}", memory, first, self.byte_strides())

    def vectors(self) -> tuple[Values, Values]:
        draw, kind = np.random.default_rng(self.d * 10007 + self.n), DTYPES[self.dtype]
        mu = (draw.normal(size=self.d) * 3).astype(kind) if self.mu is None else self.mu
        sigma = np.abs(draw.normal(size=self.d)).astype(kind) if self.sigma is None else self.sigma
        return mu, sigma

    def expected(self) -> Array:
        """Bit patterns from the cpu backend; for antithetic pairs, computed from the backend's noise."""
        mu, sigma = self.vectors()
        if not self.antithetic:
            return self._on_cpu(mu, sigma, self.n, self.dtype, self.sample_offset).view(f"u{self.size}")
        real = np.dtype(np.float64 if self.dtype == "float64" else np.float32)
        first, last = self.sample_offset // 2, ceil_div(self.sample_offset + self.n, 2)
        z = self._on_cpu(-0.0, np.ones(self.d, real), last - first, real.name, first)
        out = np.empty((self.d, self.n), real)
        with np.errstate(all="ignore"):
            vectors = [np.broadcast_to(np.asarray(vector).astype(real), self.d) for vector in (mu, sigma)]
            _draw_antithetic(*vectors, z, self.sample_offset % 2, out)
            return out.astype(DTYPES[self.dtype]).view(f"u{self.size}")

    def _on_cpu(self, mu: Values, sigma: Values, n: int, dtype: str, sample_offset: int) -> Array:
        if isinstance(mu, float):
            mu = np.full(self.d, mu)
        with np.errstate(over="ignore"):
            options = self.on_cpu() | {"sample_offset": sample_offset}
            got = multisample.sample(mu, sigma, n, dtype=dtype, noise=self.noise, **options)
        return np.asarray(got)

    def usual_cut(self) -> Geometry:
        """The geometry that `sample` uses on a GPU, for large calls unless `plain`; or as the flags above say."""
        vectors = map(np.asarray, self.vectors())
        contiguous = all(x.ndim == 1 and x.strides == (x.itemsize,) for x in vectors)
        vector = Vector(64, self.size, ElementType[self.dtype]) if contiguous else 0.0
        launch = a_launch(
            self.d, self.n, self.dtype, mu=vector, sigma=vector, matrix=self.placed()[0], strides=self.byte_strides(),
            first_column=self.sample_offset, first_column_at="first_column" in self.in_memory,
            shared_noise=self.noise == "shared", antithetic=self.antithetic, fast_math=self.fast_math,
            origin_in_memory=not self.plain,
        )  # fmt: skip
        if self.few_columns:
            return few_columns_geometry(
                launch._replace(shared_noise=0, fast_math=0), Geometry(store_kind=StoreKind.kFewColumns)
            )
        if self.small:
            width = 8 if self.antithetic else 4
            skip = width - 1 if "first_column" in self.in_memory else self.sample_offset % width
            # As in a batch of one, or in one so large that each thread draws several rows.
            launch = launch._replace(batch=(1, 2**17)[self.seed // 4 % 2])
            return small_matrices_geometry(launch, ceil_div(skip + self.n, width))._replace(blocks=1)
        return geometry(launch)

    def chosen_cut(self) -> Geometry:
        g = self.usual_cut()
        if STORE_KINDS[g.store_kind] in ("plain", "plain_transposed", "few_rows"):
            return self._with_turns(g)
        if self.cut is None:
            return g
        groups = ceil_div(g.skip + self.n, 8 if self.antithetic else 4)
        if STORE_KINDS[g.store_kind].startswith("transposed"):
            return recut(self.cut, g, groups, own_rows_of(self.size) // (1 + self.antithetic))
        changed = g._replace(**self.cut(g))
        if STORE_KINDS[g.store_kind] == "few_columns":
            band_rows = max(changed.band_rows // changed.rows_per_pass, 1) * g.rows_per_pass
            return g._replace(band_rows=band_rows, blocks=ceil_div(self.d, band_rows))
        rows, lanes, shift = changed.rows_per_pass, changed.groups_per_pass, changed.interleave_log2
        pass_stride = self.byte_strides()[0] * rows
        while STORE_KINDS[g.store_kind] in ("shifted", "staged") and (pass_stride << shift) % 16:
            shift += 1
        threads = ceil_div(lanes * rows, 32) * 32
        bands = ceil_div(ceil_div(self.d, changed.band_rows), 1 << shift) << shift
        columns = ceil_div(groups - changed.rest, changed.steps * lanes)
        return changed._replace(
            threads=threads,
            interleave_log2=shift,
            one_by_groups=ceil_div(1 << 20, lanes),
            one_by_rows=ceil_div(1 << 20, rows),
            chunk=changed.chunk if changed.chunk != g.chunk else threads // rows * rows,
            pitch=threads // rows | 1,
            blocks_per_band=columns,
            blocks=bands * columns,
            row_step=self.byte_strides()[0] // self.size * rows << shift,
        )

    def _with_turns(self, g: Geometry) -> Geometry:
        """`g`, of a plain kernel or of kFewRows, with other turns."""
        groups = ceil_div(g.skip + self.n, 8 if self.antithetic else 4)
        if STORE_KINDS[g.store_kind] == "few_rows":
            turns = g.turns if self.turns == 1 else self.turns
            of_row = ceil_div(groups, g.threads * turns)
            return g._replace(turns=turns, blocks_per_band=of_row, blocks=of_row * self.d, **divisor(of_row))
        turns = self.turns
        if STORE_KINDS[g.store_kind] == "plain":
            if turns > 1:
                one_row = turns > 2 and g.usual and g.rows_per_pass == 1 and self.size < 8 and not self.antithetic
                turns = ONE_ROW_TURNS if one_row else PLAIN_TURNS
            blocks = ceil_div(ceil_div(self.d, g.rows_per_pass), turns) * g.blocks_per_band
        else:
            blocks = ceil_div(g.pieces * ceil_div(groups, turns), g.threads)
        return g._replace(turns=turns, blocks=blocks)


LENGTHS = [*range(1, 41), *range(127, 131), *range(511, 514), *range(1023, 1030), *range(1152, 1158), 2049]
LENGTHS += [2304, 2307, 2309]


def every_shape(dtype: str, noise: str) -> Iterator[Case]:
    """Rows that end within a warp, a pass or a band; full and partial bands."""
    numbers = itertools.count()
    for n in LENGTHS:
        for d in (1, 2, 3, 7, 40 if n > 40 else 300):
            k = next(numbers)
            common: dict[str, Any] = {"antithetic": (k + n) % 2 == 1, "seed": k}
            yield Case(d, n, dtype, noise, **common, sample_offset=k % 9, dim_offset=k % 3, backwards=k // 2 % 2 == 1)
            if d < 10:
                k = next(numbers)
                yield Case(d, n, dtype, noise, **common, sample_offset=8 * k, fast_math=k // 2 % 2 == 0)


WIDTHS = [*range(2, 20), 31, 32, 33, 64, 65, *range(127, 131), *range(255, 259), *range(287, 291), 512, 513, 577]
WIDTHS += [1145, 1200]


def dimensions_side_by_side(dtype: str, noise: str) -> Iterator[Case]:
    """Full and partial groups, and bands of groups."""
    for k, (d, n) in enumerate(itertools.product(WIDTHS, (2, 4, 7, 8, 16, 29, 61, 0))):
        yield Case(
            d, n or (150 if d > 40 else 1100), dtype, noise, antithetic=(k + d) % 2 == 1, seed=k, sample_offset=k % 9,
            dim_offset=k % 3, strides=(1, d + 1 + k % 4), misalignment=k % 5, fast_math=k % 3 == 0,
            backwards=k // 2 % 2 == 1,
        )  # fmt: skip


def every_address(dtype: str, noise: str) -> Iterator[Case]:
    """Rows that begin at any address, contiguous and padded."""
    lengths = (1, 3, 4, 8, 10, 37, 120, 128, 509, 512, 513, 516, 1021, 1024, 1028, 1029, 1149, 1152, 1156, 1500, 2304)
    numbers = itertools.count()
    for index, n in enumerate(lengths):
        for misalignment, pad in itertools.product(range(4 if SIZES[dtype] > 2 else 8), range(5)):
            k = next(numbers)
            # An antithetic group has the same position for every second offset.
            common: dict[str, Any] = {
                "antithetic": (index + misalignment + pad) % 2 == 1, "seed": k, "sample_offset": (k // 3 + n) % 8,
                "misalignment": misalignment, "backwards": k % 2 == 1,
            }  # fmt: skip
            yield Case((1, 3, 5, 9)[(k + n) % 4], n, dtype, noise, strides=(n + pad, 1), **common)
            if n < 600 and pad < 3:
                yield Case(n, (2, 5, 9, 31)[(k + n) % 4], dtype, noise, strides=(1, n + pad), **common)
            if n < 140:
                yield Case(n, (31, 2, 5, 9)[(k + n) % 4], dtype, noise, strides=(1, n), **common)
    for k, n in enumerate((8, 120, 512, 1024, 1152, 2304)):
        yield Case(5, n, dtype, noise, k % 2 == 1, sample_offset=8 * k)


def threads_beyond_the_last_column(dtype: str, noise: str) -> Iterator[Case]:
    """Elements after a row's last column would be the first elements of the next row, and so inside the matrix.

    In transposed layouts, elements after the last dimension would be the first elements of the next column.
    """
    lengths = (132, 516, 520, 636, 640, 644, 1024, 1028, 1148, 1152, 2312)
    for k, (n, pad, misalignment, rows) in enumerate(itertools.product(lengths, (0, 1, 4), (0, 1), (1, 3))):
        common: dict[str, Any] = {
            "antithetic": (pad + misalignment + k // 12) % 2 == 1, "misalignment": misalignment,
            "cut": lambda g, rows=rows: {"band_rows": rows * g.rows_per_pass},
        }  # fmt: skip
        yield Case(6, n, dtype, noise, strides=(n + pad, 1), **common)
        if n < 1000:
            yield Case(n, 45, dtype, noise, strides=(1, n + pad), **common)
        if n < 600:
            short = n % 97 + 1
            yield Case(short, 45, dtype, noise, strides=(1, short), **common)


def any_strides(dtype: str, noise: str) -> Iterator[Case]:
    numbers = itertools.count()
    for d, n in [
        (1, 1),
        (1, 9),
        (5, 1),
        (3, 7),
        (9, 64),
        (40, 13),
        (6, 516),
        (4, 700),
        (3, 1028),
        (5, 1157),
        (300, 9),
        (5, 512),
        (3, 1024),
    ]:
        backwards = [(-n, 1), (-(n + 3), 1), (-(n + 8), 1), (1, -d), (-1, -d), (n, -1)]
        layouts = [*backwards, (n, 1), (n + 4, 1), (1, d), (1, d + 3), (2 * n, 2), (-9 * n, 3), (2, 2 * d)]
        for strides, antithetic in itertools.product(layouts, (False, True)):
            k = next(numbers) // 2
            yield Case(d, n, dtype, noise, antithetic, seed=k, sample_offset=k % 8, strides=strides, misalignment=k % 3)


def windows_far_out(dtype: str, noise: str) -> Iterator[Case]:
    shapes = [(1, 1), (5, 7), (3, 37), (2, 600), (2, 640), (3, 1024), (3, 1028), (300, 4), (7, 1157)]
    numbers = itertools.count()
    for (d, n), antithetic, dim in itertools.product(shapes, (False, True), range(3)):
        last = COLUMNS - n
        for first in (last, last - 1, last - 2, last - 3, last - 5, 2**33 - 2, 2**32 - 1, 2**32):
            k = next(numbers)
            yield Case(
                d, n, dtype, noise, antithetic, dim_offset=(ROWS - d, 2**31 - 1, 12345)[dim], sample_offset=first,
                seed=(0, 2**32 - 1, 2**32, 2**63 + 11, 2**64 - 1)[k % 5],
                offset=(0, 1, 2**32 - 1, 2**32, 2**64 - 2, 2**63)[k % 6], in_memory=("offset",) if k % 4 == 1 else (),
                strides=((n, 1), (1, d), (n + 1, 1), (1, d + 1), (n, 1), (2 * n, 2), (n, 1))[k % 7],
                misalignment=k % 11 % 4,
            )  # fmt: skip


def windows_of_pairs(dtype: str, noise: str) -> Iterator[Case]:
    """Windows of antithetic pairs, from each column of a group to each, in one group and in several."""
    numbers = itertools.count()
    for first, groups, end in itertools.product(range(8), (0, 1, 3), range(1, 9)):
        n = 8 * groups + end - first
        if n > 0:
            k = next(numbers)
            yield Case(
                5, n, dtype, noise, antithetic=True, sample_offset=8 * k + first,
                strides=((n, 1), (1, 5), (n + 1, 1), (2 * n, 2), (1, 8))[k % 5], misalignment=k // 5 % 3,
            )  # fmt: skip


def offsets_in_memory(dtype: str, noise: str) -> Iterator[Case]:
    """Offsets in memory differ from the draw's own value; advancing them carries into the high half."""
    offsets = (0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**64 - 2)
    shapes = [(3, 7), (2, 1100), (1, 1024), (3, 1024), (4, 1100), (300, 9)]
    choices = itertools.product(shapes, range(3), (False, True), (0, 1))
    for k, ((d, n), layout, antithetic, misalignment) in enumerate(choices):
        yield Case(
            d, n, dtype, noise, antithetic, offset=offsets[(k + k // 6) % 6], in_memory=("offset",),
            misalignment=misalignment, strides=((n, 1), (1, d), (2 * n, 2))[layout],
        )  # fmt: skip


def vectors_of_every_type(dtype: str, noise: str) -> Iterator[Case]:
    """Element types and strides of mu and sigma, and numbers in their place."""
    d = 37
    for number, kind in enumerate(INPUTS):
        for k, (mu, sigma) in enumerate(input_vectors(kind, d)):
            n = (3, 30, 600)[k % 3]
            for strides in ((n, 1), (1, d)):
                antithetic = (k // 3 + number + (strides[0] == 1)) % 2 == 1
                yield Case(d, n, dtype, noise, antithetic, seed=k, mu=mu, sigma=sigma, strides=strides)
    # Numbers that float32 rounds, also to subnormals and past its largest number.
    for number, strides in itertools.product((0.1, 1e-42, 1e-50, -3.4028235677973362e38, 16777217.0), ((5, 1), (1, d))):
        yield Case(d, 5, dtype, noise, mu=number, sigma=np.full(d, 1e-300), strides=strides)
        yield Case(d, 5, dtype, noise, mu=np.full(d, number), sigma=abs(number) / 1e3, strides=strides)


def input_vectors(kind: np.dtype[Any], d: int) -> list[tuple[Values, Values]]:
    """mu and sigma of this type or mixed types: edge values, strided, reversed, broadcast, and numbers."""
    draw = np.random.default_rng(5)
    if kind.kind in "iu":
        wide = draw.integers(np.iinfo(kind).min, np.iinfo(kind).max, 3 * d, kind, endpoint=True)
        wide[:2] = np.iinfo(kind).min, np.iinfo(kind).max
    else:
        wide = (draw.normal(size=3 * d) * 10.0 ** draw.integers(-5, 4, 3 * d)).astype(kind)
        wide[:4] = 0.0, -0.0, np.finfo(np.float16).smallest_subnormal, 65504
    spread = np.abs(wide) if kind.kind != "i" else np.maximum(wide, 0)
    return [
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


def tall(passes: int, per_chunk: int) -> Cut:
    """A cut with bands of `passes` passes, and chunks of `per_chunk` passes."""

    def cut(g: Geometry) -> dict[str, int]:
        chunk = min(per_chunk * g.rows_per_pass, g.chunk)
        return {"band_rows": passes * g.rows_per_pass, "chunk": chunk, "steps": 1}

    return cut


def other_cuts() -> Iterator[tuple[str, Cut]]:
    """Other geometries that the kernel supports, each with the store variants to which it applies."""
    everything = " ".join(STORE_KINDS)
    # More rows per block, in several chunks.
    for passes, per_chunk in [(2, 9), (3, 1), (7, 2), (19, 9), (50, 5), (50, 50)]:
        yield everything, tall(passes, per_chunk)
    # Fewer rows side by side.
    yield everything, lambda g: {"rows_per_pass": 1, "band_rows": 4, "steps": 1}
    yield everything.replace("shifted ", ""), lambda g: {
        "rows_per_pass": (g.rows_per_pass + 1) // 2, "band_rows": (g.rows_per_pass + 1) // 2 * 3, "steps": 1,
    }  # fmt: skip
    # Interleaved bands.
    for log2 in (1, 2, 3):
        yield "aligned strided", lambda g, log2=log2: {
            "rows_per_pass": 1, "band_rows": 3, "interleave_log2": log2, "steps": 1,
        }  # fmt: skip
        yield "shifted", lambda g, log2=log2: {"band_rows": 2, "interleave_log2": g.interleave_log2 + log2, "steps": 1}
    # Groups of shifted rows that do not fill a warp: each lane draws them in another row.
    yield "shifted", with_rest
    yield "shifted", lambda g: {**with_rest(g), "band_rows": 7, "chunk": 3}
    # Other block widths, and several column runs; shifted rows need whole warps.
    whole, any_width = [(32, 1), (64, 2), (96, 5), (256, 3), (160, 2)], [(1, 1), (3, 2), (33, 4), (257, 1), (287, 2)]
    for store_kinds, widths in (("aligned shifted strided", whole), ("aligned strided", any_width)):
        for lanes, steps in widths:
            yield store_kinds, lambda g, lanes=lanes, steps=steps: {
                "groups_per_pass": lanes, "rows_per_pass": 1, "band_rows": 5, "steps": steps,
            }  # fmt: skip


def with_rest(g: Geometry) -> dict[str, int]:
    lanes, rest = g.groups_per_pass, g.groups_per_pass % 32 or 32
    return {"warps": g.warps - 1, "rest": rest, "groups_per_pass": lanes if rest == 32 else lanes - rest}


def calls_cut_differently(dtype: str, noise: str) -> Iterator[Case]:
    """Several chunks of dimensions, several runs of columns, and interleaved bands."""
    shapes = [
        (1, 700),
        (23, 3),
        (150, 10),
        (41, 129),
        (17, 516),
        (20, 1028),
        (9, 1032),
        (9, 1157),
        (6, 2100),
        (300, 41),
    ]
    numbers = itertools.count()
    for d, n in shapes:
        rows = [((n, 1), 0), ((n + 1, 1), 0), ((n, 1), 1), ((n + 2, 1), 2), ((2 * n, 2), 0)]
        for place, (strides, misalignment) in enumerate([*rows, ((1, d + 1), 1), ((1, d), 1)]):
            for number, (store_kinds, cut) in enumerate(other_cuts()):
                k = next(numbers)
                case = Case(
                    d, n, dtype, noise, (d + place + number) % 2 == 1, seed=k, sample_offset=k // 2 % 8,
                    dim_offset=7 * k, strides=strides, misalignment=misalignment, cut=cut, backwards=k % 2 == 1,
                )  # fmt: skip
                if case.store_kind in store_kinds.split():
                    yield case


def words_in_memory(dtype: str, noise: str) -> Iterator[Case]:
    """Each combination of words in memory, with every store variant; the draw's own values differ."""
    shapes = [(1, 1), (5, 7), (300, 3), (40, 9), (2, 640), (3, 1028), (7, 1157), (3, 1024), (130, 45), (31, 61)]
    for k, ((d, n), antithetic, place) in enumerate(itertools.product(shapes, (False, True), range(7))):
        strides = ((n, 1), (n, 1), (n + 3, 1), (1, d), (1, d), (1, d + 1 + k % 4), (2 * n, 2))[place]
        # The geometry must not depend on a first column in memory, nor on its position in a group.
        words = (("first_column",), SOME_WORDS[k // 3 % len(SOME_WORDS)], WORDS)[k % 3]
        yield Case(
            d, n, dtype, noise, antithetic, seed=2**64 - 1 - k, offset=2**33 + k, in_memory=words,
            dim_offset=(0, 5, ROWS - d)[k // 3 % 3], sample_offset=(k // 3 % 9, COLUMNS - n - k % 8)[k % 2],
            strides=strides, misalignment=k // 2 % 5, backwards=k // 4 % 2 == 1,
        )  # fmt: skip
    # If the first column is not in memory, rows are staged, and written like aligned rows.
    without_column = [words for words in SOME_WORDS if "first_column" not in words]
    for k, (d, n, first) in enumerate(itertools.product((1, 9, 70), (3, 10, 37, 128, 520), (0, 2, 8, 16))):
        words = without_column[k % len(without_column)]
        yield Case(d, n, dtype, noise, k % 2 == 1, seed=k, in_memory=words, sample_offset=first, dim_offset=k)
    for k, (n, d, pairs) in enumerate(itertools.product(range(1, 9), (513, 700), (False, True))):
        words = without_column[k % len(without_column)]
        yield Case(
            d, n, dtype, noise, pairs, seed=k, in_memory=words, sample_offset=8 * k, dim_offset=k,
            strides=((n, 1), (1, d))[k // 4 % 2], few_columns=True,
        )  # fmt: skip
    yield from small_matrices(dtype, noise, SOME_WORDS)
    # torch_ext launches the strided kernel for all strides, with the geometry for single elements.
    for (d, n), antithetic, row, first in itertools.product(
        [(3, 5), (41, 130), (2, 1157)], (False, True), (False, True), (0, 3, 6)
    ):
        yield Case(
            d, n, dtype, noise, antithetic, seed=d, in_memory=WORDS, dim_offset=n, sample_offset=first,
            strides=(2 * n, 2) if row else (2, 2 * d + 1), misalignment=first,
        )  # fmt: skip


def few_columns(dtype: str, noise: str) -> Iterator[Case]:
    """Few samples of many dimensions, in blocks of one and of several passes, contiguous by rows and by columns."""
    numbers = itertools.count()
    of_pass = 512 if SIZES[dtype] < 8 else 256
    lengths = (of_pass, of_pass + 1, of_pass + 31, 2 * of_pass - 1, 2 * of_pass + 130, 3 * of_pass + 200, 77)
    for n, antithetic, layout in itertools.product(range(1, 9), (False, True), range(4)):
        for choice in range(4):
            k = next(numbers)
            d = lengths[(k + k // 7) % len(lengths)]
            yield Case(
                d, n, dtype, noise, antithetic, seed=2**63 + k, offset=2**32 + k,
                in_memory=("offset",) if choice == 1 else (), dim_offset=(0, 7, ROWS - d)[k % 3],
                sample_offset=(0, 8 * k, 2**33 + 16, COLUMNS - 8)[choice],
                strides=((n, 1), (1, d), (1, d + 3), (1, -d - 1))[layout], misalignment=k // 2 % 5,
                cut=tall(choice, 1) if choice > 1 else None, fast_math=k % 2 == 1, backwards=k // 4 % 2 == 1,
                few_columns=True,
            )  # fmt: skip
    d = of_pass + 200
    for k, (mu, sigma) in enumerate(vectors for kind in INPUTS for vectors in input_vectors(kind, d)[::2]):
        n = k % 8 + 1
        strides = ((n, 1), (1, d))[k // 2 % 2]
        yield Case(d, n, dtype, noise, k % 2 == 1, seed=k, mu=mu, sigma=sigma, strides=strides, few_columns=True)


def small_matrices(dtype: str, noise: str, words: Sequence[tuple[str, ...]] = ((), ("offset",))) -> Iterator[Case]:
    """Matrices of at most 256 groups, aligned and at any stride; `words` are those in memory, in turn."""
    shapes = [(1, 1), (1, 4), (3, 7), (10, 10), (12, 32), (28, 25), (64, 1), (2, 500), (1, 900)]
    numbers = itertools.count()
    for (d, n), antithetic, first in itertools.product(shapes, (False, True), (0, 3, 8)):
        for strides in ((n, 1), (1, d), (2 * n + 1, 2), (-1, d)):
            k = next(numbers)
            yield Case(
                d, n, dtype, noise, antithetic, seed=2**63 + k, offset=2**32 + k, in_memory=words[k % len(words)],
                dim_offset=k,
                sample_offset=first, strides=strides, misalignment=k // 2 % 5, fast_math=k % 2 == 1,
                backwards=k // 4 % 2 == 1, small=True,
            )  # fmt: skip


def large_calls(dtype: str, noise: str, antithetic: tuple[bool, bool]) -> list[Case]:
    """Sizes for which the geometry for a GPU has several chunks per block, runs of columns or tiles.

    `antithetic` is for every second call.
    """
    first, second = antithetic
    chunks = [Case(256 * 513 + 5, 2, dtype, noise, second, seed=3, sample_offset=1)]
    steps = [
        Case(3, 874_500 * (1 + first), dtype, noise, first, seed=5),
        Case(3, 874_501 * (1 + second), dtype, noise, second, sample_offset=3, misalignment=2),
        Case(3, 874_501, dtype, noise, strides=(2_000_000, 2), fast_math=True),
    ]
    # Groups that do not fill a warp.
    rests = [
        Case(513, 516, dtype, noise, sample_offset=1), Case(513, 541, dtype, noise, sample_offset=3),
        Case(257, 1101, dtype, noise, sample_offset=2),
    ]  # fmt: skip
    tiles = [
        Case(131_400, 3, dtype, noise, second, sample_offset=2, strides=(1, 131_401)),
        Case(131_328, 2, dtype, noise, sample_offset=1, strides=(1, 131_328)),
    ]
    few = [Case(2**16 + 77, 3, dtype, noise, first, strides=strides) for strides in ((3, 1), (1, 2**16 + 77))]
    assert all(case.usual_cut().band_rows > case.usual_cut().chunk for case in chunks)
    assert all(case.usual_cut().steps > 1 for case in steps)
    assert [case.usual_cut().rest for case in rests] == [2, 8, 20]
    assert all(case.usual_cut().blocks_per_band > 1 for case in tiles)
    assert {case.store_kind for case in steps} == {"aligned", "shifted", "strided"}
    assert {case.store_kind for case in tiles} == {"transposed"}
    assert {case.store_kind for case in few} == {"few_columns"}
    return [*chunks, Case(28 * 513 + 9, 33, dtype, noise, first, sample_offset=1), *steps, *rests, *tiles, *few]


def plain(dtype: str, noise: str) -> Iterator[Case]:
    """Every shape, address and stride, with several rows, or groups, of a thread; vectors and numbers."""
    numbers = itertools.count()
    for make in (every_shape, dimensions_side_by_side, every_address, any_strides, windows_far_out, offsets_in_memory):
        for case in make(dtype, noise):
            k = next(numbers)
            if k % 3 == 0:
                mu, sigma = case.vectors()
                mu, sigma = ((mu, sigma), (1.5, sigma), (mu, 0.3), (np.asarray(mu)[::-1], sigma))[k // 3 % 4]
                yield dataclasses.replace(case, mu=mu, sigma=sigma, plain=True, turns=(1, 2, 5, 16)[k // 12 % 4])
    # Usual calls.
    shapes = [*itertools.product((4, 16, 39, 68), (8, 64, 264, 296, 520, 1032))]
    choices = itertools.product(enumerate(shapes), (1, 2, 5), (False, True))
    for k, ((number, (d, n)), turns, is_transposed) in enumerate(choices):
        yield Case(
            d, n, dtype, noise, number % 2 == 1, seed=k, sample_offset=8 * k, dim_offset=k % 3, plain=True, turns=turns,
            strides=(1, d) if is_transposed else None, backwards=k % 5 == 0,
        )  # fmt: skip
    # Transposed matrices with aligned columns, whose last piece is partial.
    for k, (d, n, antithetic) in enumerate(itertools.product((33, 38, 43), (16, 37), (False, True))):
        yield Case(
            d, n, dtype, noise, antithetic, seed=k, sample_offset=k % 9, strides=(1, ceil_div(d, 8) * 8), plain=True,
            turns=k // 2 % 3 + 1,
        )  # fmt: skip


def few_rows(dtype: str, noise: str) -> Iterator[Case]:
    """One or two rows, with several groups of a thread, at every address and stride, and with vectors of any type."""
    numbers = itertools.count()
    for make in (every_shape, every_address, any_strides, windows_far_out, offsets_in_memory):
        for case in make(dtype, noise):
            if case.store_kind == "few_rows":
                k = next(numbers)
                mu, sigma = input_vectors(INPUTS[k % len(INPUTS)], 37)[k % 10]
                mu, sigma = (x if isinstance(x, float) else x[: case.d] for x in (mu, sigma))
                yield dataclasses.replace(case, mu=mu, sigma=sigma, turns=(2, 3, 5, 16)[k % 4])
    for k, n in enumerate((128 * 4 * 6, 128 * 8 * 6 + 8, 9001)):
        yield Case(2, n, dtype, noise, k == 1, seed=k, sample_offset=8 * k, turns=2 + k)


SOME_WORDS = [words for count in range(1, 5) for words in itertools.combinations(WORDS, count) if words != ("offset",)]
"""Combinations of words in memory that need the kernel that reads the seed and the window from memory."""

TABLES: dict[str, tuple[Callable[[str, str], Iterator[Case]], dict[str, int]]] = {
    "every shape": (every_shape, dict.fromkeys(STORE_KINDS[:3], 16)),
    "dimensions side by side": (dimensions_side_by_side, {"transposed": 100}),
    "every address": (every_address, dict.fromkeys(STORE_KINDS[:6], 11)),
    "threads beyond the last column": (threads_beyond_the_last_column, dict.fromkeys(STORE_KINDS[:6], 1)),
    "any strides": (any_strides, dict.fromkeys(STORE_KINDS[:6], 3)),
    "few columns": (few_columns, {"few_columns": 150}),
    "small matrices": (small_matrices, {"small_matrices": 150}),
    "windows far out": (windows_far_out, {}),
    "windows of pairs": (windows_of_pairs, dict.fromkeys(("staged", "strided", "transposed"), 20)),
    "offsets in memory": (offsets_in_memory, dict.fromkeys(STORE_KINDS[:4], 1)),
    "vectors of every type": (vectors_of_every_type, {}),
    "calls cut differently": (calls_cut_differently, dict.fromkeys(STORE_KINDS[:6], 6)),
    "plain": (plain, {"plain": 200, "plain_transposed": 100}),
    "few rows": (few_rows, {"few_rows": 150}),
}
"""Tables of cases, each with the least number of cases for each store variant."""
