"""`Library`: the interface to an array library. Each library has a module beside this one.

A known library allocates its results on its own stream. Arrays of unknown libraries are handed to the
backend's library or NumPy without a copy, by DLPack or the CUDA array interface.
"""

import functools
import struct
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from multisample.backends.contract import HostArray
from multisample.backends.system.cuda_driver import is_capturing

from .._arguments import DTYPES

INTEGER_SIZES = {f"{sign}int{bits}": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)}


@functools.lru_cache(64)  # Callers can make dtypes without end.
def name_of(dtype: np.dtype[Any]) -> str:
    """``dtype.name``, cached, since NumPy computes it on each access."""
    return str(dtype.name)


@functools.lru_cache(64)
def _packer(count: int) -> Callable[..., bytes]:
    return struct.Struct(f"{count}q").pack


Shape: TypeAlias = tuple[int, ...]


class Device(NamedTuple):
    """The device of an array: ``("cpu", 0)``, ``("cuda", ordinal)``, or a kind that no backend serves."""

    kind: str
    ordinal: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.ordinal}" if self.kind == "cuda" else self.kind


CPU = Device("cpu", 0)


class Operand(NamedTuple):
    """The properties of an array argument that a plan depends on; no values and no addresses."""

    shape: Shape
    strides: Shape
    """Strides in bytes of the memory that the kernel reads."""
    dtype: str
    """The element type, by its name in `ElementType`."""
    counts_as: str
    """The type that enters the promotion: float32 for lists and integers."""
    device: Device
    read: Callable[[Any], Any] | None = None
    """Converts the argument to an array that a kernel can read; None if a kernel can read the argument."""


Guard: TypeAlias = Callable[[Sequence[Any], Sequence[Any]], "bytes | None"]
"""A function of the arrays that a call reads and writes, as many as those of a plan. It returns their packed addresses
if the plan serves the call, otherwise None."""


