"""The numba backend: kernels that are compiled on first use and cached on disk.

It needs numba-cuda and a driver, but neither PyTorch nor CuPy. numba-cuda compiles the plain kernels from Python. They
draw samples of usual size, and large transposed matrices with aligned pieces. Words and normals are the same functions
as in the cpu backend. NVRTC, which numba-cuda installs, compiles all other kernels from CUDA C++.
"""

import functools
import importlib.metadata
import importlib.util
from typing import Any

import numpy as np

from .contract import Backend, BackendStatus, DeviceKind
from .driver import DriverBackend
from .errors import BackendUnavailableError
from .kernels.cuda.keys import KernelKey, Key, usual_key
from .kernels.cuda.toolchain import INSTALL, clashes, nvrtc_version
from .memory.dlpack import LEGACY_STREAM, Imported, device_of_array
from .native import csrc_files
from .nvrtc import STANDARD, machine_code
from .system.cuda_driver import MachineCode, on_device

__all__ = ["BACKEND"]


class NumbaBackend(DriverBackend):
    name = "numba"
    host_library = "numba"
    remedy = f"to install versions that work together: {INSTALL}"

    def status(self) -> BackendStatus:
        if importlib.util.find_spec("numba_cuda") is None:
            return BackendStatus(False, (f"package numba-cuda is not installed: {INSTALL}",))
        installed = importlib.metadata.version("numba-cuda")
        version = f"numba-cuda {installed}"
        try:
            # The compiler imports the second module, which cannot be imported if NumPy is too new.
            from numba import cuda
            from numba.cuda.np import arrayobj  # noqa: F401
        except Exception as error:  # A broken installation may raise anything.
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
            version += f", NVRTC {nvrtc_version()}"
        except BackendUnavailableError:  # numba-cuda asks NVRTC for the supported architectures.
            reasons.append(f"NVRTC cannot be loaded: {INSTALL}")
        try:
            devices = list(cuda.gpus)
            device = devices[0].name
            device += f" and {len(devices) - 1} more" if len(devices) > 1 else ""
        except Exception as error:
            message = " ".join(str(error).split()) or "none found"
            reasons.append(f"no CUDA device ({message}): see nvidia-smi and CUDA_VISIBLE_DEVICES")
        try:
            reasons.extend(clashes())
        except Exception as error:
            reasons.append(f"numba-cuda's compilers cannot be tested ({error}): {INSTALL}")
        return BackendStatus(not reasons, tuple(reasons), version, device)

    def prepare(self, device_kind: DeviceKind) -> None:
        # Compile the usual kernel, to test the compiler. Other kernels are compiled on first use.
        from numba import cuda

        self.kernel(usual_key(cuda.current_context().device.id))

    def adopt(self, array: Any) -> Any:
        from numba import cuda

        if isinstance(array, np.ndarray):
            self.prepare("cuda")
            return cuda.to_device(array)
        # Numba assumes that memory is on the current device.
        with on_device(device_of_array(array)):
            if not hasattr(array, "__dlpack__"):
                return cuda.as_cuda_array(array, sync=False)
            # The array is ready on the default stream, which Numba uses unless the caller names another.
            shared = Imported(array, LEGACY_STREAM)
            return cuda.as_cuda_array(shared, sync=False).view(shared.dtype)

    def compile(self, key: Key) -> MachineCode:
        from numba import cuda

        capability, version = cuda.get_current_device().compute_capability, nvrtc_version()
        if isinstance(key, KernelKey) and is_in_python(key):
            from .kernels.cuda.compilation import compile_kernel

            return compile_kernel(key, capability, version)
        architecture = "sm_{}{}".format(*capability)
        return machine_code(key, self.name, architecture, version, functools.partial(_compiled, architecture))


def is_in_python(key: KernelKey) -> bool:
    """Whether Numba compiles the kernel from Python. NVRTC compiles all others from CUDA C++."""
    return key.turns > 0


def _compiled(architecture: str, code: str, name: str) -> MachineCode:
    """The kernel called `name` in a program."""
    from cuda.core import Program, ProgramOptions

    # CuPy sets the last option too. Without it, NVRTC 13.0 refuses generic lambdas.
    options = ProgramOptions(
        arch=architecture, std=STANDARD, include_path=str(csrc_files.folder()), device_as_default_execution_space=True
    )
    try:
        compiled = Program(code, "c++", options).compile("cubin", name_expressions=(name,))
    except Exception as error:  # It does not name the architecture.
        raise RuntimeError(f"NVRTC for {architecture}: {error}") from error
    return MachineCode(compiled.symbol_mapping[name].decode(), compiled.code)


BACKEND: Backend = NumbaBackend()
