"""Calls of `multisample.sample` that PyTorch has to see: where it records gradients, or transforms functions.

Such a call is one of an operator, through PyTorch's dispatcher, which takes longer than to hand addresses to a kernel.
And a number of Python's would be the same in every run of a graph, or for every element of a batch: where new ones are
expected, an operator of PyTorch's draws the offset, and it stays on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import _functorch

from multisample.backends.contract import Backend

from .._arguments import DTYPES
from .._cuda_driver import is_capturing
from .._generator import WORD_64, Generator, take_from_torch
from .._libraries import Device, element, is_opaque, library_of
from .._operands import common_length, is_number, promoted
from .._sample import ROWS, captured_offset, seed_and_offset
from ._operators import Sample

__all__ = ["SEED", "draw_offset", "is_batched", "sample_apart", "sample_recorded", "sample_transformed"]

SEED = 0x636F6D70696C6564
"""The seed wherever the offset is drawn on the device: the bytes of "compiled"."""

_REAL = {name: getattr(torch, name) for name in DTYPES}


def draw_offset(device: Any, generator: Any = None) -> Any:
    """A new offset from `generator`, or from PyTorch's default one of `device`, in the memory of `device`."""
    options: dict[str, Any] = {"dtype": torch.int64, "device": device}
    if generator is not None:
        options["generator"] = generator
    if not torch.compiler.is_compiling():
        return torch.randint(-(2**63), 2**63 - 1, (1,), **options)
    # What PyTorch's compiler makes of one draw has 2**32 values on the CPU, and on CUDA a range of 31 bits.
    low, high = [torch.randint(0, 2**31 - 1, (1,), **options) for _ in range(2)]
    return low | high << 31


# --- Gradients ------------------------------------------------------------------------------------


def sample_recorded(
    mu: Any, sigma: Any, n: int, *, seed: int | None, generator: Any, backend: Backend, device: Device, stream: int,
    **options: Any,
) -> Any:  # fmt: skip
    """`sample` where gradients are recorded, in a call that has been checked like any other."""
    counter, offset = None, 0
    library = library_of("mu", sigma if is_number(mu) else mu)
    if isinstance(generator, Generator) and generator.graph_safe:
        on_device = generator._counter_on(device, library, stream)
        with on_device.lock:
            # What it is now, as the backward pass will ask for.
            seed, counter = generator.seed, torch.as_tensor(on_device.array).clone()
            backend.advance(on_device.address, device.ordinal, stream)
    elif seed is None and is_capturing(stream):
        seed, counter = captured_offset(generator, library, device)
    else:
        seed, offset = seed_and_offset(seed, generator, library, device)
    return _call_operator(mu, sigma, n, None, counter, seed=seed, offset=offset, **options)


# --- Transformations ------------------------------------------------------------------------------


def sample_transformed(
    mu: Any, sigma: Any, n: Any, *, seed: Any, generator: Any, dtype: str | None, out: Any, validate: bool, layout: str,
    dim_offset: Any, is_known: Callable[[Any], bool] = bool, **options: Any,
) -> Any:  # fmt: skip
    """`sample` where a tensor may be a batch, or have no values; what is no tensor has been checked.

    `is_known` tells whether a comparison with a number of the caller's holds in every run that the call stands for.
    """
    tensors = {name: x for name, x in (("mu", mu), ("sigma", sigma)) if not is_number(x)}
    dtype = _checked_dtype(tensors, dtype)
    d = common_length({name: x.shape for name, x in tensors.items()})
    _check_devices(tensors if out is None else {**tensors, "out": out})
    for name, x in (("mu", mu), ("sigma", sigma)):
        if is_number(x):
            _check_number(name, x, dtype, is_known)
    if dim_offset + d > ROWS:
        raise ValueError(f"dim_offset: expected dim_offset + d <= 2**32, got {dim_offset} + {d}")
    if validate:
        raise ValueError(
            "validate: expected False where PyTorch compiles or transforms the call, as there are no values to look at"
        )
    if out is not None:
        _check_out(out, (n, d) if layout == "nd" else (d, n), dtype, tensors)
    counter, offset = None, 0
    if seed is None:
        device = next(iter(tensors.values())).device
        if isinstance(generator, Generator):
            seed, offset = _taken(generator, device)
        elif is_batched() or _stands_for_several(device, *tensors.values()):
            seed, counter = SEED, draw_offset(device, generator)
        else:
            seed, offset = take_from_torch(generator, str(device))
    return _call_operator(
        mu, sigma, n, out, counter, seed=seed, offset=offset, dtype=dtype, layout=layout, dim_offset=dim_offset,
        **options,
    )  # fmt: skip


