"""The cupy backend: the CUDA C++ kernel, compiled by NVRTC when it is first needed.

Nothing has to be built beforehand and no CUDA toolkit installed: CuPy, NVRTC and a driver are enough. Each combination
of element type, noise, transform and stores is a kernel of its own, compiled alone, and CuPy keeps it on disk.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import threading
from typing import Any

import numpy as np

from multisample._cuda_driver import device_of
from multisample._dlpack import Imported
from multisample.exceptions import BackendUnavailableError

from . import csrc_files
from .contract import Backend, BackendStatus, DeviceKind, Layout
from .geometry import KERNEL_STORES, PACKED_GEOMETRY, Geometry
from .packed_launch import PackedLaunch
from .sample_call import PACKED_CALL

__all__ = ["ADVANCE_KERNEL", "BACKEND", "OPTIONS", "kernel_name", "source"]

_TYPES = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}
# How each CUDA version's package of CuPy is called.
_PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "cupy")

_LEGACY_STREAM = 1  # What DLPack calls the default stream.
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT of cuda.h.

ADVANCE_KERNEL = "multisample::advance_kernel"
"""The C++ name of the kernel that counts up an offset."""

OPTIONS = ("--std=c++17", f"-I{csrc_files.folder()}")
"""What NVRTC is told."""


@functools.cache
def source() -> str:
    """The program that NVRTC compiles.

    It names the contents of the headers, because CuPy's cache looks at nothing but the program.
    """
    return f'// {csrc_files.digest()}\n#include "sample_kernel.cuh"\n'


def kernel_name(dtype: str, shared: bool, antithetic: bool, fast_math: bool, stores: int) -> str:
    """The C++ name of the kernel for such a call."""
    arguments = (
        f"multisample::{_TYPES[dtype]}" if dtype in ("float16", "bfloat16") else _TYPES[dtype],
        str(bool(shared)).lower(),
        str(bool(antithetic)).lower(),
        str(bool(fast_math) and dtype != "float64").lower(),
        f"multisample::{KERNEL_STORES[stores]}",
    )
    return f"multisample::sample_kernel<{', '.join(arguments)}>"


class _Parameters(threading.local):
    """A kernel's parameters in memory, and where they are, as the driver wants it; each launch copies them."""

    def __init__(self) -> None:
        call, cut = ctypes.create_string_buffer(PACKED_CALL), ctypes.create_string_buffer(PACKED_GEOMETRY)
        self.call, self.cut = memoryview(call).cast("B"), memoryview(cut).cast("B")
        self._addresses = (ctypes.c_void_p * 2)(ctypes.addressof(call), ctypes.addressof(cut))
        self.address = ctypes.addressof(self._addresses)
        self.counter = ctypes.c_void_p()
        self._counter_addresses = (ctypes.c_void_p * 1)(ctypes.addressof(self.counter))
        self.counter_address = ctypes.addressof(self._counter_addresses)


