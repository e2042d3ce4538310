"""Choice of the backend: the named one, or the first available one in the order of the array's library."""

from __future__ import annotations

from multisample.backends import registry
from multisample.backends.contract import PROTOCOL, Backend, BackendStatus

from ._arguments import describe
from ._libraries import library_called
from ._libraries.library import NOUNS
from ._plan import PlanCache
from .exceptions import BackendUnavailableError, UnknownBackendError

# Keys are library and device kind.
_ORDER: dict[tuple[str, str], tuple[str, ...]] = {
    ("torch", "cpu"): ("torch_ext", "cpu"),
    ("torch", "cuda"): ("torch_ext", "cupy", "numba"),
    ("numba", "cuda"): ("numba", "cupy", "torch_ext"),
}
# In JAX's programs seed and offset are in device memory. Then torch_ext stores single elements, at 0.4 of the speed.
_ORDER_OF_OTHER_LIBRARIES = {"cpu": ("cpu",), "cuda": ("cupy", "numba", "torch_ext")}

_chosen: dict[tuple[str, str, str], Backend] = {}


def choose(name: str, library: str, device_kind: str) -> Backend:
    """The backend for arrays of `library` on a device of `device_kind`; raises if it does not serve them or run."""
    if not isinstance(name, str):
        raise TypeError(f"backend: expected a name, got {describe(name)} of type {type(name).__name__}")
    backend = _chosen.get((name, library, device_kind))
    if backend is None:
        backend = _automatic(library, device_kind) if name == "auto" else _named(name, library, device_kind)
        _chosen[name, library, device_kind] = backend
    return backend


def known_backend(name: str) -> Backend:
    """The backend called `name`, which may not be able to run; UnknownBackendError if there is none."""
    try:
        return registry.find(name)
    except KeyError:
        raise UnknownBackendError(name, registry.names(), _nearest(name)) from None


def _named(name: str, library: str, device_kind: str) -> Backend:
    backend = known_backend(name)
    status = backend.status()
    if not status.available:
        raise BackendUnavailableError(f"backend: {name!r} cannot run here: " + "; ".join(status.reasons))
    if device_kind in backend.device_kinds:
        backend.prepare(device_kind)
    elif library != "numpy":  # Every backend adopts host arrays.
        raise ValueError(
            f"backend: {name!r} serves {' and '.join(backend.device_kinds)} memory,"
            f" got {NOUNS[library]} in {device_kind} memory"
        )
    return backend


def _nearest(name: str) -> list[str]:
    """Suggestions for a wrong name: similar names, or all backends for the kind of device that it names."""
    names, wrong = ("auto", *registry.names()), name.strip().lower()
    import difflib  # Only this error needs it.

    similar = difflib.get_close_matches(wrong, names, cutoff=0.7)
    similar += [known for known in names if known not in similar and wrong and known.startswith(wrong)]
    kind = {"gpu": "cuda"}.get(wrong.partition(":")[0], wrong.partition(":")[0])
    return similar or [known for known in registry.names() if kind in registry.find(known).device_kinds]


def _automatic(library: str, device_kind: str) -> Backend:
    order = _ORDER.get((library, device_kind)) or _ORDER_OF_OTHER_LIBRARIES.get(device_kind)
    if order is None:
        raise ValueError(f"mu, sigma: no backend serves {NOUNS[library]} in {device_kind} memory")
    reasons: list[str] = []
    for name in order:
        backend = registry.find(name)
        status = backend.status()
        if not status.available:
            reasons.extend(f"{name}: {reason}" for reason in status.reasons)
        elif device_kind not in backend.device_kinds:
            reasons.append(f"{name}: serves {' and '.join(backend.device_kinds)} memory")
        else:
            try:
                backend.prepare(device_kind)
            except BackendUnavailableError as error:
                reasons.append(f"{name}: {error}")
            else:
                return backend
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
    members = (
        "protocol", "name", "device_kinds", "host_library", "operations", "status", "prepare", "adopt", "launch",
        "advancer",
    )  # fmt: skip
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
    _chosen.clear()
    for cache in PlanCache.every:
        cache.clear()
