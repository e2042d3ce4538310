"""The cpu backend: Numba on every core, for arrays in host memory.

Windows of the sample matrix are independent. The functions of kernels/cpu/calls.py share them with helper threads; the
calling thread draws a small matrix alone.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import platform
from collections.abc import Callable
from typing import Any

import numpy as np

from .contract import PROTOCOL, Backend, BackendStatus, DeviceKind, HostArray, Launcher
from .element_types import ElementType
from .launch import INPUTS, Launch, Operation, computing_name, matrix_of_batch, packer, type_name
from .memory.host import address_of, arrays_at, words_at
from .system.threads import thread_count, thread_limit

__all__ = ["BACKEND"]


class CpuBackend:
    name = "cpu"
    device_kinds: tuple[DeviceKind, ...] = ("cpu",)
    host_library = "numpy"
    protocol = PROTOCOL
    operations = Operation.sample, Operation.moments, Operation.perturb

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
        if launch.operation == Operation.sample and not launch.batch:
            from .kernels.cpu.division import most_threads  # Numba takes half a second to import.

            count: Any = most_threads
            if count.py_func(launch.rows, launch.columns, bool(launch.shared_noise)) == 1:
                return _small_launcher(launch)
        return _launcher(launch)

    def c_function(self, launch: Launch) -> int:
        from .kernels.cpu import calls

        return calls.function_address(launch)

    def advancer(self, device: int) -> Callable[[int, int], None]:
        """The cpu backend has no device memory."""
        raise RuntimeError("backend: 'cpu' cannot write to device memory")


def _small_launcher(launch: Launch) -> Launcher:
    """Samples on the calling thread: the kernel gets the arrays, which takes less time than packing their addresses."""
    from .kernels.cpu.kernel import value_kernel, window_kernel

    kernel, shared_noise = window_kernel(type_name(launch), bool(launch.antithetic)), bool(launch.shared_noise)

    def run(
        geometry: None, mu: HostArray, sigma: HostArray, weights: None, matrix: HostArray, first: None, second: None,
        seed: int, offset: int, seed_at: int, offset_at: int, first_row: int, first_column: int, stream: int,
        scratch: int,
    ) -> None:  # fmt: skip
        kernel(mu, sigma, matrix, seed, offset, first_row, first_column, shared_noise)

    return Launcher(run, value_kernel(computing_name(launch)), takes_arrays=True)


def _launcher(launch: Launch) -> Launcher:
    from .kernels.cpu import calls
    from .kernels.cpu.division import SHARE
    from .kernels.cpu.kernel import value_kernel

    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p)(calls.function_address(launch))
    is_small = max(launch.batch, 1) * launch.rows * launch.columns <= SHARE  # One thread's work.
    packers: dict[tuple[Any, ...], tuple[Callable[..., bytes], bytes]] = {}
    kernel = None
    if launch.operation != Operation.perturb:
        kernel = value_kernel(computing_name(launch), launch.operation == Operation.moments)

    def is_valid(*vectors: HostArray | None) -> Any:
        assert kernel is not None
        return kernel(*[x if x is None or x.ndim == 1 else x.reshape(-1) for x in vectors])

    def threads(matrix: Any = None, first_column: int = 0) -> int:
        limit = 1 if is_small else thread_limit()
        limit = min(limit or launch.threads, launch.threads or limit)
        if not is_small:
            calls.find_threads(limit)
        return limit

    def run(
        limit: int | None, mu: HostArray | None, sigma: HostArray | None, weights: HostArray | None,
        matrix: HostArray | bytes | None, first: HostArray | None, second: HostArray | None, seed: int, offset: int,
        seed_at: int, offset_at: int, first_row: int, first_column: int, stream: int, scratch: int,
    ) -> None:  # fmt: skip
        if weights is not None:
            weights = np.ascontiguousarray(weights)
        vectors = mu, sigma, weights
        key = tuple([None if x is None else x.strides for x in vectors])
        if key not in packers:
            packers[key] = packer(_with_strides(launch, key))
        pack_head, tail = packers[key]
        addresses = [
            address_of(x) if isinstance(x, bytes) else 0 if x is None else x.ctypes.data
            for x in (*vectors, matrix, first, second)
        ]
        limit = threads() if limit is None else limit  # Plans of perturb have no geometry.
        head = pack_head(*addresses, seed, offset, first_row, first_column, seed_at, offset_at, 0, 0, 0, 0, limit)
        if function(head + tail):
            raise MemoryError("backend: 'cpu' has no memory for the list of weights")

    return Launcher(run, None if kernel is None else is_valid, threads, takes_arrays=True)


def _with_strides(launch: Launch, strides: tuple[tuple[int, ...] | None, ...]) -> Launch:
    """`launch` with inputs of the computing type in arrays with these strides."""
    kind, fields = ElementType[computing_name(launch)], dict[str, Any]()
    for name, of_array in zip(INPUTS, strides, strict=True):
        if of_array is not None:
            step, stride = (0, *of_array)[-2:]
            fields |= {f"{name}_type": kind, f"{name}_stride": stride, f"{name}_step": step}
    return launch._replace(**fields)


BACKEND: Backend = CpuBackend()
