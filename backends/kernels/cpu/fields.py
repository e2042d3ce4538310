"""Fields of a packed `Launch`, for compiled code that has its address.

Such code reads a launch as an array of LAUNCH_WORDS words of 8 bytes.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from multisample.backends.element_types import ElementType
from multisample.backends.kernels.compilation import inline
from multisample.backends.launch import FIELD_AT, PACKED_LAUNCH, Launch, WordFormat

from .addresses import numbers_at, word_at

LAUNCH_WORDS = PACKED_LAUNCH // 8
WORD = Launch(*(at // 8 for at in FIELD_AT.values()))
"""Places of fields of 8 bytes, in words."""
HALF = Launch(*(at // 4 for at in FIELD_AT.values()))
"""Places of fields of 4 bytes, for `half`."""

LOW = (1 << 32) - 1
"""The mask of the first half of a word."""

_NUMBER = int(ElementType.number)
_WHOLE, _HIGH_FIRST, _BITS_32, _BITS_16, _BITS_8 = map(int, WordFormat)


@inline
def half(launch, place):
    """The field of 4 bytes at a place."""
    return launch[place // 2] >> 32 * (place % 2) & LOW


@inline
def set_half(launch, place, value):
    """Set the field of 4 bytes at a place to the low half of `value`."""
    shift = 32 * (place % 2)
    launch[place // 2] = launch[place // 2] & ~(LOW << shift) | (value & LOW) << shift


@inline
def _number(launch, place, address, form):
    """A number of a launch: the one at `address`, in the format `form`; if that is 0, the field at `place`."""
    if address == 0:
        return launch[place]
    if form == _WHOLE:
        return word_at(address)
    if form == _BITS_16:
        return np.int64(numbers_at(address, 1, np.uint16)[0])
    if form == _BITS_8:
        return np.int64(numbers_at(address, 1, np.uint8)[0])
    halves = numbers_at(address, 2, np.uint32)
    first = np.int64(halves[0])
    return first << 32 | np.int64(halves[1]) if form == _HIGH_FIRST else first


@inline
def numbers_of(launch, b):
    """Seed, offset, first row and first column of matrix `b` of a batch."""
    in_origin, formats = b * launch[WORD.origin_step], half(launch, HALF.word_formats)
    return (
        _number(launch, WORD.seed, launch[WORD.seed_at] + b * launch[WORD.seed_step], formats & 255),
        _number(launch, WORD.offset, launch[WORD.offset_at] + b * launch[WORD.offset_step], formats >> 8),
        _number(launch, WORD.first_row, launch[WORD.first_row_at] + in_origin, _WHOLE),
        _number(launch, WORD.first_column, launch[WORD.first_column_at] + in_origin, _WHOLE),
    )


def input_place(name: str, number: Any) -> Callable[..., Any]:
    """``place(launch, b, first, one)``: address and stride of an input of matrix `b`, from element `first` on.

    The input has the computing type, `number`. If it is one number, that is stored in `one`.
    """
    at, stride, step = (getattr(WORD, field) for field in (name, f"{name}_stride", f"{name}_step"))
    kind = getattr(HALF, f"{name}_type")

    @inline
    def place(launch, b, first, one):
        if half(launch, kind) == _NUMBER:
            one[0] = number(numbers_at(launch.ctypes.data + 8 * at, 1, np.float64)[0])
            return one.ctypes.data, 0
        return launch[at] + b * launch[step] + first * launch[stride], launch[stride]

    return place
