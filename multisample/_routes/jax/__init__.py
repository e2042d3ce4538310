"""Calls with arrays, keys or tracers of JAX.

Each is one custom call of XLA: of the program that JAX is tracing, or else of a program of its own, which is compiled
for the static arguments and cached.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from multisample.backends.contract import HostArray
from multisample.backends.memory.host import rounded

from ..._arguments import checked_integer, describe, dtype_name
from ..._backends import choose
from ..._call import COLUMNS, ROWS, Call, check_choices, check_rows
from ..._checks.operands import common_length, promoted
from ..._checks.values import check_values
from ..._libraries import BY_SEED, BY_TYPE, HOST, is_number, keep_type, library_of
from ..._libraries.jax import JAX, is_jax
from ..._libraries.library import CPU, NOUNS, Library, counted_as
from ..._plan import PLANS, run
from ..._randomness.generator import DEFAULT_GENERATOR, WORD_64, Key
from ..._randomness.source import check_generator
from ..._tracing import SEEDLESS, is_traced_by_jax
from .keys import Words, operands, words_of
from .primitives import Static, sample_matrix
from .programs import jitted

__all__ = ["draw_jax"]


def draw_jax(call: Call, key: Hashable) -> Any:
    """The result of a call with an array or a key of JAX, or with a traced value; `key` is that of a plan."""
    tracing = is_traced_by_jax() or any(isinstance(x, jax.core.Tracer) for x in (call.mu, call.sigma))
    static, d = _static(call)
    if tracing:
        _check_traced(call)
        mu, sigma = (_operand(name, x, static.dtype) for name, x in (("mu", call.mu), ("sigma", call.sigma)))
        return _traced(mu, sigma, _words(call, call.seed, d), static, d)
    check_generator(call.generator, JAX, CPU)
    _check_devices(call.mu, call.sigma)
    _words(call, 0 if call.seed is None else call.seed, d)  # Raises.
    plan = _Plan(call, static, d)
    result = run(plan, call)
    # A key made before its types were registered has the state of another library.
    if not _register(BY_TYPE, call.mu, call.sigma) | _register(BY_SEED, call.seed) and key is not None:
        PLANS.put(key, plan)
    return result


def _register(libraries: dict[type, Library], *arguments: Any) -> bool:
    """Make later calls with arguments of these types JAX's; returns whether a type is new."""
    new = {type(x) for x in arguments if is_jax(x)} - libraries.keys()
    for kind in new:
        keep_type(libraries, kind, JAX)
    return bool(new)


class _Plan:
    """An eager call without values, seed, offset and window: see `multisample._plan.Planned`."""

    __slots__ = ("_call", "_checked", "_d", "_is_valid", "_last_column", "_last_row", "_programs", "_static")

    def __init__(self, call: Call, static: Static, d: int) -> None:
        from multisample.backends.kernels.cpu.kernel import value_kernel  # Numba takes half a second to import.

        # A plan keeps no arrays and no generators alive.
        self._call = call._replace(mu=None, sigma=None, seed=None, generator=None)
        self._static, self._d = static, d
        # By whether the first column is aligned. `PROGRAMS` owns the programs, and may drop them.
        self._programs: list[Callable[[], Any]] = [_no_program, _no_program]
        self._last_row, self._last_column = ROWS - d, COLUMNS - static.n
        self._is_valid = value_kernel("float64" if static.dtype == "float64" else "float32")
        # Arrays in host memory are always checked.
        self._checked = tuple(is_jax(x) and (bool(call.validate) or _is_on_host(x)) for x in (call.mu, call.sigma))

    def run(
        self, mu: Any, sigma: Any, weights: Any, matrix: Any, seed: Any, generator: Any, dim_offset: Any,
        sample_offset: Any,
    ) -> tuple[Any]:  # fmt: skip
        """See `multisample._plan.Planned`."""
        if seed is not None:
            words = self._words(seed, dim_offset, sample_offset)
            self._check_values(mu, sigma)
            return (self._draw(mu, sigma, words, sample_offset),)
        generator = DEFAULT_GENERATOR if generator is None else generator
        if generator.graph_safe:
            return (self._draw_counted(mu, sigma, generator, dim_offset, sample_offset),)
        self._words(0, dim_offset, sample_offset)  # Raises before the generator advances.
        self._check_values(mu, sigma)
        seed, offset = generator._take()
        try:
            words = self._words(Key(seed, offset), dim_offset, sample_offset)
            return (self._draw(mu, sigma, words, sample_offset),)
        except BaseException:
            generator._put_back(seed, offset)
            raise

    def _draw(self, mu: Any, sigma: Any, words: Words, sample_offset: Any) -> Any:
        if not is_jax(mu):
            mu = _operand("mu", mu, self._static.dtype)
        if not is_jax(sigma):
            sigma = _operand("sigma", sigma, self._static.dtype)
        aligned = _is_aligned(sample_offset)
        program = self._programs[aligned]()
        if program is None:
            program = _program(self._static._replace(aligned=aligned), self._d)
            self._programs[aligned] = weakref.ref(program)
        if not jax.config.jax_disable_jit:
            return program(mu, sigma, words)
        with jax.disable_jit(False):
            return program(mu, sigma, words)

    def _draw_counted(self, mu: Any, sigma: Any, generator: Any, dim_offset: int, sample_offset: int) -> Any:
        """With a generator whose offset is in device memory: by another library."""
        from ..adopted import run_adopted

        call = self._call._replace(
            mu=mu, sigma=sigma, n=self._static.n, dtype=self._static.dtype, generator=generator, dim_offset=dim_offset,
            sample_offset=sample_offset,
        )  # fmt: skip
        device = JAX.device("mu, sigma", mu if is_jax(mu) else sigma)
        return run_adopted(call, JAX, device, choose(call.backend, "jax", device.kind))

    def _words(self, seed: Any, dim_offset: Any, sample_offset: Any) -> Words:
        number, offset = seed if type(seed) is Key else (seed, 0)
        if not (
            type(number) is type(offset) is type(dim_offset) is type(sample_offset) is int
            and 0 <= number < WORD_64
            and 0 <= offset < WORD_64
            and 0 <= dim_offset <= self._last_row
            and 0 <= sample_offset <= self._last_column
        ):
            call = self._call._replace(dim_offset=dim_offset, sample_offset=sample_offset)
            return _words(call, seed, self._d)
        halves = np.frombuffer(_pack_seed(number >> 32, number & 0xFFFF_FFFF), np.uint32)
        if offset == dim_offset == sample_offset == 0:
            return Words(halves, None)
        return Words(halves, np.frombuffer(_pack_offsets(offset, dim_offset, sample_offset), np.uint32))

    def _check_values(self, mu: Any, sigma: Any) -> None:
        """ValueError for values that no normal distribution has."""
        if self._checked[0]:
            vector = self._vector(mu)
            if not self._is_valid(vector, _EMPTY[vector.dtype.itemsize], None):
                check_values(HOST, {"mu": np.asarray(mu)}, self._static.dtype)
        if self._checked[1]:
            vector = self._vector(sigma)
            if not self._is_valid(_EMPTY[vector.dtype.itemsize], vector, None):
                check_values(HOST, {"sigma": np.asarray(sigma)}, self._static.dtype)

    def _vector(self, x: Any) -> HostArray:
        vector = np.asarray(x)
        real = np.float64 if self._static.dtype == "float64" else np.float32
        return vector if vector.ndim == 1 and vector.dtype == real else rounded(vector.reshape(-1), real)


