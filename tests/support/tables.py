"""Tables of test parameters: element types, noises, store variants and kernel variants. Each table exists once."""

import itertools
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

ROWS, COLUMNS = 2**32, 2**34
"""The numbers of rows and columns of the sample matrix that windows are cut from."""

NARROW: dict[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
DTYPES: dict[str, Any] = {**NARROW, "float32": np.float32, "float64": np.float64}
"""Element types of results."""
QUICK_KERNELS = [("float32", False), ("float32", True), ("float64", False), ("float16", False)]
"""Element type and antithetic of those kernels of the cpu backend that quick tests use: each takes 3 s to compile."""
INPUTS = [np.dtype(kind) for kind in DTYPES.values()]
INPUTS += [np.dtype(f"{sign}int{width}") for sign in ("", "u") for width in (8, 16, 32, 64)]
"""Element types of mu and sigma."""

NOISES = ("independent", "shared")
STORE_KINDS = (
    "aligned", "shifted", "staged", "strided", "transposed", "transposed_staged", "few_columns", "small_matrices",
    "plain", "plain_transposed", "few_rows",
)  # fmt: skip
"""Store kinds of the CUDA kernels, in the order of the C++ enumeration."""

Variant = tuple[str, bool, bool, bool, int]
"""Element type, whether noise is shared, antithetic, fast_math, and the index in `STORE_KINDS`."""
PLAIN_VERSIONS = {
    "plain": ((1, False), (4, False), (1, True), (4, True), (8, True)),
    "plain_transposed": ((1, False), (3, False), (1, True), (2, True), (3, True)),
}
"""`Geometry.version` of plain kernels."""


def versions_of(kind: str, dtype: str, antithetic: bool) -> list[tuple[int, bool]]:
    """The versions of a kernel: one for a kernel that is not plain."""
    return [x for x in PLAIN_VERSIONS.get(kind, ((0, False),)) if x[0] != 8 or (dtype != "float64" and not antithetic)]


_EVERY = itertools.product(DTYPES, (False, True), (False, True), (False, True), range(len(STORE_KINDS)))
VARIANTS: list[Variant] = [variant for variant in _EVERY if not (variant[3] and variant[0] == "float64")]
"""All variants of the CUDA kernel."""
QUICK: list[Variant] = [
    ("float32", False, False, False, 0), ("float16", False, True, True, 1), ("bfloat16", True, False, False, 2),
    ("float64", False, False, False, 3), ("float32", False, True, False, 4), ("float32", False, False, False, 5),
    ("float32", False, False, False, 6), ("float32", False, False, False, 7), ("float32", False, False, False, 8),
    ("bfloat16", False, True, False, 9), ("float16", False, False, True, 10),
]  # fmt: skip
"""One variant for each store kind."""


def _pairs(variant: Variant) -> set[tuple[Any, ...]]:
    return set(itertools.combinations(enumerate(variant), 2))


def _covering() -> list[Variant]:
    found, missing = list(QUICK), set().union(*map(_pairs, VARIANTS)).difference(*map(_pairs, QUICK))
    while missing:
        found.append(max(VARIANTS, key=lambda variant: len(missing & _pairs(variant))))
        missing -= _pairs(found[-1])
    return found


COVERING = _covering()
"""A subset with all pairs of choices, for compilers that are slow; `QUICK` comes first."""

GradientVariant = tuple[str, bool, bool, bool, int, bool, bool]
"""Element type, whether noise is shared, antithetic, fast_math, rows of a thread, whether vectorised loads
(`kAtOnce`) read every whole group, and whether the kernel reads the seed and the window from memory."""
GRADIENTS: list[GradientVariant] = [
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

ONE_OPTION: dict[str, dict[str, Any]] = {
    "plain": {}, "shared": {"noise": "shared"}, "antithetic": {"antithetic": True}, "nd": {"layout": "nd"},
    "window": {"dim_offset": 3, "sample_offset": 5},
}  # fmt: skip
"""Options of `sample`, one or none at a time, by name."""


def slow_but(quick: Iterable[Any], values: Iterable[Any], *, several: bool = False) -> list[Any]:
    """Parameters from `values`, those not in `quick` marked ``slow``. With `several`, values are tuples."""
    quick = list(quick)
    slow = pytest.mark.slow
    return [x if x in quick else pytest.param(*(x if several else [x]), marks=slow) for x in values]
