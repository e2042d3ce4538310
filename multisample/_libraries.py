"""Whose array is it? Every question whose answer depends on the array library is asked here, and only here.

A library that we know allocates its own results, on its own stream. From any other we take its memory through
DLPack or the CUDA array interface, and let the backend's own library, or NumPy, work on it; JAX takes the result back
the same way, and whoever is not known at all gets it as it is.
Libraries are recognised by the arrays that come in: none is imported that the caller has not imported.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from multisample.backends.contract import DeviceArray, HostArray, RawArray

from . import _dlpack
from ._arguments import DTYPES, describe
from ._cuda_driver import device_of, keeping_context, on_device

__all__ = ["Device", "Library", "Operand", "element", "is_opaque", "library_called", "library_of"]

_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_ELEMENTS = frozenset((*DTYPES, *_INTEGERS))


class Device(NamedTuple):
    """Where an array lives: ``("cpu", 0)``, ``("cuda", ordinal)``, or a kind that no backend serves."""

    kind: str
    ordinal: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.ordinal}" if self.kind == "cuda" else self.kind


CPU = Device("cpu", 0)


class Operand(NamedTuple):
    """What there is to know of an array before a kernel may touch it."""

    raw: RawArray
    shape: tuple[int, ...]
    dtype: str
    """The name of the element type. Raw float16 and bfloat16 host memory is the uint16 of its bits."""
    counts_as: str
    """The type it brings to promotion: lists and integers count as float32."""
    device: Device
    memory: Any = None
    """What keeps `raw` in memory, if that is not the array itself."""


Plain: TypeAlias = tuple[Any, int, int, int, int, str, int, int]
"""A plain call on a CUDA device: contiguous and aligned memory of one dtype, float32 or float64.

