"""The block-per-dimension kernel of ``csrc/cuda/kernel.cuh``, in Python for Numba to compile.

x[i, j] = mu[i] + sigma[i] z[i, j]. Noise is made in registers, and each element is written once. `plain` has the idea,
and the kernels of most calls. For large calls, `rows` has the kernels with row stores, `transposed` the kernels
with transposed stores, and `few_columns` the kernel for few columns. `small_matrices` has the kernel for batches of
small matrices. Words and normals are the functions of the cpu backend.

Each combination of element type, noise, antithetic pairs, transform and store kind is a kernel of its own, made of
small functions that Numba inlines.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from multisample.backends.kernels.compilation import Function

from .few_columns import few_columns_kernel
from .group import reading_origin
from .kernel_choice import STORE_KINDS
from .plain import plain_kernel, plain_transposed_kernel
from .rows import rows_kernel
from .small_matrices import small_matrices_kernel
from .transposed import transposed_kernel, transposed_staged_kernel


def sample_kernel(
    gpu: ModuleType, dtype: str, shared_noise: bool, antithetic: bool, fast_math: bool, store_kind: int,
    origin_in_memory: bool = False, batched: bool = False,
) -> Function:  # fmt: skip
    """``kernel(call, geometry)`` for the calls of a `KernelKey`, to be compiled. `gpu` is `intrinsics` or alike.

    Numbers passed by value are uniform to the compiler, which keeps them and the round keys out of the threads'
    registers; with `origin_in_memory` they are not. The grid's y axis counts the matrices of a batch, except with
    kSmallMatrices.
    """
    kind, fast = STORE_KINDS[store_kind], fast_math and dtype != "float64"
    if kind == "kSmallMatrices":
        return small_matrices_kernel(gpu, dtype, shared_noise, antithetic, fast)
    if origin_in_memory:
        by_value = sample_kernel(gpu, dtype, shared_noise, antithetic, fast_math, store_kind)
        return reading_origin(gpu, by_value, antithetic, batched)
    if kind == "kPlain":
        return plain_kernel(gpu, dtype, shared_noise, antithetic, fast)
    if kind == "kPlainTransposed":
        return plain_transposed_kernel(gpu, dtype, shared_noise, antithetic, fast)
    if kind == "kTransposed":
        return transposed_kernel(gpu, dtype, shared_noise, antithetic, fast)
    if kind == "kTransposedStaged":
        return transposed_staged_kernel(gpu, dtype, shared_noise, antithetic, fast)
    if kind == "kFewColumns":
        return few_columns_kernel(gpu, dtype, shared_noise, antithetic, fast)
    return rows_kernel(gpu, dtype, shared_noise, antithetic, fast, kind)


def advance_kernel(gpu: ModuleType) -> Function:
    """The kernel that adds 1 to an offset in memory, to be compiled. It is launched after the kernels that read it."""
    load, store = gpu.load, gpu.store

    def kernel(counter: Any) -> None:
        store(counter, np.uint64(load(counter, np.uint64) + np.uint64(1)))

    kernel.__qualname__ = "advance_kernel"
    return kernel
