"""The arguments of a call of `perturb`, and the checks of its coefficients and of the memory of its arrays."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .._arguments import DTYPES, describe
from .._call import ROWS
from .._checks.operands import check_alignment, item_size
from .._libraries import HOST, Library, Operand, described, is_number, library_of
from .overlap import overlapping, overlaps_itself
from .spans import Block, steps_of
from .structure import Structure, label

MOST_ELEMENTS = 2**34


class Request(NamedTuple):
    """The arguments of a call of `perturb`."""

    parameters: Structure
    out: Structure | None
    given_out: Any
    """The argument `out` itself."""
    coefficients: Any
    seed: Any
    member: Any
    fast_math: bool
    ids: Any
    backend: str
    blocks: tuple[tuple[Block, ...], ...] | None = None
    """The blocks of each parameter, if arrays hold parts of parameters."""


class Coefficients(NamedTuple):
    """The coefficients of a call."""

    length: int
    on_host: Any
    """A float, or an array of float64; None if they are on a device."""
    on_device: Operand | None


def read_coefficients(given: Any) -> Coefficients:
    """The argument `coefficients`; TypeError or ValueError if it is no number and no vector, or is not finite."""
    if type(given) is float or is_number(given):
        try:
            number = float(given)
        except OverflowError:
            number = float("inf")
        if not abs(number) < float("inf"):
            raise ValueError(f"coefficients: expected finite numbers, got {describe(given)}")
        return Coefficients(1, number, None)
    library = library_of("coefficients", given)
    if library.foreign or library.is_opaque(given):
        raise TypeError(
            "coefficients: expected a number, a list, a NumPy array, or an array of the parameters' library, got"
            f" {described(given)}"
        )
    array = HOST.normalized("coefficients", given) if library is HOST else given
    operand = library.describe("coefficients", array)
    if len(operand.shape) > 1:
        raise ValueError(f"coefficients: expected a number or shape (K,), got {operand.shape}")
    count = operand.shape[0] if operand.shape else 1
    if operand.device.kind not in ("cpu", "cuda"):
        raise ValueError(f"coefficients: expected values in memory of the host or a GPU, got them on {operand.device}")
    if operand.device.kind == "cuda":
        check_alignment("coefficients", operand, library.address(array))
        return Coefficients(count, None, operand)
    values = np.ascontiguousarray(np.atleast_1d(library.to_host(array)), np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"coefficients: expected finite numbers, got {describe(values)}")
    return Coefficients(count, values if operand.shape else float(values[0]), None)


def check_members(member: int, count: int) -> None:
    """ValueError if `count` members from `member` on go beyond the last row."""
    if member + count > ROWS:
        raise ValueError(f"member: expected member + K <= 2**32, got {member} + {count}")


class Memory(NamedTuple):
    """The arrays that a call reads and writes. Without `out`, targets are new arrays."""

    sources: list[Operand]
    targets: list[Operand]


class Ties(NamedTuple):
    """Which parameters share memory."""

    owners: list[int]
    """For each parameter, the index of the owner of its memory: its own, or that of the first tied parameter."""
    written: list[int]
    """The parameters whose results are written."""


def memory_of(request: Request, library: Library) -> Memory:
    """The arrays of a call; TypeError or ValueError if `perturb` cannot read or write one."""
    parameters, out = request.parameters, request.out
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


def ties_of(request: Request, memory: Memory, sources: list[int], targets: list[int]) -> Ties:
    """The parameters that share memory, from addresses; ValueError if arrays overlap or are misaligned."""
    parameters, out, count = request.parameters, request.out, len(sources)
    names = [label("parameters", parameters, k) for k in range(count)]
    if out is not None:
        names += [label("out", out, k) for k in range(count)]
    places, operands = [*sources, *targets], [*memory.sources, *(memory.targets if targets else ())]
    for name, operand, address in zip(names, operands, places, strict=True):
        if not address and 0 not in operand.shape:
            raise ValueError(f"{name}: expected elements in memory, got an array without memory")
        check_alignment(name, operand, address)
    # Tied parameters have the same elements. The first in the order of names owns them.
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
