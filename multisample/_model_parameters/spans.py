"""The memory of parameters: the elements of an array as spans, and arrays that share memory."""

from __future__ import annotations

import itertools
import math
import operator
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from multisample.backends.launch import Span

from .._checks.operands import extent, item_size
from .._libraries import Operand

__all__ = ["Block", "overlapping", "overlaps_itself", "spans_of", "steps_of", "whole"]


class Block(NamedTuple):
    """A block of an array, and its place in the parameter, of which the array may hold a part."""

    begin: tuple[int, ...]
    """The index of its first element in the array."""
    shape: tuple[int, ...]
    first: int
    """The index of its first element in the parameter, in row-major order."""
    steps: tuple[int, ...]
    """How far neighbours along each axis are apart in the parameter."""


def steps_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """How far neighbours along each axis are apart in row-major order."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def whole(shape: tuple[int, ...]) -> Block:
    """The block that is the whole parameter."""
    return Block((0,) * len(shape), shape, 0, steps_of(shape))


def spans_of(source: Operand, target: Operand, block: Block, number: int) -> list[Span]:
    """The spans of a block of the parameter with id `number`, with addresses relative to those of the arrays."""
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
    size = item_size(source.dtype)
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
                source_stride, target_row, target_stride, number,
            )
        )  # fmt: skip
    return spans


def overlaps_itself(operand: Operand) -> bool:
    """Whether elements of an array may share memory: strides under which no axis skips the axes within it."""
    end = item_size(operand.dtype)
    if 0 in operand.shape:
        return False
    for stride, length in sorted((abs(s), n) for s, n in zip(operand.strides, operand.shape, strict=True) if n > 1):
        if stride < end:
            return True
        end += stride * (length - 1)
    return False


def overlapping(addresses: Sequence[int], operands: Sequence[Operand]) -> Iterator[tuple[int, int]]:
    """All pairs of arrays that share memory."""
    ends = []
    for k, (address, operand) in enumerate(zip(addresses, operands, strict=True)):
        if 0 not in operand.shape:
            low, high = extent(operand)
            ends.append((address + low, address + high, k))
    within: list[tuple[int, int]] = []
    for low, high, k in sorted(ends):
        within = [(end, j) for end, j in within if end > low]
        for _, j in within:
            if _share_memory(addresses[j], operands[j], addresses[k], operands[k]):
                yield min(j, k), max(j, k)
        within.append((high, k))


_MOST_WORK: Any = 10**6


def _share_memory(address: int, operand: Operand, other_address: int, other: Operand) -> bool:
    """Whether two arrays have a byte in common. Nothing is read: the arrays may be on a device."""
    try:
        return bool(np.shares_memory(_at(address, operand), _at(other_address, other), max_work=_MOST_WORK))
    except RuntimeError:  # NumPy has given up.
        return True


def _at(address: int, operand: Operand) -> Any:
    interface = {
        "version": 3, "data": (address, True), "shape": operand.shape, "strides": operand.strides,
        "typestr": f"|V{item_size(operand.dtype)}",
    }  # fmt: skip
    return np.asarray(types.SimpleNamespace(__array_interface__=interface))
