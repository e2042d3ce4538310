"""Compile the Python kernel for GPUs that are not there, for test_numba_ptx.py.

A program of its own, because numba-cuda has to be told of a device, and such a process is good for nothing else. It
reads one line of JSON for each kernel, ``[name, variant, [major, minor]]``, `variant` being the arguments of
`multisample.backends.kernels.cuda.compilation.variant_kernel`, and puts ``name.ptx``, what nvJitLink makes of that,
``name.cubin``, and what it says of it, ``name.log``, into the folder that is its argument; in place of the list, null
is the kernel of `advance`. Where a compiler cannot be loaded it ends with `CANNOT` and says which.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CANNOT = 3


def _nvjitlink() -> Any:
    """The linker, if the compiler is there too."""
    try:
        from numba.cuda.cudadrv import nvvm

        nvvm.NVVM()
    except Exception as error:  # Whatever a broken installation may do.
        raise SystemExit(_refused("libNVVM", error)) from error
    try:
        from cuda.bindings import nvjitlink

        nvjitlink.version()
    except Exception as error:
        raise SystemExit(_refused("nvJitLink", error)) from error
    return nvjitlink


def _refused(name: str, error: Exception) -> int:
    print(f"{name} cannot be loaded: {' '.join(str(error).split())}")
    return CANNOT


def _compile(variant: list[Any] | None, capability: tuple[int, int]) -> str:
    from numba import cuda
    from numba.cuda import dispatcher

    from multisample.backends.kernels.cuda import compilation as cuda_compilation

    # What Numba asks of a device when it compiles for one.
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
    function, signature, options = cuda_compilation.advance_kernel(), cuda_compilation.ADVANCE_SIGNATURE, {}
    if variant is not None:
        dtype, shared, antithetic, _, stores, *_ = variant
        function = cuda_compilation.variant_kernel(*variant)
        signature = cuda_compilation.SIGNATURE
        bounds = cuda_compilation.launch_bounds(dtype, shared, antithetic, stores, capability)
        options = {"launch_bounds": bounds}
    ptx, _ = cuda.compile(
        function, signature.args, device=False, abi="numba", cc=capability, output="ptx", **options
    )  # fmt: skip
    return str(ptx)


def _link(nvjitlink: Any, ptx: bytes, architecture: str) -> tuple[bytes, str]:
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
    nvjitlink = _nvjitlink()
    # Full collections would take an eighth of the time.
    gc.disable()
    for line in sys.stdin:
        gc.collect(1)
        name, variant, (major, minor) = json.loads(line)
        ptx = _compile(variant, (major, minor))
        (folder / f"{name}.ptx").write_text(ptx)
        cubin, log = _link(nvjitlink, ptx.encode(), f"sm_{major}{minor}")
        (folder / f"{name}.cubin").write_bytes(cubin)
        (folder / f"{name}.log").write_text(log)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
