"""CUDA C++ kernels that NVRTC compiles on first use: their programs, their names and their machine code.

The cupy backend compiles the programs through CuPy. `machine_code` compiles them through cuda-bindings, which
numba-cuda requires.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

from .element_types import MATRIX_TYPES
from .errors import BackendUnavailableError
from .kernels.cuda.geometry import StoreKind
from .kernels.cuda.keys import KernelKey, Key, PerturbKey, choices_of
from .kernels.cuda.perturb_geometry import KeyOrigin
from .kernels.cuda.toolchain import nvrtc_version
from .native import csrc_files
from .system import cache

_STANDARD, _DEVICE_CODE = "--std=c++17", "--device-as-default-execution-space"

OPTIONS = (_STANDARD, f"-I{csrc_files.folder()}")
"""The compiler options that CuPy gets. CuPy adds the rest of `ALL_OPTIONS`."""

ALL_OPTIONS = (*OPTIONS, _DEVICE_CODE)
"""All compiler options. Without `_DEVICE_CODE`, NVRTC 13.0 refuses generic lambdas."""


def source(kind: str = "sample") -> str:
    """The program with the kernels of an operation.

    A comment has the digest of the headers: caches compare programs, and not the headers that programs include.
    """
    header = "kernel" if kind == "sample" else f"{kind}_kernel"
    return f'// {csrc_files.digest()}\n#include "cuda/{header}.cuh"\n'


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


class MachineCode(NamedTuple):
    """A compiled kernel."""

    symbol: str
    """The name of the kernel in `cubin`."""
    cubin: bytes


def machine_code(key: Key | None, architecture: str) -> MachineCode:
    """The kernel `key` for an architecture such as "sm_90", compiled or loaded from the cache. See `kernel_name`.

    Raises BackendUnavailableError if NVRTC or the C++ sources are missing, or if the sources have changed since the
    import; RuntimeError if NVRTC refuses the program.
    """
    for reason in csrc_files.missing():
        raise BackendUnavailableError(f"backend: 'numba' could not compile its kernel: {reason}")
    code, name = source(key.kind if key else "advance"), kernel_name(key)
    parts = code, name, architecture, nvrtc_version(), _STANDARD, _DEVICE_CODE
    kind = f"{key.kind}_{key.dtype}" if key else "advance"
    file = f"{kind}_{architecture}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:20]}"
    files = cache.KernelFiles("nvrtc", "numba", csrc_files.digest())
    compiled: MachineCode | None = files.load(file, _unpacked)
    if compiled is None:
        cache.say_compiling("numba")
        compiled = _compiled(code, name, architecture)
        csrc_files.digest()  # Raises if the headers have changed during the compilation.
        files.save(file, lambda: compiled.symbol.encode() + b"\0" + compiled.cubin)
    return compiled


def _unpacked(payload: bytes) -> MachineCode:
    symbol, _, cubin = payload.partition(b"\0")
    return MachineCode(symbol.decode(), cubin)


def _compiled(code: str, name: str, architecture: str) -> MachineCode:
    from cuda.bindings import nvrtc

    def call(function: Any, *arguments: Any) -> Any:
        error, *results = function(*arguments)
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"NVRTC for {architecture}: {error.name}\n{log()}")
        return results[0] if results else None

    def log() -> str:
        text = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
        nvrtc.nvrtcGetProgramLog(program, text)
        return text.decode(errors="replace").strip("\0\n ")

    _, program = nvrtc.nvrtcCreateProgram(code.encode(), b"kernel.cu", 0, [], [])
    try:
        call(nvrtc.nvrtcAddNameExpression, program, name.encode())
        options = [option.encode() for option in (*ALL_OPTIONS, f"--gpu-architecture={architecture}")]
        call(nvrtc.nvrtcCompileProgram, program, len(options), options)
        symbol = call(nvrtc.nvrtcGetLoweredName, program, name.encode()).decode()
        cubin = bytearray(call(nvrtc.nvrtcGetCUBINSize, program))
        call(nvrtc.nvrtcGetCUBIN, program, cubin)
        return MachineCode(symbol, bytes(cubin))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
