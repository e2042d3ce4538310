"""Plans of calls with tensors, with and without recorded gradients. Most bypass PyTorch's dispatcher.

Plans run in compiled code where torch_ext has it: `_CompiledPlan`. A sample is an autograd function with a plan for the
forward pass and one for the backward pass. The backward pass draws the noise again if sigma requires grad, so the
forward pass stores nothing as large as the sample, except for n = 1.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch

from multisample.backends import registry
from multisample.backends.contract import Backend
from multisample.backends.element_types import MATRIX_TYPES
from multisample.backends.launch import HOST, Operation
from multisample.backends.system.forks import is_forked

from .._arguments import UNCHECKED
from .._checks.operands import inspect_inputs, matrix_shape
from .._libraries import is_number
from .._libraries.torch import TORCH, dtype_of, is_transforming
from .._operations import Call
from .._plan import PLANS, Plan, Planned, make_plan
from .._randomness.generator_argument import source_of
from .._randomness.seed_argument import is_in_array, signature_of
from .torch_moments import RecordedMoments
from .torch_transforms import NO_GRADIENT_TO_OUT, as_int64, keys_of, options_of


def torch_plan(call: Call, backend: Backend) -> Planned:
    """The plan of a call with tensors, which records gradients that they require; ValueError if `backend` cannot."""
    arguments = ("mu", call.mu), ("sigma", call.sigma), ("weights", call.weights), ("out", call.out)
    names = [name for name, x in arguments if getattr(x, "requires_grad", False)]
    if not names or not torch.is_grad_enabled():
        return _CompiledPlan.around(make_plan(call, backend, TORCH), call)
    if call.operation == Operation.moments:
        return RecordedMoments(call, backend)
    if call.out is None and backend.name == "torch_ext":
        return _RecordedSample(call, backend)
    if call.out is not None:
        reason = NO_GRADIENT_TO_OUT
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


class ProfiledPlan:
    """A plan whose calls appear as operations in a profile."""

    def __init__(self, plan: Planned, name: str) -> None:
        self.plan, self.name = plan, f"multisample::{name}"

    def run(self, *arguments: Any) -> Any:
        with torch._C._profiler._RecordFunctionFast(self.name, arguments[:3]):
            return self.plan.run(*arguments)


class _CompiledPlan:
    """A plan of `sample` whose calls run in compiled code. Errors and uncommon calls run in `Plan.run`."""

    def __init__(self, plan: Plan, run: Callable[..., Any]) -> None:
        self.plan, self.run = plan, run

    @classmethod
    def around(cls, plan: Plan, call: Call, keeps_noise: bool = False) -> Planned:
        """`plan`, or a `_CompiledPlan` of it if compiled code can run it. With `keeps_noise`, it returns noise too."""
        vectors = (call.mu, call.sigma, call.seed) if plan.has_device_seeds else (call.mu, call.sigma)
        run, are_tensors = None, all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in vectors)
        if are_tensors and call.out is None and all(operand.read is None for operand in plan.operands.values()):
            run = _compiled_run(plan, call, plan.run, keeps_noise)
        return plan if run is None else cls(plan, run)


def _compiled_run(
    plan: Plan, call: Call, run_in_python: Callable[..., Any] | None, keeps_noise: bool = False
) -> Callable[..., Any] | None:
    """The compiled function of a sample's or a gradient's plan; None if compiled code cannot run the plan."""
    make, source = getattr(plan.backend, "compiled_plan", None), source_of(call.generator, TORCH, plan.device)
    if make is None or plan.is_empty or call.operation == Operation.moments or source.put_back is not None:
        return None
    has_list = isinstance(call.seed, (list, tuple)) and is_in_array(call.seed)
    if not plan.has_device_seeds and (plan.template.batch or (is_in_array(call.seed) and not has_list)):
        return None
    if plan.device.kind == "cuda" and call.validate:
        return None
    template = plan.template._replace(results=1) if keeps_noise else plan.template
    compiled: Callable[..., Any] | None = make(
        template, plan.mask, has_list, call.validate is not UNCHECKED, call.grad, plan.functions(run_in_python)
    )
    return compiled


class _RecordedSample:
    """A plan of `sample` that records gradients."""

    def __init__(self, call: Call, backend: Backend) -> None:
        self.plan = make_plan(call, backend, TORCH, keeps_offset=True)
        template, kind = self.plan.template, MATRIX_TYPES[self.plan.dtype]
        # Whether keys are in an array. If so, each call keeps the array for its backward pass.
        self.has_key_array = is_in_array(call.seed)
        is_one_column = template.columns == 1 and not self.has_key_array
        # The gradients of one sample are elementwise products, which are faster than drawing the noise again.
        keeps_noise = (
            is_one_column and kind.computing == self.plan.dtype and getattr(call.sigma, "requires_grad", False)
            and (is_number(call.mu) or template.mu_stride == kind.size) and template.sigma_stride == kind.size
        )  # fmt: skip
        self.run_plan = _CompiledPlan.around(self.plan, call, keeps_noise).run
        # If the matrix has one column, its gradient is also the gradient of mu, and the kernel computes one result.
        self.order = 1 if is_one_column and template.device != HOST and not self.plan.is_empty else 2
        # The plan for the signature of the latest gradient. Its compiled function returns None for other signatures.
        self.gradient_plan: Plan | None = None
        self.gradients: Callable[..., Any] = lambda *arguments: None
        inputs = inspect_inputs(TORCH, call)
        self.dims, self.is_batch, lengths = inputs.dims, inputs.batch is not None, matrix_shape(inputs, call.layout)
        self.lengths = None if inputs.shape == lengths else lengths
        self.axis = -2 if call.layout == "nd" else -1
        # Whether the gradients of mu and sigma have the shape and type of the kernel's sums.
        self.real = real = dtype_of(kind.computing)
        self.has_plain_gradients = not self.has_key_array and all(
            isinstance(x, torch.Tensor) and x.requires_grad and x.dim() == 1 and x.dtype is real
            for x in (call.mu, call.sigma)
        )
        self.kinds = {x: (v.shape, v.dtype) for x, v in (("mu", call.mu), ("sigma", call.sigma)) if not is_number(v)}
        # A plan keeps no arrays and no generators alive.
        self.call = call._replace(mu=None, sigma=None, seed=None, generator=None)

    def run(self, mu: Any, sigma: Any, weights: Any, matrix: Any, seed: Any, generator: Any, *window: int) -> Any:
        return (_apply(mu, sigma, (self, seed, generator, window)),)

    def like(self, name: str, gradient: Any) -> Any:
        """`gradient`, (d,) or in a batch (B, d), summed to the shape of the argument `name`, and in its type."""
        shape, element = self.kinds[name]
        lead = shape[:1] if self.is_batch and len(shape) > 1 else ()
        if self.is_batch:  # Round before the sum over dimensions, as the operator does.
            gradient = (gradient if lead else gradient.sum(0)).to(element)
        if shape != gradient.shape:
            if shape.numel() != gradient.numel():  # Shape (d, 1) stands for (d,).
                dims = lead + self.dims
                aligned = lead + (1,) * (len(dims) - len(shape)) + shape[len(lead) :]
                gradient = gradient.reshape(dims).sum_to_size(aligned)
            gradient = gradient.reshape(shape)
        return gradient if gradient.dtype is element else gradient.to(element)


class _SampleFunction(torch.autograd.Function):
    """A sample that is drawn by a plan and differentiable in `mu` and `sigma`."""

    @staticmethod
    def forward(ctx: Any, mu: Any, sigma: Any, arguments: tuple[_RecordedSample, Any, Any, tuple[int, ...]]) -> Any:
        recorded, seed, generator, window = arguments
        drawn = recorded.run_plan(mu, sigma, None, None, seed, generator, *window)
        words = drawn[1:4]
        if recorded.has_key_array:
            words = seed
            if ctx.needs_input_grad[1]:  # The gradient of sigma depends on the seeds, which the caller may change.
                words = seed.clone() if isinstance(seed, torch.Tensor) else copy.copy(seed)
        ctx.drawn, ctx.noise = (recorded, words, window), drawn[4:]
        return drawn[0]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        recorded, words, window = ctx.drawn
        if recorded.lengths is not None:
            grad = grad.reshape(grad.shape[: grad.dim() - len(recorded.plan.shape)] + recorded.lengths)
        needs_mu, needs_sigma, _ = ctx.needs_input_grad
        if not needs_sigma and not is_forked():  # In a forked child, PyTorch's operations on large tensors may hang.
            return recorded.like("mu", grad.sum(recorded.axis, dtype=recorded.real)), None, None
        # Call the operator if PyTorch transforms or compiles the backward pass, or records its gradients.
        # torch.autograd.grad(is_grads_batched=True) passes a batch of PyTorch's older vmap.
        if (
            _is_grad_enabled() or type(grad) is not _TENSOR or is_transforming() or _is_legacy_batch(grad)
            or grad.is_neg()
        ):  # fmt: skip
            gradients = _by_operator(recorded, grad, words, *window)
        elif ctx.noise and not is_forked():
            gradients = grad.reshape(-1), (grad * ctx.noise[0].reshape(grad.shape)).reshape(-1)
        else:
            drawn = recorded.gradients(None, None, None, grad, words, None, *window)
            gradients = _gradients(recorded, grad, words, *window) if drawn is None else drawn[0]
            if len(gradients) == 1:
                gradients = grad.reshape(-1).to(recorded.real), *gradients
        if recorded.has_plain_gradients:
            return *gradients, None
        return (
            recorded.like("mu", gradients[0]) if needs_mu else None,
            recorded.like("sigma", gradients[1]) if needs_sigma else None,
            None,
        )


# Skip PyTorch's `apply`, which chooses between `backward` and `vjp` in each call.
_SampleFunction._backward_cls.apply = _SampleFunction.backward
# Function.apply without its support for torch.func: `run_transformed` runs those calls.
_apply = super(torch.autograd.Function, _SampleFunction).apply
_is_grad_enabled = torch.is_grad_enabled
_is_legacy_batch, _TENSOR = torch._C._functorch.is_legacy_batchedtensor, torch.Tensor


def _by_operator(recorded: _RecordedSample, grad: Any, words: Any, dim_offset: int, sample_offset: int) -> Any:
    keys, call = None, recorded.call._replace(dim_offset=dim_offset, sample_offset=sample_offset)
    if recorded.has_key_array:
        words = TORCH.host_array(words) if isinstance(words, torch.Tensor) and words.is_cpu else words
        keys, words = keys_of(words, grad.device)[0], (0, 0, None)
        grad = grad if recorded.is_batch else grad[None]
    seed, offset, offset_array = words
    return torch.ops.multisample.sample_backward(
        grad, offset_array, keys, seed=as_int64(seed), offset=as_int64(offset), transposed=call.layout == "nd",
        **options_of(call),
    )  # fmt: skip


def _gradients(recorded: _RecordedSample, grad: Any, words: Any, *window: int) -> Any:
    """The gradients of `mu` and `sigma`, (d,) or (B, d), in the computing type; only that of `sigma` with order 1."""
    if grad._is_zerotensor():
        return _by_operator(recorded, grad, words, *window)
    call = recorded.call._replace(seed=words if recorded.has_key_array else None)
    key = (
        "gradient", grad.dtype, grad.shape, grad.stride(), grad.device, call.layout, call.noise, call.antithetic,
        call.fast_math, signature_of(words) if recorded.has_key_array else None,
    )  # fmt: skip
    plan: Plan | None = PLANS.get(key)
    if plan is None:
        of_gradient = call._replace(operation=Operation.gradient, grad=grad, order=recorded.order)
        plan = make_plan(of_gradient, recorded.plan.backend, TORCH)
        PLANS.put(key, plan)
    gradients = plan.run(None, None, None, grad, words, None, *window)[0]
    if plan.is_empty:  # A sum of no elements is 0.
        return tuple(x.zero_() for x in gradients)
    if plan is not recorded.gradient_plan and not recorded.has_key_array:
        run = _compiled_run(plan, call._replace(operation=Operation.gradient, grad=grad), None)
        recorded.gradients, recorded.gradient_plan = run or recorded.gradients, plan
    return gradients
