"""The block-per-dimension kernel of ``csrc/sample_kernel.cuh``, in Python for Numba to compile.

x[i, j] = mu[i] + sigma[i] z[i, j], noise made in registers, each element written once. A thread keeps four columns and
goes down the dimensions, so that what the words owe to the columns alone is made once (and with shared noise everything
is); what they owe to the dimension alone waits in shared memory, beside mu and sigma. How a call is cut into blocks and
threads: `multisample.backends.geometry`.

Words and normals are those of the cpu backend. Each combination of element type, noise, transform and stores is a
kernel of its own, put together from small functions that Numba inlines.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from .compilation import inline
from .cuda_stores import Function, aligned, going_down, shifted, staged, strided
from .geometry import CHUNK, KERNEL_STORES, MOST_THREADS, SIZES
from .intrinsics import float_bits, fma, from_float_bits, like
from .narrow import to_bfloat16, unchanged
from .normals import FLOAT64_KEY, normals_f32, normals_f64
from .sample_call import ELEMENT_TYPES
from .words import column_part, row_part, stream_key, words

__all__ = ["sample_kernel"]

# How often a loop over rows is unrolled, by how they go to memory.
_UNROLL = {"kAligned": 8, "kShifted": 6, "kStaged": 4, "kStrided": 1}
# At most so often where a row has little to do, or so much that registers run out.
_UNROLL_SHARED, _UNROLL_FLOAT64 = 2, 1
_TO_UNIT, _TO_UNIT_HALF = np.float32(2.0**-32), np.float32(2.0**-33)
_MINUS_2_LN_2, _TO_ANGLE = np.float32(float.fromhex("-0x1.62e430p+0")), np.float32(float.fromhex("0x1.921fb6p-30"))
_WARP = np.uint32(32)
_WORD = np.uint64(32)
# Shifts a product with 2^20 / x, as the geometry gives it, to a quotient.
_QUOTIENT = np.uint32(20)
_NOT_STAGED = (np.int64(0), np.int32(0), np.int32(0), np.int32(0), np.int32(0), np.int32(0))


@inline
def _keys(call):
    k0, k1 = stream_key(call.seed)
    return np.uint32(k0), np.uint32(k1)


@inline
def _offsets(call):
    return np.uint32(call.offset), np.uint32(call.offset >> _WORD)


def _element(gpu: ModuleType, dtype: str) -> Function:
    """``element(vector, k)``: element k of mu or sigma, rounded to the computing type of `dtype`."""
    load, float16_value, hidden = gpu.load, gpu.float16_value, gpu.hidden
    real = np.float64 if dtype == "float64" else np.float32
    other = np.float32 if dtype == "float64" else np.float64
    same_type, other_type, float16, bfloat16, int8, int16, int32, int64, uint8, uint16, uint32 = (
        ELEMENT_TYPES[name]
        for name in (
            real.__name__, other.__name__, "float16", "bfloat16",
            "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
        )
    )  # fmt: skip

    @inline
    def element(vector, k):
        at = vector.data + k * vector.stride
        kind = vector.type
        # By far the most frequent first, and not behind a table of jumps.
        if hidden(kind) == same_type:
            return load(at, real)
        if kind == 0:
            return real(vector.number)
        if kind == other_type:
            return real(load(at, other))
        if kind == float16:
            return real(float16_value(load(at, np.uint16)))
        if kind == bfloat16:
            return real(from_float_bits(np.int32(np.uint32(load(at, np.uint16)) << np.uint32(16))))
        if kind == int8:
            return real(load(at, np.int8))
        if kind == int16:
            return real(load(at, np.int16))
        if kind == int32:
            return real(load(at, np.int32))
        if kind == int64:
            return real(load(at, np.int64))
        if kind == uint8:
            return real(load(at, np.uint8))
        if kind == uint16:
            return real(load(at, np.uint16))
        if kind == uint32:
            return real(load(at, np.uint32))
        return real(load(at, np.uint64))

    return element


def _dimension(gpu: ModuleType, dtype: str) -> tuple[int, Function, Function]:
    """What all threads of a block need of a dimension, in shared memory, in as few loads as can be.

    Its bytes; ``write(at, row_part, mu, sigma)``; and ``read(at)``, which gives the three.
    """
    load_quad, store_quad = gpu.load_shared_quad, gpu.store_shared_quad

    if dtype != "float64":

        @inline
        def write(at, row, mu, sigma):
            store_quad(at, (row[0], row[1], np.uint32(float_bits(mu)), np.uint32(float_bits(sigma))))

        @inline
        def read(at):
            quad = load_quad(at)
            mu, sigma = from_float_bits(np.int32(quad[2])), from_float_bits(np.int32(quad[3]))
            return (quad[0], quad[1]), mu, sigma

        return 16, write, read

    @inline
    def halves(x):
        bits = np.uint64(float_bits(x))
        return np.uint32(bits), np.uint32(bits >> _WORD)

    @inline
    def joined(low, high):
        return from_float_bits(np.int64(np.uint64(high) << _WORD | np.uint64(low)))

    @inline
    def write_wide(at, row, mu, sigma):
        mu_low, mu_high = halves(mu)
        sigma_low, sigma_high = halves(sigma)
        store_quad(at, (mu_low, mu_high, sigma_low, sigma_high))
        store_quad(at + 16, (row[0], row[1], np.uint32(0), np.uint32(0)))

    @inline
    def read_wide(at):
        numbers, row = load_quad(at), load_quad(at + 16)
        return (row[0], row[1]), joined(numbers[0], numbers[1]), joined(numbers[2], numbers[3])

    return 32, write_wide, read_wide


def _noise(gpu: ModuleType, dtype: str, shared: bool, fast: bool) -> tuple[Function, Function]:
    """The noise of one group of columns, in any row.

    ``noise = prepared(group, call)``, and then ``in_row(noise, row_part)`` is the four normals.
    """
    log2, square_root, cosine, sine = gpu.log2, gpu.square_root, gpu.cosine, gpu.sine

    @inline
    def fast_radius(a):
        return square_root(log2(fma(np.float32(a), _TO_UNIT, _TO_UNIT_HALF)) * _MINUS_2_LN_2)

    @inline
    def fast_normals(w):
        # By PTX instructions that are the same on one GPU whoever compiles them.
        r, t = fast_radius(np.uint32(w[0])), fast_radius(np.uint32(w[2]))
        a, b = np.float32(np.int32(w[1])) * _TO_ANGLE, np.float32(np.int32(w[3])) * _TO_ANGLE
        return r * cosine(a), r * sine(a), t * cosine(b), t * sine(b)

    normals = fast_normals if fast else normals_f32

    @inline
    def prepared(group, call):
        k0, k1 = _keys(call)
        o0, o1 = _offsets(call)
        return column_part(group, o0, o1, k0, k1), k0, k1

    @inline
    def in_row(noise, row):
        column, k0, k1 = noise
        return normals(words(column, row, k0, k1))

    @inline
    def prepared_wide(group, call):
        k0, k1 = _keys(call)
        o0, o1 = _offsets(call)
        fine = like(k1 ^ FLOAT64_KEY, k1)
        return column_part(group, o0, o1, k0, k1), column_part(group, o0, o1, k0, fine), k0, k1, fine

    @inline
    def in_row_wide(noise, row):
        column, fine_column, k0, k1, fine = noise
        return normals_f64(words(column, row, k0, k1), words(fine_column, row, k0, fine))

    if dtype == "float64":
        prepared, in_row = prepared_wide, in_row_wide
    if not shared:
        return prepared, in_row

    @inline
    def prepared_row_0(group, call):
        k0, _ = _keys(call)
        o0, _ = _offsets(call)
        return in_row(prepared(group, call), row_part(np.uint32(0), o0, k0))

    @inline
    def in_any_row(noise, row):
        return noise

    return prepared_row_0, in_any_row


def _columns(gpu: ModuleType, size: int, way: str) -> tuple[Function, Function, Function]:
    """Which columns and rows are a thread's.

    ``place = place_of(run, geometry)``: its row of those of a pass, and its group of columns in a `run` of them.
    ``inside(place, call, geometry)``: which of the group's four columns are to be drawn, from the first to the last.
    ``columns_of(place, stages, call, geometry)``: the offset from the first row's first column to what is put, in
    bytes; whether all four columns are inside (if rows are shifted, those of all threads of the warp); and of staged
    stores the address of the warp's shared memory; where the warp's elements and the thread's begin in the pass; how
    many those of the warp are; and which columns are inside.
    """
    thread_index, hidden, from_lane, all_of_warp = gpu.thread_index, gpu.hidden, gpu.from_lane, gpu.all_of_warp
    is_shifted = way == "kShifted"

    @inline
    def place_of(run, geometry):
        # Hidden, so that what follows from it is made anew each time, and takes no registers in between.
        thread, lanes = hidden(thread_index()), geometry.lanes
        row = np.uint32(np.uint32(thread * geometry.one_by_lanes) >> _QUOTIENT)
        return np.int32(row), np.int64(run) * lanes + np.uint32(thread - row * lanes)

    @inline
    def inside(place, call, geometry):
        row, group = place
        column = 4 * group - geometry.skip
        first = np.int32(geometry.skip) if column < 0 else np.int32(0)
        last = np.int32(min(call.columns - column, 4)) if column < call.columns else first
        return first, last if row < geometry.rows_per_pass else first

    @inline
    def columns_of(place, stages, call, geometry):
        row, group = place
        first, last = inside(place, call, geometry)
        offset = row * call.row_stride + (4 * group - geometry.skip) * call.column_stride
        whole = first == 0 and last == 4
        if is_shifted:
            whole = all_of_warp(whole)
        return offset, whole, _NOT_STAGED

    @inline
    def staged_columns_of(place, stages, call, geometry):
        row, group = place
        first, last = inside(place, call, geometry)
        thread = hidden(thread_index())
        rows, columns = np.int32(geometry.rows_per_pass), call.columns
        # A row beyond the pass has no elements, and begins where they end.
        begin = row * columns + (4 * group - geometry.skip + first) if row < rows else rows * columns
        run = from_lane(np.int32(begin), 0)
        length = np.int32(from_lane(np.int32(begin + (last - first)), 31) - run)
        offset = (run + np.int64(thread % _WARP)) * size
        stage = stages + np.int64(thread // _WARP) * (128 * size)
        return offset, False, (stage, run, np.int32(begin - run), length, first, last)

    return place_of, inside, staged_columns_of if way == "kStaged" else columns_of


def _drawing(
    gpu: ModuleType,
    quad: Function,
    dimension_size: int,
    dtype: str,
    shared: bool,
    way: str,
    place_of: Function,
    inside: Function,
) -> Function:
    """``draw(noise, columns, run, chunk, rows, out, call, geometry)``.

    The rows of a `chunk`, an address in shared memory, of `rows` dimensions, of which `out` is the first in memory.
    """
    size = SIZES[dtype]
    element = {2: np.uint16, 4: np.float32, 8: np.float64}[size]
    thread_index = gpu.thread_index
    is_aligned, is_shifted = way == "kAligned", way == "kShifted"

    most = _UNROLL_FLOAT64 if dtype == "float64" else _UNROLL_SHARED if shared else max(_UNROLL.values())

    def down(put_row: Function, way: str) -> Function:
        return going_down(quad, put_row, dimension_size, min(most, _UNROLL[way]))

    down_aligned, down_strided = down(aligned(gpu), "kAligned"), down(strided(gpu), "kStrided")
    down_staged = down(staged(gpu, size, element), "kStaged")
    down_shifted_1, down_shifted_2, down_shifted_3 = (
        down(shifted(gpu, size, shift), "kShifted") for shift in (1, 2, 3)
    )

    @inline
    def draw(noise, columns, run, chunk, rows, out, call, geometry):
        offset, whole, _ = columns
        place = place_of(run, geometry)
        row, step = place[0], np.int32(geometry.rows_per_pass)
        count = rows
        if step > 1:
            count = np.int32((rows - row + step - 1) * geometry.one_by_rows >> 20) if row < rows else np.int32(0)
        dimension = chunk + np.int32(row * geometry.pitch) * dimension_size
        at, stride = out + offset, np.int64(geometry.stride) * size
        if is_aligned and whole:
            down_aligned(dimension, count, at, stride, noise, 0)
        elif is_shifted and whole:
            lane = thread_index() % _WARP
            shift = np.int32(at & (4 * size - 1)) // np.int32(size)
            quad_end = at if lane == 0 else at + (4 - shift) * size
            ends = (lane == 0, lane == 31)
            if shift == 0:
                down_aligned(dimension, count, at, stride, noise, 0)
            elif shift == 1:
                down_shifted_1(dimension, count, quad_end, stride, noise, ends)
            elif shift == 2:
                down_shifted_2(dimension, count, quad_end, stride, noise, ends)
            else:
                down_shifted_3(dimension, count, quad_end, stride, noise, ends)
        else:
            first, last = inside(place, call, geometry)
            if first < last:
                down_strided(dimension, count, at, stride, noise, (call.column_stride, first, last))

    @inline
    def draw_staged(noise, columns, run, chunk, rows, out, call, geometry):
        # All threads of a warp together. The last pass may not be full, and then ends within a warp.
        offset, _, (stage, start, position, length, first, last) = columns
        row, step = place_of(run, geometry)[0], np.int32(geometry.rows_per_pass)
        if row >= step:
            row = np.int32(0)
        lane = np.int32(thread_index() % _WARP)
        passes = np.int32(rows * geometry.one_by_rows >> 20)
        more = np.int32(rows - passes * step)
        pitch, stride = np.int32(geometry.pitch * dimension_size), np.int64(geometry.stride) * size
        at = out + offset
        down_staged(chunk + row * pitch, passes, at, stride, noise, (stage, lane, position, length, first, last))
        if more > 0:
            length = min(max(np.int32(more * call.columns - start), np.int32(0)), length)
            dimension = chunk + (row if row < more else 0) * pitch + passes * dimension_size
            at += passes * stride
            down_staged(dimension, 1, at, stride, noise, (stage, lane, position, length, first, last))

    return draw_staged if way == "kStaged" else draw


def _fetching(gpu: ModuleType, dtype: str, dimension_size: int, write_dimension: Function) -> tuple[Function, Function]:
    """The dimensions of a chunk, fetched by the threads of the block, one each.

    ``dimension = fetched(begin, first_row, count, call, geometry)`` begins to load that of the chunk that begins at row
    `begin` of a band of `count` rows. ``put(dimension, chunk, begin, first_row, count, call, geometry)`` puts it where
    all threads of the block see it, after the next `synchronize_block`: rows that one thread draws one after the other
    lie side by side.
    """
    thread_index, hidden = gpu.thread_index, gpu.hidden
    element = _element(gpu, dtype)
    zero = np.float64(0) if dtype == "float64" else np.float32(0)

    @inline
    def row_of(begin, first_row, count, geometry):
        # Hidden: see place_of.
        thread = hidden(thread_index())
        k = np.uint32(begin + thread)
        return thread < geometry.chunk and k < count, first_row + (np.int64(k) << geometry.interleave_log2)

    @inline
    def fetched(begin, first_row, count, call, geometry):
        exists, row = row_of(begin, first_row, count, geometry)
        if exists:
            return element(call.mu, row), element(call.sigma, row)
        return zero, zero

    @inline
    def put(dimension, chunk, begin, first_row, count, call, geometry):
        exists, row = row_of(begin, first_row, count, geometry)
        if exists:
            mu, sigma = dimension
            thread = hidden(thread_index())
            turn = np.uint32(np.uint32(thread * geometry.one_by_rows) >> _QUOTIENT)
            place = np.uint32(np.uint32(thread - turn * geometry.rows_per_pass) * geometry.pitch + turn)
            k0, _ = _keys(call)
            o0, _ = _offsets(call)
            part = row_part(np.uint32(call.first_row + row), o0, k0)
            write_dimension(chunk + np.int64(np.uint32(place * dimension_size)), part, mu, sigma)

    return fetched, put


def sample_kernel(gpu: ModuleType, dtype: str, shared: bool, fast_math: bool, stores: int) -> Function:
    """The kernel for such calls, ``kernel(call, geometry)``, to be compiled.

    Parameters
    ----------
    gpu : module
        `multisample.backends.cuda_intrinsics`, or another with the same names.
    dtype : str
        The element type of `out`.
    shared, fast_math : bool
        The call's; fast_math without effect on float64.
    stores : int
        The geometry's.
    """
    size, way = SIZES[dtype], KERNEL_STORES[stores]
    block_index, shared_memory, synchronize_block = gpu.block_index, gpu.shared_memory, gpu.synchronize_block
    dimension_size, write_dimension, read_dimension = _dimension(gpu, dtype)
    prepared, in_row = _noise(gpu, dtype, shared, fast_math and dtype != "float64")
    narrow = {"float16": gpu.float16_bits, "bfloat16": to_bfloat16}.get(dtype, unchanged)

    @inline
    def quad(dimension, noise):
        row, m, s = read_dimension(dimension)
        z0, z1, z2, z3 = in_row(noise, row)
        return narrow(fma(s, z0, m)), narrow(fma(s, z1, m)), narrow(fma(s, z2, m)), narrow(fma(s, z3, m))

    place_of, inside, columns_of = _columns(gpu, size, way)
    draw = _drawing(gpu, quad, dimension_size, dtype, shared, way, place_of, inside)
    fetched, put = _fetching(gpu, dtype, dimension_size, write_dimension)
    chunk_size = CHUNK * dimension_size
    chunks_size, stages_size = 2 * chunk_size, 4 * MOST_THREADS * size if way == "kStaged" else 16

    def kernel(call, geometry):
        chunks, stages = shared_memory(chunks_size), shared_memory(stages_size)
        # Row k of the band is first_row + (k << shift).
        block = block_index()
        band = np.uint32(block // geometry.column_blocks)
        shift = geometry.interleave_log2
        first_row = np.int64(band >> shift) * geometry.band_rows << shift
        first_row += np.int64(band & ((1 << shift) - 1))
        if first_row >= call.rows:
            return
        count = np.uint32(min(np.int64(geometry.band_rows), ((call.rows - first_row - 1) >> shift) + 1))
        begin, chunk = np.uint32(0), np.uint32(0)
        dimension = fetched(begin, first_row, count, call, geometry)

        run = np.uint32(np.uint32(block - band * geometry.column_blocks) * geometry.steps)
        last_run = np.uint32(run + geometry.steps - 1)
        out = call.out + first_row * call.row_stride
        place = place_of(run, geometry)
        noise = prepared(np.uint32((call.first_column >> 2) + place[1]), call)
        columns = columns_of(place, stages, call, geometry)
        put(dimension, chunks, begin, first_row, count, call, geometry)
        synchronize_block()
        while True:
            rows = np.uint32(count - begin)
            goes_on = rows > geometry.chunk
            if goes_on:
                rows = geometry.chunk
                dimension = fetched(np.uint32(begin + rows), first_row, count, call, geometry)
            draw(noise, columns, run, chunks + np.int64(chunk), np.int32(rows), out, call, geometry)
            if goes_on:
                begin = np.uint32(begin + rows)
                out += rows * (call.row_stride << shift)
                chunk = np.uint32(chunk_size - chunk)
                put(dimension, chunks + np.int64(chunk), begin, first_row, count, call, geometry)
                synchronize_block()
            elif run < last_run:
                # Where there are more columns for the block, its dimensions are only one chunk.
                run = np.uint32(run + 1)
                place = place_of(run, geometry)
                noise = prepared(np.uint32((call.first_column >> 2) + place[1]), call)
                columns = columns_of(place, stages, call, geometry)
            else:
                break

    return kernel
