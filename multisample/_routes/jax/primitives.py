"""The primitives of JAX, one for each operation: `Static` says how they differ.

A sample, ``x = mu + sigma * z``, is linear in mu and sigma, its gradient in the cotangent, moments in the weights. A
tangent is thus a call with the same noise, and a cotangent of a sample becomes two sums over noise drawn again: no
derivative keeps the matrix. The tangent of moments in mu needs the sum of the weights, that in sigma sums of the noise.
Operands and results have an axis for the batch in front: see `static.AXES`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from multisample.backends.launch import Operation

from .handlers import TARGETS
from .partitioning import PLATFORMS, batch_of, lowered
from .programs import run_alone
from .static import Static

try:
    from jax._src.dispatch import prim_requires_devices_during_lowering as needs_devices
except ImportError:  # It is private. Without it, programs for one device still work.
    needs_devices = set()

_PRIMITIVES = {operation: Primitive(name) for operation, name in TARGETS.items()}


def bind(static: Static, *operands: Any) -> list[Any]:
    """The results for the operands of a custom call, each with an axis for the batch in front."""
    results: list[Any] = _PRIMITIVES[static.operation].bind(*_alike(*operands), static=static)
    return results


def _alike(*operands: Any) -> list[Any]:
    """The operands as they are, but in `jax.shard_map` marked as varying over the same axes of the mesh."""
    axes = [varying(x) for x in operands]
    every = frozenset().union(*axes)
    return [
        x if own == every else jax.lax.pcast(x, tuple(sorted(every - own, key=str)), to="varying")
        for x, own in zip(operands, axes, strict=True)
    ]


def varying(x: Any) -> frozenset[Any]:
    """The axes of the mesh of `jax.shard_map` over which `x` varies."""
    axes: frozenset[Any] = jax.typeof(x).manual_axis_type.varying
    return axes


def _types(*avals: Any, static: Static) -> list[Any]:
    """The types of the results. With explicit sharding, they have the mesh axes of the operands."""
    batch, names = batch_of(*avals), static.names(len(avals))
    places: dict[str, Any] = {}
    for name, x in zip(names, avals, strict=True):
        for axis, place, length in zip(("b", *static.axes(name)), x.sharding.spec, x.shape, strict=False):
            if place is None or (axis == "b" and length != batch):
                continue
            if static.operation == Operation.gradient and axis == "j":
                raise TypeError(
                    "mu, sigma: expected a cotangent that is not sharded over samples in explicit sharding, got"
                    f" {x.sharding.spec}; take the gradient in jax.shard_map, or of a jax.sharding.auto_axes function"
                )
            if places.setdefault(axis, place) != place:
                argument = "vmap" if axis == "b" else "mu, sigma"
                raise TypeError(
                    f"{argument}: expected the same sharding of mu and sigma, got {places[axis]} and {place}"
                )
    mesh = avals[0].sharding.mesh
    return [
        avals[0].update(
            shape=(batch, *static.shape(name)), dtype=static.type_of(name), weak_type=False,
            sharding=NamedSharding(mesh, PartitionSpec(*(places.get(axis) for axis in ("b", *static.axes(name))))),
        )
        for name in static.writes
    ]  # fmt: skip


def _jvp(primals: Any, tangents: Any, *, static: Static) -> Any:
    dots, words = tangents[: len(static.reads)], primals[len(static.reads) :]
    if static.operation == Operation.perturb:
        return _perturbed_jvp(primals, dots, static)
    results = bind(static, *primals)
    if static.operation == Operation.moments:
        return results, _tangents_of_moments(primals, dots, static, results)
    return results, bind(static, *map(ad.instantiate_zeros, dots), *words)


def _tangents_of_moments(primals: Any, dots: Any, static: Static, results: Any) -> list[Any]:
    """The tangents of ``m1 = sum(w) mu + sigma s1`` and ``m2 = sigma^2 s2``, where s1 and s2 are sums of the noise."""
    weights, mu, sigma, *words = primals
    weights_dot, mu_dot, sigma_dot = dots
    parts: list[list[Any]] = []
    if type(mu_dot) is not ad.Zero:
        parts.append([weights.sum(1, keepdims=True) * mu_dot, *(0 for _ in results[1:])])
    if type(sigma_dot) is not ad.Zero:
        real = static._replace(dtype=static.computing_type.name)
        first, *second = bind(real, weights, jnp.zeros_like(mu), jnp.ones_like(sigma), *words)
        parts.append([first * sigma_dot, *(2 * sigma * x * sigma_dot for x in second)])
    if type(weights_dot) is not ad.Zero:
        parts.append(bind(static, weights_dot, mu, sigma, *words))
    return [
        jnp.broadcast_to(sum(of_result), x.shape).astype(x.dtype)
        for x, of_result in zip(results, zip(*parts, strict=True), strict=True)
    ]


def _perturbed_jvp(primals: Any, dots: Any, static: Static) -> Any:
    """The derivative of a result is 1 - decay for its parameter."""
    of_others = dict(zip(static.reads, dots, strict=True))
    for name, argument in (("weights", "coefficients"), ("factors", "decay")):
        if type(of_others.get(name, ad.Zero(None))) is not ad.Zero:
            raise ValueError(
                f"{argument}: expected no gradient, since gradients flow to the parameters only; pass it through"
                " jax.lax.stop_gradient"
            )
    results = bind(static, *primals)
    factors = dict(zip(static.reads, primals, strict=False)).get("factors")
    tangents = []
    for k, (result, dot) in enumerate(zip(results, dots, strict=False)):
        if type(dot) is ad.Zero:
            tangents.append(ad.Zero(jax.typeof(result).to_tangent_aval()))
            continue
        if factors is not None:
            factor = factors[:, k].reshape(-1, *[1] * (dot.ndim - 1))
            dot = (dot.astype(factor.dtype) * factor).astype(dot.dtype)
        tangents.append(jnp.broadcast_to(dot, result.shape))
    return results, tangents


def _transpose(cts: Any, *operands: Any, static: Static) -> Any:
    count = len(static.reads)
    avals = [x.aval if ad.is_undefined_primal(x) else None for x in operands[:count]]
    words = operands[count:]
    if all(type(ct) is ad.Zero for ct in cts):
        return [*(None if aval is None else ad.Zero(aval) for aval in avals), *[None] * len(words)]
    if static.operation == Operation.moments:
        raise ValueError(
            "weights: expected no gradient, got weights that depend on an argument of jax.grad: their gradient needs"
            " the whole sample; use jax.lax.stop_gradient, or draw the sample with multisample.sample"
        )
    if avals[-1] is None:  # sigma is constant: the cotangent of mu is a sum without noise.
        totals = [cts[0].astype(static.computing_type).sum(1 + static.axes("matrix").index("j")), None]
    else:
        is_sample = static.operation == Operation.sample
        transposed = static._replace(operation=Operation.gradient if is_sample else Operation.sample)
        totals = bind(transposed, *map(ad.instantiate_zeros, cts), *words)
    sums = [None if aval is None else _as_long_as(aval, x) for aval, x in zip(avals, totals, strict=True)]
    return [*sums, *[None] * len(words)]


def _as_long_as(aval: Any, x: Any) -> Any:
    """Sum the gradient of an operand over the batch if the whole batch shares the operand."""
    return x.sum(0, keepdims=True) if aval.shape[0] == 1 and x.shape[0] != 1 else x


def _batch(operands: Sequence[Any], axes: Sequence[int | None], *, static: Static) -> Any:
    """Join a new axis to that of the batch. An operand that all elements share keeps length 1."""
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    fronted = [
        jnp.expand_dims(x, 0) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    ]
    inner = next((x.shape[1] for x in fronted if x.shape[1] != 1), 1)
    joined = []
    for name, x in zip(static.names(len(fronted)), fronted, strict=True):
        if x.shape[:2] != (1, 1) or name == "matrix":  # The custom call cannot share a cotangent.
            x = jnp.broadcast_to(x, (size, inner, *x.shape[2:]))
        joined.append(x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]))
    results = [x.reshape(size, inner, *x.shape[1:]) for x in bind(static, *joined)]
    return results, [0] * len(results)


def _refuse(*operands: Any, static: Static) -> Any:
    raise ValueError(
        f"mu, sigma: expected arrays on JAX's platforms {' and '.join(PLATFORMS)}, got a program that JAX compiles for"
        " another platform"
    )


for _primitive in _PRIMITIVES.values():
    _primitive.multiple_results = True
    _primitive.def_abstract_eval(_types)
    _primitive.def_impl(functools.partial(run_alone, _primitive))
    ad.primitive_jvps[_primitive] = _jvp
    ad.primitive_transposes[_primitive] = _transpose
    batching.primitive_batchers[_primitive] = _batch
    mlir.register_lowering(_primitive, mlir.lower_fun(_refuse, multiple_results=True))
    for _platform in PLATFORMS:
        _function = functools.partial(lowered, _platform)
        mlir.register_lowering(_primitive, mlir.lower_fun(_function, multiple_results=True), platform=_platform)
    needs_devices.add(_primitive)
