"""The kernels with transposed stores, for contiguous dimensions: ``csrc/cuda/transposed.cuh`` explains them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

import numpy as np

from multisample.backends.element_types import SIZES
from multisample.backends.kernels.compilation import Function, inline
from multisample.backends.kernels.stream.arithmetic import fma
from multisample.backends.kernels.stream.words import row_part

from .geometry import TRANSPOSED_THREADS, staged_own_rows_of, staged_threads
from .group import (
    chosen,
    computing_type,
    each,
    element,
    group_width,
    keys_of,
    mu_of,
    noise,
    offset_of,
    packing,
    scaled,
    sigma_of,
    united,
)
from .kernel_choice import own_rows_of
from .stores import MOST_STORED, copying

_WARP = np.uint32(32)


@functools.cache
def _bands(
    gpu: ModuleType, dtype: str, shared_noise: bool, antithetic: bool, fast: bool
) -> tuple[Function, Function, Function, Function]:
    """The groups of columns of a block.

    ``band_of(index, call, geometry)``: a tuple as the C++ struct ``Band`` has it. ``begins(band, call, geometry)``: the
    address of the first group's first column, which may lie before the matrix. ``is_whole(band, k)``: whether all
    columns of the pass that begins with group k are inside the matrix. ``fill(band, chunk, begin, call, geometry)``:
    stores the noise of a chunk of groups, from group `begin` on, in shared memory, and returns the number of groups. An
    incomplete last pass reads groups behind the band, whose noise is stored too.
    """
    width, thread_index, synchronize_block = group_width(antithetic), gpu.thread_index, gpu.synchronize_block
    prepared, _, noise_size, write_noise, _ = noise(gpu, dtype, shared_noise, fast)

    @inline
    def band_of(index, call, geometry):
        first_group, per_pass = np.int64(index) * geometry.band_groups, np.int32(geometry.groups_per_pass)
        columns = geometry.skip + call.columns - width * first_group
        count = np.int32(min(np.int64(geometry.band_groups), (columns + width - 1) // width))
        skipped = np.int32(geometry.skip) if index == 0 else np.int32(0)
        first_whole = per_pass if skipped > 0 else np.int32(0)
        whole = np.int32(max(min(columns // width - per_pass - first_whole + 1, np.int64(count)), np.int64(0)))
        return first_group, count, per_pass, columns, skipped, first_whole, whole

    @inline
    def begins(band, call, geometry):
        return call.matrix + (width * band[0] - geometry.skip) * call.column_stride

    @inline
    def is_whole(band, k):
        return np.uint32(k - band[5]) < np.uint32(band[6])

    @inline
    def fill(band, chunk, begin, call, geometry):
        groups = np.int32(min(band[1] - begin, np.int32(geometry.chunk)))
        if begin > 0:
            synchronize_block()
        thread = thread_index()
        if thread < geometry.chunk and thread + 1 < groups + band[2]:
            made = prepared(np.uint32(call.first_column // width + band[0] + begin + thread), call)
            write_noise(chunk + np.int64(thread) * noise_size, made)
        synchronize_block()
        return groups

    return band_of, begins, is_whole, fill


@functools.cache
def _thread_dimensions(gpu: ModuleType, dtype: str, own_rows: int) -> Function:
    """``dimensions_of(rows, call)``: the row part of the words, mu and sigma of each of `own_rows` rows."""
    element_of, offset_of_call, load, opaque = element(gpu, dtype), offset_of(gpu), gpu.load, gpu.opaque
    real, usual_type = computing_type(dtype)

    def part(s: int) -> Function:
        return lambda rows, offset, call: row_part(np.uint32(call.first_row + rows[s]), offset, keys_of(call)[0])

    usual_elements = each(
        range(own_rows), lambda s: lambda vector, rows: load(vector.input + rows[s] * vector.stride, real)
    )
    any_elements = each(range(own_rows), lambda s: lambda vector, rows: element_of(vector, rows[s]))
    parts = each(range(own_rows), part)

    @inline
    def elements_of(vector, rows):
        # For the usual type, all loads are issued before the first is used.
        if opaque(vector.type) == usual_type:
            return usual_elements(vector, rows)
        return any_elements(vector, rows)

    @inline
    def dimensions_of(rows, call):
        offset = np.uint32(offset_of_call(call))
        return parts(rows, offset, call), elements_of(mu_of(call), rows), elements_of(sigma_of(call), rows)

    return dimensions_of


def of_both(
    before: Callable[[int], Function], own: Callable[[int], Function], own_rows: int, first: int = 0
) -> Function:
    """Call functions for the last dimensions of the previous lane, then for the lane's own, from index `first` on.

    ``before(s)`` and ``own(s)`` are the functions for dimension s of a lane.
    """
    last = own_rows - 1
    return each(range(first, last + own_rows), lambda at: (before if at < last else own)((at + 1) % own_rows))


@functools.cache
def _pieces(gpu: ModuleType, dtype: str, antithetic: bool, delta: int) -> Function:
    """The pieces of one thread, one per column of a group, from its own dimensions and from those of the previous lane.

    ``pieces(z, mu, sigma)``: the elements of all pieces. The piece of column 0 has exactly the lane's own dimensions.
    The piece of each further column begins `delta` dimensions earlier than the one before, modulo the size of a piece.
    `z` are the normals of the lane's own dimensions; `mu` and `sigma` are those of the previous lane's last dimensions,
    then of the lane's own. All lanes of the warp take part.
    """
    own_rows, width = own_rows_of(SIZES[dtype]), group_width(antithetic)
    shuffle_up, narrow, per_normal = gpu.shuffle_up, gpu.NARROWING[dtype], width // 4

    def of_normal(k: int) -> Function:
        backs = [(k * per_normal + c) * delta % own_rows for c in range(per_normal)]

        first_at = own_rows - 1 - max(backs)
        normals = of_both(lambda s: lambda z: shuffle_up(z[s][k]), lambda s: lambda z: z[s][k], own_rows, first_at)

        def of_element(e: int) -> Function:
            c, at = e // own_rows, own_rows - 1 + e % own_rows - backs[e // own_rows]
            mirrored = c % 2 == 1

            def element_of(z, mu, sigma):
                factor = -sigma[at] if mirrored else sigma[at]
                return narrow(fma(factor, z[at - first_at], mu[at]))

            return element_of

        elements = each(range(per_normal * own_rows), of_element)
        return lambda z, mu, sigma: elements(normals(z), mu, sigma)

    of_normals = each(range(4), of_normal)

    @inline
    def pieces(z, mu, sigma):
        x = of_normals(z, mu, sigma)
        return x[0] + x[1] + x[2] + x[3]

    return pieces


@functools.cache
def _writing(gpu: ModuleType, dtype: str, antithetic: bool) -> tuple[Function, Function]:
    """``write_whole(at, to, x)`` and ``write_some(at, to, x, written)``.

    `x` are the elements of all pieces, and `to` is the displacement of each piece from address `at`, in elements. Bit e
    of `written` says whether element e is stored.
    """
    size, own_rows, width = SIZES[dtype], own_rows_of(SIZES[dtype]), group_width(antithetic)
    store, store_vector = gpu.store, gpu.store_vector

    def piece(c: int) -> Function:
        first, last = c * own_rows, (c + 1) * own_rows
        return lambda at, to, x: store_vector(at + np.int64(to[c]) * size, x[first:last])

    def one(e: int) -> Function:
        c, behind, bit = e // own_rows, e % own_rows * size, np.uint32(1 << e)

        def put(at, to, x, written):
            if written & bit != 0:
                store(at + np.int64(to[c]) * size + behind, x[e])

        return put

    return each(range(width), piece), each(range(width * own_rows), one)


@functools.cache
def _places(gpu: ModuleType, dtype: str, antithetic: bool) -> tuple[Function, Function]:
    """The pieces of a thread.

    ``place_of(tile, band, call, geometry)``: its group of a pass; its first dimension, which may lie outside the
    matrix; the displacement of its piece of each column from there, in elements; a mask of the elements inside the
    matrix's rows; and `delta`, for `_pieces`. ``inside(band, k)``: the mask of the columns of group k inside the
    matrix.
    """
    size, own_rows, width = SIZES[dtype], own_rows_of(SIZES[dtype]), group_width(antithetic)
    thread_index, opaque = gpu.thread_index, gpu.opaque
    of_column = np.uint32((1 << own_rows) - 1)

    def to(c: int) -> Function:
        def of(delta, stride):
            return np.int32(c * stride - np.int32(c * delta % own_rows))

        def of_few(delta, stride):
            # Without opaque(), each pass recomputes the displacement. Registers have no room for eight of them.
            return np.int32(opaque(np.uint32(c * stride - np.int32(c * delta % own_rows))))

        return of_few if width == 4 and size < 8 else of

    def bits(c: int) -> Function:
        def of(first, delta, rows):
            # The range of the piece's elements inside the matrix's rows.
            piece = first - np.int64(c * delta % own_rows)
            begin, end = min(max(-piece, 0), own_rows), min(max(rows - piece, 0), own_rows)
            inside = ((np.uint32(1) << np.uint32(end)) - 1) & ~((np.uint32(1) << np.uint32(begin)) - 1)
            return np.uint32((inside & of_column) << np.uint32(c * own_rows))

        return of

    def column_bits(c: int) -> Function:
        all_of_column = np.uint32(of_column << np.uint32(c * own_rows))

        def of(column, band):
            return all_of_column if column + c >= band[4] and column + c < band[3] else np.uint32(0)

        return of

    to_of, bits_of, bits_of_columns = (each(range(width), part) for part in (to, bits, column_bits))
    all_bits, every_bit = united(width), np.uint32((1 << width * own_rows) - 1)

    @inline
    def place_of(tile, band, call, geometry):
        overlap, thread, pieces_of_column = np.int32(geometry.overlap), thread_index(), np.int32(geometry.pieces)
        warp = np.int32(thread // _WARP)
        pieces = np.int32((_WARP - geometry.overlap) * (geometry.threads // _WARP))
        position = np.int32(np.int32(tile) * pieces + np.int32(thread) - overlap * (warp + 1))
        pass_group = np.int32(np.uint32(position) // np.uint32(pieces_of_column)) if position >= 0 else np.int32(0)
        exists = position >= 0 and pass_group < band[2]
        if not exists:
            pass_group = np.int32(0)

        begin_of_0 = np.uint64(call.matrix - geometry.skip * call.column_stride)
        shift = np.int64(begin_of_0 // np.uint64(size) % np.uint64(own_rows))
        delta = np.int32(np.uint32(geometry.column_step) % np.uint32(own_rows))
        first = np.int64(position - pass_group * pieces_of_column) * own_rows - shift
        inside = np.uint32(0)
        if exists and np.int32(thread % _WARP) >= overlap:
            inside = every_bit
            if first < (own_rows - 1 if delta > 0 else 0) or first + own_rows > call.rows:
                inside = all_bits(bits_of(first, delta, call.rows))
        return pass_group, first, to_of(delta, np.int32(geometry.column_step)), inside, delta

    @inline
    def inside(band, k):
        return all_bits(bits_of_columns(np.int64(k) * width, band))

    return place_of, inside


@functools.cache
def _passes(gpu: ModuleType, dtype: str, shared_noise: bool, antithetic: bool, fast: bool) -> Function:
    """``go_along(delta, chunk, begin, groups, at, band, own, place)`` draws the passes of a chunk.

    The thread's dimensions are `own`, and `place` is its place in a pass. Returns the address of the next pass.
    """
    own_rows = own_rows_of(SIZES[dtype])
    every_bit = np.uint32((1 << group_width(antithetic) * own_rows) - 1)
    _, in_row, noise_size, _, read_noise = noise(gpu, dtype, shared_noise, fast)
    _, _, is_whole, _ = _bands(gpu, dtype, shared_noise, antithetic, fast)
    _, columns_inside = _places(gpu, dtype, antithetic)
    write_whole, write_some = _writing(gpu, dtype, antithetic)

    normals = each(range(own_rows), lambda s: lambda parts, made, keys: in_row(made, parts[s], keys))

    def along(delta: int) -> Function:
        pieces = _pieces(gpu, dtype, antithetic, delta)

        def go_along(chunk, begin, groups, at, band, own, place):
            parts, mu, sigma, keys = own
            pass_group, to, inside, step = place
            noises = chunk + np.int64(pass_group * noise_size)
            k = np.int32(0)
            while k < groups:
                x = pieces(normals(parts, read_noise(noises), keys), mu, sigma)
                whole = is_whole(band, begin + k)
                if whole and inside == every_bit:
                    write_whole(at, to, x)
                elif inside != 0:
                    written = inside if whole else np.uint32(inside & columns_inside(band, begin + k + pass_group))
                    write_some(at, to, x, written)
                at += step
                noises += np.int64(band[2] * noise_size)
                k = np.int32(k + band[2])
            return at

        return go_along

    return chosen(reversed(range(own_rows)), along)


def transposed_kernel(gpu: ModuleType, dtype: str, shared_noise: bool, antithetic: bool, fast: bool) -> Function:
    """``kernel(call, geometry)``: see `multisample.backends.kernels.cuda.kernel.sample_kernel`."""
    size, width, own_rows = SIZES[dtype], group_width(antithetic), own_rows_of(SIZES[dtype])
    block_index, shared_memory, shuffle_up = gpu.block_index, gpu.shared_memory, gpu.shuffle_up
    band_of, begins, _, fill = _bands(gpu, dtype, shared_noise, antithetic, fast)
    place_of, _ = _places(gpu, dtype, antithetic)
    dimensions_of = _thread_dimensions(gpu, dtype, own_rows)
    go_along = _passes(gpu, dtype, shared_noise, antithetic, fast)
    chunk_size = TRANSPOSED_THREADS * noise(gpu, dtype, shared_noise, fast).size

    rows_of = each(range(own_rows), lambda s: lambda first, rows: max(min(first + s, rows - 1), np.int64(0)))
    parameters_of = of_both(lambda s: lambda own: shuffle_up(own[s]), lambda s: lambda own: own[s], own_rows)

    def kernel(call, geometry):
        chunk = shared_memory(chunk_size)
        block = block_index()
        index = np.uint32(block // geometry.blocks_per_band)
        tile = np.uint32(block - index * geometry.blocks_per_band)
        band = band_of(index, call, geometry)
        pass_group, first, to, inside, delta = place_of(tile, band, call, geometry)
        parts, mu, sigma = dimensions_of(rows_of(first, call.rows), call)
        own = parts, parameters_of(mu), parameters_of(sigma), keys_of(call)
        stride = np.int64(geometry.column_step) * size
        at = begins(band, call, geometry) + first * size + np.int64(pass_group * width) * stride
        place = pass_group, to, inside, np.int64(band[2] * width) * stride
        begin = np.int32(0)
        while begin < band[1]:
            groups = fill(band, chunk, begin, call, geometry)
            at = go_along(delta, chunk, begin, groups, at, band, own, place)
            begin = np.int32(begin + np.int32(geometry.chunk))

    return kernel


@functools.cache
def _staged_role(gpu: ModuleType, threads: int) -> Function:
    """``role()``: the index of the thread in its block, rotated by one warp from each block to the next."""
    thread_index, block_index = gpu.thread_index, gpu.block_index

    @inline
    def role():
        return np.uint32((thread_index() + block_index() * _WARP) % np.uint32(threads))

    return role


@functools.cache
def _staged_places(
    gpu: ModuleType, dtype: str, shared_noise: bool, antithetic: bool
) -> tuple[Function, Function, Function, Function]:
    """The places of a thread's rows, of kTransposedStaged.

    ``groups_and_rows_of(filled, rows)``: the group of a pass, and the row, of each. ``rows_of(groups_and_rows)``: the
    rows alone. ``memory_of_rows(groups_and_rows, rows)``: the displacements of the group's noise and of the elements in
    shared memory. ``hidden_parts(parts)``: the row parts, opaque.
    """
    size, width, own_rows = SIZES[dtype], group_width(antithetic), staged_own_rows_of(SIZES[dtype], antithetic)
    opaque, threads, noise_size = gpu.opaque, staged_threads(shared_noise), 16 * packing(dtype)[0]
    role = _staged_role(gpu, threads)

    def place(c: int) -> Function:
        def of(pass_group, row, rows):
            # Without opaque(), each pass recomputes the place.
            return opaque(np.uint32(((pass_group * np.uint32(width) + c) * rows + row) * np.uint32(size)))

        return of

    places_of = each(range(width), place)

    def group_and_row(s: int) -> Function:
        behind = np.uint32(s * threads)

        def of(filled, rows):
            position = np.uint32(role() + behind)
            if position >= filled:
                # A lane without a dimension repeats lane 0's, which takes less time than a branch.
                position = np.uint32(position // _WARP * _WARP)
            pass_group = np.uint32(position // rows)
            return pass_group, np.int64(np.uint32(position - pass_group * rows))

        return of

    def memory_of_row(s: int) -> Function:
        def of(groups_and_rows, rows):
            pass_group, row = groups_and_rows[s]
            places = places_of(pass_group, np.uint32(row), rows)
            return np.int64(np.uint32(pass_group * np.uint32(noise_size))), places

        return of

    rows_of = each(range(own_rows), lambda s: lambda groups_and_rows: groups_and_rows[s][1])
    # Without opaque(), each pass recomputes the row part.
    hidden_parts = each(range(own_rows), lambda s: lambda parts: (opaque(parts[s][0]), opaque(parts[s][1])))
    return each(range(own_rows), group_and_row), rows_of, each(range(own_rows), memory_of_row), hidden_parts


@functools.cache
def _staged_drawing(gpu: ModuleType, dtype: str, shared_noise: bool, antithetic: bool, fast: bool) -> Function:
    """``draw_all(own, noises, stage)`` draws a pass into shared memory at address `stage`."""
    store_shared, elements = gpu.store_shared, scaled(gpu, dtype, antithetic)
    _, in_row, _, _, read_noise = noise(gpu, dtype, shared_noise, fast)

    put_group = each(
        range(group_width(antithetic)),
        lambda c: lambda x, stage, places: store_shared(stage + np.int64(places[c]), x[c]),
    )

    def drawn(s: int) -> Function:
        def draw(own, noises, stage):
            parts, mu, sigma, memory, used, keys = own
            if s < used:
                in_chunk, places = memory[s]
                made = read_noise(noises + in_chunk)
                put_group(elements(mu[s], sigma[s], in_row(made, parts[s], keys)), stage, places)

        return draw

    return each(range(staged_own_rows_of(SIZES[dtype], antithetic)), drawn)


def transposed_staged_kernel(gpu: ModuleType, dtype: str, shared_noise: bool, antithetic: bool, fast: bool) -> Function:
    """The kernel for few dimensions in a contiguous matrix, through shared memory."""
    size, width = SIZES[dtype], group_width(antithetic)
    thread_index, block_index, shared_memory = gpu.thread_index, gpu.block_index, gpu.shared_memory
    from_lane, synchronize_block = gpu.from_lane, gpu.synchronize_block
    store, load_shared = gpu.store, gpu.load_shared
    own_rows, threads = staged_own_rows_of(size, antithetic), staged_threads(shared_noise)
    noise_size = noise(gpu, dtype, shared_noise, fast).size
    bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}[size]
    # A thread copies at most `pieces_of_thread` pieces per pass from shared memory.
    piece_size = 8 if size == 2 else MOST_STORED
    pieces_of_thread = own_rows * width * size // piece_size
    chunk_size, stage_size = threads * noise_size, threads * pieces_of_thread * piece_size
    role, dimensions_of = _staged_role(gpu, threads), _thread_dimensions(gpu, dtype, own_rows)
    band_of, begins, is_whole, fill = _bands(gpu, dtype, shared_noise, antithetic, fast)
    groups_and_rows_of, rows_of, memory_of_rows, hidden_parts = _staged_places(gpu, dtype, shared_noise, antithetic)
    draw_all = _staged_drawing(gpu, dtype, shared_noise, antithetic, fast)
    copy_pieces = copying(gpu, piece_size, pieces_of_thread, threads * piece_size)

    def kernel(call, geometry):
        chunk, stage = shared_memory(chunk_size), shared_memory(stage_size)
        band = band_of(block_index(), call, geometry)
        filled = np.uint32(np.uint32(band[2]) * np.uint32(call.rows))
        used = from_lane(np.int32((filled + np.uint32(threads - 1) - role()) // np.uint32(threads)), 0)
        groups_and_rows = groups_and_rows_of(filled, np.uint32(call.rows))
        parts, mu, sigma = dimensions_of(rows_of(groups_and_rows), call)
        memory = memory_of_rows(groups_and_rows, np.uint32(call.rows))
        own = hidden_parts(parts), mu, sigma, memory, used, keys_of(call)
        out, thread = begins(band, call, geometry), np.int32(thread_index())
        row_size = np.int32(np.int32(call.rows) * size)
        step = np.int32(band[2] * width * row_size)
        aligned = out & (piece_size - 1) == 0
        begin = np.int32(0)
        while begin < band[1]:
            groups = fill(band, chunk, begin, call, geometry)
            k = np.int32(0)
            while k < groups:
                draw_all(own, chunk + np.int64(k * noise_size), stage)
                synchronize_block()
                if aligned and is_whole(band, begin + k):
                    behind = np.int64(thread * piece_size)
                    copy_pieces(stage + behind, out + behind, np.int32(step - thread * piece_size))
                else:
                    left = (band[3] - np.int64(begin + k) * width) * row_size
                    last = np.int32(min(left, np.int64(step)))
                    e = np.int32(thread * size)
                    if begin + k == 0:
                        e = np.int32(e + band[4] * row_size)
                    while e < last:
                        store(out + e, load_shared(stage + e, bits))
                        e = np.int32(e + threads * size)
                synchronize_block()
                out += step
                k = np.int32(k + band[2])
            begin = np.int32(begin + np.int32(geometry.chunk))

    return kernel
