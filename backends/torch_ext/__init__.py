"""The torch_ext backend: a PyTorch extension with CUDA C++ kernels, prebuilt or compiled on first use.

On the CPU, it runs the kernels of the cpu backend.

Calls use plain C functions of the libraries, because PyTorch's dispatcher costs more than the launch. The operators
``torch.ops.multisample`` run the same kernels, for calls that PyTorch transforms or compiles.
"""

import contextlib
import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import re
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ..contract import PROTOCOL, Backend, BackendStatus, DeviceKind, Launcher
from ..element_types import ElementType
from ..errors import BackendUnavailableError
from ..generic import generic_launcher
from ..kernels.cuda.conversion import convert_vectors
from ..launch import HOST, INPUTS, PACKED_LAUNCH, SIZES, Launch, Operation, computing_name, pack, type_name, unpack
from ..memory.dlpack import CUDA, LEGACY_STREAM, capsule_and_strides
from ..native import library_cache, prebuilt, toolchain, units
from ..native.units import LibraryKind
from ..system.cuda_driver import device_of
from ..system.threads import thread_limit
from .builtins import Builtins

__all__ = ["BACKEND"]

# The first tested version. The libraries use the stable ABI of the version before.
_LEAST_TORCH = (2, 11)
# The value of cudaErrorMemoryAllocation.
_OUT_OF_MEMORY = 2
# UnitLoader of csrc/torch/operators.h.
_UNIT_LOADER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)


