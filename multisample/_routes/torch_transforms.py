"""Calls that must not skip PyTorch's dispatcher, as `is_transformed` says.

Such a call becomes an operator call. If its tensors have values, all checks of other calls come first, and the call
takes the same seed and offset as others, so the numbers are the same. An offset passed by value would repeat in every
run of a graph and for every element of a batch. Where each run or element needs new numbers, a PyTorch operator draws
the offset, which stays on the device.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch._C import _functorch
from torch._subclasses import fake_tensor

from multisample.backends.contract import Backend
from multisample.backends.launch import Operation

from .._arguments import rounded_once
from .._checks.operands import check_devices, common_shape, no_matrix, promoted, result_shape
from .._checks.values import RULES, least_and_most
from .._checks.window_and_options import check_rows, count_of
from .._libraries import as_base_class, is_number
from .._libraries.library import counted_as
from .._libraries.torch import TORCH, check_tensor, dtype_of, is_transforming, unseen
from .._operations import Call
from .._plan import check_call
from .._randomness.generator import WORD_64, Generator
from .._randomness.seed_argument import batch_of, checked_key, host_words, is_in_array, key_at
from .._randomness.torch_offsets import SEED, draw_key, draw_offset, taker


def is_transformed(call: Call) -> bool:
    """Whether the call must not skip PyTorch's dispatcher. If so, its tensors may be batches or have no values."""
    tensors = [x for x in (call.mu, call.sigma, call.weights, call.out) if isinstance(x, torch.Tensor)]
    return is_transforming() or any(TORCH.lacks_values(x) or TORCH.is_opaque(x) for x in tensors)


def has_operator(call: Call, backend: Backend) -> bool:
    """Whether an operator can run the call, for a TorchFunctionMode to intercept."""
    is_graph_safe = isinstance(call.generator, Generator) and call.generator.graph_safe
    return call.operation == Operation.sample and backend.name == "torch_ext" and not is_graph_safe


def run_transformed(call: Call, backend: Backend) -> Any:
    """Run a call of `sample` that must not skip the dispatcher; everything except its tensors has been checked."""
    if backend.name != "torch_ext":
        raise ValueError(
            "backend: expected torch_ext where PyTorch transforms the call (torch.func, torch.autograd.forward_ad,"
            f" torch.jit.trace, a dispatch mode or a tensor subclass), got {backend.name!r}"
        )
    return draw_by_operator(call)


def draw_by_operator(call: Call, is_known: Callable[[Any], bool] = bool) -> Any:
    """Draw by the operator. ``is_known(condition)`` tells whether a condition holds in every run of the graph."""
    tensors = {name: x for name, x in (("mu", call.mu), ("sigma", call.sigma)) if not is_number(x)}
    device = next(iter(tensors.values())).device
    given = [x for x in (call.mu, call.sigma, call.out, call.seed) if isinstance(x, torch.Tensor)]
    is_traced = torch.compiler.is_compiling() or _functorch.peek_interpreter_stack() is not None
    if is_traced or any(TORCH.lacks_values(x) or TORCH.is_opaque(x) for x in given):
        dtype, dims = _check_without_values(call, tensors, is_known)
    else:
        with unseen():
            plain = {name: as_base_class(name, x) for name, x in tensors.items()}
            inputs = check_call(call._replace(**plain), TORCH)
            if isinstance(call.seed, torch.Tensor) and call.seed.is_cpu and call.seed.dim():
                host_words(TORCH.host_array(call.seed))  # Raises for a negative seed.
        dtype, dims = inputs.dtype, inputs.dims
    if call.out is not None and torch.is_grad_enabled():
        for name, x in {**tensors, "out": call.out}.items():
            if x.requires_grad:
                raise ValueError(f"{name}: requires grad, and {NO_GRADIENT_TO_OUT}")
    call = call._replace(dtype=dtype)
    keys, batch = None, None
    if is_in_array(call.seed) or isinstance(call.seed, torch.Tensor):
        keys, batch = keys_of(call.seed, device)
    n, ranks = count_of(call.n), [x.dim() for x in tensors.values()]
    shape = result_shape(dims, call, batch)
    if call.shape is not None or isinstance(call.n, tuple) or len(dims) != 1 or max(ranks) > 2:
        d, batches = math.prod(dims), () if batch is None else (batch,)
        lengths = (*batches, n, d) if call.layout == "nd" else (*batches, d, n)
        flat = {name: _flattened(x, dims, batch) for name, x in tensors.items()}
        target = None if call.out is None else _matrix_in(call.out, lengths)
        x = draw_by_operator(call._replace(**flat, n=n, out=target, shape=None), is_known)
        return x.reshape(shape) if call.out is None else call.out
    if keys is not None:
        return _draw_batch(call, keys, batch)
    recorded = is_recorded()
    is_captured = not recorded and device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    is_repeated = is_batched() or is_captured
    lacks_values = not recorded and any(map(TORCH.lacks_values, tensors.values()))
    if call.out is None and not (recorded or lacks_values):
        with unseen():  # Raises if there is no memory for the result, before a generator advances.
            torch.empty(shape, dtype=dtype_of(dtype), device=device)
    if call.seed is not None:
        return _call_operator(call, *checked_key(call.seed), None)
    if lacks_values:
        return _call_operator(call, 0, 0, None)
    if isinstance(call.generator, Generator):
        if call.generator.graph_safe or recorded or is_repeated:
            raise ValueError(
                "generator: expected a torch.Generator where PyTorch transforms the call, since only a torch.Generator"
                " can draw for each element of a batch and in each run of a graph,"
                f" got {call.generator}; or pass seed="
            )
        seed, offset = call.generator._take()
        try:
            return _call_operator(call, seed, offset, None)
        except BaseException:
            call.generator._put_back(seed, offset)
            raise
    # Each run of a recorded or captured call, and each element of a batch, must draw new numbers.
    if recorded and not is_repeated and device.type == "cpu" and not torch.compiler.is_compiling():
        return _draw_batch(call, draw_key(call.generator), None)
    if recorded or is_repeated:
        return _call_operator(call, SEED, 0, draw_offset(device, call.generator))
    with unseen():
        words = taker(str(device))(call.generator)
    return _call_operator(call, *words, None)


