"""`weighted_moments` with arrays, keys or tracers of JAX: a custom call sums the noise, and JAX scales the sums.

The sums depend on the weights alone, so that JAX differentiates the result in `mu` and `sigma`. The call is not
partitioned: in a program for several devices, each has all weights, or takes its own window in `jax.shard_map`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from multisample.backends import generic, registry
from multisample.backends.contract import MemoryLauncher
from multisample.backends.launch import HOST as HOST_DEVICE
from multisample.backends.launch import ElementType, Launch, Operation, pack
from multisample.backends.memory.host import array_at
from multisample.backends.system import xla_ffi

from ..._backends import choose
from ..._call import Call, checked_order
from ..._checks.values import check_values, number_vector
from ..._libraries import HOST, is_number, library_of
from ..._libraries.jax import is_jax
from ..._libraries.library import NOUNS, counted_as
from ..._plan import PlanCache
from ..._tracing import SEEDLESS, is_traced_by_jax
from . import _is_on_host, _operand, _static, _vector, _words, native
from .handlers import Road, _addresses, _read_words, register_target
from .keys import Words, operands
from .partitioning import PLATFORMS, Static, check_type, computing_type
from .programs import jitted, run_alone

__all__ = ["register", "sum_jax"]

_TARGET = "multisample_moments"
"""(weights, seed, offsets) -> the sums of w z and of w z^2, shapes (d,) and (d,), and on CUDA scratch memory.

