"""Errors of our own; bad arguments raise Python's TypeError and ValueError."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["BackendUnavailableError", "UnknownBackendError"]


class UnknownBackendError(ValueError):
    """No backend has the name that was given; the message lists those that exist."""

    def __init__(self, name: object, names: Iterable[str]) -> None:
        super().__init__(
            f"backend: there is none called {name!r}; accepted are 'auto', "
            + ", ".join(repr(known) for known in names)
        )


class BackendUnavailableError(RuntimeError):
    """A backend cannot run here; the message gives every reason and the command that mends it."""
