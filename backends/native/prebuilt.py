"""Compiled libraries that came with the installation, for machines without a compiler.

`wheels` builds them for unknown machines, so the names contain everything that a library depends on. The folder's name
has the system and the digest of the sources. The name of a file for CUDA has its version and the architectures. A
library that does not fit is ignored; the reason is reported only if no library can be built.
"""

import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from . import csrc_files

_CPU, _CUDA = "multisample_torch_cpu", "multisample_torch_cuda"
CPU_FILE = f"{_CPU}.so"
"""The name of the CPU library."""


class Found(NamedTuple):
    """A fitting library, or why there is none."""

    path: Path | None
    reason: str = ""
    """Empty if no libraries came with the installation."""


def root() -> Path:
    """Directory of all binaries that came with the installation."""
    return Path(__file__).parent / "prebuilt"


def folder() -> Path:
    """Directory of the binaries built from this source digest for this system."""
    return root() / f"{platform.system()}-{platform.machine()}-{csrc_files.digest()[:20]}".lower()


def cuda_file(version: str, architectures: Iterable[str]) -> str:
    """The name of the CUDA library for architectures and the major version of CUDA."""
    return f"{_CUDA}{version.partition('.')[0]}-{'-'.join(architectures)}.so"


def cpu_library() -> Found:
    """The CPU library."""
    path = folder() / CPU_FILE
    return Found(path) if path.is_file() else Found(None, _mismatch(path.parent))


def cuda_library(version: str, capabilities: Iterable[tuple[int, int]]) -> Found:
    """A CUDA library for devices of all these compute capabilities, and for the CUDA `version` of PyTorch.

    The library uses PyTorch's CUDA runtime. Without devices, only the version must match.
    """
    place = folder()
    files = sorted(place.glob(f"{_CUDA}*.so"))
    # Without files, nothing reads the iterator, which may initialize CUDA.
    devices = sorted(set(capabilities)) if files else []
    reasons = []
    for file in files:
        name, *architectures = file.name.removesuffix(".so").split("-")
        foreign = [f"{major}.{minor}" for major, minor in devices if not _runs(architectures, (major, minor))]
        if name != f"{_CUDA}{version.partition('.')[0]}":
            reasons.append(f"{file.name} is not for CUDA {version}, which PyTorch uses: install a wheel for it")
        elif foreign:
            reasons.append(f"{file.name} does not run on devices of compute capability {', '.join(foreign)}")
        else:
            return Found(file)
    return Found(None, "; ".join(reasons) or _mismatch(place))


def _mismatch(place: Path) -> str:
    folders = [] if place.is_dir() else sorted(path.name for path in root().glob("*"))
    if not folders:
        return ""
    return (
        f"the prebuilt libraries are of other sources or for another system ({', '.join(folders)} instead of"
        f" {place.name}): reinstall multisample"
    )


def _runs(architectures: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether the library has machine code for a device, or PTX that its driver can compile."""
    for architecture in architectures:
        number, _, ptx = architecture.partition("+")
        major, minor = map(int, number.split("."))
        if (major == capability[0] and minor <= capability[1]) or (ptx and (major, minor) <= capability):
            return True
    return False