def _checked_dtype(tensors: dict[str, Any], dtype: str | None) -> str:
    counts_as = []
    for name, x in tensors.items():
        if x.layout is not torch.strided:
            raise TypeError(f"{name}: expected a strided tensor, got layout {x.layout}")
        counts_as.append(element(name, str(x.dtype).removeprefix("torch.")))
    return promoted(counts_as) if dtype is None else dtype


def _check_devices(tensors: dict[str, Any]) -> None:
    (first, model), *others = tensors.items()
    for name, x in others:
        if x.device != model.device:
            raise ValueError(f"{name}: expected it on the device of {first}, {model.device}, got {x.device}")


def _check_number(name: str, x: Any, dtype: str, is_known: Callable[[Any], bool]) -> None:
    most = torch.finfo(torch.float64 if dtype == "float64" else torch.float32).max
    least, accepted = (-most, "finite means") if name == "mu" else (0, "finite standard deviations of at least 0")
    if is_known(x < least) or is_known(x > most) or is_known(x != x):
        raise ValueError(f"{name}: expected {accepted}, got {x} for {dtype}")


def _check_out(out: Any, shape: tuple[Any, Any], dtype: str, sources: dict[str, Any]) -> None:
    if tuple(out.shape) != shape:
        raise ValueError(f"out: expected shape {shape}, got {tuple(out.shape)}")
    if out.dtype is not _REAL[dtype]:
        raise ValueError(f"out: expected dtype {dtype}, got {str(out.dtype).removeprefix('torch.')}")
    for name, x in {**sources, "out": out}.items():
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: requires grad, and out= takes no gradient; detach it, or call sample under torch.no_grad()"
            )


def _taken(generator: Generator, device: Any) -> tuple[int, int]:
    if generator.graph_safe or is_batched() or _is_captured(device):
        raise ValueError(
            "generator: expected a torch.Generator where PyTorch transforms the call, which can draw for each element"
            f" of a batch and in each replay of a graph, got {generator}; or pass seed="
        )
    return generator._take()


def _stands_for_several(device: Any, *tensors: Any) -> bool:
    """Whether the call is one of several that expect new numbers: of the runs of what is traced."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or any(map(is_opaque, map(type, tensors)))
        or _is_captured(device)
    )


def is_batched() -> bool:
    """Whether the call is one for a batch, whatever its tensors are."""
    layers = _functorch.get_interpreter_stack() or ()
    return any(layer.key() == _functorch.TransformType.Vmap for layer in layers)


def _is_captured(device: Any) -> bool:
    return bool(device.type == "cuda" and torch.cuda.is_current_stream_capturing())


# --- Operators ------------------------------------------------------------------------------------


def _call_operator(
    mu: Any, sigma: Any, n: Any, out: Any, counter: Any, *,
    dtype: str, seed: Any, offset: Any, noise: str, fast_math: Any, antithetic: Any, layout: str, **window: Any,
) -> Any:  # fmt: skip
    """The sample, or `out`, from arguments that have been checked; one of `mu` and `sigma` at least is a tensor."""
    model = sigma if is_number(mu) or mu.dim() == 0 else mu
    vectors = _vector(mu, model, dtype), _vector(sigma, model, dtype)
    options = {
        "seed": _as_int64(seed), "offset": _as_int64(offset), "shared": noise == "shared",
        "fast_math": bool(fast_math), "antithetic": bool(antithetic), **window,
    }  # fmt: skip
    if out is not None:
        torch.ops.multisample.sample_(out if layout == "dn" else out.T, *vectors, counter, **options)
        return out
    options |= {"dtype": _REAL[dtype], "transposed": layout == "nd"}
    if counter is not None and is_batched():
        return sample_apart(*vectors, n, counter, **options)
    return torch.ops.multisample.sample(*vectors, n, counter, **options)


def sample_apart(mu: Any, sigma: Any, n: Any, counter: Any, **options: Any) -> Any:
    """The operator's sample, in which counters of a batch only have to give other numbers for each element."""
    return Sample.apply(mu, sigma, n, counter, True, options)


def _vector(x: Any, model: Any, dtype: str) -> Any:
    """Whatever stands for a vector, in shape (d,); `model` has as many elements."""
    if is_number(x):
        real = torch.float64 if dtype == "float64" else torch.float32
        # A product need not know x to be compiled.
        x = torch.ones((), dtype=real, device=model.device) * torch.sym_float(x)
    if x.dim() == 1:
        return x
    return x[:, 0] if x.dim() == 2 else x.expand(model.shape[0])


def _as_int64(word: Any) -> Any:
    return word - WORD_64 if word >= 2**63 else word
