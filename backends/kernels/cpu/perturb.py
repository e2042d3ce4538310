"""Normal noise added to model parameters on the CPU.

The elements of a tile are read and written once, whatever the number of rows: they stay in the first-level cache while
the noise of each row is added.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from multisample.backends.element_types import MATRIX_TYPES, ElementType
from multisample.backends.kernels.compilation import callee, inline
from multisample.backends.kernels.stream.arithmetic import fma, product
from multisample.backends.kernels.stream.rounding import NARROWING
from multisample.backends.launch import UNIT_FACTOR, Span

from .addresses import copier, numbers_at
from .fields import HALF, LAUNCH_WORDS, WORD, half, input_place, numbers_of
from .helper_threads import for_each, threads_for
from .intrinsics import stack_array
from .thread_windows import most_threads
from .tile import stream_of, tile_of

# Minimum elements of a part, and maximum parts of a call.
_PART, _MOST_PARTS = 1 << 15, 1 << 12
_WORDS, _NUMBER = len(Span._fields), int(ElementType.number)


def _part_function(dtype: str) -> Callable[..., Any]:
    """``add_part(arguments, part)``, for `for_each`.

    `arguments` are the address of the launch, the elements of a part, and the parts of one matrix of the batch.
    """
    row = MATRIX_TYPES[dtype]
    number, element, size = getattr(np, row.computing), getattr(np, row.stored), np.dtype(row.stored).itemsize
    narrow, load, tile = NARROWING[dtype], copier(dtype), tile_of(row.computing)
    words_length, layout_length, word_type = tile.words_length, tile.layout_length, tile.word_type
    lay_out, draw_row, put_normals, most_normals = tile.lay_out_along, tile.draw_row, tile.put_normals, 2 * tile.places
    weights_at, factor_at = input_place("weights", number), input_place("sigma", number)

    @inline
    def store(x, at, stride, count):
        if stride == size:
            target = numbers_at(at, count, element)
            for c in range(np.uint64(count)):
                target[c] = narrow(x[c])
        else:
            for c in range(count):
                numbers_at(at + c * stride, 1, element)[0] = narrow(x[c])

    @inline
    def factor_of(launch, word, one):
        """The factor of a span whose field `factor` is `word`."""
        if half(launch, HALF.sigma_type) == _NUMBER:
            one[0] = word
            return number(numbers_at(one.ctypes.data, 1, np.float64)[0])
        at, _ = factor_at(launch, 0, word, one)
        return numbers_at(at, 1, number)[0]

    def add_part(arguments, part):
        address, elements, parts = arguments
        launch = numbers_at(address, LAUNCH_WORDS, np.int64)
        b, part = part // parts, part % parts
        number_in, word_in = stack_array(1, number), stack_array(1, np.int64)
        at, stride = weights_at(launch, b, 0, number_in)
        weights = numbers_at(at, launch[WORD.rows], number, stride)
        has_own_keys, has_factors = half(launch, HALF.shared_noise) != 0, half(launch, HALF.sigma_type) != _NUMBER
        seed, offset, first_row, _ = numbers_of(launch, b)
        length = _WORDS * launch[WORD.spans]
        table = numbers_at(launch[WORD.matrix], length, np.int64)
        words, layout = stack_array(words_length, word_type), stack_array(layout_length, np.uint64)
        x, z = stack_array(most_normals, number), stack_array(most_normals, number)
        begin = part * elements
        last = begin + elements
        end = 0
        for k in range(0, length, _WORDS):
            source, target, first, rows, width, jump = (
                table[k] + b * table[k + 11], table[k + 1] + b * table[k + 12], table[k + 2], table[k + 3],
                table[k + 4], table[k + 5],
            )  # fmt: skip
            source_row, source_stride, target_row, target_stride = (
                table[k + 6], table[k + 7], table[k + 8], table[k + 9]
            )  # fmt: skip
            high = np.uint64(table[k + 10]) << np.uint64(32)
            place, end = max(begin - end, 0), end + rows * width
            stop = min(rows * width, rows * width - (end - last))
            if place >= stop:
                continue
            scales = has_factors or table[k + 13] != UNIT_FACTOR
            factor = factor_of(launch, table[k + 13], word_in) if scales else number(1)
            stream = stream_of(np.uint64(seed), np.uint64(offset) + high)
            while place < stop:
                run, w = place // width, place % width
                e = first + run * jump + w
                # Tiles begin where blocks begin, except the first.
                shift = e % 4
                count = min(width - w, stop - place, most_normals - shift)
                load(x, source + run * source_row + w * source_stride, source_stride, count)
                if scales:
                    for c in range(np.uint64(count)):
                        x[c] = product(factor, x[c])
                blocks = (shift + count + 3) // 4
                for r in range(weights.size):
                    row = first_row
                    if has_own_keys:
                        own_seed, own_offset, _, _ = numbers_of(launch, r)
                        stream = stream_of(np.uint64(own_seed), np.uint64(own_offset) + high)
                    else:
                        row += r
                    if has_own_keys or r == 0:
                        lay_out(layout, e // 4, blocks, blocks, stream)
                    weight = weights[r]
                    draw_row(words, layout, row, blocks, stream)
                    put_normals(z, 0, words, blocks, False, z)
                    noise = z[shift:]
                    for c in range(np.uint64(count)):
                        x[c] = fma(weight, noise[c], x[c])
                store(x, target + run * target_row + w * target_stride, target_stride, count)
                place += count

    return add_part


def perturb_function(dtype: str) -> Callable[..., Any]:
    """Noise for parameters of type `dtype`. Weights are a vector or a number of the computing type."""
    add_part = callee(_part_function(dtype), f"cpu-perturb_{dtype}_part")

    def perturb_all(address):
        launch = numbers_at(address, LAUNCH_WORDS, np.int64)
        rows, elements, batch = launch[WORD.rows], launch[WORD.columns], max(half(launch, HALF.batch), 1)
        # The parts of a matrix are few, since each searches the spans from the first one on.
        size = max(_PART, (elements + _MOST_PARTS - 1) // _MOST_PARTS)
        parts = (elements + size - 1) // size
        threads = threads_for(most_threads(batch * elements * rows), launch[WORD.threads])
        for_each(add_part, (address, size, parts), batch * parts, threads)
        return 0

    return perturb_all
