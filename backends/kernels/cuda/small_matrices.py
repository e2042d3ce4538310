"""The kernel for batches of small matrices: ``csrc/cuda/small_matrices.cuh`` explains it."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from multisample.backends.element_types import SIZES
from multisample.backends.kernels.compilation import Function
from multisample.backends.kernels.stream.words import row_part

from .geometry import Geometry
from .group import (
    element,
    group_width,
    inside,
    keys_of,
    matrix_with_values,
    mu_of,
    noise,
    place,
    replacing,
    scaled,
    sigma_of,
)
from .stores import MOST_STORED, aligned, strided


def small_matrices_kernel(gpu: ModuleType, dtype: str, shared_noise: bool, antithetic: bool, fast: bool) -> Function:
    """``kernel(call, geometry)``: see `multisample.backends.kernels.cuda.kernel.sample_kernel`."""
    size, width = SIZES[dtype], group_width(antithetic)
    block_index, place_of, matrix_of = gpu.block_index, place(gpu), matrix_with_values(gpu)
    prepared, in_row, *_ = noise(gpu, dtype, shared_noise, fast)
    elements, element_of = scaled(gpu, dtype, antithetic), element(gpu, dtype)
    put_aligned, put_strided = aligned(gpu, size, width, 4), strided(gpu, width)
    quad = min(4 * size, MOST_STORED)
    resolved_geometry = replacing(Geometry, "skip")

    def kernel(call, geometry):
        row_of_block, group = place_of(0, geometry)
        matrix_of_block = np.int32(row_of_block * geometry.one_by_rows >> 20)
        row_of_pass = np.int32(row_of_block - matrix_of_block * np.int32(geometry.rows_per_pass))
        b = np.int64(block_index()) * geometry.matrices + matrix_of_block
        if matrix_of_block >= geometry.matrices or b >= call.batch:
            return
        matrix = matrix_of(call, b)
        resolved = resolved_geometry(geometry, np.uint32(matrix.first_column % width))
        first, last = inside(width, (row_of_pass, group), matrix, resolved)
        if first >= last:
            return

        keys = keys_of(matrix)
        columns_noise = prepared(np.uint32(matrix.first_column // width + group), matrix)
        column = width * group - resolved.skip
        begin = matrix.matrix + column * matrix.column_stride
        is_adjacent = first == 0 and last == width and matrix.column_stride == size
        row = np.int64(row_of_pass)
        while row < matrix.rows:
            mu, sigma = element_of(mu_of(matrix), row), element_of(sigma_of(matrix), row)
            words = row_part(np.uint32(matrix.first_row + row), np.uint32(matrix.offset), keys[0])
            x = elements(mu, sigma, in_row(columns_noise, words, keys))
            at = begin + row * matrix.row_stride
            if is_adjacent and at % quad == 0:
                put_aligned(at, x, 0)
            else:
                put_strided(at, x, (matrix.column_stride, first, last))
            row += geometry.rows_per_pass

    return kernel
