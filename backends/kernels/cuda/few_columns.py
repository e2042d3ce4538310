"""The kernel for few columns in a contiguous matrix: ``csrc/cuda/few_columns.cuh`` explains it."""

from __future__ import annotations

import functools
from types import ModuleType

import numpy as np

from multisample.backends.element_types import SIZES, ElementType
from multisample.backends.kernels.compilation import Function, inline
from multisample.backends.kernels.stream.words import row_part

from .geometry import FEW_THREADS
from .group import computing_type, each, element, group_width, keys_of, mu_of, noise, offset_of, scaled, sigma_of
from .kernel_choice import MOST_FEW_COLUMNS, own_rows_of
from .stores import MOST_STORED, copying


@functools.cache
def _own_rows(gpu: ModuleType, dtype: str) -> tuple[Function, Function]:
    """The rows of a thread in one pass: rows `lane`, `lane` + 32, ... of the warp.

    ``elements_of(vector, first, last, is_whole)``: elements `first`, `first` + 32, ... of mu or sigma. Unless
    `is_whole`, element `last` replaces those behind it. ``parts_of(first, offset, keys)``: the row parts of the words,
    from row `first` of the endless matrix on.
    """
    load, opaque, element_of, own_rows = gpu.load, gpu.opaque, element(gpu, dtype), own_rows_of(SIZES[dtype])
    real, usual_type = computing_type(dtype)
    real_size, number = np.dtype(real).itemsize, int(ElementType.number)

    def part(s: int) -> Function:
        behind = np.uint32(32 * s)
        return lambda first, offset, keys: row_part(np.uint32(first + behind), offset, keys[0])

    rows = range(own_rows)
    adjacent_elements = each(rows, lambda s: lambda at: load(at + 32 * s * real_size, real))
    any_elements = each(rows, lambda s: lambda vector, first, last: element_of(vector, min(first + 32 * s, last)))
    same_elements, parts_of = each(rows, lambda s: lambda x: x), each(rows, part)

    @inline
    def elements_of(vector, first, last, is_whole):
        # Contiguous vectors of the computing type are read without a multiplication.
        if is_whole and opaque(vector.type) == usual_type and vector.stride == real_size:
            return adjacent_elements(vector.input + first * real_size)
        if vector.type == number:
            return same_elements(element_of(vector, first))
        return any_elements(vector, first, last)

    return elements_of, parts_of


