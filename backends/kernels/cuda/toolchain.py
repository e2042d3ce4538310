"""Whether the compilers that numba-cuda stands on understand each other, and the driver them.

Numba hands LLVM code to libNVVM, which makes PTX of it; nvJitLink makes machine code of that; the driver loads it. All
three come in packages of their own, so that any two can be installed together.
"""

from __future__ import annotations

import functools

__all__ = ["INSTALL", "clashes"]

INSTALL = "pip install 'numba-cuda[cu13]>=0.30.4,<0.31', or with cu12 where the driver is older than CUDA 13"
"""The command that installs all three as one."""

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
    """What stands in the way, each with the package to change; found out by compiling an empty kernel."""
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
            f"nvJitLink {major}.{minor} cannot link what libNVVM makes ({_brief(error)}):"
            f" pip install '{older}=={major}.{minor}.*'",
        )
    try:
        _, version = driver.cuDriverGetVersion()
    except Exception:  # Without a driver there is another reason.
        return ()
    if major > version // 1000:
        older = "pip install 'numba-cuda[cu12]>=0.30.4,<0.31', or " if version >= 12000 else ""
        return (
            f"the driver understands CUDA {version // 1000}.{version % 1000 // 10}, the compilers are those of CUDA"
            f" {major}.{minor}: {older}install a newer driver",
        )
    return ()


def _brief(error: BaseException) -> str:
    """The line of a message that says most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if "fatal" in line), lines[0])
