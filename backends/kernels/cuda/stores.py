"""Stores of a thread's columns, one function for each store kind: ``csrc/cuda/stores.cuh``.

Each of `aligned`, `paired`, `shifted` and `strided` returns a function ``put_row(at, x, state)``. `at` is the thread's
own address, which advances with the row; `x` are the `width` elements of a group; `state` depends on the store
kind. `staged` stores several passes at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from multisample.backends.kernels.compilation import Function, inline

from .group import each, united

MOST_STORED = 16
"""Bytes of the largest store of a thread."""

# Functions that return kernel functions are cached, here and in the other modules: Numba then compiles a function that
# several kernels share once in a process.


@functools.cache
def aligned(gpu: ModuleType, size: int, width: int, at_once: int) -> Function:
    """Vectorised stores of `at_once` elements, four or all. `at` is the aligned address of the first. No `state`."""
    store_vector = gpu.store_vector

    @inline
    def put_row(at, x, state):
        store_vector(at, x)

    @inline
    def put_quads(at, x, state):
        store_vector(at, x[:4])
        store_vector(at + 4 * size, x[4:])

    return put_row if at_once == width else put_quads


@functools.cache
def of_lane_before(gpu: ModuleType, size: int) -> Function:
    """``before(x)``: the element `x` of the previous lane."""
    shuffle_up = gpu.shuffle_up

    @inline
    def before(x):
        return np.uint16(shuffle_up(np.int32(x))) if size == 2 else shuffle_up(x)

    return before


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
    """``put_sectors(at, x, omit_first)``: a lane's elements, which exceed one store. The lanes are adjacent.

    Lane pairs exchange halves, so that each store of the warp fills whole sectors. `omit_first` leaves out the first
    store.
    """
    store_vector, from_lane, thread_index = gpu.store_vector, gpu.from_lane, gpu.thread_index
    per_store, parts = MOST_STORED // size, width * size // MOST_STORED
    either = each(range(per_store), lambda e: lambda from_first, a, b: a[e] if from_first else b[e])
    exchanged = each(range(per_store), lambda e: lambda x, other: from_lane(x[e], other))

    def both(k: int) -> Function:
        first, second, end = k * per_store, (k + 1) * per_store, (k + 2) * per_store

        def put(at, x, odd, omit_first):
            low, high = x[first:second], x[second:end]
            received = exchanged(either(odd, low, high), np.int32(thread_index() % 32 ^ 1))
            if k > 0 or not omit_first:
                store_vector(at + k * MOST_STORED, either(odd, received, low))
            store_vector(at + (parts + k) * MOST_STORED, either(odd, high, received))

        return put

    put_pairs_of_parts = each(range(0, parts, 2), both)

    @inline
    def put_sectors(at, x, omit_first):
        odd = thread_index() % 2 != 0
        put_pairs_of_parts(at - (parts - 1) * MOST_STORED if odd else at, x, odd, omit_first)

    return put_sectors


@functools.cache
def shifted(gpu: ModuleType, size: int, width: int, shift: int) -> Function:
    """Stores of a whole warp in one row. The warp's first column lies `shift` elements behind an aligned address.

    `at` is where the lane's quads end; in lane 0, where its first column begins. `state`: whether the lane is the
    first, and whether it is the last. ``PutShifted`` in C++ explains the rest.
    """
    store, store_vector, before = gpu.store, gpu.store_vector, of_lane_before(gpu, size)

    def shifted_column(k: int) -> Function:
        own, of_lane = k - shift, width - shift + k
        return (lambda x: before(x[of_lane])) if k < shift else (lambda x: x[own])

    shifted_columns = each(range(width), shifted_column)
    alone = min(4, MOST_STORED // size)  # Elements between aligned addresses.

    def end(k: int) -> Function:
        # Lane 0 and lane 31 store some elements one by one: this function stores the k-th. One instruction serves both
        # lanes, where both have an element.
        in_last, is_of_first, is_of_last = width - shift + k, k < alone - shift, k < shift

        def put(at, x, first_thread, last_thread):
            element = x[k] if not is_of_last or (is_of_first and first_thread) else x[in_last]
            if (is_of_first and first_thread) | (is_of_last and last_thread):
                store(at + k * size, element)

        return put

    put_ends, behind_first = each(range(max(alone - shift, shift)), end), (width - shift) * size

    @inline
    def put_quads(at, y, first_thread):
        if not first_thread:
            store_vector(at - 4 * size, y)

    @inline
    def put_wide_quads(at, y, first_thread):
        quads_end = at + behind_first if first_thread else at
        if not first_thread:
            store_vector(at - 8 * size, y[:4])
        store_vector(quads_end - 4 * size, y[4:])

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
        put_ends(at, x, first_thread, last_thread)

    return put_row


def _each(count: int, part: Callable[[int], Function]) -> Function:
    """``part(k)`` for each k in turn. Each returns the address for the next.

    Addresses are incremental, because the optimizer would keep `count` displacements from the first address in
    registers.
    """

    def both(first: Function, second: Function) -> Function:
        @inline
        def both_parts(at, x, state):
            return second(first(at, x, state), x, state)

        return both_parts

    return functools.reduce(both, map(part, range(count)))


class Stage(NamedTuple):
    """Addresses for the staged stores of one thread. Displacements are bytes from `stages`, for the first pass."""

    stages: Any  # the block's shared memory
    own: Any  # displacements of the lane's own elements
    piece: Any  # displacement of the lane's first piece
    pieces: Any  # bit k is set if the lane's piece k lies inside the run
    to_piece: Any  # bytes from the first pass's address to the lane's first piece in the output
    end: Any  # displacement of the single element, at an end of the run, that the lane stores
    end_pass: Any  # pass of `end`; not less than `passes` if the lane has none
    to_end: Any  # bytes from the first pass's address to `end` in the output


class Staged(NamedTuple):
    """Functions that store short contiguous rows, `passes` passes together.

    In each pass, a warp's elements are one run of memory. ``PutStaged`` in C++ explains the rest.
    """

    passes: int
    warp_size: int
    """Bytes of a warp in shared memory."""
    prepared: Function
    """``stage = prepared(stages, out, run, length, position, inside, stride)``, a `Stage`.

    `stages`: the block's shared memory. `out`: the address of a pass. The warp's run has `length` elements from
    element `run` of the pass on. The lane's group begins at element `position` of the run; `inside` is the range of its
    columns inside the matrix. Passes are `stride` elements apart.
    """
    put: tuple[Function, ...]
    """``put[k](x, stage)`` puts the elements `x` of the lane's group in pass k into shared memory."""
    store_one: Function
    store_all: Function
    """``store_one(out, stride, stage)`` stores one pass at `out`; `store_all` stores all, `stride` bytes apart."""


