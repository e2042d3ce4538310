"""Vectors that kernels cannot read, and their conversion: a twin of ``csrc/cuda/conversion.h``."""

import struct
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from multisample.backends.element_types import SIZES, ElementType
from multisample.backends.launch import INPUTS, Launch, Operation, computing_name

from .geometry import ceil_div

CONVERSION_THREADS, MOST_CONVERSION_BLOCKS = 256, 4096
_CONVERSION = struct.Struct("QqI4xqQQQ")


class Conversion(NamedTuple):
    """A vector to convert. In a batch, each matrix may have its own vector; one conversion serves all of them."""

    input: int
    """An index of `INPUTS`."""
    stride: int
    type: int
    step: int
    length: int
    elements: int
    place: int
    """The place of the copy in scratch memory, in bytes."""


def convert_vectors(launch: Launch) -> tuple[Launch, list[Conversion], int]:
    """The launch with the types of the copies, the conversions, and the size of the copies in float64 numbers."""
    real, conversions, taken = ElementType[computing_name(launch)], [], 0
    size = SIZES[real.name]
    for k, name in enumerate(INPUTS):
        kind, step = getattr(launch, f"{name}_type"), getattr(launch, f"{name}_step")
        is_row = name != "weights" or launch.operation == Operation.perturb
        length = launch.rows if is_row else launch.columns
        elements = length * max(launch.batch, 1) if step else length
        if kind in (ElementType.number, real, launch.type) or elements == 0:
            continue
        conversions.append(Conversion(k, getattr(launch, f"{name}_stride"), kind, step, length, elements, 8 * taken))
        taken += ceil_div(elements * size, 16) * 2  # Some kernels load 16 bytes at once.
        changes = {"type": real, "stride": size, "step": length * size if step else 0}
        launch = launch._replace(**{f"{name}_{field}": value for field, value in changes.items()})
    return launch, conversions, taken


def conversion_blocks(conversions: Sequence[Conversion]) -> int:
    """The length of the grid's x axis. The y axis has a block row for each conversion."""
    return min(max(ceil_div(x.elements, CONVERSION_THREADS) for x in conversions), MOST_CONVERSION_BLOCKS)


def pack_conversions(conversions: Sequence[Conversion], addresses: Sequence[Any], scratch: int) -> bytes:
    """The bytes of the C++ struct ``Conversions``. `addresses` are those of `INPUTS`."""
    packed = [_CONVERSION.pack(addresses[x.input], *x[1:-1], scratch + x.place) for x in conversions]
    every = b"".join(packed).ljust(len(INPUTS) * _CONVERSION.size, b"\0")
    return every + len(conversions).to_bytes(8, sys.byteorder)
