"""The elements of a parameter as spans of its memory."""

import functools
import itertools
import math
import operator
import struct
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from multisample.backends.launch import SPAN, Span

from .._checks.operands import ITEM_SIZES
from .._libraries import Operand


class Block(NamedTuple):
    """A block of an array, and its place in the whole parameter. The array may be a shard of the parameter."""

    begin: tuple[int, ...]
    """The index of its first element in the array."""
    shape: tuple[int, ...]
    first: int
    """The index of its first element in the parameter, in row-major order."""
    steps: tuple[int, ...]
    """How far neighbours along each axis are apart in the parameter."""


Shards: TypeAlias = Callable[[], list[tuple[Block, ...] | None]]
"""A function that returns the blocks that this process holds of each parameter, or None for the whole parameter. Keys
of plans compare such functions by identity, which is faster than comparing blocks."""


def steps_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """How far neighbours along each axis are apart in row-major order."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def one_of(operand: Operand, moves: bool) -> tuple[Operand, int]:
    """One array, and the step in bytes to the next array.

    With `moves`, the first axis of `operand` counts arrays. Else `operand` is the array, and the step is 0.
    """
    if not moves:
        return operand, 0
    return operand._replace(shape=operand.shape[1:], strides=operand.strides[1:]), operand.strides[0]


def spans_of(pair: tuple[tuple[Operand, int], tuple[Operand, int]], block: Block, number: int) -> list[Span]:
    """The spans of a block of the parameter with id `number`, with addresses relative to those of the arrays.

    `pair` is ``one_of`` the source, and of the target.
    """
    (source, source_step), (target, target_step) = pair
    if 0 in block.shape:
        return []
    origins = [sum(map(operator.mul, block.begin, strides)) for strides in (source.strides, target.strides)]
    axes: list[tuple[int, int, int, int]] = []
    for axis in zip(block.shape, block.steps, source.strides, target.strides, strict=True):
        length, *steps = axis
        if length == 1:
            continue
        if axes and list(axes[-1][1:]) == [length * step for step in steps]:  # Merge with the axis before.
            axes[-1] = (axes[-1][0] * length, *axis[1:])
        else:
            axes.append(axis)
    size = ITEM_SIZES[source.dtype]
    if not axes or axes[-1][1] != 1:
        axes.append((1, 1, size, size))
    *outer, (width, _, source_stride, target_stride) = axes
    # The longest outer axis becomes the rows of each span. Each index of the other outer axes is a span.
    rows, jump, source_row, target_row = (1, 0, 0, 0)
    if outer:
        rows, jump, source_row, target_row = outer.pop(max(range(len(outer)), key=lambda k: outer[k][0]))
    spans = []
    for index in itertools.product(*(range(axis[0]) for axis in outer)):
        first, source_at, target_at = (
            sum(k * axis[field] for k, axis in zip(index, outer, strict=True)) for field in (1, 2, 3)
        )
        spans.append(
            Span(
                origins[0] + source_at, origins[1] + target_at, block.first + first, rows, width, jump, source_row,
                source_stride, target_row, target_stride, number, source_step, target_step,
            )
        )  # fmt: skip
    return spans


def packer_of(spans: list[tuple[int, Span]]) -> Callable[..., bytes]:
    """``spans_at(sources, targets, factors=b"")``: packed spans, for packed addresses of all arrays.

    Calls mostly repeat their addresses. Beside each span is the index of its array, to which the span is relative.
    `factors` has the field `factor` for each array.
    """
    relative, of_span = np.array([x for _, x in spans], np.int64), np.array([k for k, _ in spans], np.intp)
    (k, (source, target, *rest)), address_of = spans[0], struct.Struct("q").unpack_from
    pack_pair, constant = struct.Struct("2q").pack, SPAN.pack(0, 0, *rest)[16:]

    def pack_one(sources: bytes, targets: bytes, factors: bytes = b"") -> bytes:
        # Results may have new addresses in each call.
        pair = pack_pair(source + address_of(sources, 8 * k)[0], target + address_of(targets, 8 * k)[0])
        return pair + constant[:-8] + factors[8 * k : 8 * k + 8] if factors else pair + constant

    def pack(sources: bytes, targets: bytes, factors: bytes = b"") -> bytes:
        table = relative.copy()
        for column, addresses in enumerate((sources, targets)):
            table[:, column] += np.frombuffer(addresses, np.int64)[of_span]
        if factors:
            table[:, -1] = np.frombuffer(factors, np.int64)[of_span]
        return bytes(table)

    return functools.lru_cache(8)(pack_one if len(spans) == 1 else pack)
