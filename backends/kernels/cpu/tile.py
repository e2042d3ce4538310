"""Tiles: the words and the normals of some places, with SIMD vectors. A place is a row of a block of four columns.

One loop makes the words of a tile, and a second one its normals. In a single loop, the chain of instructions from
counters to normals would be too long for a processor to overlap iterations: it took 1.4 times as long.

In a tile along rows, the places of a row follow each other, and its elements are adjacent in memory. In a tile down
rows, the places of a block follow each other, and the elements of a column are adjacent.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from multisample.backends.kernels.compilation import inline
from multisample.backends.kernels.stream.arithmetic import product, signed
from multisample.backends.kernels.stream.normals import (
    FLOAT64_KEY,
    half_turns_f32,
    half_turns_f64,
    radius_f32,
    radius_f64,
)
from multisample.backends.kernels.stream.vectors import in_every_lane, interleaved, joined, lane_numbers
from multisample.backends.kernels.stream.words import column_part, row_part, stream_key, word, words

from .intrinsics import load_vector, prefetch, store_vector

# Lanes of a vector of words, which has one word in each lane of 64 bits.
_WORDS = 8
# Elements of the array `layout` for a vector of places: rows or blocks, and column parts, or two row parts.
_ALONG, _DOWN = 9 * _WORDS, 6 * _WORDS


class Tile(NamedTuple):
    """Sizes and functions of tiles of one computing type.

    A tile has two arrays: `words`, and `layout` (uint64), which has what the tiles of a call have in common.
    """

    lanes: int
    """Normals in a vector."""
    places: int
    """Maximum places of a tile down rows, a multiple of `lanes`. A tile along rows has at most half as many."""
    words_length: int
    layout_length: int
    """The lengths of `words` and of `layout`."""
    word_type: Any
    """Type of an element of `words`."""
    lay_out_along: Callable[..., Any]
    """``(layout, block, width, places, stream)``: rows of `width` blocks, from `block` on."""
    lay_out_list: Callable[..., Any]
    """``(layout, blocks, first, places, stream)``: the elements of an array (uint64) from `first` on."""
    draw_row: Callable[..., Any]
    """``(words, layout, row, places, stream)`` draws the words of a tile of one row."""
    draw_rows: Callable[..., Any]
    """``(words, layout, row, places, stream)`` draws the words of a tile of several rows."""
    put_normals: Callable[..., Any]
    """``(z, at, words, places, antithetic, ahead)`` stores the normals of a tile along rows, in whole vectors.

    It prefetches as many elements of `ahead`, where they will be stored next.
    """
    lay_out_down: Callable[..., Any]
    """``(layout, row, height, places, stream)``: blocks of `height` rows, at most 256, from `row` on."""
    draw_block: Callable[..., Any]
    """``(words, block, row, places, stream, all_words)`` draws the words of a tile down the rows of one block.

    Without `all_words`, only those of the first normals.
    """
    first_at: Callable[..., Any]
    """``(words, place)``: the vector of first normals, for places of a tile by `draw_block`."""
    draw_blocks: Callable[..., Any]
    """``(words, layout, block, places, stream)`` draws the words of a tile down the rows of several blocks."""
    pair_at: Callable[..., Any]
    """``(words, pair, place)``: vectors of both normals of a pair, for places of a tile down rows."""


@inline
def stream_of(seed, offset):
    """What the words of all places have in common: both halves of the offset, and the key."""
    k0, k1 = stream_key(seed)
    return word(offset), offset >> np.uint64(32), k0, k1


@inline
def _quotient(places, divisor):
    """Numbers below 1024 in lanes, divided by a number up to 256."""
    return places * np.uint64(((1 << 20) + divisor - 1) // divisor) >> np.uint64(20)


@functools.cache
def tile_of(real: str) -> Tile:
    """The tiles of a computing type.

    Two vectors of words, A and B, are joined in lanes of 64 bits, which hold two words of float32 or one of float64. In
    a tile of float32 down rows, A has the even places and B the odd ones. In tiles of float64, A and B have the same
    places, and A has the second block of each place, whose words are the lower halves.
    """
    is_fine = real == "float64"
    lanes = 8 if is_fine else 16
    both = 2 * lanes
    most_places = 32 * lanes
    radius, half_turns = (radius_f64, half_turns_f64) if is_fine else (radius_f32, half_turns_f32)
    layout_length = max(_ALONG * most_places // (2 * _WORDS), _DOWN * most_places // lanes)
    # Places in a lane of a tile down rows.
    shared = lanes // _WORDS
    # From the words of a radius to those of its angle, in a tile along rows.
    to_angles = 2 * most_places

    @inline
    def stream_a(stream):
        o0, o1, k0, k1 = stream
        return o0, o1, k0, k1 ^ FLOAT64_KEY if is_fine else k1

    @inline
    def normals_of(radii, angles):
        r, (c, s) = radius(radii), half_turns(signed(angles))
        return product(r, c), product(r, s)

    # --- Tiles along rows ---

    @inline
    def put_columns(layout, v, blocks, stream):
        store_vector(layout, _ALONG * v + _WORDS, column_part(blocks, *stream))
        if is_fine:
            store_vector(layout, _ALONG * v + 5 * _WORDS, column_part(blocks, *stream_a(stream)))

    @inline
    def lay_out_along(layout, block, width, places, stream):
        for v in range((places + _WORDS - 1) // _WORDS):
            place = lane_numbers(np.uint64, _WORDS) + np.uint64(_WORDS * v)
            row = _quotient(place, width)
            store_vector(layout, _ALONG * v, row)
            put_columns(layout, v, place - row * np.uint64(width) + np.uint64(block), stream)

    @inline
    def lay_out_list(layout, blocks, first, places, stream):
        for v in range((places + _WORDS - 1) // _WORDS):
            put_columns(layout, v, load_vector(blocks, first + _WORDS * v, _WORDS), stream)

    @inline
    def put_words(out, v, layout, row, stream):
        w, at = words(load_vector(layout, _ALONG * v + _WORDS, _WORDS, 4), row, stream[2], stream[3]), 2 * _WORDS * v
        if is_fine:
            keys = stream_a(stream)
            f = words(load_vector(layout, _ALONG * v + 5 * _WORDS, _WORDS, 4), row, keys[2], keys[3])
            store_vector(out, at, interleaved(joined(f[0], w[0]), joined(f[2], w[2])))
            store_vector(out, at + to_angles, interleaved(joined(f[1], w[1]), joined(f[3], w[3])))
        else:
            store_vector(out, at, joined(w[0], w[2]))
            store_vector(out, at + to_angles, joined(w[1], w[3]))

    @inline
    def draw_row(out, layout, row, places, stream):
        # Vectors, because `draw_rows` has vectors too: Numba then compiles `put_words` once.
        part = in_every_lane(row_part(np.uint64(row), stream[0], stream[2]), _WORDS)
        for v in range((places + _WORDS - 1) // _WORDS):
            put_words(out, v, layout, part, stream)

    @inline
    def draw_rows(out, layout, row, places, stream):
        for v in range((places + _WORDS - 1) // _WORDS):
            rows = load_vector(layout, _ALONG * v, _WORDS) + np.uint64(row)
            put_words(out, v, layout, row_part(rows, stream[0], stream[2]), stream)

    @inline
    def put_normals(z, at, words, places, antithetic, ahead):
        for v in range((2 * places + lanes - 1) // lanes):
            prefetch(ahead, both * v, both)
            first, second = normals_of(
                load_vector(words, lanes * v, lanes), load_vector(words, to_angles + lanes * v, lanes)
            )
            x, y = interleaved(first, second)
            if antithetic:
                store_vector(z, at + 4 * lanes * v, interleaved(x, -x))
                store_vector(z, at + 4 * lanes * v + both, interleaved(y, -y))
            else:
                store_vector(z, at + both * v, (x, y))

    # --- Tiles down rows ---

    @inline
    def places_at(place):
        a = lane_numbers(np.uint64, _WORDS) * np.uint64(shared) + np.uint64(place)
        return a, a + np.uint64(shared - 1)

    @inline
    def put_words_down(out, place, columns_a, columns_b, rows_a, rows_b, stream, all_words):
        a = words(columns_a, rows_a, stream[2], stream_a(stream)[3])
        b = words(columns_b, rows_b, stream[2], stream[3])
        store_vector(out, place, joined(a[0], b[0]))
        store_vector(out, place + most_places, joined(a[1], b[1]))
        if all_words:
            store_vector(out, place + 2 * most_places, joined(a[2], b[2]))
            store_vector(out, place + 3 * most_places, joined(a[3], b[3]))

    @inline
    def draw_block(out, block, row, places, stream, all_words):
        g = np.uint64(block)
        columns_a = in_every_lane(column_part(g, *stream_a(stream)), _WORDS)
        columns_b = in_every_lane(column_part(g, *stream), _WORDS)
        for place in range(0, places, lanes):
            a, b = places_at(row + place)
            rows_a, rows_b = row_part(a, stream[0], stream[2]), row_part(b, stream[0], stream[2])
            put_words_down(out, place, columns_a, columns_b, rows_a, rows_b, stream, all_words)

    @inline
    def first_at(words, place):
        radii, angles = load_vector(words, place, lanes), load_vector(words, place + most_places, lanes)
        return product(radius(radii), half_turns(signed(angles))[0])

    @inline
    def lay_out_down(layout, row, height, places, stream):
        first, size = np.uint64(row), np.uint64(height)
        for place in range(0, places, lanes):
            at, (a, b) = _DOWN * (place // lanes), places_at(place)
            block_a, block_b = _quotient(a, height), _quotient(b, height)
            rows_a, rows_b = a - block_a * size + first, b - block_b * size + first
            store_vector(layout, at, (block_a, block_b, *row_part(rows_a, stream[0], stream[2])))
            store_vector(layout, at + 4 * _WORDS, row_part(rows_b, stream[0], stream[2]))

    @inline
    def draw_blocks(out, layout, block, places, stream):
        g = np.uint64(block)
        for place in range(0, places, lanes):
            at = _DOWN * (place // lanes)
            block_a, block_b, high_a, low_a, high_b, low_b = load_vector(layout, at, _WORDS, 6)
            columns_a, columns_b = column_part(block_a + g, *stream_a(stream)), column_part(block_b + g, *stream)
            put_words_down(out, place, columns_a, columns_b, (high_a, low_a), (high_b, low_b), stream, True)

    @inline
    def pair_at(words, pair, place):
        at = 2 * pair * most_places + place
        return normals_of(load_vector(words, at, lanes), load_vector(words, at + most_places, lanes))

    return Tile(
        lanes, most_places, 4 * most_places, layout_length, np.dtype(f"u{64 // lanes}").type,
        lay_out_along, lay_out_list, draw_row, draw_rows, put_normals, lay_out_down, draw_block, first_at,
        draw_blocks, pair_at,
    )  # fmt: skip
