"""Overlap of parameters in memory, within an array and between arrays."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .._checks.operands import extent, item_size
from .._libraries import Operand


def overlaps_itself(operand: Operand) -> bool:
    """Whether two elements may share memory: a stride is smaller than the extent of the axes with smaller strides."""
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
