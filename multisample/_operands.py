"""From the arrays of a call to what a kernel is given: addresses, strides and a length, all of them checked."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from multisample.backends.contract import DeviceArray, HostArray, RawArray, RawVector

from ._arguments import describe
from ._cuda_driver import keeping_context
from ._libraries import Device, Library, Operand, library_of

__all__ = [
    "adopted", "check_inputs", "checked_out", "common_length", "common_library", "is_number", "look_at", "promoted",
    "transposed",
]  # fmt: skip


class Inputs(NamedTuple):
    """`mu` and `sigma` as `Backend.launch` takes them, and what follows from them."""

    mu: RawVector
    sigma: RawVector
    operands: dict[str, Operand]
    d: int
    dtype: str
    device: Device


def is_number(x: Any) -> bool:
    """Whether `x` is a Python number, which stands for a vector of it."""
    return isinstance(x, (int, float)) and not isinstance(x, (bool, np.generic))


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
            + ", ".join(f"{name} of {library.name}" for name, library in libraries.items())
        )
    if out is not None:
        first.check_target(out)
    return first


def adopted(name: str, array: Any, library: Library, device: Device, adopt: Callable[[Any], Any]) -> Any:
    """Argument `name`, of a foreign `library` and expected on `device`, as `adopt` makes it another library's."""
    where = library.device(name, array)
    if where != device:
        raise ValueError(f"{name}: expected it on the device of the other arrays, {device}, got {where}")
    try:
        with keeping_context() if device.kind == "cuda" else contextlib.nullcontext():
            return adopt(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{name}: expected an array whose memory can be shared, got {describe(array)} ({error})"
        ) from error


def look_at(library: Library, mu: Any, sigma: Any, dtype: str | None) -> Inputs:
    """What `mu` and `sigma` are, arrays of `library` or numbers; `dtype` is that of the result, if it was given."""
    operands = {name: library.operand(name, x) for name, x in (("mu", mu), ("sigma", sigma)) if not is_number(x)}
    for name, operand in operands.items():
        _check_alignment(name, operand.raw)
    d = common_length({name: operand.shape for name, operand in operands.items()})
    if dtype is None:
        dtype = promoted([operand.counts_as for operand in operands.values()])
    first, *others = operands.items()
    device = first[1].device
    for name, operand in others:
        if operand.device != device:
            raise ValueError(f"{name}: expected it on the device of {first[0]}, {device}, got {operand.device}")
    raw_mu, raw_sigma = (
        _raw_number(name, x, d, device, dtype) if is_number(x) else _raw_vector(operands[name], d, dtype)
        for name, x in (("mu", mu), ("sigma", sigma))
    )
    return Inputs(raw_mu, raw_sigma, operands, d, dtype, device)


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


def _raw_number(name: str, x: float, d: int, device: Device, dtype: str) -> RawVector:
    try:
        number = _in_computing_type(np.array(float(x)), dtype)
    except OverflowError:
        raise ValueError(f"{name}: expected a finite number, got {describe(x)}") from None
    return np.broadcast_to(number, (d,)) if device.kind == "cpu" else float(number)


def _raw_vector(operand: Operand, d: int, dtype: str) -> RawVector:
    raw = operand.raw
    if isinstance(raw, DeviceArray):
        return raw._replace(shape=(d,), strides=raw.strides[:1] or (0,))
    if operand.dtype == "float16":
        raw = raw.view(np.float16)
    elif operand.dtype == "bfloat16":
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    if raw.ndim != 1:
        raw = raw[:, 0] if raw.ndim == 2 else np.broadcast_to(raw, (d,))
    return _in_computing_type(raw, dtype)


def _in_computing_type(vector: HostArray, dtype: str) -> HostArray:
    real = np.float64 if dtype == "float64" else np.float32
    if vector.dtype == real:
        return vector
    with np.errstate(over="ignore"):  # What overflows here is reported as not finite.
        return vector.astype(real)


