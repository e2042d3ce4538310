"""The kernels of weighted moments, in Python for Numba to compile: ``csrc/cuda/moments_kernel.cuh`` explains them.

The same order of the same operations gives the same bits as in C++.
"""

from __future__ import annotations

import functools
from types import ModuleType

import numpy as np

from multisample.backends.element_types import MATRIX_TYPES, SIZES, ElementType
from multisample.backends.kernels.compilation import Function, inline
from multisample.backends.kernels.stream.arithmetic import fma
from multisample.backends.kernels.stream.words import row_part

from .group import (
    chosen,
    computing_type,
    each,
    element,
    four_numbers,
    group_width,
    keys_of,
    mu_of,
    noise,
    offset_of,
    reading_origin,
    sigma_of,
    weights_of,
)  # fmt: skip
from .moments_geometry import FILL, MOMENT_CHAIN, MOMENT_THREADS, MomentGeometry

_WARPS = MOMENT_THREADS // 32
# Bytes of one float64 for every thread of a block.
_THREADS_BYTES = 8 * MOMENT_THREADS
_LANES = np.uint32(32)


@functools.cache
def _weights(
    gpu: ModuleType, real: str, antithetic: bool
) -> tuple[int, Function, Function, Function, tuple[Function, Function]]:
    """The weights of a group's four normals.

    Bytes of an entry; ``load(group, call, geometry)``: the weights of the group's columns; ``any_of(w)``: whether one
    is not zero; ``total(w)``: their sum; and ``(write(at, w), read(at))`` for an entry in shared memory. An entry has
    the weights of the first moment, and with antithetic noise those of the second too.
    """
    width, number = group_width(antithetic), computing_type(real)[0]
    element_of, zero = element(gpu, real), number(0)
    half, write, read = four_numbers(gpu, real)

    def weight(k: int) -> Function:
        def of(group, call, geometry):
            column = group * width + k - np.int64(geometry.skip)
            return element_of(weights_of(call), column) if 0 <= column < call.columns else zero

        return of

    load = each(range(width), weight)

    @inline
    def any_of_4(w):
        return w[0] != 0 or w[1] != 0 or w[2] != 0 or w[3] != 0

    @inline
    def any_of_8(w):
        return any_of_4(w[:4]) or any_of_4(w[4:])

    @inline
    def total_of_4(total, w):
        return total + np.float64(w[0]) + np.float64(w[1]) + np.float64(w[2]) + np.float64(w[3])

    @inline
    def total(w):
        return total_of_4(np.float64(0), w)

    @inline
    def total_of_8(w):
        return total_of_4(total_of_4(np.float64(0), w[:4]), w[4:])

    if not antithetic:
        return half, load, any_of_4, total, (write, read)

    @inline
    def write_pairs(at, w):
        write(at, (w[0] - w[1], w[2] - w[3], w[4] - w[5], w[6] - w[7]))
        write(at + half, (w[0] + w[1], w[2] + w[3], w[4] + w[5], w[6] + w[7]))

    @inline
    def read_pairs(at):
        return read(at) + read(at + half)

    return 2 * half, load, any_of_8, total_of_8, (write_pairs, read_pairs)


@functools.cache
def _adding(antithetic: bool, with_second: bool) -> tuple[Function, Function]:
    """Sums of w z and of w z^2: ``add(sums, w, z)`` and ``add_wide(totals, sums)``."""
    wide_nothing = np.float64(0)

    @inline
    def dot(x, w, z):
        return fma(w[3], z[3], fma(w[2], z[2], fma(w[1], z[1], fma(w[0], z[0], x))))

    @inline
    def squares(z):
        return z[0] * z[0], z[1] * z[1], z[2] * z[2], z[3] * z[3]

    @inline
    def add_first(sums, w, z):
        return (dot(sums[0], w, z), sums[1])

    @inline
    def add_both(sums, w, z):
        return (dot(sums[0], w, z), dot(sums[1], w, squares(z)))

    @inline
    def add_pairs(sums, w, z):
        return (dot(sums[0], w[:4], z), dot(sums[1], w[4:], squares(z)))

    @inline
    def add_wide(totals, sums):
        return (totals[0] + np.float64(sums[0]), totals[1] + np.float64(sums[1]) if with_second else wide_nothing)

    return (add_pairs if antithetic else add_both) if with_second else add_first, add_wide


