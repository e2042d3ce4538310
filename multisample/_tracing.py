"""Whether torch.compile or JAX is tracing a call, found without importing either."""

from __future__ import annotations

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
