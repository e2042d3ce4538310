"""CUDA C++ kernels that NVRTC compiles on first use: their programs and their machine code.

The cupy backend calls NVRTC through CuPy, and numba through cuda-core, which numba-cuda requires.
"""

from collections.abc import Callable

from .errors import BackendUnavailableError
from .kernels.cuda.keys import Key
from .native import csrc_files
from .system.cache import KernelFiles
from .system.cuda_driver import MachineCode

STANDARD = "c++17"
"""The version of C++."""


def source(header: str) -> str:
    """The program with the kernels of a header."""
    return f'#include "cuda/{header}.cuh"\n'


def machine_code(
    key: Key, backend: str, architecture: str, version: str, compile_program: Callable[[str, str], MachineCode]
) -> MachineCode:
    """The kernel `key`, from the cache or by ``compile_program(program, kernel_name)``.

    The kernel is for an architecture such as "sm_90", and `version` is that of NVRTC. Raises BackendUnavailableError if
    the C++ sources are missing, or have changed since the import.
    """
    for reason in csrc_files.missing():
        raise BackendUnavailableError(f"backend: {backend!r} could not compile its kernel: {reason}")

    def compile_now() -> MachineCode:
        code = compile_program(source(key.header), key.name)
        csrc_files.digest()  # Raises if the headers have changed during the compilation.
        return code

    dependencies = key.header, key.name, architecture, version, STANDARD
    files = KernelFiles("nvrtc", backend, csrc_files.digest())
    return files.load_or_compile(f"{key.header}_{architecture}", dependencies, compile_now)
