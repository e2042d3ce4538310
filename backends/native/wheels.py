"""Compiles the libraries of a wheel for every GPU that it supports, and finds their platform tag.

The build hook imports this module from the sources of the wheel.
"""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path

from multisample.backends.errors import BackendUnavailableError

from . import build, csrc_files, library_cache, prebuilt, toolchain
from .compiler_flags import LIBRARIES, Library
from .targets import WHEEL_ARCHITECTURES
from .units import LibraryKind

# For each version of glibc, the symbol versions of GCC's libraries that every system with it has.
_SYSTEMS: tuple[tuple[tuple[int, int], dict[str, tuple[int, ...]]], ...] = (
    ((2, 17), {"GLIBCXX": (3, 4, 19), "CXXABI": (1, 3, 7), "GCC": (4, 7, 0)}),
    ((2, 24), {"GLIBCXX": (3, 4, 22), "CXXABI": (1, 3, 10), "GCC": (4, 7, 0)}),
    ((2, 31), {"GLIBCXX": (3, 4, 28), "CXXABI": (1, 3, 12), "GCC": (7, 0, 0)}),
    ((2, 34), {"GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (7, 0, 0)}),
    ((2, 35), {"GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13), "GCC": (12, 0, 0)}),
    ((2, 39), {"GLIBCXX": (3, 4, 33), "CXXABI": (1, 3, 15), "GCC": (14, 0, 0)}),
)
_SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so\.\d+|ld-linux-\S+")
# PyTorch's libraries, which are loaded first and bring the CUDA runtime.
_TORCH = re.compile(r"lib(c10|torch)(_\w+)?\.so|libcudart\.so\.\d+")


def build_all(kinds: Collection[LibraryKind], root: Path) -> list[Path]:
    """Compile libraries into a folder of `root`, named as `prebuilt` expects, and return their paths.

    The wheel has the folder `root` as its `prebuilt.root()`. Raises BackendUnavailableError if a tool is missing or a
    library cannot be compiled, and ValueError if TORCH_CUDA_ARCH_LIST has anything other than numbers.
    """
    os.environ["TORCH_CUDA_ARCH_LIST"] = os.environ.get("TORCH_CUDA_ARCH_LIST") or WHEEL_ARCHITECTURES
    reasons = list(toolchain.missing_tools())
    if "cuda" in kinds:
        reasons.extend(library_cache.cuda_reasons(ahead_of_time=True) or toolchain.missing_nvcc())
    if reasons:
        raise BackendUnavailableError("; ".join(reasons))
    places = [root / prebuilt.folder().name / _file(kind) for kind in kinds]
    with tempfile.TemporaryDirectory(prefix="multisample-") as temporary:
        works = {Path(temporary, kind): _portable(LIBRARIES[kind]) for kind in kinds}
        failures = build.compile_libraries(works)
        for place, (folder, library), failure in zip(places, works.items(), failures, strict=True):
            if failure:
                raise BackendUnavailableError(f"{place.name} could not be built:\n{failure}")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(folder / f"{library.module}.so", place)
    return places


def _portable(library: Library) -> Library:
    """`library` with all units, with the flags for other machines, and for any version of PyTorch on them."""
    import torch

    # Binaries for other machines must not contain paths of this machine.
    folders = (csrc_files.folder().parent, Path(torch.__file__).parents[1])
    more = [f"-ffile-prefix-map={folder}/=" for folder in folders]
    # Link only PyTorch's libraries with the stable ABI. Some of them also export unversioned symbols of the C++
    # library, so the C++ library comes first.
    link = ("-Wl,--as-needed", "-Wl,--no-undefined", "-lstdc++") if sys.platform == "linux" else ()
    return dataclasses.replace(
        library.with_all_units(), flags=(*library.flags, *more), link_flags=link, is_portable=True
    )


def _file(kind: LibraryKind) -> str:
    if kind == "cpu":
        return prebuilt.CPU_FILE
    import torch

    names = os.environ["TORCH_CUDA_ARCH_LIST"]
    architectures = names.replace(" ", ";").split(";")
    if not all(re.fullmatch(r"\d+\.\d(\+PTX)?", name) for name in architectures):
        raise ValueError(f"TORCH_CUDA_ARCH_LIST: expected numbers, as in {WHEEL_ARCHITECTURES!r}, got {names!r}")
    return prebuilt.cuda_file(str(torch.version.cuda), architectures)


# --- The platform tag -----------------------------------------------------------------------------


def platform_tag(libraries: Iterable[Path]) -> str:
    """The platform tag of a wheel with these shared libraries, which were built on this system.

    The tag ``manylinux_2_31_x86_64`` (PEP 600) promises that the wheel runs on glibc 2.31 or newer: every symbol that
    its libraries import is that old. Libraries that may run on this machine only get ``linux_x86_64``.
    """
    here = re.sub(r"[-.]", "_", sysconfig.get_platform())
    if not here.startswith("linux_"):
        return here
    versions: set[str] = set()
    for library in libraries:
        for name, wanted in needs(library).items():
            if _SYSTEM.fullmatch(name):
                versions |= wanted
            elif not _TORCH.fullmatch(name):
                return here
    glibc = _least_glibc(versions)
    return f"manylinux_{glibc[0]}_{glibc[1]}_{here.removeprefix('linux_')}" if glibc else here


def needs(library: Path) -> dict[str, set[str]]:
    """The symbol versions that a shared library needs, by library, as in ``{"libc.so.6": {"GLIBC_2.17"}}``.

    ValueError if the objdump of the C++ compiler cannot read the file.
    """
    compiler = [os.environ.get("CXX", "c++"), "-print-prog-name=objdump"]
    try:
        objdump = subprocess.run(compiler, check=True, capture_output=True, text=True).stdout.strip()
        text = subprocess.run([objdump, "-p", str(library)], check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"library: expected a shared library that objdump can read, got {library}: {error}") from error
    found: dict[str, set[str]] = {name: set() for name in re.findall(r"^ +NEEDED +(\S+)$", text, re.M)}
    for name, versions in re.findall(r"^ +required from (\S+):\n((?: +0x.*\n)*)", text, re.M):
        found.setdefault(name, set()).update(re.findall(r"(\S+)$", versions, re.M))
    return found


def _least_glibc(versions: Iterable[str]) -> tuple[int, ...] | None:
    """The oldest glibc whose systems have all symbol versions in `versions`; None if no listed system has them."""
    wanted: dict[str, tuple[int, ...]] = {"GLIBC": (2, 17)}
    for version in versions:
        name, _, number = version.partition("_")
        if not re.fullmatch(r"\d+(\.\d+)*", number):
            return None
        wanted[name] = max(wanted.get(name, ()), tuple(map(int, number.split("."))))
    glibc = wanted.pop("GLIBC")[:2]
    for system, has in _SYSTEMS:
        if all(number <= has.get(name, ()) for name, number in wanted.items()):
            return max(system, glibc)
    return None
