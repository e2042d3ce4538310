"""Vectors that kernels cannot read, and their conversion: a twin of ``csrc/cuda/conversion.h``."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from multisample.backends.element_types import SIZES, ElementType
from multisample.backends.launch import INPUTS, Launch, Operation, computing_name

from .kernel_choice import ceil_div

CONVERSION_THREADS, MOST_CONVERSION_BLOCKS = 256, 4096
_CONVERSIONS = struct.Struct(3 * "QqI4xqQQQ" + "Q")


class Conversion(NamedTuple):
    """A vector to convert, of each matrix of a batch."""

    input: int
    """An index of `INPUTS`."""
    stride: int
    type: int
    step: int
    length: int
    elements: int
    place: int
    """Where the converted vectors begin in scratch memory, in bytes."""


def is_readable(kind: int, launch: Launch) -> bool:
    """Whether kernels read inputs of an element type."""
    return kind in (ElementType.number, ElementType[computing_name(launch)], launch.type)


def convert_vectors(launch: Launch) -> tuple[Launch, list[Conversion], int]:
    """The launch with converted vectors, the conversions, and how many float64 numbers of memory they take."""
    real, conversions, taken = computing_name(launch), [], 0
    size = SIZES[real]
    for k, name in enumerate(INPUTS):
        kind, step = getattr(launch, f"{name}_type"), getattr(launch, f"{name}_step")
        is_row = name != "weights" or launch.operation == Operation.perturb
        length = launch.rows if is_row else launch.columns
        elements = length * max(launch.batch, 1) if step else length
        if is_readable(kind, launch) or elements == 0:
            continue
        conversions.append(Conversion(k, getattr(launch, f"{name}_stride"), kind, step, length, elements, 8 * taken))
        taken += ceil_div(elements * size, 16) * 2  # Some kernels load 16 bytes at once.
        changes = {"type": ElementType[real], "stride": size, "step": length * size if step else 0}
        launch = launch._replace(**{f"{name}_{field}": value for field, value in changes.items()})
    return launch, conversions, taken


def conversion_blocks(conversions: Sequence[Conversion]) -> int:
    """The length of the grid's x axis. The y axis counts the conversions."""
    return min(max(ceil_div(x.elements, CONVERSION_THREADS) for x in conversions), MOST_CONVERSION_BLOCKS)


def pack_conversions(conversions: Sequence[Conversion], addresses: Sequence[Any], scratch: int) -> bytes:
    """The bytes of the C++ struct ``Conversions``. `addresses` are those of `INPUTS`."""
    fields = [0] * 21
    for k, (place, *others, first) in enumerate(conversions):
        fields[7 * k : 7 * k + 7] = addresses[place], *others, scratch + first
    return _CONVERSIONS.pack(*fields, len(conversions))
