"""Calls of `weighted_moments` that torch.func or forward-mode AD transforms: vmap, grad, vjp and jvp.

vmap turns one call into a batch, in one launch. Moments are linear in mu, and their derivatives are sums of the same
noise, which the kernel draws again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from .._libraries import is_number
from .._libraries.torch import without_tangents
from .._operations import Call
from .._randomness.generator import Key
from .._randomness.seed_argument import checked_key, is_in_array
from .torch_autograd import check_weights
from .torch_transforms import keys_of


class _Static(NamedTuple):
    """All of a call except its tensors."""

    call: Call
    """The call without tensors. It has a number for mu or sigma that is no tensor, and a key without a tensor."""
    function: Any
    """The public function."""
    size: int | None = None
    """The length of the batch, which keys then have as the first axis; other tensors may have it."""


def moments_transformed(call: Call, function: Any) -> tuple[Any, ...]:
    """The moments of a call that PyTorch transforms."""
    check_weights(call.weights)
    weights, keys, batch = call.weights, None, None
    if is_in_array(call.seed) or isinstance(call.seed, torch.Tensor):
        keys, batch = keys_of(call.seed, weights.device)
        keys = keys[0] if batch is None else keys
    vectors = {name: x for name, x in (("mu", call.mu), ("sigma", call.sigma)) if not is_number(x)}
    if batch is None:
        vectors = {name: x[:, 0] if x.dim() == 2 and x.shape[1] == 1 else x for name, x in vectors.items()}
    seed = None if keys is not None else Key(*checked_key(call.seed))
    mu, sigma = (None if name in vectors else x for name, x in (("mu", call.mu), ("sigma", call.sigma)))
    plain = call._replace(weights=None, seed=seed, mu=mu, sigma=sigma)
    static = _Static(plain, function, batch)
    results: tuple[Any, ...] = _Moments.apply(static, weights, vectors.get("mu"), vectors.get("sigma"), keys)
    return results


class _Moments(torch.autograd.Function):
    """The moments as a function of weights, mu, sigma and keys; mu, sigma and keys may be None."""

    @staticmethod
    def forward(static: _Static, weights: Any, mu: Any, sigma: Any, keys: Any) -> Any:
        call = static.call
        seed = call.seed if keys is None else keys.view(torch.uint64).reshape(-1, 2)
        mu, sigma = (own if x is None else x.detach() for x, own in ((mu, call.mu), (sigma, call.sigma)))
        with without_tangents():
            results = call._replace(weights=weights.detach(), mu=mu, sigma=sigma, seed=seed).repeated(static.function)
        return tuple(x[0] for x in results) if keys is not None and static.size is None else results

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.static, *tensors = inputs
        check_weights(tensors[0])
        ctx.dtype = output[0].dtype
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def _sums(ctx: Any) -> tuple[Any, Any, Any, Any]:
        """The sum of the weights, those of the noise and its squares, and sigma."""
        weights, mu, sigma, keys = ctx.saved_tensors
        like = mu if mu is not None else sigma
        noise = ctx.static._replace(call=ctx.static.call._replace(order=2, dtype=str(ctx.dtype).removeprefix("torch.")))
        first, second = _Moments.apply(noise, weights.detach(), torch.zeros_like(like), torch.ones_like(like), keys)
        total = weights.detach().sum(-1, keepdim=ctx.static.size is not None).to(first.dtype)
        return total, first, second, ctx.static.call.sigma if sigma is None else sigma

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        total, first, second, deviation = _Moments._sums(ctx)
        _, mu, sigma, _ = ctx.saved_tensors
        of_first, of_second = (*gradients, None)[:2]
        of_mu = of_sigma = None
        if of_first is not None:
            of_mu, of_sigma = of_first * total, of_first * first
        if of_second is not None:
            part = 2 * deviation * of_second * second
            of_sigma = part if of_sigma is None else of_sigma + part
        return None, None, _like(mu, of_mu), _like(sigma, of_sigma), None

    @staticmethod
    def jvp(ctx: Any, static: None, weights: Any, mu: Any, sigma: Any, keys: None) -> Any:
        if weights is not None:
            raise ValueError("weights: expected no tangent, since derivatives are those of mu and sigma only")
        total, first, second, deviation = _Moments._sums(ctx)
        mu, sigma = (0.0 if x is None else x for x in (mu, sigma))
        results = mu * total + sigma * first, 2 * deviation * sigma * second
        return tuple(x.to(ctx.dtype) for x in results[: ctx.static.call.order])

    @staticmethod
    def vmap(info: Any, in_dims: Any, static: _Static, weights: Any, mu: Any, sigma: Any, keys: Any) -> Any:
        size, inner = info.batch_size, static.size
        if keys is None:
            words = np.array(static.call.seed, np.uint64).view(np.int64)
            keys = torch.from_numpy(words).to(weights.device)
        tensors: list[Any] = []
        for x, dim, own in zip(
            (weights, mu, sigma, keys), in_dims[1:], (1, 1, 1, 1 + (inner is not None)), strict=True
        ):
            if x is None:
                tensors.append(None)
                continue
            x = x if dim is None else x.movedim(dim, 0)
            has_inner = inner is not None and (own == 2 or x.dim() == (2 if dim is None else 3))
            if dim is None and not (has_inner or own == 2 or x is keys):
                tensors.append(x)  # All elements share it.
                continue
            x = x.expand(size, *x.shape) if dim is None else x
            if inner is not None:
                x = x if has_inner else x[:, None].expand(size, inner, *x.shape[1:])
                x = x.flatten(0, 1)
            tensors.append(x)
        total = size if inner is None else size * inner
        plain = static._replace(call=static.call._replace(seed=None), size=total)
        results = _Moments.apply(plain, *tensors)
        if inner is not None:
            results = tuple(x.unflatten(0, (size, inner)) for x in results)
        return results, (0,) * len(results)


def _like(x: Any, gradient: Any) -> Any:
    """The gradient of an operand, which may lack the axis of the batch."""
    if x is None or gradient is None:
        return None
    gradient = gradient.sum(0) if gradient.dim() > x.dim() else gradient
    return gradient.to(x.dtype)
