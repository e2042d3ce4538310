"""Moments whose gradients PyTorch records: the sums of the noise are constants, and tensor operations scale them."""

from __future__ import annotations

from typing import Any

import torch

from multisample.backends.contract import Backend

from .._checks.values import check_values
from .._libraries import is_number
from .._libraries.torch import TORCH, dtype_of, is_opaque, is_transforming
from .._moments_plan import MomentsCall, MomentsPlan, RecordMoments

__all__ = ["recorder"]


def recorder(call: MomentsCall, backend: Backend) -> RecordMoments | None:
    """The function that runs the plan of a call with gradients to `mu` and `sigma`; None for a call without gradients.

    Raises
    ------
    ValueError
        If `weights` require grad, or PyTorch transforms the call.
    """
    tensors = [x for x in (call.weights, call.mu, call.sigma) if not is_number(x)]
    if is_transforming() or any(map(is_opaque, map(type, tensors))):
        raise ValueError(
            "weights, mu, sigma: expected plain tensors outside PyTorch's transformations (torch.func,"
            " torch.autograd.forward_ad, a dispatch mode or a tensor subclass), in which weighted_moments cannot be"
        )
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in tensors):
        return None
    if call.weights.requires_grad:
        raise ValueError(
            "weights: require grad, and gradients flow to mu and sigma only, as those of the weights need the whole"
            " sample; detach them, or draw it with multisample.sample"
        )
    return _record


def _record(
    plan: MomentsPlan, weights: Any, mu: Any, sigma: Any, seed: Any, dim_offset: int, sample_offset: int
) -> tuple[Any, ...]:
    if weights.is_cpu:
        vectors = {"mu": mu, "sigma": sigma}
        check_values(TORCH, vectors, plan.dtype)
    first, *second = plan.sum(weights, mu, sigma, seed, dim_offset, sample_offset)
    real = first.dtype
    # float32 sums are added up in float64.
    total = weights.to(real).sum(dtype=torch.float64).to(real)
    mu, sigma = (x if is_number(x) else _vector(x, real) for x in (mu, sigma))
    results = [mu * total + sigma * first, *(sigma * sigma * x for x in second)]
    dtype = dtype_of(plan.dtype)
    return tuple(x if x.dtype is dtype else x.to(dtype) for x in results)


def _vector(x: Any, real: Any) -> Any:
    return (x[:, 0] if x.dim() == 2 else x).to(real)
