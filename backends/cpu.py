"""The cpu backend: Numba on every core, for arrays in host memory.

Windows of the sample matrix are independent. Kernels of large calls share them with helper threads
(kernels/cpu/threads.py); the calling thread draws a small call alone.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import math
import platform
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from .contract import PROTOCOL, Backend, BackendStatus, DeviceKind, HostArray, Launcher
from .element_types import MATRIX_TYPES, ElementType
from .launch import Launch, Operation, computing_name, matrix_of_batch, packer, type_name
from .memory.host import arrays_at, quiet, words_at
from .system.threads import thread_count, thread_limit

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
        launcher = self.launcher(launch._replace(batch=0))
        for b in range(max(launch.batch, 1)):
            one = matrix_of_batch(launch, b)
            arrays = arrays_at(one)
            operands = [arrays.get(name) for name in ("mu", "sigma", "weights", "matrix", "first", "second")]
            seed, offset, first_row, first_column = words_at(one)
            threads = launcher.geometry(None, first_column) if launcher.geometry else None
            launcher.run(threads, *operands, seed, offset, 0, 0, first_row, first_column, 0, 0)

    def launcher(self, launch: Launch) -> Launcher:
        launcher = _LAUNCHERS[launch.operation](launch)
        return _batch_launcher(launch, launcher) if launch.batch else launcher

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
        second: None, seed: int, offset: int, seed_at: int, offset_at: int, first_row: int, first_column: int,
        stream: int, scratch: int,
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
        second: HostArray | None, seed: int, offset: int, seed_at: int, offset_at: int, first_row: int,
        first_column: int, stream: int, scratch: int,
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
        # The sums of the segments are added in the order of `moments_kernel`, which gives the same bits.
        totals = np.zeros((max(math.ceil(count / kernels.SEGMENT), 1), rows, 2))
        first_row = 0 if shared_noise else first_row
        kernels.summing_kernel(real)(*listed, totals, seed, offset, first_row, height, threads, pool)
        sums = totals[0]
        with quiet():
            for more in totals[1:]:
                sums += more
        kernels.finishing_kernel(dtype)(mu, sigma, sums, weight, first, second)

    return Launcher(run, value_kernel(real, True), takes_arrays=True)


def _batch_launcher(launch: Launch, of_matrix: Launcher) -> Launcher:
    """The launcher of a batch, from that of one matrix. A compiled function draws all samples of a batch."""
    is_valid_vector = of_matrix.is_valid

    def is_valid(*vectors: HostArray | None) -> Any:
        assert is_valid_vector is not None
        return is_valid_vector(*[x if x is None or x.ndim == 1 else x.reshape(-1) for x in vectors])

    def sum_each(
        geometry: None, mu: HostArray, sigma: HostArray, weights: HostArray, matrix: None, first: HostArray,
        second: HostArray | None, seed: int, offset: int, seed_at: int, offset_at: int, first_row: int,
        first_column: int, stream: int, scratch: int,
    ) -> None:  # fmt: skip
        words = launch._replace(seed_at=seed_at, offset_at=offset_at)
        for b in range(launch.batch):
            seed, offset, _, _ = words_at(matrix_of_batch(words, b))
            vectors = (x if x.ndim == 1 else x[b] for x in (mu, sigma, weights))
            results = first[b], None if second is None else second[b]
            of_matrix.run(None, *vectors, None, *results, seed, offset, 0, 0, first_row, first_column, 0, 0)

    if launch.operation == Operation.moments:
        return Launcher(sum_each, is_valid, takes_arrays=True)

    from .kernels.cpu import calls
    from .kernels.cpu.division import SHARE

    kind = ElementType[computing_name(launch)]
    draw = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p)(calls.function_address(launch))
    is_small = launch.batch * launch.rows * launch.columns <= SHARE  # One thread's work.
    packers: dict[tuple[Any, ...], tuple[Callable[..., bytes], bytes]] = {}

    def draw_all(
        geometry: None, mu: HostArray, sigma: HostArray, weights: None, matrix: HostArray, first: None, second: None,
        seed: int, offset: int, seed_at: int, offset_at: int, first_row: int, first_column: int, stream: int,
        scratch: int,
    ) -> None:  # fmt: skip
        key = mu.strides, sigma.strides
        if key not in packers:
            (mu_step, mu_stride), (sigma_step, sigma_stride) = ((0, *strides)[-2:] for strides in key)
            packers[key] = packer(
                launch._replace(
                    mu_type=kind, mu_stride=mu_stride, mu_step=mu_step, sigma_type=kind, sigma_stride=sigma_stride,
                    sigma_step=sigma_step,
                )
            )  # fmt: skip
        pack_head, tail = packers[key]
        limit = 1 if is_small else thread_limit()
        if limit != 1:
            calls.find_threads()
        head = pack_head(
            mu.ctypes.data, sigma.ctypes.data, 0, matrix.ctypes.data, 0, 0, seed, offset, first_row, first_column,
            seed_at, offset_at, 0, 0, 0, 0, limit,
        )  # fmt: skip
        draw(head + tail)

    return Launcher(draw_all, is_valid, takes_arrays=True)


def _perturber(launch: Launch) -> Launcher:
    from .kernels.cpu import threads as cpu_threads
    from .kernels.cpu.division import SHARE
    from .kernels.cpu.perturb import perturb_kernel

    kernel, elements = perturb_kernel(type_name(launch)), launch.columns
    most = math.ceil(elements * launch.rows / SHARE)

    def run(
        geometry: None, mu: None, sigma: None, weights: HostArray, matrix: bytes, first: None, second: None, seed: int,
        offset: int, seed_at: int, offset_at: int, first_row: int, first_column: int, stream: int, scratch: int,
    ) -> None:  # fmt: skip
        threads = 1 if most <= 1 else min(most, thread_count(), launch.threads or most)
        pool = cpu_threads.helper_pool(threads - 1)
        kernel(np.frombuffer(matrix, np.int64), elements, weights, seed, offset, first_row, threads, pool)

    return Launcher(run, takes_arrays=True)


_LAUNCHERS: dict[int, Callable[[Launch], Launcher]] = {
    Operation.sample: _sampler,
    Operation.moments: _summer,
    Operation.perturb: _perturber,
}

BACKEND: Backend = CpuBackend()
