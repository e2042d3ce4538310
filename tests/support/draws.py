"""Draws for tests of kernels and backends, with defaults for all fields."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any, TypeAlias

import numpy as np

from multisample.backends import registry
from multisample.backends.draw import HOST, SIZES, Draw, ElementType, Operation, Vector, Word

__all__ = [
    "WORDS", "a_draw", "a_vector", "draw_words", "stored_word", "stored_words", "with_words_in_memory",
    "without_builtins",
]  # fmt: skip

WORDS = ("seed", "offset", "first_row", "first_column")
"""The fields of a draw that are words."""

AnyVector: TypeAlias = "Vector | np.ndarray[Any, Any] | float"


def a_vector(x: AnyVector) -> Vector:
    """`mu` or `sigma` of a draw, from an array or a number."""
    if isinstance(x, Vector):
        return x
    if isinstance(x, float):
        return Vector(0, 0, x, ElementType.number)
    return Vector(_address(x), x.strides[0], 0.0, ElementType[x.dtype.name])


def a_draw(
    rows: int = 3,
    columns: int = 5,
    dtype: str = "float32",
    *,
    mu: AnyVector = 0.0,
    sigma: AnyVector = 1.0,
    matrix: np.ndarray[Any, Any] | int = 0,
    strides: tuple[int, int] | None = None,
    **changes: Any,
) -> Draw:
    """A draw in host memory with seed 1, and `changes` to its other fields.

    Parameters
    ----------
    matrix : array or int
        The (rows, columns) matrix, or its address.
    strides : tuple of int
        Strides of the matrix in bytes; by default those of the array, or of contiguous rows.
    changes
        Fields of `Draw` by name. Words may be ints.
    """
    size = SIZES[dtype]
    if isinstance(matrix, np.ndarray):
        assert matrix.shape == (rows, columns) and matrix.itemsize == size
        matrix, strides = _address(matrix), strides or matrix.strides
    row_stride, column_stride = strides or (columns * size, size)
    words = {"seed": 1, "offset": 0, "first_row": 0, "first_column": 0}
    words |= {name: changes.pop(name) for name in WORDS if name in changes}
    draw = Draw(
        a_vector(mu), a_vector(sigma), matrix, row_stride, column_stride, rows, columns,
        *(word if isinstance(word, Word) else Word(word) for word in words.values()),
        scratch=0, stream=0, type=ElementType[dtype], operation=Operation.sample, common_noise=False, antithetic=False,
        fast_math=False, device=HOST,
    )  # fmt: skip
    return draw._replace(**changes)


def stored_word(name: str, value: int) -> int:
    """The 64-bit number that stands in memory for a word: a seed has its high half first."""
    return (value << 32 | value >> 32) & 0xFFFF_FFFF_FFFF_FFFF if name == "seed" else value


def stored_words(values: dict[str, int]) -> list[int]:
    """`stored_word` of each word."""
    return [stored_word(name, value) for name, value in values.items()]


def draw_words(values: dict[str, int], names: Collection[str], address: int = 8) -> dict[str, Word]:
    """Words of a draw that reads those of `names` from `stored_words` at `address`, and has other values of them."""
    return {
        name: Word(value ^ 0x100000005, address + 8 * k) if name in names else Word(value)
        for k, (name, value) in enumerate(values.items())
    }


def with_words_in_memory(draw: Draw, *names: str) -> tuple[Draw, np.ndarray[Any, Any]]:
    """A draw that reads these words from memory, and the memory. The draw's own values of the words are different."""
    memory = np.array([stored_word(name, getattr(draw, name).value) for name in names], np.uint64)
    words = {
        name: Word(getattr(draw, name).value ^ 0x5A5A5A5A5, memory[k:].ctypes.data) for k, name in enumerate(names)
    }
    return draw._replace(**words), memory


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


@contextlib.contextmanager
def without_builtins() -> Iterator[None]:
    """Disable the compiled builtins of torch_ext, so that its calls run in Python."""
    from multisample._libraries.torch import TORCH
    from multisample._plan import PLANS
    

    backend: Any = registry.find("torch_ext")
    backend.prepare("cpu")
    builtins, key = backend._builtins, TORCH.key
    assert builtins is not None
    backend._builtins = TORCH.key = None
    PLANS.clear()
    try:
        yield
    finally:
        backend._builtins, TORCH.key = builtins, key
        PLANS.clear()