class TorchExtBackend:
    name = "torch_ext"
    device_kinds: tuple[DeviceKind, ...] = ("cuda", "cpu")
    host_library = "torch"
    protocol = PROTOCOL
    operations = tuple(Operation)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._renew_lock)  # Another thread may hold the lock at a fork.
        self._cpu: Any = None
        self._cuda: Any = None
        self.builtins: Builtins | None = None
        """Compiled functions, once the library is loaded. None if this process cannot call compiled functions."""

    def status(self) -> BackendStatus:
        try:
            version = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            version = ""
        if not version or importlib.util.find_spec("torch") is None:
            return BackendStatus(False, ("package torch is not installed: pip install 'torch>=2.11'",))
        reasons = []
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < _LEAST_TORCH:
            least = ".".join(map(str, _LEAST_TORCH))
            reasons.append(f"torch {version} is older than {least}: pip install --upgrade 'torch>={least}'")
        elif not library_cache.is_built("cpu"):
            missing = toolchain.missing_tools()
            reasons = [*(library_cache.unusable("cpu") if missing else ()), *missing, *library_cache.refusal()]
        device = "cpu"
        if not reasons:
            without_cuda = library_cache.cuda_reasons()
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
            cuda_path = None
            if device_kind == "cuda" and self._cuda is None:
                if reasons := library_cache.cuda_reasons():
                    raise BackendUnavailableError(
                        f"backend: {self.name!r} cannot run on CUDA here: " + "; ".join(reasons)
                    )
                cuda_path = library_cache.libraries(("cpu", "cuda"))["cuda"]  # Built at the same time.
            if self._cpu is None:
                self._cpu = self._load_cpu()
            if cuda_path is not None:
                self._cuda = self._load_cuda(cuda_path)

    def _load_cpu(self) -> Any:
        path = library_cache.libraries(["cpu"], meanwhile=_compile_first_kernel)["cpu"]
        library = _load(path)
        from .operator_rules import register  # Imports PyTorch.

        register()
        with contextlib.suppress(ValueError):
            self.builtins = Builtins(path)
        library.multisample_run_cpu.argtypes = (ctypes.c_char_p,)
        library.multisample_set_kernel_cpu.argtypes = (ctypes.c_uint32, ctypes.c_void_p)
        return self._with_unit_loader(library, "cpu")

    def _load_cuda(self, path: Path) -> Any:
        library = _load(path)
        library.multisample_run_cuda.argtypes = (ctypes.c_char_p,)
        library.multisample_scratch_size_cuda.argtypes = (ctypes.c_char_p,)
        library.multisample_scratch_size_cuda.restype = ctypes.c_uint64
        library.multisample_advance_cuda.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        library.multisample_cuda_error.argtypes = (ctypes.c_int,)
        library.multisample_cuda_error.restype = ctypes.c_char_p
        return self._with_unit_loader(library, "cuda")

    def _with_unit_loader(self, library: Any, kind: LibraryKind) -> Any:
        """`library`, which loads the units that its operators lack through Python."""

        def load(launch_at: int, reason: int, size: int) -> int:
            try:
                self._load_unit(library, kind, unpack(ctypes.string_at(launch_at, PACKED_LAUNCH)))
            except BaseException as error:  # An exception cannot pass through C++.
                text = (str(error) or type(error).__name__).encode()[: size - 1]
                ctypes.memmove(reason, text + b"\0", len(text) + 1)
                return 1
            return 0

        library.unit_loader = _UNIT_LOADER(load)  # Kept as long as the library.
        library.multisample_set_unit_loader(library.unit_loader)
        return library

    def _load_unit(self, library: Any, kind: LibraryKind, launch: Launch) -> None:
        """Load the unit that launches like `launch` need. Builds the unit first if no library has it."""
        number = units.kind_of(launch)
        with self._lock:
            if library.multisample_has_unit(number):
                return
            if kind == "cpu":
                from ..kernels.cpu import calls  # Numba takes half a second to import.

                calls.set_reader(ctypes.cast(library.multisample_read_cpu, ctypes.c_void_p).value or 0)
                library.multisample_set_kernel_cpu(number, calls.function_address(launch))
            else:
                unit = _load(library_cache.unit_library(units.unit_of(number)))
                unit.multisample_units.restype = ctypes.c_void_p
                library.multisample_add_units(ctypes.c_void_p(unit.multisample_units()))

    def adopt(self, array: Any) -> Any:
        import torch

        if not isinstance(array, np.ndarray):
            if hasattr(array, "__dlpack__"):
                kind, ordinal = array.__dlpack_device__()
                stream = (torch.cuda.current_stream(ordinal).cuda_stream or LEGACY_STREAM) if kind in CUDA else None
                capsule, strides = capsule_and_strides(array, stream)
                _refuse_negative_strides(strides)
                return torch.from_dlpack(capsule)
            interface = array.__cuda_array_interface__
            _refuse_negative_strides(interface.get("strides"))
            address = interface["data"][0]
            # Marked as writable, because PyTorch refuses read-only memory. `owner` keeps the memory alive.
            shared = types.SimpleNamespace(
                __cuda_array_interface__={**interface, "data": (address, False)}, owner=array
            )
            tensor = torch.as_tensor(shared, device=f"cuda:{device_of(address)}")
            if tensor.numel() > 0 and tensor.data_ptr() != address:
                raise BufferError("PyTorch would copy it")
            return tensor
        # A copy, because PyTorch warns of tensors over read-only memory.
        tensor = torch.from_numpy(array.copy())
        if self._cuda is None and library_cache.cuda_reasons():
            return tensor
        self.prepare("cuda")
        return tensor.cuda()

    def launch(self, launch: Launch) -> None:
        if _reads_computing_type(launch):
            from ..kernels.cpu.launcher import run_launch  # Numba takes half a second to import.

            return run_launch(launch, _thread_count)
        run, fail = self._runner(launch)
        if launch.device == HOST and not launch.threads:
            launch = launch._replace(threads=thread_limit())
        error = run(pack(launch))
        if error:
            fail(error)

    def launcher(self, launch: Launch) -> Launcher:
        run, fail = self._runner(launch)
        kinds = {getattr(launch, f"{x}_type") for x in INPUTS} - {ElementType.number}
        # The builtin function takes numbers and vectors of the computing type, and one first row.
        builtins = None if launch.origin_step else self.builtins
        if _reads_computing_type(launch) and (builtins is None or kinds - {ElementType[computing_name(launch)]}):
            from ..kernels.cpu.launcher import packed_launcher

            return packed_launcher(launch, _thread_count)
        scratch_size, packed = self._scratch_sizes(launch), pack(launch)
        if builtins is None:
            return Launcher(generic_launcher(self, launch).run, scratch_size=scratch_size)
        is_valid = builtins.is_valid(packed) if launch.device == HOST else None
        return Launcher(builtins.launch(packed, run, fail, thread_limit), is_valid, scratch_size=scratch_size)

    def _runner(self, launch: Launch) -> tuple[Any, Callable[[int], Any]]:
        """The function that runs a packed launch like `launch`, and the one that raises its error."""
        kind: LibraryKind = "cpu" if launch.device == HOST else "cuda"
        self.prepare(kind)
        self._load_unit(self._cpu if kind == "cpu" else self._cuda, kind, launch)
        if kind == "cpu":
            return self._cpu.multisample_run_cpu, _raise_no_memory
        return self._cuda.multisample_run_cuda, self._raise_cuda_error

    def _scratch_sizes(self, launch: Launch) -> Callable[[int], int] | None:
        """`Launcher.scratch_size`."""
        has_sums = launch.operation in (Operation.gradient, Operation.moments)
        if launch.device == HOST or not (has_sums or convert_vectors(launch)[1]):
            return None

        @functools.cache
        def size(phase: int) -> int:
            return int(self._cuda.multisample_scratch_size_cuda(pack(launch._replace(first_column=phase))))

        return lambda first_column: size(first_column & 7)

    def compiled_plan(
        self, launch: Launch, mask: int, has_list: bool, checks: bool, matrix: Any, functions: tuple[Any, ...]
    ) -> Callable[..., Any] | None:
        """The compiled `Plan.run` of a sample or a gradient, if there is one. `launch` is the template of the plan.

        `mask` has the bits that are 0 in the address of an aligned vector. `has_list` says that the seed is the only
        element of a list or tuple, and `checks` that values in host memory are checked. A sample whose `results` is 1
        also returns its noise. For a gradient, `matrix` is an example of the matrices that the plan reads.
        `functions` are those of ``PlanFunction`` in C++, without the last two. If that for calls that raise or are
        uncommon, ``kRunInPython``, is None, such calls return None.
        """
        if self.builtins is None:
            return None
        run, fail = self._runner(launch)
        functions = *functions, fail, thread_limit
        plan: Callable[..., Any] = self.builtins.plan(pack(launch), run, mask, has_list, checks, matrix, functions)
        return plan

    def c_function(self, launch: Launch) -> int:
        """See `Backend`. The lengths of `launch` may be unknown."""
        row_stride = SIZES[type_name(launch)]
        for rows in (1, 2):  # Samples have two kernels: see `runs_down`.
            run, _ = self._runner(launch._replace(rows=rows, row_stride=row_stride))
        return ctypes.cast(run, ctypes.c_void_p).value or 0

    def advancer(self, device: int) -> Callable[[int, int], None]:
        self.prepare("cuda")

        def advance(address: int, stream: int) -> None:
            error = self._cuda.multisample_advance_cuda(address, device, stream)
            if error:
                self._raise_cuda_error(error)

        return advance

    def _raise_cuda_error(self, error: int) -> NoReturn:
        message = f"backend: 'torch_ext' could not launch: {self._cuda.multisample_cuda_error(error).decode()}"
        raise MemoryError(message) if error == _OUT_OF_MEMORY else RuntimeError(message)


