"""Backends by name. The module of a built-in backend is imported when its name is first used.

Such a module imports its library only on use, so that its `status` can report a missing library.
"""

from __future__ import annotations

import importlib

from .contract import Backend
from .errors import UnknownBackendError

# Modules of this package with a `BACKEND`.
_BUILT_IN = ("torch_ext", "cupy", "numba", "cpu")
_registered: dict[str, Backend] = {}


def names() -> tuple[str, ...]:
    """Every name that `find` accepts."""
    return (*_BUILT_IN, *(name for name in _registered if name not in _BUILT_IN))


def find(name: str) -> Backend:
    """The backend called `name`. It may not be able to run. UnknownBackendError if there is none."""
    backend = _registered.get(name)
    if backend is None:
        if name not in _BUILT_IN:
            accepted = ", ".join(map(repr, ("auto", *names())))
            raise UnknownBackendError(f"backend: no backend is called {name!r}; accepted are {accepted}")
        backend = importlib.import_module(f".{name}", __package__).BACKEND
        _registered[name] = backend
    return backend


def register(backend: Backend) -> None:
    """Add `backend` under its name. ValueError if the name is taken."""
    if backend.name in names() or backend.name == "auto":
        raise ValueError(
            f"backend name {backend.name!r} is taken; registered names are {', '.join(names())}, and 'auto'"
        )
    _registered[backend.name] = backend
