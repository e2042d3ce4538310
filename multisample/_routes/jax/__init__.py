"""Calls with arrays, keys or tracers of JAX.

Each call becomes one XLA custom call. It joins the program that JAX is tracing, or runs in a program of its own, which
is compiled for the static arguments and cached.
"""

import functools
import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import canonicalize_dtype

from multisample.backends.kernels.cpu.floating_point import with_default_floats
from multisample.backends.launch import Operation
from multisample.backends.memory.host import rounded

from ..._arguments import describe, dtype_name, rounded_once
from ..._backends import check_name, choose
from ..._checks.operands import check_arrays, common_length, common_shape, count_weights, promoted, result_shape
from ..._checks.values import check_values
from ..._checks.window_and_options import (
    check_choices,
    check_rows,
    checked_count,
    checked_order,
    count_of,
    exceeds,
)  # fmt: skip
from ..._libraries import BY_SEED, BY_TYPE, HOST, is_number, library_called, library_of
from ..._libraries.jax import JAX, is_jax, is_on_host
from ..._libraries.library import CPU, NOUNS, Library, counted_as
from ..._operations import COLUMNS, Call, vectors_of
from ..._plan import PLANS, run
from ..._randomness.generator import DEFAULT_GENERATOR, WORD_64, Key
from ..._randomness.generator_argument import check_generator, counter_on
from ..._tracing import SEEDLESS, is_symbol, is_traced_by_jax
from .keys import Words, batch_length, operands_of, words_of
from .primitives import bind
from .programs import program_of
from .static import Static


def run_jax(call: Call, key: Hashable) -> Any:
    """The result of a call with an array or a key of JAX, or with a traced value; `key` is that of a plan."""
    call = call._replace(**{name: x if is_number(x) else as_array(name, x) for name, x in vectors_of(call).items()})
    static = _static(call)
    vectors = vectors_of(call)
    if is_traced_by_jax() or any(isinstance(x, jax.core.Tracer) for x in vectors.values()):
        _check_traced(call)
        operands = [_operand(name, x, static) for name, x in vectors.items()]
        return draw(static, _words(call.seed, (call.dim_offset, call.sample_offset), static), *operands)
    if call.seed is None and call.operation == Operation.moments:
        raise TypeError("seed: expected an integer or a key, got None")
    check_generator(call.generator, JAX, CPU)
    _check_devices(call.mu, call.sigma)
    plan = _Plan(call, static)
    result = run(plan, call)
    new = _register(BY_TYPE, *vectors.values()) | _register(BY_SEED, call.seed)
    # Keep no plan if a type is new, or if `key` was made for the library of NumPy weights.
    if key is not None and not new and static.seeds is None and (call.weights is None or is_jax(call.weights)):
        PLANS.put(key, plan)
    return result


def as_array(name: str, x: Any) -> Any:
    """An array of JAX as it is, lists as NumPy's; TypeError for an array of another library."""
    if is_jax(x):
        return x
    library = library_of(name, x)
    if library is not HOST:
        raise TypeError(f"{name}: expected an array of JAX or NumPy where others are JAX's, got {NOUNS[library.name]}")
    return HOST.normalized(name, x)


def _register(libraries: dict[type, Library], *arguments: Any) -> bool:
    """Register the types of these arguments as JAX's, for later calls; returns whether a type is new."""
    new = {type(x) for x in arguments if is_jax(x)} - libraries.keys()
    libraries.update(dict.fromkeys(new, JAX))
    return bool(new)


