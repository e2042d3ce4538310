"""Calls that JAX has to see: those with its arrays or keys, traced or not.

A call becomes one custom call of a program. While JAX traces, that is the program being traced; otherwise it is one of
its own, which is compiled for the static arguments and kept.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._arguments import check_choice, check_flag, checked_integer, describe, dtype_name
from ..._checks.operands import common_length, promoted
from ..._checks.values import check_values
from ..._libraries import HOST, is_number, library_of
from ..._libraries.jax import JAX, is_jax
from ..._libraries.library import CPU, NOUNS, counted_as
from ..._plan import COLUMNS, ROWS, Call
from ..._randomness.generator import DEFAULT_GENERATOR, Key
from ..._randomness.source import check_generator
from ..._tracing import SEEDLESS, is_traced_by_jax
from .keys import Words, packed, words_of
from .primitives import Static, sample_matrix

__all__ = ["draw_jax"]


def draw_jax(call: Call) -> Any:
    """The result of a call with an array or a key of JAX, or with a traced value."""
    tracing = is_traced_by_jax() or any(isinstance(x, jax.core.Tracer) for x in (call.mu, call.sigma))
    static, d = _static(call)
    if tracing:
        _check_traced(call)
    mu, sigma = (_operand(name, x, static.dtype) for name, x in (("mu", call.mu), ("sigma", call.sigma)))
    if tracing:
        return _traced(mu, sigma, _words(call, call.seed, d), static, d)
    _check_given_values(call, static.dtype)
    if call.seed is not None:
        return _run(mu, sigma, _words(call, call.seed, d), static, d)
    check_generator(call.generator, JAX, CPU)
    generator = DEFAULT_GENERATOR if call.generator is None else call.generator
    _words(call, 0, d)  # Raises before the generator advances.
    seed, offset = generator._take()
    try:
        return _run(mu, sigma, _words(call, Key(seed, offset), d), static, d)
    except BaseException:
        generator._put_back(seed, offset)
        raise


# --- Checks ---------------------------------------------------------------------------------------


def _static(call: Call) -> tuple[Static, int]:
    """What a program is compiled for, and the number of dimensions."""
    if isinstance(call.n, jax.core.Tracer):
        raise TypeError(
            "n: expected an integer that is known while JAX traces, as it is a length of the result, got"
            f" {describe(call.n)}: pass it as a static argument"
        )
    n = checked_integer("n", call.n, 0, COLUMNS + 1)
    check_choice("noise", call.noise, ("independent", "shared"))
    check_choice("layout", call.layout, ("dn", "nd"))
    for name, flag in (("fast_math", call.fast_math), ("validate", call.validate), ("antithetic", call.antithetic)):
        check_flag(name, flag)
    if not isinstance(call.backend, str):
        raise TypeError(f"backend: expected a name, got {describe(call.backend)} of type {type(call.backend).__name__}")
    if call.out is not None:
        if is_jax(call.out):
            JAX.check_target(call.out)
        raise TypeError(f"out: expected None with JAX, whose arrays are immutable, got {describe(call.out)}")
    if call.seed is not None and call.generator is not None:
        raise TypeError("seed, generator: expected one of the two, got both")
    vectors = {name: x for name, x in (("mu", call.mu), ("sigma", call.sigma)) if not is_number(x)}
    if not vectors:
        raise TypeError(
            f"mu, sigma: expected at least one array of shape (d,), got the numbers {call.mu} and {call.sigma}"
        )
    types = {name: _element_type(name, x) for name, x in vectors.items()}
    d = common_length({name: np.shape(x) for name, x in vectors.items()})
    dtype = promoted(list(types.values())) if call.dtype is None else dtype_name(call.dtype)
    try:
        JAX.check_dtype(dtype)
    except TypeError as error:
        if call.dtype is not None:
            raise
        wide = ", ".join(name for name, found in types.items() if found == "float64")
        raise TypeError(f"{error}; or pass dtype='float32', as {wide} is float64") from None
    static = Static(
        n, dtype, call.layout, call.noise == "shared", bool(call.antithetic), bool(call.fast_math), call.backend
    )
    return static, d


def _element_type(name: str, x: Any) -> str:
    """The type that `mu` or `sigma` brings to promotion."""
    if is_jax(x):
        return counted_as(name, x.dtype.name)
    library = library_of(name, x)
    if library is not HOST:
        raise TypeError(f"{name}: expected an array of JAX or NumPy where others are JAX's, got {NOUNS[library.name]}")
    return library.describe(name, HOST.normalized(name, x)).counts_as


def _check_traced(call: Call) -> None:
    if call.validate:
        raise ValueError("validate: expected False where JAX traces the call, as there are no values to look at")
    if call.generator is not None:
        raise ValueError(
            f"generator: expected None where JAX traces the call, got {describe(call.generator)}: the numbers would be"
            " the same in every run of the program; pass seed=, which may be a JAX key"
        )
    if call.seed is None:
        raise ValueError(SEEDLESS)


def _words(call: Call, seed: Any, d: int) -> Words:
    words = words_of(seed, call.dim_offset, call.sample_offset)
    if not isinstance(call.dim_offset, jax.core.Tracer) and int(call.dim_offset) + d > ROWS:
        raise ValueError(f"dim_offset: expected dim_offset + d <= 2**32, got {call.dim_offset} + {d}")
    if not isinstance(call.sample_offset, jax.core.Tracer) and int(call.sample_offset) + int(call.n) > COLUMNS:
        raise ValueError(f"n: expected sample_offset + n <= 2**34, got {call.sample_offset} + {call.n}")
    return words


def _check_given_values(call: Call, dtype: str) -> None:
    """ValueError for values that no normal distribution has, in host memory or where the caller asks for it."""
    from multisample.backends.kernels.cpu.kernel import value_kernel  # Numba takes half a second to import.

    mu, sigma = (
        np.asarray(x) if is_jax(x) and (call.validate or _is_on_host(x)) else None for x in (call.mu, call.sigma)
    )
    is_valid = value_kernel("float64" if dtype == "float64" else "float32")
    for name, x in (("mu", mu), ("sigma", sigma)):
        if x is not None:
            vector = np.asarray(x, np.float64 if dtype == "float64" else np.float32).reshape(-1)
            pair = (vector, vector[:0]) if name == "mu" else (vector[:0], vector)
            if not is_valid(*pair):
                check_values(HOST, {name: x}, dtype)


def _is_on_host(x: Any) -> bool:
    return bool(x.is_fully_addressable) and next(iter(x.devices())).platform == "cpu"


def _operand(name: str, x: Any, dtype: str) -> Any:
    """`mu` or `sigma` for a program: a JAX array as it is, anything else as a checked NumPy array."""
    if is_jax(x):
        return x
    check_values(HOST, {name: x if is_number(x) else HOST.normalized(name, x)}, dtype)
    real = np.float64 if dtype == "float64" else np.float32
    return np.asarray(float(x) if is_number(x) else x).astype(real)


# --- Programs -------------------------------------------------------------------------------------


def _traced(mu: Any, sigma: Any, words: Words, static: Static, d: int) -> Any:
    """The result in the program that is being traced."""
    if d == 0 or static.n == 0:
        return jnp.zeros((d, static.n) if static.layout == "dn" else (static.n, d), static.dtype)
    return sample_matrix(_vector(mu, d, static.dtype), _vector(sigma, d, static.dtype), packed(words), static)


def _vector(x: Any, d: int, dtype: str) -> Any:
    """`mu` or `sigma` in the computing type, shape (d,)."""
    x = jnp.asarray(x).astype(jnp.float64 if dtype == "float64" else jnp.float32)
    return jnp.broadcast_to(x, (d,)) if x.ndim == 0 else x.reshape(d)


@functools.lru_cache(1024)
def _program(static: Static, d: int) -> Any:
    return jax.jit(lambda mu, sigma, words: _traced(mu, sigma, words, static, d))


def _run(mu: Any, sigma: Any, words: Words, static: Static, d: int) -> Any:
    with jax.disable_jit(False):
        return _program(static, d)(mu, sigma, words)
