"""Normals of the committed vectors, for tests of the stream inside of other people's kernels."""

import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from places import DATA

import multisample

Array = np.ndarray[Any, Any]

# Edge values of each field of a place. The last is the largest number of the contract.
EDGES = {
    "seed": (0, 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1),
    "offset": (0, 1, 2**32 - 1, 2**32, 2**64 - 1),
    "i": (0, 1, 2**31, 2**32 - 1),
    "j": (0, 1, 2, 3, 4, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**33 + 2, 2**34 - 1),
}


class Places(NamedTuple):
    """Arguments of the stream: arrays of one length."""

    seed: Array
    offset: Array
    i: Array
    j: Array


def _places(entries: list[tuple[int, int, int, int]]) -> Places:
    columns = zip(*entries, strict=True)
    return Places(*(np.array(column, dtype) for column, dtype in zip(columns, ("u8", "u8", "u4", "u8"), strict=True)))


def _entries(name: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads((DATA / name).read_text())["normals"]
    return entries


@functools.cache
def known_f32() -> tuple[Places, Array]:
    """Places with edges and random numbers, and the float32 normals there, which are known answers."""
    entries = _entries("normals_f32.json")
    bits = np.array([int(entry["bits"], 16) for entry in entries], np.uint32)
    return _places([(e["seed"], e["offset"], e["i"], e["j"]) for e in entries]), bits.view(np.float32)


@functools.cache
def known_f64() -> tuple[Places, Array]:
    """Places of the float64 answers, and the float64 samples of the cpu backend there."""
    places = _places([(e["seed"], e["offset"], e["i"], e["j"]) for e in _entries("normals_f64.json")])
    return places, sampled(places, "float64")


def random_places(count: int, seed: int) -> Places:
    """Random places: each number is uniform, or one of its edges."""
    rng = np.random.default_rng(seed)
    limits = {"seed": 2**64, "offset": 2**64, "i": 2**32, "j": 2**34}
    entries = [
        tuple(
            int(rng.choice(np.array(EDGES[name], np.uint64)))
            if rng.integers(2)
            else int(rng.integers(limit, dtype=np.uint64, endpoint=False))
            if limit < 2**64
            else int.from_bytes(rng.bytes(8), "little")
            for name, limit in limits.items()
        )
        for _ in range(count)
    ]
    return _places(entries)  # type: ignore[arg-type]


def sampled(places: Places, dtype: str = "float32") -> Array:
    """The elements that `multisample.sample` draws at `places`, by the cpu backend."""
    return np.array(
        [
            multisample.sample(
                [0.0], 1.0, 1, seed=multisample.Key(int(seed), int(offset)), dim_offset=int(i), sample_offset=int(j),
                dtype=dtype, backend="cpu",
            )[0, 0]
            for seed, offset, i, j in zip(*places, strict=True)
        ],
        dtype,
    )  # fmt: skip


def sampled_row(seed: int, offset: int, i: int, count: int, dtype: str = "float32") -> Array:
    """The first elements of row `i`, by the cpu backend."""
    key = multisample.Key(seed, offset)
    return np.asarray(multisample.sample([0.0], 1.0, count, seed=key, dim_offset=i, dtype=dtype, backend="cpu")[0])


def check_points(run: Callable[[str, Places, Array], Array]) -> None:
    """``run(kernel, places, z)`` fills `z` with the normals at `places`, by the kernel "points" or "points_f64"."""
    for kernel, (places, known) in (("points", known_f32()), ("points_f64", known_f64())):
        assert run(kernel, places, np.empty_like(known)).tobytes() == known.tobytes(), kernel
