"""The kernel where dimensions lie side by side in memory, as in ``csrc/transposed.cuh``.

As with layout "nd": neighbouring threads write neighbouring dimensions. Dimensions and columns change places: a thread
keeps its dimension, mu and sigma, and goes along the columns; what the words owe to those alone (with shared noise, all
the noise) waits in shared memory.
"""

from __future__ import annotations

import functools
from types import ModuleType

import numpy as np

from .compilation import inline
from .cuda_group import element, group_width, keys_of, memory_of, noise, offset_of, packing, places, scaled
from .cuda_stores import Function, apart, going_down, strided
from .geometry import CHUNK, SIZES
from .words import row_part

__all__ = ["transposed_kernel"]


@functools.cache
def _own(gpu: ModuleType, dtype: str) -> Function:
    """``own_of(place, call, geometry)``.

    The dimension of a thread, if there is one, as `going_down` takes it: what its words owe to it alone, mu, sigma, and
    the keys.
    """
    element_of, offset_of_call = element(gpu, dtype), offset_of(gpu)
    zero = np.float64(0) if dtype == "float64" else np.float32(0)

    @inline
    def own_of(place, call, geometry):
        turn, row = place
        keys, part, mu, sigma = keys_of(call), (np.uint32(0), np.uint32(0)), zero, zero
        if turn < geometry.rows_per_pass and row < call.rows:
            mu, sigma = element_of(call.mu, row), element_of(call.sigma, row)
            part = row_part(np.uint32(call.first_row + row), np.uint32(offset_of_call(call)), keys[0])
        return part, mu, sigma, keys

    return own_of


def _drawing(
    gpu: ModuleType, group: Function, noise_size: int, dtype: str, shared: bool, antithetic: bool, place_of: Function
) -> Function:
    """``draw(own, run, chunk, first, count, call, geometry)``.

    The thread's dimension in a `chunk`, an address in shared memory, of `count` groups of columns; the first of them is
    number `first` of the call's.
    """
    size, width = SIZES[dtype], group_width(antithetic)
    go_down = going_down(group, apart(gpu, width), noise_size, "kTransposed", dtype, shared, antithetic)
    put_inside = strided(gpu, width)

    @inline
    def draw(own, run, chunk, first, count, call, geometry):
        turn, row = place_of(run, geometry)
        step = np.int32(geometry.rows_per_pass)
        if turn >= step or turn >= count or row >= call.rows:
            return
        turns = count
        if step > 1:
            turns = np.int32((count - turn + step - 1) * geometry.one_by_rows >> 20)
        noises = chunk + np.int32(turn * geometry.pitch) * noise_size
        column, columns = width * (np.int64(first) + turn) - geometry.skip, np.int64(width * step)
        at, stride = call.out + row * size + column * call.column_stride, np.int64(geometry.stride) * size
        # Only the first group of all and the last may be cut; they come first, so that nothing of them is kept.
        begin = np.int32(column < 0)
        end = np.int32(turns - (column + (turns - 1) * columns + width > call.columns))
        k = np.int32(0) if begin > 0 else end
        while k < turns:
            start = column + k * columns
            inside = np.int32(geometry.skip) if start < 0 else np.int32(0), np.int32(min(call.columns - start, width))
            put_inside(at + k * stride, group(noises + k * noise_size, own), (call.column_stride, *inside))
            k = max(end, np.int32(k + 1))
        go_down(noises + begin * noise_size, end - begin, at + begin * stride, stride, own, call.column_stride)

    return draw


def transposed_kernel(gpu: ModuleType, dtype: str, shared: bool, antithetic: bool, fast: bool) -> Function:
    """``kernel(call, geometry)``: see `multisample.backends.cuda_kernel.sample_kernel`."""
    width = group_width(antithetic)
    thread_index, block_index, hidden = gpu.thread_index, gpu.block_index, gpu.hidden
    shared_memory, synchronize_block = gpu.shared_memory, gpu.synchronize_block
    (prepared, in_row), (pack, unpack) = noise(gpu, dtype, shared, fast)
    elements, own_of = scaled(gpu, dtype, antithetic), _own(gpu, dtype)
    quads, _, _ = packing(dtype)
    write_words, read_words = memory_of(gpu, quads)
    noise_size = 16 * quads
    chunk_size, chunks_size = CHUNK * noise_size, 2 * CHUNK * noise_size
    place_of, slot_of = places(gpu)

    @inline
    def group(slot, own):
        part, mu, sigma, keys = own
        return elements(mu, sigma, in_row(unpack(read_words(slot)), part, keys))

    draw = _drawing(gpu, group, noise_size, dtype, shared, antithetic, place_of)

    @inline
    def make(chunk, first, count, call, geometry):
        # Each thread what one of these groups owes to its columns, where all threads of the block see it after the next
        # synchronize_block.
        thread = hidden(thread_index())
        if thread < geometry.chunk and thread < count:
            made = prepared(np.uint32(call.first_column // width + first + thread), call)
            write_words(chunk + np.int64(np.uint32(slot_of(geometry) * noise_size)), pack(made))

    def kernel(call, geometry):
        chunks = shared_memory(chunks_size)
        block = block_index()
        band = np.uint32(block // geometry.column_blocks)
        before, groups = np.int64(band) * geometry.band_rows, (geometry.skip + call.columns + width - 1) // width
        first, count = np.uint32(before), np.uint32(min(np.int64(geometry.band_rows), groups - before))
        run = np.uint32(np.uint32(block - band * geometry.column_blocks) * geometry.steps)
        last_run, chunk = np.uint32(run + geometry.steps - 1), np.uint32(0)
        own = own_of(place_of(run, geometry), call, geometry)
        make(chunks, first, count, call, geometry)
        synchronize_block()
        while True:
            goes_on = count > geometry.chunk
            draw(own, run, chunks + np.int64(chunk), first, np.int32(min(count, geometry.chunk)), call, geometry)
            if goes_on:
                first, count = np.uint32(first + geometry.chunk), np.uint32(count - geometry.chunk)
                chunk = np.uint32(chunk_size - chunk)
                make(chunks + np.int64(chunk), first, count, call, geometry)
                synchronize_block()
            elif run < last_run:
                # Where there are more dimensions for the block, its groups are only one chunk.
                run = np.uint32(run + 1)
                own = own_of(place_of(run, geometry), call, geometry)
            else:
                break

    return kernel
