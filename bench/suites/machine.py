"""The machine of a measurement: the device and its clocks under load, the processor, and the versions of packages."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import statistics
from pathlib import Path
from typing import Any

import multisample
from bench.suites.timing import BUSY, CudaDevice
from multisample.backends.native import csrc_files
from multisample.backends.system.threads import thread_count

PACKAGES = {
    "numpy": ("numpy",),
    "numba": ("numba",),
    "torch": ("torch",),
    "triton": ("triton",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x"),
    "numba_cuda": ("numba-cuda",),
    "jax": ("jax",),
    "jaxlib": ("jaxlib",),
    "dask": ("dask",),
    "distributed": ("distributed",),
    "curand": ("nvidia-curand", "nvidia-curand-cu12"),
    "curanddx": ("nvidia-mathdx",),
    "raft": ("libraft-cu13", "libraft-cu12"),
    "mkl": ("mkl",),
    "pytest_benchmark": ("pytest-benchmark",),
}


class Clocks:
    """Clocks of the current CUDA device, read under load."""

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise ImportError("clocks: expected nvidia-ml-py, got none: pip install 'multisample[bench]'") from error
        import cupy

        pynvml.nvmlInit()
        runtime = cupy.cuda.runtime
        device = runtime.getDevice()
        self._nvml = pynvml
        self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(runtime.deviceGetPCIBusId(device).encode())
        self.gpu = runtime.getDeviceProperties(device)["name"].decode()
        self.driver = str(pynvml.nvmlSystemGetDriverVersion())
        self.cuda_runtime = str(runtime.runtimeGetVersion())
        self._read: list[tuple[int, int]] = []

    def read(self, device: CudaDevice) -> None:
        """Read the clocks once more."""
        for _ in range(20):  # Some milliseconds of work.
            device.fill(BUSY)
        kinds = self._nvml.NVML_CLOCK_SM, self._nvml.NVML_CLOCK_MEM
        sm, memory = (self._nvml.nvmlDeviceGetClockInfo(self._handle, kind) for kind in kinds)
        self._read.append((sm, memory))
        device.wait()

    def medians(self) -> tuple[float, float]:
        """Medians of the processor clock and of the memory clock, in MHz."""
        sm, memory = zip(*self._read, strict=True)
        return statistics.median(sm), statistics.median(memory)


def describe(clocks: Clocks | None) -> dict[str, Any]:
    """The machine, for the results. `clocks` only if a GPU was measured."""
    versions = {"multisample": multisample.__version__, "sources": csrc_files.digest()[:12]}
    versions["python"] = platform.python_version()
    for name, distributions in PACKAGES.items():
        found = [version for version in map(_version, distributions) if version]
        if found:
            versions[name] = found[0]
    sm, memory = clocks.medians() if clocks else (None, None)
    if clocks:
        versions["cuda_runtime"] = clocks.cuda_runtime
    return {
        "gpu": clocks.gpu if clocks else None,
        "driver": clocks.driver if clocks else None,
        "sm_clock_mhz": sm,
        "memory_clock_mhz": memory,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": thread_count(),
        "versions": versions,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
