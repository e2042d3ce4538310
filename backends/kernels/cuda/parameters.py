"""Numba's types of a kernel's parameters.

Numba passes each field of both tuples, which gives the bytes of both C++ structs.
"""

from __future__ import annotations

from numba import types

from multisample.backends.draw import Draw, Vector, Word
from multisample.backends.moments import Moments

from .geometry import Geometry
from .moments_geometry import MomentGeometry

__all__ = ["DRAW", "GEOMETRY", "MOMENTS", "MOMENTS_SIGNATURE", "MOMENT_GEOMETRY", "SIGNATURE"]

_i32, _i64, _u32, _u64, _f64 = types.int32, types.int64, types.uint32, types.uint64, types.float64
_VECTOR = types.NamedTuple((_i64, _i64, _f64, _u32, _u32), Vector)
_WORD, _SIGNED_WORD = types.NamedTuple((_u64, _i64), Word), types.NamedTuple((_i64, _i64), Word)

DRAW = types.NamedTuple(
    (_VECTOR, _VECTOR) + (_i64,) * 5 + (_WORD, _WORD, _SIGNED_WORD, _SIGNED_WORD) + (_i64,) * 2 + (_u32,) * 5
    + (_i32, _u32, _u32, _u32, _u32), Draw
)  # fmt: skip
GEOMETRY = types.NamedTuple((_u32,) * 15 + (_i32, _u32, _i32, _u32, _u32, _u32), Geometry)
SIGNATURE = types.void(DRAW, GEOMETRY)

MOMENTS = types.NamedTuple((DRAW, _VECTOR, _i64, _i64), Moments)
MOMENT_GEOMETRY = types.NamedTuple((_u32,) * 10 + (_i64,) * 2, MomentGeometry)
MOMENTS_SIGNATURE = types.void(MOMENTS, MOMENT_GEOMETRY)
