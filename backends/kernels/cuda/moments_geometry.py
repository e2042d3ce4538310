"""The geometry of weighted moments, for backends that launch from Python.

A twin of ``csrc/cuda/moments_geometry.h``, which has the reasons. The order of the sums follows from it.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import NamedTuple

from .kernel_choice import ANTITHETIC_WIDTH, WIDTH, ceil_div

MOMENT_THREADS = 256
MOMENT_ROWS = 4
_PROCESSORS, _LEAST_SHARE, _MOST_SHARE, _START_TURNS = 132, 4, 8, 2
FILL = {"float32": 256, "float64": 128}

_STRUCT = struct.Struct("10I2Q")

PACKED_MOMENT_GEOMETRY = _STRUCT.size
"""Bytes of the C++ struct ``MomentGeometry``."""


class MomentGeometry(NamedTuple):
    """The fields of the C++ struct ``MomentGeometry``, in their order."""

    blocks: int
    rows: int
    team: int
    slots: int
    sweeps: int
    skip: int
    segments: int
    finishing_blocks: int
    width: int
    unused: int
    groups: int
    turns: int

    def packed(self) -> bytes:
        """The bytes of the C++ struct."""
        return _STRUCT.pack(*self)

    def scratch_size(self, d: int, shared_noise: bool, order: int) -> int:
        """How many float64 numbers of scratch memory a launch needs."""
        return self.segments * ((1 if shared_noise else d) * order + 2) if self.finishing_blocks else 0


@functools.lru_cache(maxsize=1024)
def moment_geometry(
    d: int, n: int, real: str, first_column: int, shared_noise: bool, antithetic: bool, origin_in_memory: bool = False
) -> MomentGeometry:
    """The geometry of a launch with `d` dimensions and `n` weights, in the computing type `real`.

    `first_column` is that of the call modulo 8, or -1 if it is in device memory.
    """
    width = ANTITHETIC_WIDTH if antithetic else WIDTH
    skip = first_column % width if first_column >= 0 else width - 1
    groups = ceil_div(skip + n, width)
    rows = 1 if shared_noise else d
    many = rows >= 16 and groups >= ceil_div(1 << 22, rows)
    own_rows = MOMENT_ROWS if many and real != "float64" and not origin_in_memory else 1
    team, least = MOMENT_THREADS, 32 if own_rows > 1 else 8
    tiles = ceil_div(rows, own_rows * team)
    while team > least and tiles < 4096 and (team >= rows or groups >= (2048 if tiles < 256 else 8192) // team):
        team //= 2
        tiles = ceil_div(rows, own_rows * team)
    team = ceil_div(rows, own_rows * tiles)
    slots = min(MOMENT_THREADS // team, groups)
    tiles = ceil_div(rows, own_rows * team)
    turns_of_all = ceil_div(groups, slots)
    turns, least_time = turns_of_all, math.inf
    for share in range(_MOST_SHARE, _LEAST_SHARE - 1, -1):
        segments = min(share * _PROCESSORS // tiles, turns_of_all // 8)
        if segments < 2 or (tiles >= 256 and turns_of_all < 64):
            continue
        of_segment = ceil_div(turns_of_all, segments)
        blocks = ceil_div(turns_of_all, of_segment) * tiles
        time = ceil_div(blocks, _PROCESSORS) * (of_segment + _START_TURNS)
        if 21 * time < 20 * least_time:
            turns, least_time = of_segment, time
    segments = ceil_div(turns_of_all, turns)
    sweeps = min(max(tiles // 8192, 1), 16) if segments == 1 and groups <= FILL[real] else 1
    blocks, finishing_blocks, finished = ceil_div(tiles, sweeps) * segments, 0, 0
    if segments > 1 or shared_noise:
        finished = 1 if shared_noise else min(32, 1 << rows.bit_length() - 1)
        finishing_blocks = min(ceil_div(d, MOMENT_THREADS), 1024) if shared_noise else ceil_div(d, finished)
    return MomentGeometry(
        blocks, own_rows, team, slots, sweeps, skip, segments, finishing_blocks, finished, 0, groups, turns
    )