@functools.cache
def _storing(gpu: ModuleType, dtype: str, antithetic: bool, count: int) -> tuple[Function, Function]:
    """Stores of the first `count` columns of a group, for all own rows.

    ``put_columns(groups, at, stride, left, columns)`` stores them where dimensions are contiguous. `at` is the address
    of the first column in the first row, and columns are `stride` bytes apart. From there on, `left` rows and
    `columns` columns exist. ``put_rows(groups, at, row_size, columns)`` puts them into shared memory.
    """
    size, own_rows = SIZES[dtype], own_rows_of(SIZES[dtype])
    store, store_shared, store_shared_vector = gpu.store, gpu.store_shared, gpu.store_shared_vector
    all_rows = np.int32(32 * own_rows - 31)

    def put_column(c: int) -> Function:
        def partial(s: int) -> Function:
            def put(groups, at, left):
                if left > 32 * s:
                    store(at + 32 * s * size, groups[s][c])

            return put

        put_whole = each(range(own_rows), lambda s: lambda groups, at: store(at + 32 * s * size, groups[s][c]))
        put_partial = each(range(own_rows), partial)

        def put(groups, at, stride, left, columns):
            # Only the last mirrored column may be behind the end.
            if not antithetic or c + 1 < count or c < columns:
                if left >= all_rows:
                    put_whole(groups, at + c * stride)
                else:
                    put_partial(groups, at + c * stride, left)

        return put

    put_columns = each(range(count), put_column)

    def put_row(at_once: int) -> Function:
        def element_of(c: int) -> Function:
            def put(group, at, columns):
                if not antithetic or c + 1 < count or c < columns:
                    store_shared(at + c * size, group[c])

            return put

        def vector_of(first: int) -> Function:
            last = first + at_once
            return lambda group, at, columns: store_shared_vector(at + first * size, group[first:last])

        put_group = each(range(0, count, at_once), element_of if at_once == 1 else vector_of)

        def own_row(s: int) -> Function:
            return lambda groups, at, row_size, columns: put_group(groups[s], at + 32 * s * row_size, columns)

        return each(range(own_rows), own_row)

    # Where the number of columns is even, single stores have bank conflicts.
    put_single = put_row(1)
    put_pairs = put_row(2) if count % 2 == 0 else put_single
    put_quads = put_row(min(4, MOST_STORED // size)) if count % 4 == 0 else put_pairs

    @inline
    def put_rows(groups, at, row_size, columns):
        if row_size % (4 * size) == 0:
            put_quads(groups, at, row_size, columns)
        elif row_size % (2 * size) == 0:
            put_pairs(groups, at, row_size, columns)
        else:
            put_single(groups, at, row_size, columns)

    return put_columns, put_rows


@functools.cache
def _drawing(gpu: ModuleType, dtype: str, shared_noise: bool, antithetic: bool, fast: bool) -> Function:
    """``draw(own, made, is_direct, at, stride, left, columns)`` draws a group of columns, `columns` of which exist.

    If `is_direct`, `at` is in the matrix, and `stride` is the distance of columns. Otherwise `at` is in shared memory,
    and `stride` is the distance of rows.
    """
    own_rows, per_normal = own_rows_of(SIZES[dtype]), group_width(antithetic) // 4
    elements, in_row = scaled(gpu, dtype, antithetic), noise(gpu, dtype, shared_noise, fast).in_row

    def group_of(s: int) -> Function:
        def of(own, made):
            parts, mu, sigma, keys = own
            return elements(mu[s], sigma[s], in_row(made, parts[s], keys))

        return of

    groups_of = each(range(own_rows), group_of)

    def choice(normals: int) -> Function:
        # Branches for each number of normals up to `normals`. The compiler omits the other normals.
        put_columns, put_rows = _storing(gpu, dtype, antithetic, normals * per_normal)
        fewer = choice(normals - 1) if normals > 1 else None
        least = (normals - 1) * per_normal

        @inline
        def draw(own, made, is_direct, at, stride, left, columns):
            groups = groups_of(own, made)
            if is_direct:
                put_columns(groups, at, stride, left, columns)
            else:
                put_rows(groups, at, stride, columns)

        if fewer is None:
            return draw

        @inline
        def chosen(own, made, is_direct, at, stride, left, columns):
            if columns > least:
                draw(own, made, is_direct, at, stride, left, columns)
            else:
                fewer(own, made, is_direct, at, stride, left, columns)

        return chosen

    return choice(4)


def few_columns_kernel(gpu: ModuleType, dtype: str, shared_noise: bool, antithetic: bool, fast: bool) -> Function:
    """``kernel(call, geometry)``: see `multisample.backends.kernels.cuda.kernel.sample_kernel`."""
    size, width, own_rows = SIZES[dtype], group_width(antithetic), own_rows_of(SIZES[dtype])
    thread_index, block_index, shared_memory = gpu.thread_index, gpu.block_index, gpu.shared_memory
    synchronize_block, synchronize_warp = gpu.synchronize_block, gpu.synchronize_warp
    store, load_shared, offset_of_call = gpu.store, gpu.load_shared, offset_of(gpu)
    prepared, _, noise_size, write_noise, read_noise = noise(gpu, dtype, shared_noise, fast)
    elements_of, parts_of = _own_rows(gpu, dtype)
    draw = _drawing(gpu, dtype, shared_noise, antithetic, fast)
    bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}[size]
    of_warp, piece_size = 32 * own_rows, own_rows * size
    copy_pieces = copying(gpu, piece_size, MOST_FEW_COLUMNS, 32 * piece_size)
    noises_size, stage_size = 2 * noise_size, of_warp * MOST_FEW_COLUMNS * size
    stages_size = FEW_THREADS // 32 * stage_size

    @inline
    def copy(stage, out, lane, rows, row_size):
        synchronize_warp()
        if rows >= of_warp and out % piece_size == 0:
            behind = np.int64(lane * piece_size)
            copy_pieces(stage + behind, out + behind, 32 * own_rows * row_size - lane * piece_size)
        else:
            e = np.int32(lane * size)
            while e < min(rows, np.int32(of_warp)) * row_size:
                store(out + e, load_shared(stage + e, bits))
                e = np.int32(e + 32 * size)
        synchronize_warp()

    def kernel(call, geometry):
        noises, stages = shared_memory(noises_size), shared_memory(stages_size)
        thread = thread_index()
        if thread < 2:
            group = np.uint32(call.first_column // width + thread)
            write_noise(noises + np.int64(thread) * noise_size, prepared(group, call))
        synchronize_block()

        lane, warp = np.int32(thread % 32), np.int32(thread // 32)
        columns, row_size = np.int32(call.columns), np.int32(call.columns) * np.int32(size)
        first_row = np.int64(block_index()) * geometry.band_rows
        rows = np.int32(min(np.int64(geometry.band_rows), call.rows - first_row))
        is_direct = call.row_stride == size
        out, stage = call.matrix + first_row * call.row_stride, stages + np.int64(warp * stage_size)
        stride = call.column_stride if is_direct else np.int64(row_size)
        keys, offset = keys_of(call), np.uint32(offset_of_call(call))
        k = np.int32(warp * of_warp)
        while k < rows:
            left, row = np.int32(rows - k), first_row + k + lane
            is_whole = left >= of_warp
            mu = elements_of(mu_of(call), row, call.rows - 1, is_whole)
            sigma = elements_of(sigma_of(call), row, call.rows - 1, is_whole)
            own = parts_of(np.uint32(call.first_row + row), offset, keys), mu, sigma, keys
            at = out + np.int64(k + lane) * size if is_direct else stage + np.int64(lane * row_size)
            made_at, more = noises, columns
            while more > 0:
                draw(own, read_noise(made_at), is_direct, at, stride, np.int32(left - lane), more)
                at += width * stride if is_direct else np.int64(width * size)
                made_at += noise_size
                more = np.int32(more - width)
            if not is_direct:
                copy(stage, out + np.int64(k) * row_size, lane, left, row_size)
            k = np.int32(k + np.int32(geometry.rows_per_pass))

    return kernel
