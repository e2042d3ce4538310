"""Helpers for JAX.

`multisample.sample` itself takes JAX arrays and keys, also inside `jit`, `vmap`, `grad` and sharded programs, and
`multisample.perturb` takes pytrees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, SupportsIndex

try:
    import jax as _jax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise ImportError("multisample.jax needs JAX: pip install 'jax>=0.10'") from error

if TYPE_CHECKING:
    from .._randomness.generator import Key

__all__ = ["key_data", "load_handlers"]


def key_data(seed: SupportsIndex | Key) -> Any:
    """Return a seed and an offset as an array that a traced function can take.

    A traced integer has 32 bits unless `jax_enable_x64` is set. This array has all 64 bits of both.

    Parameters
    ----------
    seed : int or Key
        A seed for `multisample.sample`.

    Returns
    -------
    numpy.ndarray, shape (4,), uint32
        The halves of the seed and of the offset, high ones first: a `seed` for `multisample.sample`.

    Raises
    ------
    TypeError
        If `seed` is not an integer or a Key.
    ValueError
        If the seed or the offset is out of range.

    Examples
    --------
    >>> import jax
    >>> import multisample
    >>> draw = jax.jit(lambda seed: multisample.sample([0.0], [1.0], 5, seed=seed))
    >>> generator = multisample.Generator(7)
    >>> x = draw(multisample.jax.key_data(generator.take()))
    >>> y = draw(multisample.jax.key_data(generator.take()))  # Compiles nothing.
    >>> bool((x == multisample.sample([0.0], [1.0], 5, seed=7)).all()), bool((x == y).any())
    (True, False)
    """
    import numpy as np

    from .._randomness.seed_argument import checked_key

    return np.array([half for word in checked_key(seed) for half in (word >> 32, word & 0xFFFFFFFF)], np.uint32)


def load_handlers() -> None:
    """Register the functions that XLA calls to draw, to sum and to perturb.

    `multisample.sample`, `multisample.weighted_moments` and `multisample.perturb` register them too, but a program
    saved by `jax.export` may run before the first call.

    Examples
    --------
    >>> import multisample
    >>> multisample.jax.load_handlers()
    """
    from .._routes.jax import handlers

    handlers.register_all()
