"""The geometry of a call: its cut into CUDA blocks and threads, for backends that launch from Python.

A twin of ``csrc/cuda/geometry.h``, which has the reasons. The numbers drawn do not depend on the geometry.
"""

from __future__ import annotations

import functools
import struct
from typing import NamedTuple

from multisample.backends.element_types import SIZES

from .kernel_choice import (
    ALIGNED,
    ANTITHETIC_WIDTH,
    FAR_APART,
    FEW_COLUMNS,
    FEW_ROWS,
    PLAIN,
    PLAIN_THREADS,
    PLAIN_TRANSPOSED,
    SHIFTED,
    SHORT_ROW,
    SMALL_MATRICES,
    SMALL_THREADS,
    STAGED,
    STRIDED,
    TRANSPOSED,
    TRANSPOSED_STAGED,
    WIDTH,
    ceil_div,
    has_few_rows,
    is_small,
    is_usual,
    own_rows_of,
    store_kind_of,
)

MOST_THREADS = 288
SHIFTED_THREADS = 256
SHORT_ROW_THREADS = 2 * SHORT_ROW
STAGED_PASSES = 4
TRANSPOSED_THREADS = 128
FEW_THREADS = 128
_MOST_FEW_PASSES, _MOST_FEW_PASSES_IF_CHEAP = (8, 6, 6, 3, 2, 2, 2, 2), (8, 3, 2, 1, 1, 1, 1, 1)
PLAIN_TRANSPOSED_THREADS = 64
PLAIN_TURNS, ONE_ROW_TURNS, MANY_TURNS = 4, 8, 3
_MOST_SMALL_ROWS = 8
_BUSY_THREADS = 2**17
_MOST_GROUPS_PER_PASS = 16
_MOST_PASSES = 32

FORMAT = 17 * "I" + "iIi" + 6 * "I"
"""The format of `struct` for each field of the C++ struct ``Geometry``."""
_STRUCT = struct.Struct(FORMAT)

PACKED_GEOMETRY = _STRUCT.size
"""Bytes of the C++ struct ``Geometry``."""


class Geometry(NamedTuple):
    """The fields of the C++ struct ``Geometry``, in their order. A field that a store kind does not use is 0."""

    groups_per_pass: int = 0
    one_by_groups: int = 0
    rows_per_pass: int = 0
    blocks_per_band: int = 0
    skip: int = 0
    pieces: int = 0
    turns: int = 0
    usual: int = 0
    one_by_units: int = 0
    units_shift: int = 0
    store_kind: int = 0
    one_by_rows: int = 0
    chunk: int = 0
    pitch: int = 0
    band_rows: int = 0
    interleave_log2: int = 0
    steps: int = 0
    row_step: int = 0
    overlap: int = 0
    column_step: int = 0
    band_groups: int = 0
    warps: int = 0
    rest: int = 0
    matrices: int = 0
    blocks: int = 0
    threads: int = 0

    @property
    def version(self) -> tuple[int, bool]:
        """`turns` and `usual`, arguments of the C++ template ``sample_kernel``: the version of a plain kernel."""
        if self.store_kind not in (PLAIN, PLAIN_TRANSPOSED):
            return 0, False
        most = ONE_ROW_TURNS if self.store_kind == PLAIN else 2 if self.usual else 1
        return self.turns if self.turns <= most else MANY_TURNS, bool(self.usual)


