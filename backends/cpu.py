"""The cpu backend: Numba on every core, for arrays in host memory.

Windows of the sample matrix are independent. Kernels of large calls share them with helper threads
(kernels/cpu/threads.py); the calling thread draws a small call alone.
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
from collections.abc import Callable
from typing import Any

import numpy as np

from .contract import Backend, BackendStatus, DeviceKind, HostArray, Launcher, MomentsLauncher
from .draw import Draw, ElementType, Operation, matrix_of_batch
from .element_types import MATRIX_TYPES
from .memory.host import arrays_at, batch_at, words_at
from .moments import Moments
from .system.threads import thread_count

__all__ = ["BACKEND"]


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
        from .kernels.cpu.division import SHARE

        if draw.batch > 1 and draw.rows * draw.columns <= 2 * SHARE:  # Work for two threads at the most.
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
        """Draw a batch of small matrices, each on one thread."""
        from .kernels.cpu.division import SHARE
        from .kernels.cpu.kernel import batch_kernel
        from .kernels.cpu.threads import helpers

        kernel = batch_kernel(ElementType(draw.type).name, bool(draw.antithetic))
        *arrays, common_noise = *batch_at(draw), bool(draw.common_noise)
        most = max(1, min(draw.batch, math.ceil(draw.batch * draw.rows * draw.columns / SHARE)))
        threads = min(most, thread_count(), draw.threads or most)
        with helpers(threads - 1) as slots:
            kernel(*arrays, common_noise, threads, slots)

    def launcher(self, draw: Draw) -> Launcher:
        # Numba takes half a second to import.
        from .kernels.cpu.division import in_python
        from .kernels.cpu.kernel import value_kernel, window_kernel, windows_kernel
        from .kernels.cpu.threads import helpers

        dtype = ElementType(draw.type).name
        common_noise, block = bool(draw.common_noise), 8 if draw.antithetic else 4
        d, n = draw.rows, draw.columns
        most_threads, shape = in_python()
        most = most_threads(d, n, common_noise)
        kernel = (window_kernel if most == 1 else windows_kernel)(dtype, bool(draw.antithetic))

        def threads(matrix: HostArray, first_column: int) -> int:
            return min(most, thread_count(), draw.threads or most)

        def run(
            threads: int | None, mu: HostArray, sigma: HostArray, matrix: HostArray, seed: int, offset: int,
            offset_at: int, first_row: int, first_column: int, stream: int,
        ) -> None:  # fmt: skip
            arguments = mu, sigma, matrix, seed, offset, first_row, first_column, common_noise
            if threads is None:
                kernel(*arguments)
                return
            down = matrix.strides[0] == matrix.itemsize and d > 1
            with helpers(threads - 1) as slots:
                kernel(*arguments, *shape(d, n, threads, common_noise, block, down), threads, slots)

        is_valid = value_kernel("float64" if dtype == "float64" else "float32")
        return Launcher(run, is_valid, threads if most > 1 else None, takes_arrays=True)

    def c_function(self, draw: Draw) -> int:
        from .kernels.cpu import calls

        dtype, antithetic = ElementType(draw.type).name, bool(draw.antithetic)
        if draw.operation == Operation.sample:
            calls.prepare(dtype, antithetic)
            return calls.draw_function()
        real = MATRIX_TYPES[dtype].computing
        calls.prepare(real, antithetic)
        return calls.gradient_function(real)

    def moments_c_function(self, moments: Moments) -> int:
        from .kernels.cpu import calls

        calls.prepare_threads()
        return calls.moments_function(MATRIX_TYPES[ElementType(moments.draw.type).name].computing)

    def moments_launcher(self, moments: Moments) -> MomentsLauncher:
        from .kernels.cpu import moments as kernels
        from .kernels.cpu.division import SHARE
        from .kernels.cpu.kernel import value_kernel
        from .kernels.cpu.threads import helpers

        draw = moments.draw
        dtype = ElementType(draw.type).name
        real, width = MATRIX_TYPES[dtype].computing, 8 if draw.antithetic else 4
        list_groups, values_are_valid = kernels.listing_kernel(real, draw.antithetic), value_kernel(real)
        rows, number = 1 if draw.common_noise else draw.rows, np.dtype(real)
        most_groups = math.ceil(draw.columns / width) + 1
        most_groups += -most_groups % kernels.ROUND
        none = np.empty(0, MATRIX_TYPES[dtype].stored)

        def run(
            weights: HostArray, mu: HostArray, sigma: HostArray, first: HostArray, second: HostArray | None, seed: int,
            offset: int, first_row: int, first_column: int, stream: int, scratch: int,
        ) -> None:  # fmt: skip
            groups, of_first = np.zeros(most_groups, np.uint32), np.zeros(4 * most_groups, number)
            of_second = np.zeros(4 * most_groups, number) if draw.antithetic else of_first
            count, weight = list_groups(weights, first_column, groups, of_first, of_second)
            count += -count % kernels.ROUND
            listed = groups[:count], of_first[: 4 * count], of_second[: 4 * count]
            second = none if second is None else second
            most = max(1, math.ceil(4 * rows * count / SHARE))
            threads = min(most, thread_count(), draw.threads or most)
            height = min(kernels.MOST_ROWS, math.ceil(rows / (4 * threads)) if threads > 1 else rows)
            with helpers(threads - 1) as slots:
                if not draw.common_noise and (threads == 1 or rows >= kernels.FEW_ROWS or count <= kernels.PIECE):
                    kernels.moments_kernel(dtype)(
                        *listed, seed, offset, first_row, mu, sigma, weight, first, second, height, threads, slots
                    )
                    return
                # `moments_kernel` would add up the sums of the pieces in the same order.
                totals = np.zeros((max(math.ceil(count / kernels.PIECE), 1), rows, 2))
                first_row = 0 if draw.common_noise else first_row
                kernels.summing_kernel(real)(*listed, totals, seed, offset, first_row, height, threads, slots)
            sums = totals[0]
            for more in totals[1:]:
                sums += more
            kernels.finishing_kernel(dtype)(mu, sigma, sums, weight, first, second)

        def is_valid(weights: HostArray, mu: HostArray, sigma: HostArray) -> Any:
            return values_are_valid(mu, sigma) and values_are_valid(weights, sigma[:0])

        return MomentsLauncher(run, is_valid, takes_arrays=True)

    def advancer(self, device: int) -> Callable[[int, int], None]:
        """The cpu backend has no device memory."""
        raise RuntimeError("backend: 'cpu' cannot write to device memory")


BACKEND: Backend = CpuBackend()
