"""Compiles the plain kernels for a GPU, with numba-cuda. Each machine compiles a kernel once.

Importing this module imports numba-cuda.
"""

from __future__ import annotations

from typing import Any

import numba_cuda
from numba import cuda
from numba.cuda.dispatcher import _Kernel
from numba.cuda.utils import numba_target_override

from multisample.backends.kernels.compilation import KernelCache, source_digest

from .geometry import StoreKind
from .keys import KernelKey, name_of
from .plain import CALL, GEOMETRY, plain_kernel, plain_transposed_kernel


def kernel_of(key: KernelKey, capability: tuple[int, int]) -> Any:
    """The uncompiled kernel of `key`, whose store kind is kPlain or kPlainTransposed."""
    kernel = (plain_kernel if key.store_kind == StoreKind.kPlain else plain_transposed_kernel)(key, capability)
    kernel.py_func.__qualname__ = name_of(key)
    return kernel


def compile_kernel(key: KernelKey) -> Any:
    """The kernel of `key`, compiled or loaded from the cache. The current device must be the device of `key`."""
    kernel = kernel_of(key, cuda.get_current_device().compute_capability)
    digest = source_digest()
    digest += numba_cuda.__version__ if digest else ""
    kernel._cache = KernelCache(f"cuda-{name_of(key)}", digest, _Kernel._reduce_states, _rebuild, "numba")
    return kernel.compile((CALL, GEOMETRY))


def _rebuild(target_context: Any, payload: Any) -> Any:
    with numba_target_override():
        return _Kernel._rebuild(**payload)