class Library:
    """An array library. Its methods take arrays of `types`, and `normalized` converts other arrays to these."""

    name: str
    types: tuple[type, ...] = ()
    """The classes whose attributes describe their memory. A subclass may define these attributes anew."""
    names_streams = False
    """Whether each array names its stream. Such a library has no current stream."""
    foreign = False
    """Whether this is a `ForeignLibrary`."""
    key: Callable[..., Hashable] | None = None
    """``key(mu, sigma, out, seed, generator, dim_offset, sample_offset, *options)``: computes the key of a call in
    compiled code, for `sample`; None if `state()` is None. The key has the signature and type of `mu`, `sigma` and
    `out`; the type of `seed`, `generator`, `dim_offset` and `sample_offset`; the value and type of each option; the
    signature of a seed of type `keyed_seed`; and `state()`. ``key()`` is the state."""
    keyed_seed: type | None = None

    # A library lacks those methods that its arrays never need, such as `share_memory` for arrays on devices.
    signature: Callable[[Any], Hashable]
    """``signature(array)``: the properties of an array, except its type, that a plan depends on."""
    address: Callable[[Any], int]
    """``address(array)``: the address of the first element."""
    host_array: Callable[[Any], HostArray]
    """``host_array(array)``: a NumPy array in the memory of a host array; integers for types that NumPy may lack."""
    flattener: Callable[[Shape, Shape, Shape], Callable[[Any], Any]]
    """``flattener(aligned, shape, flat)``: ``flatten(array)`` reshapes to `aligned` and broadcasts to `shape`. Its
    result is contiguous, of shape `flat`."""
    device: Callable[[str, Any], Device]
    """``device(name, array)``: the device of argument `name`."""
    allocator: Callable[[Shape, str, Device], Callable[[Any], Any]]
    """``allocator(shape, dtype, device)``: ``allocate(like)`` makes a new array on the stream of the array `like`."""
    stream: Callable[[Device], Callable[[Any], int]]
    """``stream(device)``: ``stream(array)`` is the handle of the stream where `array` is ready and the kernel runs."""
    share_memory: Callable[[Any, Any], bool]
    """``share_memory(a, b)``: whether two host arrays share an element."""
    to_host: Callable[[Any], HostArray]
    """``to_host(array)``: a copy in host memory; waits for the device."""
    to_device: Callable[[HostArray, Device], Any]
    """``to_device(array, device)``: a copy of 64-bit integers on a CUDA device. `array` is in pageable memory, and is
    never written afterwards."""
    overwrite: Callable[[Any, HostArray], None]
    """``overwrite(target, array)``: copies `array` into `target`, an array from `to_device`."""
    written: Callable[[Any], None] | None = None
    """``written(out)`` notifies the library that `out`, an array or several, has changed. None if unneeded."""

    def target_signature(self, out: Any) -> Hashable:
        """The properties of `out`, with its type, that a plan depends on."""
        return type(out), self.signature(out)

    def addresses(self, arrays: Sequence[Any]) -> bytes:
        """The packed addresses of the first elements of several arrays."""
        return _packer(len(arrays))(*map(self.address, arrays))

    def is_opaque(self, array: Any) -> bool:
        """Whether `array` may have no memory of its own."""
        return False

    def lacks_values(self, array: Any) -> bool:
        """Whether `array` has a shape and a type only, so that a result has these only too."""
        return False

    def is_transformed(self, arrays: Sequence[Any]) -> bool:
        """Whether PyTorch or JAX transforms a call with these arrays, or one has no memory of its own."""
        return self.state() is None or any(map(self.is_opaque, arrays))

    def state(self) -> Hashable:
        """The global state that a plan depends on; None while PyTorch or JAX transforms calls, which have no plan.

        Everything else that a caller can switch between two calls is read by the call itself, never by its plan.
        """
        return ()

    def named_stream(self, array: Any) -> int | None:
        """The handle of the stream that `array` names; None if it names none."""
        return None

    def guard(self, read: Sequence[Any], written: Sequence[Any]) -> Guard:
        """The guard of a plan for a call with these arrays."""
        # Compare types before signatures: `signature` takes this library's arrays only.
        known: list[Any] = [(self.signature, type(x), self.signature(x)) for x in read]
        known += [(self.target_signature, type(x), self.target_signature(x)) for x in written]
        address, pack = self.address, _packer(len(known))
        one_signature, one_kind, one_properties = known[0]

        def address_of_one(read: Sequence[Any], written: Sequence[Any]) -> bytes | None:
            (x,) = read or written
            return pack(address(x)) if type(x) is one_kind and one_signature(x) == one_properties else None

        def addresses(read: Sequence[Any], written: Sequence[Any]) -> bytes | None:
            every = (*read, *written)
            for x, (signature, kind, properties) in zip(every, known, strict=True):
                if type(x) is not kind or signature(x) != properties:
                    return None
            return pack(*map(address, every))

        return address_of_one if len(known) == 1 else addresses

    def compile_key(self, backend: Any) -> None:
        """Set `key`, if `backend` provides the compiled function."""

    def normalized(self, name: str, array: Any) -> Any:
        """Argument `name`, of another type than `types`, as one of these in the same memory; itself if impossible."""
        return array

    def check(self, name: str, array: Any) -> None:
        """TypeError if `perturb` cannot read the properties of `array`."""

    def describe(self, name: str, array: Any) -> Operand:
        """The operand for argument `name`; TypeError or ValueError if no kernel can use the array."""
        dtype = name_of(array.dtype)
        counts_as = counted_as(name, dtype, array.dtype)
        return Operand(array.shape, array.strides, dtype, counts_as, self.device(name, array))

    def counted(self, vectors: Mapping[str, Any]) -> Iterable[str]:
        """The names of the operands whose types enter the promotion."""
        return vectors

    def check_target(self, out: Any) -> None:
        """TypeError or ValueError if `out` cannot be written to."""

    def is_capturing(self, device: Device) -> Callable[[int], bool]:
        """``is_capturing(handle)``: whether a CUDA graph captures the stream with this handle."""
        return is_capturing

    def recorder(self, arrays: Sequence[Any]) -> Callable[..., Sequence[Any]] | None:
        """``record(results, arrays, factors, size)``: the results of `perturb` for arrays like these, with gradients.

        None if no array needs gradients. `factors` are those of the arrays, or None, and `size` is the length of the
        population, or None.
        """
        return None


NOUNS = {
    "numpy": "a NumPy array",
    "torch": "a PyTorch tensor",
    "cupy": "a CuPy array",
    "numba": "a Numba device array",
    "jax": "a JAX array",
    "foreign": "an array of another library",
}
"""Phrases for arrays in error messages, by the name of the library."""

# By NumPy's type letter. NumPy's names of these types have a width in bits, such as "str96".
_ELEMENT_NOUNS = {
    "U": "strings", "T": "strings", "S": "bytes", "O": "Python objects", "V": "structured elements",
    "g": "longdouble", "G": "clongdouble",
}  # fmt: skip


def check_memory(address: int) -> None:
    """ValueError for address 0: a tensor may have no memory, or its storage may have been freed."""
    if address == 0:
        raise ValueError("mu, sigma, out: expected elements in memory, got an array without memory")


def counted_as(name: str, dtype: str, numpy_dtype: np.dtype[Any] | None = None) -> str:
    """The type with which elements of type `dtype` enter the promotion; TypeError if the type is not accepted."""
    if dtype in DTYPES:
        return dtype
    if dtype in INTEGER_SIZES:
        return "float32"
    noun = None if numpy_dtype is None else _ELEMENT_NOUNS.get(numpy_dtype.char)
    found = dtype if noun is None else f"{noun} ({dtype if noun.endswith('double') else numpy_dtype})"
    raise TypeError(f"{name}: expected elements of type {', '.join(DTYPES)} or an integer type, got {found}")