def _reads_computing_type(launch: Launch) -> bool:
    """Whether the kernel reads inputs of the computing type alone."""
    return launch.device == HOST and launch.operation in (Operation.moments, Operation.perturb)


def _raise_no_memory(error: int) -> NoReturn:
    raise MemoryError("backend: no memory for the sums")


def _compile_first_kernel() -> None:
    """Compile the kernel that most programs need first."""
    from ..kernels.cpu import calls

    calls.function_address(Launch())


def _thread_count() -> int:
    """The most threads of a launch by the cpu backend: as many as PyTorch's, up to the limit of `limit_threads`."""
    import torch

    threads: int = torch.get_num_threads()
    return min(thread_limit() or threads, threads)


def _described(kind: DeviceKind) -> str:
    name = "CUDA" if kind == "cuda" else kind
    return f"{name} (prebuilt)" if library_cache.is_prebuilt(kind) else name


def _load(path: Path) -> Any:
    import torch

    try:
        torch.ops.load_library(str(path))
        return ctypes.CDLL(str(path))
    except OSError as error:
        remedy = "remove that file, and another library is used"
        if not path.is_relative_to(prebuilt.root()):
            remedy = "remove that file, or set MULTISAMPLE_CACHE_DIR to a folder whose files can be loaded"
        raise BackendUnavailableError(f"backend: 'torch_ext' cannot load {path}: {error}; {remedy}") from error


def _refuse_negative_strides(strides: tuple[int, ...] | None) -> None:
    # PyTorch 2.13 ends the process on negative strides.
    if strides and min(strides) < 0:
        raise BufferError("PyTorch has no negative strides")


BACKEND: Backend = TorchExtBackend()
