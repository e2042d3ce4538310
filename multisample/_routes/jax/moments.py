"""`weighted_moments` with arrays, keys or tracers of JAX: a custom call sums the noise, and JAX scales the sums.

The sums depend on the weights alone, so that JAX differentiates the result in `mu` and `sigma`. The call is not
partitioned: in a program for several devices, each has all weights, or takes its own window in `jax.shard_map`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from multisample.backends.launch import Operation

from ..._backends import choose
from ..._call import Call, checked_order
from ..._checks.values import check_values
from ..._libraries import HOST, is_number, library_of
from ..._libraries.jax import is_jax
from ..._libraries.library import NOUNS, counted_as
from ..._tracing import SEEDLESS, is_traced_by_jax
from . import _is_on_host, _operand, _static, _vector, _words, handlers
from .keys import Words, operands
from .partitioning import PLATFORMS, Static, check_type, computing_type
from .programs import jitted, run_alone

__all__ = ["sum_jax"]


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
        handlers.register()
        real = computing_type(static.dtype)
        check_type(weights, real)
        backend = choose(static.backend, "jax", PLATFORMS[platform]).name
        options = handlers.Options(
            backend, real.name, "dn", static.shared_noise, static.antithetic, static.fast_math, False, len(words) == 2,
            *[False] * 4,
        )  # fmt: skip
        results = [jax.ShapeDtypeStruct((d,), real)] * order
        if platform == "cuda":
            size = handlers.scratch_size(options, Operation.moments, 0, d, weights.shape[0], order)
            results.append(jax.ShapeDtypeStruct((8 * size,), np.uint8))
        else:
            handlers.prepare_on_host(options, Operation.moments)
        call = jax.ffi.ffi_call(handlers.TARGETS[Operation.moments], results)
        encoded = options.encoded(order, d, weights.shape[0])
        return list(call(weights, *words, options=encoded)[:order])

    return lowered


for _platform in PLATFORMS:
    mlir.register_lowering(moments_p, mlir.lower_fun(_lowered(_platform), multiple_results=True), platform=_platform)


moments_p.def_impl(functools.partial(run_alone, moments_p))