class CupyBackend(PackedLaunch):
    """See `multisample.backends.contract.Backend`."""

    name = "cupy"
    device_kinds: tuple[DeviceKind, ...] = ("cuda",)
    host_library = "cupy"

    def __init__(self) -> None:
        self._kernels: dict[tuple[Any, ...], int] = {}
        self._modules: list[Any] = []
        self._cuda: Any = None
        self._parameters = _Parameters()

    def status(self) -> BackendStatus:
        if importlib.util.find_spec("cupy") is None:
            return BackendStatus(
                False, ("package cupy is not installed: pip install cupy-cuda12x, or cupy-cuda13x for CUDA 13",)
            )
        version = f"cupy {_version()}"
        try:
            import cupy
        except Exception as error:  # Whatever a broken installation may do.
            return BackendStatus(False, (f"package cupy cannot be imported ({error}): reinstall it",), version)
        reasons, device = [], ""
        try:
            count = cupy.cuda.runtime.getDeviceCount()
            if count == 0:
                reasons.append("no CUDA device: see nvidia-smi and CUDA_VISIBLE_DEVICES")
            else:
                device = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
                device += f" and {count - 1} more" if count > 1 else ""
        except Exception as error:
            reasons.append(f"no CUDA device ({error}): see nvidia-smi and CUDA_VISIBLE_DEVICES")
        try:
            version += ", NVRTC {}.{}".format(*cupy.cuda.nvrtc.getVersion())
        except Exception as error:
            reasons.append(f"NVRTC cannot be loaded ({error}): pip install 'cupy-cuda12x[ctk]', or the same for 13x")
        return BackendStatus(not reasons, tuple(reasons), version, device)

    def prepare(self, device_kind: DeviceKind) -> None:
        # One kernel, to see whether NVRTC works at all; the others are compiled when they are needed.
        cuda = self._cuda or self._import()
        key = ("float32", False, False, False, 0, cuda.runtime.getDevice())
        if key not in self._kernels:
            self._compile(key)

    def adopt(self, array: Any) -> Any:
        import cupy

        if isinstance(array, np.ndarray):
            self.prepare("cuda")
            return cupy.asarray(array)
        # JAX has both protocols, and tells of a stream in this one only.
        by_dlpack = hasattr(array, "__dlpack__")
        ordinal = array.__dlpack_device__()[1] if by_dlpack else device_of(array.__cuda_array_interface__["data"][0])
        # What is not on the current device would be copied to it.
        with cupy.cuda.Device(int(ordinal)):
            if not by_dlpack:
                return cupy.asarray(array)
            # CuPy's own from_dlpack does the same, but knows bfloat16 in its latest versions only.
            shared = Imported(array, cupy.cuda.get_current_stream().ptr or _LEGACY_STREAM)
            return cupy.asarray(shared).view(shared.dtype)

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
        parameters = self._parameters
        parameters.call[:] = packed
        parameters.cut[:] = packed_cut
        self._launch(key, cut.blocks, cut.threads, parameters.address, device, stream)

    def advance(self, counter: int, device: int, stream: int) -> None:
        """As the contract says."""
        parameters = self._parameters
        parameters.counter.value = counter
        self._launch(("advance", device), 1, 1, parameters.counter_address, device, stream)

    def _launch(
        self, key: tuple[Any, ...], blocks: int, threads: int, parameters: int, device: int, stream: int
    ) -> None:
        """Launch a kernel with `device` current."""
        cuda = self._cuda or self._import()
        if cuda.runtime.getDevice() != device:
            with cuda.Device(device):
                self._launch(key, blocks, threads, parameters, device, stream)
            return
        kernel = self._kernels.get(key) or self._compile(key)
        # What the kernel's own call does too, in half the time.
        launch = cuda.driver.launchKernel
        try:
            launch(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, 0)
        except cuda.driver.CUDADriverError as error:
            if error.status != _INVALID_CONTEXT:
                raise
            # A thread that has not asked anything of the device yet has its number, but not its context.
            cuda.Device(device).use()
            launch(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, 0)

    def _import(self) -> Any:
        import cupy

        self._cuda = cupy.cuda
        return self._cuda

    def _compile(self, key: tuple[Any, ...]) -> int:
        """The kernel for such calls, or that of `advance`; the last of `key` is the device, which is current."""
        import cupy

        name = ADVANCE_KERNEL if key[0] == "advance" else kernel_name(*key[:-1])
        try:
            module = cupy.RawModule(code=source(), options=OPTIONS, name_expressions=(name,))
            kernel = module.get_function(name).kernel
        except cupy.cuda.compiler.CompileException as error:
            lines = str(error).strip().splitlines()
            raise BackendUnavailableError(
                "backend: 'cupy' could not compile its kernel: " + "\n".join(lines[-20:])
                + "\nto try another NVRTC: pip install --upgrade 'cupy-cuda12x[ctk]', or the same for 13x"
            ) from error  # fmt: skip
        self._modules.append(module)  # Its kernels are there as long as it is.
        handle: int = kernel.ptr
        self._kernels[key] = handle
        return handle


def _version() -> str:
    for package in _PACKAGES:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"


BACKEND: Backend = CupyBackend()
