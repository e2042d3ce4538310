"""The block-per-dimension kernel of ``csrc/cuda/kernel.cuh``, in Python for Numba to compile.

x[i, j] = mu[i] + sigma[i] z[i, j]. Noise is made in registers, and each element is written once. `rows` has the kernels
with row stores, `columns` those with transposed stores. Words and normals are the functions of the cpu backend. Each
combination of element type, noise, pairs, transform and stores is a kernel of its own, made of small functions that
Numba inlines.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from multisample.backends.draw import Draw, Word
from multisample.backends.kernels.compilation import Function, inline

from .columns import transposed_kernel, transposed_staged_kernel
from .geometry import KERNEL_STORES, Geometry
from .group import group_width
from .rows import rows_kernel

__all__ = ["sample_kernel"]


def sample_kernel(
    gpu: ModuleType,
    dtype: str,
    common_noise: bool,
    antithetic: bool,
    fast_math: bool,
    stores: int,
    origin_in_memory: bool = False,
) -> Function:
    """``kernel(call, geometry)`` for one kind of calls, to be compiled.

    Parameters
    ----------
    gpu : module
        `multisample.backends.kernels.cuda.intrinsics`, or a module with the same names.
    dtype : str
        The element type of `out`.
    common_noise, antithetic, fast_math : bool
        The call's options. fast_math has no effect on float64.
    stores : int
        `Geometry.stores`.
    origin_in_memory : bool
        Whether the seed, the first row or the first column may be in device memory. Numbers passed by value are uniform
        to the compiler, which keeps them and the round keys out of the threads' registers.
    """
    if origin_in_memory:
        return _reading_origin(gpu, sample_kernel(gpu, dtype, common_noise, antithetic, fast_math, stores), antithetic)
    way, fast = KERNEL_STORES[stores], fast_math and dtype != "float64"
    if way == "kTransposed":
        return transposed_kernel(gpu, dtype, common_noise, antithetic, fast)
    if way == "kTransposedStaged":
        return transposed_staged_kernel(gpu, dtype, common_noise, antithetic, fast)
    return rows_kernel(gpu, dtype, common_noise, antithetic, fast, way)


def _reading_origin(gpu: ModuleType, by_value: Function, antithetic: bool) -> Function:
    """The kernel `by_value`, for draws whose seed, first row or first column may be in device memory."""
    load, draw, width = gpu.load, inline(by_value), group_width(antithetic)

    @inline
    def value_of(word):
        return np.uint64(word.value) if word.at == 0 else load(word.at, np.uint64)

    def kernel(call, geometry):
        first_column = np.int64(value_of(call.first_column))
        values = Draw(
            call.mu, call.sigma, call.matrix, call.row_stride, call.column_stride, call.rows, call.columns,
            Word(value_of(call.seed), np.int64(0)), call.offset,
            Word(np.int64(value_of(call.first_row)), np.int64(0)), Word(first_column, np.int64(0)),
            call.scratch, call.stream, call.type, call.operation, call.common_noise, call.antithetic, call.fast_math,
            call.device, call.threads, call.unused,
        )  # fmt: skip
        resolved = Geometry(
            geometry.blocks, geometry.threads, geometry.groups_per_pass, geometry.one_by_groups,
            geometry.rows_per_pass, geometry.one_by_rows, geometry.chunk, geometry.pitch, geometry.band_rows,
            geometry.interleave_log2, geometry.steps, geometry.blocks_per_band, np.uint32(first_column % width),
            geometry.stores, geometry.pieces, geometry.row_step, geometry.overlap, geometry.column_step,
            geometry.band_groups,
        )  # fmt: skip
        draw(values, resolved)

    return kernel