Weights have shape (n,). Seed and offsets are those of `keys.operands`; calls without offsets have one operand less.
"""


def sum_jax(call: Call) -> tuple[Any, ...]:
    """The result of a call with an array or a key of JAX, or with a traced value."""
    order, weights = checked_order(call), call.weights
    if is_number(weights) or (not is_jax(weights) and library_of("weights", weights) is not HOST):
        found = "a number" if is_number(weights) else NOUNS[library_of("weights", weights).name]
        raise TypeError(f"weights: expected an array of JAX or NumPy where others are JAX's, got {found}")
    if not is_jax(weights):
        weights = HOST.normalized("weights", weights)
    counted_as("weights", weights.dtype.name)
    shape = np.shape(weights)
    if len(shape) != 1 or shape[0] == 0:
        raise ValueError(f"weights: expected shape (n,), n being at least 1, got {shape}")
    call = call._replace(n=shape[0])
    static, d = _static(call)
    if call.seed is None:
        raise ValueError(SEEDLESS) if is_traced_by_jax() else TypeError("seed: expected an integer or a key, got None")
    words = _words(call, call.seed, d)
    arguments = {"weights": weights, "mu": call.mu, "sigma": call.sigma}
    tracing = is_traced_by_jax() or any(isinstance(x, jax.core.Tracer) for x in arguments.values())
    for name, x in arguments.items():
        if not tracing and is_jax(x) and _is_on_host(x):
            check_values(HOST, {name: np.asarray(x)}, static.dtype)
        elif not is_jax(x):
            arguments[name] = _operand(name, x, static.dtype)
    if tracing:
        return _traced(arguments["weights"], arguments["mu"], arguments["sigma"], words, static, d, order)
    results: tuple[Any, ...] = _program(static, d, order)(*arguments.values(), words)
    return results


def _traced(weights: Any, mu: Any, sigma: Any, words: Any, static: Static, d: int, order: int) -> tuple[Any, ...]:
    real = computing_type(static.dtype)
    weights, mu, sigma = (
        jnp.asarray(weights).astype(real),
        _vector(mu, d, static.dtype),
        _vector(sigma, d, static.dtype),
    )
    if d == 0:
        return tuple(jnp.zeros(0, static.dtype) for _ in range(order))
    first, *second = moments_p.bind(weights, *operands(words), static=static, d=d, order=order)
    # In two steps, which round little.
    padded = jnp.pad(weights, (0, -weights.shape[0] % 256)).reshape(-1, 256)
    moments = [mu * padded.sum(1).sum() + sigma * first, *(sigma * sigma * x for x in second)]
    return tuple(x.astype(static.dtype) for x in moments)


def _program(static: Static, d: int, order: int) -> Any:
    def sum_up(weights: Any, mu: Any, sigma: Any, words: Words) -> tuple[Any, ...]:
        return _traced(weights, mu, sigma, words, static, d, order)

    return jitted((_traced, static, d, order), sum_up, keep_unused=True)


# --- The primitive --------------------------------------------------------------------------------

moments_p = Primitive("multisample_moments")
moments_p.multiple_results = True


@moments_p.def_abstract_eval
def _type(weights: Any, *words: Any, static: Static, d: int, order: int) -> Any:
    vector = weights.update(shape=(d,), dtype=np.dtype(computing_type(static.dtype)), weak_type=False)
    return [vector] * order


def _jvp(primals: Any, tangents: Any, **static: Any) -> Any:
    sums = moments_p.bind(*primals, **static)
    if type(tangents[0]) is ad.Zero:
        return sums, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in sums]
    return sums, moments_p.bind(tangents[0], *primals[1:], **static)


def _transpose(cts: Any, weights: Any, *words: Any, **static: Any) -> Any:
    if all(type(ct) is ad.Zero for ct in cts):
        return [ad.Zero(weights.aval), *[None] * len(words)]
    raise ValueError(
        "weights: expected no gradient, since it needs the whole sample, got weights that depend on an argument of"
        " jax.grad: use jax.lax.stop_gradient, or draw the sample with multisample.sample"
    )


def _batch(operands: Any, axes: Any, **static: Any) -> Any:
    """The elements of a batch, one after another."""
    mapped = [jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes, strict=True) if axis is not None]

    def one(elements: Any) -> Any:
        left = iter(elements)
        of_element = [x if axis is None else next(left) for x, axis in zip(operands, axes, strict=True)]
        return moments_p.bind(*of_element, **static)

    results = jax.lax.map(one, mapped)
    return results, [0] * len(results)


ad.primitive_jvps[moments_p] = _jvp
ad.primitive_transposes[moments_p] = _transpose
batching.primitive_batchers[moments_p] = _batch


def _lowered(platform: str) -> Callable[..., Any]:
    def lowered(weights: Any, *words: Any, static: Static, d: int, order: int) -> Any:
        register()
        check_type(weights, computing_type(static.dtype))
        backend = choose(static.backend, "jax", PLATFORMS[platform]).name
        real = computing_type(static.dtype).name
        options = _Options(
            backend, real, static.common_noise, static.antithetic, static.fast_math, len(words) == 2, order, d,
            weights.shape[0],
        )  # fmt: skip
        results = [jax.ShapeDtypeStruct((d,), real)] * order
        if platform == "cuda":
            size = _memory_launcher(options, 0).scratch_size
            results.append(jax.ShapeDtypeStruct((8 * max(1, size),), np.uint8))
        else:
            _host_runner(options)  # Compiles, so that errors come before the program runs.
        call = jax.ffi.ffi_call(_TARGET, results)
        return list(call(weights, *words, options=options.encoded())[:order])

    return lowered


for _platform in PLATFORMS:
    mlir.register_lowering(moments_p, mlir.lower_fun(_lowered(_platform), multiple_results=True), platform=_platform)


moments_p.def_impl(functools.partial(run_alone, moments_p))


# --- Handlers -------------------------------------------------------------------------------------


class _Options(NamedTuple):
    """The static part of a custom call, which is a string in the program."""

    backend: str
    real: str
    common_noise: bool
    antithetic: bool
    fast_math: bool
    has_offsets: bool
    order: int
    d: int
    n: int

    def encoded(self) -> str:
        return ",".join(str(int(x)) if isinstance(x, bool) else str(x) for x in self)


def _decoded(string: bytes) -> _Options:
    backend, real, *fields = string.decode().rsplit(",", len(_Options._fields) - 1)
    return _Options(backend, real, *(field == "1" for field in fields[:4]), *map(int, fields[4:]))


def _launch(options: _Options, device: int) -> Launch:
    """The moments of mean 0 and standard deviation 1, which are numbers, without addresses."""
    return Launch(
        weights_stride=8 if options.real == "float64" else 4, weights_type=ElementType[options.real], rows=options.d,
        columns=options.n, type=ElementType[options.real], operation=Operation.moments, results=options.order,
        common_noise=options.common_noise, antithetic=options.antithetic, fast_math=options.fast_math, device=device,
    )  # fmt: skip


def _memory_launcher(options: _Options, device: int) -> MemoryLauncher:
    return generic.memory_launcher(registry.find(options.backend), _launch(options, device), options.has_offsets)


def _host_runner(options: _Options) -> Callable[..., None]:
    """``run(weights, seed, offsets, first, second)``, all addresses in host memory."""
    backend, d, n, real = registry.find(options.backend), options.d, options.n, options.real
    launcher = generic.launcher(backend, _launch(options, HOST_DEVICE))
    size = np.dtype(real).itemsize

    def vector(address: int, length: int = d) -> Any:
        return array_at(address, (length,), (size,), real) if launcher.takes_arrays else address

    mu: Any = 0.0
    sigma: Any = 1.0
    if launcher.takes_arrays:
        mu, sigma = (number_vector(x, d, np.dtype(real)) for x in (mu, sigma))

    def run(weights: int, seed: int, offsets: int, first: int, second: int | None = None) -> None:
        seed, offset, first_row, first_column = _read_words(seed, offsets, d, n)
        squares = vector(second) if second else None if launcher.takes_arrays else 0
        geometry = None if launcher.geometry is None else launcher.geometry(0, first_column)
        launcher.run(
            geometry, mu, sigma, vector(weights, n), 0, vector(first), squares, seed, offset, 0, first_row,
            first_column, 0, 0,
        )  # fmt: skip

    return run


def _device_runner(options: _Options, device: int) -> Callable[..., None]:
    """``run(weights, seed, offsets, first, ..., scratch, stream)``, all addresses in memory of the device."""
    launch = _memory_launcher(options, device).run

    def run(weights: int, seed: int, offsets: int, *results: int) -> None:
        first, *second, scratch, stream = results
        launch(0.0, 1.0, weights, 0, first, second[0] if second else 0, seed, offsets, stream, scratch)

    return run


_RUNNERS: PlanCache[Callable[..., None]] = PlanCache(4096)


def _on_host(frame: xla_ffi.Frame) -> None:
    string = frame.string()
    run = _RUNNERS.get(string)
    if run is None:
        run = _host_runner(_decoded(string))
        _RUNNERS.put(string, run)
    run(*_addresses(frame.operands(), frame.results(), 3))


def _on_device(frame: xla_ffi.Frame) -> None:
    key = frame.string(), frame.device()
    run = _RUNNERS.get(key)
    if run is None:
        run = _device_runner(_decoded(key[0]), key[1])
        _RUNNERS.put(key, run)
    run(*_addresses(frame.operands(), frame.results(), 3), frame.stream())


def _state(string: bytes, device: int) -> native.State:
    """See `handlers._state`."""
    options = _decoded(string)
    c_function = getattr(registry.find(options.backend), "c_function", None)
    if c_function is None:
        return native.State()
    launch = _launch(options, device)._replace(sigma=1.0)
    return native.State(c_function(launch), launch=pack(launch))


def register() -> None:
    """Register the handlers of weighted moments."""
    states = (functools.partial(_state, device=device) for device in (HOST_DEVICE, 0))
    roads = map(Road, states, (_on_host, _on_device))
    register_target(_TARGET, Operation.moments, dict(zip(native.PLATFORMS, roads, strict=True)))
