"""Backends by name. The modules of built-in ones are imported when first asked for.

Such a module imports the library that it stands on only when used, so that its `status` can say that it is missing.
"""

from __future__ import annotations

import importlib

from .contract import Backend

__all__ = ["find", "names", "register"]

# Modules of this package, each with a `BACKEND`.
_BUILT_IN = ("torch_ext", "cupy", "numba", "cpu")
_registered: dict[str, Backend] = {}


def names() -> tuple[str, ...]:
    """Every name that `find` knows."""
    return (*_BUILT_IN, *(name for name in _registered if name not in _BUILT_IN))


def find(name: str) -> Backend:
    """The backend called `name`; KeyError if there is none."""
    backend = _registered.get(name)
    if backend is None:
        if name not in _BUILT_IN:
            raise KeyError(name)
        backend = importlib.import_module(f".{name}", __package__).BACKEND
        _registered[name] = backend
    return backend


def register(backend: Backend) -> None:
    """Add `backend` under its name; ValueError if the name is taken."""
    if backend.name in names() or backend.name == "auto":
        raise ValueError(
            f"backend name {backend.name!r} is taken; registered names are {', '.join(names())}, and 'auto'"
        )
    _registered[backend.name] = backend
