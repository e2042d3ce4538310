"""What tests go through: element types, noises, ways to store and variants of kernels. Each table exists once."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

__all__ = [
    "COLUMNS",
    "COVERING",
    "DTYPES",
    "GRADIENT_VARIANTS",
    "INPUTS",
    "NARROW",
    "NOISES",
    "QUICK",
    "ROWS",
    "STORES",
    "VARIANTS",
    "GradientVariant",
    "Variant",
    "slow_but",
]  # fmt: skip

ROWS, COLUMNS = 2**32, 2**34
"""Of the endless matrix that a sample is a window of."""

NARROW: dict[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
DTYPES: dict[str, Any] = {**NARROW, "float32": np.float32, "float64": np.float64}
"""Of results."""
INPUTS = [np.dtype(kind) for kind in DTYPES.values()]
INPUTS += [np.dtype(f"{sign}int{width}") for sign in ("", "u") for width in (8, 16, 32, 64)]
"""Of mu and sigma."""

NOISES = ("independent", "shared")
STORES = ("aligned", "shifted", "staged", "strided", "transposed", "transposed_staged")
"""Ways of a CUDA kernel to store, in the order of the C++ enumeration."""

Variant = tuple[str, bool, bool, bool, int]
"""Element type, whether noise is shared, antithetic, fast_math, and the number in `STORES`."""
VARIANTS: list[Variant] = [
    variant
    for variant in itertools.product(DTYPES, (False, True), (False, True), (False, True), range(len(STORES)))
    if not (variant[3] and variant[0] == "float64")
]
"""All that the CUDA kernel is compiled for."""
COVERING = [
    variant
    for variant in VARIANTS
    for dtype, shared, antithetic, fast, stores in [variant]
    # float32 with everything but fast_math in full; of the others, and of fast_math, each in turn.
    if (dtype == "float32" and not fast)
    or (dtype == "float32" and antithetic == ((stores + shared) % 2 == 1))
    or (dtype == "float64" and antithetic == ((stores + shared) % 2 == 0))
    or (dtype == "float16" and (antithetic, fast) == ((stores + shared) % 2 == 0, (stores // 2 + shared) % 2 == 0))
    or (dtype == "bfloat16" and (shared, antithetic, fast) == (stores % 2 == 1, stores // 2 % 2 == 0, stores == 3))
]
"""With all pairs of choices, and of float32 all that is portable: compiled where to compile all takes too long."""
QUICK: list[Variant] = [
    ("float32", False, False, False, 0),
    ("float16", False, True, True, 1),
    ("bfloat16", True, False, False, 2),
    ("float64", False, False, False, 3),
    ("float32", False, True, False, 4),
    ("float32", False, False, False, 5),
]
"""One of each way to store."""

GradientVariant = tuple[str, bool, bool, bool, int, bool, bool]
"""Element type, whether noise is common, antithetic, fast_math, rows of a thread, whether the kernel only reads at
once, and whether it reads the seed and the window from memory."""
GRADIENT_VARIANTS: list[GradientVariant] = [
    (dtype, shared, antithetic, fast, rows, only_at_once, origin_in_memory)
    for dtype, shared, antithetic, fast in itertools.product(DTYPES, (False, True), (False, True), (False, True))
    for rows, only_at_once, origin_in_memory in (
        (1, False, False),
        (1, False, True),
        (2 if antithetic else 4, False, False),
        (2 if antithetic else 4, True, False),
    )
    if not (fast and dtype == "float64")
    if not (shared and rows == 1)
    if not (rows > 1 and dtype == "float64" and not shared)
]
"""All that the gradient's CUDA kernel is compiled for."""


def slow_but(quick: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """`values` as parameters of a test, marked slow but for those in `quick`."""
    quick = list(quick)
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]