def _no_program() -> None:
    """A weak reference to nothing."""


_pack_seed, _pack_offsets = struct.Struct("=2I").pack, struct.Struct("<3Q").pack
_EMPTY = {4: np.empty(0, np.float32), 8: np.empty(0, np.float64)}


def _is_on_host(x: Any) -> bool:
    return bool(x.is_fully_addressable) and next(iter(x.devices())).platform == "cpu"


# --- Checks ---------------------------------------------------------------------------------------


def _static(call: Call) -> tuple[Static, int]:
    """What a program is compiled for, and the number of dimensions."""
    if isinstance(call.n, jax.core.Tracer):
        raise TypeError(
            "n: expected an integer that is known while JAX traces, as it is a length of the result, got"
            f" {describe(call.n)}: pass it as a static argument"
        )
    n = checked_integer("n", call.n, 0, COLUMNS + 1)
    check_choices(call)
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
        n, dtype, call.layout, call.noise == "shared", bool(call.antithetic), bool(call.fast_math), call.backend,
        _is_aligned(call.sample_offset),
    )  # fmt: skip
    return static, d


def _is_aligned(sample_offset: Any) -> bool:
    return type(sample_offset) is int and sample_offset % 8 == 0


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


def _check_devices(mu: Any, sigma: Any) -> None:
    """ValueError if JAX would not bring the two together."""
    if is_jax(mu) and is_jax(sigma) and mu.committed and sigma.committed and mu.devices() != sigma.devices():
        first, second = (", ".join(sorted(map(str, x.devices()))) for x in (mu, sigma))
        raise ValueError(f"sigma: expected it on the device of mu, {first}, got {second}")


def _words(call: Call, seed: Any, d: int) -> Words:
    words = words_of(seed, call.dim_offset, call.sample_offset)
    if not isinstance(call.dim_offset, jax.core.Tracer):
        check_rows(int(call.dim_offset), d)
    if not isinstance(call.sample_offset, jax.core.Tracer) and int(call.sample_offset) + int(call.n) > COLUMNS:
        raise ValueError(f"n: expected sample_offset + n <= 2**34, got {call.sample_offset} + {call.n}")
    return words


def _operand(name: str, x: Any, dtype: str) -> Any:
    """`mu` or `sigma` for a program: a JAX array as it is, anything else as a copy in a checked NumPy array."""
    if is_jax(x):
        return x
    check_values(HOST, {name: x if is_number(x) else HOST.normalized(name, x)}, dtype)
    real = np.float64 if dtype == "float64" else np.float32
    return np.array(rounded(np.asarray(float(x) if is_number(x) else x), real))


# --- Programs -------------------------------------------------------------------------------------


def _traced(mu: Any, sigma: Any, words: Words, static: Static, d: int) -> Any:
    """The result in the program that is being traced."""
    if d == 0 or static.n == 0:
        return jnp.zeros((d, static.n) if static.layout == "dn" else (static.n, d), static.dtype)
    return sample_matrix(_vector(mu, d, static.dtype), _vector(sigma, d, static.dtype), *operands(words), static=static)


def _vector(x: Any, d: int, dtype: str) -> Any:
    """`mu` or `sigma` in the computing type, shape (d,)."""
    x = jnp.asarray(x).astype(jnp.float64 if dtype == "float64" else jnp.float32)
    return jnp.broadcast_to(x, (d,)) if x.ndim == 0 else x.reshape(d)


def _program(static: Static, d: int) -> Any:
    def draw(mu: Any, sigma: Any, words: Words) -> Any:
        return _traced(mu, sigma, words, static, d)

    # An empty result depends on no argument, but belongs on their device.
    return jitted((_traced, static, d), draw, keep_unused=True)
