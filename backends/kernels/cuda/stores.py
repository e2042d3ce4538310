"""How the columns that a thread draws go to memory, row by row: ``csrc/cuda/stores.cuh``.

Each of `aligned`, `paired`, `shifted`, `staged` and `strided` gives a function ``put_row(at, x, state)``: `at` is an
address of the thread's own, which moves with the row, `x` are the elements of a group, `width` many, and `state` is
what the way has to know.
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
"""Bytes that one store writes at most."""

# What makes functions for kernels is cached, here and in the other modules: what several kernels have in common, Numba
# compiles once in a process.


@functools.cache
def aligned(gpu: ModuleType, size: int, width: int, at_once: int) -> Function:
    """So many at once, four or all; `at` is the address of the first, aligned by them. `state` is not looked at."""
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
    """More than a store writes, in a warp whose threads are side by side, an even one and an odd one in the same row.

    Each store writes whole sectors. `at` and `state` are as for `aligned`.
    """
    put_sectors = _sectors(gpu, size, width)

    @inline
    def put_row(at, x, state):
        put_sectors(at, x, False)

    return put_row


def _sectors(gpu: ModuleType, size: int, width: int) -> Function:
    """``put_sectors(at, x, omit_first)``: elements of a thread, more than a store writes, beside its neighbours'.

    Each thread of a pair writes half of every sector that either has, since half a sector takes longer than all of it.
    All threads of the warp together. The first store is left out if `omit_first`.
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
            taken = exchanged(either(odd, low, high), np.int32(thread_index() % 32 ^ 1))
            if not omit:
                store_vector(at + k * MOST_STORED, either(odd, taken, low))
            store_vector(at + (parts + k) * MOST_STORED, either(odd, high, taken))

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
    """The columns of a whole warp, whose first lies `shift` elements behind an aligned address.

    A thread's first aligned quad begins with the last `shift` columns of the thread before. The first thread is left
    with its other columns, which it writes one by one, and the last thread likewise with its last ones. `at` is the end
    of the thread's quads; for the first thread, the address of its first column. `state`: whether the thread is the
    first, and whether it is the last.
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

    handed_on = (by_one, by_two, by_three)[shift - 1]

    alone = min(4, MOST_STORED // size)  # Elements between aligned addresses.

    def end(k: int) -> Function:
        # Element k of what the first thread and the last one have left, both in one instruction.
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
        put_all_quads(at, handed_on(x), first_thread)
        end_0(at, x, first_thread, last_thread)
        end_1(at, x, first_thread, last_thread)
        end_2(at, x, first_thread, last_thread)

    return put_row


def _each(width: int, part: Callable[[int], Function]) -> Function:
    """What `part` gives for each of the elements, one after the other; each returns the address for the next.

    From address to address, because that many distances from the first would be kept in registers.
    """

    def both(first: Function, second: Function) -> Function:
        @inline
        def both_parts(at, x, state):
            return second(first(at, x, state), x, state)

        return both_parts

    return functools.reduce(both, map(part, range(width)))


@functools.cache
def staged(gpu: ModuleType, size: int, width: int, element: Any) -> Function:
    """What the threads of a warp have made, elements side by side at any address, in one row or several.

    They go through shared memory, so that neighbouring threads write neighbouring elements. `at` is the address of the
    warp's first element, and as many elements on as there are threads before. `state`: the warp's shared memory, the
    thread's number in the warp, the position of its first element and the number of all of them, and those of its
    columns that are inside, from the first to the last.
    """
    store, load_shared, store_shared, synchronize_warp = (
        gpu.store, gpu.load_shared, gpu.store_shared, gpu.synchronize_warp,
    )  # fmt: skip

    def put_down(k: int) -> Function:
        @inline
        def part(at, x, state):
            stage, _, position, _, first, last = state
            if first <= k < last:
                store_shared(stage + (position - first + k) * size, x[k])
            return at

        return part

    def take_up(k: int) -> Function:
        @inline
        def part(at, x, state):
            stage, lane, _, length, _, _ = state
            if 32 * k + lane < length:
                store(at, load_shared(stage + (32 * k + lane) * size, element))
            return at + 32 * size

        return part

    put_all_down, take_all_up = _each(width, put_down), _each(width, take_up)

    @inline
    def put_row(at, x, state):
        put_all_down(at, x, state)
        synchronize_warp()
        take_all_up(at, x, state)
        synchronize_warp()

    return put_row


@functools.cache
def strided(gpu: ModuleType, width: int) -> Function:
    """At any distance from each other; `at` is the address of the first column, be it inside or not.

    `state`: that distance in bytes, and those of the columns that are inside, from the first to the last.
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
