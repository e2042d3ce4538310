"""Checks that the shapes, types, strides and devices of mu, sigma and out match."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from multisample.backends.draw import SIZES

from .._libraries import HOST, Device, Library, Operand, described, is_number, library_of

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
    """Bytes per element."""
    return _ITEM_SIZES[dtype]


class Inputs(NamedTuple):
    """`mu` and `sigma`, and the properties of the result that follow from them."""

    operands: dict[str, Operand]
    """The arrays by name; numbers are left out."""
    d: int
    dtype: str
    """Type of the result."""
    device: Device


def common_library(mu: Any, sigma: Any, out: Any) -> Library:
    """The library of all arrays; TypeError if there are several libraries, or no array."""
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
            + _conversion(libraries)
        )
    if out is not None:
        first.check_target(out)
    return first


_CONVERSIONS = {
    "torch": "torch.as_tensor({}, device={}.device)", "cupy": "cupy.asarray({})", "numba": "numba.cuda.to_device({})",
}  # fmt: skip


def _conversion(libraries: dict[str, Library]) -> str:
    """Advice for host arrays beside arrays of one other library: the call that converts them; "" for other mixtures."""
    other = {library.name: name for name, library in libraries.items() if library is not HOST}
    host = [name for name, library in libraries.items() if library is HOST]
    if len(other) != 1 or not other.keys() <= _CONVERSIONS.keys() or not host:
        return ""
    ((library, model),) = other.items()
    return "; convert " + " and ".join(f"{name}: {_CONVERSIONS[library].format(name, model)}" for name in host)


def inspect_inputs(library: Library, mu: Any, sigma: Any, dtype: str | None) -> Inputs:
    """Check `mu` and `sigma`: arrays of `library`, or numbers. A `dtype` of None promotes their types."""
    operands = {name: library.describe(name, x) for name, x in (("mu", mu), ("sigma", sigma)) if not is_number(x)}
    for name, operand in operands.items():
        check_alignment(name, operand, 0)
    d = common_length({name: operand.shape for name, operand in operands.items()})
    if dtype is None:
        dtype = promoted([operand.counts_as for operand in operands.values()])
    (first, model), *rest = operands.items()
    for name, operand in rest:
        if operand.device != model.device:
            raise ValueError(f"{name}: expected it on the device of {first}, {model.device}, got {operand.device}")
    return Inputs(operands, d, dtype, model.device)


def common_length(shapes: dict[str, tuple[int, ...]]) -> int:
    """The number of dimensions d of vectors with these shapes; ValueError if they have no common d."""
    lengths: dict[str, int] = {}
    for name, shape in shapes.items():
        if len(shape) == 1 or (len(shape) == 2 and shape[1] == 1):
            lengths[name] = shape[0]
        elif shape:
            raise ValueError(f"{name}: expected shape (d,) or (d, 1), got {shape}")
    if not lengths:
        raise ValueError("mu, sigma: expected at least one of shape (d,), got only scalars")
    d = next(iter(lengths.values()))
    if any(length != d for length in lengths.values()):
        raise ValueError(f"sigma: expected as many elements as mu, {lengths['mu']}, got {lengths['sigma']}")
    return d


def promoted(dtypes: list[str]) -> str:
    """NumPy's promotion of floating types."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    return "float64" if "float64" in dtypes else "float32"


def check_out(operand: Operand, inputs: Inputs, shape: tuple[int, int]) -> None:
    """ValueError if `out` cannot hold the result. Overlap with mu and sigma is checked later, by address."""
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
            f"out: expected elements that do not overlap, got strides {operand.strides} under which they overlap"
        )


def check_alignment(name: str, operand: Operand, address: int) -> None:
    """ValueError unless device elements lie at multiples of their size. Host elements may lie anywhere."""
    itemsize = item_size(operand.dtype)
    if operand.device.kind == "cuda" and any(size % itemsize for size in (address, *operand.strides)):
        raise ValueError(
            f"{name}: expected elements at multiples of their size, {itemsize} bytes,"
            f" got address {address:#x} and strides {operand.strides}"
        )


def _overlaps_itself(shape: tuple[int, int], strides: tuple[int, ...]) -> bool:
    # Two elements a rows and b columns apart have one address if a * s == b * t; take the smallest (a, b) != (0, 0).
    s, t = map(abs, strides)
    common = math.gcd(s, t)
    if common == 0:
        return shape != (1, 1)
    return t // common < shape[0] and s // common < shape[1]


def extent(operand: Operand) -> tuple[int, int]:
    """Begin and end of an array's bytes, relative to the address of its first element."""
    if 0 in operand.shape:
        return 0, 0
    low, high = 0, item_size(operand.dtype)
    for stride, length in zip(operand.strides, operand.shape, strict=True):
        if stride < 0:
            low += stride * (length - 1)
        else:
            high += stride * (length - 1)
    return low, high
