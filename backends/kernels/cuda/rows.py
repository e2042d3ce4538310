"""The kernels with row stores, kAligned, kShifted, kStaged and kStrided: ``csrc/cuda/rows.cuh`` explains them."""

from __future__ import annotations

import functools
from types import ModuleType

import numpy as np

from multisample.backends.element_types import SIZES
from multisample.backends.kernels.compilation import Function, inline
from multisample.backends.kernels.stream.words import row_part

from .geometry import CHUNK, SHORT_ROW_THREADS, STAGED_PASSES
from .group import (
    dimension_place,
    each,
    element,
    group_width,
    inside,
    keys_of,
    memory_of,
    mu_of,
    noise,
    offset_of,
    packing,
    place,
    scaled,
    sigma_of,
)
from .stores import MOST_STORED, Staged, aligned, paired, shifted, staged, strided

_WARP = np.uint32(32)
# Unrolling of `_going_down`, for each store kind that uses it. Antithetic groups, which are twice as wide, halve it.
_UNROLL = {"kAligned": 8, "kShifted": 6, "kStrided": 1}
# Limits of the unrolling: rows of shared noise have little work, and float64 exceeds the registers.
_UNROLL_SHARED, _UNROLL_FLOAT64 = 2, 1


@functools.cache
def _going_down(
    group: Function, put_row: Function, entry_size: int, store_kind: str, dtype: str, shared_noise: bool,
    antithetic: bool,
) -> Function:  # fmt: skip
    """``go_down(entry, count, at, stride, own, state)`` draws and stores `count` groups, `stride` bytes apart.

    ``group(entry, own)`` computes one group from the entry of a chunk at address `entry` and from `own`, which all
    groups of the thread share. The entries of the rows are adjacent. The loop is unrolled, so that the loads of one row
    overlap with the arithmetic of another.
    """
    most = _UNROLL_FLOAT64 if dtype == "float64" else _UNROLL_SHARED if shared_noise else max(_UNROLL.values())
    unroll = max(min(most, _UNROLL[store_kind]) // (2 if antithetic else 1), 1)

    @inline
    def draw_row(entry, at, stride, own, state):
        put_row(at, group(entry, own), state)
        return entry + entry_size, at + stride

    @functools.cache
    def several(rows: int) -> Function:
        if rows == 1:
            return draw_row
        first, second = several(rows // 2), several(rows - rows // 2)

        @inline
        def draw_both(entry, at, stride, own, state):
            entry, at = first(entry, at, stride, own, state)
            return second(entry, at, stride, own, state)

        return draw_both

    draw_rows = several(unroll)

    @inline
    def go_down(entry, count, at, stride, own, state):
        left = np.int32(count)
        while left >= unroll:
            entry, at = draw_rows(entry, at, stride, own, state)
            left = np.int32(left - unroll)
        while left > 0:
            entry, at = draw_row(entry, at, stride, own, state)
            left = np.int32(left - 1)

    return go_down


@functools.cache
def _dimension(gpu: ModuleType, dtype: str) -> tuple[int, Function, Function]:
    """One dimension in shared memory.

    Its bytes; ``write(at, row_part, mu, sigma)``; and ``read(at)``, which returns the three.
    """
    one, words_of, number_of = packing(dtype)
    two, end = 2 * one, 2 * one + 2
    write_words, read_words = memory_of(gpu, one)
    unused = (np.uint32(0),) * (4 * one - end)

    @inline
    def write(at, row, mu, sigma):
        write_words(at, words_of(mu) + words_of(sigma) + row + unused)

    @inline
    def read(at):
        w = read_words(at)
        return w[two:end], number_of(w[:one]), number_of(w[one:two])

    return 16 * one, write, read


@functools.cache
def _elements(gpu: ModuleType, dtype: str, shared_noise: bool, antithetic: bool, fast: bool) -> Function:
    """``elements_of(dimension, own)``: a dimension in the thread's columns. `own`: their noise, and keys."""
    in_row = noise(gpu, dtype, shared_noise, fast).in_row
    elements = scaled(gpu, dtype, antithetic)

    @inline
    def elements_of(dimension, own):
        row, mu, sigma = dimension
        columns_noise, keys = own
        return elements(mu, sigma, in_row(columns_noise, row, keys))

    return elements_of


@functools.cache
def _group(gpu: ModuleType, dtype: str, shared_noise: bool, antithetic: bool, fast: bool) -> Function:
    """``group(entry, own)`` for `_going_down`: the dimension at `entry` of a chunk, in the thread's columns."""
    _, _, read_dimension = _dimension(gpu, dtype)
    elements_of = _elements(gpu, dtype, shared_noise, antithetic, fast)
    return inline(lambda entry, own: elements_of(read_dimension(entry), own))


@inline
def _in_warps(geometry):
    """Groups of a shifted row that fill warps."""
    return np.int64(geometry.warps) * 32


def _in_pairs(size: int, width: int) -> bool:
    """Whether a group is larger than one store of a thread."""
    return width * size > MOST_STORED


@functools.cache
def _columns(gpu: ModuleType, size: int, width: int, store_kind: str) -> Function:
    """``columns_of(place, out, stages, call, geometry)``: the columns and rows of a thread.

    The result has three elements. The first is the displacement in bytes from the first row of a chunk to the address
    for the stores. The second says whether all columns of the group (kShifted: of the warp) are inside the matrix. The
    third says whether the lane pairs have adjacent groups, as `paired` needs.
    """
    thread_index, from_lane, all_of_warp = gpu.thread_index, gpu.from_lane, gpu.all_of_warp
    is_shifted, group_size = store_kind == "kShifted", width * size
    is_paired = store_kind == "kAligned" and _in_pairs(size, width)

    @inline
    def columns_of(place, out, stages, call, geometry):
        row, group = place
        first, last = inside(width, place, call, geometry)
        displacement = row * call.row_stride + (width * group - geometry.skip) * call.column_stride
        whole = first == 0 and last == width
        if is_shifted:
            whole = all_of_warp(whole and group < _in_warps(geometry))
        in_pairs = False
        if is_paired:
            lane = np.int32(thread_index() % _WARP)
            apart = from_lane(displacement, lane ^ 1) - displacement
            in_pairs = all_of_warp(whole and apart == (-group_size if lane % 2 != 0 else group_size))
        return displacement, whole, in_pairs

    return columns_of


@functools.cache
def _staging(gpu: ModuleType, size: int, width: int, staging: Staged) -> Function:
    """`_columns` for staged stores: the thread's `Stage`."""
    from_lane, prepared = gpu.from_lane, staging.prepared

    @inline
    def columns_of(place, out, stages, call, geometry):
        row, group = place
        first, last = inside(width, place, call, geometry)
        # A row beyond the pass has no elements, and begins at the end of the pass.
        rows, columns = np.int32(geometry.rows_per_pass), call.columns
        begin = row * columns + (width * group - geometry.skip + first) if row < rows else rows * columns
        run = from_lane(np.int32(begin), 0)
        length = np.int32(from_lane(np.int32(begin + (last - first)), 31) - run)
        return prepared(stages, out, run, length, np.int32(begin - run), (first, last), geometry.row_step)

    return columns_of


def _drawing(
    gpu: ModuleType, dtype: str, shared_noise: bool, antithetic: bool, fast: bool, store_kind: str
) -> Function:
    """``draw(own, columns, tile, chunk, rows, out, call, geometry)``.

    Draws a chunk of `rows` dimensions at address `chunk` of shared memory, whose first row begins at `out`.
    """
    size, width = SIZES[dtype], group_width(antithetic)
    thread_index, place_of = gpu.thread_index, place(gpu)
    group, (dimension_size, _, _) = _group(gpu, dtype, shared_noise, antithetic, fast), _dimension(gpu, dtype)
    from_lane, all_of_warp = gpu.from_lane, gpu.all_of_warp
    is_aligned, is_shifted = store_kind == "kAligned", store_kind == "kShifted"
    has_pairs = _in_pairs(size, width)
    is_paired = is_aligned and has_pairs
    # Elements from one aligned address to the next.
    alone = min(4, MOST_STORED // size)

    def down(put_row: Function, store_kind: str) -> Function:
        return _going_down(group, put_row, dimension_size, store_kind, dtype, shared_noise, antithetic)

    # Aligned rows allow stores of a whole group; shifted rows and wide groups need stores of four elements.
    put_aligned = aligned(gpu, size, width, 4 if is_shifted or has_pairs else width)
    down_aligned, down_strided = down(put_aligned, "kAligned"), down(strided(gpu, width), "kStrided")
    down_paired = down(paired(gpu, size, width), "kAligned") if has_pairs else down_aligned
    down_shifted_1, down_shifted_2, down_shifted_3 = (
        down(shifted(gpu, size, width, min(shift, alone - 1)), "kShifted") for shift in (1, 2, 3)
    )

    @inline
    def draw(own, columns, tile, chunk, rows, out, call, geometry):
        displacement, whole, in_pairs = columns
        place = place_of(tile, geometry)
        row, step = place[0], np.int32(geometry.rows_per_pass)
        count = rows
        if step > 1:
            count = np.int32((rows - row + step - 1) * geometry.one_by_rows >> 20) if row < rows else np.int32(0)
        dimension = chunk + np.int32(row * geometry.pitch) * dimension_size
        at, stride = out + displacement, np.int64(geometry.row_step) * size
        if is_paired:
            # All lanes of the warp take part.
            in_pairs = all_of_warp(in_pairs and count == from_lane(count, 0))
        if is_paired and in_pairs:
            down_paired(dimension, count, at, stride, own, 0)
        elif is_aligned and whole:
            down_aligned(dimension, count, at, stride, own, 0)
        elif is_shifted and whole:
            lane = thread_index() % _WARP
            shift = np.int32(at & (alone * size - 1)) // np.int32(size)
            end = at if lane == 0 else at + (width - shift) * size
            ends = (lane == 0, lane == 31)
            if shift == 0:
                # The quads of neighbouring lanes adjoin: no shuffle.
                down_paired(dimension, count, at, stride, own, 0)
            elif shift == 1 or alone == 2:
                down_shifted_1(dimension, count, end, stride, own, ends)
            elif shift == 2:
                down_shifted_2(dimension, count, end, stride, own, ends)
            else:
                down_shifted_3(dimension, count, end, stride, own, ends)
        else:
            first, last = inside(width, place, call, geometry)
            if is_shifted and place[1] >= _in_warps(geometry):
                last = first
            if first < last:
                down_strided(dimension, count, at, stride, own, (call.column_stride, first, last))

    return draw


def _drawing_staged(gpu: ModuleType, dtype: str, shared_noise: bool, antithetic: bool, fast: bool) -> Function:
    """`_drawing` for staged stores, with the thread's `Stage` in place of its columns."""
    size, width, place_of = SIZES[dtype], group_width(antithetic), place(gpu)
    dimension_size, _, read_dimension = _dimension(gpu, dtype)
    elements_of, put_row = _elements(gpu, dtype, shared_noise, antithetic, fast), strided(gpu, width)
    staging = _staged(gpu, dtype, shared_noise, antithetic)
    passes, store_one, store_all = staging.passes, staging.store_one, staging.store_all
    advance = passes * dimension_size

    def drawing(k: int) -> Function:
        put = staging.put[k]
        return lambda dimensions, own, stage: put(elements_of(dimensions[k], own), stage)

    # All loads come first: the compiler moves no load across a store to shared memory.
    read_all = each(range(passes), lambda k: lambda entry: read_dimension(entry + k * dimension_size))
    draw_all, draw_one = each(range(passes), drawing), each(range(1), drawing)

    @inline
    def draw(own, stage, tile, chunk, rows, out, call, geometry):
        # All lanes of the warp take part.
        row, step = place_of(tile, geometry)[0], np.int32(geometry.rows_per_pass)
        left = np.int32(rows * geometry.one_by_rows >> 20)
        more = np.int32(rows - left * step)
        entry = chunk + (row if row < step else 0) * np.int32(geometry.pitch * dimension_size)
        stride = np.int64(geometry.row_step) * size
        while left >= passes:
            draw_all(read_all(entry), own, stage)
            store_all(out, stride, stage)
            entry += advance
            out += passes * stride
            left = np.int32(left - passes)
        while passes > 1 and left > 0:
            draw_one((read_dimension(entry),), own, stage)
            store_one(out, stride, stage)
            entry += dimension_size
            out += stride
            left = np.int32(left - 1)
        if more > 0:
            # The last pass of the matrix has fewer rows.
            row, group = place_of(tile, geometry)
            if row < more:
                at = out + row * call.row_stride + (width * group - geometry.skip) * size
                first, last = inside(width, (row, group), call, geometry)
                put_row(at, elements_of(read_dimension(entry), own), (np.int64(size), first, last))

    return draw


def _staged(gpu: ModuleType, dtype: str, shared_noise: bool, antithetic: bool) -> Staged:
    """The staged stores of a kernel: ``ThreadGroup::Staged`` in C++."""
    many_passes = not shared_noise and not antithetic and dtype != "float64" and gpu.LARGE_SHARED_MEMORY
    return staged(gpu, SIZES[dtype], group_width(antithetic), STAGED_PASSES if many_passes else 1)


@functools.cache
def _fetching(gpu: ModuleType, dtype: str, is_staged: bool) -> tuple[Function, Function]:
    """The dimensions of a chunk. Each thread of the block loads one.

    ``dimension = fetched(begin, first_row, count, call, geometry)`` starts to load one dimension, of the chunk that
    begins at row `begin` of a band of `count` rows. ``put(dimension, chunk, begin, first_row, count, call, geometry)``
    stores it in shared memory, for reads after the next `synchronize_block`.
    """
    thread_index, opaque, dimension_place_of = gpu.thread_index, gpu.opaque, dimension_place(gpu)
    element_of, offset_of_call = element(gpu, dtype), offset_of(gpu)
    dimension_size, write_dimension, _ = _dimension(gpu, dtype)
    zero = np.float64(0) if dtype == "float64" else np.float32(0)

    @inline
    def row_of(begin, first_row, count, geometry):
        # Opaque: see `place`.
        thread = opaque(thread_index())
        k, row_of_pass = np.uint32(begin + thread), np.uint32(0)
        if is_staged:  # Only kStaged interleaves passes of several rows.
            _, row_of_pass = dimension_place_of(geometry)
        pass_begin = np.int64(np.uint32(k - row_of_pass)) << geometry.interleave_log2
        return thread < geometry.chunk and k < count, first_row + pass_begin + np.int64(row_of_pass)

    @inline
    def fetched(begin, first_row, count, call, geometry):
        exists, row = row_of(begin, first_row, count, geometry)
        if exists:
            return element_of(mu_of(call), row), element_of(sigma_of(call), row)
        return zero, zero

    @inline
    def put(dimension, chunk, begin, first_row, count, call, geometry):
        exists, row = row_of(begin, first_row, count, geometry)
        if exists:
            mu, sigma = dimension
            part = row_part(np.uint32(call.first_row + row), np.uint32(offset_of_call(call)), keys_of(call)[0])
            # Rows that one thread draws consecutively have adjacent entries.
            pass_of_chunk, row_of_pass = dimension_place_of(geometry)
            entry = np.uint32(row_of_pass * geometry.pitch + pass_of_chunk)
            write_dimension(chunk + np.int64(np.uint32(entry * dimension_size)), part, mu, sigma)

    return fetched, put


@functools.cache
def _drawing_rest(gpu: ModuleType, dtype: str, shared_noise: bool, antithetic: bool, fast: bool) -> Function:
    """``draw_rest(chunk, rows, out, call, geometry)`` draws the `rest` groups of kShifted, which do not fill a warp.

    A thread draws one group, in every step-th row of a chunk.
    """
    thread_index, size, width = gpu.thread_index, SIZES[dtype], group_width(antithetic)
    prepared = noise(gpu, dtype, shared_noise, fast).prepared
    group_of, (dimension_size, _, _) = _group(gpu, dtype, shared_noise, antithetic, fast), _dimension(gpu, dtype)
    put_row = strided(gpu, width)

    @inline
    def draw_rest(chunk, rows, out, call, geometry):
        thread, rest = np.uint32(thread_index()), np.uint32(geometry.rest)
        first_row, step = np.uint32(thread // rest), np.int32(np.uint32(geometry.threads // rest))
        group = _in_warps(geometry) + np.uint32(thread - first_row * rest)
        row = np.int32(first_row)
        first, last = inside(width, (np.int32(0), group), call, geometry)
        if row < step and first < last:
            own = prepared(np.uint32(call.first_column // width + group), call), keys_of(call)
            stride = call.row_stride << geometry.interleave_log2
            at = out + (width * group - geometry.skip) * size + row * stride
            while row < rows:
                put_row(at, group_of(chunk + row * dimension_size, own), (np.int64(size), first, last))
                at += step * stride
                row = np.int32(row + step)

    return draw_rest


def rows_kernel(
    gpu: ModuleType, dtype: str, shared_noise: bool, antithetic: bool, fast: bool, store_kind: str
) -> Function:
    """``kernel(call, geometry)``: see `multisample.backends.kernels.cuda.kernel.sample_kernel`."""
    size, width = SIZES[dtype], group_width(antithetic)
    block_index, shared_memory, synchronize_block = gpu.block_index, gpu.shared_memory, gpu.synchronize_block
    prepared = noise(gpu, dtype, shared_noise, fast).prepared
    place_of = place(gpu)
    is_staged = store_kind == "kStaged"
    if is_staged:
        staging = _staged(gpu, dtype, shared_noise, antithetic)
        columns_of = _staging(gpu, size, width, staging)
        draw = _drawing_staged(gpu, dtype, shared_noise, antithetic, fast)
        stages_size = SHORT_ROW_THREADS // 32 * staging.warp_size
    else:
        columns_of = _columns(gpu, size, width, store_kind)
        draw = _drawing(gpu, dtype, shared_noise, antithetic, fast, store_kind)
        stages_size = 16
    draw_rest, is_shifted = _drawing_rest(gpu, dtype, shared_noise, antithetic, fast), store_kind == "kShifted"
    fetched, put = _fetching(gpu, dtype, is_staged)
    chunk_size = CHUNK * _dimension(gpu, dtype)[0]
    chunks_size = 2 * chunk_size

    @inline
    def own_of(place, call):
        return prepared(np.uint32(call.first_column // width + place[1]), call), keys_of(call)

    def kernel(call, geometry):
        chunks, stages = shared_memory(chunks_size), shared_memory(stages_size)
        # Pass k of the band begins k << shift passes after first_row.
        block = block_index()
        band = np.uint32(block // geometry.blocks_per_band)
        shift = geometry.interleave_log2
        first_row = np.int64(band >> shift) * geometry.band_rows << shift
        first_row += np.int64(np.uint32(band & ((1 << shift) - 1)) * geometry.rows_per_pass)
        if first_row >= call.rows:
            return
        rows_left = call.rows - first_row
        if not is_staged:  # An interleaved pass has one row here: no division.
            count = np.uint32(min(np.int64(geometry.band_rows), ((rows_left - 1) >> shift) + 1))
        else:
            count, apart = geometry.band_rows, np.uint32(geometry.rows_per_pass << shift)
            if rows_left < np.int64(count) << shift:
                left = np.uint32(rows_left)
                passes = np.uint32(left // apart)
                more = np.uint32(left - passes * apart)
                count = np.uint32(passes * geometry.rows_per_pass + min(more, geometry.rows_per_pass))
        begin, chunk = np.uint32(0), np.uint32(0)
        dimension = fetched(begin, first_row, count, call, geometry)

        tile = np.uint32(np.uint32(block - band * geometry.blocks_per_band) * geometry.steps)
        last_tile = np.uint32(tile + geometry.steps - 1)
        out = call.matrix + first_row * call.row_stride
        place = place_of(tile, geometry)
        own = own_of(place, call)
        columns = columns_of(place, out, stages, call, geometry)
        put(dimension, chunks, begin, first_row, count, call, geometry)
        synchronize_block()
        while True:
            rows = np.uint32(count - begin)
            goes_on = rows > geometry.chunk
            if goes_on:
                rows = geometry.chunk
                dimension = fetched(np.uint32(begin + rows), first_row, count, call, geometry)
            draw(own, columns, tile, chunks + np.int64(chunk), np.int32(rows), out, call, geometry)
            if is_shifted and geometry.rest > 0 and tile == geometry.blocks_per_band * geometry.steps - 1:
                draw_rest(chunks + np.int64(chunk), np.int32(rows), out, call, geometry)
            if goes_on:
                begin = np.uint32(begin + rows)
                out += rows * (call.row_stride << shift)
                chunk = np.uint32(chunk_size - chunk)
                put(dimension, chunks + np.int64(chunk), begin, first_row, count, call, geometry)
                synchronize_block()
            elif tile < last_tile:
                # A band with several tiles has one chunk of dimensions.
                tile = np.uint32(tile + 1)
                place = place_of(tile, geometry)
                own = own_of(place, call)
                columns = columns_of(place, out, stages, call, geometry)
            else:
                break

    return kernel
