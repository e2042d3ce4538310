"""How a call is divided among threads.

Waking a helper takes some 70 us. Small windows balance threads that begin late.
"""

from multisample.backends.kernels.compilation import inline

THREAD_WORK = 1 << 16
"""The normals of one thread. They take 35 us; waking an idle helper takes some 70 us."""
# An element of shared noise is only scaled and stored, at 1 / _SHARED_PART of the cost of an independent one.
_SHARED_PART = 8
# Maximum normals of a window.
_WINDOW = 1 << 18
# Windows per thread, and minimum normals of a window. With shared noise, or where columns are contiguous, windows are
# larger, because each does some work for every column.
_WINDOWS, _LEAST_WINDOW = 16, 1 << 13
_LARGER_WINDOWS, _LEAST_LARGER_WINDOW = 4, 1 << 14
# Minimum columns of a window where columns are not contiguous. Its rows share the column parts of words, or shared
# noise, so that many rows are better than long rows.
_COLUMNS, _SHARED_COLUMNS = 1 << 10, 1 << 12
# Maximum rows and maximum normals of a window of shared noise where columns are contiguous. Its columns share the reads
# of mu and sigma, so that many columns are better than long columns.
_SHARED_ROWS, _SHARED_WINDOW = 1 << 13, 1 << 20


@inline
def work_of(d, n, shared_noise):
    """The work of a (d, n) matrix, in normals."""
    return n + d * n // _SHARED_PART if shared_noise else d * n


@inline
def most_threads(normals):
    """How many threads have work with this many normals."""
    return max(1, (normals + THREAD_WORK - 1) // THREAD_WORK)


@inline
def window_shape(d, n, threads, shared_noise, block, down):
    """Rows and columns of the windows of a (d, n) matrix; the columns are whole blocks of `block` columns.

    With `down`, where columns are contiguous in memory, windows are whole columns, up to a limit of rows.
    """
    count, least = _WINDOWS, _LEAST_WINDOW
    if shared_noise or down:
        count, least = _LARGER_WINDOWS, _LEAST_LARGER_WINDOW
    size = min(_SHARED_WINDOW if shared_noise and down else _WINDOW, max(least, d * n // (count * threads)))
    if down:
        most = min(size // block, _SHARED_ROWS) if shared_noise else size // block
        parts = (d + most - 1) // most
        rows = (d + parts - 1) // parts
        columns = size // rows
    else:
        columns = max(_SHARED_COLUMNS if shared_noise else _COLUMNS, size // d)
        rows = max(1, size // min(columns, n))
    return rows, max(block, columns - columns % block)
