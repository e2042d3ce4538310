"""The cpu backend: Numba on every core, for arrays in host memory.

Windows of the sample matrix are independent. Kernels of large calls share them with helper threads
(kernels/cpu/threads.py); the calling thread draws a small call alone.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import platform
from collections.abc import Callable, Collection
from typing import Any

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
    operations: Collection[int] = (Operation.sample, Operation.moments, Operation.perturb)

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
        # Numba takes half a second to import.
        from .kernels.cpu.division import most_threads

        if launch.operation == Operation.sample and not launch.batch:
            in_python: Any = most_threads
            if in_python.py_func(launch.rows, launch.columns, bool(launch.shared_noise)) == 1:
                return _small_sampler(launch)
        return _packed_launcher(launch)

    def c_function(self, launch: Launch) -> int:
        from .kernels.cpu import calls

        return calls.function_address(launch)

    def advancer(self, device: int) -> Callable[[int, int], None]:
        """The cpu backend has no device memory."""
        raise RuntimeError("backend: 'cpu' cannot write to device memory")


def _small_sampler(launch: Launch) -> Launcher:
    """The launcher of a sample for one thread, without a packed launch."""
    from .kernels.cpu.kernel import value_kernel, window_kernel

    kernel, shared_noise = window_kernel(type_name(launch), bool(launch.antithetic)), bool(launch.shared_noise)

    def run(
        geometry: None, mu: HostArray, sigma: HostArray, weights: None, matrix: HostArray, first: None, second: None,
        seed: int, offset: int, seed_at: int, offset_at: int, first_row: int, first_column: int, stream: int,
        scratch: int,
    ) -> None:  # fmt: skip
        kernel(mu, sigma, matrix, seed, offset, first_row, first_column, shared_noise)

    return Launcher(run, value_kernel(computing_name(launch)), takes_arrays=True)


def _packed_launcher(launch: Launch) -> Launcher:
    """The launcher that packs a launch for the C function of its operation."""
    from .kernels.cpu import calls, threads
    from .kernels.cpu.division import SHARE
    from .kernels.cpu.kernel import value_kernel

    kind = ElementType[computing_name(launch)]
    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p)(calls.function_address(launch))
    is_small = max(launch.batch, 1) * launch.rows * launch.columns <= SHARE  # One thread's work.

    @functools.cache
    def packer_of(*strides: tuple[int, ...] | None) -> tuple[Callable[..., bytes], bytes]:
        fields: dict[str, Any] = {}
        for name, of_input in zip(INPUTS, strides, strict=True):
            if of_input is not None:
                step, stride = (0, *of_input)[-2:]
                fields |= {f"{name}_type": kind, f"{name}_step": step, f"{name}_stride": stride}
        return packer(launch._replace(**fields))

    def limit(matrix: Any, first_column: int) -> int:
        threads.find_threads()
        of_process, of_call = thread_limit(), launch.threads
        return min(of_process or of_call, of_call or of_process)

    def run(
        limit: int | None, mu: HostArray | None, sigma: HostArray | None, weights: HostArray | None,
        matrix: HostArray | bytes | None, first: HostArray | None, second: HostArray | None, seed: int, offset: int,
        seed_at: int, offset_at: int, first_row: int, first_column: int, stream: int, scratch: int,
    ) -> None:  # fmt: skip
        pack_head, tail = packer_of(*[None if x is None else x.strides for x in (mu, sigma, weights)])
        addresses = [address_of(x) for x in (mu, sigma, weights, matrix, first, second)]
        head = pack_head(
            *addresses, seed, offset, first_row, first_column, seed_at, offset_at, 0, 0, 0, 0,
            1 if limit is None else limit,
        )  # fmt: skip
        if function(head + tail) != 0:
            raise MemoryError("backend: 'cpu' has no memory for the sums of weighted moments")

    if launch.operation == Operation.perturb:
        return Launcher(run, geometry=None if is_small else limit, takes_arrays=True)
    is_valid_vector = value_kernel(computing_name(launch), launch.operation == Operation.moments)

    def is_valid_batch(*vectors: HostArray | None) -> Any:
        return is_valid_vector(*[x if x is None or x.ndim == 1 else x.reshape(-1) for x in vectors])

    is_valid = is_valid_batch if launch.batch else is_valid_vector
    return Launcher(run, is_valid, None if is_small else limit, takes_arrays=True)


BACKEND: Backend = CpuBackend()
