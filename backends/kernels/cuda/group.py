"""The elements of one dimension in one group of columns, the unit that a thread draws: ``csrc/cuda/group.cuh``.

A chunk of column parts, or of dimensions, is in shared memory. One thread computes each entry.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from multisample.backends.element_types import MATRIX_TYPES, ElementType
from multisample.backends.kernels.compilation import Function, inline
from multisample.backends.kernels.stream.arithmetic import float_bits, fma, from_float_bits, like
from multisample.backends.kernels.stream.normals import FLOAT64_KEY, normals_f32, normals_f64
from multisample.backends.kernels.stream.rounding import unchanged
from multisample.backends.kernels.stream.words import column_part, row_part, stream_key, words
from multisample.backends.launch import Launch, WordFormat

from .geometry import Geometry
from .kernel_choice import ANTITHETIC_WIDTH, WIDTH

_TO_UNIT, _TO_UNIT_HALF = np.float32(2.0**-32), np.float32(2.0**-33)
_MINUS_2_LN_2, _TO_ANGLE = np.float32(float.fromhex("-0x1.62e430p+0")), np.float32(float.fromhex("0x1.921fb6p-30"))
_WORD = np.uint64(32)
# The right shift of a quotient: index / x is index * ceil(2^20 / x) >> 20. The geometry has the factor.
_QUOTIENT = np.uint32(20)


# The variables of generated functions.
_SCOPE: dict[str, Any] = {}


def each(indices: Iterable[int], part: Callable[[int], Function]) -> Function:
    """``every(*arguments)``: the tuple of ``part(k)(*arguments)`` for each k of `indices`, computed in this order.

    `part` returns functions to be compiled. They know k, so that the compiler sees no loop.
    """
    parts = {f"part_{k}": inline(part(k)) for k in indices}
    results = "".join(f"{name}(*arguments), " for name in parts)
    exec(f"def made({', '.join(parts)}):\n    return lambda *arguments: ({results})", _SCOPE)
    return inline(_SCOPE["made"](**parts))


def united(count: int) -> Function:
    """``bits_of(x)``: the bitwise or of the `count` elements of the tuple `x`."""
    if count == 1:
        return inline(lambda x: x[0])
    before, last = united(count - 1), count - 1
    return inline(lambda x: np.uint32(before(x) | x[last]))


def chosen(indices: Iterable[int], part: Callable[[int], Function]) -> Function:
    """``one(k, *arguments)`` is ``part(k)(*arguments)``. Any other k runs the last of `indices`."""
    first, *others = indices
    of_first = inline(part(first))
    if not others:
        return inline(lambda k, *arguments: of_first(*arguments))
    of_others = chosen(others, part)
    return inline(lambda k, *arguments: of_first(*arguments) if k == first else of_others(k, *arguments))


def group_width(antithetic: bool) -> int:
    """Columns of a group."""
    return ANTITHETIC_WIDTH if antithetic else WIDTH


@inline
def keys_of(call):
    """Both key words of the call's stream."""
    k0, k1 = stream_key(call.seed)
    return np.uint32(k0), np.uint32(k1)


@functools.cache
def offset_of(gpu: ModuleType) -> Function:
    """``offset_of_call(call)``: the call's offset.

    `advance_kernel` is ordered after the kernel, so the offset may be read again at any time and needs no register.
    """
    load = gpu.load

    @inline
    def offset_of_call(call):
        return call.offset if call.offset_at == 0 else load(call.offset_at, np.uint64)

    return offset_of_call


