"""The exceptions of multisample. Wrong arguments raise Python's TypeError and ValueError."""

from __future__ import annotations

from collections.abc import Iterable

from multisample.backends.errors import BackendUnavailableError

__all__ = ["BackendUnavailableError", "UnknownBackendError"]


class UnknownBackendError(ValueError):
    """No backend has the given name; the message lists the existing names.

    Examples
    --------
    >>> import multisample
    >>> multisample.sample([0.0], [1.0], 3, backend="gpu")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    multisample.exceptions.UnknownBackendError: ... 'gpu'; accepted are 'auto', 'torch_ext', 'cupy', 'numba', 'cpu'; ...
    """

    def __init__(self, name: object, names: Iterable[str], nearest: Iterable[str] = ()) -> None:
        message = f"backend: no backend is called {name!r}; accepted are 'auto', " + ", ".join(map(repr, names))
        suggestion = " or ".join(map(repr, nearest))
        super().__init__(f"{message}; did you mean {suggestion}?" if suggestion else message)
