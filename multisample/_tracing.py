"""Whether torch.compile or JAX is tracing a call, found without importing either."""

import sys
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def traced_as(substitute: Callable[..., Any]) -> Callable[[Function], Function]:
    """Make torch.compile trace `substitute` in place of the decorated function; eager calls do not change."""

    def mark(function: Any) -> Any:
        function._torchdynamo_inline = substitute
        return function

    return mark


@traced_as(lambda: True)
def is_traced() -> bool:
    """Whether torch.compile is tracing the call."""
    return False


def _is_of_torch_in_graph(x: Any, name: str, package: str = "torch") -> bool:
    """Replaces `is_of_torch` under torch.compile, which cannot trace `sys.modules` while modules are imported."""
    import torch

    return isinstance(x, getattr(torch.nn if package == "torch.nn" else torch, name))


@traced_as(_is_of_torch_in_graph)
def is_of_torch(x: Any, name: str, package: str = "torch") -> bool:
    """Whether `x` is an instance of PyTorch's class `name`, without an import of PyTorch."""
    return isinstance(x, getattr(sys.modules.get(package), name, ()))


def _is_symbol_in_graph(x: Any) -> bool:
    """Replaces `is_symbol` under torch.compile, where the type of a symbolic integer is int."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return isinstance(x, int) and not has_static_value(x)


@traced_as(_is_symbol_in_graph)
def is_symbol(x: Any) -> bool:
    """Whether `x` is an integer that PyTorch or JAX knows only when the traced program runs, such as a dynamic size.

    Comparisons of a symbol become guards, or raise. So checks leave symbols to the launch, which checks every size.
    """
    if type(x) is int:
        return False
    shapes = sys.modules.get("jax.export")
    return is_of_torch(x, "SymInt") or (shapes is not None and shapes.is_symbolic_dim(x))


@traced_as(lambda length: not _is_symbol_in_graph(length) and length == 1)
def is_one(length: Any) -> bool:
    """Whether a length is known to be 1."""
    return type(length) is int and length == 1


SEEDLESS = (
    "seed: expected one where JAX traces the call (jit, vmap, grad and the like), got none: the numbers would be the"
    " same in every run of the program; pass seed=, such as a JAX key that is an argument of the function"
)


def is_traced_by_jax() -> bool:
    """Whether a transformation of JAX is tracing, whatever the arguments of the call are."""
    core = sys.modules.get("jax._src.core")
    return core is not None and not core.trace_state_clean()


@traced_as(lambda: None)
def refuse_jax() -> None:
    """ValueError while JAX traces: for calls that take their seed from a generator."""
    if is_traced_by_jax():
        raise ValueError(SEEDLESS)
