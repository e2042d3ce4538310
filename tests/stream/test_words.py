"""Words equal the published generator with the keys of the stream."""

import json

import numpy as np
from places import DATA
from stream_code import Array, Code


def from_hex(rows: list[list[str]]) -> Array:
    return np.array([[int(text, 16) for text in row] for row in rows], np.uint64)


def with_random_upper_halves(values: Array) -> Array:
    return values | np.random.default_rng(1).integers(2**32, size=values.shape, dtype=np.uint64) << np.uint64(32)


def test_words_equal_the_published_words(code: Code) -> None:
    entries = json.loads((DATA / "words.json").read_text())["philox4x32_10"]
    assert len(entries) == 3
    counters, keys, expected = (from_hex([entry[name] for entry in entries]) for name in ("counter", "key", "words"))
    c, (k0, k1) = counters.T, keys.T
    # The stream's key is the seed, XORed with "multsamp".
    seeds = (k0 ^ np.uint64(0x6D756C74)) | (k1 ^ np.uint64(0x73616D70)) << np.uint64(32)
    offsets = c[2] | c[3] << np.uint64(32)
    got = code.words(seeds, offsets, with_random_upper_halves(c[1]), with_random_upper_halves(c[0]))
    assert np.array_equal(got, expected)
