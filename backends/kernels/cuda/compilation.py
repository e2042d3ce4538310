"""Compiles the plain kernels for a GPU, with numba-cuda. Each machine compiles a kernel once.

Importing this module imports numba-cuda.
"""

from typing import Any

import numba_cuda

from multisample.backends.kernels.compilation import FOLDER, source_digest, versions
from multisample.backends.system.cache import KernelFiles
from multisample.backends.system.cuda_driver import MachineCode

from .geometry import StoreKind
from .keys import KernelKey, name_of
from .plain import CALL, GEOMETRY, plain_kernel, plain_transposed_kernel


def kernel_of(key: KernelKey, capability: tuple[int, int]) -> Any:
    """The uncompiled kernel of `key`, whose store kind is kPlain or kPlainTransposed."""
    kernel = (plain_kernel if key.store_kind == StoreKind.kPlain else plain_transposed_kernel)(key, capability)
    kernel.py_func.__qualname__ = name_of(key)
    return kernel


def compile_kernel(key: KernelKey, capability: tuple[int, int], nvrtc_version: str) -> MachineCode:
    """The kernel of `key`, compiled or loaded from the cache, for the `capability` of the current device.

    The version of NVRTC stands for that of the whole toolkit.
    """

    def compile_now() -> MachineCode:
        kernel = kernel_of(key, capability).compile((CALL, GEOMETRY))
        return MachineCode(kernel.entry_name, kernel.library.get_cubin().code)

    dependencies = str(capability), nvrtc_version, numba_cuda.__version__, *versions()
    files = KernelFiles(FOLDER, "numba", source_digest())
    return files.load_or_compile(f"cuda-{name_of(key)}", dependencies, compile_now)
