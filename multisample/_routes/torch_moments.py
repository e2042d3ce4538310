"""Derivatives of `weighted_moments`: recorded gradients, and calls that torch.func or forward-mode AD transforms.

vmap turns one call into a batch, in one launch. Derivatives with respect to sigma are weighted sums of the noise and of
its squares, for which the kernel draws the noise again. The derivative with respect to mu is the sum of the weights.
"""

import copy
from typing import Any, NamedTuple

import torch

from multisample.backends.contract import Backend
from multisample.backends.element_types import MATRIX_TYPES
from multisample.backends.kernels.cpu.floating_point import with_default_floats
from multisample.backends.torch_ext.operator_rules import joined

from .._checks.operands import inspect_inputs
from .._libraries import is_number
from .._libraries.torch import TORCH, dtype_of, name_of
from .._operations import Call
from .._plan import Plan
from .._randomness.generator import Key
from .._randomness.seed_argument import checked_key, is_in_array
from .torch_transforms import is_recorded, keys_of


class RecordedMoments:
    """A plan of `weighted_moments` that records gradients to `mu` and `sigma`."""

    def __init__(self, call: Call, backend: Backend) -> None:
        check_weights(call.weights)
        inputs = inspect_inputs(TORCH, call)
        self.size = inputs.batch
        self.plan = Plan(call, backend, TORCH, inputs)
        # With mu = 0 and sigma = 1, the moments are the weighted sums of z and z^2.
        operands = {"weights": inputs.operands["weights"]}
        inputs = inputs._replace(operands=operands, dtype=MATRIX_TYPES[inputs.dtype].computing)
        self.plan_of_noise = Plan(call, backend, TORCH, inputs)

    def run(self, mu: Any, sigma: Any, weights: Any, matrix: Any, seed: Any, generator: Any, *window: int) -> Any:
        keys = seed if isinstance(seed, torch.Tensor) else None
        call = _RecordedCall(self, None if keys is not None else copy.copy(seed), window, self.size)
        return (_apply(call, weights, mu, sigma, keys),)


class _RecordedCall(NamedTuple):
    """A recorded call, without its operands and without keys that are in a tensor."""

    recorded: RecordedMoments
    seed: Any
    window: tuple[int, ...]
    size: int | None
    """The length of the batch."""

    def moments(self, weights: Any, mu: Any, sigma: Any, keys: Any, plan: Plan | None = None) -> Any:
        plan, seed = plan or self.recorded.plan, self.seed if keys is None else keys
        return plan.run(mu, sigma, weights, None, seed, None, *self.window)[0]

    def sums(self, real: Any, weights: Any, like: Any, keys: Any) -> Any:
        return self.moments(weights, 0.0, 1.0, keys, self.recorded.plan_of_noise)


class _TransformedCall(NamedTuple):
    """A transformed call, without its operands and without keys that are in a tensor."""

    call: Call
    function: Any
    """The public function."""
    size: int | None = None
    """The length of the batch's axis. Keys have this axis, and other tensors may have it."""

    def moments(self, weights: Any, mu: Any, sigma: Any, keys: Any) -> Any:
        seed = self.call.seed if keys is None else keys.view(torch.uint64).reshape(-1, 2)
        mu, sigma = (x if is_number(x) else x.detach() for x in (mu, sigma))
        call = self.call._replace(weights=weights.detach(), mu=mu, sigma=sigma, seed=seed)
        results = call.repeated(self.function)
        return tuple(x[0] for x in results) if keys is not None and self.size is None else results

    def sums(self, real: Any, weights: Any, like: Any, keys: Any) -> Any:
        """The weighted sums of the noise and of its squares, in the type `real`."""
        noise, zeros = self.call._replace(dtype=name_of(real)), torch.zeros_like(like, dtype=real)
        return _Moments.apply(self._replace(call=noise), weights.detach(), zeros, 1.0, keys)


def moments_transformed(call: Call, function: Any) -> tuple[Any, ...]:
    """The moments of a call that PyTorch transforms; ValueError unless torch.func or forward-mode AD does."""
    if TORCH.lacks_values(call.weights) and not is_recorded():
        return _moments_without_values(call)
    tensors = [x for x in (call.weights, call.mu, call.sigma) if not is_number(x)]
    if torch._C._len_torch_dispatch_stack() or torch._C._is_tracing() or any(map(TORCH.is_opaque, tensors)):
        raise ValueError(
            "mu, sigma, weights: expected plain tensors outside PyTorch's transformations (torch.func,"
            " torch.autograd.forward_ad, torch.jit.trace, a dispatch mode or a tensor subclass), in which"
            " weighted_moments cannot be"
        )
    check_weights(call.weights)
    weights, keys, batch = call.weights, None, None
    if is_in_array(call.seed) or isinstance(call.seed, torch.Tensor):
        keys, batch = keys_of(call.seed, weights.device)
        keys = keys[0] if batch is None else keys
    mu, sigma = call.mu, call.sigma
    if batch is None:
        mu, sigma = (x if is_number(x) else _vector(x) for x in (mu, sigma))
    seed = None if keys is not None else Key(*checked_key(call.seed))
    plain = _TransformedCall(call._replace(weights=None, mu=None, sigma=None, seed=seed), function, batch)
    results: tuple[Any, ...] = _Moments.apply(plain, weights, mu, sigma, keys)
    return results


