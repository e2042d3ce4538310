"""Ties: parameters with the same memory, shape and strides. Arrays that overlap in any other way are refused."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from multisample.backends.memory.host import array_at

from .._arguments import DTYPES
from .._checks.operands import ITEM_SIZES, check_alignment, extent
from .._libraries import Library, Operand
from .._operations import COLUMNS
from .populations import Variant
from .spans import steps_of
from .structures import Structure


class Memory(NamedTuple):
    """The arrays that a call reads and writes. Without `out`, targets are new arrays."""

    sources: list[Operand]
    targets: list[Operand]


class Ties(NamedTuple):
    owners: list[int]
    """For each parameter, the index of the parameter that owns its memory: itself, or the first tied parameter."""
    written: list[int]
    """The parameters whose results are written."""


def memory_of(parameters: Structure, out: Structure | None, library: Library, variant: Variant) -> Memory:
    """The arrays of a call; TypeError or ValueError if `perturb` cannot read or write one."""
    sources = [
        _described(name, library, x) for name, x in zip(parameters.labels("parameters"), parameters.arrays, strict=True)
    ]
    shapes = [variant.shape_of(k, x.shape) for k, x in enumerate(sources)]
    if out is None:
        strides = [tuple(ITEM_SIZES[x.dtype] * s for s in steps_of(y)) for x, y in zip(sources, shapes, strict=True)]
        every = zip(sources, shapes, strides, strict=True)
        return Memory(sources, [x._replace(shape=shape, strides=own, read=None) for x, shape, own in every])
    targets = []
    for k, array in enumerate(out.arrays):
        name = out.label("out", k)
        target = library.describe(name, array)
        for what, expected in (("shape", shapes[k]), ("dtype", sources[k].dtype), ("device", sources[k].device)):
            if (found := getattr(target, what)) != expected:
                reason = f", as {parameters.label('parameters', k)} has"
                if what == "shape" and expected != sources[k].shape:
                    reason = f" for a population of {variant.size}"
                raise ValueError(f"{name}: expected {what} {expected}{reason}, got {found}")
        size = ITEM_SIZES[target.dtype]
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
    if math.prod(operand.shape) > COLUMNS:
        raise ValueError(f"{name}: expected at most 2**34 elements, got shape {operand.shape}")
    return operand


def ties_of(parameters: Structure, out: Structure | None, memory: Memory, addresses: Sequence[int]) -> Ties:
    """The parameters that share memory; ValueError if arrays overlap or are misaligned.

    `addresses` are those of the parameters, and of `out` unless it is new or the parameters themselves.
    """
    count, operands = len(memory.sources), [*memory.sources, *memory.targets][: len(addresses)]

    def label(k: int) -> str:
        return parameters.label("parameters", k) if out is None or k < count else out.label("out", k - count)

    for k, (operand, address) in enumerate(zip(operands, addresses, strict=True)):
        if not address and 0 not in operand.shape:
            raise ValueError(f"{label(k)}: expected elements in memory, got an array without memory")
        if operand.device.kind == "cuda":
            check_alignment(label(k), operand, address)
    # Tied parameters have the same elements. The first parameter in the order of names owns them.
    names = parameters.names
    order = range(count) if names is None else sorted(range(count), key=names.__getitem__)
    elements = [(address, x.shape, x.strides, x.dtype) for address, x in zip(addresses, operands, strict=True)]
    first: dict[Any, int] = {}
    owners = list(range(count))
    for k in order:
        if 0 not in operands[k].shape:
            owners[k] = first.setdefault(elements[k], k)
    same = [(first.setdefault(elements[k], k), k) for k in range(count, len(elements)) if 0 not in operands[k].shape]
    wrong = [(j, k) for j, k in same if owners[j % count] != owners[k % count]]
    for j, k in wrong or overlapping(sorted(first.values()), addresses, operands):
        raise ValueError(
            f"{label(k).partition('[')[0]}: expected memory of its own for each parameter, got {label(j)} and"
            f" {label(k)}, which overlap"
        )
    written: dict[Any, int] = {}
    for k, target in enumerate(elements[count:] or elements):  # Tied targets are written once.
        if 0 not in operands[k].shape:
            written.setdefault(target, owners[k] if len(elements) == count else k)
    return Ties(owners, list(written.values()))


# --- Overlap ------------------------------------------------------------------------------------------------------


def overlaps_itself(operand: Operand) -> bool:
    """Whether two elements may share memory. `_checks.operands` has another rule, for matrices.

    They may if some stride is smaller than the bytes that all axes with smaller strides span.
    """
    end = ITEM_SIZES[operand.dtype]
    if 0 in operand.shape:
        return False
    for stride, length in sorted((abs(s), n) for s, n in zip(operand.strides, operand.shape, strict=True) if n > 1):
        if stride < end:
            return True
        end += stride * (length - 1)
    return False


def overlapping(
    some: Sequence[int], addresses: Sequence[int], operands: Sequence[Operand]
) -> Iterator[tuple[int, int]]:  # fmt: skip
    """All pairs of `some` arrays, none of them empty, that share memory."""
    extents = {k: extent(operands[k]) for k in some}
    within: list[tuple[int, int]] = []
    for begin, end, k in sorted((addresses[k] + low, addresses[k] + high, k) for k, (low, high) in extents.items()):
        within = [(other_end, j) for other_end, j in within if other_end > begin]
        for _, j in within:
            # Nothing is read, so the arrays may be on a device. True also if NumPy gives up.
            first, second = [
                array_at(addresses[i], operands[i].shape, operands[i].strides, f"V{ITEM_SIZES[operands[i].dtype]}")
                for i in (j, k)
            ]
            if np.may_share_memory(first, second, max_work=_MOST_WORK):
                yield min(j, k), max(j, k)
        within.append((end, k))


_MOST_WORK: Any = 10**6