The result; the addresses of mu, sigma and the result; d; dtype; device; stream. No class, which would cost more than
what it holds.
"""


class Library:
    """What is asked of an array library; each method serves one known library and fails for others."""

    name: str
    foreign = False
    """Whether its arrays are known only by protocols; such a library has the methods from `as_numpy` on."""
    host: Library
    """The library through which the arrays of a foreign one are seen in host memory."""

    def operand(self, name: str, array: Any) -> Operand:
        """Look at argument `name`; TypeError or ValueError if no kernel could use it."""
        raise NotImplementedError

    def empty(self, d: int, n: int, dtype: str, device: Device, like: Any) -> Any:
        """A new array on `device`, for the stream of the array `like`; TypeError if the library has no such dtype."""
        raise NotImplementedError

    def stream(self, device: Device, array: Any) -> int:
        """The handle of the stream on which `array` is ready and the result is expected."""
        return 0

    def is_plain_type(self, kind: type) -> bool:
        """Whether arrays of exactly that class may be asked for `plain`; subclasses do as they like."""
        return False

    def plain(self, mu: Any, sigma: Any, n: int, out: Any) -> Plain | None:
        """The same as `operand`, `empty` and `stream` tell, for arrays of the library's own type, if the call is plain.

        Each question to a library costs a tenth of a microsecond, so only those are asked that tell a plain call; None
        for any other, right or wrong.
        """
        return None

    def named_stream(self, array: Any) -> int | None:
        """The handle of the stream that `array` itself names as its own, if it does."""
        return None

    def is_transformed(self, *arrays: Any) -> bool:
        """Whether a call with these arrays is one for the library to transform, and they may have no values."""
        return False

    def records_gradient(self, *arrays: Any) -> bool:
        """Whether the library expects to know how the result depends on any of these arrays."""
        return False

    def was_written(self, out: Any) -> None:
        """Let the library know that `out` has other elements now."""

    def to_host(self, array: Any) -> HostArray:
        """A copy in host memory, waiting for it."""
        raise NotImplementedError

    def to_device(self, array: HostArray, device: Device) -> Any:
        """A copy of 64-bit integers on a CUDA device, there for every stream when this returns."""
        raise NotImplementedError

    def overwrite(self, target: Any, array: HostArray) -> None:
        """Put others in the place of those of `to_device`; also there when this returns."""
        raise NotImplementedError

    def as_numpy(self, array: Any) -> HostArray:
        """An array in host memory as a NumPy array over the same memory."""
        raise NotImplementedError

    def device(self, name: str, array: Any) -> Device:
        """Where argument `name` lives."""
        raise NotImplementedError

    def check_target(self, out: Any) -> None:
        """TypeError if `out` is of a kind that cannot be written to."""

    def check_dtype(self, dtype: str) -> None:
        """TypeError if the library cannot take a result of type `dtype`."""

    def hand_over(self, result: Any, raw: RawArray, device: Device, stream: int) -> Any:
        """`result`, an array of the backend's own library that is ready on `stream`, as the caller's."""
        return result


def element(name: str, dtype: str, accepted: frozenset[str] = _ELEMENTS) -> str:
    """The type that argument `name`, with elements of type `dtype`, brings to promotion; TypeError if there is none."""
    if dtype not in accepted:
        raise TypeError(f"{name}: expected elements of type {', '.join(DTYPES)} or an integer type, got {dtype}")
    return dtype if dtype in DTYPES else "float32"


def _bits(array: HostArray, dtype: str) -> HostArray:
    return array.view(np.uint16) if dtype in ("float16", "bfloat16") else array


@functools.cache
def _numpy_name(dtype: np.dtype[Any]) -> str:
    return str(dtype.name)  # Which NumPy makes anew, slowly, each time.


@functools.cache
def _torch_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


_numpy_dtype = functools.cache(_dlpack.numpy_dtype)
_PLAIN_DTYPES = {np.dtype(dtype): (dtype, size) for dtype, size in (("float32", 4), ("float64", 8))}


@functools.cache
def _plain_torch_dtype(dtype: Any) -> tuple[str, int] | None:
    return {"float32": ("float32", 4), "float64": ("float64", 8)}.get(_torch_name(dtype))


@functools.cache
def _raw_torch_stream() -> Callable[[int], int]:
    """What torch.cuda.current_stream asks for, without the object that it makes of the answer."""
    torch = sys.modules["torch"]
    raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda ordinal: int(torch.cuda.current_stream(ordinal).cuda_stream))


@functools.cache
def _increment_version() -> Callable[[Any], None]:
    increment: Callable[[Any], None] = sys.modules["torch"].autograd.graph.increment_version
    return increment


@functools.cache
def _is_transforming() -> Callable[[], bool]:
    """Whether PyTorch transforms every call, whatever tensors are in it: in torch.func, or in a dispatch mode."""
    torch = sys.modules["torch"]
    layer, modes = torch._C._functorch.peek_interpreter_stack, torch._C._len_torch_dispatch_stack
    forward_ad = torch.autograd.forward_ad
    return lambda: layer() is not None or modes() > 0 or forward_ad._current_level >= 0


@functools.cache
def is_opaque(kind: type) -> bool:
    """Whether `kind` is a class of tensors that see to their operators themselves, in place of memory."""
    dispatch = getattr(kind, "__torch_dispatch__", None)
    return dispatch is not None and dispatch is not sys.modules["torch"].Tensor.__torch_dispatch__


def _numba_stream(stream: Any) -> int:
    return int(getattr(stream, "handle", stream))


class _Host(Library):
    """NumPy, and whatever NumPy can read: lists, numbers, objects with ``__array__``."""

    name = "numpy"

    def operand(self, name: str, array: Any) -> Operand:
        is_list = isinstance(array, (list, tuple))
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(f"{name}: expected an array without a mask, got a masked array; fill it first")
        if type(array) is not np.ndarray:  # Subclasses index as they like: np.matrix stays two-dimensional.
            try:
                array = np.asarray(array)
            except (TypeError, ValueError) as error:
                raise TypeError(f"{name}: expected numbers, got {describe(array)} ({error})") from None
        dtype = _numpy_name(array.dtype)
        counts_as = element(name, dtype)
        if is_list:
            counts_as = "float32"
        if not array.dtype.isnative:
            if name == "out":
                raise ValueError("out: expected native byte order, got swapped bytes")
            array = array.astype(array.dtype.newbyteorder("="))
        if name == "out" and not array.flags.writeable:
            raise ValueError("out: expected a writable array, got a read-only one")
        return Operand(_bits(array, dtype), array.shape, dtype, counts_as, CPU)

    def empty(self, d: int, n: int, dtype: str, device: Device, like: Any) -> Any:
        return np.empty((d, n), _numpy_dtype(dtype))

    def to_host(self, array: Any) -> HostArray:
        return np.asarray(array)

    def device(self, name: str, array: Any) -> Device:
        return CPU

    def check_target(self, out: Any) -> None:
        if not isinstance(out, np.ndarray):
            raise TypeError(f"out: expected a NumPy array, got {describe(out)} of type {type(out).__name__}")


class _AlignedHost(_Host):
    """NumPy arrays that JAX takes over as they are: it copies what does not begin at a multiple of 64 bytes."""

    def empty(self, d: int, n: int, dtype: str, device: Device, like: Any) -> Any:
        element = _numpy_dtype(dtype)
        size = d * n * element.itemsize
        memory = np.empty(size + 63, np.uint8)
        start = -memory.ctypes.data % 64
        return memory[start : start + size].view(element).reshape(d, n)


class _Torch(Library):
    name = "torch"

    def operand(self, name: str, array: Any) -> Operand:
        torch = sys.modules["torch"]
        if array.layout is not torch.strided:
            raise TypeError(f"{name}: expected a strided tensor, got layout {array.layout}")
        if array.requires_grad:
            array = array.detach()
        if array.is_neg():
            if name == "out":
                raise ValueError("out: expected plain memory, got a tensor with its negative bit set")
            array = array.resolve_neg()
        dtype = _torch_name(array.dtype)
        counts_as = element(name, dtype)
        device = self.device(name, array)
        raw: RawArray
        if device is CPU:
            # NumPy need not know bfloat16; its bits are the same under any name.
            raw = _bits((array.view(torch.int16) if dtype == "bfloat16" else array).numpy(), dtype)
            return Operand(raw, raw.shape, dtype, counts_as, device)
        shape, size = tuple(array.shape), array.element_size()
        strides = tuple([stride * size for stride in array.stride()])
        raw = DeviceArray(array.data_ptr(), shape, strides, dtype)
        return Operand(raw, shape, dtype, counts_as, device, array)

    def empty(self, d: int, n: int, dtype: str, device: Device, like: Any) -> Any:
        torch = sys.modules["torch"]
        if device is CPU:
            return torch.empty((d, n), dtype=getattr(torch, dtype), device="cpu")
        return torch.empty((d, n), dtype=getattr(torch, dtype), device=str(device))

    def stream(self, device: Device, array: Any) -> int:
        return 0 if device is CPU else int(_raw_torch_stream()(device.ordinal))

    def is_plain_type(self, kind: type) -> bool:
        return kind is sys.modules["torch"].Tensor

    def plain(self, mu: Any, sigma: Any, n: int, out: Any) -> Plain | None:
        device = mu.get_device()
        element = mu.dtype
        named = _plain_torch_dtype(element)
        d = mu.numel()
        if (
            not mu.is_cuda
            or named is None
            or mu.ndim != 1
            or sigma.ndim != 1
            or sigma.numel() != d
            or sigma.dtype is not element
            or sigma.get_device() != device
            or not (mu.is_contiguous() and sigma.is_contiguous())
            or mu.requires_grad
            or sigma.requires_grad
            or _is_transforming()()
            or mu.is_neg()
            or sigma.is_neg()
        ):
            return None
        dtype, size = named
        mu_at, sigma_at = mu.data_ptr(), sigma.data_ptr()
        if out is None:
            result = mu.new_empty(d, n)
            out_at = result.data_ptr()
        else:
            if (
                type(out) is not type(mu)
                or out.shape != (d, n)
                or out.dtype is not element
                or out.get_device() != device
                or not out.is_contiguous()
                or out.requires_grad
                or out.is_neg()
            ):
                return None
            result = out
            out_at = out.data_ptr()
            end, vector_size = out_at + d * n * size, d * size
            if out_at - vector_size < mu_at < end or out_at - vector_size < sigma_at < end:
                return None
        if (mu_at | sigma_at | out_at) % size:
            return None
        return result, mu_at, sigma_at, out_at, d, dtype, device, _raw_torch_stream()(device)

    def is_transformed(self, *arrays: Any) -> bool:
        return _is_transforming()() or any(map(is_opaque, map(type, arrays)))

    def records_gradient(self, *arrays: Any) -> bool:
        for x in arrays:
            if getattr(x, "requires_grad", False):
                return bool(sys.modules["torch"].is_grad_enabled())
        return False

    def was_written(self, out: Any) -> None:
        _increment_version()(out)

    def to_host(self, array: Any) -> HostArray:
        array = array.detach()
        return np.asarray((array.double() if array.is_floating_point() else array).cpu().numpy())

    def to_device(self, array: HostArray, device: Device) -> Any:
        return sys.modules["torch"].from_numpy(array).to(str(device))

    def overwrite(self, target: Any, array: HostArray) -> None:
        target.copy_(sys.modules["torch"].from_numpy(array))

    def device(self, name: str, array: Any) -> Device:
        if array.is_cpu:
            return CPU
        return Device(array.device.type, array.device.index or 0)


class _Cupy(Library):
    name = "cupy"

    def operand(self, name: str, array: Any) -> Operand:
        dtype = _numpy_name(array.dtype)
        counts_as = element(name, dtype)
        raw = DeviceArray(array.data.ptr, array.shape, array.strides, dtype)
        return Operand(raw, array.shape, dtype, counts_as, self.device(name, array))

    def empty(self, d: int, n: int, dtype: str, device: Device, like: Any) -> Any:
        import cupy

        with cupy.cuda.Device(device.ordinal):
            return cupy.empty((d, n), _numpy_dtype(dtype))

    def stream(self, device: Device, array: Any) -> int:
        import cupy

        with cupy.cuda.Device(device.ordinal):
            return int(cupy.cuda.get_current_stream().ptr)

    def is_plain_type(self, kind: type) -> bool:
        return kind is sys.modules["cupy"].ndarray

    def plain(self, mu: Any, sigma: Any, n: int, out: Any) -> Plain | None:
        cuda = sys.modules["cupy"].cuda
        device = cuda.runtime.getDevice()
        element, shape, memory, sigma_memory = mu.dtype, mu.shape, mu.data, sigma.data
        named = _PLAIN_DTYPES.get(element)
        if (
            named is None
            or len(shape) != 1
            or sigma.shape != shape
            or sigma.dtype is not element
            or memory.device_id != device
            or sigma_memory.device_id != device
            or not (mu.flags.c_contiguous and sigma.flags.c_contiguous)
        ):
            return None
        (d,) = shape
        dtype, size = named
        mu_at, sigma_at = memory.ptr, sigma_memory.ptr
        if out is None:
            result = type(mu)((d, n), element)
            out_at = result.data.ptr
        else:
            if (
                type(out) is not type(mu)
                or out.shape != (d, n)
                or out.dtype is not element
                or out.data.device_id != device
                or not out.flags.c_contiguous
            ):
                return None
            result = out
            out_at = out.data.ptr
            end, vector_size = out_at + d * n * size, d * size
            if out_at - vector_size < mu_at < end or out_at - vector_size < sigma_at < end:
                return None
        if (mu_at | sigma_at | out_at) % size:
            return None
        return result, mu_at, sigma_at, out_at, d, dtype, device, cuda.get_current_stream().ptr

    def to_host(self, array: Any) -> HostArray:
        return np.asarray(array.get())

    def to_device(self, array: HostArray, device: Device) -> Any:
        import cupy

        with cupy.cuda.Device(device.ordinal):
            target = cupy.empty(array.shape, array.dtype)
        self.overwrite(target, array)
        return target

    def overwrite(self, target: Any, array: HostArray) -> None:
        import cupy

        with cupy.cuda.Device(target.device.id):
            target.set(array)
            cupy.cuda.get_current_stream().synchronize()

    def device(self, name: str, array: Any) -> Device:
        return Device("cuda", array.device.id)


class _Numba(Library):
    name = "numba"

    def operand(self, name: str, array: Any) -> Operand:
        dtype = _numpy_name(array.dtype)
        counts_as = element(name, dtype)
        raw = DeviceArray(array.__cuda_array_interface__["data"][0], array.shape, array.strides, dtype)
        return Operand(raw, array.shape, dtype, counts_as, self.device(name, array))

    def empty(self, d: int, n: int, dtype: str, device: Device, like: Any) -> Any:
        from numba import cuda

        # An array of Numba's names the stream on which it is ready.
        with on_device(device.ordinal):
            return cuda.device_array((d, n), _numpy_dtype(dtype), stream=like.stream)

    def stream(self, device: Device, array: Any) -> int:
        return _numba_stream(array.stream)

    def named_stream(self, array: Any) -> int | None:
        stream = array.stream
        return None if isinstance(stream, int) and stream == 0 else _numba_stream(stream)

    def is_plain_type(self, kind: type) -> bool:
        return kind is sys.modules["numba.cuda"].cudadrv.devicearray.DeviceNDArray

    def plain(self, mu: Any, sigma: Any, n: int, out: Any) -> Plain | None:
        element, shape, memory, sigma_memory = mu.dtype, mu.shape, mu.gpu_data, sigma.gpu_data
        named, stream = _PLAIN_DTYPES.get(element), mu.stream
        if (
            named is None
            or len(shape) != 1
            or sigma.shape != shape
            or sigma.dtype != element
            or sigma.stream is not stream
        ):
            return None
        dtype, size = named
        device = memory.context.device.id
        contiguous = (size,)
        if mu.strides != contiguous or sigma.strides != contiguous or sigma_memory.context.device.id != device:
            return None
        (d,) = shape
        mu_at, sigma_at = int(memory.device_pointer), int(sigma_memory.device_pointer)
        if out is None:
            result = type(mu)((d, n), (n * size, size), element, stream)
            if result.gpu_data.context.device.id != device:  # Made on another device, which is the current one.
                return None
            out_at = int(result.gpu_data.device_pointer)
        else:
            if (
                type(out) is not type(mu)
                or out.shape != (d, n)
                or out.dtype != element
                or out.stream is not stream
                or out.strides != (n * size, size)
                or out.gpu_data.context.device.id != device
            ):
                return None
            result = out
            out_at = int(out.gpu_data.device_pointer)
            end, vector_size = out_at + d * n * size, d * size
            if out_at - vector_size < mu_at < end or out_at - vector_size < sigma_at < end:
                return None
        if (mu_at | sigma_at | out_at) % size:
            return None
        return result, mu_at, sigma_at, out_at, d, dtype, device, _numba_stream(stream)

    def to_host(self, array: Any) -> HostArray:
        return np.asarray(array.copy_to_host())

    def to_device(self, array: HostArray, device: Device) -> Any:
        from numba import cuda

        with on_device(device.ordinal):
            return cuda.to_device(array)

    def overwrite(self, target: Any, array: HostArray) -> None:
        target.copy_to_device(array)

    def device(self, name: str, array: Any) -> Device:
        return Device("cuda", array.gpu_data.context.device.id)


class _Foreign(Library):
    """Objects known only by ``__dlpack__`` or ``__cuda_array_interface__``: results are of the backend's library."""

    name = "foreign"
    foreign = True

    def device(self, name: str, array: Any) -> Device:
        try:
            if not hasattr(array, "__dlpack_device__"):
                return Device("cuda", device_of(array.__cuda_array_interface__["data"][0]))
            kind, index = (int(part) for part in array.__dlpack_device__())
        except (BufferError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise TypeError(f"{name}: expected an array on one device, got {describe(array)} ({error})") from error
        if kind in _dlpack.HOST:
            return CPU
        return Device("cuda" if kind in _dlpack.CUDA else f"DLPack device type {kind}", index)

    def named_stream(self, array: Any) -> int | None:
        stream = getattr(array, "__cuda_array_interface__", {}).get("stream")
        return None if stream is None else int(stream)

    def as_numpy(self, array: Any) -> HostArray:
        shared = _dlpack.Imported(array)
        return np.asarray(shared).view(shared.dtype)

    def check_target(self, out: Any) -> None:
        read_only = False
        if hasattr(out, "__dlpack__"):
            with contextlib.suppress(BufferError, RuntimeError, TypeError, ValueError):  # To be said when it is used.
                read_only = _dlpack.is_read_only(out)
        else:
            read_only = out.__cuda_array_interface__.get("data", (0, False))[1]
        if read_only:
            raise ValueError("out: expected a writable array, got a read-only one")


class _Jax(_Foreign):
    """JAX arrays are immutable, so that results are made elsewhere and handed over."""

    name = "jax"

    def device(self, name: str, array: Any) -> Device:
        import jax

        if isinstance(array, jax.core.Tracer):
            raise TypeError(f"{name}: got a JAX tracer; sample cannot be traced, call it outside jit, grad and vmap")
        return super().device(name, array)

    def named_stream(self, array: Any) -> int | None:
        return None  # To ask for the CUDA array interface is to be refused, or to wait.

    def as_numpy(self, array: Any) -> HostArray:
        return np.asarray(array)

    def check_target(self, out: Any) -> None:
        raise TypeError("out: expected a mutable array, got a JAX array, which is immutable")

    def check_dtype(self, dtype: str) -> None:
        import jax

        if dtype == "float64" and not jax.config.jax_enable_x64:
            raise TypeError("dtype: JAX has float64 only after jax.config.update('jax_enable_x64', True)")

    def hand_over(self, result: Any, raw: RawArray, device: Device, stream: int) -> Any:
        import jax

        if isinstance(raw, DeviceArray):
            # Not by the CUDA array interface: what JAX takes over by that may be freed under it.
            with keeping_context():
                return jax.numpy.from_dlpack(_dlpack.Exported(raw, (2, device.ordinal), stream, result))
        if result.dtype.name == "bfloat16":  # NumPy exports none through DLPack.
            return jax.device_put(result, jax.devices("cpu")[0])
        return jax.numpy.from_dlpack(result)


_HOST = _Host()
_FOREIGN = _Foreign()
_FOREIGN.host = _HOST
_JAX = _Jax()
_JAX.host = _AlignedHost()
# By the package that defines an array's class.
_BY_PACKAGE: dict[str, Library] = {
    "numpy": _HOST,
    "torch": _Torch(),
    "cupy": _Cupy(),
    "numba": _Numba(),
    "jax": _JAX,
    "jaxlib": _JAX,
}
_by_type: dict[type, Library] = {list: _HOST, tuple: _HOST, np.ndarray: _HOST}


def library_called(name: str) -> Library:
    """The known library of that name; ValueError if there is none."""
    library = _BY_PACKAGE.get(name)
    if library is None or library.foreign:
        known = ", ".join(package for package, library in _BY_PACKAGE.items() if not library.foreign)
        raise ValueError(f"host_library: expected {known}, got {describe(name)}")
    return library


def library_of(name: str, array: Any) -> Library:
    """The library that argument `name` belongs to; TypeError if it is no array."""
    kind = type(array)
    library = _by_type.get(kind)
    if library is None:
        library = _by_type[kind] = _recognise(name, array)
    return library


def _recognise(name: str, array: Any) -> Library:
    if isinstance(array, (np.ndarray, np.generic, list, tuple)):
        return _HOST
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _BY_PACKAGE["torch"]
    package = type(array).__module__.partition(".")[0]
    if package in _BY_PACKAGE and package != "torch" and hasattr(array, "dtype"):
        return _BY_PACKAGE[package]
    if not isinstance(array, type):  # A class has its instances' methods.
        if hasattr(array, "__cuda_array_interface__") or hasattr(array, "__dlpack_device__"):
            return _FOREIGN
        if hasattr(array, "__array__") or hasattr(array, "__array_interface__"):
            return _HOST
    raise TypeError(
        f"{name}: expected an array, a list or a number, got {describe(array)} of type {type(array).__name__}"
    )
