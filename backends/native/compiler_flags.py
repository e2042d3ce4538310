"""The libraries of torch_ext, and the flags of the compiler and the linker for each."""

from __future__ import annotations

import dataclasses
import platform
from typing import Literal, TypeAlias

LibraryKind: TypeAlias = Literal["cpu", "cuda"]


@dataclasses.dataclass(frozen=True)
class Library:
    """A shared object, and the options to compile it."""

    name: str
    source: str
    device: str
    """The device that it runs on, in words."""
    seconds: int
    """Usual time of a build."""
    flags: tuple[str, ...]
    native_flags: tuple[str, ...] = ()
    """Further flags for a library that only this machine will use."""
    link_flags: tuple[str, ...] = ()
    needs: tuple[LibraryKind, ...] = ()
    """Libraries to load before it."""
    is_portable: bool = False
    """Whether it is built for other machines. This machine may be unable to load it."""

    @property
    def module(self) -> str:
        """The name of the file, without its suffix."""
        return f"multisample_{self.name}"


# The stable ABI of PyTorch 2.10, which later versions keep.
_COMMON_FLAGS = ("-std=c++17", "-O3", "-DTORCH_TARGET_VERSION=0x020a000000000000")
LIBRARIES: dict[LibraryKind, Library] = {
    "cpu": Library(
        "torch_cpu",
        "torch/cpu.cpp",
        "the CPU",
        10,
        # Contraction would round once where the stream rounds twice. -fno-math-errno and -fno-trapping-math change no
        # result: nothing here reads errno or the floating-point exceptions. Software computes fused multiply-adds only
        # for processors without the instruction.
        (
            *_COMMON_FLAGS,
            "-ffp-contract=off",
            "-fno-math-errno",
            "-fno-trapping-math",
            "-fvisibility=hidden",
            "-DMULTISAMPLE_SOFTWARE_FMA",
        ),
        # On Intel's processors compilers prefer vectors of 256 bits: a few wide ones may lower the clock of other code.
        native_flags=("-march=native", *(("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ())),
    ),
    "cuda": Library(
        "torch_cuda",
        "torch/cuda.cu",
        "CUDA",
        60,
        (*_COMMON_FLAGS, "-DUSE_CUDA", "-Xcompiler=-fvisibility=hidden"),
        needs=("cpu",),
    ),
}
