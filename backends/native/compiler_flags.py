"""The libraries of torch_ext, and the flags of the compiler and the linker for each."""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, TypeAlias

from . import csrc_files

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


def portable(library: Library, flags: Iterable[str]) -> Library:
    """`library` with the flags for other machines, and with `flags`."""
    import torch

    # Binaries for other machines must not contain paths of this machine.
    folders = (csrc_files.folder().parent, Path(torch.__file__).parents[1])
    more = [f"-ffile-prefix-map={folder}/=" for folder in folders]
    if library.source.endswith(".cu"):
        # Compressed machine code takes a quarter of the space.
        threads = os.environ.get("MAX_JOBS") or os.cpu_count() or 1
        more = [*(f"-Xcompiler={flag}" for flag in more), "-Xfatbin=-compress-all", f"--threads={threads}"]
    # Link only PyTorch's libraries with the stable ABI. Some of them also export unversioned symbols of the C++
    # library, so the C++ library comes first.
    link = ("-Wl,--as-needed", "-Wl,--no-undefined", "-lstdc++") if sys.platform == "linux" else ()
    return dataclasses.replace(
        library, flags=(*library.flags, *more, *flags), native_flags=(), link_flags=link, is_portable=True
    )
