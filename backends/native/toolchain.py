"""The compilers and toolkits of this machine.

Every function is cheap and never raises: `status` of a backend calls them to list what is missing.
"""

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

from . import csrc_files


def missing_tools() -> tuple[str, ...]:
    """Everything that a build lacks, each with the command that installs it."""
    reasons = list(csrc_files.missing())
    if not is_installed("torch"):
        reasons.append("PyTorch is not installed: pip install torch")
    if not is_installed("setuptools"):  # torch.utils.cpp_extension imports it, and not every PyTorch requires it.
        reasons.append("setuptools is not installed: pip install setuptools")
    if shutil.which("ninja", path=search_path()) is None:
        reasons.append("ninja is not installed: pip install ninja")
    if interpreter() is None:
        reasons.append(
            f"no Python interpreter, which runs PyTorch's compilation: sys.executable is {sys.executable!r}, and"
            f" {_installed_interpreters()[0]} does not exist; set sys.executable"
        )
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler, path=search_path()) is None:
        reasons.append(f"no C++ compiler ({compiler!r} not found): install g++, or set CXX to a compiler")
    return tuple(reasons)


def interpreter() -> str | None:
    """The path of a Python interpreter of this version; None if there is none.

    In an application that embeds Python, `sys.executable` may be None, empty, or the application.
    """
    is_named_python = "python" in Path(sys.executable or "").name.lower()
    candidates = [*([sys.executable] if is_named_python else ()), *map(str, _installed_interpreters())]
    return next((path for path in candidates if shutil.which(path)), None)


def _installed_interpreters() -> list[Path]:
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return [Path(prefix, "bin", name) for prefix in (sys.prefix, sys.base_prefix)]


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
    beside = [str(Path(found).parent)] if (found := interpreter()) else []
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *beside, *scripts])


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
