"""Calls with arrays of unknown libraries, or with host arrays for a backend that draws on a device.

The arrays are shared with a known library by protocol, or copied to it. A plan of the known library draws, and the
result is converted to the caller's library.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from multisample.backends.contract import Backend
from multisample.backends.memory.host import rounded
from multisample.backends.system.cuda_driver import keeping_context

from .._arguments import describe
from .._checks.operands import inspect_inputs
from .._checks.values import check_values
from .._libraries import HOST, Device, Library, is_number, library_called
from .._libraries.foreign import ForeignLibrary
from .._plan import Call, check_rows, draw_planned
from .._randomness.generator import DEFAULT_GENERATOR
from .._streams import keep_until_done, order_after, order_before

__all__ = ["adopted", "draw_adopted", "draw_from_host", "stream_order"]


def draw_adopted(call: Call, caller: ForeignLibrary, device: Device, backend: Backend) -> Any:
    """Draw a call with arrays of a foreign library on `device`."""
    on_device = device.kind == "cuda"
    arguments = {"mu": call.mu, "sigma": call.sigma, "out": call.out}
    library, kernel_arrays = adopted(arguments, caller, device, backend)
    call = call._replace(**kernel_arrays)
    inputs = inspect_inputs(library, call.mu, call.sigma, call.dtype)
    caller.check_dtype(inputs.dtype)
    if call.out is None and not on_device:
        shape = (inputs.d, call.n) if call.layout == "dn" else (call.n, inputs.d)
        call = call._replace(out=caller.host.allocator(shape, inputs.dtype, device)(None))
    call = _with_generator(call)
    with stream_order(arguments, kernel_arrays, caller, library, device) as stream:
        result = draw_planned(call, backend, library)
    return arguments["out"] if "out" in kernel_arrays else caller.hand_over(result, device, library, stream)


def adopted(
    arguments: dict[str, Any], caller: ForeignLibrary, device: Device, backend: Backend
) -> tuple[Library, dict[str, Any]]:
    """The library that draws for `caller`, and its arrays over the memory of those among the arguments."""
    arrays = {name: x for name, x in arguments.items() if not (x is None or is_number(x))}
    if device.kind == "cuda":
        library: Library = library_called(backend.host_library)
        adopt: Callable[[Any], Any] = backend.adopt
    else:
        library, adopt = caller.host, caller.as_numpy
    return library, {name: _adopted(name, x, caller, device, adopt) for name, x in arrays.items()}


@contextlib.contextmanager
def stream_order(
    arguments: dict[str, Any], kernel_arrays: dict[str, Any], caller: ForeignLibrary, library: Library, device: Device
) -> Iterator[int]:
    """Launches run on this stream, in order with the streams that arrays name; 0 for host memory."""
    if device.kind != "cuda":
        yield 0
        return
    caller_arrays, stream_of = [arguments[name] for name in kernel_arrays], library.stream(device)
    stream = stream_of(next(iter(kernel_arrays.values())))
    named = [*map(caller.named_stream, caller_arrays), *map(stream_of, kernel_arrays.values())]
    other_streams = order_before(named, device, stream)
    yield stream
    order_after(other_streams, device, stream)
    keep_until_done((caller_arrays, kernel_arrays), device, stream)


def _adopted(name: str, array: Any, caller: ForeignLibrary, device: Device, adopt: Callable[[Any], Any]) -> Any:
    """Argument `name`, an array of `caller`, as ``adopt(array)``; TypeError if its memory cannot be shared."""
    where = caller.device(name, array)
    if where != device:
        raise ValueError(f"{name}: expected it on the device of the other arrays, {device}, got {where}")
    try:
        with keeping_context() if device.kind == "cuda" else contextlib.nullcontext():
            return adopt(array)
    except MemoryError:
        raise
    except Exception as error:  # A foreign class may raise anything.
        raise TypeError(
            f"{name}: expected an array whose memory can be shared, got {describe(array)} ({error})"
        ) from error


def _with_generator(call: Call) -> Call:
    """`call`, with our default generator if it has no generator and no seed.

    Without it, a tensor that the backend adopted would follow PyTorch's generator.
    """
    return call if call.generator or call.seed is not None else call._replace(generator=DEFAULT_GENERATOR)


def draw_from_host(call: Call, backend: Backend) -> Any:
    """Draw a call with NumPy arrays on a backend that returns arrays of another library."""
    inputs = inspect_inputs(HOST, call.mu, call.sigma, call.dtype)
    check_rows(call.dim_offset, inputs.d)
    check_values(HOST, {"mu": call.mu, "sigma": call.sigma}, inputs.dtype)
    if call.out is not None:
        raise ValueError(f"out: backend {backend.name!r} writes {backend.host_library} arrays, got host memory")
    real = np.float64 if inputs.dtype == "float64" else np.float32

    def moved(x: Any) -> Any:
        return backend.adopt(np.ascontiguousarray(np.broadcast_to(rounded(x.reshape(-1), real), (inputs.d,))))

    mu, sigma = (x if is_number(x) else moved(x) for x in (call.mu, call.sigma))
    call = _with_generator(call._replace(mu=mu, sigma=sigma, dtype=inputs.dtype))
    return draw_planned(call, backend, library_called(backend.host_library))
