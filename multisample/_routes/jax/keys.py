"""Seed, offset and window of a call as two operands of its custom call, so that new values compile nothing."""

import functools
import math
import struct
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._arguments import checked_integer
from ..._libraries.jax import is_jax, is_on_host
from ..._operations import COLUMNS, ROWS
from ..._randomness.generator import WORD_64, Key
from ..._randomness.seed_argument import batch_of, checked_key, checked_seed, host_words


class Words(NamedTuple):
    """The arguments of a call that are neither `mu` nor `sigma`, for `operands_of`."""

    seed: Any
    """uint32[2], the high half first, a JAX key of 64 bits, or a traced integer; uint32[B, 2] for a vector of seeds."""
    offsets: Any
    """Offset, first row and first column.

    None if all are 0; uint32[6], low halves first, if all are known; else three values, each in one of the forms of
    `seed`. For a vector of seeds with offsets, the offset is uint32[B, 2].
    """


_pack_seed, _pack_offsets = struct.Struct("=2I").pack, struct.Struct("<3Q").pack


def words_of(seed: Any, dim_offset: Any, sample_offset: Any, row_name: str = "dim_offset") -> Words:
    """The words of a call, whose argument `dim_offset` is called `row_name`; TypeError or ValueError for wrong ones."""
    word, offset = seed if type(seed) is Key else (seed, 0)
    if not (
        type(word) is type(offset) is type(dim_offset) is type(sample_offset) is int and 0 <= word < WORD_64
        and 0 <= offset < WORD_64 and 0 <= dim_offset <= ROWS and 0 <= sample_offset <= COLUMNS
    ):  # fmt: skip
        word, offset = _of_seed(seed)
        dim_offset = _of_integer(row_name, dim_offset, ROWS + 1)
        sample_offset = _of_integer("sample_offset", sample_offset, COLUMNS + 1)
        offsets = offset, dim_offset, sample_offset
        if not all(isinstance(x, int) for x in offsets):
            return Words(_halves(word), tuple(map(_halves, offsets)))
    if offset == dim_offset == sample_offset == 0:
        return Words(_halves(word), None)
    return Words(_halves(word), np.frombuffer(_pack_offsets(offset, dim_offset, sample_offset), np.uint32))


def batch_length(seed: Any) -> int | None:
    """The number of seeds in a vector; None for a single seed.

    An array that cannot be a seed raises TypeError or ValueError.
    """
    if is_jax(seed) and seed.shape and is_key(seed):
        return seed.shape[0] if len(seed.shape) == 1 else None
    return batch_of(seed)


def key_vector(seed: Any) -> Any:
    """A vector of B seeds as uint32[B, 2], or with offsets as uint32[B, 4]: high halves first.

    Entries of traced arrays, and of arrays on a device, count modulo 2**bits of their type. TypeError or ValueError for
    other seeds.
    """
    if isinstance(seed, (list, tuple)):
        seed = host_words(seed)
    elif is_key(seed):
        _check_bits("seed", seed.dtype)
        return jax.random.key_data(seed)
    elif seed.dtype == np.uint32:
        return seed
    elif isinstance(seed, np.ndarray) or (not isinstance(seed, jax.core.Tracer) and is_on_host(seed)):
        seed = host_words(np.asarray(seed))
    halves = halves_of(seed.astype(f"uint{8 * seed.dtype.itemsize}"))
    return halves.reshape(seed.shape[0], math.prod(halves.shape[1:]))


def halves_of(x: Any) -> Any:
    """The high and the low half of each integer, on a new last axis."""
    library = np if isinstance(x, np.ndarray) else jnp
    low = x.astype(np.uint32)  # Modulo 2**32.
    high = (x >> 32).astype(np.uint32) if x.dtype.itemsize == 8 else library.zeros_like(low)
    return library.stack([high, low], -1)


