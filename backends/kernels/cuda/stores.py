"""Stores of a thread's columns, one function for each way: ``csrc/cuda/stores.cuh``.

Each of `aligned`, `paired`, `shifted`, `staged` and `strided` returns a function ``put_row(at, x, state)``. `at` is the
thread's own address, which advances with the row; `x` are the `width` elements of a group; `state` depends on the way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from multisample.backends.kernels.compilation import Function, inline

__all__ = ["MOST_STORED", "aligned", "paired", "shifted", "staged", "strided"]

MOST_STORED = 16
"""Bytes of the largest store of a thread."""

# Functions that return kernel functions are cached, here and in the other modules: Numba then compiles a function that
# several kernels share once in a process.


@functools.cache
def aligned(gpu: ModuleType, size: int, width: int, at_once: int) -> Function:
    """Vectorised stores of `at_once` elements, four or all. `at` is the aligned address of the first. No `state`."""
    store_quad, store_vector = gpu.store_quad, gpu.store_vector

    @inline
    def put_row(at, x, state):
        store_quad(at, x)

    @inline
    def put_wide_row(at, x, state):
        store_quad(at, x[:4])
        store_quad(at + 4 * size, x[4:])

    @inline
    def put_whole_row(at, x, state):
        store_vector(at, x)

    return put_row if width == 4 else put_wide_row if at_once == 4 else put_whole_row


@functools.cache
def paired(gpu: ModuleType, size: int, width: int) -> Function:
    """`aligned` for groups larger than one store, in a warp in which each lane pair has adjacent groups of one row.

    Each store of the warp fills whole sectors.
    """
    put_sectors = _sectors(gpu, size, width)

    @inline
    def put_row(at, x, state):
        put_sectors(at, x, False)

    return put_row


def _sectors(gpu: ModuleType, size: int, width: int) -> Function:
    """``put_sectors(at, x, omit_first)``: a lane's elements, more than one store writes. The lanes are adjacent.

    Lane pairs exchange halves, so that each store of the warp fills whole sectors. `omit_first` leaves out the first
    store.
    """
    store_vector, from_lane, thread_index = gpu.store_vector, gpu.from_lane, gpu.thread_index
    per_store, parts = MOST_STORED // size, width * size // MOST_STORED

    @inline
    def two_of(from_first, a, b):
        return a[0] if from_first else b[0], a[1] if from_first else b[1]

    @inline
    def four_of(from_first, a, b):
        return two_of(from_first, a[:2], b[:2]) + two_of(from_first, a[2:], b[2:])

    @inline
    def two_exchanged(x, other):
        return from_lane(x[0], other), from_lane(x[1], other)

    @inline
    def four_exchanged(x, other):
        return two_exchanged(x[:2], other) + two_exchanged(x[2:], other)

    either, exchanged = (two_of, two_exchanged) if per_store == 2 else (four_of, four_exchanged)

    def both(k: int) -> Function:
        first, second, end = k * per_store, (k + 1) * per_store, (k + 2) * per_store

        @inline
        def put(at, x, odd, omit):
            low, high = x[first:second], x[second:end]
            received = exchanged(either(odd, low, high), np.int32(thread_index() % 32 ^ 1))
            if not omit:
                store_vector(at + k * MOST_STORED, either(odd, received, low))
            store_vector(at + (parts + k) * MOST_STORED, either(odd, high, received))

        return put

    put_two = both(0)
    put_other_two = both(2) if parts == 4 else put_two

    @inline
    def put_sectors(at, x, omit_first):
        odd = thread_index() % 2 != 0
        put_two(at - (parts - 1) * MOST_STORED if odd else at, x, odd, omit_first)

    @inline
    def put_more_sectors(at, x, omit_first):
        odd = thread_index() % 2 != 0
        even_at = at - (parts - 1) * MOST_STORED if odd else at
        put_two(even_at, x, odd, omit_first)
        put_other_two(even_at, x, odd, False)

    return put_sectors if parts == 2 else put_more_sectors


@functools.cache
def shifted(gpu: ModuleType, size: int, width: int, shift: int) -> Function:
    """Stores of a whole warp in one row, whose first column lies `shift` elements behind an aligned address.

    `at` is the end of the lane's quads; for lane 0, the address of its first column. `state`: whether the lane is the
    first, and whether it is the last. ``PutShifted`` in C++ explains the rest.
    """
    store, store_quad, shuffle_up = gpu.store, gpu.store_quad, gpu.shuffle_up

    @inline
    def before(x):
        return shuffle_up(x)

    @inline
    def narrow_before(x):
        return np.uint16(shuffle_up(np.int32(x)))

    if size == 2:
        before = narrow_before

    @inline
    def by_one(x):
        return (before(x[-1]),) + x[:-1]  # noqa: RUF005

    @inline
    def by_two(x):
        return (before(x[-2]), before(x[-1])) + x[:-2]  # noqa: RUF005

    @inline
    def by_three(x):
        return (before(x[-3]), before(x[-2]), before(x[-1])) + x[:-3]  # noqa: RUF005

    shifted_columns = (by_one, by_two, by_three)[shift - 1]

    alone = min(4, MOST_STORED // size)  # Elements between aligned addresses.

    def end(k: int) -> Function:
        # Element k of the columns that lane 0 and lane 31 store one by one; of_both serves both in one instruction.
        in_last = width - shift + k

        @inline
        def of_both(at, x, first_thread, last_thread):
            element = x[k] if first_thread else x[in_last]
            if first_thread | last_thread:
                store(at + k * size, element)

        @inline
        def of_first(at, x, first_thread, last_thread):
            if first_thread:
                store(at + k * size, x[k])

        @inline
        def of_last(at, x, first_thread, last_thread):
            if last_thread:
                store(at + k * size, x[in_last])

        return of_both if k < min(alone - shift, shift) else of_first if k < alone - shift else of_last

    @inline
    def nothing(at, x, first_thread, last_thread):
        pass

    end_0, end_1, end_2 = (end(k) if k < max(alone - shift, shift) else nothing for k in range(3))
    behind_first = (width - shift) * size

    @inline
    def put_quads(at, y, first_thread):
        if not first_thread:
            store_quad(at - 4 * size, y)

    @inline
    def put_wide_quads(at, y, first_thread):
        quads_end = at + behind_first if first_thread else at
        if not first_thread:
            store_quad(at - 8 * size, y[:4])
        store_quad(quads_end - 4 * size, y[4:])

    put_all_quads = put_quads if width == 4 else put_wide_quads
    if width * size > MOST_STORED:
        put_sectors = _sectors(gpu, size, width)

        @inline
        def put_all_sectors(at, y, first_thread):
            quads_end = at + behind_first if first_thread else at
            put_sectors(quads_end - width * size, y, first_thread)

        put_all_quads = put_all_sectors

    @inline
    def put_row(at, x, state):
        first_thread, last_thread = state
        put_all_quads(at, shifted_columns(x), first_thread)
        end_0(at, x, first_thread, last_thread)
        end_1(at, x, first_thread, last_thread)
        end_2(at, x, first_thread, last_thread)

    return put_row


def _each(width: int, part: Callable[[int], Function]) -> Function:
    """``part(k)`` for each element in turn. Each returns the address for the next.

    Addresses are incremental, because the optimizer would keep `width` offsets from the first address in registers.
    """

    def both(first: Function, second: Function) -> Function:
        @inline
        def both_parts(at, x, state):
            return second(first(at, x, state), x, state)

        return both_parts

    return functools.reduce(both, map(part, range(width)))


@functools.cache
def staged(gpu: ModuleType, size: int, width: int, element: Any) -> Function:
    """Stores of short rows: a warp's elements are contiguous, at any address, in one row or several.

    Shared memory makes the stores coalesced. `at` is the address of the warp's first element, plus one element per
    lane. `state`: the warp's shared memory, the lane, the position of its first element, the number of the warp's
    elements, and the range of the group's columns inside the matrix.
    """
    store, load_shared, store_shared, synchronize_warp = (
        gpu.store, gpu.load_shared, gpu.store_shared, gpu.synchronize_warp,
    )  # fmt: skip

    def to_stage(k: int) -> Function:
        @inline
        def part(at, x, state):
            stage, _, position, _, first, last = state
            if first <= k < last:
                store_shared(stage + (position - first + k) * size, x[k])
            return at

        return part

    def from_stage(k: int) -> Function:
        @inline
        def part(at, x, state):
            stage, lane, _, length, _, _ = state
            if 32 * k + lane < length:
                store(at, load_shared(stage + (32 * k + lane) * size, element))
            return at + 32 * size

        return part

    all_to_stage, all_from_stage = _each(width, to_stage), _each(width, from_stage)

    @inline
    def put_row(at, x, state):
        all_to_stage(at, x, state)
        synchronize_warp()
        all_from_stage(at, x, state)
        synchronize_warp()

    return put_row


@functools.cache
def strided(gpu: ModuleType, width: int) -> Function:
    """Scalar stores at any stride; `at` is the address of the first column, which may lie outside the matrix.

    `state`: the stride in bytes, and the range of the group's columns inside the matrix.
    """
    store = gpu.store

    def column(k: int) -> Function:
        @inline
        def part(at, x, state):
            stride, first, last = state
            if first <= k < last:
                store(at, x[k])
            return at + stride

        return part

    return _each(width, column)
