"""Calls without a plan: they are checked in full, and most of them get a plan.

Calls that PyTorch compiles or transforms become operator calls, without a plan. Calls with arrays or keys of JAX become
custom calls of XLA. `recorded` adds autograd to a plan. `dtensor` and `adopted` convert the arguments and call `sample`
or a plan. The modules are imported on first use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from .._arguments import check_choice, check_flag, dtype_name, is_constant
from .._backends import choose
from .._checks.operands import common_library
from .._libraries import BY_TYPE, HOST, is_number
from .._libraries.foreign import ForeignLibrary
from .._libraries.jax import is_jax
from .._plan import PLANS, Call, checked_window, make_plan
from .._randomness.generator import Generator, Key
from .._randomness.source import check_generator, checked_key
from .._tracing import is_traced_by_jax, traced_as

__all__ = ["draw_first", "is_compiling"]

Draw = Callable[..., Any]


@traced_as(lambda: True)
def is_compiling() -> bool:
    """Whether PyTorch traces the call, with or without torch.compile."""
    compiler = sys.modules.get("torch.compiler")
    return compiler is not None and bool(compiler.is_compiling())


def draw_first(call: Call, key: Hashable, draw: Draw) -> Any:
    """Draw a call that has no plan. `key` is the key for a new plan, or None; `draw` is `multisample.sample`."""
    compiling = is_compiling()
    dtensor = None if compiling else getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if dtensor is not None and any(isinstance(x, dtensor) for x in (call.mu, call.sigma, call.out)):
        from .dtensor import draw_dtensor

        return draw_dtensor(call, draw)
    if type(call.dim_offset) is not int or type(call.sample_offset) is not int:
        key = None  # Plans take Python's integers only.
    if not (isinstance(call.n, (int, np.integer)) and (call.dtype is None or is_constant(call.dtype))):
        key = None  # Tensors and other objects can change their index or dtype.
    if not compiling and _is_for_jax(call):
        from .jax import draw_jax

        return draw_jax(call, key)
    call = _checked(call)
    if compiling:
        from .compiled import draw_compiled

        return draw_compiled(call, draw)
    caller = common_library(call.mu, call.sigma, call.out)
    name, array = ("sigma", call.sigma) if is_number(call.mu) else ("mu", call.mu)
    device = caller.device(name, array)
    check_generator(call.generator, caller, device)
    backend = choose(call.backend, caller.name, device.kind)
    if isinstance(caller, ForeignLibrary):
        from .adopted import draw_adopted

        return draw_adopted(call, caller, device, backend)
    if caller is HOST:
        arrays: dict[str, Any] = {
            name: HOST.normalized(name, x)
            for name, x in (("mu", call.mu), ("sigma", call.sigma))
            if not (is_number(x) or type(x) in BY_TYPE)
        }
        if arrays:  # Lists and other sequences became arrays, for which a plan may exist.
            return draw(**call._replace(**arrays)._asdict())
        if backend.host_library != "numpy":
            from .adopted import draw_from_host

            return draw_from_host(call, backend)
    record = None
    if caller.name == "torch":
        from .._libraries.torch import plain
        from .recorded import recorder
        from .transformed import draw_transformed, is_transformed

        if is_transformed(call):
            return draw_transformed(call, backend)
        out = plain(call.out)
        if out is not call.out:  # A plan may exist for the base class.
            draw(**call._replace(out=out)._asdict())
            return call.out
        record = recorder(call, backend)
        caller.compile_key(backend)
    plan = make_plan(call, backend, caller, record)
    result = plan.run(call.mu, call.sigma, call.seed, call.generator, call.out, call.dim_offset, call.sample_offset)
    if key is not None:
        PLANS.put(key, plan)
    return result


def _is_for_jax(call: Call) -> bool:
    """Whether an argument is an array or a key of JAX, and JAX is to draw."""
    if "jax" not in sys.modules:
        return False
    seed = call.seed if isinstance(call.seed, Key) else (call.seed,)
    if not any(map(is_jax, (call.mu, call.sigma, call.n, *seed, call.dim_offset, call.sample_offset))):
        return False
    # The offset of a graph-safe generator is no operand of a program of JAX's.
    graph_safe = isinstance(call.generator, Generator) and call.generator.graph_safe
    return not graph_safe or is_traced_by_jax()


def _checked(call: Call) -> Call:
    """`call` with checked scalars and choices; TypeError or ValueError if one is wrong."""
    n, dim_offset, sample_offset = checked_window(call.n, call.dim_offset, call.sample_offset)
    check_choice("noise", call.noise, ("independent", "shared"))
    check_choice("layout", call.layout, ("dn", "nd"))
    for name, flag in (("fast_math", call.fast_math), ("validate", call.validate), ("antithetic", call.antithetic)):
        check_flag(name, flag)
    dtype = None if call.dtype is None else dtype_name(call.dtype)
    if call.seed is not None:
        if call.generator is not None:
            raise TypeError("seed, generator: expected one of the two, got both")
        checked_key(call.seed)
    # Not `_replace`: PyTorch 2.11 loses its result at a graph break.
    return Call(
        call.mu, call.sigma, n, call.backend, call.seed, call.generator, call.noise, dtype, call.out, call.fast_math,
        dim_offset, sample_offset, call.validate, call.layout, call.antithetic,
    )  # fmt: skip
