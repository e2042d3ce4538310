"""The geometry of weighted moments, for backends that launch from Python.

A twin of ``csrc/cuda/moments_geometry.h``, which has the reasons. The order of the sums follows from it.
"""

import math
import struct
from typing import NamedTuple

from multisample.backends.launch import Launch, computing_name

from .geometry import ANTITHETIC_WIDTH, WIDTH, ceil_div

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

    def scratch_size(self, launch: Launch) -> int:
        """How many float64 numbers of scratch memory a launch needs."""
        rows = 1 if launch.shared_noise else launch.rows
        return self.segments * (rows * launch.results + 2) if self.finishing_blocks else 0


def moment_geometry(launch: Launch) -> MomentGeometry:
    """The geometry of a launch. If `first_column_at` is not 0, the geometry fits every first column."""
    real, shared_noise = computing_name(launch), launch.shared_noise
    width = ANTITHETIC_WIDTH if launch.antithetic else WIDTH
    skip = width - 1 if launch.first_column_at else launch.first_column % width
    groups = ceil_div(skip + launch.columns, width)
    rows = 1 if shared_noise else launch.rows
    many = rows >= 16 and groups >= ceil_div(1 << 22, rows)
    own_rows = MOMENT_ROWS if many and real != "float64" and not launch.origin_in_memory else 1
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
        finishing_blocks = ceil_div(launch.rows, MOMENT_THREADS if shared_noise else finished)
        finishing_blocks = min(finishing_blocks, 1024) if shared_noise else finishing_blocks
    return MomentGeometry(
        blocks, own_rows, team, slots, sweeps, skip, segments, finishing_blocks, finished, 0, groups, turns
    )