class _Plan:
    """The plan of eager calls, which differ in values, seed, offset and window: see `multisample._plan.Planned`."""

    def __init__(self, call: Call, static: Static) -> None:
        from multisample.backends.kernels.cpu.kernel import value_kernel  # Numba takes half a second to import.

        vectors = vectors_of(call)
        self._names = tuple(vectors)
        self._static = static
        # The second program is for an aligned first column.
        self._programs = [program_of(draw, static._replace(aligned=aligned)) for aligned in (False, True)]
        self._nothing = np.empty(0, static.computing_type)
        self._is_valid = value_kernel(static.computing_type.name, call.weights is not None)
        # All calls of a plan have the same types.
        self._converts = not all(map(is_jax, vectors.values()))
        # The words of the latest call on a GPU, as bytes. None before the first call; empty after a generator's call.
        self._latest: tuple[bytes, ...] | None = None
        # Arrays in host memory are always checked.
        self._checked = [
            k for k, x in enumerate(vectors.values()) if is_jax(x) and (bool(call.validate) or is_on_host(x))
        ]

    @with_default_floats
    def run(self, mu: Any, sigma: Any, weights: Any, matrix: Any, seed: Any, generator: Any, *window: Any) -> Any:
        vectors = (mu, sigma) if weights is None else (mu, sigma, weights)
        words = _words(0 if seed is None else seed, window, self._static)
        self._check_values(vectors)
        if seed is not None:
            return (self._draw(vectors, words, window),)
        generator = DEFAULT_GENERATOR if generator is None else generator
        self._latest = ()  # A generator's words do not repeat.
        if generator.graph_safe:
            return (self._draw_counted(vectors, generator, window),)
        seed, offset = generator._take()
        try:
            return (self._draw(vectors, _words(Key(seed, offset), window, self._static), window),)
        except BaseException:
            generator._put_back(seed, offset)
            raise

    def _draw(self, vectors: Sequence[Any], words: Any, window: Sequence[Any]) -> Any:
        if self._converts:
            named = zip(self._names, vectors, strict=True)
            vectors = [x if is_jax(x) else _operand(name, x, self._static) for name, x in named]
        if (device := _gpu_of(vectors)) is not None:
            words = self._on_gpu(words, device)
        return self._programs[_is_aligned(window[1])](words, *vectors)

    def _on_gpu(self, words: Words, device: Any) -> Words | tuple[jax.Array, ...]:
        """`words` in the device's memory, if the host knows them.

        The words of the first call are copied, and so are words that repeat; the copies are kept. JAX takes longer to
        copy words than to draw, so other words are passed as single bytes, all of which the device has already. Bytes
        need a second program, which the first call with other words compiles.
        """
        texts = tuple(x.tobytes() for x in words if type(x) is np.ndarray and x.ndim == 1)
        if len(texts) < sum(x is not None for x in words):
            return words
        latest, self._latest = self._latest, texts
        if latest is None or latest == texts:
            return Words(_copied(texts[0], device), _copied(texts[1], device) if texts[1:] else None)
        return tuple(_byte(value, device) for text in texts for value in text)

    def _draw_counted(self, vectors: Sequence[Any], generator: Any, window: Sequence[Any]) -> Any:
        """Draw with a generator whose offset is in device memory. The host waits for the device, then reads it."""
        device = JAX.device("mu, sigma", next(filter(is_jax, vectors)))
        library = library_called(choose(self._static.backend, "jax", device.kind).host_library)
        counter = counter_on(generator, library, device, 0)
        with counter.lock:
            offset = counter.value
            words = _words(Key(generator.seed, offset), window, self._static)
            result = self._draw(vectors, words, window)
            counter.value = (offset + 1) % WORD_64
        return result

    def _check_values(self, vectors: Sequence[Any]) -> None:
        """Raise ValueError for an invalid mean, standard deviation or weight."""
        checked = [self._nothing] * len(vectors)
        for k in self._checked:
            vector = np.asarray(vectors[k])
            is_plain = vector.ndim == 1 and vector.dtype == self._nothing.dtype
            checked[k] = vector if is_plain else rounded(vector.reshape(-1), self._nothing.dtype)
        if not self._is_valid(*checked, *(None,) * (3 - len(checked))):
            check_values(HOST, {self._names[k]: np.asarray(vectors[k]) for k in self._checked}, self._static.dtype)


def _static(call: Call) -> Static:
    """What a program is compiled for."""
    order, n, batch = checked_order(call), call.n, batch_length(call.seed)
    check_arrays(call)
    if call.operation == Operation.moments:
        _element_type("weights", call.weights)
        n = count_weights(np.shape(call.weights), batch)
        if is_symbol(n):
            raise TypeError(f"weights: expected a length that is known while JAX traces, got {n}")
    if isinstance(n, jax.core.Tracer):
        raise TypeError(
            "n: expected an integer that is known while JAX traces, as it is a length of the result, got"
            f" {describe(n)}: pass it as a static argument"
        )
    n = checked_count(n)
    check_choices(call)
    check_name(call.backend)
    if call.out is not None:
        raise TypeError(f"out: expected None with JAX, whose arrays are immutable, got {describe(call.out)}")
    vectors = {name: x for name, x in (("mu", call.mu), ("sigma", call.sigma)) if not is_number(x)}
    types = {name: _element_type(name, x) for name, x in vectors.items()}
    shapes = {name: np.shape(x) for name, x in vectors.items()}
    is_sample = call.operation == Operation.sample
    dims = common_shape(shapes, batch) if is_sample else (common_length(shapes, batch),)
    strong = [types[name] for name, x in vectors.items() if not _is_weak(x)]
    dtype = promoted(strong or list(types.values())) if call.dtype is None else dtype_name(call.dtype)
    try:
        JAX.check_dtype(dtype)
    except TypeError as error:
        if call.dtype is not None:
            raise
        wide = ", ".join(name for name, found in types.items() if found == "float64")
        raise TypeError(f"{error}; or pass dtype='float32', as {wide} is float64") from None
    return Static(
        call.backend, dtype, call.layout, call.noise == "shared", antithetic=bool(call.antithetic),
        fast_math=bool(call.fast_math), aligned=_is_aligned(call.sample_offset), operation=call.operation,
        d=math.prod(dims), n=count_of(n), order=order, seeds=batch, dims=dims,
        result=result_shape(dims, call._replace(n=n), batch),
    )  # fmt: skip