@functools.cache
def matrix_with_values(gpu: ModuleType) -> Function:
    """``matrix_of(call, b)``: the launch of matrix `b` of a batch, with every word read from memory."""
    load, nowhere, word = gpu.load, np.int64(0), word_in_memory(gpu)

    @inline
    def number(value, at):
        return np.int64(np.uint64(value) if at == 0 else load(at, np.uint64))

    replaced = replacing(
        Launch, "mu", "sigma", "matrix", "seed", "offset", "first_row", "first_column", "seed_at", "offset_at",
        "first_row_at", "first_column_at",
    )  # fmt: skip

    @inline
    def matrix_of(call, b):
        in_origin = b * call.origin_step
        return replaced(
            call, call.mu + b * call.mu_step, call.sigma + b * call.sigma_step, call.matrix + b * call.matrix_step,
            word(call.seed, call.seed_at + b * call.seed_step, call.word_formats & np.uint32(255)),
            word(call.offset, call.offset_at + b * call.offset_step, call.word_formats >> np.uint32(8)),
            number(call.first_row, call.first_row_at + in_origin),
            number(call.first_column, call.first_column_at + in_origin), nowhere, nowhere, nowhere, nowhere,
        )  # fmt: skip

    return matrix_of


@functools.cache
def word_in_memory(gpu: ModuleType) -> Function:
    """``word_of(value, at, form)``: the word at an address, in a `WordFormat`; `value` if the address is 0."""
    load = gpu.load
    whole, high_first, bits_32, bits_16, _ = map(np.uint32, WordFormat)

    @inline
    def word(value, at, form):
        if at == 0:
            return np.uint64(value)
        if form == whole:
            return load(at, np.uint64)
        if form == high_first:
            return np.uint64(load(at, np.uint32)) << _WORD | np.uint64(load(at + 4, np.uint32))
        if form == bits_32:
            return np.uint64(load(at, np.uint32))
        if form == bits_16:
            return np.uint64(load(at, np.uint16))
        return np.uint64(load(at, np.uint8))

    return word


def replacing(kind: type[NamedTuple], *names: str) -> Function:
    """``replaced(old, *values)``: the named tuple `old` with other values of the fields `names`."""
    fields = ", ".join(name if name in names else f"old.{name}" for name in kind._fields)
    scope: dict[str, Any] = {"kind": kind}
    # Numba knows neither `_replace` nor keywords from a dictionary.
    exec(f"def replaced(old, {', '.join(names)}):\n    return kind({fields})", scope)
    return inline(scope["replaced"])


def reading_origin(gpu: ModuleType, by_value: Function, antithetic: bool, batched: bool) -> Function:
    """A kernel that loads seed, offset and window, then runs `by_value`."""
    run, width, batch_index = inline(by_value), group_width(antithetic), gpu.batch_index
    matrix_of, resolved_geometry = matrix_with_values(gpu), replacing(Geometry, "skip")

    def kernel(call, geometry):
        matrix = matrix_of(call, np.int64(batch_index() if batched else 0))
        run(matrix, resolved_geometry(geometry, np.uint32(matrix.first_column % width)))

    return kernel


class Vector(NamedTuple):
    """An input: the address of its elements, or the bits of one number, the stride in bytes, and the type."""

    input: int
    stride: int
    type: int


@inline
def mu_of(call):
    """The input `mu`."""
    return Vector(call.mu, call.mu_stride, call.mu_type)


@inline
def sigma_of(call):
    """The input `sigma`."""
    return Vector(call.sigma, call.sigma_stride, call.sigma_type)


def computing_type(dtype: str) -> tuple[Any, int]:
    """The computing type of `dtype`, and its number in `ElementType`."""
    real = getattr(np, MATRIX_TYPES[dtype].computing)
    return real, int(ElementType[real.__name__])


