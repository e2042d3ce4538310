"""The kernels where dimensions lie side by side in memory, as with layout "nd": ``csrc/cuda/columns.cuh``.

Dimensions and columns change places: a thread keeps some dimensions, with their mu and sigma, and goes along the
columns; what the words owe to those alone (with shared noise, all the noise) waits in shared memory. A block makes some
groups of columns at a time, a pass. See there, and ``csrc/cuda/geometry.h``, for how a pass is written.
"""

from __future__ import annotations

import functools
from types import ModuleType

import numpy as np

from multisample.backends.element_types import SIZES
from multisample.backends.kernels.compilation import Function, inline
from multisample.backends.kernels.stream.arithmetic import fma
from multisample.backends.kernels.stream.words import row_part

from .geometry import TRANSPOSED_THREADS, slots_of, staged_slots_of, staged_threads
from .group import computing_type, element, group_width, keys_of, memory_of, narrowed, noise, offset_of, packing, scaled
from .stores import MOST_STORED

__all__ = ["transposed_kernel", "transposed_staged_kernel"]

_WARP = np.uint32(32)


def _joined(part: Function, first: int, last: int) -> Function:
    """``joined(*arguments)``: the tuples that ``part(k)`` makes of them for each k, one behind the other."""
    if last - first == 1:
        one: Function = part(first)
        return one
    middle = (first + last) // 2
    low, high = _joined(part, first, middle), _joined(part, middle, last)

    @inline
    def joined(a, b, c):
        return low(a, b, c) + high(a, b, c)

    return joined


def _in_turn(part: Function, first: int, last: int) -> Function:
    """``in_turn(*arguments)`` calls what ``part(k)`` makes for each k, one after the other."""
    if last - first == 1:
        one: Function = part(first)
        return one
    middle = (first + last) // 2
    low, high = _in_turn(part, first, middle), _in_turn(part, middle, last)

    @inline
    def in_turn(a, b, c):
        low(a, b, c)
        high(a, b, c)

    return in_turn


