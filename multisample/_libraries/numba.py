"""Numba's device arrays; imported when one has come in, or when the numba backend makes one."""

import math
from collections.abc import Callable, Hashable
from typing import Any

from numba import cuda
from numba.cuda.cudadrv.devicearray import DeviceNDArray

from multisample.backends.contract import HostArray
from multisample.backends.system.cuda_driver import current_device, on_device, synchronize

from .library import Device, Library, Shape
from .numpy import cached_dtype


def handle_of(stream: Any) -> int:
    """The driver's handle of a stream of Numba's, which is an object or 0."""
    return int(getattr(stream, "handle", stream))


class NumbaLibrary(Library):
    """See `Library`. Numba has no current stream: each array carries its own."""

    name = "numba"
    names_streams = True
    types = (DeviceNDArray,)

    def signature(self, array: Any) -> Hashable:
        return array.dtype, array.shape, array.strides, array.gpu_data.context.device.id

    def address(self, array: Any) -> int:
        memory = array.gpu_data
        return 0 if memory is None else int(memory.device_pointer)

    def named_stream(self, array: Any) -> int | None:
        stream = array.stream
        return None if isinstance(stream, int) and stream == 0 else handle_of(stream)

    def normalized(self, name: str, array: Any) -> Any:
        if not isinstance(array, DeviceNDArray):
            return array
        own = array._dummy  # Numba's shape and strides are attributes of the instance, so a subclass can hide them.
        return DeviceNDArray(own.shape, own.strides, array.dtype, array.stream, array.gpu_data)

    def flattener(self, aligned: Shape, shape: Shape, flat: Shape) -> Callable[[Any], Any]:
        raise ValueError(
            f"mu, sigma: expected device arrays of Numba whose elements have a single stride in shape {shape}, since"
            " Numba broadcasts and copies none; make them contiguous and of that shape"
        )

    def device(self, name: str, array: Any) -> Device:
        return Device("cuda", array.gpu_data.context.device.id)

    def allocator(self, shape: Shape, dtype: str, device: Device) -> Callable[[Any], Any]:
        element, ordinal = cached_dtype(dtype), device.ordinal
        strides = tuple(math.prod(shape[axis + 1 :]) * element.itemsize for axis in range(len(shape)))

        def allocate(like: Any) -> Any:
            if current_device() == ordinal:
                return DeviceNDArray(shape, strides, element, like.stream)
            with on_device(ordinal):
                return DeviceNDArray(shape, strides, element, like.stream)

        return allocate

    def stream(self, device: Device) -> Callable[[Any], int]:
        return lambda array: handle_of(array.stream)

    to_host, overwrite = staticmethod(DeviceNDArray.copy_to_host), staticmethod(DeviceNDArray.copy_to_device)

    def to_device(self, array: HostArray, device: Device) -> Any:
        with on_device(device.ordinal):
            target = cuda.to_device(array)
        # The copy is on the default stream, and may not have arrived. Not every stream waits for the default stream.
        synchronize(device.ordinal)
        return target


NUMBA = NumbaLibrary()
