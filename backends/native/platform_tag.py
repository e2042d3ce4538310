"""The platform tag of a wheel, from the system libraries that its own libraries need.

The tag ``manylinux_2_31_x86_64`` (PEP 600) promises that the wheel runs on glibc 2.31 or newer. The wheel gets it only
if every symbol that its libraries import is that old.
"""

from __future__ import annotations

import re
import struct
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

# Symbol versions of GCC's libraries that every system with a certain glibc has.
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

_DYNAMIC, _VERSION_NEEDS = 6, 0x6FFFFFFE  # SHT_DYNAMIC, SHT_GNU_verneed
_NEEDED = 1  # DT_NEEDED


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

    Raises
    ------
    ValueError
        If the file is no 64-bit ELF file.
    """
    content = library.read_bytes()
    if content[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"library: expected an ELF file of 64 bits, little-endian, got {library}")
    sections = _sections(content)
    found: dict[str, set[str]] = {}
    for section in sections:
        if section.type == _DYNAMIC:
            names = sections[section.link].offset
            for tag, value in struct.iter_unpack("<qQ", content[section.offset : section.offset + section.size]):
                if tag == _NEEDED:
                    found.setdefault(_text(content, names + value), set())
        elif section.type == _VERSION_NEEDS:
            names = sections[section.link].offset
            for file, version in _versions(content, section.offset):
                found.setdefault(_text(content, names + file), set()).add(_text(content, names + version))
    return found


class _Section(NamedTuple):
    type: int
    offset: int
    size: int
    link: int
    """The number of the section with the names."""


def _sections(content: bytes) -> list[_Section]:
    (offset,) = struct.unpack_from("<Q", content, 40)
    size, count = struct.unpack_from("<HH", content, 58)
    headers = (struct.unpack_from("<IIQQQQII", content, offset + k * size) for k in range(count))
    return [_Section(header[1], header[4], header[5], header[6]) for header in headers]


def _versions(content: bytes, at: int) -> Iterator[tuple[int, int]]:
    """For each symbol version that is needed: the offsets of its library's name and of its own name."""
    while True:
        _, count, file, first, following = struct.unpack_from("<HHIII", content, at)
        version = at + first
        for _ in range(count):
            _, _, _, name, next_version = struct.unpack_from("<IHHII", content, version)
            yield file, name
            version += next_version
        if not following:
            return
        at += following


def _text(content: bytes, at: int) -> str:
    return content[at : content.index(b"\0", at)].decode()


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
