"""Checks that the compilers under numba-cuda, and the driver, work together.

Numba gives LLVM IR to libNVVM, which compiles it to PTX. nvJitLink compiles PTX to machine code, which the driver
loads. The two libraries and numba-cuda are separate packages, so pip can install versions that do not match.
"""

import functools

from multisample.backends.errors import BackendUnavailableError

INSTALL = "pip install 'numba-cuda[cu13]>=0.30.4,<0.31', or with cu12 where the driver is older than CUDA 13"
"""The command that installs matching versions."""

_EMPTY_KERNEL = """
target triple = "nvptx64-nvidia-cuda"
target datalayout = "{layout}"
define void @kernel() {{
  ret void
}}
!nvvm.annotations = !{{!0}}
!0 = !{{void ()* @kernel, !"kernel", i32 1}}
!nvvmir.version = !{{!1}}
!1 = !{{i32 {versions[0]}, i32 {versions[1]}, i32 {versions[2]}, i32 {versions[3]}}}
"""


@functools.cache
def clashes() -> tuple[str, ...]:
    """The mismatches, each with the package to change, found by compiling an empty kernel."""
    from cuda.bindings import driver, nvjitlink
    from cuda.core import Linker, LinkerOptions, ObjectCode
    from numba.cuda.cudadrv import nvvm

    try:
        library = nvvm.NVVM()
        source = _EMPTY_KERNEL.format(layout=library.data_layout, versions=library.get_ir_version())
        ptx = nvvm.compile_ir([source], arch="compute_75", opt=3)
    except Exception as error:
        return (f"libNVVM cannot compile ({_brief(error)}): {INSTALL}",)
    major, minor = 0, 0
    try:
        major, minor = nvjitlink.version()
        Linker(ObjectCode.from_ptx(ptx), options=LinkerOptions(arch="sm_75")).link("cubin")
    except Exception as error:
        if not major:
            return (f"nvJitLink cannot be loaded ({_brief(error)}): {INSTALL}",)
        older = "nvidia-cuda-nvcc-cu12" if major == 12 else "nvidia-nvvm"
        return (
            f"nvJitLink {major}.{minor} cannot link the PTX of libNVVM ({_brief(error)}):"
            f" pip install '{older}=={major}.{minor}.*'",
        )
    try:
        _, version = driver.cuDriverGetVersion()
    except Exception:  # A missing driver is reported elsewhere.
        return ()
    if major > version // 1000:
        older = "pip install 'numba-cuda[cu12]>=0.30.4,<0.31', or " if version >= 12000 else ""
        return (
            f"the driver supports CUDA {version // 1000}.{version % 1000 // 10}, but the compilers are of CUDA"
            f" {major}.{minor}: {older}install a newer driver",
        )
    return ()


def nvrtc_version() -> str:
    """The version of NVRTC. BackendUnavailableError, with the command that installs NVRTC, if it cannot be loaded."""
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # A broken installation may raise anything.
        raise BackendUnavailableError(
            f"backend: 'numba' needs NVRTC, and NVRTC cannot be loaded ({_brief(error)}): {INSTALL}"
        ) from error
    return f"{major}.{minor}"


def _brief(error: BaseException) -> str:
    """The most informative line of a message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if "fatal" in line), lines[0])
