"""The kernel where dimensions lie side by side in memory, as with layout "nd": ``csrc/transposed.cuh``.

Dimensions and columns change places: a thread keeps some dimensions, with their mu and sigma, and goes along the
columns; what the words owe to those alone (with shared noise, all the noise) waits in shared memory. A block makes some
groups of columns at a time, of its tile of dimensions. Half a sector takes as long to write as all of it: where sectors
begin with a thread's dimensions, it writes them at once; where rows of the output begin anywhere, what the block has
made goes through shared memory, where it lies as it does in the output. See ``csrc/geometry.h``.
"""

from __future__ import annotations

import functools
from types import ModuleType

import numpy as np

from .compilation import inline
from .cuda_group import element, group_width, keys_of, memory_of, noise, offset_of, packing, scaled
from .cuda_stores import Function
from .geometry import MOST_THREADS, SIZES, slots_of
from .words import row_part

__all__ = ["transposed_kernel"]


def _joined(part: Function, first: int, last: int) -> Function:
    """``joined(*arguments)``: the tuples that ``part(k)`` makes of them for each k, one behind the other."""
    if last - first == 1:
        one: Function = part(first)
        return one
    middle = (first + last) // 2
    low, high = _joined(part, first, middle), _joined(part, middle, last)

    @inline
    def joined(a, b, c, d):
        return low(a, b, c, d) + high(a, b, c, d)

    return joined


def _in_turn(part: Function, first: int, last: int) -> Function:
    """``in_turn(*arguments)`` calls what ``part(k)`` makes for each k, one after the other."""
    if last - first == 1:
        one: Function = part(first)
        return one
    middle = (first + last) // 2
    low, high = _in_turn(part, first, middle), _in_turn(part, middle, last)

    @inline
    def in_turn(a, b, c, d):
        low(a, b, c, d)
        high(a, b, c, d)

    return in_turn


