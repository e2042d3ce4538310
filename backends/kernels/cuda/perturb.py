"""The kernels of perturb, in Python for Numba to compile: ``csrc/cuda/perturb_kernel.cuh`` explains them."""

from __future__ import annotations

import functools
from types import ModuleType

import numpy as np

from multisample.backends.element_types import MATRIX_TYPES, SIZES
from multisample.backends.kernels.compilation import Function, inline
from multisample.backends.kernels.stream.arithmetic import fma, from_float_bits, product
from multisample.backends.kernels.stream.rounding import unchanged
from multisample.backends.kernels.stream.words import row_part
from multisample.backends.launch import Launch

from .group import (
    computing_type,
    each,
    element,
    keys_of,
    matrix_with_values,
    memory_of,
    noise,
    offset_of,
    packing,
    replacing,
    weights_of,
    word_in_memory,
)
from .kernel_choice import OF_BATCH, OF_ROWS, WIDTH
from .perturb_geometry import HEAD_WORDS, MOST_GROUPS, MOST_SPANS_OF_NUMBA, PERTURB_THREADS, fields_of, own_groups
from .stores import of_lane_before

__all__ = ["perturb_kernel"]

_HALF, _WORD = np.int64(32), np.uint64(32)


@functools.cache
def _span_of_block(fields: int, at_id: int, most: int) -> Function:
    """``span_of(block, spans)``: the fields of the block's span, which has the first block in field `at_id`."""

    def of(first: int, last: int) -> Function:
        begin, middle = HEAD_WORDS + fields * first, (first + last) // 2
        end = begin + fields
        if last - first == 1:

            @inline
            def one(block, spans):
                return spans[begin:end]

            return one
        low, high, border = of(first, middle), of(middle, last), HEAD_WORDS + fields * middle + at_id

        @inline
        def either(block, spans):
            # Unsigned: an unused entry has a first block above every block's index.
            if block < np.uint64(spans[border]) >> np.uint64(32):
                return low(block, spans)
            return high(block, spans)

        return either

    return of(0, most)


@inline
def is_inside(column, width):
    """Whether the row has the column."""
    return 0 <= column < width


@inline
def has_quad(column, width):
    """Whether the row has the four columns from `column` on."""
    return column >= 0 and column + 4 <= width


