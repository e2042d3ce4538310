"""Fake, autograd and vmap rules of ``torch.ops.multisample``.

The operators themselves are C++ and CUDA C++; ``csrc/torch/cpu.cpp`` has their schemas. torch_ext calls `register`
after loading its CPU library.

A sample is linear in mu and sigma, and its noise can be drawn again. So a derivative of any order is another draw with
the same seed and offset, and autograd saves nothing as large as the sample.
"""

import functools
from typing import Any, TypeAlias

import torch
from torch.autograd import forward_ad

from ..element_types import MATRIX_TYPES

Options: TypeAlias = dict[str, Any]
"""Keyword arguments of an operator: numbers and flags."""

_OPERATORS = torch.ops.multisample
_REAL = tuple(getattr(torch, name) for name in MATRIX_TYPES)


@functools.cache
def register() -> Any:
    """Register the fake, autograd and vmap rules. Keep the returned Library alive."""
    library = torch.library.Library("multisample", "IMPL")
    for name, fake, function, tensors, count in (
        ("sample", _fake_sample, _Sample, 2, 5), ("sample_backward", _fake_sample_backward, _SampleBackward, 1, 3),
    ):  # fmt: skip
        differentiable, transformed = _rules(getattr(_OPERATORS, name).default, function, tensors, count)
        torch.library.register_fake(f"multisample::{name}", fake)
        library.impl(name, differentiable, "Autograd", with_keyset=True)
        # torch.func handles an autograd.Function at its own dispatch key, but not at the Autograd key, where
        # torch.library.register_autograd puts it.
        library.impl(name, transformed, "FuncTorchDynamicLayerFrontMode")
    torch.library.register_fake("multisample::sample_", lambda out, *arguments, **options: None)
    library.impl("sample_", _sample_to_without_derivative, "Autograd", with_keyset=True)
    torch.library.register_vmap("multisample::sample_", _batched_sample_to)
    return library


# --- Fake results: operators check their arguments when they run -----------------------------------


def _fake_sample(
    mu: Any, sigma: Any, n: Any, counter: Any = None, keys: Any = None, *, dtype: Any = None, transposed: bool = False,
    **options: Any,
) -> Any:  # fmt: skip
    torch._check(n >= 0, lambda: f"multisample::sample: n must be at least 0, got {n}")
    d, batch = mu.shape[-1:], () if keys is None else keys.shape[:1]
    shape = (n, *d) if transposed else (*d, n)
    return mu.new_empty((*batch, *shape), dtype=dtype or _promoted(mu.dtype, sigma.dtype))


def _fake_sample_backward(
    grad: Any, counter: Any = None, keys: Any = None, *, transposed: bool = False, **options: Any
) -> Any:
    shape = (*grad.shape[:-2], grad.shape[-1 if transposed else -2])
    dtype = torch.float64 if grad.dtype is torch.float64 else torch.float32
    return grad.new_empty(shape, dtype=dtype), grad.new_empty(shape, dtype=dtype)


def _promoted(mu: torch.dtype, sigma: torch.dtype) -> torch.dtype:
    """The default dtype of the operators: integers count as float32."""
    return torch.promote_types(*(dtype if dtype in _REAL else torch.float32 for dtype in (mu, sigma)))


# --- Derivatives ----------------------------------------------------------------------------------


class _Sample(torch.autograd.Function):
    """The operator `sample`, differentiable in `mu` and `sigma`, with a rule for vmap."""

    @staticmethod
    def forward(mu: Any, sigma: Any, n: Any, counter: Any, keys: Any, options: Options) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return _OPERATORS.sample.default(mu, sigma, n, counter, keys, **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        mu, sigma, ctx.n, counter, keys, options = inputs
        ctx.vectors = (mu.dim(), mu.dtype), (sigma.dim(), sigma.dtype)
        ctx.dtype = output.dtype
        ctx.noise = {name: option for name, option in options.items() if name != "dtype"}
        ctx.save_for_backward(counter, keys)
        ctx.save_for_forward(counter, keys)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if ctx.needs_input_grad[1]:
            sums = _OPERATORS.sample_backward.default(grad, *ctx.saved_tensors, **ctx.noise)
        else:  # The gradient of mu contains no noise.
            real = torch.float64 if grad.dtype is torch.float64 else torch.float32
            sums = grad.sum(-2 if ctx.noise.get("transposed", False) else -1, dtype=real), None
        gradients = [
            (gradient if gradient.dim() == dim else gradient.sum(0)).to(dtype) if needed else None
            for gradient, (dim, dtype), needed in zip(sums, ctx.vectors, ctx.needs_input_grad[:2], strict=True)
        ]
        return *gradients, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, mu: Any, sigma: Any, *_: Any) -> Any:
        return _OPERATORS.sample.default(mu, sigma, ctx.n, *ctx.saved_tensors, **ctx.noise, dtype=ctx.dtype)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, mu: Any, sigma: Any, n: Any, counter: Any, keys: Any, options: Options
    ) -> tuple[Any, int]:
        size, of_mu, of_sigma = info.batch_size, in_dims[0], in_dims[1]
        if keys is None:
            keys, options = _keys_of(size, counter, in_dims[3], mu, options)
            vectors = [x if dim is None else x.movedim(dim, 0) for x, dim in ((mu, of_mu), (sigma, of_sigma))]
            return _Sample.apply(*vectors, n, None, keys, options), 0
        keys = joined(keys, in_dims[4], size)
        batch = keys.shape[0] // size
        vectors = [
            joined(x, dim, size, batch if x.dim() < (2 if dim is None else 3) else None)
            for x, dim in ((mu, of_mu), (sigma, of_sigma))
        ]
        return _Sample.apply(*vectors, n, None, keys, options).unflatten(0, (size, batch)), 0


