"""Choice of the backend: the named one, or the first available one in the order of the array's library."""

from __future__ import annotations

import functools

from multisample.backends import registry
from multisample.backends.contract import PROTOCOL, Backend, BackendStatus
from multisample.backends.errors import BackendUnavailableError

from ._arguments import describe
from ._libraries import library_called
from ._libraries.library import NOUNS
from ._plan import PlanCache

# Keys are library and device kind.
_ORDER: dict[tuple[str, str], tuple[str, ...]] = {
    ("torch", "cpu"): ("torch_ext", "cpu"),
    ("torch", "cuda"): ("torch_ext", "cupy", "numba"),
    ("numba", "cuda"): ("numba", "cupy", "torch_ext"),
}
# In JAX's programs seed and offset are in device memory. Then torch_ext stores single elements, at 0.4 of the speed.
_ORDER_OF_OTHER_LIBRARIES = {"cpu": ("cpu",), "cuda": ("cupy", "numba", "torch_ext")}


def choose(name: str, library: str, device_kind: str, adopts: bool = True) -> Backend:
    """The backend for arrays of `library` on a device of `device_kind`; raises if it does not serve them or run.

    If the caller `adopts` NumPy arrays, all backends serve them.
    """
    check_name(name)
    return _choice(name, library, device_kind, adopts)


def check_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"backend: expected a name, got {describe(name)} of type {type(name).__name__}")


@functools.cache
def _choice(name: str, library: str, device_kind: str, adopts: bool = True) -> Backend:
    if name == "auto":
        return _automatic(library, device_kind)
    backend = registry.find(name)
    status = backend.status()
    if not status.available:
        raise BackendUnavailableError(f"backend: {name!r} cannot run here: " + "; ".join(status.reasons))
    if device_kind in backend.device_kinds:
        backend.prepare(device_kind)
    elif library != "numpy" or not adopts:
        raise ValueError(
            f"backend: {name!r} serves {' and '.join(backend.device_kinds)} memory,"
            f" got {NOUNS[library]} in {device_kind} memory"
        )
    return backend


def _automatic(library: str, device_kind: str) -> Backend:
    order = _ORDER.get((library, device_kind)) or _ORDER_OF_OTHER_LIBRARIES.get(device_kind)
    if order is None:
        raise ValueError(f"mu, sigma: no backend serves {NOUNS[library]} in {device_kind} memory")
    reasons: list[str] = []
    for name in order:
        try:
            return _choice(name, library, device_kind)
        except BackendUnavailableError as error:
            reasons.append(str(error).removeprefix("backend: "))
    raise BackendUnavailableError(
        f"backend: none can serve {NOUNS[library]} in {device_kind} memory: " + "; ".join(reasons)
    )


def list_backends() -> dict[str, BackendStatus]:
    """Every backend, and whether it can run here.

    Returns
    -------
    dict of str to BackendStatus
        The status of each backend by name. The `reasons` of an unavailable backend list every obstacle, each with the
        command that removes it.

    Examples
    --------
    >>> import multisample
    >>> multisample.list_backends()["cpu"].available
    True
    """
    return {name: registry.find(name).status() for name in registry.names()}


def register_backend(backend: Backend) -> None:
    """Add a backend, to be used as ``sample(..., backend=backend.name)``.

    Parameters
    ----------
    backend : multisample.backends.contract.Backend
        An object with the attributes and methods of this protocol.

    Raises
    ------
    TypeError
        If `backend` follows another version of the protocol, lacks a member of it, is a class, or has no name.
    ValueError
        If its name is taken, or its `host_library` is unknown.

    Examples
    --------
    >>> import multisample
    >>> from multisample.backends.cpu import BACKEND
    >>> multisample.register_backend(BACKEND)
    Traceback (most recent call last):
    ...
    ValueError: backend name 'cpu' is taken; registered names are torch_ext, cupy, numba, cpu, and 'auto'
    """
    members = [name for name in vars(Backend) if not name.startswith("_")]
    missing = [member for member in members if not hasattr(backend, member)]
    if missing:
        raise TypeError(
            f"backend: expected an object with the members of version {PROTOCOL} of the protocol, {', '.join(members)},"
            f" got one without {', '.join(missing)}"
        )
    if backend.protocol != PROTOCOL:
        raise TypeError(
            f"backend: expected one that follows version {PROTOCOL} of the protocol,"
            f" got protocol = {backend.protocol!r}"
        )
    if isinstance(backend, type) or not (isinstance(backend.name, str) and backend.name):
        raise TypeError(f"backend: expected an object with a name, got {describe(backend)}")
    library_called(backend.host_library)
    registry.register(backend)
    forget()


def forget() -> None:
    """Discard all choices of backends and all plans."""
    _choice.cache_clear()
    for cache in PlanCache.every:
        cache.clear()
