"""Calls without a plan: they are checked in full, and most of them get a plan.

Calls that PyTorch compiles or transforms become operator calls, without a plan. Calls with arrays or keys of JAX become
custom calls of XLA. `torch_autograd` adds gradients to a plan. `dtensor` and `adopted` convert the arguments, then call
the public function or a plan. The modules are imported on first use.
"""

import sys
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from multisample.backends.kernels.cpu.floating_point import default_floats, has_default_floats
from multisample.backends.launch import Operation

from .._arguments import dtype_name, is_constant
from .._backends import choose
from .._checks.operands import common_library, with_scalars
from .._checks.window_and_options import check_choices, checked_count, checked_order, checked_window, count_of
from .._libraries import HOST, Library, as_base_class, is_number
from .._libraries.foreign import ForeignLibrary
from .._libraries.jax import is_jax
from .._operations import Call, vectors_of
from .._plan import PLANS, Planned, make_plan, run
from .._randomness.generator import Key
from .._randomness.generator_argument import check_generator, is_listed, keys_from
from .._randomness.seed_argument import checked_key, is_in_array
from .._tracing import is_of_torch, traced_as


@traced_as(lambda: True)
def _is_compiling() -> bool:
    """Whether PyTorch traces the call, with or without torch.compile."""
    compiler = sys.modules.get("torch.compiler")
    return compiler is not None and bool(compiler.is_compiling())


def run_first(call: Call, key: Hashable, function: Callable[..., Any]) -> Any:
    """Run a call of the public `function` without a plan; `key` is that of a new plan, or None."""
    if _is_compiling():
        call = _checked(call)
        from .torch_compile import run_compiled

        return run_compiled(call, function)
    if not has_default_floats():
        with default_floats():
            return run_first(call, key, function)
    if (converted := with_scalars(call)) is not call:  # A plan may exist.
        return converted.repeated(function)
    if is_listed(call.generator):
        return _drawn_from_each(call, function)
    arrays = call.mu, call.sigma, call.weights, call.out
    if any(is_of_torch(x, "DTensor", "torch.distributed.tensor") for x in arrays):
        from .dtensor import draw_dtensor

        return draw_dtensor(call, function)
    words = [call.dim_offset, call.sample_offset, *(call.seed if isinstance(call.seed, Key) else ())]
    if any(type(word) is not int for word in words):
        key = None  # Plans take Python's integers only.
    if is_of_torch(call.seed, "Tensor") and not is_in_array(call.seed):
        key = None  # A single seed in a tensor gets no plan. Vectors of seeds do.
    lengths = call.n if isinstance(call.n, tuple) else (call.n,)
    if not (all(isinstance(n, (int, np.integer)) for n in lengths) and (call.dtype is None or is_constant(call.dtype))):
        key = None  # A plan cannot depend on an object that can change.
    if is_in_array(call.seed) and not isinstance(call.seed, (list, tuple)):
        seed = as_base_class("seed", call.seed)
        if seed is not call.seed:
            call, key = call._replace(seed=seed), None
    if any(map(is_jax, (call.mu, call.sigma, call.weights, call.n, call.seed, *words))):
        from .jax import run_jax

        return run_jax(call, key)
    call = _checked(call)
    caller = common_library(call)
    transformed = False
    if caller.name == "torch":
        from .._libraries.torch import has_function_mode, is_profiled
        from .torch_autograd import ProfiledPlan, torch_plan
        from .torch_transforms import has_operator, is_transformed, run_transformed

        transformed = is_transformed(call)
    plain = None if transformed else _in_base_classes(call, caller)
    if plain is not None:  # A plan may exist.
        result = plain.repeated(function)
        return result if call.out is None else call.out
    name, array = next((name, x) for name, x in vectors_of(call).items() if not is_number(x))
    device = caller.device(name, array)
    check_generator(call.generator, caller, device)
    # An operator of any device gives the shape and type of a result without values.
    backend = choose(call.backend, caller.name, "cpu" if caller.lacks_values(array) else device.kind)
    if isinstance(caller, ForeignLibrary):
        from .adopted import run_adopted

        return run_adopted(call, caller, device, backend)
    if caller is HOST and backend.host_library != "numpy":
        from .adopted import run_from_host

        return run_from_host(call, backend)
    if transformed and call.operation == Operation.moments:
        from .torch_moments import moments_transformed

        return moments_transformed(call, function)
    if transformed or (caller.name == "torch" and has_function_mode() and has_operator(call, backend)):
        return run_transformed(call, backend)
    if caller.name == "torch":
        plan: Planned = torch_plan(call, backend)
        plan = ProfiledPlan(plan, function.__name__) if is_profiled() else plan
        caller.compile_key(backend)
    else:
        plan = make_plan(call, backend, caller)
    result = run(plan, call)
    if key is not None:
        PLANS.put(key, plan)
    return result


def _in_base_classes(call: Call, library: Library) -> Call | None:
    """`call` with arrays of `library` only, in place of lists and subclasses; None if it has no others."""
    arrays = {name: x for name, x in vectors_of(call).items() if x is not None}
    if call.out is not None and library is not HOST:  # NumPy's `target_signature` and `describe` do this for `out`.
        arrays["out"] = call.out
    plain = {name: own for name, x in arrays.items() if (own := as_base_class(name, x)) is not x}
    return call._replace(**plain) if plain else None


def _drawn_from_each(call: Call, function: Callable[..., Any]) -> Any:
    """Run a call with a list of generators: a batch, with one key from each."""
    if call.seed is not None:
        raise TypeError("seed, generator: expected one of the two, got both")
    library = common_library(call)
    name, array = next((name, x) for name, x in vectors_of(call).items() if not is_number(x))
    with keys_from(call.generator, library, library.device(name, array)) as keys:
        return call._replace(seed=keys, generator=None).repeated(function)


def _checked(call: Call) -> Call:
    """`call` with checked scalars and choices; TypeError or ValueError if one is wrong."""
    checked: dict[str, Any] = {"n": checked_count(call.n)}
    window = checked_window(count_of(checked["n"]), call.dim_offset, call.sample_offset)
    _, checked["dim_offset"], checked["sample_offset"] = window
    check_choices(call)
    checked["order"] = checked_order(call)
    checked["dtype"] = None if call.dtype is None else dtype_name(call.dtype)
    has_seed = call.seed is not None or call.operation == Operation.moments
    if has_seed and not (is_in_array(call.seed) or is_of_torch(call.seed, "Tensor")):
        checked_key(call.seed)  # Plans and operators check arrays and tensors.
    # Not `_replace`: PyTorch 2.11 loses its result at a graph break.
    return Call(*[checked.get(name, x) for name, x in zip(Call._fields, call, strict=True)])