def check_inputs(inputs: Inputs, library: Library, mu: Any, sigma: Any, validate: bool) -> None:
    """Look at the values: in host memory always, in device memory if asked to, since that waits for the device."""
    if isinstance(inputs.mu, np.ndarray) and isinstance(inputs.sigma, np.ndarray):
        from multisample.backends.cpu_kernels import value_kernel  # Numba takes half a second to import.

        real = "float64" if inputs.dtype == "float64" else "float32"
        if value_kernel(real)(inputs.mu, inputs.sigma):
            return
    for name, raw, x, lowest, accepted in (
        ("mu", inputs.mu, mu, -math.inf, "finite means"),
        ("sigma", inputs.sigma, sigma, 0, "finite standard deviations of at least 0"),
    ):
        if isinstance(raw, np.ndarray):
            vector = raw
        elif isinstance(raw, float):
            vector = np.array([raw])
        elif validate:
            vector = _in_computing_type(library.to_host(x).reshape(-1), inputs.dtype)
        else:
            continue
        bad = np.flatnonzero(~(np.isfinite(vector) & (vector >= lowest)))
        if bad.size:
            value = f"{vector[bad[0]]} as {vector.dtype}"
            if not is_number(x):
                value = f"{name}[{bad[0]}] = {value} ({bad.size} of {vector.size} values)"
            raise ValueError(f"{name}: expected {accepted}, got {value}")


def checked_out(library: Library, out: Any, inputs: Inputs, shape: tuple[int, int]) -> RawArray:
    """`out` as `Backend.launch` takes it; ValueError if it is not what the result has to be."""
    operand = library.operand("out", out)
    _check_alignment("out", operand.raw)
    raw = operand.raw
    if operand.shape != shape:
        raise ValueError(f"out: expected shape {shape}, got {operand.shape}")
    if operand.dtype != inputs.dtype:
        raise ValueError(f"out: expected dtype {inputs.dtype}, got {operand.dtype}")
    if operand.device != inputs.device:
        raise ValueError(f"out: expected it on the device of mu and sigma, {inputs.device}, got {operand.device}")
    if 0 in shape:
        return raw
    itemsize = _itemsize(raw)
    if any(stride % itemsize for stride in raw.strides):
        raise ValueError(f"out: expected strides of whole elements, {itemsize} bytes, got {raw.strides}")
    if _overlaps_itself(shape, raw.strides):
        raise ValueError(f"out: expected memory for every sample, got strides {raw.strides} with which samples overlap")
    for name, source in inputs.operands.items():
        if _overlap(raw, source.raw):
            raise ValueError(f"out: expected memory of its own, got memory that {name} also uses")
    return raw


def transposed(raw: RawArray) -> RawArray:
    """A matrix with its axes exchanged, over the same memory."""
    if isinstance(raw, np.ndarray):
        turned: HostArray = raw.T
        return turned
    return raw._replace(shape=raw.shape[::-1], strides=raw.strides[::-1])


def _check_alignment(name: str, raw: RawArray) -> None:
    """Elements of host memory may be anywhere; those of a device only at multiples of their size."""
    if isinstance(raw, DeviceArray) and any(place % _itemsize(raw) for place in (raw.pointer, *raw.strides)):
        raise ValueError(
            f"{name}: expected elements at multiples of their size, {_itemsize(raw)} bytes,"
            f" got address {raw.pointer:#x} and strides {raw.strides}"
        )


def _itemsize(raw: RawArray) -> int:
    if isinstance(raw, np.ndarray):
        return raw.itemsize
    return 2 if raw.dtype == "bfloat16" else np.dtype(raw.dtype).itemsize


def _overlaps_itself(shape: tuple[int, int], strides: tuple[int, ...]) -> bool:
    # The least (a, b) but (0, 0) that one element lies at twice: a rows and b columns apart, a * s == b * t.
    s, t = map(abs, strides)
    common = math.gcd(s, t)
    if common == 0:
        return shape != (1, 1)
    return t // common < shape[0] and s // common < shape[1]


def _overlap(a: RawArray, b: RawArray) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.may_share_memory(a, b) and np.shares_memory(a, b)
    (a_low, a_high), (b_low, b_high) = _bounds(a), _bounds(b)
    return a_low < b_high and b_low < a_high


def _bounds(raw: Any) -> tuple[int, int]:
    if 0 in raw.shape:
        return 0, 0
    steps = [stride * (length - 1) for stride, length in zip(raw.strides, raw.shape, strict=True)]
    low = raw.pointer + sum(step for step in steps if step < 0)
    return low, raw.pointer + sum(step for step in steps if step > 0) + _itemsize(raw)
