"""The libraries of torch_ext, and the flags of the compiler and the linker for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from .units import LibraryKind, Unit, all_units

_START = 4.5
"""Seconds of one processor to import PyTorch, to link and to load, for each library."""


@dataclasses.dataclass(frozen=True)
class Library:
    """A shared object, and the options to compile it."""

    name: str
    kind: LibraryKind
    sources: tuple[str, ...]
    """Files of csrc, with the operators; empty for a library that has only a unit."""
    units: tuple[Unit, ...]
    flags: tuple[str, ...]
    """Flags of the C++ compiler, also where nvcc runs it."""
    link_flags: tuple[str, ...] = ()
    is_portable: bool = False
    """Whether it is built for other machines. This machine may be unable to load it."""

    @property
    def module(self) -> str:
        """The name of the file, without its suffix."""
        return f"multisample_{self.name}"

    @property
    def nvcc_flags(self) -> list[str]:
        own = [flag if flag.startswith(("-std=", "-O", "-D")) else f"-Xcompiler={flag}" for flag in self.flags]
        # Compressed machine code takes a quarter of the space.
        return [*own, "-Xfatbin=-compress-all"] if self.is_portable else own

    def with_all_units(self) -> Library:
        """The library with the kernels of all calls."""
        return dataclasses.replace(self, units=all_units()) if self.kind == "cuda" else self

    def only(self, unit: Unit) -> Library:
        """A library with one unit, which the loaded library takes over."""
        return dataclasses.replace(self, name=f"{self.name}_{unit.name}", sources=(), units=(unit,))


def estimate(libraries: Collection[Library], processors: int) -> float:
    """Usual seconds to build libraries at the same time."""
    work = [
        seconds
        for library in libraries
        for seconds in (*(_SECONDS[name] for name in library.sources), *(unit.seconds for unit in library.units))
    ]
    return _START + max(max(work), (sum(work) + _START * (len(libraries) - 1)) / processors) if work else 0


# Seconds of one processor.
_SECONDS = {"torch/cpu.cpp": 4.0, "torch/cuda.cpp": 3.0, "torch/shared_kernels.cu": 0.7}
# The stable ABI of PyTorch 2.10, which later versions keep.
_COMMON_FLAGS = ("-std=c++17", "-O3", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-fvisibility=hidden")


# The operators, and on CUDA one unit.
LIBRARIES: dict[LibraryKind, Library] = {
    "cpu": Library("torch_cpu", "cpu", ("torch/cpu.cpp",), (), _COMMON_FLAGS),
    "cuda": Library(
        "torch_cuda",
        "cuda",
        ("torch/cuda.cpp", "torch/shared_kernels.cu"),
        # Most programs need this one first.
        tuple(unit for unit in all_units() if unit.name == "sample_float32"),
        (*_COMMON_FLAGS, "-DUSE_CUDA"),
    ),
}
