"""The cpu backend: Numba on every core, for arrays in host memory.

Windows of the sample matrix are independent. Kernels of large calls share them with helper threads
(kernels/cpu/helper_threads.py); the calling thread draws a small call alone.
"""

import importlib.metadata
import platform
from collections.abc import Callable, Collection
from typing import Any

from .contract import PROTOCOL, Backend, BackendStatus, DeviceKind, HostArray, Launcher
from .launch import Launch, Operation, computing_name, runs_down, type_name
from .system.threads import thread_count

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
        from .kernels.cpu.launcher import run_launch  # Numba takes half a second to import.

        run_launch(launch)

    def launcher(self, launch: Launch) -> Launcher:
        from .kernels.cpu.launcher import packed_launcher
        from .kernels.cpu.thread_windows import THREAD_WORK, work_of

        in_python: Any = work_of
        work = in_python.py_func(launch.rows, launch.columns, bool(launch.shared_noise))
        if launch.operation == Operation.sample and not launch.batch and work <= THREAD_WORK:
            return _small_sampler(launch)
        return packed_launcher(launch)

    def c_function(self, launch: Launch) -> int:
        from .kernels.cpu import calls

        return calls.function_address(launch)

    def advancer(self, device: int) -> Callable[[int, int], None]:
        raise RuntimeError("backend: 'cpu' cannot write to device memory")


def _small_sampler(launch: Launch) -> Launcher:
    """The launcher of a sample for one thread, without a packed launch."""
    from .kernels.cpu.kernel import value_kernel, window_kernel

    shared_noise, antithetic = bool(launch.shared_noise), bool(launch.antithetic)
    kernel = window_kernel(type_name(launch), shared_noise, antithetic, runs_down(launch)).entry_point

    def run(
        geometry: None, mu: HostArray, sigma: HostArray, weights: None, matrix: HostArray, first: None, second: None,
        seed: int, offset: int, seed_at: int, offset_at: int, first_row: int, first_column: int, stream: int,
        scratch: int,
    ) -> None:  # fmt: skip
        kernel(mu, sigma, matrix, seed, offset, first_row, first_column)

    return Launcher(run, value_kernel(computing_name(launch)), takes_arrays=True)


BACKEND: Backend = CpuBackend()
