"""Ties: parameters that share all their memory. Arrays that overlap in any other way are refused."""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from multisample.backends.contract import HostArray

from .._arguments import DTYPES
from .._checks.operands import check_alignment, extent, item_size
from .._libraries import Library, Operand
from .request import Structure, label
from .spans import steps_of

MOST_ELEMENTS = 2**34


class Memory(NamedTuple):
    """The arrays that a call reads and writes. Without `out`, targets are new arrays."""

    sources: list[Operand]
    targets: list[Operand]


class Ties(NamedTuple):
    """Which parameters share memory."""

    owners: list[int]
    """For each parameter, the index of the parameter that owns its memory: itself, or the first tied parameter."""
    written: list[int]
    """The parameters whose results are written."""


def memory_of(parameters: Structure, out: Structure | None, library: Library) -> Memory:
    """The arrays of a call; TypeError or ValueError if `perturb` cannot read or write one."""
    sources = [_described(label("parameters", parameters, k), library, x) for k, x in enumerate(parameters.arrays)]
    if out is None:
        strides = [tuple(item_size(x.dtype) * step for step in steps_of(x.shape)) for x in sources]
        return Memory(sources, [x._replace(strides=own, read=None) for x, own in zip(sources, strides, strict=True)])
    targets = []
    for k, array in enumerate(out.arrays):
        name = label("out", out, k)
        library.check_target(array)
        try:
            target = library.describe("out", array)
        except (TypeError, ValueError) as error:
            raise type(error)(str(error).replace("out:", f"{name}:", 1)) from None
        for what in ("shape", "dtype", "device"):
            expected, found = getattr(sources[k], what), getattr(target, what)
            if expected != found:
                raise ValueError(
                    f"{name}: expected {what} {expected}, as {label('parameters', parameters, k)} has, got {found}"
                )
        size = item_size(target.dtype)
        if any(stride % size for stride in target.strides):
            raise ValueError(f"{name}: expected strides of whole elements, {size} bytes, got {target.strides}")
        if overlaps_itself(target):
            raise ValueError(f"{name}: expected elements that do not overlap, got strides {target.strides}")
        targets.append(target)
    return Memory(sources, targets)


def _described(name: str, library: Library, array: Any) -> Operand:
    try:
        operand = library.describe(name, array)
    except TypeError as error:
        raise TypeError(str(error).replace(" or an integer type", "")) from None
    if operand.dtype not in DTYPES:
        raise TypeError(f"{name}: expected elements of type {', '.join(DTYPES)}, got {operand.dtype}")
    if math.prod(operand.shape) > MOST_ELEMENTS:
        raise ValueError(f"{name}: expected at most 2**34 elements, got shape {operand.shape}")
    return operand


def ties_of(
    parameters: Structure, out: Structure | None, memory: Memory, sources: list[int], targets: list[int]
) -> Ties:  # fmt: skip
    """The parameters that share memory, from addresses; ValueError if arrays overlap or are misaligned.

    `parameters` and `out` only give names: plans pass them without arrays.
    """
    count = len(sources)
    names = [label("parameters", parameters, k) for k in range(count)]
    if out is not None:
        names += [label("out", out, k) for k in range(count)]
    places, operands = [*sources, *targets], [*memory.sources, *(memory.targets if targets else ())]
    for name, operand, address in zip(names, operands, places, strict=True):
        if not address and 0 not in operand.shape:
            raise ValueError(f"{name}: expected elements in memory, got an array without memory")
        check_alignment(name, operand, address)
    # Tied parameters have the same elements. The first parameter in the order of names owns them.
    order = range(count) if parameters.names is None else sorted(range(count), key=parameters.names.__getitem__)
    elements = [(address, x.shape, x.strides, x.dtype) for address, x in zip(places, operands, strict=True)]
    first: dict[Any, int] = {}
    owners = list(range(count))
    for k in order:
        if 0 not in operands[k].shape:
            owners[k] = first.setdefault(elements[k], k)
    for j, k in overlapping(places, operands):
        if elements[j] != elements[k] or owners[j % count] != owners[k % count]:
            raise ValueError(
                f"{names[k].partition('[')[0]}: expected memory of its own for each parameter, got {names[j]} and"
                f" {names[k]}, which overlap"
            )
    written: dict[Any, int] = {}
    for k, target in enumerate(elements[count:] or elements):  # Tied targets are written once.
        if 0 not in operands[k].shape:
            written.setdefault(target, owners[k] if out is None else k)
    return Ties(owners, list(written.values()))


# --- Overlap ------------------------------------------------------------------------------------------------------


def overlaps_itself(operand: Operand) -> bool:
    """Whether two elements may share memory. `_checks.operands` has another rule, for matrices.

    They may if some stride is smaller than the bytes that all axes with smaller strides span.
    """
    end = item_size(operand.dtype)
    if 0 in operand.shape:
        return False
    for stride, length in sorted((abs(s), n) for s, n in zip(operand.strides, operand.shape, strict=True) if n > 1):
        if stride < end:
            return True
        end += stride * (length - 1)
    return False


def ranges_of(operands: Sequence[Operand]) -> HostArray:
    """Begin and end of the bytes of each array, relative to its address; shape (2, number of arrays)."""
    nothing = 0, -(2**62)  # An end before every begin.
    ranges = [nothing if 0 in operand.shape else extent(operand) for operand in operands]
    table: HostArray = np.array(ranges, np.int64).reshape(-1, 2).T
    return table


def check_unwritten(name: str, operand: Operand, address: int, targets: HostArray, ranges: HostArray) -> None:
    """ValueError if a kernel that writes arrays at `targets` would also write the array `name`, which it reads.

    `ranges` are the `ranges_of` the written arrays. As for `sample` on a device, overlapping ranges count as overlap.
    """
    (low,), (high,) = ranges_of((operand,))
    begins, ends = targets + ranges
    if ((begins < address + high) & (address + low < ends)).any():
        raise ValueError(f"{name}: expected memory that is not written, got memory that out also uses")


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
