"""The store kind of a call, which selects its kernel.

A twin of ``csrc/cuda/kernel_choice.h``, which has the reasons.
"""

from __future__ import annotations

import enum

from multisample.backends.launch import SIZES, ElementType, Launch

StoreKind = enum.IntEnum(
    "StoreKind",
    ["kAligned", "kShifted", "kStaged", "kStrided", "kTransposed", "kTransposedStaged", "kFewColumns", "kSmallMatrices",
     "kPlain", "kPlainTransposed", "kFewRows"],
    start=0,
)  # fmt: skip
ELEMENT_SIZES = [SIZES.get(kind.name, 0) for kind in ElementType]
"""Bytes of an element, by `ElementType`; 0 for types that no matrix has."""
ORIGINS = ("kInParameters", "kInMemory", "kOfBatch", "kOfRows")
"""Where a kernel of perturb finds its keys. With the last two origins, the spans are wide."""
OF_BATCH, OF_ROWS = 2, 3
WIDTH, ANTITHETIC_WIDTH = 4, 8
SHORT_ROW = 128
FAR_APART = 2**28
MOST_FEW_COLUMNS = 8
LEAST_ROWS = 2**16
_MOST_FEW_ROWS = 2
SMALL_THREADS = 256
PLAIN_THREADS = 128


def own_rows_of(size: int) -> int:
    """Dimensions of a thread: of a piece with kTransposed and kPlainTransposed, of a pass with kFewColumns."""
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
    indexed = 2**31 if launch.columns < 2**30 else 0
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
    if launch.origin_in_memory or launch.batch > 1:
        return False
    usual, size, groups_of_all = is_usual(launch, skip), ELEMENT_SIZES[launch.type], groups * launch.rows
    if not _is_transposed(launch, size):
        return groups_of_all <= _most_plain_groups(launch, usual, groups)
    if _has_aligned_pieces(launch, size):
        costly = not (launch.shared_noise or launch.antithetic or (launch.fast_math and size < 8))
        at_every_size = usual if costly else launch.columns >= 512
        return groups_of_all <= (2**32 - 1 if at_every_size else 2**21) and launch.columns < 2**30
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


def ceil_div(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(-a // b)
