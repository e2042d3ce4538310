"""The keys of all Philox rounds, which the kernels of weighted moments and of perturb take as arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

_ROUNDS = 10


def round_keys_of(real: str) -> Callable[[int], bytes]:
    """``keys(seed)``: the bytes of the C++ struct ``Keys`` for a computing type: see ``csrc/cuda/group.cuh``."""
    if real == "float64":
        return lambda seed: _round_keys(seed, False) + _round_keys(seed, True)
    return lambda seed: _round_keys(seed, False)


@functools.cache
def _stream_constants() -> tuple[int, int, np.ndarray[Any, Any]]:
    """The constant key, the key bits that float64 flips for its second words, and the Weyl sums of all rounds."""
    # Imported late: these modules import Numba, which takes half a second.
    from multisample.backends.kernels.stream.normals import FLOAT64_KEY
    from multisample.backends.kernels.stream.words import KEY_0, KEY_1, WEYL_0, WEYL_1

    steps = np.outer(np.array([WEYL_0, WEYL_1], np.uint32), np.arange(_ROUNDS, dtype=np.uint32)).reshape(-1)
    return int(KEY_0) | int(KEY_1) << 32, int(FLOAT64_KEY) << 32, steps


@functools.lru_cache(64)  # The calls of a generator have one seed.
def _round_keys(seed: int, refining: bool) -> bytes:
    """The bytes of the C++ struct ``RoundKeys``: see ``csrc/stream/words.h``."""
    key, float64_key, steps = _stream_constants()
    first = (seed ^ key ^ (float64_key if refining else 0)).to_bytes(8, "little")
    packed: bytes = (np.frombuffer(first, np.uint32).repeat(_ROUNDS) + steps).tobytes()
    return packed
