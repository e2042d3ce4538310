"""Arrays that are known by protocols only, and host arrays for a backend that draws on a device.

They are shared with a library that we know, or copied to it, which draws; the result is handed over to the library of
the caller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from multisample.backends.contract import Backend
from multisample.backends.system.cuda_driver import keeping_context

from .._arguments import describe
from .._checks.operands import inspect_inputs
from .._checks.values import check_values
from .._libraries import HOST, Device, is_number, library_called
from .._libraries.foreign import ForeignLibrary
from .._plan import ROWS, Call, draw_planned
from .._randomness.generator import DEFAULT_GENERATOR
from .._streams import keep_until_done, order_after, order_before

__all__ = ["draw_adopted", "draw_from_host"]


def draw_adopted(call: Call, caller: ForeignLibrary, device: Device, backend: Backend) -> Any:
    """A call with arrays of a foreign library on `device`."""
    on_device = device.kind == "cuda"
    library = library_called(backend.host_library) if on_device else caller.host
    adopt = backend.adopt if on_device else caller.as_numpy
    given = {name: x for name, x in (("mu", call.mu), ("sigma", call.sigma), ("out", call.out)) if is_array(x)}
    own = {name: _adopted(name, x, caller, device, adopt) for name, x in given.items()}
    call = call._replace(**own)
    inputs = inspect_inputs(library, call.mu, call.sigma, call.dtype)
    caller.check_dtype(inputs.dtype)
    if call.out is None and not on_device:
        shape = (inputs.d, call.n) if call.layout == "dn" else (call.n, inputs.d)
        call = call._replace(out=caller.host.allocator(shape, inputs.dtype, device)(None))
    call = _with_generator(call)
    others: set[int] = set()
    stream = 0
    if on_device:
        stream_of = library.stream(device)
        stream = stream_of(next(iter(own.values())))
        named = [*map(caller.named_stream, given.values()), *map(stream_of, own.values())]
        others = order_before(named, device, stream)
    result = draw_planned(call, backend, library)
    if on_device:
        order_after(others, device, stream)
        keep_until_done((given, own), device, stream)
    return given["out"] if "out" in given else caller.hand_over(result, device, library, stream)


def is_array(x: Any) -> bool:
    """Whether an argument is an array, and neither a number nor left out."""
    return not (x is None or is_number(x))


def _adopted(name: str, array: Any, caller: ForeignLibrary, device: Device, adopt: Callable[[Any], Any]) -> Any:
    where = caller.device(name, array)
    if where != device:
        raise ValueError(f"{name}: expected it on the device of the other arrays, {device}, got {where}")
    try:
        with keeping_context() if device.kind == "cuda" else contextlib.nullcontext():
            return adopt(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{name}: expected an array whose memory can be shared, got {describe(array)} ({error})"
        ) from error


def _with_generator(call: Call) -> Call:
    """The same call with a generator or a seed: only the tensors of a caller follow PyTorch's generators."""
    return call if call.generator or call.seed is not None else call._replace(generator=DEFAULT_GENERATOR)


def draw_from_host(call: Call, backend: Backend) -> Any:
    """A call with NumPy arrays for a backend whose results are of another library."""
    inputs = inspect_inputs(HOST, call.mu, call.sigma, call.dtype)
    if call.dim_offset + inputs.d > ROWS:
        raise ValueError(f"dim_offset: expected dim_offset + d <= 2**32, got {call.dim_offset} + {inputs.d}")
    check_values(HOST, {"mu": call.mu, "sigma": call.sigma}, inputs.dtype)
    if call.out is not None:
        raise ValueError(f"out: backend {backend.name!r} writes {backend.host_library} arrays, got host memory")
    real = np.float64 if inputs.dtype == "float64" else np.float32
    mu, sigma = (
        x if is_number(x) else backend.adopt(np.ascontiguousarray(np.broadcast_to(x.reshape(-1), (inputs.d,)), real))
        for x in (call.mu, call.sigma)
    )
    call = _with_generator(call._replace(mu=mu, sigma=sigma, dtype=inputs.dtype))
    return draw_planned(call, backend, library_called(backend.host_library))
