"""Compiled libraries that came with the installation, for machines without a compiler.

`wheels` builds them for unknown machines, so the names contain everything that a library depends on. The folder's name
has the system and the digest of the sources. The file's name has the processor, or the version of CUDA and the
architectures. A library that does not fit is ignored; the reason is reported only if no library can be built.
"""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from . import csrc_files

_CPU, _CUDA = "multisample_torch_cpu", "multisample_torch_cuda"

# Values of -march, from the baseline up, by `platform.machine()`.
_TARGETS = {"x86_64": ("x86-64", "x86-64-v3", "x86-64-v4"), "aarch64": ("armv8-a",), "arm64": ("armv8-a",)}
# Processor features that each target adds to the previous one, named as in /proc/cpuinfo.
_FEATURES = {
    "x86-64-v3": {
        "cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3",
        "abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave",
    },
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}  # fmt: skip


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


def cpu_targets() -> tuple[str, ...]:
    """Values of ``-march`` for this system, from the baseline to the best; empty for an unsupported system."""
    return _TARGETS.get(platform.machine(), ())


def cpu_file(target: str) -> str:
    """The name of the CPU library for the processor `target`."""
    return f"{_CPU}-{target}.so"


def cuda_file(version: str, architectures: Iterable[str]) -> str:
    """The name of the CUDA library for architectures and the major version of CUDA."""
    return f"{_CUDA}{_major(version)}-{'-'.join(architectures)}.so"


def cpu_library(features: Collection[str]) -> Found:
    """The best CPU library for a processor with `features`, named as in Linux."""
    place, best = folder(), None
    needed: set[str] = set()
    for target in cpu_targets():
        needed |= _FEATURES.get(target, set())
        if needed.issubset(features) and (place / cpu_file(target)).is_file():
            best = place / cpu_file(target)
    return Found(best, "" if best else _mismatch(place))


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
        if name != f"{_CUDA}{_major(version)}":
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


def _major(version: str) -> str:
    return version.partition(".")[0]