def _check_without_values(
    call: Call, tensors: dict[str, Any], is_known: Callable[[Any], bool]
) -> tuple[str, tuple[Any, ...]]:
    """Check tensors whose values, memory or sizes may be unknown. Returns dtype and shape of the dimensions."""
    counts_as = {}
    for name, x in tensors.items():
        check_tensor(name, x)
        counts_as[name] = counted_as(name, str(x.dtype).removeprefix("torch."))
    dtype = promoted([counts_as[name] for name in TORCH.counted(tensors)]) if call.dtype is None else call.dtype
    batch, out = batch_of(call.seed), call.out
    dims = common_shape({name: tuple(x.shape) for name, x in tensors.items()}, batch)
    check_devices(tensors if out is None else {**tensors, "out": out})
    for name, x in (("mu", call.mu), ("sigma", call.sigma)):
        if is_number(x):
            least, most = least_and_most(name, dtype)
            if is_known(x < least) or is_known(x > most) or is_known(x != x):
                raise ValueError(f"{name}: expected {RULES[name][1]}, got {x} for {dtype}")
    check_rows(call.dim_offset, math.prod(dims))
    if call.validate:
        raise ValueError(
            "validate: expected False where PyTorch compiles or transforms the call, since it has no values to check"
        )
    if out is not None:
        shape = result_shape(dims, call, batch)
        if tuple(out.shape) != shape:
            raise ValueError(f"out: expected shape {shape}, got {tuple(out.shape)}")
        if out.dtype is not dtype_of(dtype):
            raise ValueError(f"out: expected dtype {dtype}, got {str(out.dtype).removeprefix('torch.')}")
    return dtype, dims


def _flattened(x: Any, dims: tuple[Any, ...], batch: int | None) -> Any:
    """`mu` or `sigma` as a vector, or in a batch as (B, d)."""
    batches = () if batch is None or x.dim() < 2 else (batch,)
    own = tuple(x.shape[len(batches) :])
    if len(dims) != 1 or not own:  # Otherwise (d,), or (d, 1) for it.
        x = x.reshape(*batches, *(1,) * (len(dims) - len(own)), *own).expand(*batches, *dims)
    return x.flatten(len(batches))


def _matrix_in(out: Any, lengths: tuple[Any, ...]) -> Any:
    try:
        return out.view(lengths)
    except RuntimeError:
        raise ValueError(no_matrix(tuple(out.shape), out.stride(), lengths)) from None


NO_GRADIENT_TO_OUT = "out= takes no gradient; detach it, or call sample under torch.no_grad()"
_NARROW = {torch.int8: 0xFF, torch.int16: 0xFFFF, torch.int32: 0xFFFFFFFF}


