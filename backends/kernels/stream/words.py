"""Random words: a pure function of seed, offset and position, so that any part of a matrix can be drawn anywhere.

Philox4x32 with ten rounds (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC'11, doi:10.1145/2063384.2063405), with the keys and counters of STREAM.md: counter (g, i, o0, o1) gives columns
4 g to 4 g + 3 of row i. A round mixes only two of the four words, so much of the first three rounds depends on the
columns alone, or on the row alone. A kernel that draws many rows of the same columns computes the column part once.

A word is a uint32 on a GPU. On a CPU it is a uint64 whose upper half is ignored: the product of two words then needs
no widening, and LLVM can run one Philox block in each 64-bit lane of a vector. All words of a call have one type.
"""

import numpy as np

from multisample.backends.kernels.compilation import inline

from .arithmetic import like, wide_product

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
# "multsamp": separates this stream from those of other libraries with the same seed.
KEY_0 = np.uint64(0x6D756C74)
KEY_1 = np.uint64(0x73616D70)
_SHIFT = np.uint64(32)


@inline
def word(x: np.uint64) -> np.uint64:
    """The lower 32 bits of `x`."""
    return np.uint64(np.uint32(x))


@inline
def stream_key(seed: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Both key words of the stream of `seed`."""
    return word(seed) ^ KEY_0, (seed >> _SHIFT) ^ KEY_1


@inline
def row_part(i, o0, k0):
    """What depends on the row only: the term XORed into c2 of round 2, and c3 of round 2."""
    high, _ = wide_product(o0, _MULTIPLIER_1)
    return wide_product(like(high ^ i ^ k0, k0), _MULTIPLIER_0)


@inline
def column_part(g, o0, o1, k0, k1):
    """The terms of rounds 1 to 3 that depend on the columns alone.

    Returns three terms, to be XORed into c2 of round 2, c0 of round 3 and c2 of round 3, and the word c3 of round 3.
    """
    high0, low0 = wide_product(g, _MULTIPLIER_0)
    _, low1 = wide_product(o0, _MULTIPLIER_1)
    high1, low2 = wide_product(like(high0 ^ o1 ^ k1, k0), _MULTIPLIER_1)
    k0, k1 = like(k0 + WEYL_0, k0), like(k1 + WEYL_1, k0)
    high2, low3 = wide_product(like(high1 ^ low1 ^ k0, k0), _MULTIPLIER_0)
    k2, k3 = like(k0 + WEYL_0, k0), like(k1 + WEYL_1, k0)
    return like(low0 ^ k1, k0), like(low2 ^ k2, k0), like(high2 ^ k3, k0), low3


@inline
def words(column, row, k0, k1):
    """The four words of a `column_part` and a `row_part` under key ``(k0, k1)``."""
    into_c2_of_round_2, into_c0_of_round_3, into_c2_of_round_3, c3 = column
    high, c1 = wide_product(like(into_c2_of_round_2 ^ row[0], k0), _MULTIPLIER_1)
    c0 = like(high ^ into_c0_of_round_3, k0)
    c2 = like(into_c2_of_round_3 ^ row[1], k0)
    for r in range(3, 10):
        high0, low0 = wide_product(c0, _MULTIPLIER_0)
        high1, low1 = wide_product(c2, _MULTIPLIER_1)
        c0, c1 = like(high1 ^ c1 ^ like(k0 + np.uint32(r) * WEYL_0, k0), k0), low1
        c2, c3 = like(high0 ^ c3 ^ like(k1 + np.uint32(r) * WEYL_1, k0), k0), low0
    return c0, c1, c2, c3


@inline
def philox4x32_10(c0, c1, c2, c3, k0, k1):
    """The four words of counter ``(c0, c1, c2, c3)`` under key ``(k0, k1)``."""
    return words(column_part(c0, c2, c3, k0, k1), row_part(c1, c2, k0), k0, k1)
