"""The block-per-dimension kernel of ``csrc/cuda/kernel.cuh``, in Python for Numba to compile.

x[i, j] = mu[i] + sigma[i] z[i, j]. Noise is made in registers, and each element is written once. `rows` has the kernels
with row stores, `transposed` those with transposed stores, and `few_columns` the one for few columns. Words and normals
are the functions of the cpu backend. Each combination of element type, noise, pairs, transform and stores is a kernel
of its own, made of small functions that Numba inlines.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from multisample.backends.kernels.compilation import Function, inline
from multisample.backends.launch import Launch

from .few_columns import few_columns_kernel
from .geometry import STORE_KINDS, Geometry
from .group import group_width, replacing, value_of, word_of
from .rows import rows_kernel
from .transposed import transposed_kernel, transposed_staged_kernel

__all__ = ["sample_kernel"]


def sample_kernel(
    gpu: ModuleType,
    dtype: str,
    shared_noise: bool,
    antithetic: bool,
    fast_math: bool,
    store_kind: int,
    origin_in_memory: bool = False,
    batched: bool = False,
) -> Function:
    """``kernel(call, geometry)`` for one kind of calls, to be compiled.

    Parameters
    ----------
    gpu : module
        `multisample.backends.kernels.cuda.intrinsics`, or a module with the same names.
    dtype : str
        The element type of `out`.
    shared_noise, antithetic, fast_math : bool
        The call's options. fast_math has no effect on float64.
    stores : int
        `Geometry.store_kind`.
    origin_in_memory : bool
        Whether the seed, the first row or the first column may be in device memory. Numbers passed by value are uniform
        to the compiler, which keeps them and the round keys out of the threads' registers.
    batched : bool
        Whether the grid's y axis counts the matrices of a batch, whose words are in memory.
    """
    if origin_in_memory:
        by_value = sample_kernel(gpu, dtype, shared_noise, antithetic, fast_math, store_kind)
        return _reading_origin(gpu, by_value, antithetic, batched)
    kind, fast = STORE_KINDS[store_kind], fast_math and dtype != "float64"
    if kind == "kTransposed":
        return transposed_kernel(gpu, dtype, shared_noise, antithetic, fast)
    if kind == "kTransposedStaged":
        return transposed_staged_kernel(gpu, dtype, shared_noise, antithetic, fast)
    if kind == "kFewColumns":
        return few_columns_kernel(gpu, dtype, shared_noise, antithetic, fast)
    return rows_kernel(gpu, dtype, shared_noise, antithetic, fast, kind)


def _reading_origin(gpu: ModuleType, by_value: Function, antithetic: bool, batched: bool) -> Function:
    """The kernel `by_value`, for launches whose seed, first row or first column may be in device memory."""
    draw, width, batch_index = inline(by_value), group_width(antithetic), gpu.batch_index
    word, number, nowhere = word_of(gpu), value_of(gpu), np.int64(0)
    resolved = replacing(
        Launch, "mu", "sigma", "matrix", "seed", "offset", "first_row", "first_column", "seed_at", "offset_at",
        "first_row_at", "first_column_at",
    )  # fmt: skip
    resolved_geometry = replacing(Geometry, "skip")

    def kernel(call, geometry):
        b = np.int64(batch_index() if batched else 0)
        in_origin = b * call.origin_step
        first_column = number(call.first_column, call.first_column_at + in_origin)
        launch = resolved(
            call, call.mu + b * call.mu_step, call.sigma + b * call.sigma_step, call.matrix + b * call.matrix_step,
            word(call.seed, call.seed_at + b * call.seed_step, call.word_formats & np.uint32(255)),
            word(call.offset, call.offset_at + b * call.offset_step, call.word_formats >> np.uint32(8)),
            number(call.first_row, call.first_row_at + in_origin), first_column, nowhere, nowhere, nowhere, nowhere,
        )  # fmt: skip
        draw(launch, resolved_geometry(geometry, np.uint32(first_column % width)))

    return kernel
