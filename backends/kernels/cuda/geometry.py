"""The store kind of a call, which selects its kernel, and the geometry: its cut into CUDA blocks and threads.

A twin of ``csrc/cuda/geometry.h``, which has the reasons. The numbers drawn do not depend on the geometry.
"""

import enum
import struct
from typing import NamedTuple

from multisample.backends.launch import SIZES, ElementType, Launch

StoreKind = enum.IntEnum(
    "StoreKind",
    ["kAligned", "kShifted", "kStaged", "kStrided", "kTransposed", "kTransposedStaged", "kFewColumns", "kSmallMatrices",
     "kPlain", "kPlainTransposed", "kFewRows"],
    start=0,
)  # fmt: skip
ELEMENT_SIZES = [SIZES.get(kind.name, 0) for kind in ElementType]
"""Bytes of an element, by `ElementType`; 0 for types that no matrix has."""
WIDTH, ANTITHETIC_WIDTH = 4, 8
SHORT_ROW = 128
FAR_APART = 2**28
MOST_FEW_COLUMNS = 8
LEAST_ROWS = 2**16
_MOST_FEW_ROWS = 2
SMALL_THREADS = 256
PLAIN_THREADS = 128

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
        if self.store_kind not in (StoreKind.kPlain, StoreKind.kPlainTransposed):
            return 0, False
        most = ONE_ROW_TURNS if self.store_kind == StoreKind.kPlain else 2 if self.usual else 1
        return self.turns if self.turns <= most else MANY_TURNS, bool(self.usual)

    def packed(self) -> bytes:
        """The bytes of the C++ struct."""
        return _STRUCT.pack(*self)


