"""Compiled words equal the published generator with the keys of the stream.

Compiled code passes words as uint64 whose upper half is undefined, so the tests fill it with random bits.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from numba import njit
from places import DATA

from multisample.backends.kernels.stream import words

WORDS = json.loads((DATA / "words.json").read_text())

Words = np.ndarray[Any, np.dtype[np.uint64]]

philox4x32_10, stream_key, word = words.philox4x32_10, words.stream_key, words.word


@njit
def philox(counters: Words, keys: Words) -> Words:
    """Shapes (m, 4) and (m, 2) give (m, 4)."""
    result = np.empty_like(counters)
    for m in range(len(counters)):
        c, k = counters[m], keys[m]
        w0, w1, w2, w3 = philox4x32_10(c[0], c[1], c[2], c[3], k[0], k[1])
        result[m, 0], result[m, 1], result[m, 2], result[m, 3] = word(w0), word(w1), word(w2), word(w3)
    return result


@njit
def stream_words(seeds: Words, offsets: Words, rows: Words, blocks: Words) -> Words:
    """Inputs have shape (m,), and the result has shape (m, 4)."""
    result = np.empty((len(seeds), 4), np.uint64)
    for m in range(len(seeds)):
        k0, k1 = stream_key(seeds[m])
        high = offsets[m] >> np.uint64(32)
        w0, w1, w2, w3 = philox4x32_10(blocks[m], rows[m], word(offsets[m]), high, k0, k1)
        result[m, 0], result[m, 1], result[m, 2], result[m, 3] = word(w0), word(w1), word(w2), word(w3)
    return result


def uint64(values: Any) -> Words:
    return np.array(values, np.uint64)


def from_hex(rows: list[list[str]]) -> Words:
    return uint64([[int(text, 16) for text in row] for row in rows])


def random_words(shape: tuple[int, ...], seed: int, *, below: int = 2**32) -> Words:
    return np.random.default_rng(seed).integers(below, size=shape, dtype=np.uint64)


def with_random_upper_halves(values: Words, seed: int) -> Words:
    return values | random_words(values.shape, seed) << np.uint64(32)


@pytest.fixture(scope="module")
def published() -> tuple[Words, Words, Words]:
    entries = WORDS["philox4x32_10"]
    assert len(entries) == 3
    counters, keys, expected = (from_hex([entry[name] for entry in entries]) for name in ("counter", "key", "words"))
    return counters, keys, expected


def test_philox_gives_the_published_words(published: tuple[Words, Words, Words]) -> None:
    counters, keys, expected = published
    assert np.array_equal(philox(counters, keys), expected)


def test_upper_halves_of_words_are_ignored(published: tuple[Words, Words, Words]) -> None:
    counters, keys, expected = published
    for seed in range(20):
        got = philox(with_random_upper_halves(counters, seed), with_random_upper_halves(keys, 1000 + seed))
        assert np.array_equal(got, expected)


def test_stream_words_equal_the_known_answers() -> None:
    entries = WORDS["stream"]
    assert len(entries) == 200
    places = (uint64([entry[name] for entry in entries]) for name in ("seed", "offset", "i", "g"))
    assert np.array_equal(stream_words(*places), from_hex([entry["words"] for entry in entries]))