@functools.cache
def element(gpu: ModuleType, dtype: str) -> Function:
    """``element_of(vector, k)``: element k of mu or sigma, rounded to the computing type of `dtype`."""
    load, opaque = gpu.load, gpu.opaque
    real, same_type = computing_type(dtype)

    def reading(kind: int) -> Function:
        name = ElementType(kind).name
        row, widen = MATRIX_TYPES.get(name), gpu.WIDENING.get(name, unchanged)
        stored = getattr(np, row.stored if row else name)
        return lambda at: real(widen(load(at, stored)))

    read_other = chosen([int(kind) for kind in ElementType if kind not in (ElementType.number, same_type)], reading)

    @inline
    def element_of(vector, k):
        at = vector.input + k * vector.stride
        kind = vector.type
        # The usual type comes first, and avoids the jump table.
        if opaque(kind) == same_type:
            return load(at, real)
        if kind == 0:
            return real(from_float_bits(vector.input))
        return read_other(kind, at)

    return element_of


@inline
def _words_of(x):
    return (np.uint32(float_bits(x)),)


@inline
def _number_of(w):
    return from_float_bits(np.int32(w[0]))


@inline
def _words_of_wide(x):
    bits = np.uint64(float_bits(x))
    return np.uint32(bits), np.uint32(bits >> _WORD)


@inline
def _wide_number_of(w):
    return from_float_bits(np.int64(np.uint64(w[1]) << _WORD | np.uint64(w[0])))


def packing(dtype: str) -> tuple[int, Function, Function]:
    """A number of the computing type of `dtype` as 32-bit words.

    Returns the number of words of a number, ``words_of(x)``, and its inverse ``number_of(words)``.
    """
    return (2, _words_of_wide, _wide_number_of) if dtype == "float64" else (1, _words_of, _number_of)


@functools.cache
def memory_of(gpu: ModuleType, quads: int) -> tuple[Function, Function]:
    """``write(at, words)`` and ``read(at)``: one or two quads of words in shared memory, with one access for each."""
    load_quad = gpu.load_shared_quad
    read = inline(lambda at: load_quad(at) + load_quad(at + 16)) if quads == 2 else load_quad
    return gpu.store_shared_vector, read


@functools.cache
def four_numbers(gpu: ModuleType, dtype: str) -> tuple[int, Function, Function]:
    """Four numbers in shared memory: their size in bytes, ``write(at, x)`` and ``read(at)``."""
    one, words_of, number_of = packing(dtype)
    write_words, read_words = memory_of(gpu, one)

    @inline
    def write(at, x):
        write_words(at, words_of(x[0]) + words_of(x[1]) + words_of(x[2]) + words_of(x[3]))

    def number(k: int) -> Function:
        begin, end = k * one, (k + 1) * one
        return lambda w: number_of(w[begin:end])

    numbers = each(range(4), number)
    return 16 * one, write, inline(lambda at: numbers(read_words(at)))


class Noise(NamedTuple):
    """The part of a group's noise that depends on its columns alone; with shared noise, its four normals."""

    prepared: Function
    """``columns_noise = prepared(group, call)`` computes that part."""
    in_row: Function
    """``in_row(columns_noise, row_part, keys)`` returns the four normals of a row."""
    size: int
    """Bytes in shared memory."""
    write: Function
    """``write(at, columns_noise)`` stores that part in shared memory."""
    read: Function
    """``columns_noise = read(at)``"""


