"""The platform tag of a wheel, from the system libraries that its own libraries need.

The tag ``manylinux_2_31_x86_64`` (PEP 600) promises that the wheel runs on glibc 2.31 or newer. The wheel gets it only
if every symbol that its libraries import is that old.
"""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from collections.abc import Iterable
from pathlib import Path

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


def platform_tag(libraries: Iterable[Path]) -> str:
    """The platform tag of a wheel with these shared libraries, which were built on this system.

    For example ``"manylinux_2_31_x86_64"``, or ``"linux_x86_64"`` for libraries that may run on this machine only.
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
