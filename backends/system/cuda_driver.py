"""Calls to the CUDA driver, for memory, streams and kernels of any array library.

Array libraries differ in what they offer, and none is required. Importing this module loads nothing; without a driver
there is no device memory.
"""

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

# Constants of cuda.h.
_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
# The legacy default stream has two handles: null, and CU_STREAM_LEGACY.
_LEGACY = (0, 1)


@functools.cache
def driver() -> Any:
    """The library of the CUDA driver, or None."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _check(error: int) -> None:
    if error:
        raise RuntimeError(
            "the CUDA driver refused to wait, to order two streams, to copy, to change the device or to load a kernel:"
            f" {error_name(error)}"
        )


def error_name(error: int) -> str:
    """The name and number of a driver error."""
    name = ctypes.c_char_p()
    driver().cuGetErrorName(error, ctypes.byref(name))
    return f"{(name.value or b'').decode()} ({error})"


@functools.cache
def launch_function() -> Any:
    """cuLaunchKernelEx: launches in the current context, copies the parameters, and returns an error."""
    launch = driver().cuLaunchKernelEx
    launch.argtypes = (ctypes.c_void_p,) * 4
    return launch


class MachineCode(NamedTuple):
    """A compiled kernel."""

    symbol: str
    """The name of the kernel in `image`."""
    image: bytes
    """A cubin, or PTX."""


def load_kernel(code: MachineCode) -> int:
    """The CUfunction of a kernel, for the current context. RuntimeError if the driver refuses.

    The code is never unloaded.
    """
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver().cuModuleLoadData(ctypes.byref(module), code.image))
    _check(driver().cuModuleGetFunction(ctypes.byref(function), module, code.symbol.encode()))
    return function.value or 0


def current_device() -> int:
    """The ordinal of the current context's device, or -1 without a current context."""
    ordinal = ctypes.c_int()
    return -1 if driver().cuCtxGetDevice(ctypes.byref(ordinal)) else ordinal.value


def device_of(address: int) -> int:
    """The ordinal of the device of `address`; 0 for null and for addresses that the driver does not recognise."""
    ordinal = ctypes.c_int()
    cuda = driver()
    if address and cuda:
        error = cuda.cuPointerGetAttribute(ctypes.byref(ordinal), _DEVICE_ORDINAL, ctypes.c_uint64(address))
        return 0 if error else ordinal.value
    return 0


def is_capturing(stream: int) -> bool:
    """Whether `stream` is being captured into a graph. The legacy stream cannot be captured."""
    cuda = None if stream in _LEGACY else driver()
    if not cuda:
        return False
    status = ctypes.c_int()
    error = cuda.cuStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status))
    return not error and status.value != 0


@contextlib.contextmanager
def on_device(device: int) -> Iterator[None]:
    """Make the primary context of `device` current. Null streams, new events and Numba's arrays belong to that context.

    Numba's own ``cuda.gpus[device]`` may lose the current context when it first activates another device (numba-cuda
    0.30.4).
    """
    if current_device() == device:
        yield
        return
    cuda, context = driver(), ctypes.c_void_p()
    _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    try:
        _check(cuda.cuCtxPushCurrent_v2(context))
        try:
            yield
        finally:
            cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
    finally:
        cuda.cuDevicePrimaryCtxRelease_v2(device)


@contextlib.contextmanager
def keeping_context() -> Iterator[None]:
    """Restore the current CUDA context on exit. Calls into JAX, for example, may change it."""
    cuda, context = driver(), ctypes.c_void_p()
    known = cuda is not None and cuda.cuCtxGetCurrent(ctypes.byref(context)) == 0
    try:
        yield
    finally:
        if known:
            cuda.cuCtxSetCurrent(context)


class Event:
    """The work submitted to `stream` of `device` until now. RuntimeError if the driver refuses."""

    def __init__(self, stream: int, device: int) -> None:
        self._driver = driver()
        self.handle = ctypes.c_void_p()
        with on_device(device):
            _check(self._driver.cuEventCreate(ctypes.byref(self.handle), _DISABLE_TIMING))
            _check(self._driver.cuEventRecord(self.handle, ctypes.c_void_p(stream)))

    def is_done(self) -> bool:
        """Whether the work is done; True if the driver returns an error."""
        # Outside relaxed mode, the query would invalidate a capture of this thread. A capture in global mode, of any
        # thread, would also become invalid.
        with relaxed_capture():
            return bool(self._driver.cuEventQuery(self.handle) != _NOT_READY)

    def __del__(self) -> None:
        if self.handle:
            self._driver.cuEventDestroy_v2(self.handle)


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let this thread make calls that CUDA refuses while a stream is being captured, such as to load a kernel."""
    if driver() is None:
        yield
        return
    exchange, mode = driver().cuThreadExchangeStreamCaptureMode, ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def synchronize(device: int) -> None:
    """Wait for all work submitted to `device`. RuntimeError if the driver refuses, as while a stream is captured."""
    # Without relaxed mode, the wait would invalidate another thread's capture if that is in global mode.
    with on_device(device), relaxed_capture():
        _check(driver().cuCtxSynchronize())


def read(address: int, size: int, stream: int, device: int) -> bytes:
    """Copies bytes of device memory to the host in stream order, and waits for the stream."""
    memory, handle = ctypes.create_string_buffer(size), ctypes.c_void_p(stream)
    with on_device(device):
        _check(driver().cuMemcpyDtoHAsync_v2(memory, ctypes.c_uint64(address), ctypes.c_size_t(size), handle))
        _check(driver().cuStreamSynchronize(handle))
    return memory.raw


def order(first: int, then: int, device: int) -> None:
    """Make later work on stream `then` wait for earlier work on stream `first`. Both are streams of `device`.

    RuntimeError if the driver refuses, for example if only one of the two streams is being captured.
    """
    if first != then and not (first in _LEGACY and then in _LEGACY):
        event = Event(first, device)
        with on_device(device):
            _check(driver().cuStreamWaitEvent(ctypes.c_void_p(then), event.handle, 0))
