"""Arguments `seed` in every form of a vector."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from multisample import Key

__all__ = ["key_arrays"]

M64 = 2**64 - 1


def key_arrays(batch: int, draw: random.Random) -> list[tuple[Any, list[Key]]]:
    """Arguments `seed` of `batch` keys in every form, with the keys."""
    seeds = [draw.choice([draw.getrandbits(64), draw.getrandbits(9), M64]) for _ in range(batch)]
    offsets = [draw.choice([draw.getrandbits(64), draw.getrandbits(4)]) for _ in range(batch)]
    plain, keys = [Key(seed, 0) for seed in seeds], [Key(*x) for x in zip(seeds, offsets, strict=True)]
    mixed = [key if k % 2 else key.seed for k, key in enumerate(keys)]
    words = np.array(keys, np.uint64).reshape(batch, 2)
    halves = np.stack([words >> np.uint64(32), words & np.uint64(2**32 - 1)], -1).astype(np.uint32)
    forms: list[tuple[Any, list[Key]]] = [
        (seeds, plain), (tuple(mixed), [key if k % 2 else plain[k] for k, key in enumerate(keys)]),
        (words[:, 0].copy(), plain), (words, keys), (words[:, 0].copy().view(np.int64), plain),
        (halves[:, 0].copy(), plain), (halves.reshape(batch, 4), keys),
    ]  # fmt: skip
    for kind in ("int32", "int16", "uint16", "int8", "uint8"):
        narrow = words.astype(kind)
        bits = 8 * narrow.itemsize
        forms.append((narrow, [Key(int(a) % 2**bits, int(b) % 2**bits) for a, b in narrow]))
    return forms
