"""The torch_ext backend: the C++ and CUDA C++ kernels as a PyTorch extension, compiled when it is first needed, unless
it came with the installation.

It is called with addresses, through plain C functions of the libraries: PyTorch's dispatcher would cost more than the
launch. The same kernels are there as ``torch.ops.multisample.sample_`` for whoever needs an operator.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from multisample._cuda_driver import device_of
from multisample.exceptions import BackendUnavailableError

from . import prebuilt, torch_ext_build
from .contract import Backend, BackendStatus, DeviceKind, Layout, RawArray, RawVector
from .sample_call import pack_call, pack_plain_call

__all__ = ["BACKEND"]

# The first version that is tested; the libraries use the stable ABI of the one before.
_LEAST_TORCH = (2, 11)
# The value of cudaErrorMemoryAllocation.
_OUT_OF_MEMORY = 2


class TorchExtBackend:
    """See `multisample.backends.contract.Backend`."""

    name = "torch_ext"
    device_kinds: tuple[DeviceKind, ...] = ("cuda", "cpu")
    host_library = "torch"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        if hasattr(os, "register_at_fork"):  # A child must not inherit it from a thread that builds.
            os.register_at_fork(after_in_child=self._renew_lock)
        self._cpu: Any = None
        self._cuda: Any = None

    def status(self) -> BackendStatus:
        if importlib.util.find_spec("torch") is None:
            return BackendStatus(False, ("package torch is not installed: pip install 'torch>=2.11'",))
        try:
            version = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            version = "0 of unknown version"
        reasons = []
        if _parsed(version) < _LEAST_TORCH:
            least = ".".join(map(str, _LEAST_TORCH))
            reasons.append(f"torch {version} is older than {least}: pip install --upgrade 'torch>={least}'")
        elif not torch_ext_build.is_built("cpu") and (missing := torch_ext_build.missing_tools()):
            reasons = [*torch_ext_build.prebuilt_reason("cpu"), *missing]
        device = "cpu"
        if not reasons:
            without_cuda = torch_ext_build.cuda_reasons()
            kinds: list[DeviceKind] = ["cpu"] if without_cuda else ["cpu", "cuda"]
            device = " and ".join(map(_described, kinds))
            device += f" (not CUDA: {'; '.join(without_cuda)})" if without_cuda else ""
        return BackendStatus(not reasons, tuple(reasons), f"torch {version}", device)

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    def prepare(self, device_kind: DeviceKind) -> None:
        if self._cpu is not None and (device_kind == "cpu" or self._cuda is not None):
            return
        with self._lock:
            if self._cpu is None:
                self._cpu = self._load_cpu()
            if device_kind == "cuda" and self._cuda is None:
                self._cuda = self._load_cuda()

    def _load_cpu(self) -> Any:
        library = _load(torch_ext_build.cpu_library())
        from multisample.torch._operators import register  # Not before PyTorch is needed anyway.

        register()
        library.multisample_launch_cpu.argtypes = (ctypes.c_char_p,)
        library.multisample_last_error.restype = ctypes.c_char_p
        return library

    def _load_cuda(self) -> Any:
        reasons = torch_ext_build.cuda_reasons()
        if reasons:
            raise BackendUnavailableError(f"backend: {self.name!r} cannot run on CUDA here: " + "; ".join(reasons))
        library = _load(torch_ext_build.cuda_library())
        library.multisample_launch_cuda.argtypes = (ctypes.c_char_p,)
        library.multisample_advance_cuda.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        library.multisample_cuda_error.argtypes = (ctypes.c_int,)
        library.multisample_cuda_error.restype = ctypes.c_char_p
        return library

    def adopt(self, array: Any) -> Any:
        import torch

        if not isinstance(array, np.ndarray):
            if hasattr(array, "__dlpack__"):
                return torch.from_dlpack(array)
            interface = array.__cuda_array_interface__
            address = interface["data"][0]
            # As memory to write to, because PyTorch takes no other; its owner goes with it.
            shared = types.SimpleNamespace(
                __cuda_array_interface__={**interface, "data": (address, False)}, owner=array
            )
            tensor = torch.as_tensor(shared, device=f"cuda:{device_of(address)}")
            if tensor.numel() > 0 and tensor.data_ptr() != address:
                raise BufferError("PyTorch would copy it")
            return tensor
        # A copy, because a tensor over memory that cannot be written to is one that warns.
        tensor = torch.from_numpy(array.copy())
        if self._cuda is None and torch_ext_build.cuda_reasons():
            return tensor
        self.prepare("cuda")
        return tensor.cuda()

    def small_kernel(self, dtype: str, layout: Layout) -> None:
        return None

    def plain_launch(self) -> Callable[..., None]:
        self.prepare("cuda")
        run = self._cuda.multisample_launch_cuda

        def launch(*call: Any) -> None:
            error = run(pack_plain_call(*call))
            if error:
                self._raise_cuda_error(error)

        return launch

    def launch(
        self,
        mu: RawVector,
        sigma: RawVector,
        out: RawArray,
        dtype: str,
        seed: int,
        offset: int,
        counter: int,
        dim_offset: int,
        sample_offset: int,
        shared: bool,
        antithetic: bool,
        fast_math: bool,
        device: int,
        stream: int,
    ) -> None:
        call = pack_call(
            mu, sigma, out, dtype, seed, offset, counter, dim_offset, sample_offset,
            shared, antithetic, fast_math, device, stream,
        )  # fmt: skip
        if isinstance(out, np.ndarray):
            self.prepare("cpu")
            if self._cpu.multisample_launch_cpu(call):
                raise RuntimeError(f"backend: 'torch_ext' failed: {self._cpu.multisample_last_error().decode()}")
        else:
            self.prepare("cuda")
            error = self._cuda.multisample_launch_cuda(call)
            if error:
                self._raise_cuda_error(error)

    def advance(self, counter: int, device: int, stream: int) -> None:
        self.prepare("cuda")
        error = self._cuda.multisample_advance_cuda(counter, device, stream)
        if error:
            self._raise_cuda_error(error)

    def _raise_cuda_error(self, error: int) -> None:
        message = f"backend: 'torch_ext' could not launch: {self._cuda.multisample_cuda_error(error).decode()}"
        raise MemoryError(message) if error == _OUT_OF_MEMORY else RuntimeError(message)


def _described(kind: DeviceKind) -> str:
    name = "CUDA" if kind == "cuda" else kind
    return f"{name} (prebuilt)" if torch_ext_build.is_prebuilt(kind) else name


def _load(path: Path) -> Any:
    import torch

    try:
        torch.ops.load_library(str(path))
        return ctypes.CDLL(str(path))
    except OSError as error:
        mend = "remove that file, and another takes its place"
        if not path.is_relative_to(prebuilt.root()):
            mend = "remove that file, or set MULTISAMPLE_CACHE_DIR to a folder whose files can be loaded"
        raise BackendUnavailableError(f"backend: 'torch_ext' cannot load {path}: {error}; {mend}") from error


def _parsed(version: str) -> tuple[int, ...]:
    """Major and minor version as numbers."""
    parts = version.partition("+")[0].split(".")[:2]
    return tuple(int(part) if part.isdigit() else 0 for part in parts)


BACKEND: Backend = TorchExtBackend()
