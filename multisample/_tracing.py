"""Functions that torch.compile must not trace, marked without importing PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["is_traced", "traced_as"]

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
