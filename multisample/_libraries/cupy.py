"""CuPy; imported when one of its arrays has come in, or when the cupy backend makes one."""

from collections.abc import Callable, Hashable
from typing import Any

import cupy

from multisample.backends.contract import HostArray

from .library import Device, Library, Shape
from .numpy import cached_dtype

_current_device, _current_stream = cupy.cuda.runtime.getDevice, cupy.cuda.get_current_stream


class CupyLibrary(Library):
    name = "cupy"
    types = (cupy.ndarray,)

    def signature(self, array: Any) -> Hashable:
        return array.dtype, array.shape, array.strides, array.data.device_id

    def address(self, array: Any) -> int:
        pointer: int = array.data.ptr
        return pointer

    def normalized(self, name: str, array: Any) -> Any:
        return cupy.ndarray.view(array, type=cupy.ndarray)

    def flattener(self, aligned: Shape, shape: Shape, flat: Shape) -> Callable[[Any], Any]:
        return lambda x: cupy.ascontiguousarray(cupy.broadcast_to(x.reshape(aligned), shape)).reshape(flat)

    def device(self, name: str, array: Any) -> Device:
        return Device("cuda", array.data.device_id)

    def allocator(self, shape: Shape, dtype: str, device: Device) -> Callable[[Any], Any]:
        element, ordinal, make = cached_dtype(dtype), device.ordinal, cupy.ndarray

        def allocate(like: Any) -> Any:
            if _current_device() == ordinal:
                return make(shape, element)
            with cupy.cuda.Device(ordinal):
                return make(shape, element)

        return allocate

    def stream(self, device: Device) -> Callable[[Any], int]:
        ordinal = device.ordinal

        def stream(array: Any) -> int:
            if _current_device() == ordinal:
                return int(_current_stream().ptr)
            with cupy.cuda.Device(ordinal):
                return int(_current_stream().ptr)

        return stream

    to_host = staticmethod(cupy.ndarray.get)

    def to_device(self, array: HostArray, device: Device) -> Any:
        # CuPy copies through a buffer of pinned memory, which it keeps until the stream has passed the copy.
        with cupy.cuda.Device(device.ordinal):
            return cupy.array(array)

    def overwrite(self, target: Any, array: HostArray) -> None:
        with cupy.cuda.Device(target.device.id):
            target.set(array)
            cupy.cuda.get_current_stream().synchronize()


CUPY = CupyLibrary()
