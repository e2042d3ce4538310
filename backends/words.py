"""Random words: a pure function of seed, offset and position, so that any part can be drawn anywhere.

Philox4x32 with ten rounds (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC'11, doi:10.1145/2063384.2063405), keyed and counted as STREAM.md says.

Every word travels as a uint64 whose upper half is not looked at: the product of two words then needs no
widening, and LLVM can run one block of four words in each 64-bit vector lane.
"""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["philox4x32_10", "stream_key", "word"]

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
# "multsamp": keeps us off the streams that other libraries draw from the same seed.
_KEY_0 = np.uint64(0x6D756C74)
_KEY_1 = np.uint64(0x73616D70)
_SHIFT = np.uint64(32)


@njit(forceinline=True)
def word(x: np.uint64) -> np.uint64:
    """The 32-bit word that `x` carries, its upper half cleared."""
    return np.uint64(np.uint32(x))


@njit(forceinline=True)
def stream_key(seed: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Both key words of the stream that belongs to `seed`."""
    return word(seed) ^ _KEY_0, (seed >> _SHIFT) ^ _KEY_1


@njit(forceinline=True)
def philox4x32_10(
    c0: np.uint64, c1: np.uint64, c2: np.uint64, c3: np.uint64, k0: np.uint64, k1: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """The four words of counter ``(c0, c1, c2, c3)`` under key ``(k0, k1)``; see `word`."""
    for _ in range(10):
        p0 = word(c0) * _MULTIPLIER_0
        p1 = word(c2) * _MULTIPLIER_1
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1, (p0 >> _SHIFT) ^ c3 ^ k1, p0
        k0, k1 = k0 + _WEYL_0, k1 + _WEYL_1
    return c0, c1, c2, c3
