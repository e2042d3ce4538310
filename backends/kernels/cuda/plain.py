"""The plain kernels, kPlain and kPlainTransposed, in Python for Numba: ``csrc/cuda/plain.cuh`` explains them.

x[i, j] = mu[i] + sigma[i] z[i, j]. A thread makes the noise in registers, and writes each element once. libNVVM unrolls
the loops over `range`, so local arrays are registers too. Numba's product of two uint32 is a uint64: np.uint32() takes
its lower half, as C++ does.
"""

import collections
from typing import Any

import numpy as np
from numba import cuda, types

from multisample.backends.element_types import SIZES
from multisample.backends.kernels.compilation import inline
from multisample.backends.kernels.stream.words import row_part
from multisample.backends.launch import FIELD_AT, FORMATS, SAMPLE_CALL

from .geometry import FORMAT, MANY_TURNS, ONE_ROW_TURNS, PLAIN_THREADS, PLAIN_TRANSPOSED_THREADS, Geometry, own_rows_of
from .group import group_of, keys_of, offset_of
from .intrinsics import store, store_vector
from .keys import KernelKey

OPTIONS = {"lto": False, "opt": True, "debug": False}

# Numba passes each field of both tuples, which gives the bytes of both C++ structs. Kernels compute with addresses as
# signed numbers, and reinterpret the bits of an input that is a number.
_TYPES = {"P": types.int64, "q": types.int64, "Q": types.uint64, "I": types.uint32, "i": types.int32}
_FIELDS = {name: FORMATS[name] for name, at in FIELD_AT.items() if SAMPLE_CALL.start <= at < SAMPLE_CALL.stop}
CALL = types.NamedTuple([_TYPES[form] for form in _FIELDS.values()], collections.namedtuple("SampleCall", _FIELDS))
GEOMETRY = types.NamedTuple([_TYPES[form] for form in FORMAT], Geometry)


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
    real, stored, width, noise_of, noise_in, scaled, element, narrow = group_of(key, capability)
    size, turns, usual = SIZES[key.dtype], key.turns, key.usual
    quad = min(4 * size, 16)
    one_row = turns == ONE_ROW_TURNS  # A pass has one row: all threads of a block have the same row.

    @inline
    def draw(call, geometry, group, first, count):
        """Draw a group in `count` rows: first, first + apart, ..."""
        rows, apart = np.uint32(call.rows), np.uint32(1) if one_row else geometry.rows_per_pass
        # All loads come first: the thread then waits for memory once.
        mu, sigma = cuda.local.array(turns, real), cuda.local.array(turns, real)
        for k in range(count):
            row = np.uint32(first + k * apart)
            valid = np.int64(row if one_row or turns == 1 or row < rows else np.uint32(rows - 1))
            mu[k] = element(call.mu, call.mu_stride, call.mu_type, valid)
            sigma[k] = element(call.sigma, call.sigma_stride, call.sigma_type, valid)
        keys, offset = keys_of(call), offset_of(call)
        noise = noise_of(np.uint32(group_of_column(call, width) + group), offset, keys)
        skip = np.int64(0) if usual else np.int64(geometry.skip)
        column, stride = np.int64(group) * width - skip, np.int64(size) if usual else call.column_stride
        # Columns [begin, end) of the group are inside the matrix.
        begin, end = skip if group == 0 else np.int64(0), min(call.columns - column, width)
        at, step = call.matrix + np.int64(first) * call.row_stride + column * stride, np.int64(apart) * call.row_stride
        adjacent = begin == 0 and end == width and stride == size
        aligned = usual or (adjacent and (at | step) & (quad - 1) == 0)
        x = cuda.local.array(width, stored)
        for k in range(count):
            row = np.uint32(first + k * apart)
            if not one_row and k > 0 and row >= rows:
                return
            words = row_part(np.uint32(np.uint32(call.first_row) + row), np.uint32(offset), keys[0])
            elements = scaled(mu[k], sigma[k], noise_in(noise, words, keys))
            for c in range(width):
                x[c] = narrow(elements[c])
            if aligned:
                store_vector(at, x, width)
            elif adjacent:
                for c in range(width):
                    store(at + c * size, x[c])
            else:
                for c in range(width):
                    if begin <= c and c < end:
                        store(at + c * stride, x[c])
            at += step

    # Launch bounds: the maximum threads of a block, and the minimum blocks of a multiprocessor, which limit registers.
    # The limit also keeps the compiler from drawing all rows before it stores the first.
    blocks = 6 if key.dtype == "float64" else 8 if key.antithetic else 12

    @cuda.jit(launch_bounds=(PLAIN_THREADS, blocks), **OPTIONS)
    def kernel(call, geometry):
        block, thread = np.uint32(cuda.blockIdx.x), np.uint32(cuda.threadIdx.x)
        band = quotient(block, geometry)
        tile = np.uint32(block - band * geometry.blocks_per_band)
        row_of_pass, apart, rows = np.uint32(0), np.uint32(1), np.uint32(call.rows)
        if not one_row:
            row_of_pass = np.uint32(np.uint32(thread * geometry.one_by_groups) >> np.uint32(20))
            apart = geometry.rows_per_pass
        group = np.uint32(tile * geometry.groups_per_pass + (thread - row_of_pass * geometry.groups_per_pass))
        first = np.uint32(band * np.uint32(turns * apart) + row_of_pass)
        column = np.int64(group) * width - (0 if usual else geometry.skip)
        if row_of_pass >= apart or column >= call.columns or first >= rows:
            return
        if not one_row or rows - first >= turns:
            draw(call, geometry, group, first, turns)
        else:
            for row in range(first, rows):
                draw(call, geometry, group, np.uint32(row), 1)

    return kernel


