"""The C++ and CUDA sources: their folder, and a digest that names every library compiled from them."""

from __future__ import annotations

import hashlib
import importlib.resources
from pathlib import Path

_SUFFIXES = (".cpp", ".cu", ".cuh", ".h")


def folder() -> Path:
    """The folder of the sources."""
    return Path(str(importlib.resources.files("multisample.csrc")))


def digest() -> str:
    """A digest of the names and contents of all sources, in subfolders too."""
    root = folder()
    result = hashlib.sha256()
    for source in sorted(path for path in root.rglob("*") if path.suffix in _SUFFIXES):
        content = source.read_bytes()
        result.update(f"{source.relative_to(root).as_posix()}\0{len(content)}\0".encode() + content)
    return result.hexdigest()
