"""The library of an array, by the package that defines its class. Imports only libraries that the caller uses."""

import importlib
from typing import Any

import numpy as np

from .._arguments import describe
from .._tracing import is_of_torch
from .foreign import FOREIGN
from .library import CPU, NOUNS, Device, Library, Operand, check_memory
from .numpy import HOST, ListArray

__all__ = [
    "BY_SEED", "BY_TYPE", "CPU", "HOST", "NUMBERS", "Device", "Library", "Operand", "as_base_class", "check_memory",
    "described", "is_number", "library_called", "library_of",
]  # fmt: skip

# The module of this folder for each package that defines a class of arrays. TORCH in `torch` is the library, and so on.
_MODULES = {"torch": "torch", "cupy": "cupy", "numba": "numba", "jax": "jax", "jaxlib": "jax"}

BY_TYPE: dict[type, Library] = {np.ndarray: HOST, ListArray: HOST}
"""Libraries by array type, for types that have plans: `Library.types`, and JAX's. The first use adds a type."""

BY_SEED: dict[type, Library] = {}
"""Libraries by type of `seed`. The library of such a seed runs the call, whatever `mu` and `sigma` are."""


NUMBERS = frozenset((int, float))
"""The exact types of most numbers, for keys of plans."""


def is_number(x: Any) -> bool:
    """Whether `x` is a Python number, which applies to every dimension."""
    return isinstance(x, (int, float)) and not isinstance(x, (bool, np.generic))


def library_called(name: str) -> Library:
    """Import and return the library called `name`; ValueError if there is none."""
    if name == "numpy":
        return HOST
    if name not in ("torch", "cupy", "numba"):
        raise ValueError(f"host_library: expected numpy, torch, cupy, numba, got {describe(name)}")
    return _library_of_package(name)


def _library_of_package(package: str) -> Library:
    name = _MODULES[package]
    library: Library = getattr(importlib.import_module(f".{name}", __package__), name.upper())
    return library


def library_of(name: str, array: Any) -> Library:
    """The library of the argument `name`; TypeError if it is not an array."""
    library = BY_TYPE.get(type(array))
    if library is None:
        library = _recognise(name, array)
        if type(array) in library.types:
            BY_TYPE[type(array)] = library
    return library


def as_base_class(name: str, array: Any) -> Any:
    """`array` with a type in `BY_TYPE`, in the same memory: a list becomes an array, a subclass its base class.

    Numbers and arrays of unknown libraries stay as they are.
    """
    if is_number(array) or type(array) in BY_TYPE:
        return array
    library = library_of(name, array)
    return array if type(array) in library.types else library.normalized(name, array)


def _recognise(name: str, array: Any) -> Library:
    if isinstance(array, (np.ndarray, np.generic, list, tuple)):
        return HOST
    if is_of_torch(array, "Tensor"):
        return _library_of_package("torch")
    packages = [kind.__module__.partition(".")[0] for kind in type(array).__mro__]  # A subclass may be anywhere.
    for package in packages:
        if package in _MODULES and package != "torch" and hasattr(array, "dtype"):
            return _library_of_package(package)
    if not isinstance(array, type):  # A class has the methods of its instances.
        if "dask" in packages:  # NumPy's conversion would compute it.
            raise TypeError(
                f"{name}: expected an array in memory, got {describe(array)}; with arrays of Dask, use"
                " multisample.dask.sample"
            )
        if _has(array, "__cuda_array_interface__") or _has(array, "__dlpack_device__"):
            return FOREIGN
        if _has(array, "__array__") or _has(array, "__array_interface__"):
            return HOST
    raise TypeError(
        f"{name}: expected an array, a list or a number, got {describe(array)} of type {type(array).__name__}"
    )


def _has(array: Any, attribute: str) -> bool:
    """Whether `array` has `attribute`; True also if a foreign property raises, since its use then reports the error."""
    try:
        return hasattr(array, attribute)
    except Exception:
        return True


def described(array: Any) -> str:
    """A phrase for `array` in an error message."""
    kind = type(array).__name__
    if isinstance(array, (list, tuple)):
        return f"a {kind}"
    if isinstance(array, np.generic):
        return f"a NumPy {kind}"
    name = library_of("array", array).name
    if name == "foreign" or (name == "numpy" and not isinstance(array, np.ndarray)):
        return f"an object of type {kind}"
    return NOUNS[name]
