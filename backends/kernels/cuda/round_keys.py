"""The keys of all Philox rounds, which the kernels of weighted moments and of perturb take as arguments."""

import functools
from collections.abc import Callable

import numpy as np

_ROUNDS = 10


@functools.cache
def round_keys_of(real: str) -> Callable[[int], bytes]:
    """``keys(seed)``: the bytes of the C++ struct ``Keys`` for a computing type: see ``csrc/cuda/group.cuh``."""
    # Imported late: these modules import Numba, which takes half a second.
    from multisample.backends.kernels.stream.normals import FLOAT64_KEY
    from multisample.backends.kernels.stream.words import KEY_0, KEY_1, WEYL_0, WEYL_1

    steps = np.outer(np.array([WEYL_0, WEYL_1], np.uint32), np.arange(_ROUNDS, dtype=np.uint32)).reshape(-1)
    key = int(KEY_0) | int(KEY_1) << 32
    # float64 flips bits of the key for its second words.
    masks = [key, key ^ int(FLOAT64_KEY) << 32] if real == "float64" else [key]

    @functools.lru_cache(64)  # The calls of a generator have one seed.
    def keys(seed: int) -> bytes:
        first = [np.frombuffer((seed ^ mask).to_bytes(8, "little"), np.uint32) for mask in masks]
        return b"".join((words.repeat(_ROUNDS) + steps).tobytes() for words in first)

    return keys
