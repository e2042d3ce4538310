"""Draw vectors from a normal distribution with independent components: same seed, same bits, everywhere.

`sample` is the one call; `backends` says what it can run on. The stream of numbers is specified in STREAM.md, beside
this file.
"""

from __future__ import annotations

# The package `backends` is imported before the function takes its place as an attribute: its modules are reached by
# ``from multisample.backends.contract import ...``, not by ``import multisample.backends.contract as ...``.
from multisample.backends.contract import BackendStatus

from ._dispatch import backends, register_backend
from ._generator import Generator, manual_seed
from ._sample import sample
from ._version import __version__
from .exceptions import BackendUnavailableError, UnknownBackendError

__all__ = [
    "BackendStatus",
    "BackendUnavailableError",
    "Generator",
    "UnknownBackendError",
    "__version__",
    "backends",
    "manual_seed",
    "register_backend",
    "sample",
]