@functools.cache
def _keeping(gpu: ModuleType, dtype: str, antithetic: bool) -> Function:
    """``kept(first_row, rows, call, geometry)``: the dimensions of a thread, of `rows` that begin with `first_row`.

    Whether there are any; from a pass's first element to the first of the thread's, in bytes of the output; and of each
    dimension what its words owe to it alone, mu, sigma, where in a chunk the noise of its
    first group of a pass is, and where in a stage its first element, both in bytes.
    """
    size, width, slots = SIZES[dtype], group_width(antithetic), slots_of(SIZES[dtype], antithetic)
    element_of, offset_of_call, thread_index = element(gpu, dtype), offset_of(gpu), gpu.thread_index
    zero = np.float64(0) if dtype == "float64" else np.float32(0)
    noise_size = 16 * packing(dtype)[0]
    none = (((np.uint32(0), np.uint32(0)), zero, zero, np.int32(0), np.int32(0)),) * slots

    @inline
    def place_of(s, geometry):
        # The turn, which of the groups of a pass is meant, and the lane, which of the tile's dimensions.
        step = (slots, 1) if geometry.direct != 0 else (1, geometry.threads)
        position = np.uint32(thread_index() * np.uint32(step[0]) + s * np.uint32(step[1]))
        turn = np.uint32(position // geometry.lanes)
        return np.int32(turn), np.int32(position - turn * geometry.lanes)

    @inline
    def exists(place, rows, geometry):
        return place[0] < np.int32(geometry.rows_per_pass) and place[1] < rows

    def slot(s: int) -> Function:
        @inline
        def kept_slot(first_place, rows, call, geometry):
            first_row, turn, lane = first_place
            if s > 0:
                other = place_of(s, geometry)
                # Where there is none: to do the same twice costs less than to do nothing.
                if exists(other, rows, geometry):
                    turn, lane = other
            row = first_row + lane
            part = row_part(np.uint32(call.first_row + row), np.uint32(offset_of_call(call)), keys_of(call)[0])
            mu, sigma = element_of(call.mu, row), element_of(call.sigma, row)
            in_stage = np.int32((turn * width * np.int32(geometry.pitch) + lane) * size)
            return ((part, mu, sigma, np.int32(turn * noise_size), in_stage),)

        return kept_slot

    kept_slots = _joined(slot, 0, slots)

    @inline
    def kept(first_row, rows, call, geometry):
        place, dimensions = place_of(0, geometry), none
        any_exists = exists(place, rows, geometry)
        if any_exists:
            dimensions = kept_slots((first_row, place[0], place[1]), rows, call, geometry)
        return any_exists, place[0] * (width * call.column_stride) + np.int64(place[1]) * size, dimensions

    return kept


@functools.cache
def _drawing(gpu: ModuleType, dtype: str, shared: bool, antithetic: bool, fast: bool) -> tuple[Function, Function]:
    """What the kept dimensions have in the group of columns of each.

    ``draw_direct(own, chunk, at, stride)`` writes it at once: all are side by side from address `at` on in the first of
    the columns, which are `stride` bytes apart, and have their noise in one place. ``draw_inside(own, chunk, stage,
    pitch)`` puts it into a stage, where ``stage[c % 4]`` is the address of a pass's element 0 but for `c` times `pitch`
    bytes. `chunk` is the address of the pass's noise, `own` the dimensions and the keys.
    """
    width, slots = group_width(antithetic), slots_of(SIZES[dtype], antithetic)
    store_vector, store_shared = gpu.store_vector, gpu.store_shared
    (_, in_row), (_, unpack) = noise(gpu, dtype, shared, fast)
    elements, (_, read_words) = scaled(gpu, dtype, antithetic), memory_of(gpu, packing(dtype)[0])

    def drawn(s: int) -> Function:
        @inline
        def group(own, made, _, __):
            part, mu, sigma, _, _ = own[0][s]
            return (elements(mu, sigma, in_row(made, part, own[1])),)

        return group

    groups_of = _joined(drawn, 0, slots)

    def column(c: int) -> Function:
        def element_of(s: int) -> Function:
            @inline
            def of_slot(groups, _, __, ___):
                return (groups[s][c],)

            return of_slot

        row_of = _joined(element_of, 0, slots)

        @inline
        def put(groups, at, stride, _):
            store_vector(at + c * stride, row_of(groups, 0, 0, 0))

        return put

    put_columns = _in_turn(column, 0, width)

    @inline
    def draw_direct(own, chunk, at, stride):
        made = unpack(read_words(chunk + np.int64(own[0][0][3])))
        put_columns(groups_of(own, made, 0, 0), at, stride, 0)

    def put_inside(c: int) -> Function:
        phase = c % 4

        @inline
        def put(x, in_stage, stage, pitch):
            store_shared(stage[phase] + np.int64(in_stage + c * pitch), x[c])

        return put

    put_group = _in_turn(put_inside, 0, width)

    def inside(s: int) -> Function:
        @inline
        def draw(own, chunk, stage, pitch):
            part, mu, sigma, in_chunk, in_stage = own[0][s]
            made = unpack(read_words(chunk + np.int64(in_chunk)))
            put_group(elements(mu, sigma, in_row(made, part, own[1])), in_stage, stage, pitch)

        return draw

    return draw_direct, _in_turn(inside, 0, slots)


@functools.cache
def _writing(gpu: ModuleType, size: int) -> tuple[int, Function]:
    """How all threads of a block together write elements side by side, from a stage.

    Bytes of a piece, which a thread takes at once; and ``write_run(source, to, length, geometry)``, where `source`, an
    address in the stage, is as far behind one where a piece may begin as address `to` is, and `length` is in bytes.
    """
    piece, element = (8 if size == 2 else 16), {2: np.uint16, 4: np.uint32, 8: np.uint64}[size]
    thread_index, store, load_shared = gpu.thread_index, gpu.store, gpu.load_shared
    load_piece, store_piece = gpu.load_shared_quad, gpu.store_quad

    @inline
    def load_half(at):
        return load_shared(at, np.uint64)

    if size == 2:
        load_piece, store_piece = load_half, store

    @inline
    def copy_element(source, to):
        store(to, load_shared(source, element))

    @inline
    def copy_pieces(source, to, step):
        # As many loads at a time as can be.
        x, y = load_piece(source), load_piece(source + step)
        z, w = load_piece(source + 2 * step), load_piece(source + 3 * step)
        store_piece(to, x)
        store_piece(to + step, y)
        store_piece(to + 2 * step, z)
        store_piece(to + 3 * step, w)

    @inline
    def write_run(source, to, length, geometry):
        before = np.int32(to & (piece - 1))
        source, to, end = source - before, to - before, np.int32(before + length)
        thread, step = np.int32(thread_index()), np.int32(np.int32(geometry.threads) * piece)
        whole = np.int32(end & -piece)
        at = np.int32((thread + (1 if before > 0 else 0)) * piece)
        while at + 3 * step < whole:
            copy_pieces(source + at, to + at, np.int64(step))
            at = np.int32(at + 4 * step)
        while at < whole:
            store_piece(to + at, load_piece(source + at))
            at = np.int32(at + step)
        # What is left at either end.
        at = np.int32(thread * size)
        if before > 0 and before <= at and at < min(np.int32(piece), end):
            copy_element(source + at, to + at)
        if at < end - whole and (whole > 0 or before == 0):
            copy_element(source + whole + at, to + whole + at)

    return piece, write_run


def transposed_kernel(gpu: ModuleType, dtype: str, shared: bool, antithetic: bool, fast: bool) -> Function:
    """``kernel(call, geometry)``: see `multisample.backends.cuda_kernel.sample_kernel`."""
    size, width, slots = SIZES[dtype], group_width(antithetic), slots_of(SIZES[dtype], antithetic)
    thread_index, block_index = gpu.thread_index, gpu.block_index
    shared_memory, synchronize_block = gpu.shared_memory, gpu.synchronize_block
    (prepared, _), (pack, _) = noise(gpu, dtype, shared, fast)
    quads, _, _ = packing(dtype)
    write_words, _ = memory_of(gpu, quads)
    kept, (piece, write_run) = _keeping(gpu, dtype, antithetic), _writing(gpu, size)
    draw_direct, draw_inside = _drawing(gpu, dtype, shared, antithetic, fast)
    noise_size = 16 * quads
    chunk_size, stage_size = MOST_THREADS * noise_size, (MOST_THREADS * slots * width + 4) * size
    stages_size = 2 * stage_size

    @inline
    def make(chunk, first, count, call, geometry):
        # Each thread what one of these groups owes to its columns, where all threads of the block see it after the next
        # synchronize_block; and of groups behind them as many as a pass that is not full may read.
        thread = thread_index()
        if thread < geometry.chunk and thread + 1 < count + geometry.rows_per_pass:
            made = prepared(np.uint32(call.first_column // width + first + thread), call)
            write_words(chunk + np.int64(thread) * noise_size, pack(made))

    @inline
    def phase(out, c, apart):
        return np.int64((out + c * apart) & (piece - 1))

    @inline
    def put_inside(own, chunk, stage, out, apart, geometry):
        # The next pass is of whole groups later, and so begins as far behind where a piece may begin.
        begins = (
            stage + phase(out, 0, apart), stage + phase(out, 1, apart), stage + phase(out, 2, apart),
            stage + phase(out, 3, apart),
        )  # fmt: skip
        draw_inside(own, chunk, begins, np.int32(geometry.pitch * size))

    @inline
    def write_pass(stage, out, column, rows, apart, call, geometry):
        c = np.int32(geometry.skip) if column < 0 else np.int32(0)
        last = np.int32(min(call.columns - column, np.int64(geometry.rows_per_pass * width)))
        length, pitch = np.int32(rows * size), np.int32(geometry.pitch * size)
        if apart == 0:
            # One run of elements, and not one for each of its columns.
            length, last = np.int32(length * (last - c)), np.int32(c + 1)
        while c < last:
            source = stage + np.int64(c * pitch) + phase(out, c, apart)
            write_run(source, out + c * call.column_stride, length, geometry)
            c = np.int32(c + 1)

    def kernel(call, geometry):
        chunk, stages = shared_memory(chunk_size), shared_memory(stages_size)
        block = block_index()
        band = np.uint32(block // geometry.column_blocks)
        tile = np.uint32(block - band * geometry.column_blocks)
        first_group, first_row = np.int64(band) * geometry.band_rows, np.int64(tile) * geometry.lanes
        groups_left = (geometry.skip + call.columns + width - 1) // width - first_group
        count = np.int32(min(np.int64(geometry.band_rows), groups_left))
        rows = np.int32(min(np.int64(geometry.lanes), call.rows - first_row))
        turns, most = np.int32(geometry.rows_per_pass), np.int32(geometry.chunk)
        columns_of_pass = np.int32(turns * width)
        any_exists, of_thread, dimensions = kept(first_row, rows, call, geometry)
        own = dimensions, keys_of(call)

        # The first group's first column, be it inside or not, and its address.
        stride = call.column_stride
        step = columns_of_pass * stride
        column = width * first_group - geometry.skip
        out = call.out + first_row * size + column * stride
        apart = stride
        if geometry.column_blocks == 1 and stride == np.int64(rows) * size:
            apart = np.int64(0)
        # A pass goes to the stage that the last one did not go to: nobody writes to this one before all have come to
        # the next barrier.
        stage = np.int32(0)
        begin = np.int32(0)
        while begin < count:
            groups = np.int32(min(count - begin, most))
            if begin > 0:
                synchronize_block()
            make(chunk, first_group + begin, groups, call, geometry)
            synchronize_block()
            k = np.int32(0)
            while k < groups:
                if geometry.direct != 0 and column >= 0:
                    # As long as all columns are inside.
                    passes = np.int32(np.uint32(groups - k) // np.uint32(turns))
                    left = call.columns - column
                    if left < np.int64(passes) * columns_of_pass:
                        passes = np.int32(np.uint32(left) // np.uint32(columns_of_pass))
                    if any_exists:
                        noises, at, more = chunk + np.int64(k) * noise_size, out + of_thread, passes
                        while more > 0:
                            draw_direct(own, noises, at, stride)
                            noises += np.int64(turns) * noise_size
                            at += step
                            more = np.int32(more - 1)
                    out += passes * step
                    k = np.int32(k + passes * turns)
                    column += np.int64(passes) * columns_of_pass
                if k < groups:
                    at_stage = stages + np.int64(stage)
                    stage = np.int32(stage_size - stage)
                    if any_exists:
                        put_inside(own, chunk + np.int64(k) * noise_size, at_stage, out, apart, geometry)
                    synchronize_block()
                    write_pass(at_stage, out, column, rows, apart, call, geometry)
                    out += step
                    k = np.int32(k + turns)
                    column += columns_of_pass
            begin = np.int32(begin + most)

    return kernel
