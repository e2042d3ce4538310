"""The cupy backend: the CUDA C++ kernel, compiled by NVRTC on first use.

CuPy, NVRTC and a driver are enough: nothing is built in advance, and no CUDA toolkit is needed. Each combination of
element type, noise, transform and stores is a kernel of its own, cached on disk.
"""

import importlib.util
from typing import Any

import numpy as np

from .contract import Backend, BackendStatus, DeviceKind
from .driver import DriverBackend
from .kernels.cuda.keys import Key, usual_key
from .memory.dlpack import LEGACY_STREAM, Imported, device_of_array
from .native import csrc_files
from .nvrtc import STANDARD, machine_code
from .system.cuda_driver import MachineCode

__all__ = ["BACKEND"]


class CupyBackend(DriverBackend):
    name = "cupy"
    host_library = "cupy"
    remedy = "to try another NVRTC: pip install --upgrade 'cupy-cuda12x[ctk]', or the same for 13x"

    def status(self) -> BackendStatus:
        if importlib.util.find_spec("cupy") is None:
            return BackendStatus(
                False, ("package cupy is not installed: pip install cupy-cuda12x, or cupy-cuda13x for CUDA 13",)
            )
        try:
            import cupy

            version = f"cupy {cupy.__version__}"
        except Exception as error:  # A broken installation may raise anything.
            return BackendStatus(False, (f"package cupy cannot be imported ({error}): reinstall it",))
        reasons, device = list(csrc_files.missing()), ""
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
        # Compile the usual kernel, to test NVRTC. Other kernels are compiled on first use.
        import cupy

        self.kernel(usual_key(cupy.cuda.runtime.getDevice()))

    def adopt(self, array: Any) -> Any:
        import cupy

        if isinstance(array, np.ndarray):
            self.prepare("cuda")
            return cupy.asarray(array)
        # CuPy would copy an array of another device to the current one.
        with cupy.cuda.Device(device_of_array(array)):
            if not hasattr(array, "__dlpack__"):
                return cupy.asarray(array)
            # CuPy's own from_dlpack supports bfloat16 in its latest versions only.
            shared = Imported(array, cupy.cuda.get_current_stream().ptr or LEGACY_STREAM)
            return cupy.asarray(shared).view(shared.dtype)

    def compile(self, key: Key) -> MachineCode:
        import cupy

        architecture = f"sm_{cupy.cuda.Device().compute_capability}"
        version = "{}.{}".format(*cupy.cuda.nvrtc.getVersion())
        return machine_code(key, self.name, architecture, version, _compiled)


def _compiled(code: str, name: str) -> MachineCode:
    """The kernel called `name` in a program, for the current device."""
    from cupy.cuda.compiler import compile_using_nvrtc

    options = f"--std={STANDARD}", f"-I{csrc_files.folder()}"
    # In memory: CuPy writes no file.
    image, symbols = compile_using_nvrtc(code, options, name_expressions=(name,), cache_in_memory=True)
    return MachineCode(symbols[name], image)


BACKEND: Backend = CupyBackend()