class _StageSizes(NamedTuple):
    """Sizes of staged stores."""

    piece: int  # elements of a piece
    pieces: int  # pieces of a lane
    outside: int  # elements of leading padding and of the run; a place for each lane's unused elements follows
    pass_size: int  # bytes of a pass in shared memory
    pieces_apart: int  # bytes between the pieces of a lane
    warp_size: int  # bytes of a warp in shared memory


def _stage_sizes(size: int, width: int, passes: int) -> _StageSizes:
    piece = min(4, MOST_STORED // size)
    pieces = width // piece
    outside = (32 * pieces + 1) * piece
    pass_size = (outside + 32) * size
    return _StageSizes(piece, pieces, outside, pass_size, 32 * piece * size, passes * pass_size)


def _stage_preparing(gpu: ModuleType, size: int, width: int, passes: int) -> Function:
    """`Staged.prepared`."""
    thread_index, opaque = gpu.thread_index, gpu.opaque
    piece, pieces, outside, pass_size, _, warp_size = _stage_sizes(size, width, passes)
    # Maximum elements at both ends of a run, half of them at each.
    ends, half = 2 * (piece - 1), piece - 1

    def own_of(k: int) -> Function:
        def own(stage, position, inside):
            first, last = inside
            if first <= k < last:
                return opaque(np.uint32(stage + (position + k - first) * size))
            return opaque(np.uint32(stage + np.int32(outside + thread_index() % 32) * size))

        return own

    own_elements = each(range(width), own_of)

    @inline
    def is_whole(k, shift, length):
        return k * piece >= shift and (k + 1) * piece <= shift + length

    def bit_of(k: int) -> Function:
        bit, nothing = np.uint32(1 << k), np.uint32(0)
        return lambda lane, shift, length: bit if is_whole(lane + 32 * k, shift, length) else nothing

    bits_of_pieces, all_bits = each(range(pieces), bit_of), united(pieces)

    @inline
    def prepared(stages, out, run, length, position, inside, stride):
        thread = opaque(thread_index())
        lane, begin_of_warp = np.int32(thread % 32), np.int32(thread // 32) * np.int32(warp_size)
        shift = np.int32((out // size + run) & (piece - 1))
        own = own_elements(begin_of_warp, np.int32(shift + position), inside)
        has_pieces = all_bits(bits_of_pieces(lane, shift, length))
        # The first elements of the run, then the last ones.
        n = np.int32(lane % ends)
        end = shift + (n if n < half else length - 1 - (n - half))
        exists = n < length and not is_whole(end // piece, shift, length)
        end_pass = np.int32(lane // ends) if exists else np.int32(passes)
        return Stage(
            stages,
            own,
            opaque(np.uint32(begin_of_warp + lane * (piece * size))),
            opaque(has_pieces),
            (np.int64(run) + lane * piece - shift) * size,
            opaque(np.uint32(begin_of_warp + end_pass * pass_size + end * size)),
            opaque(np.uint32(end_pass)),
            (np.int64(end_pass) * stride + run + end - shift) * size,
        )

    return prepared


def _stage_putting(gpu: ModuleType, width: int, begin: int) -> Function:
    """`Staged.put` for the pass that begins `begin` bytes behind the first."""
    store_shared = gpu.store_shared

    def put_element(k: int) -> Function:
        @inline
        def put(at, x, stage):
            store_shared(at + np.int64(stage.own[k]), x[k])
            return at

        return put

    put_all = _each(width, put_element)

    @inline
    def put(x, stage):
        put_all(stage.stages + begin, x, stage)

    return put


def _stage_storing(gpu: ModuleType, size: int, width: int, passes: int, count: int) -> Function:
    """`Staged.store_one` or `Staged.store_all`: the stores of `count` of the passes."""
    synchronize_warp, store, store_vector = gpu.synchronize_warp, gpu.store, gpu.store_vector
    load_shared, load_shared_quad = gpu.load_shared, gpu.load_shared_quad
    _, pieces, _, pass_size, pieces_apart, _ = _stage_sizes(size, width, passes)
    element = {2: np.uint16, 4: np.float32, 8: np.float64}[size]

    @inline
    def copy(to, begin):
        store_vector(to, load_shared_quad(begin))

    @inline
    def copy_narrow(to, begin):
        store(to, load_shared(begin, np.uint64))

    copy_piece = copy_narrow if size == 2 else copy

    def piece_of(k: int) -> Function:
        def piece_of_pass(index: int) -> Function:
            begin = index * pass_size + k * pieces_apart

            @inline
            def part(at, stride, stage):
                copy_piece(at, stage.stages + np.int64(stage.piece) + begin)
                return at + stride

            return part

        of_passes = _each(count, piece_of_pass)

        @inline
        def part(out, stride, stage):
            if stage.pieces >> np.uint32(k) & np.uint32(1) != 0:
                of_passes(out + (stage.to_piece + k * pieces_apart), stride, stage)
            return out

        return part

    all_pieces = _each(pieces, piece_of)

    @inline
    def store_passes(out, stride, stage):
        synchronize_warp()
        all_pieces(out, stride, stage)
        if stage.end_pass < np.uint32(count):
            store(out + stage.to_end, load_shared(stage.stages + np.int64(stage.end), element))
        synchronize_warp()

    return store_passes


@functools.cache
def staged(gpu: ModuleType, size: int, width: int, passes: int) -> Staged:
    """The stores of groups of `width` elements of `size` bytes."""
    sizes = _stage_sizes(size, width, passes)
    return Staged(
        passes,
        sizes.warp_size,
        _stage_preparing(gpu, size, width, passes),
        tuple(_stage_putting(gpu, width, index * sizes.pass_size) for index in range(passes)),
        *(_stage_storing(gpu, size, width, passes, count) for count in (1, passes)),
    )


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


@functools.cache
def copying(gpu: ModuleType, piece_size: int, pieces_of_thread: int, pieces_apart: int) -> Function:
    """``copy_pieces(source, to, left)`` copies a thread's pieces of a pass from shared memory.

    The pass has `left` bytes from the thread's first piece on.
    """
    load_shared, store = gpu.load_shared, gpu.store
    load_piece, store_piece = gpu.load_shared_quad, gpu.store_vector

    @inline
    def load_half(at):
        return load_shared(at, np.uint64)

    if piece_size == 8:
        load_piece, store_piece = load_half, store

    def copied(j: int) -> Function:
        def copy(source, to, left):
            if left > j * pieces_apart:
                store_piece(to + j * pieces_apart, load_piece(source + j * pieces_apart))

        return copy

    return each(range(pieces_of_thread), copied)