def keys_of(seed: Any, device: Any) -> tuple[Any, int | None]:
    """The keys in the argument `seed` as an int64 tensor (B, 2), and B. For one key, None in place of B."""
    if isinstance(seed, torch.Tensor) and seed.dim() == 0:
        batch_of(seed[None])
        batch, seed = None, seed.reshape(1)
    else:
        batch = batch_of(seed)
    if isinstance(seed, (list, tuple)):
        words = [[as_int64(word) for word in key_at(k, x)] for k, x in enumerate(seed)]
        return torch.tensor(words, dtype=torch.int64, device=device).reshape(-1, 2), batch
    if not isinstance(seed, torch.Tensor):
        if not torch.compiler.is_compiling():
            seed = host_words(seed).view(np.int64)
        seed = torch.as_tensor(seed, device=device)
    if seed.device != device:
        raise ValueError(f"seed: expected it on the device of mu and sigma, {device}, got {seed.device}")
    if seed.dtype is torch.uint32:
        halves = seed.reshape(-1, seed.shape[-1]).to(torch.int64)
        seed = halves[:, 0::2] << 32 | halves[:, 1::2]
    elif seed.dtype in _NARROW:
        seed = seed.to(torch.int64) & _NARROW[seed.dtype]
    else:
        seed = seed.to(torch.int64)
    if seed.dim() == 1:
        seed = seed[:, None]
    return (torch.nn.functional.pad(seed, (0, 1)) if seed.shape[1] == 1 else seed), batch


def _draw_batch(call: Call, keys: Any, batch: int | None) -> Any:
    x = _call_operator(call._replace(out=None), 0, 0, None, keys, batch)
    x = x[0] if batch is None else x
    return x if call.out is None else call.out.copy_(x)


def is_recorded() -> bool:
    """Whether the call becomes part of a graph, which may run again."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    modes = map(torch._C._get_dispatch_stack_at, range(torch._C._len_torch_dispatch_stack()))
    return any(mode.is_infra_mode() and not isinstance(mode, fake_tensor.FakeTensorMode) for mode in modes)


def is_batched() -> bool:
    """Whether a vmap is active, even if no tensor of the call is batched."""
    layers = _functorch.get_interpreter_stack() or ()
    return any(layer.key() == _functorch.TransformType.Vmap for layer in layers)


# --- Operators ------------------------------------------------------------------------------------


def options_of(call: Call) -> dict[str, Any]:
    return {
        "dim_offset": call.dim_offset, "sample_offset": call.sample_offset, "shared": call.noise == "shared",
        "fast_math": bool(call.fast_math), "antithetic": bool(call.antithetic),
    }  # fmt: skip


def _call_operator(call: Call, seed: Any, offset: Any, counter: Any, keys: Any = None, batch: int | None = None) -> Any:
    """The sample, or `out`. At least one of `mu` and `sigma` is a tensor."""
    options = {"seed": as_int64(seed), "offset": as_int64(offset), **options_of(call)}
    if call.out is not None:
        target = call.out if call.layout == "dn" else call.out.T
        torch.ops.multisample.sample_(target, *_vectors(call), counter, **options)
        return call.out
    options |= {"dtype": dtype_of(call.dtype), "transposed": call.layout == "nd"}
    return torch.ops.multisample.sample(*_vectors(call, batch), call.n, counter, keys, **options)


def _vectors(call: Call, batch: int | None = None) -> list[Any]:
    """`mu` and `sigma` as tensors of shape (d,), or in a batch also (B, d)."""
    model = call.sigma if is_number(call.mu) or call.mu.dim() == 0 else call.mu
    vectors = []
    for x in (call.mu, call.sigma):
        if is_number(x):
            real = torch.float64 if call.dtype == "float64" else torch.float32
            number = torch.sym_float(x) if torch.compiler.is_compiling() else rounded_once(x, call.dtype)
            # Multiply: a symbolic number stays symbolic.
            x = torch.ones((), dtype=real, device=model.device) * number
        if x.dim() == 0:
            x = x.expand(model.shape[0 if batch is None else -1])
        vectors.append(x[:, 0] if x.dim() == 2 and batch is None else x)
    return vectors


def as_int64(word: Any) -> Any:
    """The signed integer with the bits of an unsigned `word`: operators take no unsigned integers."""
    return word - WORD_64 if word >= 2**63 else word
