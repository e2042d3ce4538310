"""The plain kernels, kPlain and kPlainTransposed, in Python for Numba: ``csrc/cuda/plain.cuh`` explains them.

x[i, j] = mu[i] + sigma[i] z[i, j]. A thread makes the noise in registers, and writes each element once. libNVVM unrolls
the loops over `range`, so local arrays are registers too. Numba's product of two uint32 is a uint64: np.uint32() takes
its lower half, as C++ does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from multisample.backends.element_types import SIZES
from multisample.backends.kernels.compilation import inline
from multisample.backends.kernels.stream.words import row_part

from .geometry import PLAIN_THREADS, PLAIN_TRANSPOSED_THREADS
from .group import group_of, keys_of, load_usual, mu_of, offset_of, sigma_of
from .intrinsics import store, store_vector
from .kernel_choice import own_rows_of
from .keys import KernelKey

OPTIONS = {"lto": False, "opt": True, "debug": False}


@inline
def quotient(n, geometry):
    """The quotient n / blocks_per_band or n / pieces: see ``Geometry`` in C++."""
    return np.uint32(np.uint64(n) * np.uint64(geometry.one_by_units) >> np.uint64(geometry.units_shift))


@inline
def group_of_column(call, width):
    """The group of the call's first column."""
    return np.uint32(np.uint64(call.first_column) // np.uint64(width))


def plain_kernel(key: KernelKey, capability: tuple[int, int]) -> Any:
    """A block draws some groups of some rows. A thread keeps its group and goes down `turns` rows."""
    real, stored, width, noise_of, noise_in, scaled, narrow = group_of(key, capability)
    size, at_once = SIZES[key.dtype], 1 if key.dtype == "float64" else 4
    quad = min(4 * size, 16)

    # Launch bounds: the maximum threads of a block, and the minimum blocks of a multiprocessor, which limit registers.
    @cuda.jit(launch_bounds=(PLAIN_THREADS, 3), **OPTIONS)
    def kernel(call, geometry):
        block, thread = np.uint32(cuda.blockIdx.x), np.uint32(cuda.threadIdx.x)
        band = quotient(block, geometry)
        tile = np.uint32(block - band * geometry.blocks_per_band)
        row_of_pass = np.uint32(np.uint32(thread * geometry.one_by_groups) >> np.uint32(20))
        group = np.uint32(tile * geometry.groups_per_pass + (thread - row_of_pass * geometry.groups_per_pass))
        column = np.int64(group) * width - geometry.skip
        if row_of_pass >= geometry.rows_per_pass or column >= call.columns:
            return
        # Columns [first, last) of the group are inside the matrix.
        first = np.int32(geometry.skip) if group == 0 else np.int32(0)
        last = np.int32(min(call.columns - column, width))
        keys, offset = keys_of(call), offset_of(call)
        noise = noise_of(np.uint32(group_of_column(call, width) + group), offset, keys)
        rows, apart, turns = np.uint32(call.rows), geometry.rows_per_pass, geometry.turns
        row = np.uint32(band * np.uint32(turns * apart) + row_of_pass)
        step = np.int64(apart) * call.row_stride
        at = call.matrix + np.int64(row) * call.row_stride + column * call.column_stride
        adjacent = first == 0 and last == width and call.column_stride == size
        aligned = adjacent and (at | step) & (quad - 1) == 0
        mu, sigma = cuda.local.array(at_once, real), cuda.local.array(at_once, real)
        x = cuda.local.array(width, stored)
        turn = np.uint32(0)
        while turn < turns and row < rows:
            # All loads come first: the thread then waits for memory once.
            for r in range(at_once):
                valid = np.uint32(row + r * apart)
                valid = np.int64(valid if valid < rows else row)
                mu[r] = load_usual(mu_of(call), valid, real)
                sigma[r] = load_usual(sigma_of(call), valid, real)
            for r in range(at_once):
                if row >= rows or np.uint32(turn + r) >= turns:
                    return
                words = row_part(np.uint32(np.uint32(call.first_row) + row), np.uint32(offset), keys[0])
                elements = scaled(mu[r], sigma[r], noise_in(noise, words, keys))
                for k in range(width):
                    x[k] = narrow(elements[k])
                if aligned:
                    store_vector(at, x, width)
                elif adjacent:
                    for k in range(width):
                        store(at + k * size, x[k])
                else:
                    for k in range(width):
                        if first <= k and k < last:
                            store(at + k * call.column_stride, x[k])
                row = np.uint32(row + apart)
                at += step
            turn = np.uint32(turn + at_once)

    return kernel


def plain_transposed_kernel(key: KernelKey, capability: tuple[int, int]) -> Any:
    """A thread keeps the neighbouring dimensions of a piece, and draws `turns` adjacent groups of columns."""
    real, stored, width, noise_of, noise_in, scaled, narrow = group_of(key, capability)
    size = SIZES[key.dtype]
    own_rows = own_rows_of(size)

    @cuda.jit(launch_bounds=(PLAIN_TRANSPOSED_THREADS, 8), **OPTIONS)
    def kernel(call, geometry):
        thread = np.uint32(cuda.blockIdx.x * np.uint32(PLAIN_TRANSPOSED_THREADS) + cuda.threadIdx.x)
        turn = quotient(thread, geometry)
        first_row = np.uint32(np.uint32(thread - turn * geometry.pieces) * own_rows)
        group = np.uint32(turn * geometry.turns)
        column, columns = np.int32(width * group - geometry.skip), np.int32(call.columns)
        if column >= columns:
            return
        count = min(np.uint32(np.uint32(call.rows) - first_row), np.uint32(own_rows))
        keys, offset, stride = keys_of(call), offset_of(call), call.column_stride
        mu, sigma = cuda.local.array(own_rows, real), cuda.local.array(own_rows, real)
        words = cuda.local.array((own_rows, 2), np.uint32)
        for r in range(own_rows):
            row = np.int64(first_row + (r if r < count else 0))
            mu[r] = load_usual(mu_of(call), row, real)
            sigma[r] = load_usual(sigma_of(call), row, real)
            words[r, 0], words[r, 1] = row_part(np.uint32(np.uint32(call.first_row) + row), np.uint32(offset), keys[0])
        at = call.matrix + np.int64(first_row) * size + np.int64(column) * stride
        aligned = count == own_rows and (at | stride) & (own_rows * size - 1) == 0 and column >= 0
        end = min(columns, np.int32(column + np.int32(width * geometry.turns)))
        group = np.uint32(group_of_column(call, width) + group)
        x = cuda.local.array((width, own_rows), stored)
        while column < end:
            noise = noise_of(group, offset, keys)
            for r in range(own_rows):
                elements = scaled(mu[r], sigma[r], noise_in(noise, (words[r, 0], words[r, 1]), keys))
                for c in range(width):
                    x[c, r] = narrow(elements[c])
            if aligned and column + width <= end:
                for c in range(width):
                    store_vector(at, x[c], own_rows)
                    at += stride
            else:
                for c in range(width):
                    if column + c >= 0 and column + c < columns:
                        for r in range(own_rows):
                            if r < count:
                                store(at + r * size, x[c, r])
                    at += stride
            column = np.int32(column + width)
            group = np.uint32(group + 1)

    return kernel
