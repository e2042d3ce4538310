"""Where the C++ and CUDA sources are, and which they are: compiled code is kept for exactly those."""

from __future__ import annotations

import hashlib
import importlib.resources
from pathlib import Path

__all__ = ["digest", "folder"]

_SUFFIXES = (".cpp", ".cu", ".cuh", ".h")


def folder() -> Path:
    """The folder of the sources."""
    return Path(str(importlib.resources.files("multisample.csrc")))


def digest() -> str:
    """A digest of the names and contents of all sources."""
    result = hashlib.sha256()
    for source in sorted(path for path in folder().iterdir() if path.suffix in _SUFFIXES):
        content = source.read_bytes()
        result.update(f"{source.name}\0{len(content)}\0".encode() + content)
    return result.hexdigest()
