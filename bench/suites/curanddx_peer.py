"""A peer that nvcc compiles from other projects' headers: kernels with cuRANDDx.

The headers are those of packages on Python's path: pip install --no-deps nvidia-mathdx nvidia-curand

For a machine without a network, add `--target FOLDER` on another one, copy FOLDER, and add it to PYTHONPATH.
"""

import ctypes
import functools
import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from multisample.backends.native import toolchain
from multisample.backends.system import cache


class Header(NamedTuple):
    """A header, the folder of its package below Python's path, and the package."""

    name: str
    folder: str
    package: str


CURAND_KERNEL = Header("curand_kernel.h", "nvidia/*/include", "nvidia-curand")
# In the order of the search, cuRAND's last.
HEADERS = Header("curanddx.hpp", "nvidia/mathdx/include", "nvidia-mathdx"), CURAND_KERNEL
FAST = ("--use_fast_math",)
VARIANTS = (
    "flat grid",
    *(f"a row a block, {groups} a thread" for groups in ("1 group", "4 groups", "16 groups", "16 groups in fours")),
    *(f"{rows} rows a block, {groups} a thread" for rows in (8, 32) for groups in ("1 group", "4 groups")),
)
"""The kernels of curanddx_kernel.cu; an argument of its function `draw` is the index of one."""


def header_folder(header: Header) -> Path | None:
    """The include folder with `header`: of a package, or of the toolkit."""
    folders = [folder for root in sys.path for folder in sorted(Path(root).glob(header.folder))]
    if home := toolchain.cuda_home():
        folders.append(home / "include")
    return next((folder for folder in folders if (folder / header.name).is_file()), None)


def missing(headers: tuple[Header, ...]) -> str | None:
    """Why nothing with `headers` can be compiled here, or None."""
    absent = [header for header in headers if header_folder(header) is None]
    packages = [f"no {header.name}: pip install --no-deps {header.package}" for header in absent]
    return "; ".join([*toolchain.missing_nvcc(), *packages]) or None


def nvcc(source: Path, architecture: str, headers: tuple[Header, ...], *options: str) -> None:
    if reason := missing(headers):
        raise RuntimeError(f"{source.name}: {reason}")
    home, folders = toolchain.cuda_home(), [header_folder(header) for header in headers]
    # cuRAND's package may contain toolkit headers of another version, so the toolkit's own precede it.
    includes = [f"-I{folder}" for folder in dict.fromkeys([*folders[:-1], f"{home}/include", *folders[-1:]])]
    subprocess.run([f"{home}/bin/nvcc", f"-arch=sm_{architecture}", *includes, *options, source], check=True)


@functools.cache
def compiled(architecture: str, *options: str) -> Callable[..., None]:
    """The function `draw` of curanddx_kernel.cu for GPUs of the `architecture`, such as "90".

    Its arguments are the addresses of the result, mu and sigma, d, n, the numbers of the call and of the variant, and
    the stream.
    """
    source = Path(__file__).with_name("curanddx_kernel.cu")
    digest = hashlib.sha256(repr((source.read_text(), options, architecture)).encode()).hexdigest()
    library = cache.root() / "bench" / f"{source.stem}-{digest[:12]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            part = Path(folder, library.name)
            fixed = "-O3", "-w", "-shared", "-std=c++17", "-Xcompiler=-fPIC", f"-DARCHITECTURE={architecture}0"
            nvcc(source, architecture, HEADERS, *fixed, f"-o={part}", *options)
            part.rename(library)
    function = ctypes.CDLL(str(library)).draw
    function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_uint] * 4 + [ctypes.c_void_p]
    function.restype = ctypes.c_char_p

    def draw(*arguments: int) -> None:
        error = function(*arguments)
        if error is not None:
            raise RuntimeError(f"cuRANDDx: {error.decode()}")

    return draw
