"""The store kind of a call, which selects its kernel.

A twin of ``csrc/cuda/kernel_choice.h``, which has the reasons.
"""

from __future__ import annotations

STORE_KINDS = (
    "kAligned", "kShifted", "kStaged", "kStrided", "kTransposed", "kTransposedStaged", "kFewColumns", "kSmallMatrices",
    "kPlain", "kPlainTransposed", "kFewRows",
)  # fmt: skip
(ALIGNED, SHIFTED, STAGED, STRIDED, TRANSPOSED, TRANSPOSED_STAGED, FEW_COLUMNS, SMALL_MATRICES, PLAIN,
 PLAIN_TRANSPOSED, FEW_ROWS) = range(len(STORE_KINDS))  # fmt: skip
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


def _is_transposed(rows: int, size: int, strides: tuple[int, int]) -> bool:
    """Whether dimensions are contiguous and columns are not."""
    return strides[0] == size != strides[1] and rows > 1


def has_few_columns(rows: int, columns: int, size: int, strides: tuple[int, int], misalignment: int) -> bool:
    """Whether kFewColumns draws a matrix of this shape at this address, if its window begins with a group."""
    if columns > MOST_FEW_COLUMNS or rows < LEAST_ROWS:
        return False
    if strides[1] % size or misalignment % size:
        return False
    return strides[0] == size or strides == (columns * size, size)


def has_few_rows(rows: int, size: int, strides: tuple[int, int]) -> bool:
    """Whether kFewRows draws a matrix, unless kPlain does."""
    return rows == 1 or (rows <= _MOST_FEW_ROWS and strides[1] == size)


def _has_aligned_pieces(rows: int, size: int, column_stride: int, misalignment: int) -> bool:
    """Whether dimensions form whole pieces at aligned addresses."""
    own_rows = own_rows_of(size)
    return rows % own_rows == 0 and (misalignment | column_stride) % (own_rows * size) == 0


def is_usual(
    rows: int, columns: int, size: int, strides: tuple[int, int], misalignment: int, skip: int, antithetic: bool,
    contiguous: bool,
) -> bool:  # fmt: skip
    """Whether all groups and pieces are whole and aligned, and mu and sigma are `contiguous`: see `geometry`."""
    if not contiguous or skip or columns % (ANTITHETIC_WIDTH if antithetic else WIDTH):
        return False
    row_stride, column_stride = strides
    if _is_transposed(rows, size, strides):
        return _has_aligned_pieces(rows, size, column_stride, misalignment)
    return column_stride == size and (misalignment | row_stride) % (8 if size == 2 else 16) == 0


def _most_plain_groups(
    columns: int, size: int, groups: int, shared_noise: bool, antithetic: bool, fast_math: bool, usual: bool, few: bool
) -> int:
    """Maximum groups of all rows with kPlain. `few`: see `has_few_rows`."""
    independent, indexed = not (shared_noise or antithetic), 2**31 if columns < 2**30 else 0
    if few or not usual:
        return 2**16 if size == 8 or not independent else 2**18 if few else 3 * 2**18
    if size == 8:
        return indexed if independent else 2**16
    if antithetic and size == 2:
        return indexed if shared_noise else 2**21
    if antithetic:
        return 2**18 if shared_noise or fast_math else 3 * 2**17
    if shared_noise:
        return 2**22 if size == 2 else 2**23
    return 2**22 if groups > PLAIN_THREADS // 2 else 3 * 2**18


def is_plain(
    rows: int, columns: int, size: int, strides: tuple[int, int], misalignment: int, groups: int, shared_noise: bool,
    antithetic: bool, fast_math: bool, usual: bool,
) -> bool:  # fmt: skip
    """Whether a plain kernel is the fastest."""
    if not _is_transposed(rows, size, strides):
        few = has_few_rows(rows, size, strides)
        return groups * rows <= _most_plain_groups(
            columns, size, groups, shared_noise, antithetic, fast_math, usual, few
        )
    if _has_aligned_pieces(rows, size, strides[1], misalignment):
        costly = not (shared_noise or antithetic or (fast_math and size < 8))
        at_every_size = usual if costly else columns >= 512
        return groups * rows <= (2**32 - 1 if at_every_size else 2**21) and columns < 2**30
    return rows >= 32 and groups * rows <= (2**16 if size == 8 else 2**18)


def store_kind_of(
    rows: int, columns: int, size: int, strides: tuple[int, int], misalignment: int, skip: int, groups: int,
    shared_noise: bool, antithetic: bool, fast_math: bool, fixed_skip: bool, may_be_plain: bool, usual: bool,
) -> int:  # fmt: skip
    """The store kind of a matrix, as an index of `STORE_KINDS`."""
    if skip == 0 and has_few_columns(rows, columns, size, strides, misalignment):
        return FEW_COLUMNS
    if may_be_plain and is_plain(
        rows, columns, size, strides, misalignment, groups, shared_noise, antithetic, fast_math, usual
    ):
        return PLAIN_TRANSPOSED if _is_transposed(rows, size, strides) else PLAIN
    if has_few_rows(rows, size, strides):
        return FEW_ROWS
    quad = 8 if size == 2 and not antithetic else 16
    row_stride, column_stride = strides
    if column_stride != size:
        reaches = abs(column_stride) // size < FAR_APART and rows < FAR_APART
        return TRANSPOSED if _is_transposed(rows, size, strides) and column_stride % size == 0 and reaches else STRIDED
    start = misalignment - skip * size
    if fixed_skip and start % quad == 0 and row_stride % quad == 0:
        return ALIGNED
    if start % size or row_stride % size:
        return STRIDED
    if groups > SHORT_ROW:
        return SHIFTED
    return STAGED if fixed_skip and row_stride == columns * size else STRIDED


def is_small(rows: int, columns: int, antithetic: bool) -> bool:
    """Whether a matrix of this size fits into a block of kSmallMatrices, wherever it begins within a group."""
    width = ANTITHETIC_WIDTH if antithetic else WIDTH
    return rows * ceil_div(width - 1 + columns, width) <= SMALL_THREADS


def ceil_div(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(-a // b)
