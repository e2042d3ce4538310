"""Calls of `weighted_moments` without a plan: they are checked in full, and most of them get a plan."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from multisample.backends.contract import Backend
from multisample.backends.memory.host import rounded

from .._arguments import check_choice, check_flag, checked_integer, describe, dtype_name, is_constant
from .._backends import choose
from .._checks.operands import common_library, inspect_inputs
from .._checks.values import check_values
from .._libraries import HOST, Device, Library, described, is_number, library_called, library_of
from .._libraries.foreign import ForeignLibrary
from .._libraries.jax import is_jax
from .._moments_plan import MOMENT_PLANS, MomentsCall, RecordMoments, make_moments_plan
from .._plan import checked_window
from .._randomness.generator import Key
from .._randomness.source import checked_key
from . import is_compiling

__all__ = ["sum_first"]


def sum_first(call: MomentsCall, key: Hashable, moments: Callable[..., Any]) -> tuple[Any, ...]:
    """Run a call that has no plan. `key` is the key for a new plan; `moments` is `multisample.weighted_moments`."""
    if is_compiling():
        return _outside_of_graphs(call, moments)
    _refuse_dtensors(call)
    if type(call.dim_offset) is not int or type(call.sample_offset) is not int:
        key = None  # Plans take Python's integers only.
    if not (call.dtype is None or is_constant(call.dtype)):
        key = None
    order = checked_integer("order", call.order, 1, 3)
    check_choice("noise", call.noise, ("independent", "shared"))
    for name, flag in (("antithetic", call.antithetic), ("fast_math", call.fast_math)):
        check_flag(name, flag)
    seed = call.seed if isinstance(call.seed, Key) else (call.seed,)
    if any(map(is_jax, (call.weights, call.mu, call.sigma, *seed, call.dim_offset, call.sample_offset))):
        from .jax.moments import sum_jax

        results: tuple[Any, ...] = sum_jax(call._replace(order=order))
        return results
    if is_number(call.weights):
        raise TypeError(f"weights: expected an array of shape (n,), got the number {describe(call.weights)}")
    _, dim_offset, sample_offset = checked_window(0, call.dim_offset, call.sample_offset)
    checked_key(call.seed)
    call = call._replace(
        order=order, dtype=None if call.dtype is None else dtype_name(call.dtype), dim_offset=dim_offset,
        sample_offset=sample_offset,
    )  # fmt: skip
    caller = common_library(call.mu, call.sigma, None)
    if library_of("weights", call.weights) is not caller:
        raise TypeError(
            "weights: expected an array of the library of mu and sigma, got"
            f" {described(call.weights)} with {described(call.sigma if is_number(call.mu) else call.mu)}"
        )
    device = caller.device("weights", call.weights)
    backend = choose(call.backend, caller.name, device.kind)
    if isinstance(caller, ForeignLibrary):
        return _sum_foreign(call, caller, device, backend)
    if caller is HOST:
        arrays = ("weights", call.weights), ("mu", call.mu), ("sigma", call.sigma)
        normalized: dict[str, Any] = {
            name: HOST.normalized(name, x) for name, x in arrays if not (is_number(x) or type(x) is np.ndarray)
        }
        call = call._replace(**normalized)
        if normalized:
            key = None  # The key is that of the arguments.
        if backend.host_library != "numpy":
            return _sum_from_host(call, backend)
    record: RecordMoments | None = None
    if caller.name == "torch":
        from .recorded_moments import recorder

        record = recorder(call, backend)
    plan = make_moments_plan(call, backend, caller, record)
    result = plan.run(call.weights, call.mu, call.sigma, call.seed, call.dim_offset, call.sample_offset)
    if key is not None:
        MOMENT_PLANS.put(key, plan)
    return result


def _refuse_dtensors(call: MomentsCall) -> None:
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if dtensor is not None:
        for name, x in (("weights", call.weights), ("mu", call.mu), ("sigma", call.sigma)):
            if isinstance(x, dtensor):
                raise TypeError(
                    f"{name}: expected an array of one device, got a DTensor: call weighted_moments with each rank's"
                    " own part, at its dim_offset or sample_offset"
                )


def _outside_of_graphs(call: MomentsCall, moments: Callable[..., Any]) -> tuple[Any, ...]:
    """The call, between two graphs of torch.compile."""
    import torch

    results: tuple[Any, ...] = torch.compiler.disable(moments, reason="weighted_moments is no operator of PyTorch")(
        **call._asdict()
    )
    return results


def _run(call: MomentsCall, backend: Backend, library: Library) -> tuple[Any, ...]:
    """The moments of a checked call with arrays of `library`, by a plan that is not kept."""
    plan = make_moments_plan(call, backend, library)
    return plan.run(call.weights, call.mu, call.sigma, call.seed, call.dim_offset, call.sample_offset)


def _sum_foreign(call: MomentsCall, caller: ForeignLibrary, device: Device, backend: Backend) -> tuple[Any, ...]:
    """With arrays of an unknown library, which share their memory with a known one."""
    from .adopted import adopted, stream_order

    arguments = {"weights": call.weights, "mu": call.mu, "sigma": call.sigma}
    library, kernel_arrays = adopted(arguments, caller, device, backend)
    with stream_order(arguments, kernel_arrays, caller, library, device):
        return _run(call._replace(**kernel_arrays), backend, library)


def _sum_from_host(call: MomentsCall, backend: Backend) -> tuple[Any, ...]:
    """With NumPy arrays, on a backend that returns arrays of another library."""
    inputs = inspect_inputs(HOST, call.mu, call.sigma, call.dtype)
    vectors = {"weights": call.weights, "mu": call.mu, "sigma": call.sigma}
    real = np.float64 if inputs.dtype == "float64" else np.float32
    if np.ndim(call.weights) != 1 or np.size(call.weights) == 0:
        raise ValueError(f"weights: expected shape (n,), n being at least 1, got {np.shape(call.weights)}")
    check_values(HOST, vectors, inputs.dtype)
    moved: dict[str, Any] = {
        name: backend.adopt(np.ascontiguousarray(rounded(x.reshape(-1) if x.ndim > 1 else x, real)))
        for name, x in vectors.items()
        if not is_number(x) and np.ndim(x) > 0
    }
    moved |= {name: float(x) for name, x in vectors.items() if name not in moved}
    call = call._replace(dtype=inputs.dtype, **moved)
    return _run(call, backend, library_called(backend.host_library))
