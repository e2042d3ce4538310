"""The cpu backend: Numba on every core, for arrays in host memory.

Windows of the sample matrix are independent. Kernels of large calls share them with helper threads
(kernels/cpu/threads.py); the calling thread draws a small call alone.
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from .contract import PROTOCOL, Backend, BackendStatus, DeviceKind, HostArray, Launcher
from .element_types import MATRIX_TYPES
from .launch import Launch, Operation, computing_name, matrix_of_batch, type_name
from .memory.host import arrays_at, batch_at, quiet, words_at
from .system.threads import thread_count

__all__ = ["BACKEND"]


class CpuBackend:
    name = "cpu"
    device_kinds: tuple[DeviceKind, ...] = ("cpu",)
    host_library = "numpy"
    protocol = PROTOCOL

    @property
    def operations(self) -> Collection[int]:
        return _LAUNCHERS.keys()

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

    def launch(self, launch: Launch) -> None:
        from .kernels.cpu.division import SHARE

        if launch.batch > 1 and launch.rows * launch.columns <= 2 * SHARE:  # Work for two threads at the most.
            self._launch_batch(launch)
            return
        launcher = self.launcher(launch)
        for b in range(max(launch.batch, 1)):
            one = matrix_of_batch(launch, b)
            arrays = arrays_at(one)
            operands = [arrays.get(name) for name in ("mu", "sigma", "weights", "matrix", "first", "second")]
            seed, offset, first_row, first_column = words_at(one)
            threads = launcher.geometry(None, first_column) if launcher.geometry else None
            launcher.run(threads, *operands, seed, offset, 0, first_row, first_column, 0, 0)

    def _launch_batch(self, launch: Launch) -> None:
        """Draw a batch of small matrices, each on one thread."""
        from .kernels.cpu import threads as cpu_threads
        from .kernels.cpu.division import SHARE
        from .kernels.cpu.kernel import batch_kernel

        kernel = batch_kernel(type_name(launch), bool(launch.antithetic))
        *arrays, shared_noise = *batch_at(launch), bool(launch.shared_noise)
        most = max(1, min(launch.batch, math.ceil(launch.batch * launch.rows * launch.columns / SHARE)))
        threads = min(most, thread_count(), launch.threads or most)
        kernel(*arrays, shared_noise, threads, cpu_threads.helper_pool(threads - 1))

    def launcher(self, launch: Launch) -> Launcher:
        return _LAUNCHERS[launch.operation](launch)

    def c_function(self, launch: Launch) -> int:
        from .kernels.cpu import calls

        return calls.function_address(launch)

    def advancer(self, device: int) -> Callable[[int, int], None]:
        """The cpu backend has no device memory."""
        raise RuntimeError("backend: 'cpu' cannot write to device memory")


def _sampler(launch: Launch) -> Launcher:
    # Numba takes half a second to import.
    from .kernels.cpu import threads as cpu_threads
    from .kernels.cpu.division import in_python
    from .kernels.cpu.kernel import value_kernel, window_kernel, windows_kernel

    dtype, shared_noise, block = type_name(launch), bool(launch.shared_noise), 8 if launch.antithetic else 4
    d, n = launch.rows, launch.columns
    most_threads, shape = in_python()
    most = most_threads(d, n, shared_noise)
    kernel = (window_kernel if most == 1 else windows_kernel)(dtype, bool(launch.antithetic))

    def threads(matrix: Any, first_column: int) -> int:
        return min(most, thread_count(), launch.threads or most)

    def run(
        threads: int | None, mu: HostArray, sigma: HostArray, weights: None, matrix: HostArray, first: None,
        second: None, seed: int, offset: int, offset_at: int, first_row: int, first_column: int, stream: int,
        scratch: int,
    ) -> None:  # fmt: skip
        arguments = mu, sigma, matrix, seed, offset, first_row, first_column, shared_noise
        if threads is None:
            kernel(*arguments)
            return
        down = matrix.strides[0] == matrix.itemsize and d > 1
        height, width = shape(d, n, threads, shared_noise, block, down)
        kernel(*arguments, height, width, threads, cpu_threads.helper_pool(threads - 1))

    is_valid = value_kernel(computing_name(launch))
    return Launcher(run, is_valid, threads if most > 1 else None, takes_arrays=True)


def _summer(launch: Launch) -> Launcher:
    """Weighted moments."""
    from .kernels.cpu import moments as kernels
    from .kernels.cpu import threads as cpu_threads
    from .kernels.cpu.division import SHARE
    from .kernels.cpu.kernel import value_kernel

    dtype, real, width = type_name(launch), computing_name(launch), 8 if launch.antithetic else 4
    shared_noise, antithetic = bool(launch.shared_noise), bool(launch.antithetic)
    list_groups = kernels.listing_kernel(real, antithetic)
    rows, number = 1 if shared_noise else launch.rows, np.dtype(real)
    most_groups = math.ceil(launch.columns / width) + 1
    most_groups += -most_groups % kernels.ROUND
    none = np.empty(0, MATRIX_TYPES[dtype].stored)

    def run(
        geometry: None, mu: HostArray, sigma: HostArray, weights: HostArray, matrix: None, first: HostArray,
        second: HostArray | None, seed: int, offset: int, offset_at: int, first_row: int, first_column: int,
        stream: int, scratch: int,
    ) -> None:  # fmt: skip
        groups, of_first = np.zeros(most_groups, np.uint32), np.zeros(4 * most_groups, number)
        of_second = np.zeros(4 * most_groups, number) if antithetic else of_first
        count, weight = list_groups(weights, first_column, groups, of_first, of_second)
        count += -count % kernels.ROUND
        listed = groups[:count], of_first[: 4 * count], of_second[: 4 * count]
        second = none if second is None else second
        most = max(1, math.ceil(4 * rows * count / SHARE))
        threads = min(most, thread_count(), launch.threads or most)
        height = min(kernels.MOST_ROWS, math.ceil(rows / (4 * threads)) if threads > 1 else rows)
        pool = cpu_threads.helper_pool(threads - 1)
        if not shared_noise and (threads == 1 or rows >= kernels.FEW_ROWS or count <= kernels.SEGMENT):
            kernels.moments_kernel(dtype)(
                *listed, seed, offset, first_row, mu, sigma, weight, first, second, height, threads, pool
            )
            return
        # `moments_kernel` would add up the sums of the segments in the same order.
        totals = np.zeros((max(math.ceil(count / kernels.SEGMENT), 1), rows, 2))
        first_row = 0 if shared_noise else first_row
        kernels.summing_kernel(real)(*listed, totals, seed, offset, first_row, height, threads, pool)
        sums = totals[0]
        with quiet():
            for more in totals[1:]:
                sums += more
        kernels.finishing_kernel(dtype)(mu, sigma, sums, weight, first, second)

    return Launcher(run, value_kernel(real, True), takes_arrays=True)


_LAUNCHERS: dict[int, Callable[[Launch], Launcher]] = {Operation.sample: _sampler, Operation.moments: _summer}

BACKEND: Backend = CpuBackend()
