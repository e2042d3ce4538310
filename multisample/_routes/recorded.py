"""Calls whose gradients PyTorch records: an autograd function over two plans, which bypasses PyTorch's dispatcher.

The backward pass draws the noise again, so the forward pass stores nothing as large as the sample.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from multisample.backends import generic, registry
from multisample.backends.contract import Backend
from multisample.backends.launch import ElementType, Operation

from .._libraries.torch import TORCH, dtype_of, is_transforming
from .._plan import Call, Plan, PlanCache, Record
from .transformed import as_int64

__all__ = ["recorder"]


def recorder(call: Call, backend: Backend) -> Record | None:
    """The function that runs the plan of a call with gradients; None for a call without gradients.

    Raises
    ------
    ValueError
        If gradients cannot be recorded.
    """
    names = [
        name
        for name, x in (("mu", call.mu), ("sigma", call.sigma), ("out", call.out))
        if getattr(x, "requires_grad", False)
    ]
    if not names or not torch.is_grad_enabled():
        return None
    if call.out is None and Operation.gradient in backend.operations:
        return _record
    if call.out is not None:
        reason = "out= takes no gradient; detach it, or call sample under torch.no_grad()"
    elif call.backend == "auto":
        status = registry.find("torch_ext").status()
        why = "; ".join(status.reasons) or "it could not be prepared"
        reason = f"backend {backend.name!r} records no gradient, and torch_ext, which does, cannot run here: {why}"
    else:
        reason = (
            f"backend {backend.name!r} records no gradient; pass backend='torch_ext', detach it, or call sample under"
            " torch.no_grad()"
        )
    raise ValueError(f"{names[0]}: requires grad, and {reason}")


def _record(
    plan: Plan, mu: Any, sigma: Any, seed: Any, generator: Any, dim_offset: int, sample_offset: int
) -> Any:  # fmt: skip
    return _apply(mu, sigma, (plan, seed, generator, dim_offset, sample_offset))


class _Recorded(torch.autograd.Function):
    """A sample that is drawn by a plan and differentiable in `mu` and `sigma`."""

    @staticmethod
    def forward(ctx: Any, mu: Any, sigma: Any, call: tuple[Plan, Any, Any, int, int]) -> Any:
        plan, seed, generator, dim_offset, sample_offset = call
        result, *noise = plan.draw(mu, sigma, seed, generator, None, dim_offset, sample_offset)
        ctx.drawn = plan, (*noise, dim_offset, sample_offset)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        plan, noise = ctx.drawn
        # Call the operator if PyTorch transforms or compiles the backward pass, or records its gradients.
        if _is_grad_enabled() or _is_transformed(grad) or grad.is_neg() or grad._is_zerotensor():
            gradients = _by_operator(plan, grad, *noise)
        else:
            gradients = _gradient_plan(plan, grad).run(grad, *noise)
        needs_mu, needs_sigma, _ = ctx.needs_input_grad
        mu, sigma = plan.operands
        return (
            _like(gradients[0], mu) if needs_mu else None, _like(gradients[1], sigma) if needs_sigma else None, None,
        )  # fmt: skip


# Function.apply without its support for torch.func, whose calls take `draw_transformed`.
_apply = super(torch.autograd.Function, _Recorded).apply
_is_grad_enabled = torch.is_grad_enabled


def _is_transformed(grad: Any) -> bool:
    # torch.autograd.grad(is_grads_batched=True) passes a batch of PyTorch's older vmap.
    return type(grad) is not torch.Tensor or is_transforming() or torch._C._functorch.is_legacy_batchedtensor(grad)


def _like(gradient: Any, operand: Any) -> Any:
    """`gradient`, shape (d,), in the shape and type of its argument."""
    if len(operand.shape) != 1:
        gradient = gradient.reshape(operand.shape) if operand.shape else gradient.sum()
    element = dtype_of(operand.dtype)
    return gradient if gradient.dtype is element else gradient.to(element)


def _by_operator(
    plan: Plan, grad: Any, seed: int, offset: int, offset_tensor: Any, dim_offset: int, sample_offset: int
) -> Any:
    template = plan.template
    return torch.ops.multisample.sample_backward(
        grad, offset_tensor, seed=as_int64(seed), offset=as_int64(offset), dim_offset=dim_offset,
        sample_offset=sample_offset, shared=template.common_noise, fast_math=template.fast_math,
        antithetic=template.antithetic, transposed=plan.is_transposed,
    )  # fmt: skip


# --- The plan of the backward pass --------------------------------------------------------------------------------


class _GradientPlan:
    """The gradients of `mu` and `sigma`, for output gradients of one type, shape and device; immutable."""

    __slots__ = ("_allocate", "_allocator", "_is_empty", "_launch", "_scratch_size", "_stream")

    def __init__(self, plan: Plan, grad: Any) -> None:
        operand = TORCH.describe("grad", grad)
        strides, shape = operand.strides, operand.shape
        if plan.is_transposed:
            strides, shape = strides[::-1], shape[::-1]
        real = "float64" if operand.dtype == "float64" else "float32"
        launch = plan.template._replace(
            row_stride=strides[0], column_stride=strides[1], type=ElementType[operand.dtype],
            operation=Operation.gradient,
        )  # fmt: skip
        launcher = generic.launcher(plan.backend, launch)
        self._is_empty, self._launch, self._scratch_size = 0 in shape, launcher.run, launcher.scratch_size
        self._allocate = TORCH.allocator((shape[0],), real, operand.device)
        self._allocator = functools.cache(lambda size: TORCH.allocator((size,), "float64", operand.device))
        self._stream = None if operand.device.kind == "cpu" else TORCH.stream(operand.device)

    def run(
        self, grad: Any, seed: int, offset: int, offset_tensor: Any, dim_offset: int, sample_offset: int
    ) -> tuple[Any, Any]:
        """The gradients of `mu` and `sigma`, shape (d,), in the computing type."""
        mu, sigma = self._allocate(grad), self._allocate(grad)
        if self._is_empty:
            return mu.zero_(), sigma.zero_()
        scratch, size = 0, 0 if self._scratch_size is None else self._scratch_size(sample_offset)
        if size:
            # The allocator reuses this memory only for later work on the same stream.
            memory = self._allocator(size)(grad)
            scratch = memory.data_ptr()
        self._launch(
            None, 0, 0, 0, grad.data_ptr(), mu.data_ptr(), sigma.data_ptr(), seed, offset,
            0 if offset_tensor is None else offset_tensor.data_ptr(), dim_offset, sample_offset,
            0 if self._stream is None else self._stream(grad), scratch,
        )  # fmt: skip
        return mu, sigma


_GRADIENT_PLANS: PlanCache[_GradientPlan] = PlanCache(1024)


def _gradient_plan(plan: Plan, grad: Any) -> _GradientPlan:
    template = plan.template
    key = (
        grad.dtype, grad.shape, grad.stride(), grad.device, plan.is_transposed, template.common_noise,
        template.antithetic, template.fast_math,
    )  # fmt: skip
    found = _GRADIENT_PLANS.get(key)
    if found is None:
        found = _GradientPlan(plan, grad)
        _GRADIENT_PLANS.put(key, found)
    return found