def ceil_div(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(-a // b)


def own_rows_of(size: int) -> int:
    """How many dimensions a thread draws: see ``kOwnRows`` in C++."""
    return 2 if size == 8 else 4


def _is_transposed(launch: Launch, size: int) -> bool:
    """Whether dimensions are contiguous and columns are not."""
    return launch.row_stride == size != launch.column_stride and launch.rows > 1


def _has_few_columns(launch: Launch, skip: int, size: int) -> bool:
    """Whether kFewColumns draws the matrix."""
    if launch.columns > MOST_FEW_COLUMNS or launch.rows < LEAST_ROWS:
        return False
    if skip or launch.column_stride % size or launch.matrix % size:
        return False
    side_by_side = launch.column_stride == size and launch.row_stride == launch.columns * size
    return launch.row_stride == size or side_by_side


def _has_few_rows(launch: Launch, size: int) -> bool:
    """Whether kFewRows draws the matrix, unless kPlain does."""
    return launch.rows == 1 or (launch.rows <= _MOST_FEW_ROWS and launch.column_stride == size)


def _has_aligned_pieces(launch: Launch, size: int) -> bool:
    """Whether dimensions form whole pieces at aligned addresses."""
    own_rows = own_rows_of(size)
    return launch.rows % own_rows == 0 and (launch.matrix | launch.column_stride) % (own_rows * size) == 0


def is_usual(launch: Launch, skip: int) -> bool:
    """Whether mu and sigma are contiguous vectors, and all groups and pieces are whole and aligned."""
    vectors = (launch.mu_type, launch.mu_stride), (launch.sigma_type, launch.sigma_stride)
    if any(kind == ElementType.number or stride != ELEMENT_SIZES[kind] for kind, stride in vectors):
        return False
    if skip or launch.columns % (ANTITHETIC_WIDTH if launch.antithetic else WIDTH):
        return False
    size = ELEMENT_SIZES[launch.type]
    if _is_transposed(launch, size):
        return _has_aligned_pieces(launch, size)
    return launch.column_stride == size and (launch.matrix | launch.row_stride) % (8 if size == 2 else 16) == 0


def _most_plain_groups(launch: Launch, usual: bool, groups: int) -> int:
    """Maximum groups of all rows with kPlain."""
    shared_noise, antithetic, size = launch.shared_noise, launch.antithetic, ELEMENT_SIZES[launch.type]
    indexed = 2**31
    few = _has_few_rows(launch, size)
    if few or not usual:
        return 2**16 if size == 8 or shared_noise or antithetic else 2**18 if few else 3 * 2**18
    if size == 8:
        return 2**16 if shared_noise or antithetic else indexed
    if antithetic and size == 2:
        return indexed if shared_noise else 2**21
    if antithetic:
        return 2**18 if shared_noise or launch.fast_math else 3 * 2**17
    if shared_noise:
        return 2**22 if size == 2 else 2**23
    return 2**22 if groups > PLAIN_THREADS // 2 else 3 * 2**18


def _is_plain(launch: Launch, skip: int, groups: int) -> bool:
    """Whether a plain kernel is the fastest."""
    if launch.origin_in_memory or launch.batch > 1 or launch.columns >= 2**30:
        return False
    usual, size, groups_of_all = is_usual(launch, skip), ELEMENT_SIZES[launch.type], groups * launch.rows
    if not _is_transposed(launch, size):
        return groups_of_all <= _most_plain_groups(launch, usual, groups)
    if _has_aligned_pieces(launch, size):
        costly = not (launch.shared_noise or launch.antithetic or (launch.fast_math and size < 8))
        at_every_size = usual if costly else launch.columns >= 512
        return groups_of_all <= (2**32 - 1 if at_every_size else 2**21)
    return launch.rows >= 32 and groups_of_all <= (2**16 if size == 8 else 2**18)


def store_kind_of(launch: Launch, skip: int, groups: int, strided: bool) -> StoreKind:
    """The store kind of a matrix. `strided`: see `geometry`."""
    size = ELEMENT_SIZES[launch.type]
    if strided and not _has_few_rows(launch, size):
        return StoreKind.kStrided
    if _has_few_columns(launch, skip, size):
        return StoreKind.kFewColumns
    if _is_plain(launch, skip, groups):
        return StoreKind.kPlainTransposed if _is_transposed(launch, size) else StoreKind.kPlain
    if _has_few_rows(launch, size):
        return StoreKind.kFewRows
    if launch.column_stride != size:
        reaches = abs(launch.column_stride) // size < FAR_APART and launch.rows < FAR_APART
        whole = launch.column_stride % size == 0
        return StoreKind.kTransposed if _is_transposed(launch, size) and whole and reaches else StoreKind.kStrided
    quad = 8 if size == 2 and not launch.antithetic else 16
    start, fixed_skip = launch.matrix - skip * size, not launch.first_column_at
    if fixed_skip and start % quad == 0 and launch.row_stride % quad == 0:
        return StoreKind.kAligned
    if start % size or launch.row_stride % size:
        return StoreKind.kStrided
    if groups > SHORT_ROW:
        return StoreKind.kShifted
    return StoreKind.kStaged if fixed_skip and launch.row_stride == launch.columns * size else StoreKind.kStrided


def is_small(launch: Launch) -> bool:
    """Whether a matrix of this size fits into a block of kSmallMatrices, wherever it begins within a group."""
    width = ANTITHETIC_WIDTH if launch.antithetic else WIDTH
    return launch.rows * ceil_div(width - 1 + launch.columns, width) <= SMALL_THREADS


def geometry(launch: Launch, strided: bool = False) -> Geometry:
    """The geometry of a sample, or of a batch of them.

    Of the fields `matrix` and `first_column`, the last bits matter: the address modulo 32, the column modulo 8. If
    `first_column_at` is not 0, the geometry fits every first column. `strided` forces kStrided, which supports every
    stride and address, unless kFewRows draws the matrix.
    """
    width = ANTITHETIC_WIDTH if launch.antithetic else WIDTH
    skip = width - 1 if launch.first_column_at else launch.first_column % width
    groups = ceil_div(skip + launch.columns, width)
    if launch.batch > 1 and is_small(launch):
        return small_matrices_geometry(launch, groups)
    g = Geometry(skip=skip, store_kind=store_kind_of(launch, skip, groups, strided))
    if g.store_kind in (StoreKind.kPlain, StoreKind.kPlainTransposed):
        return _plain(launch, g, groups)
    if g.store_kind == StoreKind.kFewRows:
        return _few_rows(launch, g, groups)
    if g.store_kind == StoreKind.kFewColumns:
        return few_columns_geometry(launch, g)
    if g.store_kind == StoreKind.kTransposed:
        return _transposed(launch, g, groups)
    return _rows(launch, g, groups)


def _is_cheap(launch: Launch) -> bool:
    """Whether noise takes less time than its stores."""
    return bool(launch.shared_noise or (launch.fast_math and launch.type == ElementType.float32))


def _plain(launch: Launch, g: Geometry, groups: int) -> Geometry:
    """The geometry of kPlain or kPlainTransposed."""
    rows, size, antithetic, cheap = launch.rows, ELEMENT_SIZES[launch.type], launch.antithetic, _is_cheap(launch)
    groups_of_all, usual, turns = groups * rows, is_usual(launch, g.skip), 1
    if g.store_kind == StoreKind.kPlainTransposed:
        units = ceil_div(rows, own_rows_of(size))
        if cheap or antithetic:
            turns = 4 if groups_of_all >= 2**24 and not (launch.shared_noise or antithetic) else 1
        elif groups_of_all >= 2**18:
            turns = min(max(groups_of_all >> 20, 2), 8)
        g = g._replace(
            blocks=ceil_div(units * ceil_div(groups, turns), PLAIN_TRANSPOSED_THREADS),
            threads=PLAIN_TRANSPOSED_THREADS, pieces=units,
        )  # fmt: skip
    else:
        tiles = ceil_div(groups, PLAIN_THREADS)
        per_pass = groups if tiles == 1 else ceil_div(ceil_div(groups, tiles), 32) * 32
        rows_per_pass, units = min(PLAIN_THREADS // per_pass, rows), ceil_div(groups, per_pass)
        stores_much = size >= 4 if antithetic else launch.shared_noise and size == 8
        if groups_of_all >= 2**16 and not stores_much:
            turns = PLAIN_TURNS
        many = 2**20 if cheap else 2**18
        one_row = usual and rows_per_pass == 1 and rows >= ONE_ROW_TURNS
        if groups_of_all >= many and one_row and size < 8 and not antithetic:
            turns = ONE_ROW_TURNS
        g = g._replace(
            blocks=ceil_div(ceil_div(rows, rows_per_pass), turns) * units,
            threads=ceil_div(per_pass * rows_per_pass, 32) * 32, groups_per_pass=per_pass,
            one_by_groups=ceil_div(1 << 20, per_pass), rows_per_pass=rows_per_pass, blocks_per_band=units,
        )  # fmt: skip
    return g._replace(turns=turns, usual=int(usual), **divisor(units))


def _few_rows(launch: Launch, g: Geometry, groups: int) -> Geometry:
    """The geometry of kFewRows."""
    most = min(max(groups // PLAIN_THREADS, 1), 16)
    turns = min(max(groups * launch.rows * max(launch.batch, 1) >> 16, 1), most)
    blocks_per_row = ceil_div(groups, PLAIN_THREADS * turns)
    return g._replace(
        blocks=blocks_per_row * launch.rows, threads=PLAIN_THREADS, turns=turns, blocks_per_band=blocks_per_row,
        **divisor(blocks_per_row),
    )  # fmt: skip


def divisor(units: int) -> dict[str, int]:
    """The fields of a geometry with which a kernel divides by `units`: see ``Geometry`` in C++."""
    shift = 31 + (units - 1).bit_length()
    return {"one_by_units": ceil_div(1 << shift, units), "units_shift": shift}


def _rows(launch: Launch, g: Geometry, groups: int) -> Geometry:
    """The geometry of row stores."""
    rows, row_stride, cheap = launch.rows, launch.row_stride, _is_cheap(launch)
    is_aligned, is_shifted, is_staged = (g.store_kind == kind for kind in list(StoreKind)[:3])
    warps, rest = divmod(groups, 32) if is_shifted else (0, 0)
    many = rest > 8 and groups - rest != SHIFTED_THREADS
    if rest > 0 and (many or launch.antithetic or rows * ceil_div(groups, SHIFTED_THREADS) <= 512):
        warps, rest = warps + 1, 0
    tiled, most_per_pass = groups - rest, SHIFTED_THREADS if is_shifted else MOST_THREADS
    tiles = 1 if tiled <= most_per_pass else ceil_div(tiled, 2 * SHORT_ROW)
    per_pass = tiled if tiles == 1 else ceil_div(ceil_div(tiled, tiles), 32) * 32
    rows_per_pass = 1 if is_shifted or per_pass > SHORT_ROW else min(SHORT_ROW_THREADS // per_pass, rows)
    threads = ceil_div(per_pass * rows_per_pass, 32) * 32
    passes_of_chunk = threads // rows_per_pass
    if is_staged and passes_of_chunk > STAGED_PASSES:
        passes_of_chunk -= passes_of_chunk % STAGED_PASSES
    rows_down = ceil_div(rows, rows_per_pass)
    most = 128 if is_aligned else 32
    if launch.shared_noise or (cheap and is_aligned and rows_per_pass > 1):
        most = 8
    elif cheap:
        most = 32 if is_aligned and tiles > 1 else 16
    turns_of_launch = rows_down * tiles * max(launch.batch, 1)
    turns = min(most, max(min(32, ceil_div(turns_of_launch, 512)), turns_of_launch // 2048))
    interleave_log2 = 0
    passes = min(turns, rows_down)
    if passes > 1 and (is_shifted or is_staged):
        while (row_stride * rows_per_pass << interleave_log2) % 16:
            interleave_log2 += 1
        if rows_down <= 1 << interleave_log2:
            passes = 1
            interleave_log2 = 0
    elif cheap and is_aligned and per_pass > SHORT_ROW and tiles == 1 and turns == most:
        interleave_log2 = 3 if rows_down >= 8 * passes else 0
    row_step = row_stride // ELEMENT_SIZES[launch.type] * rows_per_pass << interleave_log2
    if not -(2**31) <= row_step < 2**31:
        row_step, passes, interleave_log2 = 0, 1, 0
    steps = min(turns // passes, tiles)
    blocks_per_band = ceil_div(tiled, steps * per_pass)
    bands = ceil_div(ceil_div(rows_down, passes), 1 << interleave_log2) << interleave_log2
    return g._replace(
        blocks=bands * blocks_per_band, threads=threads, groups_per_pass=per_pass,
        one_by_groups=ceil_div(1 << 20, per_pass), rows_per_pass=rows_per_pass,
        one_by_rows=ceil_div(1 << 20, rows_per_pass), chunk=passes_of_chunk * rows_per_pass,
        pitch=threads // rows_per_pass | 1, band_rows=passes * rows_per_pass, interleave_log2=interleave_log2,
        steps=steps, blocks_per_band=blocks_per_band, row_step=row_step, warps=warps, rest=rest,
    )  # fmt: skip


def _transposed(launch: Launch, g: Geometry, groups: int) -> Geometry:
    """The geometry of kTransposed, or of kTransposedStaged where that is faster."""
    rows, column_stride, size, cheap = launch.rows, launch.column_stride, ELEMENT_SIZES[launch.type], _is_cheap(launch)
    shared_noise, antithetic, own_rows = bool(launch.shared_noise), bool(launch.antithetic), own_rows_of(size)
    enough, tiles, threads = ceil_div(groups, 264), 1, 256 if shared_noise else 128
    most_groups = threads * (own_rows // 2 if antithetic else own_rows) // rows
    whole_sectors = (launch.matrix | column_stride) % 32 == 0
    fits = most_groups > (0 if shared_noise or antithetic else 1 if cheap else 3)
    if not _has_aligned_pieces(launch, size) and column_stride == rows * size and fits:
        g = g._replace(store_kind=StoreKind.kTransposedStaged, pieces=rows)
        per_pass = min(enough, most_groups, threads)
    else:
        column_step = column_stride // size
        same_alignment = column_step % own_rows == 0
        overlap = 0 if same_alignment else 1
        start = (launch.matrix - g.skip * column_stride) // size % own_rows
        shift = start if same_alignment or not launch.first_column_at else own_rows - 1
        pieces = ceil_div(shift + rows + (0 if same_alignment else own_rows - 1), own_rows)
        g = g._replace(pieces=pieces, overlap=overlap, column_step=column_step)
        per_pass, tiles, threads = _groups_per_pass(pieces, 32 - overlap, enough, abs(column_step))
    passes_all = ceil_div(groups, per_pass)
    most = _MOST_PASSES
    if passes_all > _MOST_PASSES:
        most = _most_passes(g.store_kind, cheap, shared_noise, antithetic, whole_sectors)
    passes = min(most, max(min(8, ceil_div(passes_all * tiles, 1024)), passes_all * tiles // 2048))
    passes = max(passes, ceil_div(passes_all * tiles, 2**30))
    return g._replace(
        blocks=ceil_div(passes_all, passes) * tiles, threads=threads, groups_per_pass=per_pass,
        chunk=threads // per_pass * per_pass, blocks_per_band=tiles, band_groups=passes * per_pass,
    )  # fmt: skip


def few_columns_geometry(launch: Launch, g: Geometry) -> Geometry:
    """The geometry of kFewColumns."""
    rows_per_pass = FEW_THREADS * own_rows_of(ELEMENT_SIZES[launch.type])
    passes_all = ceil_div(launch.rows, rows_per_pass)
    most = (_MOST_FEW_PASSES_IF_CHEAP if _is_cheap(launch) else _MOST_FEW_PASSES)[launch.columns - 1]
    passes = min(most, max(1, passes_all // 4096))
    return g._replace(
        blocks=ceil_div(passes_all, passes), threads=FEW_THREADS, rows_per_pass=rows_per_pass,
        band_rows=passes * rows_per_pass, blocks_per_band=1,
    )  # fmt: skip


def small_matrices_geometry(launch: Launch, groups: int) -> Geometry:
    """The geometry of kSmallMatrices, for matrices of `groups` groups of columns."""
    rows, batch = launch.rows, launch.batch
    turns = min(max(batch * rows * groups // _BUSY_THREADS, 1), _MOST_SMALL_ROWS)
    rows_per_pass = ceil_div(rows, turns)
    matrices = min(SMALL_THREADS // (rows_per_pass * groups), batch)
    return Geometry(
        blocks=ceil_div(batch, matrices), threads=ceil_div(matrices * rows_per_pass * groups, 32) * 32,
        groups_per_pass=groups, one_by_groups=ceil_div(1 << 20, groups), rows_per_pass=rows_per_pass,
        one_by_rows=ceil_div(1 << 20, rows_per_pass), store_kind=StoreKind.kSmallMatrices, matrices=matrices,
    )  # fmt: skip


def _most_passes(store_kind: int, cheap: bool, shared_noise: bool, antithetic: bool, whole_sectors: bool) -> int:
    """Maximum passes of a block of kTransposed or kTransposedStaged, in a large launch."""
    if store_kind == StoreKind.kTransposedStaged:
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
