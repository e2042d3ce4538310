"""Numba's types of a kernel's parameters.

Numba passes each field of both tuples, which gives the bytes of both C++ structs.
"""

from __future__ import annotations

import collections

from numba import types

from multisample.backends.launch import FIELD_AT, FORMATS, SAMPLE_CALL

from .geometry import FORMAT, Geometry

_i32, _i64, _u32, _u64 = types.int32, types.int64, types.uint32, types.uint64
# Kernels compute with addresses as signed numbers, and reinterpret the bits of an input that is a number.
_TYPES = {"P": _i64, "q": _i64, "Q": _u64, "I": _u32, "i": _i32}

_FIELDS = {name: FORMATS[name] for name, at in FIELD_AT.items() if SAMPLE_CALL.start <= at < SAMPLE_CALL.stop}
CALL = types.NamedTuple([_TYPES[form] for form in _FIELDS.values()], collections.namedtuple("SampleCall", _FIELDS))
GEOMETRY = types.NamedTuple([_TYPES[form] for form in FORMAT], Geometry)
SIGNATURE = types.void(CALL, GEOMETRY)
