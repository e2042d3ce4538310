"""How the four columns that a thread draws go to memory, row by row: the four ways of ``csrc/geometry.h``.

Each of `aligned`, `shifted`, `staged` and `strided` gives a function ``put_row(at, x, state)``: `at` is an address of
the thread's own, which moves with the row, `x` are the four elements, and `state` is what the way has to know.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from .compilation import inline

__all__ = ["Function", "aligned", "going_down", "shifted", "staged", "strided"]

Function = Callable[..., Any]


def aligned(gpu: ModuleType) -> Function:
    """At once; `at` is the address of the first of the four, aligned. `state` is not looked at."""
    store_quad = gpu.store_quad

    @inline
    def put_row(at, x, state):
        store_quad(at, x)

    return put_row


def shifted(gpu: ModuleType, size: int, shift: int) -> Function:
    """The 128 columns of a whole warp, whose first lies `shift` elements behind an aligned address.

    A thread's aligned quad begins with the last `shift` columns of the thread before. The first thread is left with its
    other columns, which it writes one by one, and the last thread likewise with its last ones. `at` is the end of the
    thread's quad; for the first thread, the address of its first column. `state`: whether the thread is the first, and
    whether it is the last.
    """
    store, store_quad, from_lane_before = gpu.store, gpu.store_quad, gpu.from_lane_before

    @inline
    def before(x):
        return from_lane_before(x)

    @inline
    def narrow_before(x):
        return np.uint16(from_lane_before(np.int32(x)))

    if size == 2:
        before = narrow_before

    @inline
    def by_one(x):
        return before(x[3]), x[0], x[1], x[2]

    @inline
    def by_two(x):
        return before(x[2]), before(x[3]), x[0], x[1]

    @inline
    def by_three(x):
        return before(x[1]), before(x[2]), before(x[3]), x[0]

    handed_on = (by_one, by_two, by_three)[shift - 1]

    def end(k: int) -> Function:
        # Element k of what the first thread and the last one have left, both in one instruction.
        in_last = 4 - shift + k

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

        return of_last if k >= 4 - shift else of_first if k >= shift else of_both

    @inline
    def nothing(at, x, first_thread, last_thread):
        pass

    end_0, end_1, end_2 = end(0), end(1), end(2) if shift != 2 else nothing

    @inline
    def put_row(at, x, state):
        first_thread, last_thread = state
        y = handed_on(x)
        if not first_thread:
            store_quad(at - 4 * size, y)
        end_0(at, x, first_thread, last_thread)
        end_1(at, x, first_thread, last_thread)
        end_2(at, x, first_thread, last_thread)

    return put_row


def _four(part: Callable[[int], Function]) -> Function:
    part_0, part_1, part_2, part_3 = part(0), part(1), part(2), part(3)

    @inline
    def all_parts(at, x, state):
        part_0(at, x, state)
        part_1(at, x, state)
        part_2(at, x, state)
        part_3(at, x, state)

    return all_parts


def staged(gpu: ModuleType, size: int, element: Any) -> Function:
    """What the threads of a warp have made, up to 128 elements side by side at any address, in one row or several.

    They go through shared memory, so that neighbouring threads write neighbouring elements. `at` is the address of the
    warp's first element, and as many elements on as there are threads before. `state`: the warp's shared memory, the
    thread's number in the warp, the position of its first element and the number of all of them, and those of its four
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

        return part

    def take_up(k: int) -> Function:
        @inline
        def part(at, x, state):
            stage, lane, _, length, _, _ = state
            if 32 * k + lane < length:
                store(at + 32 * k * size, load_shared(stage + (32 * k + lane) * size, element))

        return part

    put_all_down, take_all_up = _four(put_down), _four(take_up)

    @inline
    def put_row(at, x, state):
        put_all_down(at, x, state)
        synchronize_warp()
        take_all_up(at, x, state)
        synchronize_warp()

    return put_row


def strided(gpu: ModuleType) -> Function:
    """At any distance from each other; `at` is the address of the first of the four, be it inside or not.

    `state`: that distance in bytes, and those of the four columns that are inside, from the first to the last.
    """
    store = gpu.store

    def column(k: int) -> Function:
        @inline
        def part(at, x, state):
            stride, first, last = state
            if first <= k < last:
                store(at + k * stride, x[k])

        return part

    return _four(column)


def going_down(quad: Function, put_row: Function, dimension_size: int, unroll: int) -> Function:
    """``go_down(dimension, count, at, stride, noise, state)`` draws the rows of `count` dimensions.

    Their rows are `stride` bytes apart in memory. The loop is unrolled `unroll` times, so that one row's loads and
    another's arithmetic overlap.
    """

    @inline
    def draw_row(dimension, at, stride, noise, state):
        put_row(at, quad(dimension, noise), state)
        return dimension + dimension_size, at + stride

    def both(first: Function, second: Function) -> Function:
        @inline
        def draw_both(dimension, at, stride, noise, state):
            dimension, at = first(dimension, at, stride, noise, state)
            return second(dimension, at, stride, noise, state)

        return draw_both

    draw_rows = functools.reduce(both, itertools.repeat(draw_row, unroll))

    @inline
    def go_down(dimension, count, at, stride, noise, state):
        left = np.int32(count)
        while left >= unroll:
            dimension, at = draw_rows(dimension, at, stride, noise, state)
            left = np.int32(left - unroll)
        while left > 0:
            dimension, at = draw_row(dimension, at, stride, noise, state)
            left = np.int32(left - 1)

    return go_down
