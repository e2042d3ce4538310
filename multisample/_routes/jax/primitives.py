"""The sample and its gradient as primitives of JAX, each the transpose of the other.

``x = mu + sigma * z`` is linear in mu and sigma, so that a tangent is a sample of the same noise, and a cotangent needs
two sums that draw the noise again: no derivative keeps the matrix. Every operand has a leading axis for the elements of
a batch, of length 1 where they share it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from . import partitioning
from .partitioning import PLATFORMS, Static, computing_type
from .programs import run_alone

try:
    from jax._src.dispatch import prim_requires_devices_during_lowering as needs_devices
except ImportError:  # It is private. Without it, programs for one device still work.
    needs_devices = set()

__all__ = ["Static", "sample_matrix"]

sample_p = Primitive("multisample")
gradient_p = Primitive("multisample_gradient")
gradient_p.multiple_results = True


def sample_matrix(mu: Any, sigma: Any, *words: Any, static: Static) -> Any:
    """The sample of `mu` and `sigma`, shape (d,) and of the computing type, with `words` of `keys.operands`."""
    x = sample_p.bind(*_alike(*(x[None] for x in (mu, sigma, *words))), static=static)
    return x.reshape(x.shape[1:])


def _alike(*operands: Any) -> list[Any]:
    """The operands as they are, but in `jax.shard_map` marked as varying over the same axes of the mesh."""
    axes = [_varying(x) for x in operands]
    every = frozenset().union(*axes)
    return [
        x if own == every else jax.lax.pcast(x, tuple(sorted(every - own, key=str)), to="varying")
        for x, own in zip(operands, axes, strict=True)
    ]


def _varying(x: Any) -> frozenset[Any]:
    aval = jax.typeof(x)
    kinds = getattr(aval, "manual_axis_type", None)  # JAX up to 0.9 has the axes themselves.
    axes: frozenset[Any] = getattr(aval, "vma", frozenset()) if kinds is None else kinds.varying
    return axes


# --- Types ----------------------------------------------------------------------------------------


def _batch(*operands: Any) -> int:
    return next((x.shape[0] for x in operands if x.shape[0] != 1), 1)


def _axis(name: str, *candidates: tuple[Any, int]) -> Any:
    """The mesh axes, in explicit sharding, over which an axis of a result is sharded: those of an operand's axis."""
    found = []
    for aval, axis in candidates:
        spec = aval.sharding.spec[axis]
        if spec is not None and spec not in found:
            found.append(spec)
    if len(found) > 1:
        raise TypeError(f"{name}: expected the same sharding of mu and sigma, got {found[0]} and {found[1]}")
    return found[0] if found else None


def _result(like: Any, shape: tuple[int, ...], dtype: Any, *axes: Any) -> Any:
    sharding = NamedSharding(like.sharding.mesh, PartitionSpec(*axes))
    return like.update(shape=shape, dtype=np.dtype(dtype), weak_type=False, sharding=sharding)


@sample_p.def_abstract_eval
def _sample_type(mu: Any, sigma: Any, *words: Any, static: Static) -> Any:
    batch, d = _batch(mu, sigma, *words), mu.shape[1]
    group = _axis("vmap", *((x, 0) for x in (mu, sigma, *words) if x.shape[0] == batch))
    rows = _axis("mu, sigma", (mu, 1), (sigma, 1))
    dtype = jnp.dtype(static.dtype)
    if static.layout == "dn":
        return _result(mu, (batch, d, static.n), dtype, group, rows, None)
    return _result(mu, (batch, static.n, d), dtype, group, None, rows)


@gradient_p.def_abstract_eval
def _gradient_type(g: Any, *words: Any, static: Static) -> Any:
    axis = 1 if static.layout == "dn" else 2
    if g.sharding.spec[3 - axis] is not None:
        raise TypeError(
            "mu, sigma: expected a cotangent that is not sharded over samples in explicit sharding, got"
            f" {g.sharding.spec}; take the gradient in jax.shard_map, or of a jax.sharding.auto_axes function"
        )
    vector = _result(
        g, (g.shape[0], g.shape[axis]), computing_type(static.dtype), g.sharding.spec[0], g.sharding.spec[axis]
    )
    return vector, vector


# --- Derivatives ----------------------------------------------------------------------------------


def _sample_jvp(primals: Any, tangents: Any, *, static: Static) -> Any:
    x = sample_p.bind(*primals, static=static)
    mu_dot, sigma_dot = tangents[:2]
    if type(mu_dot) is ad.Zero and type(sigma_dot) is ad.Zero:
        return x, ad.Zero(jax.typeof(x).to_tangent_aval())
    dots = (ad.instantiate_zeros(dot) for dot in (mu_dot, sigma_dot))
    return x, sample_p.bind(*_alike(*dots, *primals[2:]), static=static)


