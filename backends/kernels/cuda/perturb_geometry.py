"""The geometry of perturb, for backends that launch from Python: its cut into kernels and blocks.

A twin of ``csrc/cuda/perturb_geometry.h``, which has the reasons.
"""

import enum
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from multisample.backends.launch import PACKED_LAUNCH, SPAN, UNIT_FACTOR, ElementType, Launch, Span

from .geometry import ELEMENT_SIZES, WIDTH

__all__ = [
    "HEAD_WORDS", "KEYS_BYTES", "PERTURB_THREADS", "KeyOrigin", "SpanLists", "Spans", "fields_of", "most_spans",
    "origin_of", "perturb_turns", "span_lists", "spans_at",
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
_AT = Span(*range(len(Span._fields)))
"""Columns of `Spans`."""

KeyOrigin = enum.IntEnum("KeyOrigin", ["kInParameters", "kInMemory", "kOfBatch", "kOfRows"], start=0)
"""Where a kernel finds its keys. With the last two origins, the spans are wide."""


def _own_groups(launch: Launch) -> int:
    """Groups of a thread in one turn."""
    size = ELEMENT_SIZES[launch.type]
    return 1 if size == 8 else 4 if launch.rows != 1 else 2 if size == 2 else 1


def fields_of(strided: bool, wide: bool) -> list[int]:
    """The fields of a span in a list, as indices of `Span._fields`. The high half of the id is the first block."""
    narrow = [*_AT[: _AT.id + 1]] if strided else [_AT.source, _AT.target, _AT.first, _AT.width, _AT.id]
    return [*narrow, *_AT[_AT.id + 1 :]] if wide else narrow


def most_spans(strided: bool, wide: bool = False) -> int:
    """Spans of a list that fills the parameters of a kernel."""
    words = (_MOST_PARAMETERS - PACKED_LAUNCH - KEYS_BYTES) // _WORD - HEAD_WORDS
    return words // len(fields_of(strided, wide))


def origin_of(launch: Launch, spans: Spans) -> KeyOrigin:
    """The origin of the keys of the kernels that run a launch with `spans`."""
    if launch.shared_noise:
        return KeyOrigin.kOfRows
    if launch.batch > 1 or launch.sigma_type != ElementType.number or (spans[:, -1] != UNIT_FACTOR).any():
        return KeyOrigin.kOfBatch
    return KeyOrigin.kInMemory if launch.origin_in_memory else KeyOrigin.kInParameters


def spans_at(packed: bytes) -> Spans:
    """The spans in `packed`."""
    return np.frombuffer(packed, np.int64).reshape(-1, SPAN.size // _WORD)


class SpanLists(NamedTuple):
    """The spans of the kernels of a launch: the C++ structs ``SpanList``, one after another."""

    kernels: list[tuple[bool, int, slice]]
    """Of each kernel: whether its spans are strided, its blocks, and the place of its list in `words`."""
    words: Spans
    places: Spans
    """The places of the source and the target of each span in `words`, and of the factor if spans are wide."""

    def packed(self, spans: Spans) -> list[bytes]:
        """The bytes of each list, with the addresses and factors in `spans`."""
        words = self.words.copy()
        words[self.places] = spans[:, (_AT.source, _AT.target, -1)[: self.places.shape[1]]]
        return [words[place].tobytes() for _, _, place in self.kernels]


def perturb_turns(launch: Launch, spans: Spans) -> int:
    """Turns of the blocks that perturb `spans`."""
    most = min(_MOST_TURNS, _MOST_TURN_ROWS // max(launch.rows, 1))
    elements = int((spans[:, _AT.rows] * spans[:, _AT.width]).sum()) * max(launch.batch, 1)
    return max(1, min(elements // (WIDTH * _own_groups(launch) * PERTURB_THREADS * _BLOCKS), most))


def span_lists(launch: Launch, spans: Spans, origin: KeyOrigin) -> SpanLists:
    """The kernels for `spans`, whatever their addresses are, with `origin_of` the launch."""
    turns, size, spans = perturb_turns(launch, spans), ELEMENT_SIZES[launch.type], spans.copy()
    length, width, jump = spans[:, _AT.rows], spans[:, _AT.width], spans[:, _AT.jump]
    row = width * size
    adjacent = (width == 1) | ((spans[:, _AT.source_stride] == size) & (spans[:, _AT.target_stride] == size))
    joined = (jump == width) & (spans[:, _AT.source_row] == row) & (spans[:, _AT.target_row] == row)
    is_run = adjacent & ((length == 1) | joined)
    width[is_run] *= length[is_run]
    length[is_run] = 1
    skip = np.where((length == 1) | (jump % WIDTH == 0), spans[:, _AT.first] % WIDTH, WIDTH - 1)
    groups = length * ((skip + width + WIDTH - 1) // WIDTH)
    blocks = -(-groups // (turns * _own_groups(launch) * PERTURB_THREADS))
    wide, end = origin >= KeyOrigin.kOfBatch, 0
    kernels, lists, places = [], [np.empty(0, np.int64)], np.empty((len(spans), 3 if wide else 2), np.int64)
    for strided in (False, True):
        indices, fields = np.flatnonzero(is_run != strided), fields_of(strided, wide)
        most = most_spans(strided, wide)
        for begin in range(0, len(indices), most):
            chosen = indices[begin : begin + most]
            ends, entries = np.cumsum(blocks[chosen]), spans[chosen][:, fields]
            entries[:, fields.index(_AT.id)] |= ends - blocks[chosen] << 32
            head = np.array([len(chosen) | turns << 32, ends[-1]])
            lists += [head, entries.reshape(-1), np.zeros((most - len(chosen)) * len(fields), np.int64)]
            first = end + HEAD_WORDS + np.arange(len(chosen))[:, None] * len(fields)
            places[chosen] = first + np.array([0, 1, len(fields) - 1][: places.shape[1]])
            place = slice(end, end + HEAD_WORDS + most * len(fields))
            kernels.append((strided, int(ends[-1]), place))
            end = place.stop
    return SpanLists(kernels, np.concatenate(lists), places)