@functools.cache
def _putting(gpu: ModuleType, real: str) -> Function:
    """``put(call, row, weight, first, second)`` stores the moments of a row, from the sums of w, w z and w z^2."""
    store, element_of = gpu.store, element(gpu, real)
    number = getattr(np, real)

    def putting(kind: int) -> Function:
        name = ElementType(kind).name
        size, narrow = SIZES[name], gpu.NARROWING[name]
        return lambda to, row, x: store(to + size * row, narrow(number(x)))

    put_one = chosen([ElementType[name] for name, row in MATRIX_TYPES.items() if row.computing == real], putting)

    @inline
    def put(call, row, weight, first, second):
        mu, sigma = np.float64(element_of(mu_of(call), row)), np.float64(element_of(sigma_of(call), row))
        put_one(call.type, call.first, row, fma(sigma, first, weight * mu))
        if call.results > 1:
            put_one(call.type, call.second, row, sigma * sigma * second)

    return put


@functools.cache
def _filling(gpu: ModuleType, real: str, antithetic: bool, fast: bool) -> Function:
    """``fill(memory, count, begin, end, call, geometry)`` appends groups to the list of `count` groups.

    It looks at groups [begin, min(end, begin + FILL)) and appends those with a nonzero weight. `memory`: addresses of
    columns, weights and counts. Returns the new count and the sum of this thread's weights. All threads of the block
    take part.
    """
    thread_index, from_lane, synchronize_block = gpu.thread_index, gpu.from_lane, gpu.synchronize_block
    load_shared, store_shared = gpu.load_shared, gpu.store_shared
    prepared, _, noise_size, write_noise, _ = noise(gpu, real, False, fast)
    size, load, any_of, total, (write, _) = _weights(gpu, real, antithetic)
    most, width = FILL[real], group_width(antithetic)

    @inline
    def scan(x, step):
        lane = np.int32(thread_index() % _LANES)
        other = from_lane(x, np.int32(lane if lane < step else lane - step))
        return x if lane < step else np.int32(x + other)

    @inline
    def fill(memory, count, begin, end, call, geometry):
        columns, weights, counts = memory
        thread = thread_index()
        # Beyond the end, a group has no columns, and so no weights.
        group = begin + np.int64(thread)
        if thread >= most or group >= end:
            group = np.int64(1) << np.int64(40)
        w = load(group, call, geometry)
        is_kept = any_of(w)
        kept = np.int32(1) if is_kept else np.int32(0)
        before = scan(scan(scan(scan(scan(kept, 1), 2), 4), 8), 16)
        warp = np.int32(thread // _LANES)
        if thread % _LANES == 31:
            store_shared(counts + 4 * np.int64(warp), before)
        synchronize_block()
        place, every = np.int32(before - kept + count), count
        for k in range(_WARPS):
            of_warp = load_shared(counts + 4 * np.int64(k), np.int32)
            if k < warp:
                place = np.int32(place + of_warp)
            every = np.int32(every + of_warp)
        if is_kept:
            made = prepared(np.uint32(call.first_column // width + group), call)
            write_noise(columns + np.int64(place) * noise_size, made)
            write(weights + np.int64(place) * size, w)
        synchronize_block()
        return every, total(w)

    return fill


@functools.cache
def _row_functions(
    gpu: ModuleType, real: str, antithetic: bool, fast: bool, rows: int, with_second: bool
) -> tuple[Function, Function, Function, Function]:
    """Functions on tuples with one element for each row of a thread.

    ``part_rows(first_row, call, geometry)``: the row parts of the words. ``add_rows(sums, entry, row_parts)`` adds an
    entry of the list. ``widen_rows(totals, sums)`` adds sums to float64 totals. ``store_rows(at, totals)`` stores the
    totals in shared memory.
    """
    offset_of_call, store_shared = offset_of(gpu), gpu.store_shared
    in_row = noise(gpu, real, False, fast).in_row
    (add, add_wide), order = _adding(antithetic, with_second), 2 if with_second else 1

    def parting(r: int) -> Function:
        def part(first_row, call, geometry):
            i = call.first_row + first_row + r * np.int64(geometry.team)
            i = np.int64(0) if call.shared_noise else i
            return row_part(np.uint32(i), np.uint32(offset_of_call(call)), keys_of(call)[0])

        return part

    def adding(r: int) -> Function:
        def added(sums, entry, row_parts):
            made, w = entry
            parts, keys = row_parts
            return add(sums[r], w, in_row(made, parts[r], keys))

        return added

    def storing(r: int) -> Function:
        at_row = order * r * _THREADS_BYTES

        def stored(at, totals):
            store_shared(at + at_row, totals[r][0])
            if with_second:
                store_shared(at + at_row + _THREADS_BYTES, totals[r][1])

        return stored

    part_rows, add_rows, store_rows = (each(range(rows), of_row) for of_row in (parting, adding, storing))
    widen_rows = each(range(rows), lambda r: lambda totals, sums: add_wide(totals[r], sums[r]))
    return part_rows, add_rows, widen_rows, store_rows


@functools.cache
def _summing(gpu: ModuleType, real: str, antithetic: bool, fast: bool, rows: int, with_second: bool) -> Function:
    """``sum_list(memory, count, totals, parts, call, geometry)`` adds the sums over the list to `totals`."""
    _, add_rows, widen_rows, _ = _row_functions(gpu, real, antithetic, fast, rows, with_second)
    thread_index, number = gpu.thread_index, computing_type(real)[0]
    _, _, noise_size, _, read_noise = noise(gpu, real, False, fast)
    entry_size, _, _, _, (_, read_weights) = _weights(gpu, real, antithetic)
    no_sums = ((number(0), number(0)),) * rows

    @inline
    def sum_list(memory, count, totals, parts, call, geometry):
        columns, weights, _ = memory
        keys, slots = keys_of(call), np.int32(geometry.slots)
        slot = np.int32(thread_index() // geometry.team)
        k = slot if slot < slots else count
        while k < count:
            end = min(k + MOMENT_CHAIN * slots, count)
            sums = no_sums
            while k < end:
                made = read_noise(columns + np.int64(k) * noise_size)
                w = read_weights(weights + np.int64(k) * entry_size)
                sums = add_rows(sums, (made, w), (parts, keys))
                k += slots
            totals = widen_rows(totals, sums)
        return totals

    return sum_list


@functools.cache
def _putting_rows(gpu: ModuleType, real: str, with_second: bool) -> Function:
    """``put_row(row, at, weight, segment, all_rows, call, geometry)`` finishes a row, or stores the segment's sums."""
    load_shared, store, put, order = gpu.load_shared, gpu.store, _putting(gpu, real), 2 if with_second else 1

    @inline
    def put_row(row, at, weight, segment, all_rows, call, geometry):
        if row < all_rows:
            first = load_shared(at, np.float64)
            second = load_shared(at + _THREADS_BYTES, np.float64) if with_second else np.float64(0)
            if geometry.finishing_blocks == 0:
                put(call, row, weight, first, second)
            else:
                to = call.scratch + 8 * order * (segment * all_rows + row)
                store(to, first)
                if with_second:
                    store(to + 8, second)

    return put_row


def moments_kernel(
    gpu: ModuleType, real: str, antithetic: bool, fast: bool, rows: int, with_second: bool, origin_in_memory: bool
) -> Function:
    """``kernel(call, geometry)`` for the calls of a `MomentsKey`, to be compiled."""
    thread_index, block_index, shared_memory = gpu.thread_index, gpu.block_index, gpu.shared_memory
    load_shared, store_shared, store = gpu.load_shared, gpu.store_shared, gpu.store
    synchronize_block, fill = gpu.synchronize_block, _filling(gpu, real, antithetic, fast)
    part_rows, _, _, store_rows = _row_functions(gpu, real, antithetic, fast, rows, with_second)
    sum_list = _summing(gpu, real, antithetic, fast, rows, with_second)
    put_row = _putting_rows(gpu, real, with_second)
    most, order = FILL[real], 2 if with_second else 1
    entry_size, noise_size = _weights(gpu, real, antithetic)[0], noise(gpu, real, False, fast).size
    columns_bytes, weights_bytes = 2 * most * noise_size, 2 * most * entry_size
    counts_bytes, sums_bytes = 4 * _WARPS, order * rows * _THREADS_BYTES
    no_totals = ((np.float64(0), np.float64(0)),) * rows

    @inline
    def add_at(at, behind):
        store_shared(at, load_shared(at, np.float64) + load_shared(at + behind, np.float64))

    def sum_moments(call, geometry):
        memory = shared_memory(columns_bytes), shared_memory(weights_bytes), shared_memory(counts_bytes)
        sums, weight_sums = shared_memory(sums_bytes), shared_memory(_THREADS_BYTES)
        thread, block = thread_index(), block_index()
        sweep_block, team, slots = (
            np.int64(block // geometry.segments),
            np.int64(geometry.team),
            np.int32(geometry.slots),
        )
        segment = np.int64(block % geometry.segments)
        slot, lane = np.int32(thread // geometry.team), np.int64(thread % geometry.team)
        all_rows = np.int64(1) if call.shared_noise else call.rows
        length = geometry.turns * np.int64(geometry.slots)
        first_group = segment * length
        last_group = min(first_group + length, geometry.groups)
        own_sums, own_weight = sums + 8 * np.int64(thread), weight_sums + 8 * np.int64(thread)
        count, weight_sum = np.int32(0), np.float64(0)
        for sweep in range(geometry.sweeps):
            tile = sweep_block * np.int64(geometry.sweeps) + sweep
            first_row = tile * rows * team + lane
            if first_row - lane >= all_rows:
                break
            parts, totals = part_rows(first_row, call, geometry), no_totals
            # With several sweeps, the first one fills the list for all.
            following = first_group if sweep == 0 else last_group
            while True:
                if sweep == 0:
                    count = np.int32(0)
                    while True:
                        count, more = fill(memory, count, following, last_group, call, geometry)
                        weight_sum += more
                        following += most
                        if following >= last_group or count > most:
                            break
                totals = sum_list(memory, count, totals, parts, call, geometry)
                if following >= last_group:
                    break
                synchronize_block()
            store_rows(own_sums, totals)
            if sweep == 0:
                store_shared(own_weight, weight_sum)
            half = MOMENT_THREADS // 2
            while half > 0:
                if sweep == 0 or half < slots:
                    synchronize_block()
                    if sweep == 0 and thread < half:
                        add_at(own_weight, 8 * half)
                    if slot < half and slot + half < slots:
                        for k in range(order * rows):
                            add_at(own_sums + k * _THREADS_BYTES, 8 * half * team)
                half //= 2
            synchronize_block()
            if tile == 0 and thread == 0 and geometry.finishing_blocks > 0:
                to = call.scratch + 8 * (geometry.segments * order * all_rows + segment)
                store(to, load_shared(weight_sums, np.float64))
            if slot == 0:
                weight = load_shared(weight_sums, np.float64)
                for r in range(rows):
                    own = own_sums + order * r * _THREADS_BYTES
                    put_row(first_row + r * team, own, weight, segment, all_rows, call, geometry)

    return reading_origin(gpu, sum_moments, MomentGeometry, antithetic) if origin_in_memory else sum_moments


def finishing_kernel(gpu: ModuleType, real: str) -> Function:
    """``kernel(call, geometry)`` that adds up the segments and stores the moments, to be compiled."""
    thread_index, block_index, shared_memory = gpu.thread_index, gpu.block_index, gpu.shared_memory
    load, load_shared, store_shared = gpu.load, gpu.load_shared, gpu.store_shared
    synchronize_block, put = gpu.synchronize_block, _putting(gpu, real)
    sums_bytes = 3 * _THREADS_BYTES

    def finish(call, geometry):
        sums = shared_memory(sums_bytes)
        thread, block = thread_index(), block_index()
        order = np.int64(call.results)
        all_rows = np.int64(1) if call.shared_noise else call.rows
        segments, width = np.int64(geometry.segments), np.int64(geometry.width)
        first_row = np.int64(0) if call.shared_noise else np.int64(block) * width
        row = first_row + np.int64(thread) % width
        first, second, weight = np.float64(0), np.float64(0), np.float64(0)
        if row < all_rows:
            for segment in range(np.int64(thread) // width, segments, MOMENT_THREADS // width):
                at = call.scratch + 8 * order * (segment * all_rows + row)
                first += load(at, np.float64)
                if order == 2:
                    second += load(at + 8, np.float64)
        for segment in range(np.int64(thread), segments, MOMENT_THREADS):
            weight += load(call.scratch + 8 * (order * segments * all_rows + segment), np.float64)
        own = sums + 8 * np.int64(thread)
        store_shared(own, first)
        store_shared(own + _THREADS_BYTES, second)
        store_shared(own + 2 * _THREADS_BYTES, weight)
        half = MOMENT_THREADS // 2
        while half > 0:
            synchronize_block()
            if thread < half:
                for k in range(0 if half >= width else 2, 3):
                    at = own + k * _THREADS_BYTES
                    store_shared(at, load_shared(at, np.float64) + load_shared(at + 8 * half, np.float64))
            half //= 2
        synchronize_block()
        weight = load_shared(sums + 2 * _THREADS_BYTES, np.float64)
        if call.shared_noise:
            first, second = load_shared(sums, np.float64), load_shared(sums + _THREADS_BYTES, np.float64)
            r = np.int64(block) * MOMENT_THREADS + np.int64(thread)
            while r < call.rows:
                put(call, r, weight, first, second)
                r += np.int64(geometry.finishing_blocks) * MOMENT_THREADS
        elif thread < width and row < all_rows:
            put(call, row, weight, load_shared(own, np.float64), load_shared(own + _THREADS_BYTES, np.float64))

    return finish
