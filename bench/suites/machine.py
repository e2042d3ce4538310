"""The machine of a measurement: the device, the processor, and the versions of packages."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import os
import platform
from pathlib import Path
from typing import Any

import multisample
from multisample.backends.native import csrc_files
from multisample.backends.system.threads import thread_count

PACKAGES = {
    **{name: (name,) for name in ("numpy", "numba", "torch", "triton", "jax", "jaxlib", "dask", "distributed", "mkl")},
    "cupy": ("cupy-cuda13x", "cupy-cuda12x"),
    "numba_cuda": ("numba-cuda",),
    "curand": ("nvidia-curand", "nvidia-curand-cu12"),
    "curanddx": ("nvidia-mathdx",),
    "raft": ("libraft-cu13", "libraft-cu12"),
    "pytest_benchmark": ("pytest-benchmark",),
}


def describe(*, gpu: bool) -> dict[str, Any]:
    """The machine, for the results; with its GPU if that was measured."""
    versions = {"multisample": multisample.__version__, "sources": csrc_files.digest()[:12]}
    versions["python"] = platform.python_version()
    for name, distributions in PACKAGES.items():
        found = [version for version in map(_version, distributions) if version]
        if found:
            versions[name] = found[0]
    name = driver = None
    if gpu:
        import cupy

        runtime = cupy.cuda.runtime
        name = runtime.getDeviceProperties(runtime.getDevice())["name"].decode()
        versions["cuda_runtime"] = str(runtime.runtimeGetVersion())
        if importlib.util.find_spec("pynvml"):
            import pynvml

            pynvml.nvmlInit()
            driver = str(pynvml.nvmlSystemGetDriverVersion())
    return {
        "gpu": name,
        "driver": driver,
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
