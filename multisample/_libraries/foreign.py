"""Arrays of unknown libraries, read through DLPack or the CUDA array interface."""

import contextlib
from typing import Any

import numpy as np

from multisample.backends.contract import HostArray
from multisample.backends.memory import dlpack
from multisample.backends.system.cuda_driver import device_of

from .._arguments import describe
from .library import CPU, Device, Library


class ForeignLibrary(Library):
    """Objects with ``__dlpack__`` or ``__cuda_array_interface__``. The backend's library also makes the result."""

    name = "foreign"
    foreign = True

    def as_numpy(self, array: Any) -> HostArray:
        """A NumPy array that shares the memory of a host array."""
        shared = dlpack.Imported(array)
        return np.asarray(shared).view(shared.dtype)

    def returned(self, result: Any, like: Any) -> Any:
        """`result`, as an array of the namespace of `like` (the array API standard) if that namespace can share it."""
        with contextlib.suppress(Exception):  # An array without namespace, or a namespace without the type.
            return like.__array_namespace__().from_dlpack(result)
        return result

    def device(self, name: str, array: Any) -> Device:
        try:
            if not hasattr(array, "__dlpack_device__"):
                return Device("cuda", device_of(array.__cuda_array_interface__["data"][0]))
            kind, index = (int(part) for part in array.__dlpack_device__())
        except Exception as error:  # A foreign class may raise anything.
            raise TypeError(f"{name}: expected an array on one device, got {describe(array)} ({error})") from error
        if kind in dlpack.HOST:
            return CPU
        return Device("cuda" if kind in dlpack.CUDA else f"DLPack device type {kind}", index)

    def named_stream(self, array: Any) -> int | None:
        stream = getattr(array, "__cuda_array_interface__", {}).get("stream")
        return None if stream is None else int(stream)

    def check_target(self, out: Any) -> None:
        read_only = False
        with contextlib.suppress(Exception):  # The adoption of the array reports the error.
            if hasattr(out, "__dlpack__"):
                read_only = dlpack.is_read_only(out)
            else:
                read_only = out.__cuda_array_interface__.get("data", (0, False))[1]
        if read_only:
            raise ValueError("out: expected a writable array, got a read-only one")


FOREIGN = ForeignLibrary()
