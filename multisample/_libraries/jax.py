"""JAX: `multisample._routes.jax` runs a call with arrays of JAX as a program."""

import sys
from collections.abc import Hashable
from typing import Any

import numpy as np

from .._tracing import is_traced_by_jax
from .foreign import ForeignLibrary
from .numpy import HOST

# The most frequent types of arguments that are not JAX's.
_PLAIN = frozenset((int, float, str, type(None), np.ndarray, list))


def is_jax(x: Any) -> bool:
    """Whether `x` is an array or a key of JAX, or what JAX traces in the place of one."""
    if type(x) in _PLAIN:
        return False
    array_type = getattr(sys.modules.get("jax"), "Array", None)
    return array_type is not None and isinstance(x, array_type)


def is_on_host(x: Any) -> bool:
    """Whether all of an array of JAX is in the memory of this process's host."""
    return bool(x.is_fully_addressable) and next(iter(x.devices())).platform == "cpu"


def any_of_jax(tree: Any) -> bool:
    """Whether a pytree has an array or a key of JAX."""
    trees = getattr(sys.modules.get("jax"), "tree_util", None)
    if trees is None:
        return False
    try:
        leaves = trees.tree_leaves(tree)
    except (TypeError, ValueError):  # JAX cannot sort the keys of a dict.
        return False
    return any(map(is_jax, {type(x): x for x in leaves}.values()))


class JaxLibrary(ForeignLibrary):
    name = "jax"

    def signature(self, array: Any) -> Hashable:
        # `array` is a NumPy vector if only the other vector or the key is JAX's.
        return HOST.signature(array) if type(array) is np.ndarray else (array.aval, array.sharding)

    def state(self) -> Hashable:
        return None if is_traced_by_jax() else sys.modules["jax"].config.jax_enable_x64

    def check_dtype(self, dtype: str, name: str = "dtype") -> None:
        """TypeError, about argument `name`, if JAX has no arrays of type `dtype`."""
        import jax

        if dtype == "float64" and not jax.config.jax_enable_x64:
            raise TypeError(f"{name}: JAX has float64 only after jax.config.update('jax_enable_x64', True)")


JAX = JaxLibrary()