def words_of_members(seed: Any, members: Any) -> Words:
    """The words of a call with one key and a vector of members, uint32[K, 2]."""
    seed, offset = _of_seed(seed)
    return Words(_halves(seed), (_halves(offset), members, _halves(0)))


def _halves(x: Any) -> Any:
    return np.frombuffer(_pack_seed(x >> 32, x & 0xFFFF_FFFF), np.uint32) if isinstance(x, int) else x


def _of_seed(seed: Any) -> tuple[Any, Any]:
    """Seed and offset: integers, or arrays for `_high_first`."""
    if isinstance(seed, Key):
        return word_of("seed.seed", seed.seed), word_of("seed.offset", seed.offset)
    if batch_length(seed) is not None:
        keys = key_vector(seed)
        return keys[:, :2], keys[:, 2:] if keys.shape[1] == 4 else 0
    if not is_jax(seed):
        return checked_key(seed)
    if seed.shape == (4,) and seed.dtype == np.uint32:
        return seed[:2], seed[2:]
    return word_of("seed", seed), 0


def word_of(name: str, x: Any) -> Any:
    """A seed or an offset as an integer, if the host knows its value; else as an array or a JAX key."""
    if not is_jax(x):
        is_data = isinstance(x, np.ndarray) and x.shape == (2,) and x.dtype == np.uint32
        return checked_key(x)[0] if is_data else checked_seed(name, x)
    shape = x.shape
    if is_key(x):
        if name == "seed.offset":
            raise TypeError(f"{name}: expected an integer or uint32[2], got a JAX key")
        if shape != ():
            raise ValueError(
                f"{name}: expected a JAX key or a vector of them, got an array of shape {shape}: use jax.vmap"
            )
        _check_bits(name, x.dtype)
        return x
    if shape == (2,) and x.dtype == np.uint32:
        return x
    if shape == () and jnp.issubdtype(x.dtype, jnp.integer):
        return x if isinstance(x, jax.core.Tracer) else checked_integer(name, x, 0, WORD_64)
    key = "" if name == "seed.offset" else " a JAX key"
    raise TypeError(f"{name}: expected an integer,{key} or uint32[2], got {x.dtype}{list(shape)}")


def is_key(x: Any) -> bool:
    """Whether the elements of a JAX array are typed keys."""
    return _is_key_type(x.dtype)


@functools.cache
def _is_key_type(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


@functools.cache
def _check_bits(name: str, dtype: Any) -> None:
    data: Any = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
    bits = 32 * math.prod(data.shape)
    if bits != 64:
        raise ValueError(
            f"{name}: expected a JAX key of 64 bits, such as those of threefry2x32, got one of {bits} bits ({dtype})"
        )


def _of_integer(name: str, x: Any, stop: int) -> Any:
    if not isinstance(x, jax.core.Tracer):
        return checked_integer(name, x, 0, stop)
    if x.shape != () or not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name}: expected an integer, got a traced {x.dtype}{list(x.shape)}")
    return x


def operands_of(words: Words) -> tuple[Any, ...]:
    """The operands of a traced program, as uint32: seeds of shape (b, 2), and offsets of shape (b, 6).

    `b` is the number of seeds of a batch, else 1. A seed has its high half first, as JAX's keys have, so that a key is
    the operand itself. The offsets have their low halves first. If all offsets are 0, the program has no operand for
    them: XLA would run a kernel in each call to make the zeros.
    """
    offsets = words.offsets
    if isinstance(offsets, tuple):
        low_first = [jnp.atleast_2d(_high_first(x))[:, ::-1] for x in offsets]
        offsets = jnp.concatenate(jnp.broadcast_arrays(*low_first), 1)
    return tuple(jnp.atleast_2d(x) for x in (_high_first(words.seed), offsets) if x is not None)


def _high_first(x: Any) -> Any:
    """The high and the low half of a number."""
    if is_key(x):
        return jax.random.key_data(x)
    if x.ndim:
        return jnp.asarray(x)
    return halves_of(x)
