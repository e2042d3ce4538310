"""Compiles a library of torch_ext with PyTorch's `load`, in a separate process and folder.

`load` compiles and loads in one step, and waits forever for a lock file that a killed process left behind. A private
folder has no such file. The compiler's process ends with its parent, however the parent dies.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, cast

from multisample.backends.errors import BackendUnavailableError

from . import csrc_files, targets, toolchain
from .compiler_flags import LIBRARIES, Library, LibraryKind

# An error shows this many last lines of the compiler's output, about a screen of a terminal.
_LINES = 30


# ninja's compilers have their own process groups. On SIGTERM, unlike on SIGKILL, ninja ends them. The child gets the
# parent's sys.path, so that it imports the same PyTorch.
_CHILD = """
import sys
sys.path[:] = {path!r}
import os, signal, threading

def end_with_parent():
    os.read(0, 1)  # Returns when the parent closes the pipe or dies: nothing is ever written to it.
    os.killpg(0, signal.SIGTERM)

threading.Thread(target=end_with_parent, daemon=True).start()
import torch
from torch.utils.cpp_extension import load
try:
    for library in {needed!r}:
        torch.ops.load_library(library)
    if {is_portable!r}:
        torch.ops.load_library = lambda library: None  # `load` calls this with the new library.
    load(**{arguments!r})
except OSError as error:
    sys.exit(f"{{error}}\\n{{error.__cause__ or ''}}")  # The cause has the linker's message.
except (RuntimeError, ValueError) as error:
    sys.exit(str(error))
"""


def compile_library(library: Library, needed: Iterable[Path], folder: Path) -> tuple[int, str]:
    """Compile `library` into `folder`, in a process that ends with this one. Return its exit code and output."""
    is_cuda = library.source.endswith(".cu")
    arguments = {
        "name": library.module,
        "sources": [str(csrc_files.folder() / library.source)],
        "extra_cuda_cflags" if is_cuda else "extra_cflags": [*library.flags, *library.native_flags],
        "extra_ldflags": list(library.link_flags),
        "extra_include_paths": [str(csrc_files.folder())],
        "build_directory": str(folder),
        "is_python_module": False,
    }
    script = _CHILD.format(
        path=sys.path, needed=[str(path) for path in needed], is_portable=library.is_portable, arguments=arguments
    )
    environment = os.environ | {"PATH": toolchain.search_path()}
    if is_cuda:
        environment |= {
            "TORCH_CUDA_ARCH_LIST": targets.cuda_architectures(), "CUDA_HOME": str(toolchain.cuda_home()),
        }  # fmt: skip
    # The output goes to a file: a compiler cache in the background would keep a pipe open.
    with (
        _log() as file,
        subprocess.Popen(
            [toolchain.interpreter() or sys.executable, "-c", script],
            stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        ) as process,
    ):  # fmt: skip
        try:
            code = process.wait()
        finally:
            assert process.stdin is not None
            process.stdin.close()  # Ends the process if it still runs, as after Ctrl-C.
            process.wait()
        file.seek(0)
        return code, file.read().decode(errors="replace")


def _log() -> BinaryIO:
    """A file for the compiler's output, in memory if the system can: a full disk would lose the output."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("multisample-log"), "w+b")
    return cast(BinaryIO, tempfile.TemporaryFile())


def failure_text(code: int, output: str) -> str:
    """The end of a failed build's output."""
    return "\n".join(output.rstrip().splitlines()[-_LINES:] or [f"the build ended with exit code {code}"])


def build_portable(kind: LibraryKind, place: Path, *flags: str) -> None:
    """Compile a library for other machines, and for any version of PyTorch on them, to the file `place`.

    A library for CUDA is compiled for the architectures of TORCH_CUDA_ARCH_LIST. BackendUnavailableError if it cannot
    be compiled, with the end of the compiler's output.
    """
    library = _portable(LIBRARIES[kind], flags)
    with tempfile.TemporaryDirectory(prefix="multisample-") as temporary:
        code, output = compile_library(library, (), Path(temporary))
        built = Path(temporary, f"{library.module}.so")
        if code != 0 or not built.is_file():
            raise BackendUnavailableError(f"{place.name} could not be built:\n{failure_text(code, output)}")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(built, place)


def _portable(library: Library, flags: Iterable[str]) -> Library:
    """`library` with the flags for other machines, and with `flags`."""
    import torch

    # Binaries for other machines must not contain paths of this machine.
    folders = (csrc_files.folder().parent, Path(torch.__file__).parents[1])
    more = [f"-ffile-prefix-map={folder}/=" for folder in folders]
    if library.source.endswith(".cu"):
        # Compressed machine code takes a quarter of the space.
        threads = os.environ.get("MAX_JOBS") or os.cpu_count() or 1
        more = [*(f"-Xcompiler={flag}" for flag in more), "-Xfatbin=-compress-all", f"--threads={threads}"]
    # Link only PyTorch's libraries with the stable ABI. Some of them also export unversioned symbols of the C++
    # library, so the C++ library comes first.
    link = ("-Wl,--as-needed", "-Wl,--no-undefined", "-lstdc++") if sys.platform == "linux" else ()
    return dataclasses.replace(
        library, flags=(*library.flags, *more, *flags), native_flags=(), link_flags=link, is_portable=True
    )