@functools.cache
def _groups(gpu: ModuleType, dtype: str, one_member: bool, strided: bool) -> tuple[Function, Function, Function]:
    """The groups of a thread in one turn of a block. The turn begins with group `begin` of the span.

    ``groups_of(span)``: the groups of a row, and of the span. ``at(span, begin, g)``: group g of the thread: the
    addresses of its first element in source and target, its first column in the row, and its index in the row of z.
    ``are_whole(span, begin)``: whether the groups of the warp are whole quads at aligned addresses.
    """
    thread_index, all_of_warp = gpu.thread_index, gpu.all_of_warp
    size, own = SIZES[dtype], own_groups(dtype, one_member)
    quad = 8 if size == 2 else 16

    @inline
    def group_of_row(k, first, source, source_stride, target, target_stride):
        column = WIDTH * k - first % WIDTH
        index = np.uint32(first // WIDTH + k)
        return source + column * source_stride, target + column * target_stride, column, index

    @inline
    def groups_of_run(span):
        _, _, first, width, _ = span
        groups = (first % WIDTH + width + WIDTH - 1) // WIDTH
        return groups, groups

    @inline
    def at_run(span, begin, g):
        source, target, first, _, _ = span
        k = begin + g * PERTURB_THREADS + np.int64(thread_index())
        return group_of_row(k, first, source, size, target, size)

    @inline
    def run_is_whole(span, begin):
        source, target, first, width, _ = span
        skip = first % WIDTH
        column = WIDTH * begin - skip
        are_inside = column >= 0 and column + WIDTH * own * PERTURB_THREADS <= width
        return are_inside and (source - skip * size) % quad == 0 and (target - skip * size) % quad == 0

    if not strided:
        return groups_of_run, at_run, run_is_whole

    @inline
    def groups_of(span):
        _, _, first, rows, width, jump, _, _, _, _, _ = span
        skip = first % WIDTH if rows == 1 or jump % WIDTH == 0 else WIDTH - 1
        of_row = (skip + width + WIDTH - 1) // WIDTH
        return of_row, rows * of_row

    @inline
    def at(span, begin, g):
        source, target, first, rows, width, jump, source_row, source_stride, target_row, target_stride, _ = span
        of_row, _ = groups_of(span)
        block_row = begin // of_row
        k = begin - block_row * of_row + g * PERTURB_THREADS + np.int64(thread_index())
        down = np.int64(k >= of_row)
        # Only with short rows do the groups of one turn cross several row ends.
        if of_row <= MOST_GROUPS:
            down = np.int64(np.uint32(k) // np.uint32(of_row))
        k -= down * of_row
        r = block_row + down
        source_at, target_at, column, index = group_of_row(
            k, first + r * jump, source + r * source_row, source_stride, target + r * target_row, target_stride
        )
        # Beyond the last row, a group has no elements.
        column = column if r < rows else width
        return source_at, target_at, column, index

    @inline
    def is_whole(span, begin, g):
        source_at, target_at, column, _ = at(span, begin, g)
        width, source_stride, target_stride = span[4], span[7], span[9]
        adjacent = source_stride == size and target_stride == size
        return adjacent and has_quad(column, width) and source_at % quad == 0 and target_at % quad == 0

    @inline
    def are_whole(span, begin):
        whole = is_whole(span, begin, 0)
        for g in range(1, own):
            whole = whole and is_whole(span, begin, g)
        return all_of_warp(whole)

    return groups_of, at, are_whole


@functools.cache
def _loading(gpu: ModuleType, dtype: str) -> Function:
    """``load_group(group, width, stride)``: the elements of a group, as they are stored, and 0 outside the row."""
    load, load_quad, size = gpu.load, gpu.load_quad, SIZES[dtype]
    stored, quad = getattr(np, MATRIX_TYPES[dtype].stored), 8 if size == 2 else 16
    nothing = stored(0)

    def loading(k: int) -> Function:
        def load_one(group, width, stride):
            return load(group[0] + k * stride, stored) if is_inside(group[2] + k, width) else nothing

        return load_one

    load_each = each(range(4), loading)

    @inline
    def load_group(group, width, stride):
        if stride == size and group[0] % quad == 0 and has_quad(group[2], width):
            return load_quad(group[0], stored)
        return load_each(group, width, stride)

    return load_group


@functools.cache
def _storing(gpu: ModuleType, dtype: str) -> Function:
    """``store_group(group, x, width, stride)`` stores the elements of a group. All lanes of the warp take part."""
    store, store_vector, thread_index, all_of_warp = gpu.store, gpu.store_vector, gpu.thread_index, gpu.all_of_warp
    size, before = SIZES[dtype], of_lane_before(gpu, SIZES[dtype])
    quad = 8 if size == 2 else 16

    @inline
    def shifted(x, shift):
        before_1, before_2, before_3 = before(x[1]), before(x[2]), before(x[3])
        even = shift % 2 == 0
        c0, c1, c2 = before_2 if even else before_1, before_3 if even else before_2, x[0] if even else before_3
        c3, c4, c5 = x[1] if even else x[0], x[2] if even else x[1], x[3] if even else x[2]
        return (c2, c3, c4, c5) if shift < 2 else (c0, c1, c2, c3)

    @inline
    def shifted_wide(x, shift):
        last = before(x[3])
        return (last, x[0], x[1], x[2]) if shift != 0 else x

    if size == 8:
        shifted = shifted_wide

    def storing(k: int) -> Function:
        def store_one(group, x, shift, has_own, has_next, width, stride):
            done = has_own if k < WIDTH - shift else has_next
            if not done and is_inside(group[2] + k, width):
                store(group[1] + k * stride, x[k])

        return store_one

    store_each = each(range(4), storing)

    @inline
    def store_group(group, x, width, stride):
        _, target, column, _ = group
        lane = thread_index() % np.uint32(32)
        adjacent = stride == size
        shift = target % quad // size if adjacent else np.int64(0)
        y = x
        if not all_of_warp(shift == 0):
            y = shifted(x, shift)
        has_own = adjacent and (shift == 0 or lane > 0) and has_quad(column - shift, width)
        has_next = adjacent and shift > 0 and lane < 31 and has_quad(column - shift + 4, width)
        if has_own:
            store_vector(target - shift * size, y)
        if not has_own or (shift > 0 and not has_next):
            store_each(group, x, shift, has_own, has_next, width, stride)

    return store_group


@functools.cache
def _members(gpu: ModuleType, dtype: str, has_own_keys: bool) -> tuple[Function, Function, Function]:
    """``member_of(row, call)``: the row part, the weight, the seed and the low half of the offset of a member.

    Seed and offset are 0 unless each member has its own, in memory.

    ``prepare(members, row, call)`` prepares the members from `row` on in shared memory, for all threads of a block.

    ``read(at)``: the same as ``member_of``, from there.
    """
    thread_index, synchronize_block = gpu.thread_index, gpu.synchronize_block
    one, words_of, number_of = packing(dtype)
    write_words, read_words = memory_of(gpu, 1)
    element_of, offset_of_call, last = element(gpu, dtype), offset_of(gpu), 2 + one
    size, word_of, with_seed = _member_size(has_own_keys), word_in_memory(gpu), replacing(Launch, "seed")
    no_seed, no_offset = np.uint64(0), np.uint32(0)

    @inline
    def member_of(r, call):
        part = row_part(np.uint32(call.first_row + r), np.uint32(offset_of_call(call)), keys_of(call)[0])
        return part, element_of(weights_of(call), r), no_seed, no_offset

    @inline
    def member_with_key(r, call):
        seed_at, offset_at = call.seed_at + r * call.seed_step, call.offset_at + r * call.offset_step
        seed = word_of(call.seed, seed_at, call.word_formats & np.uint32(255))
        offset = np.uint32(word_of(call.offset, offset_at, call.word_formats >> np.uint32(8)))
        part = row_part(np.uint32(call.first_row), offset, keys_of(with_seed(call, seed))[0])
        return part, element_of(weights_of(call), r), seed, offset

    if has_own_keys:
        member_of = member_with_key

    @inline
    def prepare(members, row, call):
        r = row + np.int64(thread_index())
        if r < call.rows:
            part, number, seed, offset = member_of(r, call)
            weight, at = words_of(number), members + size * np.int64(thread_index())
            write_words(at, (part[0], part[1], weight[0], weight[one - 1]))
            if has_own_keys:
                write_words(at + 16, (np.uint32(seed), np.uint32(seed >> _WORD), offset, offset))
        synchronize_block()

    @inline
    def read(at):
        w = read_words(at)
        return w[:2], number_of(w[2:last]), no_seed, no_offset

    @inline
    def read_with_key(at):
        w, key = read_words(at), read_words(at + 16)
        return w[:2], number_of(w[2:last]), np.uint64(key[1]) << _WORD | np.uint64(key[0]), np.uint32(key[2])

    return member_of, prepare, read_with_key if has_own_keys else read


def _member_size(has_own_keys: bool) -> int:
    """Bytes of a member in shared memory."""
    return 32 if has_own_keys else 16


@functools.cache
def _turn(
    gpu: ModuleType, dtype: str, fast: bool, one_member: bool, strided: bool, origin: int
) -> tuple[Function, Function, Function, Function]:
    """Functions of a thread's groups in one turn, whose tuples have an element for each group.

    ``load_turn(span, begin, whole, factor)``, ``prepare_turn(span, begin, call)``, ``add(x, member, noise and call)``,
    and ``store_turn(span, begin, whole, x)``.
    """
    real, own = MATRIX_TYPES[dtype].computing, own_groups(dtype, one_member)
    _, at, _ = _groups(gpu, dtype, one_member, strided)
    load_group, store_group, store_vector = _loading(gpu, dtype), _storing(gpu, dtype), gpu.store_vector
    load_quad, stored = gpu.load_quad, getattr(np, MATRIX_TYPES[dtype].stored)
    widen, narrow, number = gpu.WIDENING.get(dtype, unchanged), gpu.NARROWING[dtype], computing_type(dtype)[0]
    prepared, in_row, _, _, _ = noise(gpu, real, False, fast)
    size, with_key, nowhere = SIZES[dtype], replacing(Launch, "seed", "offset", "offset_at"), np.int64(0)

    @inline
    def row_of(span):
        if strided:
            return span[4], span[7], span[9]
        return span[3], np.int64(size), np.int64(size)

    converted = each(range(4), lambda k: lambda q: number(widen(q[k])))
    narrowed = each(range(4), lambda k: lambda x: narrow(x[k]))
    weighted = each(range(4), lambda k: lambda w, z, x: fma(w, z[k], x[k]))
    scaled = each(range(4), lambda k: lambda factor, x: product(factor, x[k]))

    def loading(g: int) -> Function:
        def load_own(span, begin, whole, factor):
            group, row = at(span, begin, g), row_of(span)
            return converted(load_quad(group[0], stored) if whole else load_group(group, row[0], row[1]))

        def load_scaled(span, begin, whole, factor):
            return scaled(factor, load_own(span, begin, whole, factor))

        if origin >= OF_BATCH:
            load_own = inline(load_own)
            return load_scaled
        return load_own

    def adding(g: int) -> Function:
        def added(x, member, columns):
            made, call = columns
            part, w, _, _ = member
            return weighted(w, in_row(made[g], part, keys_of(call)), x[g])

        def added_with_key(x, member, columns):
            # `made` is the index of each group.
            made, call = columns
            part, w, seed, offset = member
            own = with_key(call, seed, np.uint64(call.offset) | np.uint64(offset), nowhere)
            return weighted(w, in_row(prepared(made[g], own), part, keys_of(own)), x[g])

        return added_with_key if origin == OF_ROWS else added

    def storing(g: int) -> Function:
        def store_own(span, begin, whole, x):
            group, row = at(span, begin, g), row_of(span)
            if whole:
                store_vector(group[1], narrowed(x[g]))
            else:
                store_group(group, narrowed(x[g]), row[0], row[2])

        return store_own

    load_turn, add, store_turn = (each(range(own), of_group) for of_group in (loading, adding, storing))
    if origin == OF_ROWS:
        prepare_turn = each(range(own), lambda g: lambda span, begin, call: at(span, begin, g)[3])
    else:
        prepare_turn = each(range(own), lambda g: lambda span, begin, call: prepared(at(span, begin, g)[3], call))
    return load_turn, prepare_turn, add, store_turn


@functools.cache
def _of_wide_span(gpu: ModuleType, dtype: str, strided: bool) -> tuple[Function, Function]:
    """``span_of_batch(wide, b)``: the fields of a span of matrix `b`; ``factor_of(wide, call)``: its factor."""
    load, fields = gpu.load, fields_of(strided, False)
    real, _ = computing_type(dtype)

    @inline
    def span_of_batch(wide, b):
        return (wide[0] + b * wide[fields], wide[1] + b * wide[fields + 1]) + wide[2:fields]  # noqa: RUF005  # Numba.

    @inline
    def factor_of(wide, call):
        word = wide[fields + 2]
        if call.sigma_type == 0:
            return real(from_float_bits(word))
        return load(call.sigma + word * call.sigma_stride, real)

    return span_of_batch, factor_of


def perturb_kernel(gpu: ModuleType, dtype: str, fast: bool, one_member: bool, strided: bool, origin: int) -> Function:
    """``kernel(call, spans)`` for the calls of a `PerturbKey`, to be compiled."""
    block_index, thread_index, shared_memory = gpu.block_index, gpu.thread_index, gpu.shared_memory
    synchronize_block = gpu.synchronize_block
    fields = fields_of(strided, False)
    span_of = _span_of_block(fields_of(strided, origin >= OF_BATCH), fields - 1, MOST_SPANS_OF_NUMBA[strided])
    span_of_batch, factor_of_wide = _of_wide_span(gpu, dtype, strided)
    groups_of, _, are_whole = _groups(gpu, dtype, one_member, strided)
    (member_of, prepare, read), offset_of_call = _members(gpu, dtype, origin == OF_ROWS), offset_of(gpu)
    load_turn, prepare_turn, add, store_turn = _turn(gpu, dtype, fast, one_member, strided, origin)
    with_offset, nowhere = replacing(Launch, "offset", "offset_at"), np.int64(0)
    of_turn, last, size = own_groups(dtype, one_member) * PERTURB_THREADS, fields - 1, _member_size(origin == OF_ROWS)
    members_bytes = size * PERTURB_THREADS
    matrix_of, with_weights, batch_index = matrix_with_values(gpu), replacing(Launch, "weights"), gpu.batch_index
    with_row, load, one = replacing(Launch, "first_row"), gpu.load, computing_type(dtype)[0](1)

    @inline
    def no_factor(span, call):
        return one

    @inline
    def whole_span(span, b):
        return span

    factor_of = factor_of_wide if origin >= OF_BATCH else no_factor
    moved = span_of_batch if origin >= OF_BATCH else whole_span

    @inline
    def offset_of_block(call):
        return np.uint64(0) if origin == OF_ROWS else np.uint64(offset_of_call(call))

    @inline
    def block_of(call, spans):
        wide = span_of(np.uint64(block_index()), spans)
        span, factor = moved(wide, np.int64(batch_index() if origin == OF_BATCH else 0)), factor_of(wide, call)
        in_span = np.int64(block_index()) - np.int64(np.uint64(span[last]) >> np.uint64(32))
        offset = offset_of_block(call) + (np.uint64(span[last]) << np.uint64(32))
        turns, groups = spans[0] >> _HALF, groups_of(span)[1]
        begin = in_span * turns * of_turn
        if origin == OF_ROWS:  # Each row has the low half of the offset.
            return span, call, offset, begin, min(groups, begin + turns * of_turn), factor
        return span, with_offset(call, offset, nowhere), offset, begin, min(groups, begin + turns * of_turn), factor

    @inline
    def perturb_by_one(call, spans):
        span, launch, _, begin, end, factor = block_of(call, spans)
        # It needs no shared memory, and the block no barrier.
        member = member_of(np.int64(0), launch)
        while begin < end:
            whole = are_whole(span, begin)
            x = load_turn(span, begin, whole, factor)
            store_turn(span, begin, whole, add(x, member, (prepare_turn(span, begin, launch), launch)))
            begin += of_turn

    @inline
    def perturb_by_all(call, spans):
        members = shared_memory(members_bytes)
        span, launch, offset, begin, end, factor = block_of(call, spans)
        warp = np.int64(thread_index() // np.uint32(32)) * 32
        prepare(members, np.int64(0), launch)
        count = min(call.rows, np.int64(PERTURB_THREADS))
        while begin < end:
            whole = are_whole(span, begin)
            x = load_turn(span, begin, whole, factor)
            columns = prepare_turn(span, begin, launch), with_offset(launch, offset, nowhere)
            # A warp without groups only prepares members.
            works = begin + warp < end
            row = np.int64(0)
            while True:
                at = members
                stop = at + size * count if works else at
                while at < stop:
                    x = add(x, read(at), columns)
                    at += size
                if call.rows <= PERTURB_THREADS:
                    break
                synchronize_block()
                row += PERTURB_THREADS
                if row >= call.rows:
                    row = np.int64(0)
                prepare(members, row, launch)
                count = min(call.rows - row, np.int64(PERTURB_THREADS))
                if row == 0:
                    break
            store_turn(span, begin, whole, x)
            begin += of_turn

    perturb = perturb_by_one if one_member else perturb_by_all

    def by_value(call, spans):
        perturb(call, spans)

    def in_memory(call, spans):
        perturb(matrix_of(call, np.int64(0)), spans)

    def of_batch(call, spans):
        b = np.int64(batch_index())
        perturb(matrix_of(with_weights(call, call.weights + b * call.weights_step), b), spans)

    def of_rows(call, spans):
        row = call.first_row if call.first_row_at == 0 else load(call.first_row_at, np.int64)
        perturb(with_row(call, np.int64(row)), spans)

    return (by_value, in_memory, of_batch, of_rows)[origin]
