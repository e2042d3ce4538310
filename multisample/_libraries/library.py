"""What the rest of the project needs from an array library; a module beside this one for each library.

A library that we know allocates its own results, on its own stream. From every other we take the memory through DLPack
or the CUDA array interface, and let the backend's own library, or NumPy, work on it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np

from multisample.backends.contract import HostArray
from multisample.backends.system.cuda_driver import is_capturing

from .._arguments import DTYPES

__all__ = ["CPU", "NOUNS", "Device", "Library", "Operand", "check_memory", "counted_as"]

_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_ELEMENTS = frozenset((*DTYPES, *_INTEGERS))


class Device(NamedTuple):
    """The place of an array: ``("cpu", 0)``, ``("cuda", ordinal)``, or a kind that no backend serves."""

    kind: str
    ordinal: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.ordinal}" if self.kind == "cuda" else self.kind


CPU = Device("cpu", 0)


class Operand(NamedTuple):
    """An argument that is an array, as a plan needs it: nothing here depends on values or addresses."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes, of the memory that a kernel reads."""
    dtype: str
    """NumPy's name of the element type, or ``"bfloat16"``."""
    counts_as: str
    """The type that it brings to promotion: lists and integers count as float32."""
    device: Device
    read: Callable[[Any], Any] | None = None
    """Makes the array whose memory a kernel can read, if that is not the argument itself."""


class Library:
    """An array library; the methods are called with its arrays only, and `signature` with its own types only."""

    name: str
    names_streams = False
    """Whether its arrays name streams of their own, and have no current one."""
    foreign = False
    """Whether its arrays are known by protocols only: see `ForeignLibrary`."""
    key: Callable[..., Hashable] | None = None
    """``key(mu, sigma, out, seed, generator, dim_offset, sample_offset, *others)``: a compiled function for the key of
    a call, in place of that of `sample`: signatures and types of the first three, types of the next four, values and
    types of the others."""

    # --- For each call ---

    def signature(self, array: Any) -> Hashable:
        """Everything about an array but its type that a plan depends on."""
        raise NotImplementedError

    def target_signature(self, out: Any) -> Hashable:
        """The same of `out`, with its type."""
        return type(out), self.signature(out)

    def state(self) -> Hashable:
        """Everything else that a plan depends on; None if the library has to see its calls."""
        return ()

    def address(self, array: Any) -> int:
        """The address of the first element."""
        raise NotImplementedError

    def host_array(self, array: Any) -> HostArray:
        """An array in host memory as a NumPy array over the same memory; float16 and bfloat16 as uint16 bits."""
        raise NotImplementedError

    def named_stream(self, array: Any) -> int | None:
        """The handle of the stream that `array` itself names as its own, if it does."""
        return None

    # --- For each plan ---

    def compile_key(self, backend: Any) -> None:
        """Take `key` from a backend that has one, if there is none yet."""

    def describe(self, name: str, array: Any) -> Operand:
        """Argument `name`; TypeError or ValueError if no kernel could use it."""
        raise NotImplementedError

    def device(self, name: str, array: Any) -> Device:
        """The place of argument `name`."""
        raise NotImplementedError

    def check_target(self, out: Any) -> None:
        """TypeError if `out` is of a kind that cannot be written to."""

    def allocator(self, shape: tuple[int, ...], dtype: str, device: Device) -> Callable[[Any], Any]:
        """``allocate(like)``: a new array for the stream of the array `like`; TypeError if there is no such dtype."""
        raise NotImplementedError

    def stream(self, device: Device) -> Callable[[Any], int]:
        """``stream(array)``: the handle of the stream on which `array` is ready and the result is expected."""
        raise NotImplementedError

    def is_capturing(self, device: Device) -> Callable[[int], bool]:
        """``is_capturing(stream)``: whether a stream of `stream` is being captured into a CUDA graph."""
        return is_capturing

    def written(self) -> Callable[[Any], None] | None:
        """``written(out)`` lets the library know that `out` has other elements now; None if it need not know."""
        return None

    # --- Seldom ---

    def share_memory(self, a: Any, b: Any) -> bool:
        """Whether two arrays in host memory have an element in common."""
        raise NotImplementedError

    def copied(self, array: Any) -> Any:
        """A copy of an array of `to_device`, in the order of the current stream."""
        raise NotImplementedError

    def to_host(self, array: Any) -> HostArray:
        """A copy in host memory, waiting for it."""
        raise NotImplementedError

    def to_device(self, array: HostArray, device: Device) -> Any:
        """A copy of 64-bit integers on a CUDA device."""
        raise NotImplementedError

    def overwrite(self, target: Any, array: HostArray) -> None:
        """Replace the elements of an array of `to_device`."""
        raise NotImplementedError


NOUNS = {
    "numpy": "a NumPy array",
    "torch": "a PyTorch tensor",
    "cupy": "a CuPy array",
    "numba": "a Numba device array",
    "jax": "a JAX array",
    "foreign": "an array of another library",
}
"""What error messages call arrays, by the name of their library."""

# By NumPy's letter for the kind or the type. Its own names count bits, as in "str96".
_ELEMENT_NOUNS = {
    "U": "strings", "T": "strings", "S": "bytes", "O": "Python objects", "V": "structured elements",
    "g": "longdouble", "G": "clongdouble",
}  # fmt: skip


def check_memory(address: int) -> None:
    """ValueError if elements lie at address 0: a tensor may have no memory, and its storage may have been freed."""
    if address == 0:
        raise ValueError("mu, sigma, out: expected elements in memory, got an array without memory")


def counted_as(name: str, dtype: str, numpy_dtype: np.dtype[Any] | None = None) -> str:
    """The type that argument `name`, with elements of type `dtype`, brings to promotion; TypeError if there is none."""
    if dtype not in _ELEMENTS:
        found = dtype
        if numpy_dtype is not None:
            noun = _ELEMENT_NOUNS.get(numpy_dtype.char)
            found = dtype if noun is None else f"{noun} ({dtype if noun.endswith('double') else numpy_dtype})"
        raise TypeError(f"{name}: expected elements of type {', '.join(DTYPES)} or an integer type, got {found}")
    return dtype if dtype in DTYPES else "float32"
