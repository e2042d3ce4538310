"""Functions that torch.compile must not follow, marked without importing PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["is_traced", "traced_as"]

Function = TypeVar("Function", bound=Callable[..., Any])


def traced_as(substitute: Callable[..., Any]) -> Callable[[Function], Function]:
    """Let torch.compile trace `substitute` in place of a function; other calls are not affected."""

    def mark(function: Any) -> Any:
        function._torchdynamo_inline = substitute
        return function

    return mark


@traced_as(lambda: True)
def is_traced() -> bool:
    """Whether torch.compile traces the call."""
    return False
