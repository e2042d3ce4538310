"""How a plan reads its vectors: as addresses, numbers, or NumPy arrays of the computing type."""

import math
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from multisample.backends.element_types import MATRIX_TYPES
from multisample.backends.memory.host import quiet

from ._arguments import describe, rounded_once
from ._checks.coefficients import check_coefficients
from ._checks.operands import ITEM_SIZES, Inputs, check_alignment
from ._checks.values import LIMITS, check_values, in_turn, least_and_most, vector_converter
from ._libraries import HOST, Device, Library, Operand, check_memory
from ._libraries.numpy import cached_dtype

ReadVectors = Callable[[Any, Any, Any], tuple[Any, Any, Any, Any]]
"""``read(mu, sigma, weights)``: the launcher's form of each vector, and an object that keeps their memory alive."""


class Reader(NamedTuple):
    """Reads one vector for the calls of a plan."""

    read: Callable[[Any], Any]
    """Turns the argument, or its converted array, into what the launcher takes."""
    convert: Callable[[Any], Any] | None = None
    """Makes the array whose address the launcher takes; None if that is the argument."""
    is_plain: bool = False
    """Whether the launcher takes the argument without conversion: its address, or the array itself."""
    mask: int = 0
    """The bits that are 0 in an aligned address; 0 in host memory, where elements may lie anywhere."""


def reader_of(name: str, inputs: Inputs, library: Library, makes_arrays: bool) -> Reader:
    operand = inputs.operands.get(name)
    real = cached_dtype(MATRIX_TYPES[inputs.dtype].computing)
    length = inputs.n if name == "weights" else inputs.d
    if operand is None:
        read_number = _number_reader(name, inputs.dtype, library)
        if not makes_arrays:
            return Reader(read_number)
        # Faster than an array of one element.
        pack, vector = struct.Struct("d" if real.itemsize == 8 else "f").pack, np.ndarray
        shape, strides = (length,), (0,)
        return Reader(lambda x: vector(shape, real, pack(read_number(x)), 0, strides))
    if makes_arrays:
        host_array = None if library.name == "numpy" else library.host_array
        flat, change = operand.shape, vector_converter(operand, length, real, inputs.batch)
        flatten = (lambda raw: raw.reshape(flat)) if name in inputs.reshaped and operand.read is None else None
        steps = [step for step in (operand.read, host_array, flatten, change) if step is not None]
        return Reader(in_turn(steps)) if steps else Reader(lambda x: x, is_plain=True)
    mask = ITEM_SIZES[operand.dtype] - 1 if operand.device.kind == "cuda" else 0
    return Reader(_checked_address(name, operand, mask, library), operand.read, operand.read is None, mask)


def _checked_address(name: str, operand: Operand, mask: int, library: Library) -> Callable[[Any], int]:
    """The address of an array; ValueError if it has elements but no memory, or if it is misaligned."""
    address, has_elements = library.address, 0 not in operand.shape

    def read(x: Any) -> int:
        at = address(x)
        if not at and has_elements:
            check_memory(at)
        if at & mask:
            check_alignment(name, operand, at)
        return at

    return read


def _number_reader(name: str, dtype: str, library: Library) -> Callable[[Any], float]:
    least, most = least_and_most(name, dtype)
    # Floats, and integers that are doubles, between these need no more checks.
    low, high = max(least, -(2.0**53)), min(most, 2.0**53)

    def read(x: Any) -> float:
        try:
            number = float(x)
            if low <= number <= high:
                return number
            number = rounded_once(x, dtype)
        except OverflowError:
            raise ValueError(f"{name}: expected a finite number, got {describe(x)}") from None
        if not least <= number <= most:
            check_values(library, {name: x}, dtype)
        return number

    return read


def coefficients_reader(
    library: Library, device: Device, real: np.dtype[Any], makes_arrays: bool, on_host: Any, vector: Operand | None
) -> Callable[[Any, Any, int], tuple[Any, Any]]:  # fmt: skip
    """``read(values, given, stream)``: the launcher's form of coefficients, and an object that keeps memory alive.

    `given` is the argument. `values` are coefficients on the host, like `on_host`: a float, or an array of float64.
    `vector` describes coefficients on a device. ValueError if `values` are not finite in the type `real`.
    """
    limit = LIMITS[real.name]
    if vector is not None:
        convert = vector.read or (lambda given: given)

        def read_vector(values: Any, given: Any, stream: int) -> tuple[Any, Any]:
            array = convert(given)
            return library.address(array), array

        return read_vector
    if isinstance(on_host, float):
        pack, from_buffer = struct.Struct(real.char).pack, np.frombuffer

        def read_number(values: Any, given: Any, stream: int) -> tuple[Any, Any]:
            if not -limit < values < limit:
                check_coefficients(values, given, limit)
            # The address of a writable array is found faster.
            return from_buffer(bytearray(pack(values)), real) if makes_arrays else values, None

        return read_number
    is_capturing = None if device.kind == "cpu" else library.is_capturing(device)

    # A copy: the call may write to the caller's memory, and the driver may read it after the call has returned.
    def read_array(values: Any, given: Any, stream: int) -> tuple[Any, Any]:
        with quiet():
            array = values.astype(real)
            # A finite sum of squares proves all coefficients finite.
            flat = array if array.ndim == 1 else array.reshape(-1)
            if not (flat.dot(flat) < math.inf or np.isfinite(array).all()):
                check_coefficients(values, given, limit)
        if is_capturing is None:
            return (array, None) if makes_arrays else (HOST.address(array), array)
        if is_capturing(stream):
            raise RuntimeError(
                "coefficients: expected a number, or a vector in device memory while a CUDA graph is captured, for"
                f" replays to read, got {describe(given)} on the host"
            )
        array = library.to_device(array.view(f"i{real.itemsize}"), device)
        return library.address(array), array

    return read_array


def vector_reader(readers: dict[str, Reader], makes_arrays: bool) -> ReadVectors | None:
    """A function that reads all vectors of a call; None if the launcher takes them as they are."""
    if makes_arrays and all(reader.is_plain for reader in readers.values()):
        return None
    nothing = None if makes_arrays else 0
    absent = Reader(lambda x: nothing)
    of_all = [readers.get(name, absent) for name in ("mu", "sigma", "weights")]
    (read_mu, read_sigma, read_weights), converters = [x.read for x in of_all], [x.convert for x in of_all]

    def read_converted(*vectors: Any) -> tuple[Any, Any, Any, Any]:
        """The last result keeps converted arrays alive."""
        arrays = [x if convert is None else convert(x) for convert, x in zip(converters, vectors, strict=True)]
        return read_mu(arrays[0]), read_sigma(arrays[1]), read_weights(arrays[2]), arrays

    if any(converters):
        return read_converted
    if "weights" in readers:
        return lambda mu, sigma, weights: (read_mu(mu), read_sigma(sigma), read_weights(weights), None)
    return lambda mu, sigma, weights: (read_mu(mu), read_sigma(sigma), nothing, None)
