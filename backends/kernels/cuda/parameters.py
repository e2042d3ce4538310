"""Numba's types of a kernel's parameters.

Numba passes each field of both tuples, which gives the bytes of both C++ structs.
"""

from __future__ import annotations

from typing import Any

from numba import types

from multisample.backends.launch import FORMATS, Launch

from .geometry import Geometry
from .kernel_choice import OF_BATCH
from .keys import Key, MomentsKey, PerturbKey
from .moments_geometry import MomentGeometry
from .perturb_geometry import HEAD_WORDS, MOST_SPANS_OF_NUMBA, fields_of

_i32, _i64, _u32, _u64 = types.int32, types.int64, types.uint32, types.uint64
# Kernels compute with addresses as signed numbers, and reinterpret the bits of an input that is a number.
_TYPES = {"P": _i64, "q": _i64, "Q": _u64, "I": _u32, "i": _i32}

LAUNCH = types.NamedTuple([_TYPES[form] for form in FORMATS.values()], Launch)
GEOMETRY = types.NamedTuple((_u32,) * 15 + (_i32, _u32, _i32, *(_u32,) * 4), Geometry)
MOMENT_GEOMETRY = types.NamedTuple((_u32,) * 10 + (_i64,) * 2, MomentGeometry)


def spans_type(strided: bool, wide: bool) -> types.Type:
    """The type of a list of spans, as 64-bit words."""
    fields = fields_of(strided, wide)
    return types.UniTuple(_i64, HEAD_WORDS + fields * MOST_SPANS_OF_NUMBA[strided])


def signature_of(key: Key) -> Any:
    """The signature of a kernel."""
    if isinstance(key, PerturbKey):
        return types.void(LAUNCH, spans_type(key.strided, key.origin >= OF_BATCH))
    return types.void(LAUNCH, MOMENT_GEOMETRY if isinstance(key, MomentsKey) else GEOMETRY)
