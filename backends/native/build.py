"""Compiles libraries of torch_ext with PyTorch's `load`, each in a separate process and folder.

`load` compiles and loads in one step, and waits forever for a lock file that a killed process left behind. A private
folder has no such file. The compiler's process ends with its parent, however the parent dies.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, cast

from . import csrc_files, targets, toolchain
from .compiler_flags import Library

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
) -> list[str]:
    """Compile each library into its new folder, all at once. Return why each failed; an empty text if it is built.

    The compilers end with this process. Calls ``meanwhile()`` once while they run, and ``show(done)`` with the number
    of compiled sources, from time to time.
    """
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(_compiling(library, folder)) for folder, library in libraries.items()]
        meanwhile()
        while any(process.poll() is None for process, _ in running):
            show(sum(len(list(folder.glob("*.o"))) for folder in libraries))
            time.sleep(_INTERVAL)
        return [
            _failure(folder / f"{library.module}.so", process.returncode, log)
            for (folder, library), (process, log) in zip(libraries.items(), running, strict=True)
        ]


@contextlib.contextmanager
def _compiling(library: Library, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], BinaryIO]]:
    """A process that compiles `library` into `folder`, and its output."""
    folder.mkdir()
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


def _failure(built: Path, code: int, log: BinaryIO) -> str:
    """The end of the compiler's output, or an empty text if the library is built."""
    if code == 0 and built.is_file():
        return ""
    log.seek(0)
    lines = log.read().decode(errors="replace").rstrip().splitlines()
    return "\n".join(lines[-_LINES:] or [f"the build ended with exit code {code}"])


def _log() -> BinaryIO:
    """A file for the compiler's output, in memory if the system can: a full disk would lose the output."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("multisample-log"), "w+b")
    return cast(BinaryIO, tempfile.TemporaryFile())
