"""Errors that backends raise; bad arguments raise Python's TypeError and ValueError."""

from __future__ import annotations

__all__ = ["BackendUnavailableError"]


class BackendUnavailableError(RuntimeError):
    """A backend cannot run here. The message gives every reason and the command that fixes it.

    Examples
    --------
    >>> import multisample
    >>> try:
    ...     x = multisample.sample([0.0], [1.0], 3, backend="cpu")
    ... except multisample.BackendUnavailableError as error:
    ...     print(error)
    """


# Users see it as `multisample.BackendUnavailableError`.
BackendUnavailableError.__module__ = "multisample.exceptions"