@functools.cache
def _bands(
    gpu: ModuleType, dtype: str, shared: bool, antithetic: bool, fast: bool
) -> tuple[Function, Function, Function, Function]:
    """The groups of columns of a block.

    ``band_of(index, call, geometry)``: the first of all groups, how many, and how many a pass has; the columns from
    there on and how many of them are left out, inside being those between; and which passes have all their columns
    inside: those that begin with one of so many groups, from the first such one on. ``begins(band, call, geometry)``:
    the address of the first group's first column, be it inside or not. ``is_whole(band, k)``: whether the pass that
    begins with group k is such a one. ``fill(band, chunk, begin, call, geometry)``: puts the noise of the groups from
    `begin` on into shared memory, and of those behind them that a pass which is not full reads; returns how many. All
    threads of the block together.
    """
    width, thread_index, synchronize_block = group_width(antithetic), gpu.thread_index, gpu.synchronize_block
    (prepared, _), (pack, _) = noise(gpu, dtype, shared, fast)
    quads, _, _ = packing(dtype)
    write_words, _ = memory_of(gpu, quads)
    noise_size = 16 * quads

    @inline
    def band_of(index, call, geometry):
        first_group, turns = np.int64(index) * geometry.band_groups, np.int32(geometry.groups_per_pass)
        columns = geometry.skip + call.columns - width * first_group
        count = np.int32(min(np.int64(geometry.band_groups), (columns + width - 1) // width))
        skipped = np.int32(geometry.skip) if index == 0 else np.int32(0)
        first_whole = turns if skipped > 0 else np.int32(0)
        whole = np.int32(max(min(columns // width - turns - first_whole + 1, np.int64(count)), np.int64(0)))
        return first_group, count, turns, columns, skipped, first_whole, whole

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
            made = prepared(np.uint32(call.first_column.value // width + band[0] + begin + thread), call)
            write_words(chunk + np.int64(thread) * noise_size, pack(made))
        synchronize_block()
        return groups

    return band_of, begins, is_whole, fill


@functools.cache
def _keeping(gpu: ModuleType, dtype: str, slots: int) -> Function:
    """``kept(rows, call)``: of each of so many rows what the words owe to it alone; of each its mu; and its sigma."""
    element_of, offset_of_call, load, opaque = element(gpu, dtype), offset_of(gpu), gpu.load, gpu.opaque
    real, usual_type = computing_type(dtype)

    def usual_element(s: int) -> Function:
        @inline
        def of(vector, rows, _):
            return (load(vector.data + rows[s] * vector.stride, real),)

        return of

    def any_element(s: int) -> Function:
        @inline
        def of(vector, rows, _):
            return (element_of(vector, rows[s]),)

        return of

    def part(s: int) -> Function:
        @inline
        def of(rows, offset, call):
            return (row_part(np.uint32(call.first_row.value + rows[s]), offset, keys_of(call)[0]),)

        return of

    usual_elements, any_elements, parts = (_joined(of, 0, slots) for of in (usual_element, any_element, part))

    @inline
    def elements_of(vector, rows):
        # Of the most frequent type all are on their way before the first is waited for.
        if opaque(vector.type) == usual_type:
            return usual_elements(vector, rows, 0)
        return any_elements(vector, rows, 0)

    @inline
    def kept(rows, call):
        offset = np.uint32(offset_of_call(call))
        return parts(rows, offset, call), elements_of(call.mu, rows), elements_of(call.sigma, rows)

    return kept


@functools.cache
def _pieces(gpu: ModuleType, dtype: str, antithetic: bool, delta: int) -> Function:
    """What a thread writes at once of each column, of its dimensions and of those of the thread before.

    ``pieces(z, mu, sigma)``: the elements of the first column's piece, which are those of the thread's own dimensions,
    of the next one's, which begins `delta` elements further back, modulo the elements of a piece, and so on. `z` are
    the normals of the thread's dimensions, `mu` and `sigma` those of the last ones of the thread before and of its own.
    All threads of the warp together.
    """
    slots, width = slots_of(SIZES[dtype]), group_width(antithetic)
    shuffle_up, narrow, per_normal = gpu.shuffle_up, narrowed(gpu, dtype), width // 4

    def of_normal(k: int) -> Function:
        backs = [(k * per_normal + c) * delta % slots for c in range(per_normal)]

        def of_both(at: int) -> Function:
            # That of the thread before, if it is asked for.
            s, before = (at + 1) % slots, at < slots - 1

            @inline
            def of_before(z, _, __):
                return (shuffle_up(z[s][k]),)

            @inline
            def of_own(z, _, __):
                return (z[s][k],)

            return of_before if before else of_own

        first_at = slots - 1 - max(backs)
        normals = _joined(of_both, first_at, 2 * slots - 1)

        def of_element(e: int) -> Function:
            c, at = e // slots, slots - 1 + e % slots - backs[e // slots]
            mirrored = c % 2 == 1

            @inline
            def element_of(z, mu, sigma):
                factor = -sigma[at] if mirrored else sigma[at]
                return (narrow(fma(factor, z[at - first_at], mu[at])),)

            return element_of

        elements = _joined(of_element, 0, per_normal * slots)

        @inline
        def part(z, mu, sigma):
            return elements(normals(z, mu, sigma), mu, sigma)

        return part

    return _joined(of_normal, 0, 4)


@functools.cache
def _writing(gpu: ModuleType, dtype: str, antithetic: bool) -> tuple[Function, Function]:
    """``write_whole(at, to, x)`` and ``write_some(at, to, (x, written))``.

    `x` are the elements of all pieces, and `to` where each piece is from address `at` on, in elements. Of `written`,
    bit e says whether element e is.
    """
    size, slots, width = SIZES[dtype], slots_of(SIZES[dtype]), group_width(antithetic)
    store, store_vector = gpu.store, gpu.store_vector

    def piece(c: int) -> Function:
        first, last = c * slots, (c + 1) * slots

        @inline
        def put(at, to, x):
            store_vector(at + np.int64(to[c]) * size, x[first:last])

        return put

    def one(e: int) -> Function:
        c, behind, bit = e // slots, e % slots * size, np.uint32(1 << e)

        @inline
        def put(at, to, some):
            if some[1] & bit != 0:
                store(at + np.int64(to[c]) * size + behind, some[0][e])

        return put

    return _in_turn(piece, 0, width), _in_turn(one, 0, width * slots)


@functools.cache
def _places(gpu: ModuleType, dtype: str, antithetic: bool) -> tuple[Function, Function]:
    """Which pieces are a thread's.

    ``place_of(tile, band, call, geometry)``: its group of a pass; its first dimension, be it one or not; where its
    piece of each column is, from there on, in elements; which of their elements are inside the rows, as bits; and
    `delta`, as `_pieces` takes it. ``inside(band, k)``: the bits of the columns that are inside of group k.
    """
    size, slots, width = SIZES[dtype], slots_of(SIZES[dtype]), group_width(antithetic)
    thread_index, opaque = gpu.thread_index, gpu.opaque
    of_column = np.uint32((1 << slots) - 1)

    def to(c: int) -> Function:
        @inline
        def of(delta, stride, _):
            return (np.int32(c * stride - np.int32(c * delta % slots)),)

        @inline
        def of_few(delta, stride, _):
            # Or it is worked out anew for each pass; there are no registers for eight.
            return (np.int32(opaque(np.uint32(c * stride - np.int32(c * delta % slots)))),)

        return of_few if width == 4 and size < 8 else of

    def bits(c: int) -> Function:
        @inline
        def of(first, delta, rows):
            # From how many of the piece's elements on they are inside the rows, and up to how many.
            piece = first - np.int64(c * delta % slots)
            begin, end = min(max(-piece, 0), slots), min(max(rows - piece, 0), slots)
            inside = ((np.uint32(1) << np.uint32(end)) - 1) & ~((np.uint32(1) << np.uint32(begin)) - 1)
            return (np.uint32((inside & of_column) << np.uint32(c * slots)),)

        return of

    def column_bits(c: int) -> Function:
        all_of_column = np.uint32(of_column << np.uint32(c * slots))

        @inline
        def of(column, band, _):
            return (all_of_column if column + c >= band[4] and column + c < band[3] else np.uint32(0),)

        return of

    def united(count: int) -> Function:
        if count == 1:

            @inline
            def first(bits):
                return bits[0]

            return first
        before = united(count - 1)

        @inline
        def all_bits(bits):
            return np.uint32(before(bits) | bits[count - 1])

        return all_bits

    to_of, bits_of, bits_of_columns = (_joined(part, 0, width) for part in (to, bits, column_bits))
    of_columns, every_bit = united(width), np.uint32((1 << width * slots) - 1)

    @inline
    def place_of(tile, band, call, geometry):
        overlap, thread, pieces_of_column = np.int32(geometry.overlap), thread_index(), np.int32(geometry.pieces)
        warp = np.int32(thread // _WARP)
        pieces = np.int32((_WARP - geometry.overlap) * (geometry.threads // _WARP))
        position = np.int32(np.int32(tile) * pieces + np.int32(thread) - overlap * (warp + 1))
        turn = np.int32(np.uint32(position) // np.uint32(pieces_of_column)) if position >= 0 else np.int32(0)
        exists = position >= 0 and turn < band[2]
        if not exists:
            turn = np.int32(0)
        # How many elements behind an aligned address the first column of a group begins, and each further one behind
        # that: the same in all groups.
        begin_of_0 = np.uint64(call.matrix - geometry.skip * call.column_stride)
        shift = np.int64(begin_of_0 // np.uint64(size) % np.uint64(slots))
        delta = np.int32(np.uint32(geometry.column_step) % np.uint32(slots))
        first = np.int64(position - turn * pieces_of_column) * slots - shift
        inside = np.uint32(0)
        if exists and np.int32(thread % _WARP) >= overlap:
            inside = every_bit
            if first < (slots - 1 if delta > 0 else 0) or first + slots > call.rows:
                inside = of_columns(bits_of(first, delta, call.rows))
        return turn, first, to_of(delta, np.int32(geometry.column_step), 0), inside, delta

    @inline
    def inside(band, k):
        return of_columns(bits_of_columns(np.int64(k) * width, band, 0))

    return place_of, inside


def transposed_kernel(gpu: ModuleType, dtype: str, shared: bool, antithetic: bool, fast: bool) -> Function:
    """``kernel(call, geometry)``: see `multisample.backends.kernels.cuda.kernel.sample_kernel`."""
    size, width, slots = SIZES[dtype], group_width(antithetic), slots_of(SIZES[dtype])
    block_index, shared_memory, shuffle_up = gpu.block_index, gpu.shared_memory, gpu.shuffle_up
    (_, in_row), (_, unpack) = noise(gpu, dtype, shared, fast)
    quads, _, _ = packing(dtype)
    _, read_words = memory_of(gpu, quads)
    band_of, begins, is_whole, fill = _bands(gpu, dtype, shared, antithetic, fast)
    place_of, columns_inside = _places(gpu, dtype, antithetic)
    write_whole, write_some = _writing(gpu, dtype, antithetic)
    kept = _keeping(gpu, dtype, slots)
    noise_size = 16 * quads
    chunk_size, every_bit = TRANSPOSED_THREADS * noise_size, np.uint32((1 << width * slots) - 1)

    def row_of(s: int) -> Function:
        @inline
        def of(first, rows, _):
            return (max(min(first + s, rows - 1), np.int64(0)),)

        return of

    def parameter_of(at: int) -> Function:
        s, before = (at + 1) % slots, at < slots - 1

        @inline
        def of_before(own, _, __):
            return (shuffle_up(own[s]),)

        @inline
        def of_own(own, _, __):
            return (own[s],)

        return of_before if before else of_own

    def normals_of(s: int) -> Function:
        @inline
        def of(parts, made, keys):
            return (in_row(made, parts[s], keys),)

        return of

    rows_of, of_both, normals = (
        _joined(row_of, 0, slots), _joined(parameter_of, 0, 2 * slots - 1), _joined(normals_of, 0, slots),
    )  # fmt: skip

    def along(delta: int) -> Function:
        """The passes of a chunk; returns the address of the next one."""
        pieces = _pieces(gpu, dtype, antithetic, delta)

        @inline
        def go_along(chunk, begin, groups, at, band, own, place):
            parts, mu, sigma, keys = own
            turn, to, inside, _, step = place
            noises = chunk + np.int64(turn * noise_size)
            k = np.int32(0)
            while k < groups:
                x = pieces(normals(parts, unpack(read_words(noises)), keys), mu, sigma)
                whole = is_whole(band, begin + k)
                if whole and inside == every_bit:
                    write_whole(at, to, x)
                elif inside != 0:
                    written = inside if whole else np.uint32(inside & columns_inside(band, begin + k + turn))
                    write_some(at, to, (x, written))
                at += step
                noises += np.int64(band[2] * noise_size)
                k = np.int32(k + band[2])
            return at

        return go_along

    def choice(last: int) -> Function:
        # The ways up to `last`.
        way = along(last)
        if last == 0:
            return way
        before = choice(last - 1)

        @inline
        def chosen(chunk, begin, groups, at, band, own, place):
            if place[3] == last:
                return way(chunk, begin, groups, at, band, own, place)
            return before(chunk, begin, groups, at, band, own, place)

        return chosen

    go_along = choice(slots - 1)

    def kernel(call, geometry):
        chunk = shared_memory(chunk_size)
        block = block_index()
        index = np.uint32(block // geometry.blocks_per_band)
        tile = np.uint32(block - index * geometry.blocks_per_band)
        band = band_of(index, call, geometry)
        turn, first, to, inside, delta = place_of(tile, band, call, geometry)
        parts, mu, sigma = kept(rows_of(first, call.rows, 0), call)
        own = parts, of_both(mu, 0, 0), of_both(sigma, 0, 0), keys_of(call)
        stride = np.int64(geometry.column_step) * size
        at = begins(band, call, geometry) + first * size + np.int64(turn * width) * stride
        place = turn, to, inside, delta, np.int64(band[2] * width) * stride
        begin = np.int32(0)
        while begin < band[1]:
            groups = fill(band, chunk, begin, call, geometry)
            at = go_along(chunk, begin, groups, at, band, own, place)
            begin = np.int32(begin + np.int32(geometry.chunk))

    return kernel


def transposed_staged_kernel(gpu: ModuleType, dtype: str, shared: bool, antithetic: bool, fast: bool) -> Function:
    """The same for short rows one behind the other, through shared memory."""
    size, width, slots = SIZES[dtype], group_width(antithetic), staged_slots_of(SIZES[dtype], antithetic)
    thread_index, block_index, shared_memory = gpu.thread_index, gpu.block_index, gpu.shared_memory
    opaque, from_lane = gpu.opaque, gpu.from_lane
    synchronize_block, store, load_shared, store_shared = (
        gpu.synchronize_block, gpu.store, gpu.load_shared, gpu.store_shared,
    )  # fmt: skip
    (_, in_row), (_, unpack) = noise(gpu, dtype, shared, fast)
    quads, _, _ = packing(dtype)
    _, read_words = memory_of(gpu, quads)
    band_of, begins, is_whole, fill = _bands(gpu, dtype, shared, antithetic, fast)
    kept, elements = _keeping(gpu, dtype, slots), scaled(gpu, dtype, antithetic)
    noise_size, threads = 16 * quads, staged_threads(shared)
    bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}[size]
    # What a thread takes from the stage at once, and how often, at most.
    part_size = 8 if size == 2 else MOST_STORED
    parts_of_thread = slots * width * size // part_size
    chunk_size, stage_size = threads * noise_size, threads * parts_of_thread * part_size
    parts_apart = threads * part_size
    load_part, store_part = gpu.load_shared_quad, gpu.store_quad

    @inline
    def load_half(at):
        return load_shared(at, np.uint64)

    if part_size == 8:
        load_part, store_part = load_half, store

    # Dimensions of all groups of a pass, one behind the other, a run of them for each slot. The last runs may be
    # shorter, and where a warp has none of one, it draws none; the warps take turns at that, since each has an issue
    # slot of its own.

    @inline
    def role():
        return np.uint32((thread_index() + block_index() * _WARP) % np.uint32(threads))

    def place(c: int) -> Function:
        @inline
        def of(turn, row, rows):
            # Or it is worked out anew for each pass.
            return (opaque(np.uint32(((turn * np.uint32(width) + c) * rows + row) * np.uint32(size))),)

        return of

    places_of = _joined(place, 0, width)

    def turn_and_row(s: int) -> Function:
        behind = np.uint32(s * threads)

        @inline
        def of(filled, rows, _):
            position = np.uint32(role() + behind)
            if position >= filled:
                # There is none. To do the same as the first of the warp costs less than to do nothing.
                position = np.uint32(position // _WARP * _WARP)
            turn = np.uint32(position // rows)
            return ((turn, np.int64(np.uint32(position - turn * rows))),)

        return of

    def row_of(s: int) -> Function:
        @inline
        def of(turns_and_rows, _, __):
            return (turns_and_rows[s][1],)

        return of

    def memory_of_slot(s: int) -> Function:
        @inline
        def of(turns_and_rows, rows, _):
            turn, row = turns_and_rows[s]
            places = places_of(turn, np.uint32(row), rows)
            return ((np.int64(np.uint32(turn * np.uint32(noise_size))), places),)

        return of

    def hidden_part(s: int) -> Function:
        @inline
        def of(parts, _, __):
            # Or they are worked out anew for each pass, too.
            return ((opaque(parts[s][0]), opaque(parts[s][1])),)

        return of

    def column(c: int) -> Function:
        @inline
        def put(x, stage, places):
            store_shared(stage + np.int64(places[c]), x[c])

        return put

    put_group = _in_turn(column, 0, width)

    def drawn(s: int) -> Function:
        @inline
        def draw(own, noises, stage):
            parts, mu, sigma, memory, used, keys = own
            if s < used:
                in_chunk, places = memory[s]
                made = unpack(read_words(noises + in_chunk))
                put_group(elements(mu[s], sigma[s], in_row(made, parts[s], keys)), stage, places)

        return draw

    def copied(j: int) -> Function:
        @inline
        def copy(source, to, left):
            if left > j * parts_apart:
                store_part(to + j * parts_apart, load_part(source + j * parts_apart))

        return copy

    turns_and_rows_of, rows_of, memory_of_slots, hidden_parts = (
        _joined(of, 0, slots) for of in (turn_and_row, row_of, memory_of_slot, hidden_part)
    )
    draw_all, copy_parts = _in_turn(drawn, 0, slots), _in_turn(copied, 0, parts_of_thread)

    def kernel(call, geometry):
        chunk, stage = shared_memory(chunk_size), shared_memory(stage_size)
        band = band_of(block_index(), call, geometry)
        filled = np.uint32(np.uint32(band[2]) * np.uint32(call.rows))
        used = from_lane(np.int32((filled + np.uint32(threads - 1) - role()) // np.uint32(threads)), 0)
        turns_and_rows = turns_and_rows_of(filled, np.uint32(call.rows), 0)
        parts, mu, sigma = kept(rows_of(turns_and_rows, 0, 0), call)
        memory = memory_of_slots(turns_and_rows, np.uint32(call.rows), 0)
        own = hidden_parts(parts, 0, 0), mu, sigma, memory, used, keys_of(call)
        out, thread = begins(band, call, geometry), np.int32(thread_index())
        row_size = np.int32(np.int32(call.rows) * size)
        step = np.int32(band[2] * width * row_size)
        aligned = out & (part_size - 1) == 0
        begin = np.int32(0)
        while begin < band[1]:
            groups = fill(band, chunk, begin, call, geometry)
            k = np.int32(0)
            while k < groups:
                draw_all(own, chunk + np.int64(k * noise_size), stage)
                synchronize_block()
                if aligned and is_whole(band, begin + k):
                    behind = np.int64(thread * part_size)
                    copy_parts(stage + behind, out + behind, np.int32(step - thread * part_size))
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