def _is_aligned(sample_offset: Any) -> bool:
    return type(sample_offset) is int and sample_offset % 8 == 0


def _element_type(name: str, x: Any) -> str:
    """The type that `mu` or `sigma` brings to promotion."""
    if is_jax(x):
        return counted_as(name, x.dtype.name)
    counts_as = HOST.describe(name, x).counts_as
    return canonicalize_dtype(counts_as).name if np.shape(x) == () else counts_as  # As JAX narrows NumPy's scalars.


def _is_weak(x: Any) -> bool:
    """Whether JAX ignores the type of `x` beside a vector of floats: a result of Python's numbers, or one integer."""
    if is_jax(x) and x.aval.weak_type:
        return True
    return np.shape(x) == () and jnp.issubdtype(x.dtype, jnp.integer)


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
    """ValueError if the two arrays are committed to different devices."""
    if is_jax(mu) and is_jax(sigma) and mu.committed and sigma.committed and mu.devices() != sigma.devices():
        first, second = (", ".join(sorted(map(str, x.devices()))) for x in (mu, sigma))
        raise ValueError(f"sigma: expected it on the device of mu, {first}, got {second}")


def _words(seed: Any, window: Sequence[Any], static: Static) -> Words:
    dim_offset, sample_offset = window
    words = words_of(seed, dim_offset, sample_offset)
    if not isinstance(dim_offset, jax.core.Tracer):
        check_rows(int(dim_offset), static.d)
    if not isinstance(sample_offset, jax.core.Tracer) and exceeds(int(sample_offset) + static.n, COLUMNS):
        raise ValueError(f"n: expected sample_offset + n <= 2**34, got {sample_offset} + {static.n}")
    return words


def _operand(name: str, x: Any, static: Static) -> Any:
    """`mu` or `sigma` for a program: a JAX array as it is, anything else as a copy in a checked NumPy array."""
    if is_jax(x):
        return x
    check_values(HOST, {name: x if is_number(x) else HOST.normalized(name, x)}, static.dtype)
    return np.array(rounded(np.asarray(rounded_once(x, static.dtype) if is_number(x) else x), static.computing_type))


def _vectors(x: Any, dims: tuple[int, ...], static: Static) -> Any:
    """A vector for each seed, or one for all, with the elements of `x` broadcast to the shape `dims`."""
    x = jnp.asarray(x).astype(static.computing_type)
    lead = () if static.seeds is None or x.ndim < 2 else x.shape[:1]
    own = x.shape[len(lead) :]
    if own[:1] != dims:  # Shape (d, 1) stands for (d,).
        x = jnp.broadcast_to(x.reshape(*lead, *(1,) * (len(dims) - len(own)), *own), (*lead, *dims))
    x = x.reshape(*lead, math.prod(dims))
    return x if lead else x[None]  # JAX refuses to do it in one reshape if the mesh is explicit.


def draw(static: Static, words: Words | tuple[jax.Array, ...], *operands: Any) -> Any:
    """Draw in a program of JAX. Profiles show this name. `words` may be the bytes of a seed and offsets."""
    if not isinstance(words, Words):
        numbers = jax.lax.bitcast_convert_type(jnp.stack(words).reshape(-1, 4), jnp.uint32)
        words = Words(numbers[:2], numbers[2:] if len(numbers) > 2 else None)
    vectors = dict(zip(("mu", "sigma", "weights"), operands, strict=False))
    shapes = {"mu": static.dims, "sigma": static.dims, "weights": (static.n,)}
    reads = (_vectors(vectors[name], shapes[name], static) for name in static.reads)
    results = bind(static, *reads, *operands_of(words))
    if static.seeds is None:
        results = [x[0] for x in results]
    return results[0].reshape(static.result) if static.operation == Operation.sample else tuple(results)


def _gpu_of(vectors: Sequence[Any]) -> Any:
    """The GPU that has the vectors, or None."""
    devices = next((x.devices() for x in vectors if is_jax(x)), ())
    device = next(iter(devices)) if len(devices) == 1 else None
    return device if device is not None and device.platform == "gpu" else None


@functools.lru_cache(1024)
def _copied(text: bytes, device: Any) -> jax.Array:
    with jax.default_device(device):
        return jax.device_put(np.frombuffer(text, np.uint32))


@functools.cache
def _byte(value: int, device: Any) -> jax.Array:
    with jax.default_device(device):
        return jax.device_put(np.uint8(value))
