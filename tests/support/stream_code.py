"""The stream's functions of both languages, applied to arrays. Compiled Python passes words as uint64 with an undefined
upper half, so words, rows and columns are uint64 here.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cuda_cpp import SHIM, compile_cpp
from numba import njit
from tables import NARROW

from multisample.backends.kernels.stream import normals, rounding, words
from multisample.numba import normals4, normals4_f64

Array = np.ndarray[Any, Any]


class Code(NamedTuple):
    """Functions of arrays with shape (m,)."""

    words: Callable[..., Array]
    """Seeds, offsets, rows and blocks give words of shape (m, 4)."""
    transform: dict[str, Callable[..., Array]]
    """By type: words a and b give normals of shape (m, 2)."""
    normals: dict[str, Callable[..., Array]]
    """By type: seeds, offsets, rows and columns give normals of shape (m,)."""
    narrow: dict[str, Callable[[Array], Array]]
    """By type: float32 numbers give the bits of their roundings."""
    widen: dict[str, Callable[[Array], Array]]
    """By type: bits give float32 numbers."""


stream_key, word, philox4x32_10 = words.stream_key, words.word, words.philox4x32_10


@njit
def _words(seeds: Array, offsets: Array, rows: Array, blocks: Array) -> Array:
    result = np.empty((len(seeds), 4), np.uint64)
    for m in range(len(seeds)):
        k0, k1 = stream_key(seeds[m])
        high = offsets[m] >> np.uint64(32)
        w0, w1, w2, w3 = philox4x32_10(blocks[m], rows[m], word(offsets[m]), high, k0, k1)
        result[m, 0], result[m, 1], result[m, 2], result[m, 3] = word(w0), word(w1), word(w2), word(w3)
    return result


def _transform(radius: Any, half_turns: Any, unsigned: Any, signed: Any, real: Any) -> Callable[..., Array]:
    @njit
    def transform(a: Array, b: Array) -> Array:
        result = np.empty((len(a), 2), real)
        for m in range(len(a)):
            r = radius(unsigned(a[m]))
            c, s = half_turns(signed(b[m]))
            result[m, 0], result[m, 1] = r * c, r * s
        return result

    return transform  # type: ignore[no-any-return]


def _normals(block: Any, real: Any) -> Callable[..., Array]:
    @njit
    def normals_at(seeds: Array, offsets: Array, rows: Array, columns: Array) -> Array:
        result = np.empty(len(seeds), real)
        for m in range(len(seeds)):
            z = block(seeds[m], offsets[m], rows[m], columns[m] >> np.uint64(2))
            result[m] = z[columns[m] & np.uint64(3)]
        return result

    return normals_at  # type: ignore[no-any-return]


def _conversion(convert_one: Any, taken: Any, made: Any) -> Callable[[Array], Array]:
    @njit
    def convert(x: Array) -> Array:
        result = np.empty(len(x), made)
        for m in range(len(x)):
            result[m] = convert_one(taken(x[m]))
        return result

    return convert  # type: ignore[no-any-return]


PYTHON = Code(
    _words,
    {
        "float32": _transform(normals.radius_f32, normals.half_turns_f32, np.uint32, np.int32, np.float32),
        "float64": _transform(normals.radius_f64, normals.half_turns_f64, np.uint64, np.int64, np.float64),
    },
    {"float32": _normals(normals4, np.float32), "float64": _normals(normals4_f64, np.float64)},
    {name: _conversion(rounding.NARROWING[name], np.float32, np.uint16) for name in NARROW},
    {name: _conversion(rounding.WIDENING[name], np.uint16, np.float32) for name in NARROW},
)


def _applied(function: Any, taken: Any, result: Any, *width: int) -> Callable[..., Array]:
    """`function` of arrays of type `taken`; the result's shape is (m, *width)."""

    def apply(*inputs: Array) -> Array:
        arrays = [np.ascontiguousarray(array, taken) for array in inputs]
        arrays.append(np.empty((len(arrays[0]), *width), result))
        function(ctypes.c_uint64(len(arrays[0])), *(array.ctypes.data_as(ctypes.c_void_p) for array in arrays))
        return arrays[-1]

    return apply


def compiled_cpp(folder: Path) -> Code:
    """Compile the C++ functions in this folder."""
    compile_cpp("-O2", "-shared", "-fPIC", SHIM / "host_functions.cpp", "-o", folder / "functions.so")
    library = ctypes.CDLL(str(folder / "functions.so"))
    reals = {"float32": np.float32, "float64": np.float64}
    return Code(
        _applied(library.stream_words, np.uint64, np.uint32, 4),
        {name: _applied(library[f"transform_{name}"], np.uint64, real, 2) for name, real in reals.items()},
        {name: _applied(library[f"normals_{name}"], np.uint64, real) for name, real in reals.items()},
        {name: _applied(library[f"narrow_{name}"], np.float32, np.uint16) for name in NARROW},
        {name: _applied(library[f"widen_{name}"], np.uint16, np.float32) for name in NARROW},
    )
