"""Compile the plain kernels in Python without a GPU, for test_numba_ptx.py.

The compilation runs in a separate process, because it patches numba-cuda's device. As a program, this module reads one
line of JSON for each kernel: ``[name, fields, [major, minor]]``, with the fields of a `KernelKey`, without the device.

The program writes three files into the folder that is its argument: ``name.ptx``, the machine code ``name.cubin`` of
nvJitLink, and its messages ``name.log``. If a compiler cannot be loaded, the program prints the compiler's name and
exits with `CANNOT`.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ptx_reader import Kernel
from tables import STORE_KINDS, Variant

from multisample.backends.kernels.cuda import keys, parameters

CANNOT = 3
SECONDS = 900

Capability = tuple[int, int]
HOPPER: Capability = (9, 0)


class CannotCompileError(Exception):
    """A compiler cannot be loaded."""


@dataclasses.dataclass
class Compiled:
    variant: Variant
    capability: Capability
    file: Path
    """The PTX file. The machine code and the log have the same name with other suffixes."""

    @property
    def architecture(self) -> str:
        return "sm_{}{}".format(*self.capability)

    @functools.cached_property
    def ptx(self) -> str:
        return self.file.read_text()

    @functools.cached_property
    def kernel(self) -> Kernel:
        return Kernel(self.ptx)

    @property
    def store_kind(self) -> str:
        return STORE_KINDS[self.variant[4]]

    def __str__(self) -> str:
        dtype, shared, antithetic, fast, store_kind = self.variant
        noise, transform = "shared" if shared else "independent", "fast_math" if fast else "portable"
        noise += " antithetic" if antithetic else ""
        return f"{dtype} {noise} {transform} {STORE_KINDS[store_kind]} {self.architecture}"


def compile_all(results: list[Compiled]) -> None:
    """Compile these kernels in a separate process."""
    if importlib.util.find_spec("numba_cuda") is None:
        raise CannotCompileError("numba-cuda is not installed")
    jobs = [[result.file.stem, [*result.variant, False, False], result.capability] for result in results]
    _run(jobs, results[0].file.parent)


def _run(jobs: list[Any], folder: Path) -> None:
    lines = map(json.dumps, jobs)
    done = subprocess.run(
        [sys.executable, __file__, str(folder)], input="\n".join(lines), capture_output=True,
        text=True, timeout=SECONDS,
    )  # fmt: skip
    if done.returncode == CANNOT:
        raise CannotCompileError(done.stdout.strip())
    if done.returncode:
        raise RuntimeError(f"{done.stdout[-2000:]}\n{done.stderr[-5000:]}")


def versions() -> dict[str, str]:
    """Versions of the compiler packages."""
    names = ("numba", "numba-cuda", "llvmlite", "nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink-cu12", "nvidia-cuda-nvcc")
    found = {name: _version(name) for name in names}
    return {name: version for name, version in found.items() if version}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _load_compilers() -> None:
    """Load the compilers, or exit if one of them cannot be loaded."""
    try:
        from numba.cuda.cudadrv import nvvm

        nvvm.NVVM()
    except Exception as error:  # A broken installation may raise anything.
        raise SystemExit(_refused("libNVVM", error)) from error
    try:
        from cuda.bindings import nvjitlink

        nvjitlink.version()
    except Exception as error:
        raise SystemExit(_refused("nvJitLink", error)) from error


def _refused(name: str, error: Exception) -> int:
    print(f"{name} cannot be loaded: {' '.join(str(error).split())}")
    return CANNOT


def _compile(fields: list[Any], capability: tuple[int, int]) -> str:
    from numba import cuda
    from numba.cuda import dispatcher

    from multisample.backends.kernels.cuda import compilation as cuda_compilation

    # The device properties that Numba reads to compile.
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
    key = keys.KernelKey(*fields, 0)
    kernel = cuda_compilation.kernel_of(key, capability)
    ptx, _ = cuda.compile(
        kernel.py_func, parameters.SIGNATURE.args, device=False, abi="numba", cc=capability, output="ptx",
        launch_bounds=kernel.targetoptions["launch_bounds"],
    )  # fmt: skip
    return str(ptx)


def link(ptx: bytes, architecture: str) -> tuple[bytes, str]:
    """Machine code, and the linker's messages."""
    from cuda.bindings import nvjitlink

    options = [f"-arch={architecture}", "-verbose"]
    linker = nvjitlink.create(len(options), options)
    try:
        nvjitlink.add_data(linker, nvjitlink.InputType.PTX, ptx, len(ptx), "kernel")
        nvjitlink.complete(linker)
    except nvjitlink.nvJitLinkError:
        message = bytearray(nvjitlink.get_error_log_size(linker))
        nvjitlink.get_error_log(linker, message)
        raise SystemExit(f"nvJitLink: {message.decode()[:5000]}") from None
    cubin = bytearray(nvjitlink.get_linked_cubin_size(linker))
    nvjitlink.get_linked_cubin(linker, cubin)
    log = bytearray(nvjitlink.get_info_log_size(linker))
    if log:
        nvjitlink.get_info_log(linker, log)
    nvjitlink.destroy(linker)
    return bytes(cubin), log.decode().rstrip("\0")


def main(folder: Path) -> None:
    _load_compilers()
    # Full garbage collections would take an eighth of the time.
    gc.disable()
    for line in sys.stdin:
        gc.collect(1)
        name, fields, (major, minor) = json.loads(line)
        ptx = _compile(fields, (major, minor))
        (folder / f"{name}.ptx").write_text(ptx)
        cubin, log = link(ptx.encode(), f"sm_{major}{minor}")
        (folder / f"{name}.cubin").write_bytes(cubin)
        (folder / f"{name}.log").write_text(log)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
