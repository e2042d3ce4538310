"""The compilers and toolkits of this machine, and the processor and GPUs that they compile for.

Every function is cheap and never raises: `status` of a backend calls them to list what is missing.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
import warnings
from pathlib import Path


def missing_tools() -> tuple[str, ...]:
    """Everything that a build lacks, each with the command that installs it."""
    reasons = []
    if not is_installed("torch"):
        reasons.append("PyTorch is not installed: pip install torch")
    if not is_installed("setuptools"):  # torch.utils.cpp_extension imports it, and not every PyTorch requires it.
        reasons.append("setuptools is not installed: pip install setuptools")
    if shutil.which("ninja", path=search_path()) is None:
        reasons.append("ninja is not installed: pip install ninja")
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler, path=search_path()) is None:
        reasons.append(f"no C++ compiler ({compiler!r} not found): install g++, or set CXX to a compiler")
    if not is_installed("fcntl"):
        reasons.append("this system has no fcntl, without which builds cannot be locked: use Linux or macOS")
    return tuple(reasons)


def missing_nvcc() -> tuple[str, ...]:
    """Why nothing can be compiled for CUDA; empty if nvcc is found."""
    return ("nvcc not found: install the CUDA toolkit or set CUDA_HOME",) if cuda_home() is None else ()


def is_installed(module: str) -> bool:
    """Whether `module` can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def search_path() -> str:
    """PATH, then the folders where pip puts ninja, which are not on PATH while a virtual environment is inactive."""
    scripts = [sysconfig.get_path("scripts", sysconfig.get_preferred_scheme(key)) for key in ("prefix", "user")]
    return os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent), *scripts])


def cuda_home() -> Path | None:
    """The CUDA toolkit: CUDA_HOME or CUDA_PATH, or the one of nvcc on PATH, or /usr/local/cuda."""
    if named := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        homes = [Path(named)]
    else:
        nvcc = shutil.which("nvcc", path=search_path())
        # nvcc on PATH may be a link to the compiler, or a script without a toolkit beside it.
        homes = [Path(nvcc).resolve().parents[1]] if nvcc else []
        homes.append(Path("/usr/local/cuda"))
    homes = [home for home in homes if (home / "bin" / "nvcc").is_file()]
    whole = [home for home in homes if (home / "include" / "cuda_runtime.h").is_file()]
    return next(iter(whole + homes), None)


def named_architectures() -> str:
    """The architectures of TORCH_CUDA_ARCH_LIST; empty if it names none."""
    names = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    return "" if names == "native" else names


def cuda_architectures() -> str:
    """Architectures to compile for, in the form of TORCH_CUDA_ARCH_LIST; empty without a device."""
    import torch

    if names := named_architectures():
        return names
    found = {torch.cuda.get_device_capability(device) for device in range(device_count())}
    # A device may be newer than PyTorch and its CUDA: the driver compiles their newest PTX for it.
    known = [int("".join(filter(str.isdigit, name))) for name in torch.cuda.get_arch_list() if name.startswith("sm_")]
    newest = divmod(max(known), 10) if known else (99, 0)
    names = ";".join(f"{major}.{minor}" for major, minor in sorted({min(capability, newest) for capability in found}))
    return f"{names}+PTX" if names else ""


def device_count() -> int:
    """How many CUDA devices PyTorch sees."""
    import torch

    if torch.version.cuda is None:
        return 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns of a driver that is too old, and reports no device.
            return int(torch.cuda.device_count())
    except Exception:  # A broken driver may raise anything.
        return 0


def processor() -> str:
    """The instruction sets of -march=native."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    # "flags" on x86, "Features" on Arm; the cores of one machine may differ.
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features"))})) or platform.processor()


def processor_features() -> set[str]:
    """The instruction sets that all cores have."""
    cores = [set(line.split()) for line in processor().splitlines()]
    return set.intersection(*cores) if cores else set()


def libc() -> str:
    """Name and version of the C library; empty on systems that do not report them."""
    # platform.libc_ver would read the whole interpreter.
    name = "CS_GNU_LIBC_VERSION"
    return os.confstr(name) or "" if name in getattr(os, "confstr_names", ()) else ""