class _SampleBackward(torch.autograd.Function):
    """The operator `sample_backward`. Its derivative is a sample."""

    @staticmethod
    def forward(grad: Any, counter: Any, keys: Any, options: Options) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return _OPERATORS.sample_backward.default(grad, counter, keys, **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        grad, counter, keys, ctx.options = inputs
        ctx.n = grad.shape[-2 if ctx.options.get("transposed", False) else -1]
        ctx.dtype = grad.dtype
        ctx.save_for_backward(counter, keys)
        ctx.save_for_forward(counter, keys)

    @staticmethod
    def backward(ctx: Any, grad_mu: Any, grad_sigma: Any) -> Any:
        words = ctx.saved_tensors
        x = _OPERATORS.sample.default(grad_mu, grad_sigma, ctx.n, *words, **ctx.options, dtype=ctx.dtype)
        return x, None, None, None

    @staticmethod
    def jvp(ctx: Any, grad: Any, *_: Any) -> Any:
        return _OPERATORS.sample_backward.default(grad, *ctx.saved_tensors, **ctx.options)

    @staticmethod
    def vmap(info: Any, in_dims: Any, grad: Any, counter: Any, keys: Any, options: Options) -> Any:
        size, dim = info.batch_size, in_dims[0]
        if keys is None:
            batch = grad.expand(size, *grad.shape) if dim is None else grad.movedim(dim, 0)
            keys, options = _keys_of(size, counter, in_dims[1], grad, options)
            return _SampleBackward.apply(batch, None, keys, options), (0, 0)
        gradients = _SampleBackward.apply(joined(grad, dim, size), None, joined(keys, in_dims[2], size), options)
        return tuple(gradient.unflatten(0, (size, -1)) for gradient in gradients), (0, 0)


def joined(x: Any, dim: int | None, size: int, inner: int | None = None) -> Any:
    """A tensor with one axis for the batches of two nested vmaps; as it is if it has neither axis.

    `dim` is the axis of the outer vmap, of length `size`; None if all of its elements share `x`. The axis of the inner
    vmap is the first of the others. If `x` lacks that axis, `inner` is its length.
    """
    if dim is None and inner is not None:
        return x
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    if inner is not None:
        x = x[:, None].expand(size, inner, *x.shape[1:])
    return x.flatten(0, 1)


def _keys_of(size: int, counter: Any, dim: int | None, like: Any, options: Options) -> tuple[Any, Options]:
    """The keys of `size` elements. `counter` has one offset for each or for all; if it is None, `options` has it."""
    seed, offset = (
        torch.full((size,), options.get(word, 0), dtype=torch.int64, device=like.device) for word in ("seed", "offset")
    )
    if counter is not None:
        offset = (counter if dim is None else counter.movedim(dim, 0)).reshape(-1).expand(size)
    return torch.stack((seed, offset), 1), {**options, "seed": 0, "offset": 0}


def _has_derivative(*tensors: Any) -> bool:
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _below_autograd(operator: Any, keys: Any, *arguments: Any, **options: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return operator.redispatch(keys & torch._C._after_autograd_keyset, *arguments, **options)


def _rules(operator: Any, function: Any, tensors: int, count: int) -> tuple[Any, Any]:
    """The rules for autograd and for torch.func, of an operator differentiable in its first `tensors` arguments.

    It has `count` positional arguments, of which the last two, counter and keys, may be missing.
    """
    # Function.apply without its support for torch.func, which looks up the signature of `forward` in each call.
    record = super(torch.autograd.Function, function).apply

    def differentiable(keys: Any, *arguments: Any, **options: Any) -> Any:
        arguments = (*arguments, None, None)[:count]
        if _has_derivative(*arguments[:tensors]):
            return record(*arguments, options)
        return _below_autograd(operator, keys, *arguments, **options)

    def transformed(*arguments: Any, **options: Any) -> Any:
        return function.apply(*(*arguments, None, None)[:count], options)

    return differentiable, transformed


def _sample_to_without_derivative(
    keys: Any, out: Any, mu: Any, sigma: Any, counter: Any = None, **options: Any
) -> None:
    if _has_derivative(out, mu, sigma):
        raise RuntimeError(
            "multisample::sample_: expected tensors that do not require grad, because it writes to an existing tensor;"
            " multisample::sample is differentiable"
        )
    _below_autograd(_OPERATORS.sample_.default, keys, out, mu, sigma, counter, **options)
    torch.autograd.graph.increment_version(out)


def _batched_sample_to(
    info: Any, in_dims: Any, out: Any, mu: Any, sigma: Any, counter: Any = None, **options: Any
) -> Any:
    if in_dims[0] is None:
        raise RuntimeError(
            "multisample::sample_: expected an out for each element of the batch that vmap maps over, got one for all"
        )
    axes = list(zip((out, mu, sigma, counter), (*in_dims, None), strict=False))
    for b in range(info.batch_size):
        _OPERATORS.sample_.default(*(x if dim is None else x.select(dim, b) for x, dim in axes), **options)
    return None, None
