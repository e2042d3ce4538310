"""Compiles libraries of torch_ext with PyTorch's `load`, each in a separate process and folder.

`load` compiles and loads in one step, and waits forever for a lock file that a killed process left behind. A private
folder has no such file. The compiler's process ends with its parent, however the parent dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, cast

from multisample.backends.errors import BackendUnavailableError

from . import csrc_files, targets, toolchain
from .compiler_flags import LIBRARIES, Library
from .units import LibraryKind

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
    if {is_portable!r}:
        torch.ops.load_library = lambda library: None  # `load` calls this with the new library.
    load(**{arguments!r})
except OSError as error:
    sys.exit(f"{{error}}\\n{{error.__cause__ or ''}}")  # The cause has the linker's message.
except (RuntimeError, ValueError) as error:
    sys.exit(str(error))
"""
# Seconds between looks at running builds.
_INTERVAL = 0.05


def compile_libraries(
    libraries: Mapping[Path, Library],
    show: Callable[[int], object] = lambda done: None,
    meanwhile: Callable[[], object] = lambda: None,
) -> list[tuple[int, str]]:
    """Compile each library into its folder, all at once. Return their exit codes and outputs.

    The compilers end with this process. Calls ``meanwhile()`` once while they run, and ``show(done)`` with the number
    of compiled sources, from time to time.
    """
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(_compiling(library, folder)) for folder, library in libraries.items()]
        meanwhile()
        while any(process.poll() is None for process, _ in running):
            show(sum(len(list(folder.glob("*.o"))) for folder in libraries))
            time.sleep(_INTERVAL)
        return [(process.returncode, _content(log)) for process, log in running]


@contextlib.contextmanager
def _compiling(library: Library, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], BinaryIO]]:
    """A process that compiles `library` into `folder`, and its output."""
    sources = [csrc_files.folder() / name for name in library.sources]
    for unit in library.units:
        sources.append(folder / f"{unit.name}.{'cu' if library.kind == 'cuda' else 'cpp'}")
        sources[-1].write_text(unit.text)
    arguments = {
        "name": library.module,
        "sources": [str(path) for path in sources],
        "extra_cflags": list(library.flags),
        "extra_cuda_cflags": library.nvcc_flags,
        "extra_ldflags": list(library.link_flags),
        "extra_include_paths": [str(csrc_files.folder())],
        "build_directory": str(folder),
        "is_python_module": False,
    }
    script = _CHILD.format(path=sys.path, is_portable=library.is_portable, arguments=arguments)
    environment = os.environ | {"PATH": toolchain.search_path()}
    if library.kind == "cuda":
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
            yield process, file
        finally:
            assert process.stdin is not None
            process.stdin.close()  # Ends the process if it still runs, as after Ctrl-C.
            process.wait()


def _content(log: BinaryIO) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")


def _log() -> BinaryIO:
    """A file for the compiler's output, in memory if the system can: a full disk would lose the output."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("multisample-log"), "w+b")
    return cast(BinaryIO, tempfile.TemporaryFile())


def failure_text(code: int, output: str) -> str:
    """The end of a failed build's output."""
    return "\n".join(output.rstrip().splitlines()[-_LINES:] or [f"the build ended with exit code {code}"])


def build_portable(libraries: Mapping[Path, LibraryKind]) -> None:
    """Compile libraries with all units for other machines, and for any version of PyTorch on them.

    `libraries` has the kind for the path of each. A library for CUDA is compiled for the architectures of
    TORCH_CUDA_ARCH_LIST. BackendUnavailableError if one cannot be compiled, with the end of the compiler's output.
    """
    with tempfile.TemporaryDirectory(prefix="multisample-") as temporary:
        works = {Path(temporary, place.name): _portable(LIBRARIES[kind]) for place, kind in libraries.items()}
        for folder in works:
            folder.mkdir()
        results = compile_libraries(works)
        for place, (folder, library), (code, output) in zip(libraries, works.items(), results, strict=True):
            built = folder / f"{library.module}.so"
            if code != 0 or not built.is_file():
                raise BackendUnavailableError(f"{place.name} could not be built:\n{failure_text(code, output)}")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(built, place)


def _portable(library: Library) -> Library:
    """`library` with all units, with the flags for other machines."""
    import torch

    # Binaries for other machines must not contain paths of this machine.
    folders = (csrc_files.folder().parent, Path(torch.__file__).parents[1])
    more = [f"-ffile-prefix-map={folder}/=" for folder in folders]
    # Link only PyTorch's libraries with the stable ABI. Some of them also export unversioned symbols of the C++
    # library, so the C++ library comes first.
    link = ("-Wl,--as-needed", "-Wl,--no-undefined", "-lstdc++") if sys.platform == "linux" else ()
    return dataclasses.replace(
        library.with_all_units(), flags=(*library.flags, *more), link_flags=link, is_portable=True
    )
