"""Calls of `perturb` that torch.func or forward-mode AD transforms: vmap, grad, vjp and jvp.

vmap turns one call into a population: a batch of calls in one launch. The derivative of a result with respect to its
parameter is ``1 - decay``.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from multisample.backends.element_types import MATRIX_TYPES
from multisample.backends.torch_ext.operator_rules import joined

from .._checks.coefficients import TRANSFORMED, WITH_GRADIENT, TransformedError
from .._libraries.torch import TORCH, name_of, owners_of, scaled
from .._model_parameters.perturb_plan import perturbed
from .._model_parameters.populations import Decays, Variant, decays_of, factor_of, members_of, population_of
from .._model_parameters.structures import Structure
from .._randomness.generator import Key
from .._randomness.seed_argument import key_words
from .torch_transforms import keys_of


class _Static(NamedTuple):
    """All of a call except its tensors. Values that are no tensors are here."""

    structure: Structure
    """The parameters without arrays."""
    coefficients: Any
    seed: Any
    member: Any
    decays: Decays | None
    fast_math: bool
    ids: Any
    backend: str
    has_own_keys: bool
    size: int | None
    """The number of calls in a batch; None for one call."""
    batched: tuple[bool, ...]
    """Whether coefficients, keys, members and each parameter have one more axis in front, for the batch."""


def perturb_transformed(
    parameters: Structure, out: Structure | None, given_out: Any, given: Any, seed: Any, member: Any, decay: Any,
    fast_math: bool, ids: Any, backend: str,
) -> Any:  # fmt: skip
    """The result of a call that PyTorch transforms; ValueError for transformations in which perturb cannot be."""
    arrays = parameters.arrays
    is_plain = all(isinstance(x, torch.Tensor) and not TORCH.is_opaque(x) for x in arrays)
    if not is_plain or torch._C._len_torch_dispatch_stack() or torch._C._is_tracing():
        raise TransformedError(TRANSFORMED)
    if out is not None:
        raise ValueError(
            "out: expected None where PyTorch transforms the call (torch.func, torch.autograd.forward_ad), since"
            " nothing can be written in place there"
        )
    coefficients, length = None, None
    if isinstance(given, torch.Tensor):
        if given.dim() > 1:
            raise ValueError(f"coefficients: expected a number or shape (K,), got {tuple(given.shape)}")
        coefficients, length = given, given.shape[0] if given.dim() else None
    elif np.ndim(given):
        length = np.asarray(given).size
    device = arrays[0].device if arrays else torch.device("cpu")
    keys, seeds, seed = _keys(seed, device)
    members, count, member = _members(member, length if seeds is None and length else 1, device)
    decays = decays_of(decay, parameters)
    size, has_own_keys = population_of(length, seeds, count)
    names, owners = parameters.names, owners_of(list(map(id, arrays)), parameters.names)
    kept = sorted(owners.values())
    batched = False, size is not None and seeds is not None, count is not None, *(False,) * len(kept)
    if keys is not None and not (has_own_keys or batched[1]):
        keys = keys[0]
    if names is None:
        ids = kept if ids is None else [ids[k] for k in kept]
        own = Structure(None, (), list)
    else:
        paths = parameters.paths or names
        own = Structure(tuple(names[k] for k in kept), (), list, tuple(paths[k] for k in kept))
    static = _Static(
        own, None if coefficients is not None else given, seed, member,
        None if decays is None else Decays(decays[k] for k in kept), fast_math, ids, backend, has_own_keys,
        size, batched,
    )  # fmt: skip
    results = _Perturbed.apply(static, coefficients, keys, members, *[arrays[k] for k in kept])
    made = dict(zip(kept, results, strict=True))
    return parameters.rebuild([made[owners[id(x)]] for x in arrays])


def _keys(seed: Any, device: Any) -> tuple[Any, int | None, Any]:
    """Keys in a tensor, int64[count, 2], or None; the length of a vector, or None; and a single key on the host."""
    if isinstance(seed, torch.Tensor):
        keys, count = keys_of(seed, device)
        return keys, None if count == 1 and seed.dim() > 1 else count, None
    words = key_words(seed)
    if words.length is None:
        return None, None, words.given if words.form else Key(words.word, words.offset)
    return keys_of(words.given if words.form else [Key(words.word, words.offset)], device)[0], words.length, None


def _members(member: Any, length: int, device: Any) -> tuple[Any, int | None, Any]:
    """Three values: a tensor of members (int64) or None, how many members a vector has, and one member."""
    if isinstance(member, torch.Tensor):
        if member.dim() > 1 or member.dtype.is_floating_point or member.dtype is torch.bool:
            raise TypeError(f"member: expected integers of shape () or (K,), got {member.dtype} {tuple(member.shape)}")
        return member.to(torch.int64), member.shape[0] if member.dim() else None, None
    found, _, count = members_of(member, length)
    if count is None:
        return None, None, found
    rows = np.atleast_1d(np.asarray(found, np.uint64)).view(np.int64)
    return torch.from_numpy(rows).to(device), count, None


def factors_like(decays: list[float] | None, arrays: Sequence[Any]) -> list[float]:
    """The factor ``1 - decay`` of each array, rounded to its computing type."""
    if decays is None:
        return [1.0] * len(arrays)
    reals = [MATRIX_TYPES[name_of(x.dtype)].computing for x in arrays]
    return list(map(factor_of, decays, reals))


class _Perturbed(torch.autograd.Function):  # type: ignore[misc,unused-ignore]
    """A differentiable function of coefficients, keys, members and parameters. All but parameters may be None."""

    @staticmethod
    def forward(static: _Static, coefficients: Any, keys: Any, members: Any, *parameters: Any) -> Any:
        seed, member, batched = static.seed, static.member, static.batched
        if keys is not None:
            seed = keys.view(torch.uint64)
            seed = seed if keys.dim() > 1 else seed[None]
        if members is not None:
            member = members.contiguous()
            if not member.dim():
                member = int(member)
        given = static.coefficients if coefficients is None else coefficients.detach()
        structure = static.structure._replace(arrays=[x.detach() for x in parameters])
        batch = None
        if static.size is not None:
            batch = Variant(size=static.size, parameters=batched[3:], has_coefficients=batched[0])
        results = perturbed(
            structure, None, None, given, seed, member, static.decays or 0, static.fast_math, static.ids,
            static.backend, None, batch,
        )  # fmt: skip
        first: dict[int, int] = {}
        # Tied parameters share a result, but an operation returns different tensors.
        return tuple(x if first.setdefault(id(x), k) == k else x.detach() for k, x in enumerate(results))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.static, coefficients = inputs[:2]
        if coefficients is not None and coefficients.requires_grad:
            raise ValueError(WITH_GRADIENT)
        ctx.like = [(x.shape, x.dtype, x.device) for x in output]
        ctx.factors = factors_like(ctx.static.decays, output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        static = ctx.static
        own = [
            scaled(g, factor, None if is_batched else static.size, None)
            for g, factor, is_batched in zip(gradients, ctx.factors, static.batched[3:], strict=True)
        ]
        return None, None, None, None, *own

    @staticmethod
    def jvp(ctx: Any, static: None, coefficients: Any, keys: Any, members: Any, *tangents: Any) -> Any:
        if coefficients is not None:
            raise ValueError(WITH_GRADIENT)
        results = []
        for tangent, factor, (shape, dtype, device) in zip(tangents, ctx.factors, ctx.like, strict=True):
            if tangent is None:
                tangent = torch.zeros((), dtype=dtype, device=device)
            # A new tensor: a result and its tangent must not share memory with another's.
            results.append((tangent * factor).expand(shape).clone())
        return tuple(results)

    @staticmethod
    def vmap(info: Any, in_dims: Any, static: _Static, *tensors: Any) -> Any:
        size, dims = info.batch_size, in_dims[1:]
        tensors = tuple(x if dim is None else x.movedim(dim, 0) for x, dim in zip(tensors, dims, strict=True))
        outer = [dim is not None for dim in dims]
        if static.has_own_keys:  # Each coefficient has a key, so that a kernel cannot count calls by keys.
            calls = [
                _Perturbed.apply(static, *[x[b] if own else x for x, own in zip(tensors, outer, strict=True)])
                for b in range(size)
            ]
            return tuple(map(torch.stack, zip(*calls, strict=True))), (0,) * len(calls[0])
        inner, total = static.size, size
        if inner is not None:
            total *= inner
            tensors = tuple(
                joined(x, 0 if is_outer else None, size, None if is_inner else inner)
                for x, is_outer, is_inner in zip(tensors, outer, static.batched, strict=True)
            )
        batched = tuple(map(operator.or_, outer, static.batched))
        results = _Perturbed.apply(static._replace(size=total, batched=batched), *tensors)
        if inner is not None:
            results = tuple(x.unflatten(0, (size, inner)) for x in results)
        return results, (0,) * len(results)
