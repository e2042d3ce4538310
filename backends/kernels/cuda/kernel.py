"""The block-per-dimension kernel of ``csrc/cuda/kernel.cuh``, in Python for Numba to compile.

x[i, j] = mu[i] + sigma[i] z[i, j]. Noise is made in registers, and each element is written once. `rows` has the kernels
with row stores, `transposed` those with transposed stores. Words and normals are the functions of the cpu backend. Each
combination of element type, noise, pairs, transform and stores is a kernel of its own, made of small functions that
Numba inlines.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from multisample.backends.element_types import SIZES
from multisample.backends.kernels.compilation import Function, inline
from multisample.backends.launch import OFFSETS_BYTES, SEED_BYTES, Batched, Launch

from .geometry import STORE_KINDS, Geometry
from .group import group_width, replacing, seed_of, value_of
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
        return _reading_origin(gpu, by_value, SIZES[dtype], antithetic, batched)
    kind, fast = STORE_KINDS[store_kind], fast_math and dtype != "float64"
    if kind == "kTransposed":
        return transposed_kernel(gpu, dtype, shared_noise, antithetic, fast)
    if kind == "kTransposedStaged":
        return transposed_staged_kernel(gpu, dtype, shared_noise, antithetic, fast)
    return rows_kernel(gpu, dtype, shared_noise, antithetic, fast, kind)


def _reading_origin(gpu: ModuleType, by_value: Function, size: int, antithetic: bool, batched: bool) -> Function:
    """The kernel `by_value`, for launches whose seed, first row or first column may be in device memory.

    Elements have `size` bytes.
    """
    draw, width, batch_index = inline(by_value), group_width(antithetic), gpu.batch_index
    seed_of_call, number, nowhere = seed_of(gpu), value_of(gpu), np.int64(0)
    batched_mu, batched_sigma, batched_seed, batched_offsets = (np.uint32(flag) for flag in Batched)
    resolved = replacing(
        Launch, "mu", "sigma", "matrix", "seed", "first_row", "first_column", "seed_at", "offset_at", "first_row_at",
        "first_column_at",
    )  # fmt: skip
    resolved_geometry = replacing(Geometry, "skip")

    @inline
    def moved(at, step):
        return at + step if at != 0 else at

    def kernel(call, geometry):
        b = np.int64(batch_index() if batched else 0)
        in_mu = b * call.rows if call.batched & batched_mu else np.int64(0)
        in_sigma = b * call.rows if call.batched & batched_sigma else np.int64(0)
        in_seed = b * SEED_BYTES if call.batched & batched_seed else np.int64(0)
        in_offsets = b * OFFSETS_BYTES if call.batched & batched_offsets else np.int64(0)
        first_column = number(call.first_column, moved(call.first_column_at, in_offsets))
        launch = resolved(
            call, call.mu + in_mu * call.mu_stride, call.sigma + in_sigma * call.sigma_stride,
            call.matrix + b * call.rows * call.columns * size, seed_of_call(call.seed, moved(call.seed_at, in_seed)),
            number(call.first_row, moved(call.first_row_at, in_offsets)), first_column, nowhere,
            moved(call.offset_at, in_offsets), nowhere, nowhere,
        )  # fmt: skip
        draw(launch, resolved_geometry(geometry, np.uint32(first_column % width)))

    return kernel
