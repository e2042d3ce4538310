"""Compiling with Numba once per machine, not once per process."""

from __future__ import annotations

import hashlib
import importlib.resources
from collections.abc import Callable
from typing import Any

from numba import njit

__all__ = ["compile_cached", "inline", "source_digest"]

inline: Callable[[Callable[..., Any]], Callable[..., Any]] = njit(forceinline=True)
"""Decorator: Numba compiles the function into whoever calls it, on a CPU or a GPU."""


def compile_cached(signature: Any, function: Callable[..., Any], *, nogil: bool = True) -> Any:
    """`function`, compiled for `signature`, and kept on disk where there is a place for it.

    What is returned takes arguments of that signature and trusts that they are: Numba's dispatcher, which would look
    at their types, costs a third of a small call. An array of another type or dimension would be read as if it were one
    of the right: only arrays that have been checked may come here.
    """
    try:
        dispatcher = njit(signature, nogil=nogil, cache=True)(function)
    except RuntimeError:  # No folder can be written to.
        dispatcher = njit(signature, nogil=nogil)(function)
    (compiled,) = dispatcher.overloads.values()
    return compiled.entry_point


def source_digest(package: str = __package__) -> int:
    """A number that changes with any Numba source of `package`, by default of this one.

    Numba's disk cache watches only the file a function stands in, not those it calls into; but the values in a
    function's closure are part of the key.
    """
    digest = hashlib.sha256()
    for source in sorted(importlib.resources.files(package).iterdir(), key=lambda path: path.name):
        if source.name.endswith(".py"):
            digest.update(source.read_bytes())
    return int.from_bytes(digest.digest()[:7], "little")
