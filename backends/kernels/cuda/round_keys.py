"""The keys of all Philox rounds, which the kernels of weighted moments and of perturb take as arguments."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable

_pack = struct.Struct("20I").pack


def round_keys_of(real: str) -> Callable[[int], bytes]:
    """``keys(seed)``: the bytes of the C++ struct ``Keys`` for a computing type: see ``csrc/cuda/group.cuh``."""
    if real == "float64":
        return lambda seed: _round_keys(seed, False) + _round_keys(seed, True)
    return lambda seed: _round_keys(seed, False)


@functools.cache
def _stream_constants() -> tuple[int, ...]:
    """Both key words, the word that float64 XORs into the second, and both Weyl increments of a round."""
    # Numba takes half a second to import.
    from multisample.backends.kernels.stream.normals import FLOAT64_KEY
    from multisample.backends.kernels.stream.words import KEY_0, KEY_1, WEYL_0, WEYL_1

    return tuple(map(int, (KEY_0, KEY_1, FLOAT64_KEY, WEYL_0, WEYL_1)))


def _round_keys(seed: int, refining: bool) -> bytes:
    """The bytes of the C++ struct ``RoundKeys``: see ``csrc/stream/words.h``."""
    key_0, key_1, float64_key, weyl_0, weyl_1 = _stream_constants()
    first, second = seed ^ key_0, seed >> 32 ^ key_1 ^ (float64_key if refining else 0)
    return _pack(
        *[(first + r * weyl_0) & 0xFFFFFFFF for r in range(10)],
        *[(second + r * weyl_1) & 0xFFFFFFFF for r in range(10)],
    )
