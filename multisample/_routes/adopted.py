"""Calls with arrays of unknown libraries, or with host arrays for a backend that draws on a device.

The arrays are shared with a known library by protocol, or copied to it. A plan of the known library runs the call, and
the result is converted to the caller's library.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from multisample.backends.contract import Backend
from multisample.backends.element_types import MATRIX_TYPES
from multisample.backends.memory.host import rounded
from multisample.backends.system.cuda_driver import keeping_context

from .._arguments import describe
from .._checks.operands import inspect_inputs, promoted
from .._checks.values import check_values
from .._libraries import HOST, Device, Library, is_number, library_called, library_of
from .._libraries.foreign import ForeignLibrary
from .._operations import Call, vectors_of
from .._plan import run_planned
from .._randomness.seed_argument import is_in_array
from .._stream_order import keep_until_done, order_after, order_before


def run_adopted(call: Call, caller: ForeignLibrary, device: Device, backend: Backend) -> Any:
    """Run a call with arrays of a foreign library on `device`."""
    arguments = {name: x for name, x in vectors_of(call).items() if not is_number(x)}
    if call.out is not None:
        arguments["out"] = call.out
    if is_in_array(call.seed) and isinstance(library_of("seed", call.seed), ForeignLibrary):
        arguments["seed"] = call.seed
    if device.kind == "cuda":
        library: Library = library_called(backend.host_library)
        adopt: Callable[[Any], Any] = backend.adopt
    else:
        library, adopt = HOST, caller.as_numpy
    kernel_arrays = {name: _adopted(name, x, caller, device, adopt) for name, x in arguments.items()}
    call = call._replace(**kernel_arrays)
    if device.kind != "cuda":
        result = run_planned(call, backend, library)
    else:
        if call.dtype is None:  # As NumPy promotes, whichever library adopts the arrays.
            vectors = {name: x for name, x in kernel_arrays.items() if name in ("mu", "sigma")}
            call = call._replace(dtype=promoted([library.describe(name, x).counts_as for name, x in vectors.items()]))
        # The launch is ordered with the streams of the arrays.
        stream_of, caller_arrays = library.stream(device), list(arguments.values())
        stream, *others = map(stream_of, kernel_arrays.values())
        other_streams = order_before([*map(caller.named_stream, caller_arrays), *others], device, stream)
        result = run_planned(call, backend, library)
        order_after(other_streams, device, stream)
        keep_until_done((caller_arrays, kernel_arrays), device, stream)
    if call.out is not None:
        return arguments["out"]
    like = next(iter(arguments.values()))
    return tuple(caller.returned(x, like) for x in result) if call.order else caller.returned(result, like)


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


def run_from_host(call: Call, backend: Backend) -> Any:
    """Run a call with NumPy arrays on a backend that returns arrays of another library."""
    inputs = inspect_inputs(HOST, call)
    check_values(HOST, vectors_of(call), inputs.dtype)
    if call.out is not None:
        raise ValueError(f"out: backend {backend.name!r} writes {backend.host_library} arrays, got host memory")
    real = MATRIX_TYPES[inputs.dtype].computing
    moved: dict[str, Any] = {}
    for name, x in vectors_of(call).items():
        if not is_number(x):
            moved[name] = backend.adopt(np.ascontiguousarray(rounded(x, real)).reshape(x.shape))
    call = call._replace(dtype=inputs.dtype, **moved)
    return run_planned(call, backend, library_called(backend.host_library))
