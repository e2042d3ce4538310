"""Places in a packed `Draw` and a packed `Moments`, in words of 8 bytes.

A `Vector` is its address, stride, number and type; a `Word` its value, and the address that it is read from if that is
not 0. Of two numbers of 32 bits in a word, the second is the high half.
"""

from __future__ import annotations

from multisample.backends.draw import PACKED_DRAW
from multisample.backends.moments import PACKED_MOMENTS

MU, SIGMA, MATRIX, ROW_STRIDE, COLUMN_STRIDE, ROWS, COLUMNS = 0, 4, 8, 9, 10, 11, 12
SEED, OFFSET, FIRST_ROW, FIRST_COLUMN, SCRATCH, STREAM = 13, 15, 17, 19, 21, 22
TYPE_AND_OPERATION, COMMON_NOISE_AND_ANTITHETIC, FAST_MATH_AND_DEVICE, THREADS_AND_BATCH, BATCHED = 23, 24, 25, 26, 27
DRAW = PACKED_DRAW // 8
WEIGHTS, FIRST, SECOND = DRAW, DRAW + 4, DRAW + 5
MOMENTS = PACKED_MOMENTS // 8

LOW = (1 << 32) - 1
"""The mask of the first of two numbers in a word."""
