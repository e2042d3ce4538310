"""DLPack import without an array library, because the libraries support only parts of it.

NumPy lacks bfloat16, cuda.core ignores the byte offset, and CuPy and PyTorch ignore the read-only flag. The
structures are those of dlpack.h, whose layout is part of the protocol.
"""

import ctypes
from typing import Any

import numpy as np

from multisample.backends.element_types import MATRIX_TYPES
from multisample.backends.system import cuda_driver

HOST = (1, 3)
"""Device types of host memory: ordinary, and page-locked by CUDA."""
CUDA = (2, 13)
"""Device types of CUDA memory: ordinary, and managed."""
LEGACY_STREAM = 1
"""The number of CUDA's legacy default stream, in DLPack and in cuda.h."""

_KINDS = {0: "int", 1: "uint", 2: "float", 5: "complex"}
_NAMES = {(6, 8): "bool_"} | {(row.dlpack, 8 * row.size): name for name, row in MATRIX_TYPES.items()}
_READ_ONLY = 1
_CAPSULES = (b"dltensor_versioned", b"dltensor")


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """NumPy's dtype for a name. TypeError if the dtype needs the package ml_dtypes, which is not installed."""
    if hasattr(np, dtype):
        return np.dtype(dtype)
    try:
        import ml_dtypes
    except ImportError:
        raise TypeError(f"dtype: NumPy has {dtype} only with the package ml_dtypes: pip install ml_dtypes") from None
    element: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype))
    return element


def _exchange(array: Any, stream: int | None) -> tuple[Any, _Tensor, bool]:
    """A capsule of `array`, its tensor, and whether the memory is read-only."""
    options = {} if stream is None else {"stream": stream}
    try:
        capsule = array.__dlpack__(max_version=(1, 0), **options)
    except TypeError:  # DLPack before 1.0 has no max_version.
        capsule = array.__dlpack__(**options)
    for name in _CAPSULES:
        if _is_valid(id(capsule), name):
            break
    else:
        raise BufferError(f"{type(capsule).__name__} is no unused DLPack capsule")
    address = _pointer(id(capsule), name)
    if name == b"dltensor":
        return capsule, _Managed.from_address(address).tensor, False
    versioned = _Versioned.from_address(address)
    if versioned.major > 1:
        raise BufferError(f"DLPack {versioned.major}.{versioned.minor} is newer than 1")
    return capsule, versioned.tensor, bool(versioned.flags & _READ_ONLY)


def is_read_only(array: Any) -> bool:
    """Whether `array` reports its memory as read-only, without waiting for it. DLPack before 1.0 cannot report it."""
    on_device = int(array.__dlpack_device__()[0]) in CUDA
    return _exchange(array, -1 if on_device else None)[2]


def capsule_and_strides(array: Any, stream: int | None) -> tuple[Any, tuple[int, ...]]:
    """A DLPack capsule of `array`, ready on `stream`, and the strides in elements; () for a contiguous array."""
    capsule, tensor, _ = _exchange(array, stream)
    return capsule, tuple(tensor.strides[: tensor.ndim]) if tensor.strides else ()


def device_of_array(array: Any) -> int:
    """The ordinal of the CUDA device of `array`. As at an import, DLPack comes first: only it orders streams."""
    if hasattr(array, "__dlpack__"):
        return int(array.__dlpack_device__()[1])
    return cuda_driver.device_of(array.__cuda_array_interface__["data"][0])


class Imported:
    """A DLPack array as an object with the array interface of NumPy or CUDA.

    Parameters
    ----------
    array : object with ``__dlpack__``
    stream : int, optional
        The stream on which CUDA memory must be ready, by DLPack's numbering: 1 is the legacy default stream.

    Attributes
    ----------
    dtype : numpy.dtype
        The element type. The interface has no name for types that NumPy lacks, and describes them as integers.
    """

    def __init__(self, array: Any, stream: int | None = None) -> None:
        # The capsule is not marked as used, so that its destructor frees the memory.
        self._capsule, tensor, read_only = _exchange(array, stream)
        kind = _KINDS.get(tensor.code)
        name = _NAMES.get((tensor.code, tensor.bits), f"{kind}{tensor.bits}" if kind else None)
        if name is None or tensor.lanes != 1:
            raise TypeError(f"elements of DLPack type {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes")
        self.dtype = numpy_dtype(name)
        size, axes = self.dtype.itemsize, range(tensor.ndim)
        address = (tensor.data or 0) + tensor.byte_offset
        interface = {
            "shape": tuple(tensor.shape[axis] for axis in axes),
            "strides": tuple(tensor.strides[axis] * size for axis in axes) if tensor.strides else None,
            "typestr": self.dtype.str if hasattr(np, name) else f"<u{size}",
            "data": (address, read_only),
            "version": 3,
        }
        if tensor.device_type in HOST:
            # An array without elements may be at address 0, which NumPy before 2.3 reads as no address.
            self.__array_interface__ = interface | {"data": (address or size, read_only)}
        else:
            self.__cuda_array_interface__ = interface
