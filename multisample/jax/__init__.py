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

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .._randomness.generator import Key
    from .._typing import DType

__all__ = ["key_data", "load_handlers", "normal"]


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


def normal(key: Any, shape: SupportsIndex | Sequence[SupportsIndex] = (), dtype: DType | None = None) -> Any:
    """Draw standard normals of any shape, as `jax.random.normal` does.

    Element e, counted in row-major order, is the normal ``z[0, e]`` of `multisample.sample`. So the numbers do not
    depend on the shape, and are those of `multisample.standard_normal` for the same seed. Use a new key for each call.

    Parameters
    ----------
    key : JAX key, int or Key
        One key: a `seed` for `multisample.sample`. `jax.vmap` over keys is one launch.
    shape : int or tuple of int, default ()
        Shape of the result; at most 2**34 elements.
    dtype : dtype, optional
        By default float32, or float64 with `jax_enable_x64`.

    Returns
    -------
    jax.Array of shape `shape`

    Raises
    ------
    TypeError
        If `key` or `shape` is no integer, or `dtype` is not accepted.
    ValueError
        If a value is out of range, or `key` is a vector.

    Examples
    --------
    >>> import jax
    >>> import multisample
    >>> keys = jax.random.split(jax.random.key(7), 2)
    >>> x = jax.vmap(lambda key: multisample.jax.normal(key, (3, 4)))(keys)
    >>> x.shape, bool((x[1] == multisample.jax.normal(keys[1], (3, 4))).all())
    ((2, 3, 4), True)
    """
    import jax.numpy as jnp
    from jax.dtypes import canonicalize_dtype

    from .._arguments import describe, dtype_name
    from .._checks.window_and_options import checked_lengths, count_of, exceeds
    from .._operations import COLUMNS
    from .._routes.jax.keys import batch_length, words_of
    from .._sample import sample

    try:
        batch = batch_length(key)
        words_of(key, 0, 0)  # Checks the key.
    except (TypeError, ValueError) as error:
        accepted = "a JAX key of 64 bits, an integer, 0 <= key < 2**64, or a multisample.Key"
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(f"key: expected {accepted}, got {describe(key)}") from None
    if batch is not None:
        raise ValueError(f"key: expected one key, got a vector of {batch}; use jax.vmap")
    name: Any = canonicalize_dtype(np.float64).name if dtype is None else dtype_name(dtype)
    lengths = checked_lengths("shape", shape)
    if exceeds(count_of(lengths), COLUMNS):
        raise ValueError(f"shape: expected at most 2**34 elements, got {count_of(lengths)}")
    return sample(jnp.zeros(()), 1.0, lengths, seed=key, dtype=name)
