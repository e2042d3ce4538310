"""The files of this package from which code is compiled. Their digests name everything that is compiled from them.

Numba compiles the functions that a process has imported, and C++ compilers read files. After an upgrade between import
and compilation, a process would mix two versions, and the cache would keep the mixture. So no file may have changed.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from multisample.backends.errors import BackendUnavailableError


class Sources:
    """The files of a folder and of its subfolders that have one of some suffixes.

    `folder` is a Path, or in an archive a `zipfile.Path`.
    """

    def __init__(self, folder: Any, *suffixes: str) -> None:
        self.folder, self.suffixes = folder, suffixes
        self._marks_at_import = self._marks()
        self._digest: str | None = None

    def digest(self) -> str:
        """A digest of the names and contents of the files; empty if there are none, as in a frozen application.

        BackendUnavailableError if a file has changed since this object was made.
        """
        self._check()
        if self._digest is None:
            self._digest = self._contents()
            self._check()
        return self._digest

    def _check(self) -> None:
        changed = self._marks().items() ^ self._marks_at_import.items()
        if changed:
            raise BackendUnavailableError(
                f"backend: {min(changed)[0]} has changed since this process imported multisample, and kernels of"
                " several versions must not be mixed: restart the process"
            )

    def _contents(self) -> str:
        import hashlib  # Sampling does not need it.

        digest, is_empty = hashlib.sha256(), True
        for name, file in self._files(self.folder, ""):
            content, is_empty = file.read_bytes(), False
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        return "" if is_empty else digest.hexdigest()

    def _marks(self) -> dict[str, tuple[int, int]]:
        """Time and size of each file, or of the archive with the files, by path."""
        if isinstance(self.folder, Path):
            files = [file for _, file in self._files(self.folder, "")]
        else:
            files = [path for path in Path(str(self.folder)).parents if path.is_file()]
        states = {str(file): file.stat() for file in files}
        return {name: (state.st_mtime_ns, state.st_size) for name, state in states.items()}

    def _files(self, folder: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        """The files and their names relative to the folder, in the order of names."""
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name) if folder.is_dir() else ():
            if entry.is_dir():
                if entry.name != "__pycache__":
                    yield from self._files(entry, f"{prefix}{entry.name}/")
            elif entry.name.endswith(self.suffixes):
                yield prefix + entry.name, entry


def _package() -> Any:
    """The folder of the package."""
    folder = Path(__file__).parents[2]
    if not folder.is_dir():
        import importlib.resources

        with contextlib.suppress(Exception):  # The importer of a frozen application may have no files.
            return importlib.resources.files("multisample")
    return folder


PACKAGE = _package()


def python_sources(*folders: str) -> Sources:
    """The Python sources, or the compiled modules without sources, in a folder of the package."""
    return Sources(PACKAGE.joinpath(*folders), ".py", ".pyc")


BACKENDS = python_sources("backends")
"""The sources of the kernels in Python. They are in several folders of the backends."""

CSRC = Sources(PACKAGE / "csrc", ".cpp", ".cu", ".cuh", ".h")
"""The C++ and CUDA sources."""
