"""The numba backend: the kernel in Python, compiled by numba-cuda when it is first needed.

For those who have neither PyTorch nor CuPy: numba-cuda and a driver are enough. Its words and normals are the very
functions of the cpu backend. Each combination of element type, noise, pairs, transform and stores is a kernel of its
own, compiled alone, and Numba keeps it on disk.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import sys
import threading
from typing import Any

import numpy as np

from multisample._cuda_driver import device_of, on_device
from multisample._dlpack import Imported
from multisample.exceptions import BackendUnavailableError

from .contract import Backend, BackendStatus, DeviceKind, Layout
from .cuda_toolchain import INSTALL, clashes
from .geometry import PACKED_GEOMETRY, Geometry
from .packed_launch import PackedLaunch
from .sample_call import PACKED_CALL

__all__ = ["BACKEND"]

_LEGACY_STREAM = 1  # CU_STREAM_LEGACY of cuda.h: the default stream.


class _Buffer:
    """A kernel's parameters in memory, one after the other, and where they are, as the driver wants it."""

    def __init__(self, size: int) -> None:
        buffer = ctypes.create_string_buffer(size)
        self.bytes = memoryview(buffer).cast("B")
        self._size = ctypes.c_size_t(size)
        # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE and CU_LAUNCH_PARAM_END of cuda.h.
        self._extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(buffer), 2, ctypes.addressof(self._size), 0)
        self.address = ctypes.addressof(self._extra)


class _Parameters(threading.local):
    """Of both kinds of kernels; each launch copies them."""

    def __init__(self) -> None:
        self.sample, self.advance = _Buffer(PACKED_CALL + PACKED_GEOMETRY), _Buffer(8)


class NumbaBackend(PackedLaunch):
    """See `multisample.backends.contract.Backend`."""

    name = "numba"
    device_kinds: tuple[DeviceKind, ...] = ("cuda",)
    host_library = "numba"

    def __init__(self) -> None:
        # Numba's kernels, by what they are compiled for and the device, and the driver's handles of them.
        self.compiled: dict[tuple[Any, ...], Any] = {}
        self._kernels: dict[tuple[Any, ...], Any] = {}
        self._driver: Any = None
        self._parameters = _Parameters()

    def status(self) -> BackendStatus:
        if importlib.util.find_spec("numba_cuda") is None:
            return BackendStatus(False, (f"package numba-cuda is not installed: {INSTALL}",))
        installed = importlib.metadata.version("numba-cuda")
        version = f"numba-cuda {installed}"
        try:
            # The second is what compiling needs beside the first, and stumbles over a NumPy that is too new.
            from numba import cuda
            from numba.cuda.np import arrayobj  # noqa: F401
        except Exception as error:  # Whatever a broken installation may do.
            if "numpy" in str(error).lower():
                return BackendStatus(
                    False,
                    (f"numba-cuda {installed} does not work with NumPy {np.__version__} ({error}): pip install"
                     " 'numpy<2.5'",),
                    version,
                )  # fmt: skip
            return BackendStatus(False, (f"package numba-cuda cannot be imported ({error}): {INSTALL}",), version)
        reasons, device = [], ""
        try:
            devices = list(cuda.gpus)
            device = _name(devices[0])
            device += f" and {len(devices) - 1} more" if len(devices) > 1 else ""
        except Exception as error:
            message = " ".join(str(error).split()) or "there is none"
            reasons.append(f"no CUDA device ({message}): see nvidia-smi and CUDA_VISIBLE_DEVICES")
        try:
            reasons.extend(clashes())
        except Exception as error:
            reasons.append(f"numba-cuda's compilers cannot be asked ({error}): {INSTALL}")
        return BackendStatus(not reasons, tuple(reasons), version, device)

    def prepare(self, device_kind: DeviceKind) -> None:
        # One kernel, to see whether the compiler works at all; the others are compiled when they are needed.
        from numba import cuda

        key = ("float32", False, False, False, 0, cuda.current_context().device.id)
        if key not in self._kernels:
            self._compile(key)

    def adopt(self, array: Any) -> Any:
        from numba import cuda

        if isinstance(array, np.ndarray):
            self.prepare("cuda")
            return cuda.to_device(array)
        # JAX has both protocols, and tells of a stream in this one only.
        by_dlpack = hasattr(array, "__dlpack__")
        ordinal = array.__dlpack_device__()[1] if by_dlpack else device_of(array.__cuda_array_interface__["data"][0])
        # Numba takes memory to be on the device that is current.
        with on_device(int(ordinal)):
            if not by_dlpack:
                return cuda.as_cuda_array(array, sync=False)
            # Ready on the default stream, which Numba works on where no other is named.
            shared = Imported(array, _LEGACY_STREAM)
            return cuda.as_cuda_array(shared, sync=False).view(shared.dtype)

    def small_kernel(self, dtype: str, layout: Layout) -> None:
        return None

    def _run(
        self,
        packed: bytes,
        cut: Geometry,
        packed_cut: bytes,
        dtype: str,
        shared: bool,
        antithetic: bool,
        fast_math: bool,
        device: int,
        stream: int,
    ) -> None:
        key = (dtype, shared, antithetic, fast_math and dtype != "float64", cut.stores, device)
        parameters = self._parameters.sample
        parameters.bytes[:] = packed + packed_cut
        self._launch(key, cut.blocks, cut.threads, parameters.address, device, stream)

    def advance(self, counter: int, device: int, stream: int) -> None:
        """As the contract says."""
        parameters = self._parameters.advance
        parameters.bytes[:] = counter.to_bytes(8, sys.byteorder)
        self._launch(("advance", device), 1, 1, parameters.address, device, stream)

    def _launch(
        self, key: tuple[Any, ...], blocks: int, threads: int, parameters: int, device: int, stream: int
    ) -> None:
        """Launch a kernel with the context of `device` current."""
        driver = self._driver or self._import()
        error, current = driver.cuCtxGetDevice()
        if error or int(current) != device:
            with on_device(device):
                self._launch(key, blocks, threads, parameters, device, stream)
            return
        kernel = self._kernels.get(key) or self._compile(key)
        (error,) = driver.cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, 0, parameters)
        if error:
            raise RuntimeError(f"backend: 'numba' could not launch its kernel: {error.name}")

    def _import(self) -> Any:
        from cuda.bindings import driver

        self._driver = driver
        return driver

    def _compile(self, key: tuple[Any, ...]) -> Any:
        """The kernel for such calls, or that of `advance`; the last of `key` is the device, which is current."""
        try:
            from .cuda_compilation import compile_advance, compile_kernel

            kernel = compile_advance() if key[0] == "advance" else compile_kernel(*key[:-1])
            handle = kernel.library.get_cufunc().handle
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise BackendUnavailableError(
                "backend: 'numba' could not compile its kernel: " + "\n".join(lines[-20:])
                + f"\nto install the versions that are known to work: {INSTALL}"
            ) from error  # fmt: skip
        self.compiled[key] = kernel  # The function is there as long as it is.
        self._kernels[key] = handle
        return handle


def _name(device: Any) -> str:
    name = device.name
    return name.decode() if isinstance(name, bytes) else str(name)


BACKEND: Backend = NumbaBackend()
