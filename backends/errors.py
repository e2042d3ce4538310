"""Errors of backends; bad arguments raise Python's TypeError and ValueError."""

from __future__ import annotations


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

    __module__ = "multisample"  # Where users see it.


class UnknownBackendError(ValueError):
    """No backend has the given name; the message lists the existing names.

    Examples
    --------
    >>> import multisample
    >>> multisample.sample([0.0], [1.0], 3, backend="gpu")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    multisample.UnknownBackendError: ... 'gpu'; accepted are 'auto', 'torch_ext', 'cupy', 'numba', 'cpu'
    """

    __module__ = "multisample"