@functools.cache
def noise(gpu: ModuleType, dtype: str, shared_noise: bool, fast: bool) -> Noise:
    """The noise of results of type `dtype`."""
    log2, square_root, cosine, sine = gpu.log2, gpu.square_root, gpu.cosine, gpu.sine
    offset_of_call = offset_of(gpu)

    @inline
    def fast_radius(a):
        return square_root(log2(fma(np.float32(a), _TO_UNIT, _TO_UNIT_HALF)) * _MINUS_2_LN_2)

    @inline
    def fast_normals(w):
        # PTX instructions: every compiler gives the same bits on one GPU model.
        r, t = fast_radius(np.uint32(w[0])), fast_radius(np.uint32(w[2]))
        a, b = np.float32(np.int32(w[1])) * _TO_ANGLE, np.float32(np.int32(w[3])) * _TO_ANGLE
        return r * cosine(a), r * sine(a), t * cosine(b), t * sine(b)

    normals = fast_normals if fast else normals_f32

    @inline
    def part(group, call, k1):
        offset = offset_of_call(call)
        return column_part(group, np.uint32(offset), np.uint32(offset >> _WORD), keys_of(call)[0], k1)

    @inline
    def prepared(group, call):
        return part(group, call, keys_of(call)[1])

    @inline
    def in_row(columns_noise, row, keys):
        return normals(words(columns_noise, row, keys[0], keys[1]))

    @inline
    def fine_key(keys):
        return like(keys[1] ^ FLOAT64_KEY, keys[1])

    @inline
    def prepared_wide(group, call):
        keys = keys_of(call)
        return part(group, call, keys[1]) + part(group, call, fine_key(keys))

    @inline
    def in_row_wide(columns_noise, row, keys):
        coarse = words(columns_noise[:4], row, keys[0], keys[1])
        return normals_f64(coarse, words(columns_noise[4:], row, keys[0], fine_key(keys)))

    if dtype == "float64":
        prepared, in_row = prepared_wide, in_row_wide
    size, write_normals, read_normals = four_numbers(gpu, dtype)
    if not shared_noise:
        return Noise(prepared, in_row, size, *memory_of(gpu, packing(dtype)[0]))

    @inline
    def prepared_row_0(group, call):
        keys = keys_of(call)
        row = row_part(np.uint32(0), np.uint32(offset_of_call(call)), keys[0])
        return in_row(prepared(group, call), row, keys)

    @inline
    def in_any_row(columns_noise, row, keys):
        return columns_noise

    return Noise(prepared_row_0, in_any_row, size, write_normals, read_normals)


@functools.cache
def scaled(gpu: ModuleType, dtype: str, antithetic: bool) -> Function:
    """``elements(mu, sigma, z)``: the elements of a group, from its four normals."""
    narrow = gpu.NARROWING[dtype]

    def element_of_pair(c: int) -> Function:
        k, mirrored = c // 2, c % 2 == 1
        return lambda m, s, z: narrow(fma(-s if mirrored else s, z[k], m))

    if antithetic:
        return each(range(8), element_of_pair)
    return each(range(4), lambda k: lambda m, s, z: narrow(fma(s, z[k], m)))


@functools.cache
def place(gpu: ModuleType) -> Function:
    """``place_of(tile, geometry)``: the thread's row of a pass, and its group of columns in tile `tile`."""
    thread_index, opaque = gpu.thread_index, gpu.opaque

    @inline
    def place_of(tile, geometry):
        # With opaque(), the optimizer recomputes the place from the thread's index and keeps it in no register.
        thread, lanes = opaque(thread_index()), geometry.groups_per_pass
        row = np.uint32(np.uint32(thread * geometry.one_by_groups) >> _QUOTIENT)
        return np.int32(row), np.int64(tile) * lanes + np.uint32(thread - row * lanes)

    return place_of


@functools.cache
def dimension_place(gpu: ModuleType) -> Function:
    """``dimension_place_of(geometry)``: the pass of a chunk, and the row of that pass, that the thread loads."""
    thread_index, opaque = gpu.thread_index, gpu.opaque

    @inline
    def dimension_place_of(geometry):
        # Opaque: see `place`.
        thread = opaque(thread_index())
        pass_of_chunk = np.uint32(np.uint32(thread * geometry.one_by_rows) >> _QUOTIENT)
        return pass_of_chunk, np.uint32(thread - pass_of_chunk * geometry.rows_per_pass)

    return dimension_place_of


@inline
def inside(width, place, call, geometry):
    """The range of the group's columns inside the matrix. A row beyond the pass has an empty range."""
    row, group = place
    column = width * group - geometry.skip
    first = np.int32(geometry.skip) if column < 0 else np.int32(0)
    last = np.int32(min(call.columns - column, width)) if column < call.columns else first
    return first, last if row < geometry.rows_per_pass else first
