"""The shapes, types and places of mu, sigma and out, and whether they go together."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from multisample.backends.draw import SIZES

from .._libraries import Device, Library, Operand, described, is_number, library_of

__all__ = [
    "Inputs",
    "check_alignment",
    "check_out",
    "common_length",
    "common_library",
    "extent",
    "inspect_inputs",
    "item_size",
    "promoted",
]

_ITEM_SIZES = SIZES | {f"{sign}int{bits}": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)}


def item_size(dtype: str) -> int:
    """Bytes of an element."""
    return _ITEM_SIZES[dtype]


class Inputs(NamedTuple):
    """`mu` and `sigma`, and what follows from them."""

    operands: dict[str, Operand]
    """Those of the two that are arrays, by name."""
    d: int
    dtype: str
    """Of the result."""
    device: Device


def common_library(mu: Any, sigma: Any, out: Any) -> Library:
    """The one library that all arrays belong to; TypeError if there are several, or none."""
    arrays = {name: x for name, x in (("mu", mu), ("sigma", sigma)) if not is_number(x)}
    if not arrays:
        raise TypeError(f"mu, sigma: expected at least one array of shape (d,), got the numbers {mu} and {sigma}")
    if out is not None:
        arrays["out"] = out
    libraries = {name: library_of(name, x) for name, x in arrays.items()}
    first = next(iter(libraries.values()))
    if any(library is not first for library in libraries.values()):
        raise TypeError(
            f"{', '.join(libraries)}: expected arrays of one library, got "
            + ", ".join(f"{described(x)} as {name}" for name, x in arrays.items())
        )
    if out is not None:
        first.check_target(out)
    return first


def inspect_inputs(library: Library, mu: Any, sigma: Any, dtype: str | None) -> Inputs:
    """`mu` and `sigma`, arrays of `library` or numbers; `dtype` is that of the result, if the caller names it."""
    operands = {name: library.describe(name, x) for name, x in (("mu", mu), ("sigma", sigma)) if not is_number(x)}
    for name, operand in operands.items():
        check_alignment(name, operand, 0)
    d = common_length({name: operand.shape for name, operand in operands.items()})
    if dtype is None:
        dtype = promoted([operand.counts_as for operand in operands.values()])
    (first, model), *others = operands.items()
    for name, operand in others:
        if operand.device != model.device:
            raise ValueError(f"{name}: expected it on the device of {first}, {model.device}, got {operand.device}")
    return Inputs(operands, d, dtype, model.device)


def common_length(shapes: dict[str, tuple[int, ...]]) -> int:
    """The number of dimensions that arrays of these shapes are for; ValueError if there is no such number."""
    lengths: dict[str, int] = {}
    for name, shape in shapes.items():
        if len(shape) == 1 or (len(shape) == 2 and shape[1] == 1):
            lengths[name] = shape[0]
        elif shape:
            raise ValueError(f"{name}: expected shape (d,) or (d, 1), got {shape}")
    if not lengths:
        raise ValueError("mu, sigma: expected at least one of shape (d,), got no dimension in either")
    d = next(iter(lengths.values()))
    if any(length != d for length in lengths.values()):
        raise ValueError(f"sigma: expected as many elements as mu, {lengths['mu']}, got {lengths['sigma']}")
    return d


def promoted(dtypes: list[str]) -> str:
    """NumPy's promotion among the floating types."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    return "float64" if "float64" in dtypes else "float32"


def check_out(operand: Operand, inputs: Inputs, shape: tuple[int, int]) -> None:
    """ValueError if `out` cannot be the result; whether it overlaps mu or sigma depends on addresses."""
    if operand.shape != shape:
        raise ValueError(f"out: expected shape {shape}, got {operand.shape}")
    if operand.dtype != inputs.dtype:
        raise ValueError(f"out: expected dtype {inputs.dtype}, got {operand.dtype}")
    if operand.device != inputs.device:
        raise ValueError(f"out: expected it on the device of mu and sigma, {inputs.device}, got {operand.device}")
    if 0 in shape:
        return
    itemsize = item_size(operand.dtype)
    if any(stride % itemsize for stride in operand.strides):
        raise ValueError(f"out: expected strides of whole elements, {itemsize} bytes, got {operand.strides}")
    if _overlaps_itself(shape, operand.strides):
        raise ValueError(
            f"out: expected memory for every sample, got strides {operand.strides} with which samples overlap"
        )


def check_alignment(name: str, operand: Operand, address: int) -> None:
    """Elements of host memory may be anywhere; those of a device only at multiples of their size."""
    itemsize = item_size(operand.dtype)
    if operand.device.kind == "cuda" and any(place % itemsize for place in (address, *operand.strides)):
        raise ValueError(
            f"{name}: expected elements at multiples of their size, {itemsize} bytes,"
            f" got address {address:#x} and strides {operand.strides}"
        )


def _overlaps_itself(shape: tuple[int, int], strides: tuple[int, ...]) -> bool:
    # The least (a, b) but (0, 0) that one element lies at twice: a rows and b columns apart, a * s == b * t.
    s, t = map(abs, strides)
    common = math.gcd(s, t)
    if common == 0:
        return shape != (1, 1)
    return t // common < shape[0] and s // common < shape[1]


def extent(operand: Operand) -> tuple[int, int]:
    """Where the bytes of an array begin and end, from the address of its first element."""
    if 0 in operand.shape:
        return 0, 0
    low, high = 0, item_size(operand.dtype)
    for stride, length in zip(operand.strides, operand.shape, strict=True):
        if stride < 0:
            low += stride * (length - 1)
        else:
            high += stride * (length - 1)
    return low, high