@functools.lru_cache(maxsize=1024)
def geometry(
    rows: int, columns: int, dtype: str, strides: tuple[int, int], misalignment: int, first_column: int,
    shared_noise: bool, antithetic: bool, fast_math: bool, strided: bool = False, batch: int = 1,
    may_be_plain: bool = False, contiguous: bool = False,
) -> tuple[Geometry, bytes]:  # fmt: skip
    """The geometry of a launch of `batch` matrices, as a tuple and as the bytes of the C++ struct.

    `misalignment` is the address of the matrix modulo 32, and `strides` are its strides in bytes. `first_column` is
    the index of the call's first column modulo 8, or -1 if that index is in device memory. `strided` forces kStrided,
    which supports every stride and address, unless kFewRows draws the matrix. `may_be_plain` says whether
    `Launch.origin_in_memory` is 0, and `contiguous`, whether mu and sigma are contiguous vectors.
    """
    size, fixed_skip = SIZES[dtype], first_column >= 0
    cheap = shared_noise or (fast_math and dtype == "float32")  # Noise takes less time than its stores.
    row_stride, column_stride = strides
    width = ANTITHETIC_WIDTH if antithetic else WIDTH
    skip = first_column % width if fixed_skip else width - 1
    groups = ceil_div(skip + columns, width)
    usual = is_usual(rows, columns, size, strides, misalignment, skip, antithetic, contiguous)
    store_kind = STRIDED
    if not strided or has_few_rows(rows, size, strides):
        store_kind = store_kind_of(
            rows, columns, size, strides, misalignment, skip, groups, shared_noise, antithetic, fast_math, fixed_skip,
            may_be_plain and batch == 1, usual,
        )  # fmt: skip
    if batch > 1 and is_small(rows, columns, antithetic):
        cut = small_matrices_geometry(rows, groups, batch)
    elif store_kind in (PLAIN, PLAIN_TRANSPOSED):
        cut = _plain(rows, groups, size, skip, store_kind, usual, cheap, shared_noise, antithetic)
    elif store_kind == FEW_ROWS:
        cut = _few_rows(rows, groups, skip, batch)
    elif store_kind == FEW_COLUMNS:
        cut = few_columns_geometry(rows, columns, size, cheap)
    elif store_kind == TRANSPOSED:
        cut = _transposed(
            rows, groups, size, column_stride, misalignment, skip, fixed_skip, cheap, shared_noise, antithetic
        )
    else:
        cut = _rows(rows, groups, size, row_stride, skip, store_kind, cheap, shared_noise, antithetic, batch)
    return cut, _STRUCT.pack(*cut)


