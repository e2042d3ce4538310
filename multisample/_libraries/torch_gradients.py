"""Gradients of `perturb` in PyTorch: that of a parameter is the gradient of its result times ``1 - decay``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def scaled(gradient: Any, factor: float, size: int | None, like: Any) -> Any:
    """The gradient of a parameter. `size` is the length of the population, and `like` a DTensor's mesh and placements.

    With `size`, the result has one more axis than the parameter, in front.
    """
    if gradient is None:
        return None
    if size is not None:
        gradient = gradient.sum(0)
    if factor != 1:
        gradient = gradient * factor
    return gradient if like is None else gradient.redistribute(*like)


def placement_of(x: Any) -> tuple[Any, Any] | None:
    """The mesh and the placements of a DTensor; None for other tensors."""
    return (x.device_mesh, x.placements) if hasattr(x, "device_mesh") and hasattr(x, "placements") else None


class _Recorded(torch.autograd.Function):  # type: ignore[misc]
    """The identity of `results`, whose gradients flow to `parameters`."""

    @staticmethod
    def forward(ctx: Any, factors: list[float], size: int | None, results: list[Any], *parameters: Any) -> Any:
        ctx.factors, ctx.size, ctx.placements = factors, size, list(map(placement_of, parameters))
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        every = zip(gradients, ctx.factors, ctx.placements, strict=True)
        return None, None, None, *[scaled(g, factor, ctx.size, like) for g, factor, like in every]


def record(
    results: Sequence[Any], arrays: Sequence[Any], factors: Sequence[float] | None, size: int | None
) -> Sequence[Any]:  # fmt: skip
    """The results of `perturb`, recorded where gradients are and the parameter requires grad.

    Tied parameters share a result. Each tensor object gets a result of its own, for its gradient.
    """
    if not torch.is_grad_enabled():
        return results
    owners: dict[int, int] = {}
    for k, x in enumerate(arrays):
        owners.setdefault(id(x), k)
    kept = [k for k in owners.values() if arrays[k].requires_grad]
    if not kept:
        return results
    first: dict[int, int] = {}
    # `detach` makes another tensor of the same memory.
    own = [results[k] if first.setdefault(id(results[k]), k) == k else results[k].detach() for k in owners.values()]
    made = dict(zip(owners.values(), own, strict=True))
    recorded = _Recorded.apply(
        [1.0 if factors is None else factors[k] for k in kept], size, [made[k] for k in kept],
        *[arrays[k] for k in kept],
    )  # fmt: skip
    made.update(zip(kept, recorded, strict=True))
    return [made[owners[id(x)]] for x in arrays]
