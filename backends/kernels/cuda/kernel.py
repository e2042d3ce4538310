"""The block-per-dimension kernel of ``csrc/cuda/kernel.cuh``, in Python for Numba to compile.

x[i, j] = mu[i] + sigma[i] z[i, j]. Noise is made in registers, and each element is written once. `rows` has the kernels
with row stores, `columns` those with transposed stores. Words and normals are the functions of the cpu backend. Each
combination of element type, noise, pairs, transform and stores is a kernel of its own, made of small functions that
Numba inlines.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from multisample.backends.draw import OFFSETS_BYTES, SEED_BYTES, SIZES, Batched, Draw, Vector, Word
from multisample.backends.kernels.compilation import Function, inline

from .columns import transposed_kernel, transposed_staged_kernel
from .geometry import KERNEL_STORES, Geometry
from .group import group_width, seed_of
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
    batched: bool = False,
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
    batched : bool
        Whether the grid's y axis counts the matrices of a batch, whose words are in memory.
    """
    if origin_in_memory:
        by_value = sample_kernel(gpu, dtype, common_noise, antithetic, fast_math, stores)
        return _reading_origin(gpu, by_value, SIZES[dtype], antithetic, batched)
    way, fast = KERNEL_STORES[stores], fast_math and dtype != "float64"
    if way == "kTransposed":
        return transposed_kernel(gpu, dtype, common_noise, antithetic, fast)
    if way == "kTransposedStaged":
        return transposed_staged_kernel(gpu, dtype, common_noise, antithetic, fast)
    return rows_kernel(gpu, dtype, common_noise, antithetic, fast, way)


def _reading_origin(gpu: ModuleType, by_value: Function, size: int, antithetic: bool, batched: bool) -> Function:
    """The kernel `by_value`, for draws whose seed, first row or first column may be in device memory.

    Elements have `size` bytes.
    """
    load, draw, width, batch_index = gpu.load, inline(by_value), group_width(antithetic), gpu.batch_index
    seed_of_call = seed_of(gpu)
    batched_mu, batched_sigma, batched_seed, batched_offsets = (np.uint32(flag) for flag in Batched)

    @inline
    def of_batch(vector, step):
        return Vector(vector.data + step * vector.stride, vector.stride, vector.number, vector.type, vector.unused)

    @inline
    def word_of_batch(word, step):
        return Word(word.value, word.at + step if word.at != 0 else word.at)

    @inline
    def value_of(word):
        return np.uint64(word.value) if word.at == 0 else load(word.at, np.uint64)

    def kernel(call, geometry):
        b = np.int64(batch_index() if batched else 0)
        in_mu = b * call.rows if call.batched & batched_mu else np.int64(0)
        in_sigma = b * call.rows if call.batched & batched_sigma else np.int64(0)
        in_seed = b * SEED_BYTES if call.batched & batched_seed else np.int64(0)
        in_offsets = b * OFFSETS_BYTES if call.batched & batched_offsets else np.int64(0)
        first_column = np.int64(value_of(word_of_batch(call.first_column, in_offsets)))
        values = Draw(
            of_batch(call.mu, in_mu), of_batch(call.sigma, in_sigma), call.matrix + b * call.rows * call.columns * size,
            call.row_stride, call.column_stride, call.rows, call.columns,
            Word(seed_of_call(word_of_batch(call.seed, in_seed)), np.int64(0)), word_of_batch(call.offset, in_offsets),
            Word(np.int64(value_of(word_of_batch(call.first_row, in_offsets))), np.int64(0)),
            Word(first_column, np.int64(0)),
            call.scratch, call.stream, call.type, call.operation, call.common_noise, call.antithetic, call.fast_math,
            call.device, call.threads, call.batch, call.batched, call.column_phase,
        )  # fmt: skip
        resolved = Geometry(
            geometry.blocks, geometry.threads, geometry.groups_per_pass, geometry.one_by_groups,
            geometry.rows_per_pass, geometry.one_by_rows, geometry.chunk, geometry.pitch, geometry.band_rows,
            geometry.interleave_log2, geometry.steps, geometry.blocks_per_band, np.uint32(first_column % width),
            geometry.stores, geometry.pieces, geometry.row_step, geometry.overlap, geometry.column_step,
            geometry.band_groups, geometry.warps, geometry.rest,
        )  # fmt: skip
        draw(values, resolved)

    return kernel
