"""Compiles the plain kernels for a GPU, with numba-cuda. Each machine compiles a kernel once.

Importing this module imports numba-cuda.
"""

from __future__ import annotations

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


def compile_kernel(key: KernelKey, capability: tuple[int, int], toolkit: str) -> MachineCode:
    """The kernel of `key`, compiled or loaded from the cache, for the `capability` of the current device.

    `toolkit` is the version of the CUDA toolkit to which libNVVM and nvJitLink belong.
    """

    def compiled() -> MachineCode:
        kernel = kernel_of(key, capability).compile((CALL, GEOMETRY))
        return MachineCode(kernel.entry_name, kernel.library.get_cubin().code)

    dependencies = str(capability), toolkit, numba_cuda.__version__, *versions()
    files = KernelFiles(FOLDER, "numba", source_digest())
    return files.compiled(f"cuda-{name_of(key)}", dependencies, compiled)
