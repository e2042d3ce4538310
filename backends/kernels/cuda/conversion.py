"""Vectors that kernels cannot read, and their conversion: a twin of ``csrc/cuda/conversion.h``."""

from __future__ import annotations

import struct
from typing import NamedTuple

from multisample.backends.element_types import SIZES, ElementType
from multisample.backends.launch import INPUTS, Launch, Operation, computing_name

from .kernel_choice import ceil_div

CONVERSION_THREADS, MOST_CONVERSION_BLOCKS = 256, 4096
_FORMAT = struct.Struct("QqI4xqQQQ")


class Conversion(NamedTuple):
    """Converts the vectors of all matrices of a batch."""

    input: int
    """An index of `INPUTS`."""
    type: int
    stride: int
    step: int
    length: int
    all: int
    place: int
    """Where the converted vectors begin in scratch memory, in bytes."""

    @property
    def blocks(self) -> int:
        return min(ceil_div(self.all, CONVERSION_THREADS), MOST_CONVERSION_BLOCKS)

    def packed(self, address: int, scratch: int) -> bytes:
        """The bytes of the C++ struct ``Conversion``."""
        return _FORMAT.pack(address, self.stride, self.type, self.step, self.length, self.all, scratch + self.place)


def is_readable(kind: int, computing: str) -> bool:
    """Whether kernels with this computing type read an input of an element type."""
    halves = (ElementType.float16, ElementType.bfloat16) if computing == "float32" else ()
    return kind in (ElementType.number, ElementType[computing], *halves)


def convert_vectors(launch: Launch) -> tuple[Launch, list[Conversion], int]:
    """The launch with converted vectors, the conversions, and how many float64 numbers of memory they take."""
    computing, conversions, taken = computing_name(launch), [], 0
    size = SIZES[computing]
    for k, name in enumerate(INPUTS):
        kind, step = getattr(launch, f"{name}_type"), getattr(launch, f"{name}_step")
        if is_readable(kind, computing):
            continue
        is_row = name != "weights" or launch.operation == Operation.perturb
        length = launch.rows if is_row else launch.columns
        count = length * max(launch.batch, 1) if step else length
        conversions.append(Conversion(k, kind, getattr(launch, f"{name}_stride"), step, length, count, 8 * taken))
        taken += ceil_div(count * size, 16) * 2  # Some kernels load 16 bytes at once.
        changes = {"type": ElementType[computing], "stride": size, "step": length * size if step else 0}
        launch = launch._replace(**{f"{name}_{field}": value for field, value in changes.items()})
    return launch, conversions, taken
