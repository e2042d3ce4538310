"""JAX. Its arrays are immutable, so another library allocates the result, and JAX imports it by DLPack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from multisample.backends.contract import DeviceArray, HostArray
from multisample.backends.memory.dlpack import Exported
from multisample.backends.system.cuda_driver import keeping_context

from .foreign import ForeignLibrary
from .library import Device, Library
from .numpy import NumpyLibrary, cached_dtype

__all__ = ["JAX"]


class _AlignedNumpyLibrary(NumpyLibrary):
    """NumPy arrays that JAX imports without a copy: their addresses are multiples of 64 bytes."""

    def allocator(self, shape: tuple[int, ...], dtype: str, device: Device) -> Callable[[Any], Any]:
        element = cached_dtype(dtype)
        size = shape[0] * shape[1] * element.itemsize

        def allocate(like: Any) -> Any:
            memory = np.empty(size + 63, np.uint8)
            start = -memory.ctypes.data % 64
            return memory[start : start + size].view(element).reshape(shape)

        return allocate


class JaxLibrary(ForeignLibrary):
    name = "jax"
    host = _AlignedNumpyLibrary()

    def device(self, name: str, array: Any) -> Device:
        import jax

        if isinstance(array, jax.core.Tracer):
            raise TypeError(f"{name}: got a JAX tracer; sample cannot be traced, call it outside jit, grad and vmap")
        return super().device(name, array)

    def named_stream(self, array: Any) -> int | None:
        """See `Library`. Reading JAX's CUDA array interface would wait or raise."""
        return None

    def as_numpy(self, array: Any) -> HostArray:
        return np.asarray(array)

    def check_target(self, out: Any) -> None:
        raise TypeError("out: expected a mutable array, got a JAX array, which is immutable")

    def check_dtype(self, dtype: str) -> None:
        import jax

        if dtype == "float64" and not jax.config.jax_enable_x64:
            raise TypeError("dtype: JAX has float64 only after jax.config.update('jax_enable_x64', True)")

    def hand_over(self, result: Any, device: Device, library: Library, stream: int) -> Any:
        import jax

        if device.kind == "cuda":
            operand = library.describe("result", result)
            raw = DeviceArray(library.address(result), operand.shape, operand.strides, operand.dtype)
            # Not by the CUDA array interface: JAX may free memory imported that way while it is in use.
            with keeping_context():
                return jax.numpy.from_dlpack(Exported(raw, (2, device.ordinal), stream, result))
        if result.dtype.name == "bfloat16":  # NumPy cannot export bfloat16 by DLPack.
            return jax.device_put(result, jax.devices("cpu")[0])
        return jax.numpy.from_dlpack(result)


JAX = JaxLibrary()
