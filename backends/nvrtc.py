"""CUDA C++ kernels that NVRTC compiles on first use: their programs, their names and their machine code.

The cupy backend calls NVRTC through CuPy, and numba through cuda-bindings, which numba-cuda requires.
"""

from __future__ import annotations

from collections.abc import Callable

from .element_types import MATRIX_TYPES
from .errors import BackendUnavailableError
from .kernels.cuda.geometry import StoreKind
from .kernels.cuda.keys import KernelKey, Key, PerturbKey, choices_of
from .kernels.cuda.perturb_geometry import KeyOrigin
from .native import csrc_files
from .system.cache import KernelFiles
from .system.cuda_driver import MachineCode

_STANDARD, _DEVICE_CODE = "--std=c++17", "--device-as-default-execution-space"

OPTIONS = (_STANDARD, f"-I{csrc_files.folder()}")
"""The compiler options that CuPy gets. CuPy adds the rest of `ALL_OPTIONS`."""

ALL_OPTIONS = (*OPTIONS, _DEVICE_CODE)
"""All compiler options. Without `_DEVICE_CODE`, NVRTC 13.0 refuses generic lambdas."""


def source(kind: str = "sample") -> str:
    """The program with the kernels of an operation."""
    header = "kernel" if kind == "sample" else f"{kind}_kernel"
    return f'#include "cuda/{header}.cuh"\n'


def kernel_name(key: Key | None) -> str:
    """The C++ name of a kernel. The key None stands for the kernel that adds 1 to an offset."""
    if key is None:
        return "multisample::advance_kernel"
    choices = choices_of(key)
    finishing = choices.pop("finishing", False)
    if finishing:
        choices = {"dtype": choices["dtype"]}
    if isinstance(key, KernelKey):
        choices["store_kind"] = f"multisample::{StoreKind(key.store_kind).name}"
    if isinstance(key, PerturbKey):
        choices["strided"] = f"multisample::{'StridedSpan' if key.strided else 'Run'}"
        choices["origin"] = f"multisample::{KeyOrigin(key.origin).name}"
    choices["dtype"] = MATRIX_TYPES[key.dtype].cpp
    texts = (str(x).lower() if isinstance(x, bool) else str(x) for x in choices.values())
    return f"multisample::{'finish_' * finishing}{key.kind}_kernel<{', '.join(texts)}>"


def machine_code(
    key: Key | None, backend: str, architecture: str, version: str, compile_program: Callable[[str, str], MachineCode]
) -> MachineCode:
    """The kernel `key`, from the cache or by ``compile_program(program, kernel_name)``. See `kernel_name`.

    The kernel is for an architecture such as "sm_90", and `version` is that of NVRTC. Raises BackendUnavailableError if
    the C++ sources are missing, or have changed since the import.
    """
    for reason in csrc_files.missing():
        raise BackendUnavailableError(f"backend: {backend!r} could not compile its kernel: {reason}")
    program, name = source(key.kind if key else "advance"), kernel_name(key)

    def compiled() -> MachineCode:
        code = compile_program(program, name)
        csrc_files.digest()  # Raises if the headers have changed during the compilation.
        return code

    kind = f"{key.kind}_{key.dtype}" if key else "advance"
    dependencies = program, name, architecture, version, _STANDARD, _DEVICE_CODE
    files = KernelFiles("nvrtc", backend, csrc_files.digest())
    return files.compiled(f"{kind}_{architecture}", dependencies, compiled)