class _Moments(torch.autograd.Function):
    """The moments as a function of weights, mu, sigma and keys. mu and sigma may be numbers, and keys may be None."""

    @staticmethod
    def forward(static: Any, weights: Any, mu: Any, sigma: Any, keys: Any) -> Any:
        return static.moments(weights, mu, sigma, keys)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.static, weights, *others = inputs
        check_weights(weights)
        ctx.dtype = output[0].dtype
        ctx.numbers = [x if is_number(x) else None for x in others]
        # Derivatives read all tensors again, and PyTorch raises if a tensor has changed.
        tensors = weights, *(None if is_number(x) else x for x in others)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def _sums(ctx: Any, draws: bool, *others: Any) -> tuple[Any, ...]:
        """The sum of the weights, sigma, the sums of the noise and its squares, and `others`, in the computing type.

        If not `draws`, both sums of noise are 0.
        """
        weights, mu, sigma, keys = ctx.saved_tensors
        is_batch, real = ctx.static.size is not None, dtype_of(MATRIX_TYPES[name_of(ctx.dtype)].computing)
        sums = ctx.static.sums(real, weights, sigma if mu is None else mu, keys) if draws else (0.0, 0.0)
        # Weights of float32 are summed in float64 too.
        total = weights.detach().to(real).sum(-1, dtype=torch.float64, keepdim=is_batch).to(real)
        if sigma is not None:
            sigma = (sigma if is_batch else _vector(sigma)).to(real)
        deviation = ctx.numbers[1] if sigma is None else sigma
        return total, deviation, (*sums, None)[:2], *(None if x is None else x.to(real) for x in others)

    @staticmethod
    @with_default_floats
    def backward(ctx: Any, *gradients: Any) -> Any:
        draws = ctx.needs_input_grad[3]  # The gradient of mu contains no noise.
        total, deviation, (first, second), of_first, of_second = _Moments._sums(ctx, draws, *(*gradients, None)[:2])
        _, mu, sigma, _ = ctx.saved_tensors
        of_mu = of_sigma = None
        if of_first is not None:
            of_mu, of_sigma = of_first * total, of_first * first
        if of_second is not None:
            part = 2 * (of_second * second * deviation)
            of_sigma = part if of_sigma is None else of_sigma + part
        return None, None, _like(mu, of_mu), _like(sigma, of_sigma), None

    @staticmethod
    def jvp(ctx: Any, static: None, weights: Any, mu: Any, sigma: Any, keys: None) -> Any:
        if weights is not None:
            raise ValueError("weights: expected no tangent, since derivatives are those of mu and sigma only")
        total, deviation, (first, second), mu, sigma = _Moments._sums(ctx, True, mu, sigma)
        mu, sigma = (0.0 if x is None else x for x in (mu, sigma))
        results = [mu * total + sigma * first]
        if second is not None:
            results.append(2 * deviation * sigma * second)
        return tuple(x.to(ctx.dtype) for x in results)

    @staticmethod
    def vmap(info: Any, in_dims: Any, static: _TransformedCall, weights: Any, mu: Any, sigma: Any, keys: Any) -> Any:
        size, inner = info.batch_size, static.size
        if keys is None:
            keys = keys_of([static.call.seed], weights.device)[0][0]
        tensors: list[Any] = []
        for k, (x, dim) in enumerate(zip((weights, mu, sigma, keys), in_dims[1:], strict=True)):
            if isinstance(x, torch.Tensor):
                if inner is not None:
                    x = joined(x, dim, size, inner if k < 3 and x.dim() < (2 if dim is None else 3) else None)
                elif dim is not None:
                    x = x.movedim(dim, 0)
                elif k == 3:  # All elements may share other tensors.
                    x = x.expand(size, *x.shape)
            tensors.append(x)
        total = size if inner is None else size * inner
        plain = static._replace(call=static.call._replace(seed=None), size=total)
        results = _Moments.apply(plain, *tensors)
        if inner is not None:
            results = tuple(x.unflatten(0, (size, inner)) for x in results)
        return results, (0,) * len(results)


# Function.apply without its support for torch.func, which costs 20 us.
_apply = super(torch.autograd.Function, _Moments).apply


def _like(x: Any, gradient: Any) -> Any:
    """The gradient in the shape and type of the operand `x`, which may lack the batch's axis, or have shape (d, 1)."""
    if x is None or gradient is None:
        return None
    if gradient.dim() < x.dim():
        gradient = gradient[:, None]
    return gradient.sum_to_size(x.shape).to(x.dtype)


def _vector(x: Any) -> Any:
    return x[:, 0] if x.dim() == 2 else x


def check_weights(weights: Any) -> None:
    if weights.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "weights: require grad, but gradients flow to mu and sigma only, since those of the weights need the"
            " whole sample; detach the weights, or draw the sample with multisample.sample"
        )


def _moments_without_values(call: Call) -> tuple[Any, ...]:
    """The moments of meta or fake tensors."""
    check_weights(call.weights)
    inputs = inspect_inputs(TORCH, call)
    shape = (inputs.d,) if inputs.batch is None else (inputs.batch, inputs.d)
    moments = torch.empty(shape, dtype=dtype_of(inputs.dtype), device=call.weights.device)
    # The first moment requires grad if mu or sigma does. The second moment requires grad if sigma does.
    of_sigma = 0 if is_number(call.sigma) else call.sigma.sum()
    of_mu = of_sigma if is_number(call.mu) else of_sigma + call.mu.sum()
    return tuple((moments + x).to(moments.dtype) for x in (of_mu, of_sigma)[: call.order])
