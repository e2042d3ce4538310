"""The machine of a measurement: the device, the processor, and the versions of packages."""

import contextlib
import datetime
import importlib.metadata
import os
import platform
from typing import Any

import cpuinfo

import multisample
from multisample.backends.native import csrc_files
from multisample.backends.system.threads import thread_count

# The installed packages whose versions results name: the package, and its name in results.
PACKAGES = {
    **{name: name for name in ("numpy", "numba", "torch", "triton", "jax", "jaxlib", "dask", "distributed", "mkl")},
    **{"cupy-cuda12x": "cupy", "cupy-cuda13x": "cupy", "numba-cuda": "numba_cuda", "nvidia-mathdx": "curanddx"},
    **{"nvidia-curand-cu12": "curand", "nvidia-curand": "curand"},
    "pytest-benchmark": "pytest_benchmark",
}


def describe(*, gpu: bool) -> dict[str, Any]:
    versions = {"multisample": multisample.__version__, "sources": csrc_files.digest()[:12]}
    versions["python"] = platform.python_version()
    for distribution, name in PACKAGES.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(distribution)
    gpu_name = driver = None
    if gpu:
        import cupy

        runtime = cupy.cuda.runtime
        gpu_name = runtime.getDeviceProperties(runtime.getDevice())["name"].decode()
        versions["cuda_runtime"] = str(runtime.runtimeGetVersion())
        with contextlib.suppress(ImportError):
            import pynvml

            pynvml.nvmlInit()
            driver = str(pynvml.nvmlSystemGetDriverVersion())
    return {
        "gpu": gpu_name,
        "driver": driver,
        "cpu": cpuinfo.get_cpu_info().get("brand_raw", platform.machine()),
        "cores": os.cpu_count(),
        "threads": thread_count(),
        "versions": versions,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
