"""The geometry of perturb, for backends that launch from Python: its cut into kernels and blocks.

A twin of ``csrc/cuda/perturb_geometry.h``, which has the reasons.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from multisample.backends.launch import PACKED_LAUNCH, SPAN, UNIT_FACTOR, ElementType, Launch, Span

from .geometry import ELEMENT_SIZES, OF_BATCH, OF_ROWS, WIDTH, ceil_div

__all__ = [
    "HEAD_WORDS", "KEYS_BYTES", "PERTURB_THREADS", "SpanList", "Spans", "fields_of", "most_spans", "origin_of",
    "perturb_turns", "span_lists", "spans_at",
]  # fmt: skip

Spans: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
"""Packed spans, one in each row."""

PERTURB_THREADS = 256
_MOST_TURNS, _MOST_TURN_ROWS = 8, 32
_BLOCKS = 4096
_MOST_PARAMETERS, KEYS_BYTES = 4096, 160
_WORD = 8

HEAD_WORDS = 2
"""Words of 8 bytes before the spans of a list: one with the counts of spans and turns, one with that of blocks."""
_RUN_FIELDS = ("source", "target", "first", "width", "id")
_STRIDED_FIELDS, _WIDE_FIELDS = Span._fields[:-3], Span._fields[-3:]
"""Fields of a span in a list. The high half of `id` is the first block. A wide span has all."""
(_FIRST, _ROWS, _WIDTH, _JUMP, _SOURCE_ROW, _SOURCE_STRIDE, _TARGET_ROW, _TARGET_STRIDE, _ID) = (
    Span._fields.index(name) for name in _STRIDED_FIELDS[2:]
)


def _own_groups(launch: Launch) -> int:
    """Groups of a thread in one turn."""
    size = ELEMENT_SIZES[launch.type]
    return 1 if size == 8 else 4 if launch.rows != 1 else 2 if size == 2 else 1


def fields_of(strided: bool, wide: bool) -> int:
    """How many fields a span in a list has."""
    return len(_STRIDED_FIELDS if strided else _RUN_FIELDS) + wide * len(_WIDE_FIELDS)


def most_spans(strided: bool, wide: bool = False) -> int:
    """Spans of a list that fills the parameters of a kernel."""
    words = (_MOST_PARAMETERS - PACKED_LAUNCH - KEYS_BYTES) // _WORD - HEAD_WORDS
    return words // fields_of(strided, wide)


def origin_of(launch: Launch, spans: Spans) -> int:
    """The index in `ORIGINS` of the kernels that run a launch with `spans`."""
    if launch.shared_noise:
        return OF_ROWS
    wide = launch.batch > 1 or launch.sigma_type != ElementType.number or (spans[:, -1] != UNIT_FACTOR).any()
    return OF_BATCH if wide else int(launch.origin_in_memory)


def spans_at(packed: bytes) -> Spans:
    """The spans in `packed`."""
    return np.frombuffer(packed, np.int64).reshape(-1, SPAN.size // _WORD)


class SpanList(NamedTuple):
    """The spans of the kernels of one kind."""

    strided: bool
    blocks: list[int]
    """The blocks of each kernel."""
    words: Spans
    """The list of each kernel."""
    chosen: Spans | slice
    """Indices of the spans of this kind."""
    places: Spans
    """Where the source, the target, and the factor of a wide span, of each are in `words`."""

    def packed(self, spans: Spans) -> list[bytes]:
        """The bytes of the C++ struct ``SpanList`` for each kernel, with the addresses and factors in `spans`."""
        words = self.words.copy()
        words.reshape(-1)[self.places] = spans[self.chosen][:, (0, 1, -1)[: self.places.shape[1]]]
        return [row.tobytes() for row in words]


def perturb_turns(launch: Launch, spans: Spans) -> int:
    """Turns of the blocks that perturb `spans`."""
    rows, size = launch.rows, ELEMENT_SIZES[launch.type]
    most = min(_MOST_TURNS, _MOST_TURN_ROWS // max(rows, 1))
    if rows == 1 and size == 4:
        most = _MOST_TURNS // 2 if launch.fast_math else _MOST_TURNS
    elif rows == 1 and size == 2:
        most = 2 * _MOST_TURNS
    elements = int((spans[:, _ROWS] * spans[:, _WIDTH]).sum()) * max(launch.batch, 1)
    return max(1, min(elements // (WIDTH * _own_groups(launch) * PERTURB_THREADS * _BLOCKS), most))


def span_lists(launch: Launch, spans: Spans, origin: int) -> list[SpanList]:
    """The kernels for `spans`, whatever their addresses are, with `origin_of` the launch."""
    wide, turns, size = origin >= OF_BATCH, perturb_turns(launch, spans), ELEMENT_SIZES[launch.type]
    others = list(range(len(_STRIDED_FIELDS), len(Span._fields))) if wide else []
    length, width, jump = spans[:, _ROWS], spans[:, _WIDTH], spans[:, _JUMP]
    one_row, row = length == 1, width * size
    adjacent = (width == 1) | ((spans[:, _SOURCE_STRIDE] == size) & (spans[:, _TARGET_STRIDE] == size))
    joined = (jump == width) & (spans[:, _SOURCE_ROW] == row) & (spans[:, _TARGET_ROW] == row)
    is_run = adjacent & (one_row | joined)
    of_block = turns * _own_groups(launch) * PERTURB_THREADS
    lists = []
    for strided, of_kind in enumerate((is_run, ~is_run)):
        count = int(of_kind.sum())
        if count == 0:
            continue
        chosen: Any = slice(None) if count == len(spans) else np.flatnonzero(of_kind)
        part = spans[chosen]
        if strided:
            same = one_row[chosen] | (part[:, _JUMP] % WIDTH == 0)
            skip = np.where(same, part[:, _FIRST] % WIDTH, WIDTH - 1)
            groups = part[:, _ROWS] * ((skip + part[:, _WIDTH] + WIDTH - 1) // WIDTH)
            entries = part[:, [*range(len(_STRIDED_FIELDS)), *others]]
        else:
            entries = part[:, [0, 1, _FIRST, _WIDTH, _ID, *others]]
            entries[:, 3] *= part[:, _ROWS]
            groups = (entries[:, 2] % WIDTH + entries[:, 3] + WIDTH - 1) // WIDTH
        lists.append(_list_of(bool(strided), wide, chosen, entries, -(-groups // of_block), turns))
    return lists


def _list_of(strided: bool, wide: bool, chosen: Any, entries: Spans, blocks: Spans, turns: int) -> SpanList:
    (count, fields), at_id, most = entries.shape, fields_of(strided, False) - 1, most_spans(strided, wide)
    kernels = ceil_div(count, most)
    at_span = np.arange(count)
    ends = np.cumsum(blocks)
    begins = ends - blocks
    before = begins[::most]
    entries[:, at_id] |= begins - before[at_span // most] << 32
    words = np.zeros((kernels, HEAD_WORDS + most * fields), np.int64)
    at = at_span // most * words.shape[1] + HEAD_WORDS + at_span % most * fields
    words.reshape(-1)[at[:, None] + np.arange(fields)] = entries
    of_kernel = [int(n) for n in np.add.reduceat(blocks, np.arange(0, count, most))]
    words[:, 0] = np.minimum(count - most * np.arange(kernels), most) | turns << 32
    words[:, 1] = of_kernel
    moving = (0, 1, fields - 1) if wide else (0, 1)
    return SpanList(strided, of_kernel, words, chosen, at[:, None] + np.array(moving))