def _plain(
    rows: int, groups: int, size: int, skip: int, store_kind: int, usual: bool, cheap: bool, shared_noise: bool,
    antithetic: bool,
) -> Geometry:  # fmt: skip
    """The geometry of kPlain or kPlainTransposed."""
    groups_of_all, turns = groups * rows, 1
    if store_kind == PLAIN_TRANSPOSED:
        units = ceil_div(rows, own_rows_of(size))
        if cheap or antithetic:
            turns = 4 if groups_of_all >= 2**24 and not (shared_noise or antithetic) else 1
        elif groups_of_all >= 2**18:
            turns = min(max(groups_of_all >> 20, 2), 8)
        cut = Geometry(
            blocks=ceil_div(units * ceil_div(groups, turns), PLAIN_TRANSPOSED_THREADS),
            threads=PLAIN_TRANSPOSED_THREADS, pieces=units,
        )  # fmt: skip
    else:
        tiles = ceil_div(groups, PLAIN_THREADS)
        per_pass = groups if tiles == 1 else ceil_div(ceil_div(groups, tiles), 32) * 32
        rows_per_pass, units = min(PLAIN_THREADS // per_pass, rows), ceil_div(groups, per_pass)
        stores_much = size >= 4 if antithetic else shared_noise and size == 8
        if groups_of_all >= 2**16 and not stores_much:
            turns = PLAIN_TURNS
        many = 2**20 if cheap else 2**18
        one_row = usual and rows_per_pass == 1 and rows >= ONE_ROW_TURNS
        if groups_of_all >= many and one_row and size < 8 and not antithetic:
            turns = ONE_ROW_TURNS
        cut = Geometry(
            blocks=ceil_div(ceil_div(rows, rows_per_pass), turns) * units,
            threads=ceil_div(per_pass * rows_per_pass, 32) * 32, groups_per_pass=per_pass,
            one_by_groups=ceil_div(1 << 20, per_pass), rows_per_pass=rows_per_pass, blocks_per_band=units,
        )  # fmt: skip
    return cut._replace(skip=skip, store_kind=store_kind, turns=turns, usual=int(usual), **divisor(units))


def _few_rows(rows: int, groups: int, skip: int, batch: int) -> Geometry:
    """The geometry of kFewRows."""
    most = min(max(groups // PLAIN_THREADS, 1), 16)
    turns = min(max(groups * rows * batch >> 16, 1), most)
    blocks_per_row = ceil_div(groups, PLAIN_THREADS * turns)
    return Geometry(
        blocks=blocks_per_row * rows, threads=PLAIN_THREADS, skip=skip, store_kind=FEW_ROWS, turns=turns,
        blocks_per_band=blocks_per_row, **divisor(blocks_per_row),
    )  # fmt: skip


def divisor(units: int) -> dict[str, int]:
    """The fields of a geometry with which a kernel divides by `units`: see ``Geometry`` in C++."""
    shift = 31 + (units - 1).bit_length()
    return {"one_by_units": ceil_div(1 << shift, units), "units_shift": shift}


def _rows(
    rows: int, groups: int, size: int, row_stride: int, skip: int, store_kind: int, cheap: bool, shared_noise: bool,
    antithetic: bool, batch: int,
) -> Geometry:  # fmt: skip
    """The geometry of row stores."""
    warps, rest = divmod(groups, 32) if store_kind == SHIFTED else (0, 0)
    many = rest > 8 and groups - rest != SHIFTED_THREADS
    if rest > 0 and (many or antithetic or rows * ceil_div(groups, SHIFTED_THREADS) <= 512):
        warps, rest = warps + 1, 0
    tiled, most_per_pass = groups - rest, SHIFTED_THREADS if store_kind == SHIFTED else MOST_THREADS
    tiles = 1 if tiled <= most_per_pass else ceil_div(tiled, 2 * SHORT_ROW)
    per_pass = tiled if tiles == 1 else ceil_div(ceil_div(tiled, tiles), 32) * 32
    rows_per_pass = 1 if store_kind == SHIFTED or per_pass > SHORT_ROW else min(SHORT_ROW_THREADS // per_pass, rows)
    threads = ceil_div(per_pass * rows_per_pass, 32) * 32
    passes_of_chunk = threads // rows_per_pass
    if store_kind == STAGED and passes_of_chunk > STAGED_PASSES:
        passes_of_chunk -= passes_of_chunk % STAGED_PASSES
    rows_down = ceil_div(rows, rows_per_pass)
    most = _most_turns(store_kind, rows_per_pass, tiles, shared_noise, cheap)
    turns_of_launch = rows_down * tiles * batch
    turns = min(most, max(min(32, ceil_div(turns_of_launch, 512)), turns_of_launch // 2048))
    interleave_log2 = 0
    passes = min(turns, rows_down)
    if passes > 1 and store_kind in (SHIFTED, STAGED):
        while (row_stride * rows_per_pass << interleave_log2) % 16:
            interleave_log2 += 1
        if rows_down <= 1 << interleave_log2:
            passes = 1
            interleave_log2 = 0
    elif cheap and store_kind == ALIGNED and per_pass > SHORT_ROW and tiles == 1 and turns == most:
        interleave_log2 = 3 if rows_down >= 8 * passes else 0
    row_step = row_stride // size * rows_per_pass << interleave_log2
    if not -(2**31) <= row_step < 2**31:
        row_step, passes, interleave_log2 = 0, 1, 0
    steps = min(turns // passes, tiles)
    blocks_per_band = ceil_div(tiled, steps * per_pass)
    bands = ceil_div(ceil_div(rows_down, passes), 1 << interleave_log2) << interleave_log2
    return Geometry(
        blocks=bands * blocks_per_band, threads=threads, groups_per_pass=per_pass,
        one_by_groups=ceil_div(1 << 20, per_pass), rows_per_pass=rows_per_pass,
        one_by_rows=ceil_div(1 << 20, rows_per_pass), chunk=passes_of_chunk * rows_per_pass,
        pitch=threads // rows_per_pass | 1, band_rows=passes * rows_per_pass, interleave_log2=interleave_log2,
        steps=steps, blocks_per_band=blocks_per_band, skip=skip, store_kind=store_kind, row_step=row_step, warps=warps,
        rest=rest,
    )  # fmt: skip


def _most_turns(store_kind: int, rows_per_pass: int, tiles: int, shared_noise: bool, cheap: bool) -> int:
    """Maximum groups per thread of row stores, one below the other."""
    if shared_noise or (cheap and store_kind == ALIGNED and rows_per_pass > 1):
        return 8
    if cheap:
        return 32 if store_kind == ALIGNED and tiles > 1 else 16
    return 128 if store_kind == ALIGNED else 32


def staged_own_rows_of(size: int, antithetic: bool) -> int:
    """Dimensions that a thread of kTransposedStaged keeps."""
    return own_rows_of(size) // (2 if antithetic else 1)


def staged_threads(shared_noise: bool) -> int:
    """Threads of a block of kTransposedStaged."""
    return 256 if shared_noise else 128


def _transposed(
    rows: int, groups: int, size: int, column_stride: int, misalignment: int, skip: int, fixed_skip: bool,
    cheap: bool, shared_noise: bool, antithetic: bool,
) -> Geometry:  # fmt: skip
    own_rows = own_rows_of(size)
    aligned = (misalignment | column_stride) % (own_rows * size) == 0 and rows % own_rows == 0
    enough = ceil_div(groups, 264)
    room = staged_threads(shared_noise) * staged_own_rows_of(size, antithetic)
    most_groups = room // rows
    overlap, tiles, column_step = 0, 1, 0
    whole_sectors = (misalignment | column_stride) % 32 == 0
    prefers_pieces = aligned and (whole_sectors or not (shared_noise or (cheap and antithetic)))
    fits = most_groups > (0 if shared_noise or antithetic else 1 if cheap else 3)
    if not prefers_pieces and column_stride == rows * size and fits:
        store_kind, pieces, threads = TRANSPOSED_STAGED, rows, staged_threads(shared_noise)
        per_pass = min(enough, most_groups, threads)
    else:
        store_kind, column_step = TRANSPOSED, column_stride // size
        same_alignment = column_step % own_rows == 0
        overlap = 0 if same_alignment else 1
        start = (misalignment - skip * column_stride) // size % own_rows
        shift = start if same_alignment or fixed_skip else own_rows - 1
        pieces = ceil_div(shift + rows + (0 if same_alignment else own_rows - 1), own_rows)
        per_pass, tiles, threads = _groups_per_pass(pieces, 32 - overlap, enough, abs(column_step))
    passes_all = ceil_div(groups, per_pass)
    most = _MOST_PASSES
    if passes_all > _MOST_PASSES:
        most = _most_passes(store_kind, cheap, shared_noise, antithetic, whole_sectors)
    passes = min(most, max(min(8, ceil_div(passes_all * tiles, 1024)), passes_all * tiles // 2048))
    passes = max(passes, ceil_div(passes_all * tiles, 2**30))
    return Geometry(
        blocks=ceil_div(passes_all, passes) * tiles, threads=threads, groups_per_pass=per_pass,
        chunk=threads // per_pass * per_pass, blocks_per_band=tiles, skip=skip, store_kind=store_kind, pieces=pieces,
        overlap=overlap, column_step=column_step, band_groups=passes * per_pass,
    )  # fmt: skip


def few_columns_geometry(rows: int, columns: int, size: int, cheap: bool) -> Geometry:
    """The geometry of kFewColumns, for elements of `size` bytes."""
    rows_per_pass = FEW_THREADS * own_rows_of(size)
    passes_all = ceil_div(rows, rows_per_pass)
    most = (_MOST_FEW_PASSES_IF_CHEAP if cheap else _MOST_FEW_PASSES)[columns - 1]
    passes = min(most, max(1, passes_all // 4096))
    return Geometry(
        blocks=ceil_div(passes_all, passes), threads=FEW_THREADS, rows_per_pass=rows_per_pass,
        band_rows=passes * rows_per_pass, blocks_per_band=1, store_kind=FEW_COLUMNS,
    )  # fmt: skip


def small_matrices_geometry(rows: int, groups: int, batch: int) -> Geometry:
    """The geometry of kSmallMatrices, for `batch` matrices of `rows` rows and `groups` groups of columns."""
    turns = min(max(batch * rows * groups // _BUSY_THREADS, 1), _MOST_SMALL_ROWS)
    rows_per_pass = ceil_div(rows, turns)
    matrices = min(SMALL_THREADS // (rows_per_pass * groups), batch)
    return Geometry(
        blocks=ceil_div(batch, matrices), threads=ceil_div(matrices * rows_per_pass * groups, 32) * 32,
        groups_per_pass=groups, one_by_groups=ceil_div(1 << 20, groups), rows_per_pass=rows_per_pass,
        one_by_rows=ceil_div(1 << 20, rows_per_pass), store_kind=SMALL_MATRICES, matrices=matrices,
    )  # fmt: skip


def _most_passes(store_kind: int, cheap: bool, shared_noise: bool, antithetic: bool, whole_sectors: bool) -> int:
    """Maximum passes of a block of kTransposed or kTransposedStaged, in a large launch."""
    if store_kind == TRANSPOSED_STAGED:
        return _MOST_PASSES if not cheap else 4 if antithetic else 2 if shared_noise else 16
    if antithetic:
        return 1 if shared_noise else 2
    return 2 if shared_noise else 8 if cheap and not whole_sectors else _MOST_PASSES


def _groups_per_pass(pieces: int, of_warp: int, enough: int, apart: int) -> tuple[int, int, int]:
    """Groups per pass of kTransposed, blocks per pass, and threads per block."""
    per_pass, tiles, warps, most = 1, 0, 0, TRANSPOSED_THREADS // 32
    t = 1
    while t <= _MOST_GROUPS_PER_PASS or t * pieces <= most * of_warp:
        if t > 1 and apart * t >= FAR_APART:
            break
        warps_all = ceil_div(t * pieces, of_warp)
        blocks = ceil_div(warps_all, most)
        of_block = ceil_div(warps_all, blocks)
        if t == 1 or (t <= enough * blocks and 50 * blocks * of_block * per_pass < 49 * warps * t):
            per_pass, tiles, warps = t, blocks, blocks * of_block
        t += 1
    return per_pass, tiles, 32 * (warps // tiles)