def plain_transposed_kernel(key: KernelKey, capability: tuple[int, int]) -> Any:
    """A thread keeps the neighbouring dimensions of a piece, and draws `turns` adjacent groups of columns."""
    real, stored, width, noise_of, noise_in, scaled, element, narrow = group_of(key, capability)
    size, fixed_turns, usual = SIZES[key.dtype], key.turns, key.usual
    own_rows = own_rows_of(size)

    @cuda.jit(launch_bounds=(PLAIN_TRANSPOSED_THREADS, 8), **OPTIONS)
    def kernel(call, geometry):
        thread = np.uint32(cuda.blockIdx.x * np.uint32(PLAIN_TRANSPOSED_THREADS) + cuda.threadIdx.x)
        turn = quotient(thread, geometry)
        first_row = np.uint32(np.uint32(thread - turn * geometry.pieces) * own_rows)
        turns = fixed_turns if fixed_turns < MANY_TURNS else geometry.turns
        group = np.uint32(turn * turns)
        skip, columns = np.int32(0) if usual else np.int32(geometry.skip), np.int32(call.columns)
        column = np.int32(width * group - skip)
        if column >= columns:
            return
        count = np.uint32(own_rows) if usual else min(np.uint32(np.uint32(call.rows) - first_row), np.uint32(own_rows))
        mu, sigma = cuda.local.array(own_rows, real), cuda.local.array(own_rows, real)
        for r in range(own_rows):
            row = np.int64(first_row) + (r if usual or r < count else 0)
            mu[r] = element(call.mu, call.mu_stride, call.mu_type, row)
            sigma[r] = element(call.sigma, call.sigma_stride, call.sigma_type, row)
        keys, offset, stride = keys_of(call), offset_of(call), call.column_stride
        words = cuda.local.array((own_rows, 2), np.uint32)
        for r in range(own_rows):
            row_of_stream = np.uint32(np.uint32(call.first_row) + first_row + r)
            words[r, 0], words[r, 1] = row_part(row_of_stream, np.uint32(offset), keys[0])
        at = call.matrix + np.int64(first_row) * size + np.int64(column) * stride
        aligned = usual or (count == own_rows and (at | stride) & (own_rows * size - 1) == 0)
        group = np.uint32(group_of_column(call, width) + group)
        x = cuda.local.array((width, own_rows), stored)
        for k in range(turns):
            if k > 0 and column >= columns:
                return
            noise = noise_of(group, offset, keys)
            for r in range(own_rows):
                elements = scaled(mu[r], sigma[r], noise_in(noise, (words[r, 0], words[r, 1]), keys))
                for c in range(width):
                    x[c, r] = narrow(elements[c])
            for c in range(width):
                if usual or (column + c >= 0 and column + c < columns):
                    if aligned:
                        store_vector(at, x[c], own_rows)
                    else:
                        for r in range(own_rows):
                            if r < count:
                                store(at + r * size, x[c, r])
                at += stride
            column = np.int32(column + width)
            group = np.uint32(group + 1)

    return kernel
