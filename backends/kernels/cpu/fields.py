"""Fields of a packed `Launch`, for compiled code that has its address.

Such code reads a launch as an array of LAUNCH_WORDS words of 8 bytes.
"""

from __future__ import annotations

from multisample.backends.kernels.compilation import inline
from multisample.backends.launch import FIELD_AT, PACKED_LAUNCH, Launch

LAUNCH_WORDS = PACKED_LAUNCH // 8
WORD = Launch(*(at // 8 for at in FIELD_AT.values()))
"""Places of fields of 8 bytes, in words."""
HALF = Launch(*(at // 4 for at in FIELD_AT.values()))
"""Places of fields of 4 bytes, for `half`."""

LOW = (1 << 32) - 1
"""The mask of the first half of a word."""


@inline
def half(launch, place):
    """The field of 4 bytes at a place."""
    return launch[place // 2] >> 32 * (place % 2) & LOW


@inline
def set_half(launch, place, value):
    """Set the field of 4 bytes at a place to the low half of `value`."""
    shift = 32 * (place % 2)
    launch[place // 2] = launch[place // 2] & ~(LOW << shift) | (value & LOW) << shift
