"""The cpu backend: Numba on every core, for NumPy and for whoever shares host memory with it.

The kernel knows nothing of threads: any window of the sample matrix can be drawn alone, so a large call is cut into
windows that a pool of threads draws, and a small one runs where it is called.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import math
import platform
from collections.abc import Callable
from typing import Any

import numpy as np

from .contract import Backend, BackendStatus, DeviceKind, Layout, RawArray, RawVector
from .worker_pool import run_all, thread_count

__all__ = ["BACKEND"]

# Normals for each thread at the least, 0.2 ms: to wake one takes half of that, and more where many are woken.
_SHARE = 1 << 18
# What a shared normal costs next to one that is made: to scale and to write it.
_SHARED_COST = 1 / 8
# Normals of one window: long enough to hide the cost of handing it out, short enough to even out threads.
_WINDOW, _LEAST_WINDOW = 1 << 18, 1 << 14
# Shared noise is made once a window: at least this wide, a window is still tall enough to hide that.
_SHARED_COLUMNS = 1 << 12
# Where columns are what is contiguous, means and deviations are read once a window too: at most this tall, of so many
# normals, as each costs little, it is wide enough to hide that.
_SHARED_ROWS, _SHARED_WINDOW = 1 << 13, 1 << 20


class CpuBackend:
    """See `multisample.backends.contract.Backend`."""

    name = "cpu"
    device_kinds: tuple[DeviceKind, ...] = ("cpu",)
    host_library = "numpy"

    def __init__(self) -> None:
        self._kernels: dict[tuple[str, bool], Any] = {}

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

    def small_kernel(self, dtype: str, layout: Layout) -> Callable[..., bool]:
        from .cpu_kernels import small_kernel

        return small_kernel(dtype, layout)

    def plain_launch(self) -> None:
        return None

    def launch(
        self,
        mu: RawVector,
        sigma: RawVector,
        out: RawArray,
        dtype: str,
        seed: int,
        offset: int,
        counter: int,
        dim_offset: int,
        sample_offset: int,
        shared: bool,
        antithetic: bool,
        fast_math: bool,
        device: int,
        stream: int,
    ) -> None:
        assert isinstance(mu, np.ndarray)
        assert isinstance(sigma, np.ndarray)
        assert isinstance(out, np.ndarray)
        kernel = self._kernels.get((dtype, antithetic)) or self._compile(dtype, antithetic)
        d, n = out.shape
        work = n + d * n * _SHARED_COST if shared else d * n
        threads = 1 if work <= _SHARE else min(thread_count(), math.ceil(work / _SHARE))
        if threads == 1:
            kernel(mu, sigma, out, seed, offset, dim_offset, sample_offset, shared)
            return

        def draw(window: tuple[slice, slice]) -> None:
            rows, columns = window
            kernel(
                mu[rows], sigma[rows], out[window], seed, offset,
                dim_offset + rows.start, sample_offset + columns.start, shared,
            )  # fmt: skip

        block = 8 if antithetic else 4
        down = out.strides[0] == out.itemsize and d > 1
        run_all(draw, _windows(d, n, sample_offset, threads, shared, block, down), threads)

    def advance(self, counter: int, device: int, stream: int) -> None:
        raise RuntimeError("backend: 'cpu' cannot write to device memory")

    def _compile(self, dtype: str, antithetic: bool) -> Any:
        from .cpu_kernels import window_kernel  # Numba takes half a second to import.

        kernel = self._kernels[dtype, antithetic] = window_kernel(dtype, antithetic)
        return kernel


def _windows(
    d: int, n: int, sample_offset: int, threads: int, shared: bool, block: int, down: bool
) -> list[tuple[slice, slice]]:
    """Rows and columns of the windows that together are a (d, n) matrix.

    No block of columns is cut, so that none is made twice. Where columns are what is contiguous in memory, `down`,
    windows are whole columns, as far as they are not too tall.
    """
    size = min(_SHARED_WINDOW if shared and down else _WINDOW, max(_LEAST_WINDOW, d * n // (4 * threads)))
    if down:
        most = min(size // block, _SHARED_ROWS) if shared else size // block
        rows = math.ceil(d / math.ceil(d / most))
        columns = max(block, size // rows)
    else:
        columns = max(_SHARED_COLUMNS, size // d) if shared else size
        rows = max(1, size // min(columns, n))
    cuts = [0, n]
    if columns < n:
        first = columns - (sample_offset + columns) % block
        cuts[1:1] = range(first, n, columns - columns % block)
    windows = [
        (slice(top, min(top + rows, d)), slice(left, right))
        for top in range(0, d, rows)
        for left, right in itertools.pairwise(cuts)
    ]
    # Threads begin far apart: side by side, each would page in and clear the same fresh memory for itself.
    stride = -(-len(windows) // threads)
    return [window for first in range(stride) for window in windows[first::stride]]


BACKEND: Backend = CpuBackend()