def _sample_transpose(ct: Any, mu: Any, sigma: Any, *words: Any, static: Static) -> Any:
    is_linear = [ad.is_undefined_primal(x) for x in (mu, sigma)]
    avals = [x.aval if linear else None for x, linear in zip((mu, sigma), is_linear, strict=True)]
    if type(ct) is ad.Zero:
        return [None if aval is None else ad.Zero(aval) for aval in avals] + [None] * len(words)
    if is_linear[1]:
        sums: Any = gradient_p.bind(*_alike(ct, *words), static=static)
    else:  # Without sigma, no noise is needed.
        axis, real = 2 if static.layout == "dn" else 1, computing_type(static.dtype)
        sums = jnp.sum(ct.astype(real), axis), None
    return [
        None if aval is None else _as_long_as(aval, total) for aval, total in zip(avals, sums, strict=True)
    ] + [None] * len(words)  # fmt: skip


def _as_long_as(aval: Any, x: Any) -> Any:
    """The sum over a batch for an operand that its elements share."""
    return x.sum(0, keepdims=True) if aval.shape[0] == 1 and x.shape[0] != 1 else x


def _gradient_jvp(primals: Any, tangents: Any, *, static: Static) -> Any:
    sums = gradient_p.bind(*primals, static=static)
    if type(tangents[0]) is ad.Zero:
        return sums, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in sums]
    return sums, gradient_p.bind(*_alike(tangents[0], *primals[1:]), static=static)


def _gradient_transpose(cts: Any, g: Any, *words: Any, static: Static) -> Any:
    if all(type(ct) is ad.Zero for ct in cts):
        return [ad.Zero(g.aval), *[None] * len(words)]
    return [sample_p.bind(*_alike(*map(ad.instantiate_zeros, cts), *words), static=static), *[None] * len(words)]


ad.primitive_jvps[sample_p] = _sample_jvp
ad.primitive_transposes[sample_p] = _sample_transpose
ad.primitive_jvps[gradient_p] = _gradient_jvp
ad.primitive_transposes[gradient_p] = _gradient_transpose


# --- Batches --------------------------------------------------------------------------------------


def _sample_batch(operands: Any, axes: Any, *, static: Static) -> Any:
    joined, shape = _joined(operands, axes)
    x = sample_p.bind(*joined, static=static)
    return x.reshape(*shape, *x.shape[1:]), 0


def _gradient_batch(operands: Any, axes: Any, *, static: Static) -> Any:
    joined, shape = _joined(operands, axes)
    if joined[0].shape[0] == 1 != shape[0] * shape[1]:  # The results have as many elements as g.
        joined[0] = jnp.broadcast_to(joined[0], (shape[0] * shape[1], *joined[0].shape[1:]))
    return [x.reshape(*shape, *x.shape[1:]) for x in gradient_p.bind(*joined, static=static)], [0, 0]


def _joined(operands: Any, axes: Any) -> tuple[list[Any], tuple[int, int]]:
    """The operands with the new axis joined to that of the batch they are already, and the lengths of the two.

    An operand that all elements share keeps length 1.
    """
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    fronted = [
        jnp.expand_dims(x, 0) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    ]
    inner = next((x.shape[1] for x in fronted if x.shape[1] != 1), 1)
    joined = []
    for x in fronted:
        if x.shape[:2] != (1, 1):
            x = jnp.broadcast_to(x, (size, inner, *x.shape[2:]))
        joined.append(x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]))
    return joined, (size, inner)


batching.primitive_batchers[sample_p] = _sample_batch
batching.primitive_batchers[gradient_p] = _gradient_batch


# --- Programs -------------------------------------------------------------------------------------


def _refuse(*operands: Any, static: Static) -> Any:
    raise ValueError(
        f"mu, sigma: expected arrays on JAX's platforms {' and '.join(PLATFORMS)}, got a program that JAX compiles for"
        " another platform"
    )


for _primitive, _lowered in ((sample_p, partitioning.sample), (gradient_p, partitioning.gradient)):
    _several = _primitive.multiple_results
    mlir.register_lowering(_primitive, mlir.lower_fun(_refuse, multiple_results=_several))
    for _platform in PLATFORMS:
        mlir.register_lowering(
            _primitive, mlir.lower_fun(_lowered(_platform), multiple_results=_several), platform=_platform
        )
    # What a primitive is partitioned over has to be known when it is lowered.
    needs_devices.add(_primitive)


for _primitive in (sample_p, gradient_p):
    _primitive.def_impl(functools.partial(run_alone, _primitive))
