"""Compiled programs of eager calls: one bounded cache.

JAX frees a program only together with the jitted function that it was compiled for.
"""

import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import jax

from ..._plan import PlanCache


class ProgramCache(PlanCache[Any]):
    """Jitted functions by key, bounded by the number of their programs.

    A plan keeps weak references to functions, so that dropping a function frees its programs.
    """

    def __len__(self) -> int:
        """The number of programs. A function has one for each type and sharding of its arguments."""
        return sum(max(1, function._cache_size()) for function in list(self.values()))

    def _after_fork(self) -> None:
        """Keep all programs: freeing one may wait for threads that the child does not have."""


PROGRAMS = ProgramCache(160)
"""XLA's CPU compiler holds about 1.6 MB for each program, however small: 256 MB for all. JAX reports no size."""


def jitted(key: Hashable, function: Callable[..., Any]) -> Any:
    """The jitted function in `PROGRAMS` under `key`. If `key` is new, jit `function` and add it.

    `keep_unused` is not passed: with it, JAX 0.11 never frees a program, since the program keeps its own key alive.
    """
    found = PROGRAMS.get(key)
    if found is None:
        found = jax.jit(function)
        PROGRAMS.put(key, found)
    return found


def program_of(function: Callable[..., Any], static: Hashable) -> Callable[..., Any]:
    """``function(static, *arguments)``, jitted, for the calls of a plan. `PROGRAMS` owns it, and may drop it."""
    find: Callable[[], Any] | None = None

    def run(*arguments: Any) -> Any:
        nonlocal find
        program = None if find is None else find()
        if program is None:
            program = jitted((function, static), functools.partial(function, static))
            find = weakref.ref(program)
        return program(*arguments)

    return run


def run_alone(primitive: Any, *operands: Any, **static: Any) -> Any:
    """Run a primitive outside of a program, as a program of its own."""
    # With the shapes in the key, each function has one program.
    types = tuple((x.shape, x.dtype) for x in operands)
    bind = functools.partial(primitive.bind, **static)
    with jax.disable_jit(False):  # Without a program, JAX would call this function again.
        return jitted((primitive, types, *static.items()), bind)(*operands)
