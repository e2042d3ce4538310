"""The cpu backend: Numba on every core, for arrays in host memory.

The kernel has no threads: windows of the sample matrix are independent. The threads of a pool draw the windows of a
large call; the calling thread draws a small call alone.
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
from collections.abc import Callable
from typing import Any

import numpy as np

from .contract import Backend, BackendStatus, DeviceKind, HostArray, Launcher, MomentsLauncher
from .draw import Draw, ElementType, matrix_of_batch
from .element_types import MATRIX_TYPES
from .memory.host import arrays_at, batch_at, words_at
from .moments import Moments
from .system.threads import run_all, thread_count

__all__ = ["BACKEND"]

# Minimum normals per thread, 0.14 ms of work: waking an idle thread takes half of that.
_SHARE = 1 << 17
# Cost of an element with common noise, which is only scaled and stored, in proportion to one with its own noise.
_COMMON_COST = 1 / 8
# Normals of one window: enough to hide the cost of scheduling it, few enough to balance the threads.
_WINDOW, _LEAST_WINDOW = 1 << 18, 1 << 14
# Each window computes its common noise once. A window of at least this width is still tall enough to hide that cost.
_COMMON_COLUMNS = 1 << 12
# Weighted moments: with at least so many rows, threads share rows alone.
_FEW_ROWS = 1024
# Rows whose float64 sums are in memory at once.
_MOST_ROWS = 4096
# Where columns are contiguous, each window also reads mu and sigma once. With these limits of rows and normals, a
# window is wide enough to hide that cost. A common normal costs little, so a window may have many.
_COMMON_ROWS, _COMMON_WINDOW = 1 << 13, 1 << 20


class CpuBackend:
    name = "cpu"
    device_kinds: tuple[DeviceKind, ...] = ("cpu",)
    host_library = "numpy"

    def status(self) -> BackendStatus:
        reasons = []
        device = platform.machine()
        try:
            threads = thread_count()
            device += f", {threads} thread{'s' if threads > 1 else ''}"
        except ValueError as error:
            reasons.append(str(error))
        try:
            version = f"numba {importlib.metadata.version('numba')}"
        except importlib.metadata.PackageNotFoundError:
            version = ""
            reasons.append("package numba is not installed: pip install numba")
        return BackendStatus(not reasons, tuple(reasons), version, device)

    def prepare(self, device_kind: DeviceKind) -> None:
        pass

    def adopt(self, array: Any) -> Any:
        return array

    def launch(self, draw: Draw) -> None:
        if draw.batch > 1 and draw.rows * draw.columns <= _SHARE:
            self._launch_batch(draw)
            return
        launcher = self.launcher(draw)
        for b in range(max(draw.batch, 1)):
            one = matrix_of_batch(draw, b)
            mu, sigma, matrix = arrays_at(one)
            seed, offset, first_row, first_column = words_at(one)
            ready = launcher.ready(matrix, first_column) if launcher.ready else None
            launcher.run(ready, mu, sigma, matrix, seed, offset, 0, first_row, first_column, 0)

    def _launch_batch(self, draw: Draw) -> None:
        """Draw a batch of matrices that are too small for several threads, each on one."""
        from .kernels.cpu.kernel import batch_kernel

        kernel = batch_kernel(ElementType(draw.type).name, bool(draw.antithetic))
        *arrays, common_noise = *batch_at(draw), bool(draw.common_noise)
        most = math.ceil(draw.batch * draw.rows * draw.columns / _SHARE)
        threads = min(most, thread_count(), draw.threads or most)
        size = math.ceil(draw.batch / (4 * threads if threads > 1 else 1))
        parts = [(first, min(first + size, draw.batch)) for first in range(0, draw.batch, size)]
        run_all(lambda part: kernel(*arrays, common_noise, *part), parts, threads)

    def launcher(self, draw: Draw) -> Launcher:
        # Numba takes half a second to import.
        from .kernels.cpu.kernel import value_kernel, window_kernel, windows_kernel

        dtype = ElementType(draw.type).name
        common_noise, block = bool(draw.common_noise), 8 if draw.antithetic else 4
        d, n = draw.rows, draw.columns
        work = n + d * n * _COMMON_COST if common_noise else d * n
        most = max(1, math.ceil(work / _SHARE))
        kernel = (window_kernel if most == 1 else windows_kernel)(dtype, bool(draw.antithetic))

        def threads(matrix: HostArray, first_column: int) -> int:
            return min(most, thread_count(), draw.threads or most)

        def run(
            threads: int | None, mu: HostArray, sigma: HostArray, matrix: HostArray, seed: int, offset: int,
            offset_at: int, first_row: int, first_column: int, stream: int,
        ) -> None:  # fmt: skip
            if threads is None:
                kernel(mu, sigma, matrix, seed, offset, first_row, first_column, common_noise)
                return

            down = matrix.strides[0] == matrix.itemsize and d > 1
            height, width = _window_shape(d, n, threads, common_noise, block, down)
            begun = np.zeros(1, np.int64)

            def work(_: int) -> None:
                kernel(
                    mu, sigma, matrix, seed, offset, first_row, first_column, common_noise, height, width, threads,
                    begun,
                )  # fmt: skip

            run_all(work, range(threads), threads)

        is_valid = value_kernel("float64" if dtype == "float64" else "float32")
        return Launcher(run, is_valid, threads if most > 1 else None, takes_arrays=True)

    def moments_launcher(self, moments: Moments) -> MomentsLauncher:
        from .kernels.cpu.kernel import value_kernel
        from .kernels.cpu.moments import PIECE, ROUND, finishing_kernel, listing_kernel, summing_kernel

        draw = moments.draw
        dtype = ElementType(draw.type).name
        real, width = MATRIX_TYPES[dtype].computing, 8 if draw.antithetic else 4
        list_groups, sum_rows, finish = (
            listing_kernel(real, draw.antithetic),
            summing_kernel(real),
            finishing_kernel(dtype),
        )
        rows, number, values_are_valid = 1 if draw.common_noise else draw.rows, np.dtype(real), value_kernel(real)
        most_groups = math.ceil(draw.columns / width) + 1
        most_groups += -most_groups % ROUND
        none = np.empty(0, MATRIX_TYPES[dtype].stored)

        def run(
            weights: HostArray, mu: HostArray, sigma: HostArray, first: HostArray, second: HostArray | None, seed: int,
            offset: int, first_row: int, first_column: int, stream: int, scratch: int,
        ) -> None:  # fmt: skip
            groups, of_first = np.zeros(most_groups, np.uint32), np.zeros(4 * most_groups, number)
            of_second = np.zeros(4 * most_groups, number) if draw.antithetic else of_first
            count, weight = list_groups(weights, first_column, groups, of_first, of_second)
            count += -count % ROUND
            first_i = 0 if draw.common_noise else first_row

            def add_up(columns: slice, band: slice, sums: HostArray) -> None:
                of_columns = slice(4 * columns.start, 4 * columns.stop)
                sum_rows(
                    groups[columns], of_first[of_columns], of_second[of_columns], sums, seed, offset,
                    first_i + band.start,
                )  # fmt: skip

            def finish_band(band: slice) -> None:
                sums = np.zeros((band.stop - band.start, 2))
                add_up(slice(0, count), band, sums)
                finish(mu[band], sigma[band], sums, weight, first[band], none if second is None else second[band])

            threads = max(1, min(math.ceil(4 * rows * count / _SHARE), thread_count(), draw.threads or _SHARE))
            height = min(_MOST_ROWS, math.ceil(rows / (4 * threads)) if threads > 1 else rows)
            bands = [slice(top, min(top + height, rows)) for top in range(0, rows, height)]
            if not draw.common_noise and (threads == 1 or rows >= _FEW_ROWS or count <= PIECE):
                run_all(finish_band, bands, threads)
                return
            # One thread would add up the sums of the pieces in the same order.
            pieces = [slice(start, min(start + PIECE, count)) for start in range(0, count, PIECE)]
            totals = np.zeros((max(len(pieces), 1), rows, 2))
            parts = [
                (piece, band, of_piece[band]) for piece, of_piece in zip(pieces, totals, strict=False) for band in bands
            ]
            run_all(lambda part: add_up(*part), parts, threads)
            sums = totals[0]
            for more in totals[1:]:
                sums += more
            finish(mu, sigma, sums, weight, first, none if second is None else second)

        def is_valid(weights: HostArray, mu: HostArray, sigma: HostArray) -> Any:
            return values_are_valid(mu, sigma) and values_are_valid(weights, sigma[:0])

        return MomentsLauncher(run, is_valid, takes_arrays=True)

    def advancer(self, device: int) -> Callable[[int, int], None]:
        """The cpu backend has no device memory."""
        raise RuntimeError("backend: 'cpu' cannot write to device memory")


def _window_shape(d: int, n: int, threads: int, common_noise: bool, block: int, down: bool) -> tuple[int, int]:
    """Rows and columns of the windows of a (d, n) matrix; the columns are whole blocks.

    With `down`, where columns are contiguous in memory, windows are whole columns, up to a limit of rows.
    """
    size = min(_COMMON_WINDOW if common_noise and down else _WINDOW, max(_LEAST_WINDOW, d * n // (4 * threads)))
    if down:
        most = min(size // block, _COMMON_ROWS) if common_noise else size // block
        rows = math.ceil(d / math.ceil(d / most))
        columns = size // rows
    else:
        columns = max(_COMMON_COLUMNS, size // d) if common_noise else size
        rows = max(1, size // min(columns, n))
    return rows, max(block, columns - columns % block)


BACKEND: Backend = CpuBackend()
